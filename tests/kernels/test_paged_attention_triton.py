"""The Triton kernel of paged attention against its reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.targets import PagedCase, Target, on_every_triton_target
from triolet.kernels.paged_attention import _segment_tokens, paged_attention_reference, paged_attention_triton

MIXED = [(7, 7), (1, 65), (16, 80), (1, 1), (0, 3), (1, 64), (1, 130)]
DECODES = [(1, 1), (1, 63), (1, 64), (1, 65), (1, 200)]


def agrees_with_reference(
    case: PagedCase, target: Target, *, segment_tokens: int | None = None, **options: Any
) -> None:
    inputs = case.query, case.keys, case.values, case.metadata
    got = paged_attention_triton(*inputs, scale=case.scale, segment_tokens=segment_tokens, **options)
    torch.testing.assert_close(
        got, paged_attention_reference(*inputs, scale=case.scale, **options), **target.tolerance
    )


@on_every_triton_target
@pytest.mark.parametrize("num_heads", [1, 3, 4, 8])
def test_chunks_and_decodes_in_one_step_agree(target: Target, num_heads: int) -> None:
    case = PagedCase.make(MIXED, num_heads=num_heads, num_padding_rows=2, target=target)
    agrees_with_reference(case, target)


@on_every_triton_target
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (6, 2), (20, 1)])
def test_decodes_of_several_kv_heads_agree(target: Target, num_heads: int, num_kv_heads: int) -> None:
    case = PagedCase.make(DECODES, num_heads=num_heads, num_kv_heads=num_kv_heads, target=target)
    agrees_with_reference(case, target)


@on_every_triton_target
@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 96, 128, 256])
def test_head_dims_that_are_no_power_of_two_agree(target: Target, head_dim: int) -> None:
    case = PagedCase.make([(5, 40), (1, 33)], head_dim=head_dim, target=target)
    agrees_with_reference(case, target)


@on_every_triton_target
@pytest.mark.parametrize("block_size", [1, 4, 32, 128])
def test_block_sizes_agree_at_the_edges_of_a_block(target: Target, block_size: int) -> None:
    lens = [(1, block_size), (1, block_size + 1), (3, 2 * block_size + 1)]
    agrees_with_reference(PagedCase.make(lens, block_size=block_size, target=target), target)


@on_every_triton_target
@pytest.mark.parametrize("segment_tokens", [None, 64])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 65, "soft_cap": 2.0}], ids=["plain", "window"])
def test_sinks_agree_split_or_not(
    target: Target, options: dict[str, Any], segment_tokens: int | None
) -> None:
    case = PagedCase.make([*MIXED, (1, 200)], num_heads=6, num_kv_heads=2, num_padding_rows=1, target=target)
    sinks = torch.tensor([-100.0, 100.0, 0.0, 2.0, -1.0, 0.5], device=target.device)
    agrees_with_reference(case, target, sinks=sinks, segment_tokens=segment_tokens, **options)


@on_every_triton_target
@pytest.mark.parametrize("segment_tokens", [None, 64])
@pytest.mark.parametrize("sliding_window", [1, 16, 65])
def test_windows_agree_split_or_not(target: Target, sliding_window: int, segment_tokens: int | None) -> None:
    case = PagedCase.make([(1, 200), (40, 130), (1, 3)], target=target)
    agrees_with_reference(case, target, sliding_window=sliding_window, segment_tokens=segment_tokens)


@on_every_triton_target
@pytest.mark.parametrize("segment_tokens", [None, 64])
def test_capped_scores_agree_split_or_not(target: Target, segment_tokens: int | None) -> None:
    case = PagedCase.make([(1, 100), (9, 70)], num_heads=4, target=target)
    agrees_with_reference(case, target, soft_cap=1.5, segment_tokens=segment_tokens)


@on_every_triton_target
@pytest.mark.parametrize(
    "lens", [DECODES, MIXED, [(1, 64)], [(1, 128), (0, 5)]], ids=["decodes", "mixed", "1", "0"]
)
def test_split_keys_agree_and_empty_segments_leave_no_trace(
    target: Target, lens: list[tuple[int, int]]
) -> None:
    case = PagedCase.make(lens, num_heads=3, num_padding_rows=1, target=target)
    agrees_with_reference(case, target, segment_tokens=64)


@on_every_triton_target
def test_splitting_gives_the_same_bits_every_time(target: Target) -> None:
    case = PagedCase.make(DECODES, num_heads=4, target=target)
    inputs = case.query, case.keys, case.values, case.metadata
    first, second = (paged_attention_triton(*inputs, scale=case.scale, segment_tokens=64) for _ in range(2))
    assert first.equal(second)


@on_every_triton_target
def test_queries_may_be_a_view_of_a_merged_projection(target: Target) -> None:
    case = PagedCase.make([(3, 9), (1, 20)], num_heads=4, target=target)
    merged = target.randn(4, 6, 16)
    merged[:, 1:5] = case.query
    inputs = merged[:, 1:5], case.keys, case.values, case.metadata
    got = paged_attention_triton(*inputs, scale=case.scale)
    torch.testing.assert_close(got, paged_attention_reference(*inputs, scale=case.scale), **target.tolerance)


@on_every_triton_target
def test_a_step_without_tokens_launches_nothing(target: Target) -> None:
    case = PagedCase.make([(0, 5)], num_padding_rows=2, target=target)
    got = paged_attention_triton(case.query, case.keys, case.values, case.metadata, scale=1.0)
    assert got.shape == (2, 2, 16)
    assert got.eq(0).all()


def test_a_small_batch_over_long_sequences_is_split_and_a_large_one_is_not() -> None:
    machine: Any = {"key_tile": 64, "num_multiprocessors": 132}
    assert _segment_tokens(16_384, programs=8, **machine) == 256  # 64 segments
    assert _segment_tokens(16_384, programs=64, **machine) == 2048  # 8 segments
    assert _segment_tokens(16_384, programs=2048, **machine) == 16_384  # none
    assert _segment_tokens(100, programs=1, **machine) == 256  # too short to be worth it
