"""Bodies of completions, and their choices."""

from __future__ import annotations

from typing import Any

import pytest

from triolet.core.output.logprobs import Logprob
from triolet.core.output.outputs import CompletionOutput
from triolet.core.request.params import MIN_TEMPERATURE, SamplingParams
from triolet.core.request.status import FinishReason
from triolet.protocol.completions import CompletionRequest, TextChoice
from triolet.protocol.errors import WireError


def structured(**fields: Any) -> CompletionRequest:
    return CompletionRequest.of({"model": "m", "prompt": "hi", **fields})


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ([1, 2],)), ([[1], [2, 3]], ([1], [2, 3]))],
)
def test_a_prompt_is_a_text_or_tokens_or_several_of_them(prompt: Any, prompts: tuple[Any, ...]) -> None:
    assert structured(prompt=prompt).prompt.prompts == prompts


@pytest.mark.parametrize("prompt", [[], [1, "a"], [[1], "a"], [True], {"text": "a"}, 3, ["a"] * 129])
def test_other_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(WireError) as error:
        structured(prompt=prompt)
    assert error.value.param == "prompt"


def test_an_answer_has_sixteen_tokens_unless_it_is_said() -> None:
    defaults = SamplingParams(max_tokens=None, min_tokens=0)
    assert structured().params(defaults).max_tokens == 16
    assert structured(max_tokens=3).params(defaults).max_tokens == 3


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"logprobs": -2}, "logprobs", "invalid_value"),
        ({"logprobs": 1, "echo": True}, "logprobs", "unsupported_parameter"),
        ({"suffix": "x"}, "suffix", "unsupported_parameter"),
        ({"best_of": 3}, "best_of", "unsupported_parameter"),
        ({"seed": "x"}, "seed", "invalid_value"),
    ],
)
def test_what_is_wrong_is_refused_by_name(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(WireError) as error:
        structured(**fields).params(SamplingParams())
    assert (error.value.param, error.value.code) == (param, code)


def test_an_echo_comes_once_and_first() -> None:
    choice = TextChoice(index=0, num_top=None, echo="hi")
    first = choice.add(CompletionOutput(index=0, text=" a", token_ids=(1,)))
    last = choice.add(CompletionOutput(index=0, text=" b", token_ids=(2,), finish_reason=FinishReason.LENGTH))
    assert (first["text"], last["text"], last["finish_reason"]) == ("hi a", " b", "length")


def test_offsets_go_on_from_chunk_to_chunk() -> None:
    choice = TextChoice(index=0, num_top=1)
    pieces = [
        choice.add(
            CompletionOutput(index=0, text=text, token_ids=(1,), logprobs=({1: Logprob(-0.5, 1, text)},))
        )
        for text in ("one", " two")
    ]
    assert [piece["logprobs"]["text_offset"] for piece in pieces] == [[0], [3]]
    assert pieces[1]["logprobs"]["top_logprobs"] == [{" two": -0.5}]


def test_a_temperature_too_small_to_divide_by_is_raised_without_a_warning(
    recwarn: pytest.WarningsRecorder,
) -> None:
    params = structured(temperature=1e-9).params(SamplingParams())
    assert params.temperature == MIN_TEMPERATURE
    assert not recwarn.list
    assert structured(temperature=0).params(SamplingParams()).temperature == 0
