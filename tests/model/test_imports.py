"""Garbage collections while the modules that compute are imported."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from triolet.model.loading.imports import NEVER, no_full_collections

RULE = (70, 5, 3)


@pytest.fixture(autouse=True)
def rule() -> Iterator[None]:
    """A rule of the program's own."""
    before = gc.get_threshold()
    gc.set_threshold(*RULE)
    yield
    gc.set_threshold(*before)


def test_no_full_collection_begins_by_itself_in_the_scope() -> None:
    def num_collections() -> list[int]:
        return [generation["collections"] for generation in gc.get_stats()]

    gc.collect()  # or what is there already keeps Python from a full one
    before = num_collections()
    with no_full_collections():
        kept = [[number] for number in range(200_000)]
        after = num_collections()
    assert after[2] == before[2] and after[1] > before[1]
    assert len(kept) == 200_000


def test_the_programs_rule_is_back_after_the_last_of_several_scopes_in_whatever_order_they_end() -> None:
    first, second = no_full_collections(), no_full_collections()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold() == (*RULE[:2], NEVER)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == RULE
    with pytest.raises(KeyError), no_full_collections():
        raise KeyError
    assert gc.get_threshold() == RULE


def test_a_rule_that_the_program_sets_meanwhile_stays() -> None:
    with no_full_collections():
        gc.set_threshold(1, 2, 4)
    assert gc.get_threshold() == (1, 2, 4)
