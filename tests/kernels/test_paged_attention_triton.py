"""The Triton kernel of paged attention against its reference."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from tests.kernels.targets import PagedCase, Target, on_every_triton_target
from triolet.kernels.attention_metadata import AttentionMetadata
from triolet.kernels.paged_attention import _num_segments, paged_attention_reference, paged_attention_triton

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
@pytest.mark.parametrize("segment_tokens", [pytest.param(None, marks=pytest.mark.slow), 64])
@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), {"sliding_window": 65, "soft_cap": 2.0}],
    ids=["plain", "window"],
)
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
def test_what_lies_before_the_window_is_not_read(target: Target, segment_tokens: int | None) -> None:
    case = PagedCase.make([(1, 200), (30, 200)], target=target)
    inputs = case.query, case.keys, case.values, case.metadata
    options: dict[str, Any] = {"scale": case.scale, "sliding_window": 50, "segment_tokens": segment_tokens}
    expected = paged_attention_triton(*inputs, **options)
    for sequence, first_seen in enumerate((150, 121)):
        forgotten = case.metadata.block_tables[sequence, : first_seen // 16].long()
        case.keys[forgotten] = case.values[forgotten] = float("nan")
    assert paged_attention_triton(*inputs, **options).equal(expected)


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


@on_every_triton_target
@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), {"sliding_window": 65}],
    ids=["plain", "window"],
)
@pytest.mark.parametrize("group", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_lengths_that_only_the_device_knows_change_no_bit(
    target: Target, options: dict[str, Any], group: int
) -> None:
    lens = [(20, 70), (1, 130), (1, 3), (40, 40), (1, 64), (0, 0), (0, 0)]
    case = PagedCase.make(lens, num_heads=2 * group, num_kv_heads=2, num_padding_rows=9, target=target)
    bounds = attrs.evolve(
        case.metadata,
        query_lens_host=(len(case.query), *[0] * (len(lens) - 1)),
        seq_lens_host=(300,) * len(lens),
        has_any_lengths=True,
    )
    expected, got = (
        paged_attention_triton(
            case.query, case.keys, case.values, metadata, scale=case.scale, segment_tokens=64, **options
        )
        for metadata in (case.metadata, bounds)
    )
    assert got.equal(expected)


def alone(case: PagedCase, sequence: int) -> tuple[torch.Tensor, AttentionMetadata]:
    """Return the queries of one sequence, and metadata in which there is no other."""
    whole = case.metadata
    first = sum(whole.query_lens_host[:sequence])
    query_len = whole.query_lens_host[sequence]
    return case.query[first : first + query_len], attrs.evolve(
        whole,
        cu_query_lens=torch.tensor([0, query_len], dtype=torch.int32, device=case.query.device),
        seq_lens=whole.seq_lens[sequence : sequence + 1],
        block_tables=whole.block_tables[sequence : sequence + 1],
        query_lens_host=(query_len,),
        seq_lens_host=whole.seq_lens_host[sequence : sequence + 1],
    )


def has_the_same_bits_alone(case: PagedCase, **options: Any) -> None:
    caches = case.keys, case.values
    together = paged_attention_triton(case.query, *caches, case.metadata, scale=case.scale, **options)
    for sequence, query_len in enumerate(case.metadata.query_lens_host):
        query, metadata = alone(case, sequence)
        got = paged_attention_triton(query, *caches, metadata, scale=case.scale, **options)
        first = sum(case.metadata.query_lens_host[:sequence])
        assert got.equal(together[first : first + query_len]), sequence


@pytest.mark.slow
@on_every_triton_target
@pytest.mark.parametrize("sliding_window", [None, 100])
def test_a_decode_has_the_same_bits_alone_and_among_64_of_which_some_are_100_times_longer(
    target: Target, sliding_window: int | None
) -> None:
    lens = [(1, 13 + 2 * i) for i in range(62)]
    case = PagedCase.make([*lens, (1, 1400), (1, 700)], num_heads=3, target=target)
    has_the_same_bits_alone(case, segment_tokens=64, sliding_window=sliding_window)


@on_every_triton_target
def test_a_decode_has_the_same_bits_beside_chunks_and_a_chunk_beside_longer_ones(target: Target) -> None:
    lens = [(1, 70), (7, 90), (1, 200), (5, 300), (2, 129), (0, 9), (40, 40), (1, 3), (17, 20)]
    has_the_same_bits_alone(PagedCase.make(lens, num_heads=4, target=target), segment_tokens=64)


@on_every_triton_target
@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"soft_cap": 1.5}, marks=pytest.mark.slow), {"sliding_window": 70}],
    ids=["plain", "cap", "window"],
)
@pytest.mark.parametrize("head_dim", [16, pytest.param(24, marks=pytest.mark.slow)])
def test_tiles_of_keys_that_all_queries_see_agree_with_those_of_which_some_see_a_part(
    target: Target, head_dim: int, options: dict[str, Any]
) -> None:
    lens = [(20, 64), (20, 83), (20, 84), (20, 150), (1, 128), (2, 129)]
    case = PagedCase.make(lens, num_heads=2, head_dim=head_dim, target=target)
    agrees_with_reference(case, target, **options)


@pytest.mark.slow
@on_every_triton_target
def test_lengths_of_the_host_may_be_bounds_and_the_bits_stay(target: Target) -> None:
    # A graph is captured once, and replayed over other lengths: its grid cannot follow them.
    case = PagedCase.make([(1, 70), (1, 1), (1, 200), (1, 129)], num_heads=3, target=target)
    exact = paged_attention_triton(
        case.query, case.keys, case.values, case.metadata, scale=case.scale, segment_tokens=64
    )
    bounded = attrs.evolve(case.metadata, seq_lens_host=(1000,) * 4)
    got = paged_attention_triton(
        case.query, case.keys, case.values, bounded, scale=case.scale, segment_tokens=64
    )
    assert got.equal(exact)


@pytest.mark.slow
@on_every_triton_target
def test_a_sequence_that_is_too_long_for_its_segments_gets_longer_ones(target: Target) -> None:
    case = PagedCase.make([(1, 64 * 16 + 70), (1, 40)], head_dim=256, target=target)  # key tiles of 16 or 32
    agrees_with_reference(case, target, segment_tokens=16)
    has_the_same_bits_alone(case, segment_tokens=16)


@pytest.mark.parametrize(
    ("seq_len", "sliding_window", "expected"),
    [(1, None, 1), (512, None, 1), (513, None, 2), (16_384, None, 32), (131_072, None, 64), (9000, 512, 2)],
)
def test_segments_follow_from_the_sequence_alone(
    seq_len: int, sliding_window: int | None, expected: int
) -> None:
    # 131,072 = 64 * 2048; a window of 512 that does not begin at a tile reaches into a second segment
    assert _num_segments(1, seq_len, sliding_window, key_tile=64, segment_tokens=512) == expected
