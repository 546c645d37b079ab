from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triolet.core.output.logprobs import FlatLogprobs, ListPrefix, Logprob

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


def test_it_is_no_text() -> None:
    assert ListPrefix([], 0) != ""


def test_columns_are_the_positions_they_came_from() -> None:
    positions = [None, {3: Logprob(-1.0, 1, "c")}, {5: Logprob(-2.0, 2, "e"), 3: Logprob(-0.5, 1, "c")}]
    flat = FlatLogprobs.of(positions)
    assert flat == [{}, *positions[1:]]
    assert (flat.start_indices, flat.end_indices) == ((0, 0, 1), (0, 1, 3))
    assert (flat.token_ids, flat.ranks, flat.decoded_tokens) == ((3, 5, 3), (1, 2, 1), ("c", "e", "c"))
    assert flat[1:] == positions[1:]
    assert flat[-1] == positions[2]
    assert len(FlatLogprobs.of([])) == 0
