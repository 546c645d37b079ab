"""Bodies of completions, and their choices."""

from __future__ import annotations

from typing import Any

import pytest

from triolet.core.output.logprobs import Logprob
from triolet.core.output.outputs import CompletionOutput, RequestOutput
from triolet.core.request.params import MIN_TEMPERATURE, SamplingParams
from triolet.core.request.request import FinishReason, RequestMetrics
from triolet.protocol.completions import CompletionRequest, Echo, TextChoice
from triolet.protocol.errors import WireError


def structured(**fields: Any) -> CompletionRequest:
    return CompletionRequest.of({"model": "m", "prompt": "hi", **fields})


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ((1, 2),)), ([[1], [2, 3]], ((1,), (2, 3)))],
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
    choice = TextChoice(index=0, num_top=None, echo=Echo(text="hi"))
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


# ------------------------------------------------------------------------- echo with log-probabilities


def echoed(prompt: str | None = "one two") -> Echo:
    """The echo of a prompt of three tokens, the first of which begins every prompt."""
    texts = {1: "<s>", 2: "one", 3: " two"}
    output = RequestOutput(
        request_id="r",
        prompt=prompt,
        prompt_token_ids=(1, 2, 3),
        outputs=(),
        finished=False,
        metrics=RequestMetrics(),
        prompt_logprobs=(
            None,
            {2: Logprob(-2.0, 2, "one"), 4: Logprob(-0.5, 1, "two")},
            {3: Logprob(-0.25, 1, " two")},
        ),
    )
    return Echo.of(output, lambda token_ids: "".join(texts[token_id] for token_id in token_ids))


def test_an_echo_has_the_log_probabilities_of_the_prompt_and_none_for_its_first_token() -> None:
    choice = TextChoice(index=0, num_top=1, echo=echoed(), generates=True)
    answer = choice.add(
        CompletionOutput(
            index=0,
            text="!",
            token_ids=(5,),
            logprobs=({5: Logprob(-1.0, 1, "!")},),
            finish_reason=FinishReason.LENGTH,
        )
    )
    assert answer["text"] == "one two!"
    assert answer["logprobs"] == {
        "tokens": ["<s>", "one", " two", "!"],
        "token_logprobs": [None, -2.0, -0.25, -1.0],
        "top_logprobs": [None, {"two": -0.5, "one": -2.0}, {" two": -0.25}, {"!": -1.0}],
        "text_offset": [0, 0, 3, 7],
    }


def test_tokens_are_named_by_their_ids_where_that_is_asked_for_and_offsets_stay_those_of_the_text() -> None:
    choice = TextChoice(index=0, num_top=1, echo=echoed(), shows_ids=True)
    logprobs = ({5: Logprob(-1.0, 2, "!"), 6: Logprob(-0.5, 1, "!")},)
    answer = choice.add(CompletionOutput(index=0, text="!", token_ids=(5,), logprobs=logprobs))
    assert answer["logprobs"] == {
        "tokens": ["token_id:1", "token_id:2", "token_id:3", "token_id:5"],
        "token_logprobs": [None, -2.0, -0.25, -1.0],
        "top_logprobs": [
            None,
            {"token_id:4": -0.5, "token_id:2": -2.0},
            {"token_id:3": -0.25},
            {"token_id:6": -0.5, "token_id:5": -1.0},
        ],
        "text_offset": [0, 0, 3, 7],
    }


def test_ids_of_the_prompt_come_with_the_first_piece_and_those_of_the_answer_with_each() -> None:
    choice = TextChoice(index=0, num_top=None, prompt_token_ids=(7, 8))
    pieces = [choice.add(CompletionOutput(index=0, text="a", token_ids=ids)) for ids in ((1,), (2, 3))]
    assert [piece["token_ids"] for piece in pieces] == [[1], [2, 3]]
    assert [piece.get("prompt_token_ids") for piece in pieces] == [[7, 8], None]
    bare = TextChoice(index=0, num_top=None).add(CompletionOutput(index=0, text="a", token_ids=(1,)))
    assert not {"token_ids", "prompt_token_ids"} & bare.keys()


def test_offsets_of_a_prompt_of_token_ids_count_its_special_tokens() -> None:
    choice = TextChoice(index=0, num_top=0, echo=echoed(prompt=None))
    answer = choice.add(CompletionOutput(index=0, text="", token_ids=()))
    assert answer["text"] == "<s>one two"
    assert answer["logprobs"]["text_offset"] == [0, 3, 6]


def test_an_echo_without_generation_ends_with_the_prompt() -> None:
    choice = TextChoice(index=0, num_top=1, echo=echoed(), generates=False)
    answer = choice.add(
        CompletionOutput(
            index=0,
            text="!",
            token_ids=(5,),
            logprobs=({5: Logprob(-1.0, 1, "!")},),
            finish_reason=FinishReason.STOP,
            stop_reason="!",
        )
    )
    assert (answer["text"], answer["finish_reason"], answer["stop_reason"]) == ("one two", "length", None)
    assert answer["logprobs"]["tokens"] == ["<s>", "one", " two"]


def test_of_tokens_with_the_same_text_the_likeliest_is_shown() -> None:
    choice = TextChoice(index=0, num_top=-1)
    position = {1: Logprob(-0.5, 1, "a"), 2: Logprob(-3.0, 2, "a")}
    answer = choice.add(CompletionOutput(index=0, text="a", token_ids=(1,), logprobs=(position,)))
    assert answer["logprobs"]["top_logprobs"] == [{"a": -0.5}]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_an_echo_with_logprobs_asks_the_engine_for_those_of_the_prompt(max_tokens: int) -> None:
    request = structured(echo=True, logprobs=3, max_tokens=max_tokens)
    params = request.params(SamplingParams())
    assert (params.prompt_logprobs, params.logprobs, params.max_tokens) == (3, 3, 1)
    assert request.generates == bool(max_tokens)


def test_nothing_to_generate_is_refused_without_an_echo() -> None:
    with pytest.raises(WireError) as error:
        structured(max_tokens=0).params(SamplingParams())
    assert error.value.param == "max_tokens"
