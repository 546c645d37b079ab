"""What an operator allows: less than what a request can say, and named in the refusal."""

from __future__ import annotations

from typing import Any

import pytest

from triolet.config.engine import EngineConfig
from triolet.core.request.param_validation import MAX_ENTRIES, MAX_INT64
from triolet.core.request.params import MAX_N, SamplingParams
from triolet.errors import InvalidParams

DEFAULTS = EngineConfig()


def refusal(config: EngineConfig = DEFAULTS, vocab_size: int = 151_936, **fields: Any) -> InvalidParams:
    with pytest.raises(InvalidParams) as caught:
        config.request_limits.check(SamplingParams(**fields), vocab_size)
    return caught.value


@pytest.mark.parametrize(
    ("field", "limit", "make"),
    [
        ("stop", "max_stop_strings", lambda count: ["a"] * count),
        ("bad_words", "max_bad_words", lambda count: list(map(str, range(count)))),
        ("logit_bias", "max_logit_bias", lambda count: dict.fromkeys(range(count), 1.0)),
    ],
)
def test_lists_have_a_longest_length_that_can_be_configured(field: str, limit: str, make: Any) -> None:
    most = getattr(DEFAULTS, limit)
    DEFAULTS.request_limits.check(SamplingParams(**{field: make(most)}), 10)
    error = refusal(**{field: make(most + 1)})
    assert str(error) == f"{field} must have at most {most} entries ({limit}), got {most + 1}."
    assert error.field == field
    raised = EngineConfig.create(**{limit: MAX_ENTRIES})
    raised.request_limits.check(SamplingParams(**{field: make(most + 1)}), 10)
    none = EngineConfig.create(**{limit: 0})
    assert f"at most 0 entries ({limit})" in str(refusal(none, **{field: make(1)}))


def test_n_has_a_greatest_value_that_can_be_configured() -> None:
    assert str(refusal(n=129)) == "n must be at most 128 (max_n), got 129."
    EngineConfig(max_n=MAX_N).request_limits.check(SamplingParams(n=MAX_N), 10)


@pytest.mark.parametrize(("field", "kind"), [("logprobs", "sample"), ("prompt_logprobs", "prompt")])
def test_logprobs_have_a_greatest_number_that_can_be_configured(field: str, kind: str) -> None:
    def check(config: EngineConfig, number: int, vocab_size: int) -> None:
        fields: dict[str, Any] = {field: number}
        config.request_limits.check(SamplingParams(**fields), vocab_size)

    for number, vocab_size in ((0, 100), (20, 100), (-1, 20)):
        check(DEFAULTS, number, vocab_size)
    for number, wanted in ((21, 21), (MAX_INT64, MAX_INT64), (-1, 151_936)):
        with pytest.raises(InvalidParams) as caught:
            check(DEFAULTS, number, 151_936)
        sentence = (
            f"Requested {kind} logprobs of {wanted}, which is greater than max allowed: 20 (max_logprobs)"
        )
        assert (str(caught.value), caught.value.field, caught.value.value) == (sentence, field, number)
    check(EngineConfig(max_logprobs=-1), -1, 151_936)
    with pytest.raises(InvalidParams, match="greater than max allowed: 100"):
        check(EngineConfig(max_logprobs=-1), 101, 100)


def test_the_logprobs_of_a_long_prompt_are_not_kept_without_bound() -> None:
    limits = EngineConfig(max_logprobs=-1).request_limits
    limits.check_prompt(SamplingParams(prompt_logprobs=20), 190_000, 150_000)
    limits.check_prompt(SamplingParams(prompt_logprobs=-1), 27, 150_000)
    limits.check_prompt(SamplingParams(), 10**6, 150_000)
    with pytest.raises(InvalidParams) as caught:
        limits.check_prompt(SamplingParams(prompt_logprobs=-1), 28, 150_000)
    assert str(caught.value) == "prompt_logprobs must be at most 149795 for a prompt of 28 tokens, got -1."


@pytest.mark.parametrize("wanted", [None, 0])
def test_where_no_likely_tokens_are_allowed_a_request_may_still_want_none(wanted: int | None) -> None:
    limits = EngineConfig(max_logprobs=0).request_limits
    params = SamplingParams(logprobs=wanted, prompt_logprobs=wanted)
    limits.check(params, 100)
    limits.check_prompt(params, 7, 100)
    with pytest.raises(InvalidParams, match="greater than max allowed: 0"):
        limits.check(SamplingParams(logprobs=1), 100)
