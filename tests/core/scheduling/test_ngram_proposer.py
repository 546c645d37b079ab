"""Guesses from what was said before: the latest of the places that agree the furthest, within a window."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from triolet.core.scheduling import ngram_proposer
from triolet.core.scheduling.ngram_proposer import NgramIndex


def index_of(token_ids: str | list[int], shortest: int = 2, window: int = 100) -> NgramIndex:
    index = NgramIndex(shortest, window)
    index.extend(map(ord, token_ids) if isinstance(token_ids, str) else token_ids)
    return index


def guess(text: str, num_tokens: int = 4, **fields: int) -> str:
    return "".join(map(chr, index_of(text, **fields).guess(num_tokens)))


def test_what_followed_the_last_time_is_guessed() -> None:
    assert guess("the quick brown fox. the qu", 5) == "ick b"


def test_nothing_is_guessed_of_a_new_end() -> None:
    assert guess("") == guess("a") == guess("abcdef") == guess("abcab", shortest=3) == ""
    assert guess("", shortest=1) == ""


def test_of_several_places_the_one_that_agrees_the_furthest_counts() -> None:
    assert guess("xabc1 yabc2 xabc", 1) == "1"


def test_of_places_that_agree_alike_the_latest_counts() -> None:
    assert guess("abc1 abc2 abc", 1) == "2"


def test_where_32_tokens_agree_more_of_them_do_not_count() -> None:
    line = list(range(100, 140))
    assert index_of([*line, 1, *line[-32:], 2, *line], window=200).guess(1) == (2,)
    assert index_of([*line, 1, *line[-31:], 2, *line], window=200).guess(1) == (1,)


def test_the_last_eight_places_are_looked_at() -> None:
    assert guess("xab1" + "".join(f"{letter}ab{letter}" for letter in "cdefghi") + "xab", 1) == "1"
    assert guess("xab1" + "".join(f"{letter}ab{letter}" for letter in "cdefghij") + "xab", 1) == "j"


def test_a_text_that_goes_round_in_a_circle_is_guessed_to_go_on() -> None:
    assert guess("so far: ababab", 7) == "abababa"
    assert guess("aaaa", 3) == "aaa"


def test_what_has_left_the_window_is_forgotten() -> None:
    assert guess("ab1" + "-+" * 8 + "ab", 1, window=40) == "1"
    assert guess("ab1" + "-+" * 32 + "ab", 1, window=40) == ""


def _looked_up(token_ids: list[int], shortest: int, window: int) -> int | None:
    """The same by looking everywhere: where the text went on."""
    text = token_ids[-window:]
    ends = [end for end in range(shortest, len(text)) if text[end - shortest : end] == text[-shortest:]]
    best, most = None, 0
    for end in list(reversed(ends))[: ngram_proposer.MAX_CANDIDATES]:
        length = shortest
        while (
            length < min(ngram_proposer.LONGEST, end)
            and text[end - 1 - length] == text[len(text) - 1 - length]
        ):
            length += 1
        if length > most and most < ngram_proposer.LONGEST:
            best, most = end, length
    return None if best is None else text[best]


@given(st.lists(st.integers(0, 3), max_size=200), st.integers(1, 4), st.integers(33, 60))
def test_the_chains_find_what_looking_everywhere_finds(
    token_ids: list[int], shortest: int, window: int
) -> None:
    index = NgramIndex(shortest, window)
    for length, token_id in enumerate(token_ids, start=1):
        index.extend([token_id])
        looked_up = _looked_up(token_ids[:length], shortest, window)
        assert index.guess(1) == (() if looked_up is None else (looked_up,))


def test_memory_does_not_grow_with_the_text() -> None:
    index = index_of(list(range(5000)), window=64)
    assert index.num_tokens == 5000
    assert max(len(index._tokens), len(index._before), len(index._latest)) <= 64
