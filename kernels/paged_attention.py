"""Attention over block tables: prefill chunks and decodes in one call."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from triolet.kernels._triton import INTERPRETING, kernel, next_power_of_2, run_or_reference
from triolet.kernels.attention_metadata import AttentionMetadata
from triolet.kernels.cpu.attention.paged_attention import DTYPES, paged_attention_cpp
from triolet.kernels.cpu.library import library
from triolet.kernels.flash_attention import FlashAttention
from triolet.kernels.float8 import (
    as_bytes,
    float8_numbers,
    gather_float32,
    mantissa_of,
)
from triolet.kernels.gathered_attention import gathered_attention

if TYPE_CHECKING:
    import triton.language as tl

MAX_SEGMENTS = 64
"""Parts that a sequence's keys are split into at most, which bounds the memory of what they leave to be joined."""
SEGMENT_TOKENS = 512
"""Keys of a part, unless the sequence is longer than `MAX_SEGMENTS` of them. A constant, and no function of the batch:
where a sequence is split decides the bits of its result."""
MIN_ROWS = 16
"""Rows of a tile, at least: the fewest that `tl.dot` takes."""
MAX_FEW_QUERIES = MIN_ROWS
"""Queries of a sequence that has a tile of its own and may be split, at most: with one query head to a KV head."""


