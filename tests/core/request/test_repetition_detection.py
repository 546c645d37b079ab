from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.stage import Stage
from triolet.core.request.params import SamplingParams
from triolet.core.request.repetition_detection import (
    RepetitionDetectionParams,
    is_repeating,
)
from triolet.errors import InvalidParams


def repeats(text: str, largest: int, count: int, smallest: int = 0) -> bool:
    params = RepetitionDetectionParams(max_pattern_size=largest, min_pattern_size=smallest, min_count=count)
    return is_repeating([ord(letter) for letter in text], params)


@pytest.mark.parametrize(
    ("text", "largest", "count", "smallest", "is_found"),
    [
        ("", 3, 2, 0, False),
        ("a", 3, 2, 0, False),
        ("aa", 1, 2, 0, True),
        ("aa", 1, 3, 0, False),
        ("aaa", 3, 2, 2, False),
        ("aaaa", 3, 2, 2, True),
        ("xabab", 2, 2, 0, True),
        ("xabab", 1, 2, 0, False),
        ("ababx", 2, 2, 0, False),
        ("abcabcabc", 3, 3, 0, True),
        ("zbcabcabc", 3, 3, 0, False),
        ("aa", 0, 0, 0, False),
    ],
)
def test_a_pattern_counts_that_ends_the_answer_often_enough(
    text: str, largest: int, count: int, smallest: int, is_found: bool
) -> None:
    assert repeats(text, largest, count, smallest) == is_found


@given(st.text("ab", max_size=30), st.integers(1, 6), st.integers(2, 4), st.integers(0, 6))
def test_it_is_what_a_look_at_every_pattern_says(text: str, largest: int, count: int, smallest: int) -> None:
    smallest = min(smallest, largest)
    sizes = range(max(smallest, 1), largest + 1)
    expected = any(len(text) >= size * count and text.endswith(text[-size:] * count) for size in sizes)
    assert repeats(text, largest, count, smallest) == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"max_pattern_size": -1, "min_count": 2},
        {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2},
        {"max_pattern_size": 2, "min_pattern_size": -1, "min_count": 2},
        {"max_pattern_size": 2, "min_count": 1},
        {"max_pattern_size": 1025, "min_count": 2},
        {"max_pattern_size": 2.0, "min_count": 2},
        {"max_pattern_size": 2, "min_count": 2**63},
        {"size": 2},
        [],
        "2",
    ],
)
def test_anything_else_is_refused_by_name(fields: Any) -> None:
    with pytest.raises(InvalidParams) as caught:
        SamplingParams(repetition_detection=fields)
    assert caught.value.field in ("max_pattern_size", "min_pattern_size", "min_count", "repetition_detection")


def test_a_pattern_has_1024_tokens_at_most_and_a_rule_that_is_made_already_is_kept() -> None:
    rule = RepetitionDetectionParams(max_pattern_size=1024, min_count=2)
    assert SamplingParams(repetition_detection=rule).repetition_detection == rule


def test_without_fields_the_rule_is_off_as_in_vllm() -> None:
    rule = RepetitionDetectionParams()
    assert (rule.max_pattern_size, rule.min_pattern_size, rule.min_count) == (0, 0, 0)
    assert not is_repeating([1, 1, 1, 1], rule)


def test_an_answer_ends_where_it_begins_to_go_round() -> None:
    stage = Stage()
    detection = {"max_pattern_size": 2, "min_count": 3}
    entry = stage.add("a", 3, params={"repetition_detection": detection})
    for token in (4, 7, 8, 7, 8, 7, 8, 7):
        stage.step(a=token)
    assert entry.output_token_ids == [4, 7, 8, 7, 8, 7, 8]
    assert (entry.finish_reason, entry.stop_reason) == ("repetition", "repetition_detected")


@pytest.mark.parametrize(("min_tokens", "max_tokens", "reason"), [(0, 2, "length"), (5, 9, "repetition")])
def test_length_comes_before_it_and_min_tokens_keeps_it_waiting(
    min_tokens: int, max_tokens: int, reason: str
) -> None:
    stage = Stage()
    params = {"repetition_detection": {"max_pattern_size": 1, "min_count": 2}, "min_tokens": min_tokens}
    entry = stage.add("a", 3, max_tokens=max_tokens, params=params)
    while stage.step(a=5):
        pass
    assert (entry.finish_reason, len(entry.output_token_ids)) == (reason, max(min_tokens, 2))
