"""Block tables of rows: where each token is, group by group, looked up one token at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from triolet.core.kv_cache.cache_groups import HOLE
from triolet.errors import InvariantViolated
from triolet.kernels.attention_metadata import AttentionMetadata
from triolet.model.memory.block_tables import BlockTables

SIZE = 4  # tokens of a block


def make_tables(*, num_groups: int = 1, has_holes: bool = False) -> BlockTables:
    return BlockTables(
        num_groups=num_groups,
        num_rows=3,
        max_model_len=5 * SIZE - 1,
        num_blocks=20,
        block_size=SIZE,
        device=torch.device("cpu"),
        has_holes=has_holes,
    )


def attention_of(
    tables: BlockTables, row_ids: list[int], lens: list[tuple[int, int]]
) -> list[AttentionMetadata]:
    """`lens` are pairs (query length, sequence length), one for each row."""
    ends = [query for query, _ in lens]
    positions = [p for query, end in lens for p in range(end - query, end)]
    places = [place for place, (query, _) in enumerate(lens) for _ in range(query)]
    return tables.attention(
        np.array(row_ids),
        np.array(places),
        np.array(positions),
        -(-max(end for _, end in lens) // SIZE),
        cu_query_lens=torch.tensor([0, *ends]).cumsum(0).int(),
        seq_lens=np.array([end for _, end in lens], dtype=np.int32),
        query_lens_host=tuple(query for query, _ in lens),
        seq_lens_host=tuple(end for _, end in lens),
    )


def test_each_token_has_the_slot_of_its_block_in_every_group() -> None:
    tables = make_tables(num_groups=2)
    blocks: dict[int, list[tuple[int, int]]] = {0: [(3, 4), (5, 6)], 2: [(19, 0), (1, 2), (8, 9)]}
    for row_id, pairs in blocks.items():
        end = 0
        for pair in pairs:  # one after the other, as plans bring them
            end = tables.add(row_id, end, pair, "r")
        assert end == len(pairs)
    lens = {2: (5, 11), 0: (1, 6)}
    found = attention_of(tables, list(lens), list(lens.values()))
    for group, attention in enumerate(found):
        expected = [
            blocks[row_id][position // SIZE][group] * SIZE + position % SIZE
            for row_id, (query, end) in lens.items()
            for position in range(end - query, end)
        ]
        assert attention.slot_mapping.tolist() == expected
        assert attention.block_tables[0].tolist() == [pair[group] for pair in blocks[2]]
        assert attention.block_tables[1, :2].tolist() == [pair[group] for pair in blocks[0]]
        assert attention.seq_lens.tolist() == [11, 6]


def test_in_place_of_a_hole_stands_a_block_of_the_cache() -> None:
    tables = make_tables(has_holes=True)
    assert tables.add(1, 0, (HOLE, HOLE, 7, 3), "r") == 4
    [attention] = attention_of(tables, [1], [(2, 15)])
    assert attention.slot_mapping.tolist() == [3 * SIZE + 1, 3 * SIZE + 2]
    assert attention.block_tables[0, 2:].tolist() == [7, 3]
    assert 0 <= attention.block_tables.min() <= attention.block_tables.max() < 20
    assert tables.of_row(1, 2, 4).tolist() == [7, 3]


@pytest.mark.parametrize(
    ("options", "block_ids", "problem"),
    [
        ({}, (1, 20), "must be in"),
        ({}, (1, HOLE), "must be in"),
        ({"has_holes": True}, (1, HOLE - 1), "must be in"),
        ({"num_groups": 2}, (1, 2, 3), "all 2 groups"),
        ({}, (1, 2, 3, 4, 5, 6), "at most 5 blocks"),
    ],
)
def test_blocks_that_no_plan_may_name_are_refused(
    options: dict[str, Any], block_ids: tuple[int, ...], problem: str
) -> None:
    with pytest.raises(InvariantViolated, match=problem):
        make_tables(**options).add(0, 0, block_ids, "r")