@kernel.with_widths("query_stride_t", "query_stride_h")
def _attention_kernel(
    query_ptr,  # [num_tokens, num_heads, HEAD_DIM]
    keys_ptr,  # [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM], contiguous; MANTISSA: codes of float8
    values_ptr,  # like keys_ptr
    out_ptr,  # [num_tokens, num_heads, HEAD_DIM]; SPLIT: fp32 [num_seqs, split_queries, num_heads, segments, HEAD_DIM]
    max_ptr,  # SPLIT only: [num_seqs, split_queries, num_heads, num_segments] float32, largest score times log2(e)
    sum_ptr,  # SPLIT only: like max_ptr, sum of 2 ** (score - max)
    sinks_ptr,  # HAS_SINKS only: [num_heads] float32
    block_tables_ptr,  # [num_seqs, max_blocks]
    seq_lens_ptr,  # [num_seqs]
    cu_query_lens_ptr,  # [num_seqs + 1]
    num_seqs, segment_tokens, split_queries, scale, value_scale, soft_cap, sliding_window,
    query_stride_t, query_stride_h, block_tables_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    FEW: tl.constexpr, FEW_QUERIES: tl.constexpr, MOST_SEGMENTS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr, SPLIT: tl.constexpr, WIDEN: tl.constexpr,
    HAS_SINKS: tl.constexpr, MANTISSA: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Attend from one tile of a sequence's queries, under all query heads of one KV head, over a segment of its keys.

    FEW: sequences of at most FEW_QUERIES queries, a tile each, perhaps split. Otherwise all the others.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    segment = tl.program_id(2)
    num_kv_heads = tl.num_programs(1)
    num_segments = tl.num_programs(2)

    # Sequence i owns the tiles from cu[i] // QUERIES + i on: enough for its queries, and at most one too many.
    if FEW:
        sequence = tile
        first_query = 0
    else:
        sequence = 0
        beyond = num_seqs
        while beyond - sequence > 1:
            middle = (sequence + beyond) // 2
            if tl.load(cu_query_lens_ptr + middle) // QUERIES + middle <= tile:
                sequence = middle
            else:
                beyond = middle
        first_query = (tile - tl.load(cu_query_lens_ptr + sequence) // QUERIES - sequence) * QUERIES
    first_token = tl.load(cu_query_lens_ptr + sequence)
    query_len = tl.load(cu_query_lens_ptr + sequence + 1) - first_token
    if first_query >= query_len:
        return
    if (query_len <= FEW_QUERIES) != FEW:  # another launch of this step is for them
        return
    seq_len = tl.load(seq_lens_ptr + sequence)
    block_table_ptr = block_tables_ptr + sequence.to(tl.int64) * block_tables_stride

    row = tl.arange(0, ROWS)
    row_query = first_query + row // GROUP  # [ROWS]
    row_live = (row // GROUP < QUERIES) & (row_query < query_len)
    row_head = kv_head * GROUP + row % GROUP
    row_token = (first_token + row_query).to(tl.int64)  # int64: token * stride passes 2**31 in long prefills
    position = seq_len - query_len + row_query  # [ROWS]
    dim = tl.arange(0, PADDED_DIM)
    dim_live = dim < HEAD_DIM

    end = seq_len - query_len + tl.minimum(first_query + QUERIES, query_len)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(seq_len - query_len + first_query - sliding_window + 1, 0) // KEYS * KEYS
    if SPLIT:
        most = tl.cdiv(tl.cdiv(end - begin, MOST_SEGMENTS), KEYS) * KEYS
        segment_tokens = tl.maximum(segment_tokens, most)
        begin += segment * segment_tokens
        end = tl.minimum(end, begin + segment_tokens)
        split_row = sequence.to(tl.int64) * split_queries + row_query
        partial = (split_row * (num_kv_heads * GROUP) + row_head) * num_segments + segment  # [ROWS]
        if begin >= end:  # the reduction must find every segment said, the empty ones too
            tl.store(max_ptr + partial, tl.full([ROWS], float("-inf"), tl.float32), mask=row_live)
            tl.store(sum_ptr + partial, tl.zeros([ROWS], tl.float32), mask=row_live)
            return

    query = tl.load(
        query_ptr + (row_token * query_stride_t + row_head * query_stride_h)[:, None] + dim[None, :],
        mask=row_live[:, None] & dim_live[None, :], other=0.0,
    )  # [ROWS, PADDED_DIM]  # fmt: skip
    if WIDEN:
        query = query.to(tl.float32)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    accumulated = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    if HAS_SINKS:  # as a key whose value is zero; of several segments the first one has it
        sink = tl.load(sinks_ptr + row_head, mask=row_live, other=0.0) * LOG2_E
        largest = tl.where(segment == 0, sink, largest)
        total = tl.where(segment == 0, 1.0, total)
    # Tiles of keys that all queries see need no mask; with a window there may be none.
    seen_by_all = seq_len - query_len + first_query + 1
    middle = begin + tl.maximum(tl.minimum(end, seen_by_all) - begin, 0) // KEYS * KEYS
    if HAS_WINDOW:
        middle = begin
    for part in tl.static_range(2):
        part_begin = middle
        part_end = end
        if part == 0:
            part_begin = begin
            part_end = middle
        for start in range(part_begin, part_end, KEYS):
            key = start + tl.arange(0, KEYS)
            if part == 0:
                key_live = key >= 0
                block = tl.load(block_table_ptr + key // BLOCK_SIZE).to(tl.int64)
            else:
                key_live = key < end
                if HAS_WINDOW:  # what is behind it may be another sequence's by now, and not finite
                    key_live = key_live & (key > seq_len - query_len + first_query - sliding_window)
                block = tl.load(block_table_ptr + key // BLOCK_SIZE, mask=key_live, other=0).to(tl.int64)
            slot = block * BLOCK_SIZE + key % BLOCK_SIZE  # int64: slot * stride passes 2**31 on large caches
            offset = ((slot * num_kv_heads + kv_head) * HEAD_DIM)[:, None] + dim[
                None, :
            ]  # [KEYS, PADDED_DIM]
            if part == 0 and HEAD_DIM == PADDED_DIM:
                k = tl.load(keys_ptr + offset)
                v = tl.load(values_ptr + offset)
            else:
                tile_live = key_live[:, None] & dim_live[None, :]
                k = tl.load(keys_ptr + offset, mask=tile_live, other=0.0)
                v = tl.load(values_ptr + offset, mask=tile_live, other=0.0)
            if MANTISSA:
                k = float8_numbers(k, MANTISSA, NATIVE).to(query.dtype)
            if WIDEN:
                k = k.to(tl.float32)
            scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale  # [ROWS, KEYS]
            if HAS_SOFT_CAP:
                small = tl.exp2(
                    tl.abs(scores) * (-2.0 * LOG2_E / soft_cap)
                )  # tanh through what cannot overflow
                bent = soft_cap * (1.0 - small) / (1.0 + small)
                scores = tl.where(scores >= 0, bent, -bent)
            scores = scores * LOG2_E
            if part == 1:
                seen = key_live[None, :] & (key[None, :] <= position[:, None])
                if HAS_WINDOW:
                    seen = seen & (key[None, :] > position[:, None] - sliding_window)
                scores = tl.where(seen, scores, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(scores, axis=1))
            anchor = tl.where(
                new_largest == float("-inf"), 0.0, new_largest
            )  # a row that has seen no key yet
            weights = tl.exp2(scores - anchor[:, None])
            fade = tl.exp2(largest - anchor)
            total = total * fade + tl.sum(weights, axis=1)
            if MANTISSA:  # not before: it would need registers beside the keys
                v = float8_numbers(v, MANTISSA, NATIVE).to(query.dtype)
            if WIDEN:
                v = v.to(tl.float32)
            accumulated = accumulated * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            largest = new_largest

    if MANTISSA:
        accumulated = accumulated * value_scale
    # The rows are made once more, out of what the compiler cannot know to be the same: kept over the loop, they would
    # need more registers than there are.
    first_token = tl.load(cu_query_lens_ptr + sequence)
    query_len = tl.load(cu_query_lens_ptr + sequence + 1) - first_token
    if not FEW:
        first_query = (tile - first_token // QUERIES - sequence) * QUERIES
    row = tl.arange(0, ROWS) + tl.minimum(query_len - 1, 0)  # a sequence has at least one query
    row_query = first_query + row // GROUP
    row_live = (row // GROUP < QUERIES) & (row_query < query_len)
    row_head = kv_head * GROUP + row % GROUP
    out_live = row_live[:, None] & dim_live[None, :]
    if SPLIT:
        split_row = sequence.to(tl.int64) * split_queries + row_query
        partial = (split_row * (num_kv_heads * GROUP) + row_head) * num_segments + segment
        tl.store(max_ptr + partial, largest, mask=row_live)
        tl.store(sum_ptr + partial, total, mask=row_live)
        tl.store(out_ptr + (partial * HEAD_DIM)[:, None] + dim[None, :], accumulated, mask=out_live)
    else:
        row_token = (first_token + row_query).to(tl.int64)
        out_row = (row_token * (num_kv_heads * GROUP) + row_head) * HEAD_DIM  # [ROWS]
        out = accumulated / tl.where(row_live, total, 1.0)[:, None]
        tl.store(out_ptr + out_row[:, None] + dim[None, :], out.to(out_ptr.dtype.element_ty), mask=out_live)


@kernel
def _reduce_kernel(
    partial_ptr,  # [num_seqs, split_queries, num_heads, num_segments, HEAD_DIM] float32
    max_ptr,  # [num_seqs, split_queries, num_heads, num_segments] float32
    sum_ptr,  # like max_ptr
    out_ptr,  # [num_tokens, num_heads, HEAD_DIM]
    cu_query_lens_ptr,  # [num_seqs + 1]
    split_queries, num_segments,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, MOST_SEGMENTS: tl.constexpr, FEW_QUERIES: tl.constexpr,
):  # fmt: skip
    """Join the segments of one query under one head, one after the other.

    The order is that of a loop, because a tree of additions would change with the number of segments, which is that of
    the longest sequence of the batch; empty segments add zero to the end of the loop.
    """
    sequence = tl.program_id(0) // split_queries
    query = tl.program_id(0) % split_queries
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    first_token = tl.load(cu_query_lens_ptr + sequence)
    query_len = tl.load(cu_query_lens_ptr + sequence + 1) - first_token
    if query >= query_len:
        return
    if query_len > FEW_QUERIES:
        return
    row = tl.program_id(0).to(tl.int64) * num_heads + head
    dim = tl.arange(0, PADDED_DIM)
    dim_live = dim < HEAD_DIM
    segments = tl.arange(0, MOST_SEGMENTS)
    largest = tl.load(
        max_ptr + row * num_segments + segments, mask=segments < num_segments, other=float("-inf")
    )
    # A token sees itself, so that one segment at least is not empty and the maximum is finite.
    anchor = tl.max(largest, axis=0)
    total = 0.0
    out = tl.zeros([PADDED_DIM], tl.float32)
    for segment in range(num_segments):
        place = row * num_segments + segment
        segment_max = tl.load(max_ptr + place)
        weight = tl.exp2(segment_max - anchor)
        total += tl.load(sum_ptr + place) * weight
        # Nothing was written for an empty segment. The sum makes a row of the number: the interpreter cannot.
        is_live = dim_live & (segment_max + tl.zeros([PADDED_DIM], tl.float32) > float("-inf"))
        out += tl.load(partial_ptr + place * HEAD_DIM + dim, mask=is_live, other=0.0) * weight
    out_row = (first_token + query).to(tl.int64) * num_heads + head
    tl.store(out_ptr + out_row * HEAD_DIM + dim, (out / total).to(out_ptr.dtype.element_ty), mask=dim_live)


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    prompts: FlashAttention | None = None,
) -> Tensor:
    """Attend from each of this step's tokens to its own sequence's past and itself.

    The query at position p sees the keys j <= p, and with a window of w only those with j > p - w. The keys and values
    of this step's tokens are in the cache already. Query head h reads KV head h * num_kv_heads // num_heads.

    Args:
        query: [num_tokens, num_heads, head_dim], last dim contiguous.
        keys: [num_blocks, block_size, num_kv_heads, head_dim], contiguous, dtype of `query` or float8, device of
            `query`.
        values: the same.
        metadata: the sequence of each token, and the block tables.
        scale: factor of the scores, usually head_dim ** -0.5.
        sliding_window: keys that a query sees at most, itself among them; None = all.
        soft_cap: scores s become soft_cap * tanh(s / soft_cap); None = they stay.
        sinks: [num_heads] float32, a further score of each query head that only adds to the softmax's denominator, so
            that the weights of the keys sum up to less than 1; None = none. It is neither scaled nor capped.
        key_scale: what keys in float8 are multiplied by; see `triolet.kernels.kv_write`.
        value_scale: the same of values.
        prompts: on a GPU, what computes sequences of many queries; None = the Triton kernel.

    Returns:
        [num_tokens, num_heads, head_dim], dtype of `query`, contiguous; zero in rows that belong to no sequence.

    Raises:
        KernelShapeError: the tensors disagree on head_dim, dtype, device or the numbers of tokens and sequences, or
            num_heads is no multiple of num_kv_heads.

    Source: PagedAttention, arXiv 2309.06180; FlashAttention-2, arXiv 2307.08691; split over keys: Flash-Decoding;
        sinks: arXiv 2309.17453, learned as in gpt-oss, arXiv 2508.10925.
        Moves 2 * query.nbytes and each sequence's keys and values, once per tile of queries.
    """
    metadata.check(query, keys, values)
    options: dict[str, Any] = {
        "scale": scale,
        "sliding_window": sliding_window,
        "soft_cap": soft_cap,
        "sinks": sinks,
    }
    scales: dict[str, Any] = {"key_scale": key_scale, "value_scale": value_scale}
    if query.is_cuda:
        return run_or_reference(
            paged_attention_triton
            if prompts is None
            else functools.partial(paged_attention_triton, prompts=prompts),
            paged_attention_reference,
            query,
            keys,
            values,
            metadata,
            **options,
            **scales,
        )
    if mantissa_of(keys.dtype):
        return paged_attention_reference(query, keys, values, metadata, **options, **scales)
    is_known = query.dtype in DTYPES and query.device.type == "cpu"
    if is_known and (cpp := library()) is not None:
        return paged_attention_cpp(cpp, query, keys, values, metadata, **options)
    plan = metadata.gather_plan(keys.shape[1], sliding_window)
    return gathered_attention(query, keys, values, plan, scale=scale, soft_cap=soft_cap, sinks=sinks)


def paged_attention_triton(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    prompts: FlashAttention | None = None,
    segment_tokens: int | None = None,
) -> Tensor:
    """`paged_attention` in Triton, without its checks.

    Sequences of few queries, such as decodes, and those of many have launches of their own: the tile of a sequence and
    its segments follow from its own lengths, so that its bits do not depend on the sequences beside it.

    Args:
        segment_tokens: keys of a segment at least, a multiple of the key tile; None = `SEGMENT_TOKENS`.
    """
    num_tokens, num_heads, head_dim = query.shape
    is_full = sum(metadata.query_lens_host) == num_tokens and not metadata.has_any_lengths
    empty = torch.empty if is_full else torch.zeros
    result = empty(num_tokens, num_heads, head_dim, dtype=query.dtype, device=query.device)
    key = (
        num_heads // keys.shape[2],
        head_dim,
        query.itemsize,
        sliding_window,
        segment_tokens or SEGMENT_TOKENS,
    )
    if key not in metadata.launches:
        metadata.launches[key] = tuple(_launches(metadata, *key))
    launches: tuple[_Launch, ...] = metadata.launches[key]
    if prompts is not None and not all(launch.few for launch in launches):
        # first, since it leaves anything in the rows of the few
        prompts(
            result, query, keys, values, metadata,
            few_queries=launches[0].few_queries, scale=scale, sliding_window=sliding_window,
        )  # fmt: skip
        launches = tuple(launch for launch in launches if launch.few)
    mantissa = mantissa_of(keys.dtype)
    keys, values = as_bytes(keys), as_bytes(values)
    num_seqs = len(metadata.query_lens_host)
    for launch in launches:
        split = launch.num_segments > 1
        partial, largest, total = result, result, result
        if split:
            rows = num_seqs, launch.split_queries, num_heads, launch.num_segments
            partial = torch.empty(*rows, head_dim, dtype=torch.float32, device=query.device)
            # Memory of its own for each: half of one tensor begins where no binary of aligned pointers may read.
            largest, total = (torch.empty(rows, dtype=torch.float32, device=query.device) for _ in range(2))
        _attention_kernel[launch.num_tiles, keys.shape[2], launch.num_segments](
            query, keys, values, partial, largest, total, query if sinks is None else sinks,
            metadata.block_tables, metadata.seq_lens, metadata.cu_query_lens,
            num_seqs, launch.segment_tokens, launch.split_queries,
            scale * key_scale if mantissa else scale, value_scale, soft_cap or 0.0, sliding_window or 0,
            query.stride(0), query.stride(1), metadata.block_tables.stride(0),
            GROUP=num_heads // keys.shape[2], HEAD_DIM=head_dim, PADDED_DIM=launch.padded_dim,
            BLOCK_SIZE=keys.shape[1], ROWS=launch.rows, QUERIES=launch.queries, KEYS=launch.keys,
            FEW=launch.few, FEW_QUERIES=launch.few_queries, MOST_SEGMENTS=MAX_SEGMENTS,
            HAS_WINDOW=sliding_window is not None, HAS_SOFT_CAP=soft_cap is not None, SPLIT=split, WIDEN=INTERPRETING,
            HAS_SINKS=sinks is not None, MANTISSA=mantissa, NATIVE=not INTERPRETING,
            num_warps=launch.num_warps, num_stages=launch.num_stages,
        )  # fmt: skip
        if split:
            _reduce_kernel[num_seqs * launch.split_queries, num_heads](
                partial, largest, total, result, metadata.cu_query_lens, launch.split_queries, launch.num_segments,
                HEAD_DIM=head_dim, PADDED_DIM=launch.padded_dim, MOST_SEGMENTS=MAX_SEGMENTS,
                FEW_QUERIES=launch.few_queries,
            )  # fmt: skip
    return result


@attrs.frozen
class _Launch:
    """Division of some of a step's sequences into programs."""

    few: bool  # for the sequences of at most `few_queries` queries: tile i is sequence i; else for the others
    few_queries: int  # queries that a tile of the few has room for
    num_tiles: int  # tiles of queries, over all sequences
    # Rows of a tile, a power of two: `queries` times the query heads of a KV head, and some idle ones.
    rows: int
    queries: int  # queries of a tile
    keys: int  # keys of one turn of the loop
    padded_dim: int  # head_dim, up to the next power of two that `tl.dot` takes
    segment_tokens: int  # keys of one program, of a sequence that is not longer than `MAX_SEGMENTS` of them
    num_segments: int  # programs that share a tile of queries; 1 = no split
    split_queries: int  # the most queries of a sequence that is split
    num_warps: int
    num_stages: int  # turns of the loop whose keys are on their way


def _launches(
    metadata: AttentionMetadata,
    group: int,
    head_dim: int,
    itemsize: int,
    sliding_window: int | None,
    segment_tokens: int,
) -> Iterator[_Launch]:
    """Yield the launches of a step: of the sequences of few queries, and of those of many, if there are any."""
    query_lens, seq_lens = metadata.query_lens_host, metadata.seq_lens_host
    padded_dim = max(16, next_power_of_2(head_dim))
    row_bytes = padded_dim * itemsize
    key_tile, most_rows = _tile(row_bytes, itemsize)
    few_rows = max(MIN_ROWS, next_power_of_2(group))
    few_queries = few_rows // group
    few = [
        (query_len, seq_len)
        for query_len, seq_len in zip(query_lens, seq_lens, strict=True)
        if 0 < query_len <= few_queries
    ]
    if metadata.has_any_lengths:
        few = [(1, max(seq_lens))]
    if few:
        yield _Launch(
            True, few_queries, len(query_lens), few_rows, few_queries, key_tile, padded_dim, segment_tokens,
            num_segments=max(
                _num_segments(*each, sliding_window, key_tile, segment_tokens) for each in few
            ),
            split_queries=max(query_len for query_len, _ in few),
            # Float32 has its products in registers, and in those of four warps there is no room for all.
            num_warps=8 if itemsize == 4 else 4,
            # The third stage lets the block table be read before the keys of its blocks are wanted.
            num_stages=3 if itemsize < 4 else 2,
        )  # fmt: skip
    if metadata.has_any_lengths or max(query_lens, default=0) > few_queries:
        # Chunks are not split: their tiles alone are many programs, and their segments would take much memory.
        rows = max(few_rows, most_rows)
        queries = rows // group
        num_tiles = sum(query_lens) // queries + len(query_lens)
        yield _Launch(
            False, few_queries, num_tiles, rows, queries, key_tile, padded_dim, segment_tokens,
            num_segments=1, split_queries=1, num_warps=8 if rows * padded_dim >= 8192 else 4, num_stages=2,
        )  # fmt: skip


def _tile(row_bytes: int, itemsize: int) -> tuple[int, int]:
    """Return the keys of a tile, and the rows of one of many queries; a multiprocessor has 99 KiB for them."""
    if itemsize == 4:
        # No tensor core multiplies float32 exactly: more than these do not fit into the registers.
        return 16, 16
    # Two tiles each of keys and values, and one of queries.
    return min(64, max(16, 16384 // row_bytes)), min(128, 32768 // row_bytes)


def _num_segments(
    query_len: int, seq_len: int, sliding_window: int | None, key_tile: int, segment_tokens: int
) -> int:
    """Return the number of segments of a sequence with one tile of queries, by the kernel's own arithmetic."""
    begin = 0
    if sliding_window is not None:  # the first key that the first query sees, rounded down
        begin = max(seq_len - query_len - sliding_window + 1, 0) // key_tile * key_tile
    span = seq_len - begin
    most = math.ceil(math.ceil(span / MAX_SEGMENTS) / key_tile) * key_tile
    return math.ceil(span / max(segment_tokens, most))


def paged_attention_reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """`paged_attention` in torch, a sequence at a time, computed in float32."""
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    block_size, group = keys.shape[1], query.shape[1] // keys.shape[2]
    start = 0
    for sequence, (query_len, seq_len) in enumerate(
        zip(metadata.query_lens_host, metadata.seq_lens_host, strict=True)
    ):
        blocks = metadata.block_tables[sequence, : -(-seq_len // block_size)].long()
        # What is behind the window may be another sequence's by now, and not finite.
        first = 0 if sliding_window is None else max(0, seq_len - query_len - sliding_window + 1)
        k, v = (
            gather_float32(cache, blocks).flatten(0, 1)[first:seq_len].repeat_interleave(group, dim=1)
            for cache in (keys, values)
        )  # each [seq_len - first, num_heads, head_dim]
        rows = slice(start, start + query_len)
        scores = scale * key_scale * torch.einsum("qhd,khd->hqk", query[rows].float(), k)
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        position = torch.arange(seq_len - query_len, seq_len, device=query.device)[:, None]
        key_position = torch.arange(first, seq_len, device=query.device)
        hidden = key_position > position
        if sliding_window is not None:
            hidden |= key_position <= position - sliding_window
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, query_len, 1)), dim=-1)
        weights = scores.softmax(dim=-1)[..., : len(key_position)]
        out[rows] = (value_scale * torch.einsum("hqk,khd->qhd", weights, v)).to(query.dtype)
        start += query_len
    return out
