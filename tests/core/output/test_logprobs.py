"""Log-probabilities as mappings and as columns, and views of the first items of a growing list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triolet.core.output.logprobs import FlatLogprobs, ListPrefix, Logprob, entries_of
from triolet.core.step_plan import TokenLogprobs

LISTS = st.lists(st.integers(0, 9), max_size=8)


@given(LISTS, LISTS, st.integers(-9, 9) | st.slices(8))
def test_it_is_what_the_list_was_whatever_becomes_of_the_list(
    before: list[int], after: list[int], at: object
) -> None:
    items = list(before)
    prefix = ListPrefix(items, len(items))
    items.extend(after)
    assert list(prefix) == before
    assert (prefix == before, prefix == tuple(before), before == prefix) == (True, True, True)
    assert prefix != [*before, 1]
    assert hash(prefix) == hash(tuple(before))
    assert (len(prefix), repr(prefix)) == (len(before), repr(tuple(before)))
    if isinstance(at, slice):
        assert prefix[at] == tuple(before[at])
    elif isinstance(at, int) and -len(before) <= at < len(before):
        assert prefix[at] == before[at]
    elif isinstance(at, int):
        with pytest.raises(IndexError):
            prefix[at]


def test_only_a_sequence_of_the_same_items_is_equal() -> None:
    prefix = ListPrefix([1, 2, 3], 2)
    assert prefix == [1, 2]
    assert all(prefix != other for other in ([1, 3], [1], [1, 2, 3], {1: 0, 2: 0}, 12))
    assert ListPrefix([], 0) != ""
    for other in ("12", b"12", {1, 2}):
        assert prefix.__eq__(other) is NotImplemented


def test_columns_are_the_positions_they_came_from() -> None:
    positions = [None, {3: Logprob(-1.0, 1, "c")}, {5: Logprob(-2.0, 2, "e"), 3: Logprob(-0.5, 1, "c")}]
    flat = FlatLogprobs.of(positions)
    assert flat == [{}, *positions[1:]]
    assert (flat.start_indices, flat.end_indices) == ((0, 0, 1), (0, 1, 3))
    assert (flat.token_ids, flat.ranks, flat.decoded_tokens) == ((3, 5, 3), (1, 2, 1), ("c", "e", "c"))
    assert flat[1:] == positions[1:]
    assert flat[-1] == positions[2]
    assert len(FlatLogprobs.of([])) == 0


def test_columns_are_equal_to_the_same_positions_in_any_form_and_to_nothing_else() -> None:
    positions = [{3: Logprob(-1.0, 1, "c")}, None, {5: Logprob(-2.0, 2, "e")}]
    flat = FlatLogprobs.of(positions)
    assert flat == positions
    assert flat == tuple(FlatLogprobs.of(positions))
    assert hash(flat) == hash(FlatLogprobs.of(positions))
    assert hash(flat) != hash(FlatLogprobs.of(positions[:2]))
    others: list[object] = [positions[:2], [*positions, None], [positions[0], None, None], [{}] * 3]
    assert all(flat != other for other in others)
    assert FlatLogprobs.of([]) != ""
    no_sequences: list[object] = ["abc", b"abc", {0: positions[0]}]
    assert all(flat.__eq__(other) is NotImplemented for other in no_sequences)


def test_the_token_that_is_there_has_its_own_rank_and_the_others_their_place() -> None:
    entries = entries_of(
        TokenLogprobs((7, 4, 7), (-3.0, -0.5, -3.0), 2), lambda token_id, before: f"{before}{token_id}", [1]
    )
    assert entries == [
        (7, Logprob(-3.0, 2, "[1]7")),
        (4, Logprob(-0.5, 1, "[1]4")),
        (7, Logprob(-3.0, 2, "[1]7")),
    ]
    with pytest.raises(ValueError, match="zip"):
        entries_of(TokenLogprobs((7, 4), (-3.0,), 2), lambda *_: "")
