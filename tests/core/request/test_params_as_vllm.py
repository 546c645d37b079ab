"""What vLLM 0.32.0 made of the same values: recorded there, held here.

Left out is what differs on purpose (docs/coming-from-vllm.md): types that vLLM lets through unlooked at are refused.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from tests.core.request.test_params import refusal
from triolet import SamplingParams
from triolet.core.request.params import RequestOutputKind
from triolet.core.request.repetition_detection import RepetitionDetectionParams
from triolet.errors import InvalidParams

NAN, INF = math.nan, math.inf

KEPT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 1e-12}, {"temperature": 0.01}),
    (
        {"temperature": 1e-6, "top_p": 0.1, "top_k": 50, "n": 2},
        {"temperature": 0.01, "top_p": 0.1, "top_k": 50},
    ),
    ({"temperature": -0.0, "top_k": 5, "min_p": 0.5}, {"temperature": 0, "top_k": 0, "min_p": 0.0}),
    ({"temperature": 0.0100001}, {"temperature": 0.0100001}),
    ({"seed": -1}, {"seed": None}),
    ({"thinking_token_budget": -1}, {"thinking_token_budget": None}),
    ({"thinking_token_budget": 0}, {"thinking_token_budget": 0}),
    ({"bad_words": ["x", "x", "y"]}, {"bad_words": ["x", "y"]}),
    ({"stop": ["a", "a"]}, {"stop": ["a", "a"]}),
    ({"stop_token_ids": [3, 3, 2]}, {"stop_token_ids": [3, 2]}),
    ({"stop_token_ids": {1, 2}}, {"stop_token_ids": [1, 2]}),
    ({"logprobs": True, "prompt_logprobs": True}, {"logprobs": 1, "prompt_logprobs": 1}),
    ({"logprobs": False, "prompt_logprobs": False}, {"logprobs": 0, "prompt_logprobs": 0}),
    ({"max_tokens": np.int64(3), "logprobs": np.uint8(2)}, {"max_tokens": 3, "logprobs": 2}),
    ({"temperature": np.float32(0.5), "top_p": np.float16(0.25)}, {"temperature": 0.5, "top_p": 0.25}),
    ({"min_p": Fraction(1, 2), "presence_penalty": np.int32(2)}, {"min_p": 0.5, "presence_penalty": 2}),
    ({"logit_bias": {np.int64(1): np.float32(2)}}, {"logit_bias": {1: 2.0}}),
    ({"max_tokens": None, "min_tokens": 2**31}, {"min_tokens": 2**31}),
]

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": NAN}, "temperature must be a finite number, got nan."),
    ({"temperature": -INF}, "temperature must be a finite number, got -inf."),
    ({"repetition_penalty": INF}, "repetition_penalty must be a finite number, got inf."),
    ({"presence_penalty": NAN}, "presence_penalty must be in [-2, 2], got nan."),
    ({"frequency_penalty": INF}, "frequency_penalty must be in [-2, 2], got inf."),
    ({"top_p": NAN}, "top_p must be in (0, 1], got nan."),
    ({"min_p": -INF}, "min_p must be in [0, 1], got -inf."),
    (
        {"thinking_token_budget": -2},
        "`thinking_token_budget` must be a non-negative integer or -1 for unlimited.",
    ),
    (
        {"repetition_detection": {"min_pattern_size": 3, "max_pattern_size": 2, "min_count": 2}},
        "max_pattern_size, min_pattern_size must be >=0, with min_pattern_size <= max_pattern_size. Set both ",
    ),
    (
        {"repetition_detection": {"max_pattern_size": 3, "min_count": 1}},
        "min_count must be >= 2 to detect repetitive patterns in engine output. If you do not wish to ",
    ),
]

REFUSED_AT_THE_REQUEST: list[tuple[dict[str, Any], str, object]] = [
    (
        {"logit_bias": {1000: 1, 1: 1, -1: 1}},
        "token_id(s) [1000, -1] in logit_bias contain out-of-vocab token ids. Vocabulary size: 1000",
        [1000, -1],
    ),
    (
        {"stop_token_ids": [999, 1000]},
        "token_id(s) [1000] in stop_token_ids contain out-of-vocab token ids. Vocabulary size: 1000",
        [1000],
    ),
    (
        {"logprob_token_ids": [-1]},
        "token_id(s) [-1] in logprob_token_ids contain out-of-vocab token ids. Vocabulary size: 1000",
        [-1],
    ),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids contains out-of-vocab token id!", [-1]),
    ({"allowed_token_ids": []}, "allowed_token_ids is not None and empty!", ()),
    (
        {"logprobs": 5, "logprob_token_ids": [1, 2]},
        "When both logprobs and logprob_token_ids are set, logprobs must equal len(logprob_token_ids). Got ",
        2,
    ),
]


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize(("fields", "expected"), KEPT)
@pytest.mark.filterwarnings("ignore:temperature")
def test_values_are_kept_as_vllm_keeps_them(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    assert {name: plain(getattr(params, name)) for name in expected} == expected


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_values_are_refused_in_vllms_words(fields: dict[str, Any], message: str) -> None:
    assert str(refusal(**fields)).startswith(message)


@pytest.mark.parametrize(("fields", "message", "value"), REFUSED_AT_THE_REQUEST)
def test_what_depends_on_the_model_is_refused_at_the_request(
    fields: dict[str, Any], message: str, value: object
) -> None:
    params = SamplingParams(**fields)
    with pytest.raises(InvalidParams) as caught:
        params.check_vocabulary(1000)
    assert str(caught.value).startswith(message)
    assert caught.value.parameter == next(reversed(fields))
    assert caught.value.value == value


def test_as_many_logprobs_as_named_tokens_are_one_wish() -> None:
    params = SamplingParams(logprobs=2, logprob_token_ids=[1, 2])
    params.check_vocabulary(1000)
    assert (params.logprobs, plain(params.logprob_token_ids)) == (2, [1, 2])
    with pytest.raises(InvalidParams, match="logprobs must equal len"):
        SamplingParams(logprobs=3, logprob_token_ids=[1, 2]).check_vocabulary(1000)


@pytest.mark.parametrize(
    ("bias", "expected"),
    [
        ({"1": 1, " 7 ": 2}, {1: 1, 7: 2}),
        ({1.5: 200.0}, {1: 100.0}),
        ({1: 100.1, 2: -100.1}, {1: 100.0, 2: -100.0}),
    ],
)
def test_from_optional_reads_biases_as_the_openai_protocol_writes_them(
    bias: dict[Any, float], expected: dict[int, float]
) -> None:
    assert SamplingParams.from_optional(logit_bias=bias).logit_bias == expected


def test_from_optional_names_the_keys_that_are_no_token_ids() -> None:
    with pytest.raises(InvalidParams) as caught:
        SamplingParams.from_optional(logit_bias={"a": 1, "2": 1, "0x1": 1})
    assert str(caught.value) == (
        "logit_bias contains key(s) that cannot be converted to integer token IDs: ['a', '0x1']"
    )
    assert caught.value.value == ["a", "0x1"]


@pytest.mark.parametrize("field", ["best_of", "guided_decoding", "prompt_adapter"])
def test_from_optional_refuses_an_unknown_field_even_without_a_value(field: str) -> None:
    with pytest.raises(TypeError, match=f"Unexpected keyword argument '{field}'"):
        SamplingParams.from_optional(**{field: None})


def test_from_optional_lets_vllms_own_fields_through_as_long_as_they_have_no_value() -> None:
    assert SamplingParams.from_optional(watermarking=None, skip_clone=False) == SamplingParams()
    with pytest.raises(TypeError, match="'trace_decode_token_ids'"):
        SamplingParams.from_optional(trace_decode_token_ids=[1])


def test_repetition_detection_can_be_written_in_order() -> None:
    params = RepetitionDetectionParams(3, 1, 2)
    assert (params.max_pattern_size, params.min_pattern_size, params.min_count) == (3, 1, 2)


def test_output_kinds_have_the_numbers_that_vllm_gives_them() -> None:
    kinds = [RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY]
    assert [RequestOutputKind(number) for number in (0, 1, 2)] == kinds


@pytest.mark.parametrize(
    ("fields", "wants"),
    [
        ({}, False),
        ({"prompt_logprobs": 3}, False),
        ({"logprobs": 0}, True),
        ({"logprobs": 3}, True),
        ({"logprob_token_ids": [5]}, True),
        ({"logprobs": 1, "logprob_token_ids": [5]}, True),
    ],
)
def test_an_answer_has_log_probabilities_by_number_or_by_name(fields: dict[str, Any], wants: bool) -> None:
    params = SamplingParams(**fields)
    params.check_vocabulary(100)
    assert params.wants_logprobs is wants
