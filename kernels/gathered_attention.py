"""Paged attention with torch alone: gather what a sequence reads, then one dense attention over it.

This is what the CPU runs. A step's decodes are computed together, padded to the longest of a group whose lengths are
alike; a prefill chunk is computed alone, in tiles of queries, so that a tile meets no key that all of it masks. Which
slots are gathered and what is masked is the same in every layer, so it is worked out once per step, in a `GatherPlan`.

Only slots that belong to the sequence are gathered: what other slots hold, even NaN, can not reach a result. All is
computed in float32, because attention in bfloat16 is slower than that on CPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

QUERY_TILE = 256
"""Queries of a prefill chunk computed at once: bounds the mask, and skips half of the work of a long prompt."""

ALIKE_TOKENS = 64
"""Decodes share a group if they read at least half as many keys as its longest, or lack at most this many."""


@attrs.frozen(eq=False)
class _Decodes:
    """Sequences with one query each, padded to the same number of keys.

    Args:
        rows: [n] int64, their rows in the step's tensors.
        slots: [n * num_keys] int64, what they read; a sequence with fewer keys repeats its last one.
        mask: [n, 1, 1, num_keys] float32, 0 or -inf; None = nothing is masked.
    """

    rows: Tensor
    slots: Tensor
    mask: Tensor | None


@attrs.frozen(eq=False)
class _Tile:
    """Queries of one chunk and the span of the chunk's gathered keys that they may see.

    Args:
        rows: their rows in the step's tensors.
        keys: the span of keys, counted from the first gathered one.
        mask: [queries, keys] float32, 0 or -inf; None = plainly causal, as many keys as queries.
    """

    rows: slice
    keys: slice
    mask: Tensor | None


@attrs.frozen(eq=False)
class _Chunk:
    """Several queries of one sequence.

    Args:
        slots: [num_keys] int64, all that the chunk reads.
        tiles: its queries.
    """

    slots: Tensor
    tiles: tuple[_Tile, ...]


@attrs.frozen(eq=False)
class GatherPlan:
    """What one step's attention reads, for one block size and one sliding window.

    Args:
        decodes: groups of sequences with one query.
        chunks: sequences with several queries.
        num_rows: rows that belong to a sequence.
    """

    decodes: tuple[_Decodes, ...]
    chunks: tuple[_Chunk, ...]
    num_rows: int

    @classmethod
    def of(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: Tensor,
        block_size: int,
        sliding_window: int | None,
    ) -> GatherPlan:
        """Work out the plan; arguments as in `AttentionMetadata`, lengths as Python ints."""
        single: list[tuple[int, int, int]] = []  # (first key, row, sequence)
        chunks: list[_Chunk] = []
        row = 0
        for sequence, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
            if query_len == 1:
                single.append((_first_key(seq_len - 1, sliding_window), row, sequence))
            elif query_len > 1:
                chunks.append(_chunk(row, query_len, seq_len, block_tables[sequence], block_size, sliding_window))
            row += query_len
        decodes = tuple(_decodes(group, seq_lens, block_tables, block_size) for group in _alike(single, seq_lens))
        return cls(decodes, tuple(chunks), row)


def gathered_attention(
    query: Tensor, keys: Tensor, values: Tensor, plan: GatherPlan, *, scale: float, soft_cap: float | None
) -> Tensor:
    """`paged_attention` by gathering; arguments and result as there, with the plan in place of the metadata."""
    num_tokens, num_heads, head_dim = query.shape
    out = torch.zeros if plan.num_rows < num_tokens else torch.empty
    result = out(num_tokens, num_heads, head_dim, dtype=query.dtype, device=query.device)
    caches = keys.flatten(0, 1), values.flatten(0, 1)  # each [num_slots, num_kv_heads, head_dim]
    for decodes in plan.decodes:
        _attend_decodes(query, caches, decodes, result, scale, soft_cap)
    for chunk in plan.chunks:
        _attend_chunk(query, caches, chunk, result, scale, soft_cap)
    return result


def _attend_decodes(
    query: Tensor, caches: tuple[Tensor, Tensor], decodes: _Decodes, result: Tensor, scale: float, cap: float | None
) -> None:
    num_seqs, (_, num_kv_heads, head_dim) = len(decodes.rows), caches[0].shape
    in_order = num_seqs == len(query)
    rows = query if in_order else query.index_select(0, decodes.rows)
    grouped = rows.reshape(num_seqs, num_kv_heads, -1, head_dim).float()  # a KV head's query heads as its queries
    k, v = (
        cache.index_select(0, decodes.slots).view(num_seqs, -1, num_kv_heads, head_dim).transpose(1, 2).float()
        for cache in caches
    )  # each [num_seqs, num_kv_heads, num_keys, head_dim]
    attended = _attend(grouped, k, v, decodes.mask, False, scale, cap).reshape(rows.shape)
    if in_order:
        result.copy_(attended)
    else:
        result.index_copy_(0, decodes.rows, attended.to(result.dtype))


def _attend_chunk(
    query: Tensor, caches: tuple[Tensor, Tensor], chunk: _Chunk, result: Tensor, scale: float, cap: float | None
) -> None:
    _, num_kv_heads, head_dim = caches[0].shape
    group = query.shape[1] // num_kv_heads
    k, v = (
        cache.index_select(0, chunk.slots).float().transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
        for cache in caches
    )  # each [num_kv_heads, group, num_keys, head_dim]
    for tile in chunk.tiles:
        rows = query[tile.rows].float().unflatten(1, (num_kv_heads, group)).permute(1, 2, 0, 3)
        attended = _attend(
            rows, k[:, :, tile.keys], v[:, :, tile.keys], tile.mask, tile.mask is None, scale, cap
        )  # [num_kv_heads, group, queries, head_dim]
        result[tile.rows].unflatten(1, (num_kv_heads, group)).copy_(attended.permute(2, 0, 1, 3))


def _attend(
    query: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, cap: float | None
) -> Tensor:
    if cap is None:
        return F.scaled_dot_product_attention(query, k, v, attn_mask=mask, is_causal=causal, scale=scale)
    scores = cap * torch.tanh((scale / cap) * (query @ k.transpose(-1, -2)))
    if causal:
        mask = _mask(0, k.shape[-2], 0, k.shape[-2], None, query.device)
    if mask is not None:
        scores += mask
    return scores.softmax(dim=-1) @ v


def _first_key(position: int, sliding_window: int | None) -> int:
    return 0 if sliding_window is None else max(0, position - sliding_window + 1)


def _alike(
    single: list[tuple[int, int, int]], seq_lens: Sequence[int]
) -> Iterator[list[tuple[int, int, int]]]:
    """Cut the decodes into groups whose padding is worth less than another call."""
    if not single:
        return
    by_length = sorted(single, key=lambda one: (one[0] - seq_lens[one[2]], one[1]))
    group: list[tuple[int, int, int]] = []
    longest = 0
    for one in by_length:
        num_keys = seq_lens[one[2]] - one[0]
        if group and 2 * num_keys < longest and longest - num_keys > ALIKE_TOKENS:
            yield sorted(group, key=lambda one: one[1])
            group = []
        if not group:
            longest = num_keys
        group.append(one)
    yield sorted(group, key=lambda one: one[1])


def _decodes(
    group: list[tuple[int, int, int]], seq_lens: Sequence[int], block_tables: Tensor, block_size: int
) -> _Decodes:
    device = block_tables.device
    first, rows, sequences = torch.tensor(group, device=device).unbind(1)
    last = torch.tensor([seq_lens[sequence] - 1 for _, _, sequence in group], device=device)
    num_keys = max(seq_lens[sequence] - first_key for first_key, _, sequence in group)
    positions = first[:, None] + torch.arange(num_keys, device=device)  # [num_seqs, num_keys]
    past_end = positions > last[:, None]
    positions = torch.minimum(positions, last[:, None])
    blocks = block_tables[sequences].gather(1, positions // block_size).long()
    slots = blocks * block_size + positions % block_size
    mask = None
    if any(seq_lens[sequence] - first_key != num_keys for first_key, _, sequence in group):
        mask = torch.zeros(past_end.shape, device=device).masked_fill_(past_end, float("-inf"))[:, None, None, :]
    return _Decodes(rows, slots.flatten(), mask)


def _chunk(
    row: int, query_len: int, seq_len: int, block_table: Tensor, block_size: int, sliding_window: int | None
) -> _Chunk:
    first_query = seq_len - query_len
    first_key = _first_key(first_query, sliding_window)
    positions = torch.arange(first_key, seq_len, device=block_table.device)
    slots = block_table[positions // block_size].long() * block_size + positions % block_size
    tiles = []
    for start in range(0, query_len, QUERY_TILE):
        end = min(start + QUERY_TILE, query_len)
        low, high = _first_key(first_query + start, sliding_window), first_query + end
        plain = low == first_query + start and (sliding_window is None or high - low <= sliding_window)
        mask = None if plain else _mask(first_query + start, high, low, high, sliding_window, block_table.device)
        tiles.append(_Tile(slice(row + start, row + end), slice(low - first_key, high - first_key), mask))
    return _Chunk(slots, tuple(tiles))


def _mask(
    first_query: int, end_query: int, first_key: int, end_key: int, sliding_window: int | None, device: torch.device
) -> Tensor:
    """[queries, keys] float32: 0 where the query sees the key, -inf elsewhere."""
    position = torch.arange(first_query, end_query, device=device)[:, None]
    key_position = torch.arange(first_key, end_key, device=device)
    hidden = key_position > position
    if sliding_window is not None:
        hidden |= key_position <= position - sliding_window
    return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))
