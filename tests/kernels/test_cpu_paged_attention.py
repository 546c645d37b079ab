from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from tests.kernels.cpu_variants import compiled, on_every_cpu_variant
from tests.kernels.targets import PagedCase, Target
from triolet.kernels import paged_attention as launcher
from triolet.kernels.cpu.attention.paged_attention import paged_attention_cpp

MIXED = [(7, 7), (1, 65), (16, 80), (1, 1), (0, 3), (1, 64), (63, 63), (1, 300), (1, 17), (70, 200)]
EXACT: dict[str, Any] = {"rtol": 1e-5, "atol": 2e-6}
WINDOW_AND_CAP: dict[str, Any] = {"sliding_window": 16, "soft_cap": 2.0}


def run(variant: str, case: PagedCase, **options: Any) -> Tensor:
    return paged_attention_cpp(
        compiled(variant), case.query, case.keys, case.values, case.metadata, scale=case.scale, **options
    )


def alone(case: PagedCase, sequence: int) -> PagedCase:
    """The same step with one sequence only."""
    start, end = case.metadata.cu_query_lens[sequence : sequence + 2].tolist()
    metadata = attrs.evolve(
        case.metadata,
        cu_query_lens=torch.tensor([0, end - start], dtype=torch.int32),
        seq_lens=case.metadata.seq_lens[sequence : sequence + 1],
        block_tables=case.metadata.block_tables[sequence : sequence + 1],
        query_lens_host=(end - start,),
        seq_lens_host=case.metadata.seq_lens_host[sequence : sequence + 1],
    )
    return attrs.evolve(case, query=case.query[start:end], metadata=metadata)


@on_every_cpu_variant
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (3, 1), (8, 1), (20, 1), (6, 2)])
@pytest.mark.parametrize("options", [{}, WINDOW_AND_CAP], ids=["plain", "window-and-cap"])
def test_every_row_is_plain_attention_over_its_own_past(
    variant: str, num_heads: int, num_kv_heads: int, options: dict[str, Any]
) -> None:
    case = PagedCase.make(MIXED, num_heads=num_heads, num_kv_heads=num_kv_heads, num_padding_rows=3)
    torch.testing.assert_close(run(variant, case, **options).double(), case.truth(**options), **EXACT)


@on_every_cpu_variant
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(3, 1), (20, 1), (6, 2)])
@pytest.mark.parametrize("options", [{}, WINDOW_AND_CAP], ids=["plain", "window-and-cap"])
def test_a_sink_is_one_more_score_of_a_query_head_without_a_value(
    variant: str, num_heads: int, num_kv_heads: int, options: dict[str, Any]
) -> None:
    case = PagedCase.make(MIXED, num_heads=num_heads, num_kv_heads=num_kv_heads, num_padding_rows=3)
    sinks = torch.cat((torch.tensor([-100.0, 100.0]), torch.randn(num_heads)))[:num_heads]
    found = run(variant, case, sinks=sinks, **options)
    torch.testing.assert_close(found.double(), case.truth(sinks=sinks, **options), **EXACT)


