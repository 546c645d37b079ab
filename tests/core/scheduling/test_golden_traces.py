"""Stop strings, output by output: what vLLM hands out, and what we do, which is never later and ends the same.

One token is one letter. Unless a test says otherwise the answer is a, b, c, ... and the stop string "def".
"""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from tests.core.make import make_request, next_token
from triolet.core.journal import Journal
from triolet.core.output.detokenizer import HoldBack
from triolet.core.output.output_processor import OutputProcessor
from triolet.core.output.outputs import CompletionOutput
from triolet.core.request.params import RequestOutputKind, SamplingParams
from triolet.core.request.request import FinishReason
from triolet.core.request.tokenizer_interface import Tokenize, Tokenized

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
KINDS: tuple[HoldBack, ...] = ("exact", "blind")


class Letters:
    def tokenize(self, message: Tokenize) -> Tokenized:
        raise AssertionError("a feed only decodes")

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
        return "".join(chr(ord("a") + token_id) for token_id in token_ids)


@attrs.frozen
class Trace:
    """Every output of a stream whose reader takes each as soon as there is one."""

    outputs: list[CompletionOutput]

    @property
    def texts(self) -> list[str]:
        return [output.text for output in self.outputs]

    @property
    def lengths(self) -> list[int]:
        return [len(output.token_ids) for output in self.outputs]

    @property
    def last(self) -> CompletionOutput:
        return self.outputs[-1]


def trace(
    text: str,
    hold_back: HoldBack,
    *,
    kind: RequestOutputKind = DELTA,
    per_step: int = 1,
    end: FinishReason | None = None,
    stop: Any = "def",
    **params: Any,
) -> Trace:
    journal = Journal()
    asked = SamplingParams(output_kind=kind, max_tokens=100, stop=stop, **params)
    entry = journal.open(make_request((0,), params=asked, max_tokens=100))
    processor = OutputProcessor.open(entry, Letters(), arrival_time=0.0, hold_back=hold_back)
    outputs: list[CompletionOutput] = []
    for place in range(0, len(text), per_step):
        letters = text[place : place + per_step]
        for letter in letters:
            journal.commit(entry, next_token(entry, ord(letter) - ord("a")), 0.0)
        if end is not FinishReason.ABORT and place + per_step >= len(text) and end is not None:
            entry.finish(end)
        processor.advance()
        if processor.collector.has_output():
            outputs.extend(processor.collector.take().outputs)
        if processor.collector.finish_reason is not None:
            break
    if end is FinishReason.ABORT:
        entry.finish(end)
        processor.advance()
        outputs.extend(processor.collector.take().outputs)
    return Trace(outputs)


@pytest.mark.parametrize(
    ("hold_back", "texts"),
    [("blind", ["", "", "a", "b", "c", ""]), ("exact", ["a", "b", "c", "", "", ""])],
)
def test_a_stop_string_in_deltas(hold_back: HoldBack, texts: list[str]) -> None:
    got = trace("abcdefgh", hold_back)
    assert got.texts == texts
    assert got.lengths == [1] * 6
    assert (got.last.finish_reason, got.last.stop_reason) == ("stop", "def")


@pytest.mark.parametrize(
    ("hold_back", "texts"),
    [("blind", ["", "", "a", "ab", "abc", "abc"]), ("exact", ["a", "ab", "abc", "abc", "abc", "abc"])],
)
def test_a_stop_string_in_cumulative_outputs_which_do_not_change_later(
    hold_back: HoldBack, texts: list[str]
) -> None:
    got = trace("abcdefgh", hold_back, kind=CUMULATIVE)
    assert got.texts == texts
    assert got.lengths == [1, 2, 3, 4, 5, 6]
    assert got.last.token_ids == (0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize("hold_back", KINDS)
def test_a_stop_string_that_is_shown_is_waited_for_by_nothing(hold_back: HoldBack) -> None:
    got = trace("abcdefgh", hold_back, include_stop_str_in_output=True)
    assert got.texts == ["a", "b", "c", "d", "e", "f"]
    assert got.last.stop_reason == "def"


@pytest.mark.parametrize("hold_back", KINDS)
def test_a_final_output_has_all_of_it(hold_back: HoldBack) -> None:
    [only] = trace("abcdefgh", hold_back, kind=FINAL_ONLY).outputs
    assert (only.text, only.token_ids) == ("abc", (0, 1, 2, 3, 4, 5))
    assert (only.finish_reason, only.stop_reason) == ("stop", "def")


@pytest.mark.parametrize(
    ("hold_back", "texts"), [("blind", ["", "", "a", "b", "cde"]), ("exact", ["a", "b", "c", "", "de"])]
)
def test_what_is_held_comes_when_the_answer_ends_without_it(hold_back: HoldBack, texts: list[str]) -> None:
    got = trace("abcde", hold_back, end=FinishReason.LENGTH)
    assert (got.texts, got.last.finish_reason) == (texts, "length")


@pytest.mark.parametrize("hold_back", KINDS)
def test_a_stop_string_among_the_first_tokens_is_none(hold_back: HoldBack) -> None:
    got = trace("abcb", hold_back, stop=["b"], min_tokens=2)
    assert got.texts == ["a", "b", "c", ""]
    assert (got.last.finish_reason, got.last.stop_reason) == ("stop", "b")


@pytest.mark.parametrize(("hold_back", "texts"), [("blind", ["ab", "c"]), ("exact", ["abc", ""])])
def test_tokens_behind_the_stop_string_are_dropped(hold_back: HoldBack, texts: list[str]) -> None:
    got = trace("abcdefgh", hold_back, per_step=4)
    assert (got.texts, got.lengths) == (texts, [4, 2])
    assert got.last.finish_reason == "stop"


@pytest.mark.parametrize(
    ("hold_back", "texts"), [("blind", ["", "", "a", "bc"]), ("exact", ["a", "", "", "bc"])]
)
def test_an_abort_gives_what_is_held(hold_back: HoldBack, texts: list[str]) -> None:
    got = trace("abc", hold_back, stop="bcd", end=FinishReason.ABORT)
    assert got.texts == texts
    assert (got.last.token_ids, got.last.finish_reason) == ((), "abort")


@pytest.mark.parametrize("text", ["abcdefgh", "ddedef", "dedeedef", "abcde", "xxxdeyydexdef"])
@pytest.mark.parametrize("stop", ["def", ["def", "e"], ["ed", "ded"]])
@pytest.mark.parametrize("per_step", [1, 2, 5])
def test_exact_text_is_never_later_than_blind_text_and_the_whole_is_the_same(
    text: str, stop: Any, per_step: int
) -> None:
    exact, blind = (
        trace(text, hold_back, stop=stop, per_step=per_step, end=FinishReason.LENGTH) for hold_back in KINDS
    )
    assert "".join(exact.texts) == "".join(blind.texts)
    assert exact.lengths == blind.lengths
    for place in range(len(blind.texts)):
        assert len("".join(exact.texts[:place])) >= len("".join(blind.texts[:place]))
