"""One token is one letter here: token 0 is 'a', token 25 is 'z'; 26 is a special token, and ends the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.make import make_request, next_token
from triolet.core.journal import Journal
from triolet.core.metrics.iteration_stats import FinishedRequest
from triolet.core.output.detokenizer import Piece
from triolet.core.output.logprobs import Logprob
from triolet.core.output.output_processor import OutputProcessor, decoder, pieces
from triolet.core.output.outputs import CompletionOutput
from triolet.core.request.params import RequestOutputKind, SamplingParams
from triolet.core.request.request import FinishReason
from triolet.core.request.tokenizer_interface import Tokenize, Tokenized
from triolet.core.step_plan import TokenLogprobs

EOS = 26
ALPHABET = [*map(chr, range(ord("a"), ord("z") + 1)), "</s>"]


@attrs.define
class Letters:
    """A tokenizer that panics at a token of the test's choice."""

    panics_at: int | None = None

    def tokenize(self, message: Tokenize) -> Tokenized:
        raise AssertionError("a feed only decodes")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        if self.panics_at in token_ids:
            raise RuntimeError("a panic in foreign code")
        return "".join(ALPHABET[i] for i in token_ids if not (skip_special_tokens and i == EOS))


@attrs.define
class Story:
    journal: Journal
    processor: OutputProcessor
    tokenizer: Letters | None

    def say(self, text: str, *, end: FinishReason | None = None, stop_reason: int | None = None) -> bool:
        """Commit the letters (`.` is the end-of-sequence token), end the answer, deliver."""
        entry = self.processor.entry
        for letter in text:
            token_id = EOS if letter == "." else ord(letter) - ord("a")
            self.journal.commit(
                entry, next_token(entry, token_id, TokenLogprobs((token_id,), (-1.0,), 1)), 0.0
            )
        if end is not None:
            entry.finish(end, stop_reason)
        return self.processor.advance()

    def read(self) -> CompletionOutput:
        (completion,) = self.processor.collector.take().outputs
        return completion

    def text(self) -> str:
        return self.processor.collector.text


def story(
    *, tokenizer: bool = True, kind: RequestOutputKind = RequestOutputKind.DELTA, **params: Any
) -> Story:
    journal = Journal()
    asked = SamplingParams(output_kind=kind, max_tokens=100, **params)
    request = make_request((0,), params=asked, max_tokens=100, eos_token_ids=(EOS,))
    entry = journal.open(request)
    letters = Letters() if tokenizer else None
    return Story(journal, OutputProcessor.open(entry, letters, arrival_time=0.0), letters)


# -------------------------------------------------------------------------------- plain answers


def test_new_tokens_become_text_once() -> None:
    tale = story()
    assert tale.say("ab") is False
    assert (tale.read().text, tale.processor.collector.num_tokens) == ("ab", 2)
    assert tale.say("") is False
    assert not tale.processor.collector.has_output()
    tale.say("c")
    assert tale.read().token_ids == (2,)


@pytest.mark.parametrize("reason", [reason for reason in FinishReason if reason is not FinishReason.STOP])
def test_the_end_of_the_journals_answer_is_the_end_of_the_feed(reason: FinishReason) -> None:
    tale = story()
    assert tale.say("ab", end=reason) is False
    completion = tale.read()
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("ab", reason, None)


def test_an_end_without_new_tokens_is_told_too() -> None:
    tale = story()
    tale.say("ab")
    tale.read()
    tale.say("", end=FinishReason.ABORT)
    completion = tale.read()
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("", (), "abort")


def test_after_the_end_nothing_is_delivered() -> None:
    tale = story(stop="b")
    assert tale.say("ab") is True
    tale.read()
    assert tale.say("c", end=FinishReason.STOP) is False
    assert not tale.processor.collector.has_output()
    assert tale.processor.collector.num_tokens == 2


def test_a_model_without_a_tokenizer_gives_tokens_and_no_text() -> None:
    tale = story(tokenizer=False, logprobs=0)
    tale.say("ab", end=FinishReason.LENGTH)
    completion = tale.read()
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("", (0, 1), "length")
    assert completion.logprobs is not None
    assert [
        position[token].decoded_token for position, token in zip(completion.logprobs, (0, 1), strict=True)
    ] == [
        None,
        None,
    ]


