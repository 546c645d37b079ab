from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triolet.core.output.detokenizer import HoldBack, StopMatcher
from triolet.errors import InvalidParams

# Few letters, so that stop strings overlap, repeat and contain each other.
letters = st.text("ab", max_size=12)
stops = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)
pieces_with_leave = st.lists(st.tuples(st.text("ab", max_size=3), st.booleans()), max_size=12)


def first_match(pieces: Sequence[tuple[str, bool]], stop: Sequence[str]) -> tuple[int, str | None]:
    """The truth, slowly: end and text of the match completed first, the first in the list if several are."""
    text, allowed = "".join(piece for piece, _ in pieces), [may for piece, may in pieces for _ in piece]
    for end, may_stop in enumerate(allowed, 1):
        for candidate in stop:
            if may_stop and text[:end].endswith(candidate):
                return end, candidate
    return len(text), None


def expected(pieces: Sequence[tuple[str, bool]], stop: Sequence[str], *, include: bool) -> str:
    text = "".join(piece for piece, _ in pieces)
    end, matched = first_match(pieces, stop)
    if matched is None:
        return text
    return text[:end] if include else text[: end - len(matched)]


def longest_tail(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of `text` with which some stop string begins and does not end."""
    begins = [s[:n] for s in stop for n in range(1, len(s)) if text.endswith(s[:n])]
    return max(map(len, begins), default=0)


@given(
    pieces=pieces_with_leave, stop=stops, include=st.booleans(), hold_back=st.sampled_from(["exact", "blind"])
)
def test_the_text_ends_at_the_match_completed_first(
    pieces: list[tuple[str, bool]], stop: list[str], include: bool, hold_back: HoldBack
) -> None:
    matcher = StopMatcher(stop, include_in_output=include, hold_back=hold_back)
    shown = "".join(matcher.feed(piece, may_stop=may_stop) for piece, may_stop in pieces)
    assert matcher.matched == first_match(pieces, stop)[1]
    assert shown + matcher.flush() == expected(pieces, stop, include=include)


@given(text=letters, stop=stops)
def test_exactly_what_may_begin_a_stop_string_is_held_back(text: str, stop: list[str]) -> None:
    matcher = StopMatcher(stop)
    shown = ""
    for end, char in enumerate(text, 1):
        shown += matcher.feed(char)
        if matcher.matched is not None:
            break
        assert len(shown) == end - longest_tail(text[:end], stop)


@given(text=letters, stop=stops)
def test_blind_hold_back_keeps_the_longest_stop_strings_length_less_one(text: str, stop: list[str]) -> None:
    matcher = StopMatcher(stop, hold_back="blind")
    held = max(map(len, stop), default=1) - 1
    shown = ""
    for end, char in enumerate(text, 1):
        shown += matcher.feed(char)
        if matcher.matched is not None:
            break
        assert len(shown) == max(0, end - held)


@given(text=letters, stop=stops)
def test_nothing_is_held_back_if_the_stop_string_is_shown_too(text: str, stop: list[str]) -> None:
    matcher = StopMatcher(stop, include_in_output=True)
    for char in text:
        assert matcher.feed(char) == ("" if matcher.matched and not matcher.matched.endswith(char) else char)
        if matcher.matched is not None:
            break
    assert matcher.flush() == ""


@pytest.mark.parametrize(
    ("stop", "text", "shown", "matched"),
    [
        (["bc", "abcd"], "xabcd", "xa", "bc"),  # completed earlier, though it begins later
        (["abc", "bc"], "xabc", "x", "abc"),  # completed together: the first in the list
        (["bc", "abc"], "xabc", "xa", "bc"),
        (["aab"], "aaab", "a", "aab"),  # the match begins inside a failed one
        (["abab"], "ababab", "", "abab"),
        (["END"], "the EN is not the END.", "the EN is not the ", "END"),
        (["👍🏽"], "fine 👍🏽!", "fine ", "👍🏽"),
        (["ab", "ab"], "cab", "c", "ab"),
    ],
)
def test_which_stop_string_wins(stop: list[str], text: str, shown: str, matched: str) -> None:
    for size in range(1, len(text) + 1):
        matcher = StopMatcher(stop)
        parts = [matcher.feed(text[begin : begin + size]) for begin in range(0, len(text), size)]
        assert ("".join(parts), matcher.matched) == (shown, matched)


def test_text_that_may_not_end_the_answer_may_begin_a_stop_string() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.feed("xa", may_stop=False) == "x"
    assert matcher.feed("b") == ""
    assert matcher.matched == "ab"


def test_a_stop_string_completed_too_early_is_ordinary_text() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.feed("xab", may_stop=False) == "xab"
    assert matcher.feed("c") == "c"
    assert matcher.matched is None


def test_a_stop_string_completed_too_early_may_overlap_one_that_counts() -> None:
    matcher = StopMatcher(["aba"])
    assert matcher.feed("xaba", may_stop=False) == "xab"
    assert matcher.feed("ba") == ""
    assert matcher.matched == "aba"


def test_a_tail_that_turns_out_harmless_is_released() -> None:
    matcher = StopMatcher(["<|end|>"])
    assert [matcher.feed(piece) for piece in ["a <", "|en", "joy|", ">"]] == ["a ", "", "<|enjoy|", ">"]


def test_after_a_match_everything_is_dropped() -> None:
    matcher = StopMatcher(["b"])
    assert matcher.feed("abc") == "a"
    assert matcher.feed("d") == ""
    assert matcher.flush() == ""


def test_without_stop_strings_everything_passes() -> None:
    matcher = StopMatcher([])
    assert matcher.feed("anything") == "anything"
    assert (matcher.flush(), matcher.matched) == ("", None)


def test_flush_gives_the_held_text_once() -> None:
    matcher = StopMatcher(["abc"])
    assert matcher.feed("xab") == "x"
    assert [matcher.flush(), matcher.flush()] == ["ab", ""]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidParams, match="stop cannot contain an empty string") as caught:
        StopMatcher(["a", ""])
    assert caught.value.field == "stop"


def test_text_that_almost_matches_all_the_time_costs_no_more_than_its_length() -> None:
    # Naive matching of a^n b against a^m compares n * m characters: 10^10 here.
    matcher = StopMatcher(["a" * 50_000 + "b"])
    shown = matcher.feed("a" * 200_000)
    assert len(shown) == 150_000
    assert shown + matcher.flush() == "a" * 200_000
