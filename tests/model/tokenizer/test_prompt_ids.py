"""Ids of a prompt that is encoded in parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from triolet.model.tokenizer.tokenizer import EstimatedIds, PromptIds


def found(most: int | None, *parts: Sequence[int]) -> PromptIds:
    ids = PromptIds(most)
    ids.add(parts)
    return ids


@pytest.mark.parametrize("most", [None, 5, 6])
def test_parts_are_put_together_in_their_order(most: int | None) -> None:
    ids = found(most, [7], [], (8, 9), [1, 2])
    assert (ids.ids, ids.num_tokens, ids.is_too_long, ids.is_estimate) == ([7, 8, 9, 1, 2], 5, False, False)


@pytest.mark.parametrize("parts", [[[7], [8, 9], [1, 2]], [[7], range(4)], [[1] * 5], [[], range(5)]])
def test_of_a_prompt_that_is_too_long_only_the_number_is_kept(parts: list[Sequence[int]]) -> None:
    ids = found(4, *parts)
    assert (ids.ids, ids.num_tokens, ids.is_too_long, ids.is_estimate) == ([], 5, True, False)


def test_a_number_is_an_estimate_if_that_of_any_part_is() -> None:
    estimated = EstimatedIds(range(10))
    for parts in ([[1], estimated[1:]], [estimated[1:], [1]]):
        ids = found(4, *parts)
        assert (ids.num_tokens, ids.is_estimate) == (10, True)


def test_a_part_is_taken_before_the_next_one_is_encoded() -> None:
    ids = PromptIds(2)

    def encoded() -> Iterator[list[int]]:
        for number in range(4):
            assert ids.num_tokens == number
            assert len(ids.ids) == (number if number <= 2 else 0)
            yield [number]

    ids.add(encoded())
    assert ids.num_tokens == 4