class Spaced(Letters):
    """Puts a space before every token but the first, as decoders of whole words do."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return " ".join(ALPHABET[i] for i in token_ids if not (skip_special_tokens and i == EOS))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "a </s> </s> b </s> c"),
        ({"spaces_between_special_tokens": False}, "a </s></s> b </s> c"),
    ],
)
def test_special_tokens_that_are_shown_may_stand_without_spaces(fields: dict[str, Any], text: str) -> None:
    tale = story(skip_special_tokens=False, **fields)
    tale.processor.tokenizer = Spaced()
    tale.say("a..b.c", end=FinishReason.LENGTH)
    assert tale.text().strip() == text


def test_an_answer_that_is_not_detokenized_has_log_probabilities_without_texts_as_in_vllm() -> None:
    tale = story(detokenize=False, logprobs=0)
    tale.say("b")
    completion = tale.read()
    assert (completion.text, completion.token_ids) == ("", (1,))
    assert completion.logprobs is not None
    assert completion.logprobs[0][1] == Logprob(-1.0, 1, None)


class Knowing(Letters):
    """Knows each letter by itself, and says so in capitals."""

    def pieces(self, *, skip_special_tokens: bool) -> Piece:
        return lambda token_id: ALPHABET[token_id].upper() if token_id != EOS else None


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "ABC"),
        ({"spaces_between_special_tokens": False}, "ABC"),  # there are none between tokens that are skipped
        ({"skip_special_tokens": False}, "ABC</s>"),
        ({"skip_special_tokens": False, "spaces_between_special_tokens": False}, "abc</s>"),
        ({"detokenize": False}, ""),
    ],
)
def test_what_a_tokenizer_knows_of_single_tokens_is_taken_where_they_are_shown_as_it_shows_them(
    fields: dict[str, Any], text: str
) -> None:
    tale = story(**fields)
    tale.processor.tokenizer = Knowing()
    tale.say("abc.", end=FinishReason.LENGTH)
    assert tale.text() == text


# --------------------------------------------------------------------------- what ends the answer


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({}, "ab"),
        ({"skip_special_tokens": False}, "ab"),
        ({"include_stop_str_in_output": True}, "ab"),  # still a special token, and those are skipped
        ({"include_stop_str_in_output": True, "skip_special_tokens": False}, "ab</s>"),
    ],
)
def test_the_token_that_ended_the_answer_is_in_its_ids_and_not_in_its_text(
    params: dict[str, Any], text: str
) -> None:
    tale = story(**params)
    tale.say("ab.", end=FinishReason.STOP)
    completion = tale.read()
    assert (completion.text, completion.token_ids) == (text, (0, 1, EOS))
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abc")])
def test_a_stop_token_is_hidden_and_named(include: bool, text: str) -> None:
    tale = story(include_stop_str_in_output=include, stop_token_ids=[2])
    tale.say("abc", end=FinishReason.STOP, stop_reason=2)
    completion = tale.read()
    assert (completion.text, completion.token_ids, completion.stop_reason) == (text, (0, 1, 2), 2)


def test_an_answer_that_its_form_has_ended_keeps_its_last_token() -> None:
    tale = story()
    tale.say("abc", end=FinishReason.STOP)
    assert tale.read().text == "abc"


def test_an_end_by_length_hides_nothing() -> None:
    tale = story(skip_special_tokens=False)
    tale.say("ab.", end=FinishReason.LENGTH)
    assert tale.read().text == "ab</s>"


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        (RequestOutputKind.DELTA, ["a", "b", "c", "", "", ""]),
        (RequestOutputKind.CUMULATIVE, ["a", "ab", "abc", "abc", "abc", "abc"]),
    ],
)
def test_a_stop_string_is_held_back_and_then_ends_the_answer(
    kind: RequestOutputKind, texts: list[str]
) -> None:
    tale = story(kind=kind, stop=["def"])
    got, wanted = [], []
    for letter in "abcdef":
        wanted.append(tale.say(letter))
        got.append(tale.read())
    assert [completion.text for completion in got] == texts
    assert wanted == [False] * 5 + [True]
    assert (got[-1].finish_reason, got[-1].stop_reason) == ("stop", "def")
    assert tale.processor.collector.num_tokens == 6


def test_a_stop_string_can_be_shown() -> None:
    tale = story(stop=["def"], include_stop_str_in_output=True)
    assert tale.say("abcdefgh") is True
    assert (tale.text(), tale.processor.collector.num_tokens) == ("abcdef", 6)


def test_tokens_behind_the_stop_string_are_dropped() -> None:
    tale = story(stop=["b"])
    assert tale.say("abcd", end=FinishReason.LENGTH) is True
    completion = tale.read()
    assert (completion.text, completion.token_ids) == ("a", (0, 1))
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "b")


def test_before_min_tokens_a_stop_string_is_text() -> None:
    tale = story(stop=["b"], min_tokens=2)
    assert [tale.say(letter) for letter in "abcb"] == [False, False, False, True]
    assert (tale.text(), tale.processor.collector.num_tokens) == ("abc", 4)


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.ABORT, FinishReason.DEADLINE])
def test_held_text_comes_out_when_the_answer_ends_otherwise(reason: FinishReason) -> None:
    tale = story(stop=["def"])
    tale.say("abcde")
    assert tale.read().text == "abc"
    tale.say("", end=reason)
    completion = tale.read()
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("de", (), reason)


# ---------------------------------------------------------------------------------- after a crash


@given(
    steps=st.lists(st.tuples(st.text("abcd.", max_size=3), st.booleans(), st.booleans()), max_size=10),
    end=st.sampled_from([FinishReason.LENGTH, FinishReason.ABORT, FinishReason.STOP]),
    params=st.fixed_dictionaries(
        {
            "stop": st.sampled_from([[], ["ab"], ["abc", "ca"], ["aa"]]),
            "include_stop_str_in_output": st.booleans(),
            "skip_special_tokens": st.booleans(),
            "min_tokens": st.integers(0, 4),
        }
    ),
)
def test_an_answer_is_delivered_exactly_once_however_often_the_text_is_forgotten(
    steps: list[tuple[str, bool, bool]], end: FinishReason, params: dict[str, Any]
) -> None:
    undisturbed, crashing = story(**params), story(**params)
    read_text, read_ids = "", list[int]()
    steps = [*steps, ("a", False, True)]
    for index, (text, is_forgotten, is_read) in enumerate(steps):
        reason = end if index == len(steps) - 1 else None
        if is_forgotten:
            crashing.processor.forget_text()
        assert crashing.say(text, end=reason) == undisturbed.say(text, end=reason)
        if is_read:
            completion = crashing.read()
            read_text += completion.text
            read_ids += completion.token_ids
    assert read_text == crashing.text() == undisturbed.text()
    assert (
        read_ids == undisturbed.processor.entry.output_token_ids[: undisturbed.processor.collector.num_tokens]
    )
    assert (
        crashing.processor.collector.finish_reason
        == undisturbed.processor.collector.finish_reason
        is not None
    )


def test_a_panic_while_the_text_is_built_again_loses_nothing_and_repeats_nothing() -> None:
    tale = story()
    tale.say("ab")
    tale.processor.forget_text()
    assert tale.tokenizer is not None
    tale.tokenizer.panics_at = 1
    with pytest.raises(RuntimeError, match="panic"):
        tale.say("c")
    tale.tokenizer.panics_at = None
    tale.say("d")
    assert (tale.text(), tale.processor.collector.num_tokens) == ("abcd", 4)


# ---------------------------------------------------------------------------- what is decoded, and how


def test_what_was_delivered_is_not_decoded_again() -> None:
    tale = story()
    tale.say("abcdefghijklmnop")
    assert tale.tokenizer is not None
    tale.tokenizer.panics_at = 0
    tale.say("q")
    assert tale.text() == "abcdefghijklmnopq"


def test_the_end_of_an_answer_is_no_token() -> None:
    tale = story()
    tale.say("ab", end=FinishReason.LENGTH)
    assert tale.processor.collector.num_tokens == 2


def test_log_probabilities_show_special_tokens_that_the_text_skips() -> None:
    tale = story(logprobs=0)
    tale.say(".")
    completion = tale.read()
    assert completion.logprobs is not None
    assert completion.logprobs[0][EOS].decoded_token == "</s>"


def test_special_tokens_are_apart_unless_spaces_between_them_are_not_wanted() -> None:
    spaced = decoder(Spaced(), skip_special_tokens=False)
    unspaced = decoder(Spaced(), skip_special_tokens=False, is_spaced=False)
    assert (spaced([0, EOS, EOS, 1]), unspaced([0, EOS, EOS, 1])) == ("a </s> </s> b", "a </s></s> b")
    assert pieces(Knowing(), skip_special_tokens=False)(0) == "A"


def test_the_statistics_of_a_request_at_its_end_are_its_own_and_name_it_as_its_caller_does() -> None:
    journal = Journal()
    request = make_request(
        (1, 2, 3), request_id="r", max_tokens=9, num_answers=2, arrival_s=2.0, trace_headers=(("a", "b"),),
        params=SamplingParams(temperature=0.5, top_p=0.25),
    )  # fmt: skip
    entry = journal.open(request)
    entry.num_cached_tokens = 1
    processor = OutputProcessor.open(entry, None, arrival_time=7.0)
    finished = processor.finished_request(FinishReason.LENGTH, 5.0)
    assert finished == FinishedRequest(
        finish_reason=FinishReason.LENGTH, metrics=processor.collector.metrics(), num_prompt_tokens=3,
        num_cached_tokens=1, max_tokens=9, n=2, e2e_latency=3.0, request_id="r", temperature=0.5, top_p=0.25,
        trace_headers=(("a", "b"),),
    )  # fmt: skip
    assert finished.metrics.arrival_time == 7.0
    child = journal.open(make_request(request_id="1_r", parent_id="r"))
    of_child = OutputProcessor.open(child, None, arrival_time=7.0).finished_request(FinishReason.STOP, 5.0)
    assert of_child.request_id == "r"