@on_every_cpu_variant
@pytest.mark.parametrize("options", [{}, {"sliding_window": 100}], ids=["plain", "window"])
def test_a_row_has_the_same_bits_in_a_long_prompt_and_in_a_short_piece_of_it(
    variant: str, options: dict[str, Any]
) -> None:
    # A long prompt has items of many rows, which share their tiles; 20 rows are an item of their own.
    length, piece = 430, 20
    case = PagedCase.make([(length, length)], num_heads=6, num_kv_heads=2, head_dim=20)
    whole = run(variant, case, **options)
    torch.testing.assert_close(whole.double(), case.truth(**options), **EXACT)
    for first in range(0, length - piece, 70):
        end = first + piece
        metadata = attrs.evolve(
            case.metadata,
            cu_query_lens=torch.tensor([0, piece], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            query_lens_host=(piece,),
            seq_lens_host=(end,),
        )
        short = run(variant, attrs.evolve(case, query=case.query[first:end], metadata=metadata), **options)
        assert torch.equal(short, whole[first:end])


@on_every_cpu_variant
@pytest.mark.parametrize("sliding_window", [1, 2, 15, 64, 65, 1000])
def test_a_window_shows_as_many_keys_as_it_is_wide(variant: str, sliding_window: int) -> None:
    case = PagedCase.make([(1, 16), (1, 170), (33, 48), (20, 20), (9, 200)])
    truth = case.truth(sliding_window=sliding_window)
    torch.testing.assert_close(run(variant, case, sliding_window=sliding_window).double(), truth, **EXACT)


def test_what_lies_before_the_window_is_not_read() -> None:
    case = PagedCase.make([(1, 200), (30, 200)], block_size=16)
    expected = run("", case, sliding_window=50)
    for sequence, first_seen in enumerate((150, 121)):
        forgotten = case.metadata.block_tables[sequence, : first_seen // 16].long()
        case.keys[forgotten] = case.values[forgotten] = float("nan")
    assert run("", case, sliding_window=50).equal(expected)


@on_every_cpu_variant
@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
@pytest.mark.parametrize("head_dim", [8, 24, 80, 128])
def test_block_edges_and_odd_head_dims_make_no_difference(
    variant: str, block_size: int, head_dim: int
) -> None:
    lens = [(1, block_size), (1, block_size + 1), (3, 2 * block_size + 1), (1, 133), (20, 90)]
    case = PagedCase.make(lens, block_size=block_size, head_dim=head_dim)
    torch.testing.assert_close(run(variant, case).double(), case.truth(), **EXACT)


@on_every_cpu_variant
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [24, 64])
def test_narrow_dtypes_are_computed_in_float32_and_rounded_once(
    variant: str, dtype: torch.dtype, head_dim: int
) -> None:
    target = Target("cpu", dtype)
    case = PagedCase.make(MIXED, num_heads=4, head_dim=head_dim, target=target)
    torch.testing.assert_close(run(variant, case).double(), case.truth(), **target.tolerance)


@on_every_cpu_variant
def test_every_float16_number_comes_through_a_sequence_of_one_token(variant: str) -> None:
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    case = PagedCase.make([(1, 1)], head_dim=2**16, num_heads=1, target=Target("cpu", torch.float16))
    case.query.zero_()
    case.keys.zero_()
    case.values[:] = numbers
    out = run(variant, case).flatten()
    assert out.isnan().equal(numbers.isnan())
    assert out[~numbers.isnan()].equal(numbers[~numbers.isnan()])


@on_every_cpu_variant
@pytest.mark.parametrize("options", [{}, WINDOW_AND_CAP], ids=["plain", "window-and-cap"])
def test_a_row_is_the_same_bit_for_bit_whatever_else_is_in_the_step(
    variant: str, options: dict[str, Any]
) -> None:
    together = PagedCase.make(MIXED, num_heads=4, num_kv_heads=2, head_dim=24)
    starts = together.metadata.cu_query_lens.tolist()
    rows = run(variant, together, **options)
    for sequence in range(len(MIXED)):
        mine = rows[starts[sequence] : starts[sequence + 1]]
        assert run(variant, alone(together, sequence), **options).equal(mine)


@pytest.mark.parametrize("lens", [[(1, 40)], [(30, 40)]])
@pytest.mark.parametrize("spoilt", ["query", "keys", "values"])
def test_nan_in_what_a_row_sees_shows_in_the_row(lens: Sequence[tuple[int, int]], spoilt: str) -> None:
    case = PagedCase.make(lens)
    if spoilt == "query":
        case.query[-1, 0, 3] = float("nan")
    else:
        block = case.metadata.block_tables[0, 0]
        getattr(case, spoilt)[block, 5, 0, 3] = float("nan")
    assert run("", case)[-1, 0].isnan().any()


def test_queries_may_be_a_view_of_a_merged_projection() -> None:
    case = PagedCase.make([(9, 30), (1, 50)], num_heads=4, num_kv_heads=2)
    merged = torch.randn(10, 8, 16)
    merged[:, 2:6] = case.query
    viewed = attrs.evolve(case, query=merged[:, 2:6])
    assert run("", viewed).equal(run("", case))


def test_large_scores_neither_overflow_nor_lose_the_largest() -> None:
    case = PagedCase.make([(1, 100), (20, 100)])
    case.query.mul_(1e3)
    torch.testing.assert_close(run("", case).double(), case.truth(), rtol=1e-3, atol=1e-3)


def test_the_cpu_uses_the_compiled_kernel_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    case = PagedCase.make(MIXED)
    cpp = compiled("")
    monkeypatch.setattr(launcher, "library", lambda: cpp)
    args = case.query, case.keys, case.values, case.metadata
    assert launcher.paged_attention(*args, scale=case.scale).equal(run("", case))
    assert not case.metadata._gather_plans  # torch's way makes one


def sharing(case: PagedCase, prefix: int, sequences: Sequence[int]) -> PagedCase:
    """The same, but that the sequences' first `prefix` tokens are in the blocks of the first of them."""
    blocks, block_size = case.metadata.block_tables, case.keys.shape[1]
    full = prefix // block_size
    keys, values = list(case.plain_keys), list(case.plain_values)
    for sequence in sequences[1:]:
        query_len, seq_len = case.metadata.query_lens_host[sequence], case.metadata.seq_lens_host[sequence]
        shared = min(full, (seq_len - query_len) // block_size)
        blocks[sequence, :shared] = blocks[sequences[0], :shared]
        for mine in (keys, values):
            mine[sequence] = mine[sequence].clone()
            mine[sequence][: shared * block_size] = mine[sequences[0]][: shared * block_size]
    return attrs.evolve(case, plain_keys=tuple(keys), plain_values=tuple(values))


# Decodes of two families, with drafts, with a short past and on the edge of a tile, and a prefill of the first family.
FAMILIES = [
    *[(1, 300), (1, 230), (1, 400), (1, 193), (1, 192), (1, 90), (1, 64), (1, 65), (1, 20), (1, 1)],
    *[(2, 300), (3, 199), (30, 250), (1, 500), (0, 200), (1, 310), (1, 350), (1, 210), (1, 260), (6, 220)],
    *[(1, 300), (1, 301)],
]
FIRST_FAMILY = [2, 0, 4, 1, 5, 6, 7, 8, 9, 3, 10, 11, 12, 14, 19]
SECOND_FAMILY = [13, 18, 15, 17, 16]


@on_every_cpu_variant
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "group", [1, 4, *(pytest.param(group, marks=pytest.mark.slow) for group in (2, 3, 6, 8))]
)
@pytest.mark.parametrize(
    "options", [{}, {"soft_cap": 2.0}, {"sliding_window": 150}], ids=["plain", "cap", "window"]
)
def test_sequences_that_share_a_prefix_are_bit_for_bit_what_each_is_alone(
    variant: str, dtype: torch.dtype, group: int, options: dict[str, Any]
) -> None:
    target = Target("cpu", dtype)
    case = PagedCase.make(FAMILIES, num_heads=2 * group, num_kv_heads=2, head_dim=48, target=target)
    case = sharing(sharing(case, 192, FIRST_FAMILY), 256, SECOND_FAMILY)
    starts = case.metadata.cu_query_lens.tolist()
    rows = run(variant, case, **options)
    torch.testing.assert_close(rows.double(), case.truth(**options), **target.tolerance)
    for sequence in range(len(FAMILIES)):
        mine = rows[starts[sequence] : starts[sequence + 1]]
        assert run(variant, alone(case, sequence), **options).equal(mine)


@on_every_cpu_variant
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("options", [{}, WINDOW_AND_CAP], ids=["plain", "window-and-cap"])
def test_the_number_of_threads_changes_no_bit(variant: str, group: int, options: dict[str, Any]) -> None:
    mixed = PagedCase.make(MIXED, num_heads=2 * group, num_kv_heads=2)
    shared = PagedCase.make(FAMILIES, num_heads=2 * group, num_kv_heads=2)
    shared = sharing(sharing(shared, 192, FIRST_FAMILY), 256, SECOND_FAMILY)
    before, found = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            found.append([run(variant, case, **options) for case in (mixed, shared)])
    finally:
        torch.set_num_threads(before)
    for rows in found[1:]:
        assert all(map(torch.equal, rows, found[0]))


@pytest.mark.parametrize(("head_dim", "block_size"), [(24, 16), (64, 1), (80, 32), (128, 24)])
def test_a_shared_prefix_may_end_anywhere(head_dim: int, block_size: int) -> None:
    lens = [(1, 201 + 17 * sequence) for sequence in range(9)]
    case = PagedCase.make(lens, head_dim=head_dim, block_size=block_size)
    case = sharing(sharing(case, 100, range(9)), 170, [3, 4, 5])
    rows = run("", case)
    torch.testing.assert_close(rows.double(), case.truth(), **EXACT)
    for sequence in range(9):
        assert run("", alone(case, sequence)).equal(rows[sequence : sequence + 1])
