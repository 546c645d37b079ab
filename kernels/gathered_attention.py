"""Paged attention with torch alone: gather what a sequence reads, then one dense attention over it.

The CPU runs this where there are no compiled kernels (`cpu.library`). Decodes are computed several at once, padded to
the longest of a group of similar lengths; a prefill chunk is computed alone, in tiles of queries, so that a tile
meets few keys that all of it masks. Which slots are gathered and what is masked is the same in every layer: it is
worked out once per step, in a `GatherPlan`, which also keeps the memory that is gathered into, because fresh pages
cost more than the copy.

Only slots that belong to the sequence are gathered: what other slots hold, even NaN, cannot reach a result. All
is computed in float32, because attention in bfloat16 is slower than that on CPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from triolet.errors import KernelShapeError

QUERY_TILE = 256
"""Queries of a prefill chunk computed at once: bounds the mask, and skips half of the work of a long prompt."""

GROUP_KEYS = 1024
"""Keys that a group of decodes gathers at most, padding included, so that they are still in the CPU's cache when
they are used: measured, groups of 512 to 1024 keys are up to twice as fast as all at once."""

ALIKE_KEYS = 64
"""Decodes are alike if one reads at least half as many keys as the other, or lacks at most this many."""


@attrs.frozen(eq=False, kw_only=True)
class _Decodes:
    """Sequences with one query each, padded to the same number of keys."""

    # [num_seqs] int64, their rows in the step's tensors; a slice where they are neighbours.
    rows: Tensor | slice
    # [num_seqs * num_keys] int64, what they read; a sequence with fewer keys repeats its last one.
    slots: Tensor
    mask: Tensor | None  # [num_seqs, 1, 1, num_keys] float32, 0 or -inf; None = nothing is masked
    num_seqs: int  # how many they are

    def attend(self, step: _Step) -> None:
        num_kv_heads, head_dim = step.keys.shape[1:]
        query = step.query[self.rows].reshape(self.num_seqs, num_kv_heads, -1, head_dim).float()
        k, v = (
            gathered.view(self.num_seqs, -1, num_kv_heads, head_dim).transpose(1, 2)
            for gathered in step.gather(self.slots)
        )  # each [num_seqs, num_kv_heads, num_keys, head_dim]; a KV head's query heads stand as its queries
        # The query heads of a KV head stand as queries.
        sinks = None if step.sinks is None else step.sinks.view(num_kv_heads, -1, 1)
        attended = step.attention(query, k, v, self.mask, sinks)
        step.result[self.rows] = attended.reshape(self.num_seqs, -1, head_dim).to(step.result.dtype)


@attrs.frozen(eq=False, kw_only=True)
class _Tile:
    """Some queries of a chunk, and the span of the chunk's gathered keys that they may see."""

    rows: slice  # their rows in the step's tensors
    keys: slice  # the span of keys, counted from the first gathered one
    # [num_queries, num_keys] float32, 0 or -inf; None = plainly causal, as many keys as queries.
    mask: Tensor | None


@attrs.frozen(eq=False, kw_only=True)
class _Chunk:
    """Several queries of one sequence."""

    slots: Tensor  # [num_keys] int64, all that the chunk reads
    tiles: tuple[_Tile, ...]  # its queries

    def attend(self, step: _Step) -> None:
        num_kv_heads, head_dim = step.keys.shape[1:]
        group = step.query.shape[1] // num_kv_heads
        k, v = (
            gathered.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
            for gathered in step.gather(self.slots)
        )  # each [num_kv_heads, group, num_keys, head_dim]
        sinks = None if step.sinks is None else step.sinks.view(num_kv_heads, group, 1, 1)
        for tile in self.tiles:
            query = step.query[tile.rows].float().view(-1, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
            attended = step.attention(
                query, k[:, :, tile.keys], v[:, :, tile.keys], tile.mask, sinks, causal=tile.mask is None
            )  # [num_kv_heads, group, num_queries, head_dim]
            step.result[tile.rows].view(-1, num_kv_heads, group, head_dim).copy_(attended.permute(2, 0, 1, 3))


@attrs.frozen(eq=False)
class GatherPlan:
    """Slots and masks of one step's attention, for one block size and one sliding window."""

    parts: tuple[_Decodes | _Chunk, ...]  # groups of decodes, and chunks
    num_rows: int  # rows of the step's tensors that belong to a sequence
    max_keys: int  # slots that a part gathers at most
    _scratch: dict[tuple[torch.dtype, int, int], tuple[Tensor, Tensor]] = attrs.field(
        factory=dict, init=False
    )

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
        planner = _Planner(block_tables, block_size, sliding_window)
        singles: list[_Single] = []
        parts: list[_Decodes | _Chunk] = []
        row = 0
        for sequence, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
            if query_len == 1:
                singles.append(_Single(row, sequence, planner.first_key(seq_len - 1), seq_len))
            elif query_len > 1:
                parts.append(planner.chunk(row, sequence, query_len, seq_len))
            row += query_len
        for alike in _alike(singles):
            parts += planner.decodes(alike)
        return cls(tuple(parts), row, max((len(part.slots) for part in parts), default=0))

    def scratch(self, dtype: torch.dtype, num_kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
        """Two buffers, each [max_keys, num_kv_heads, head_dim]; the same ones every time."""
        key = (dtype, num_kv_heads, head_dim)
        if key not in self._scratch:
            first, second = torch.empty(2, self.max_keys, num_kv_heads, head_dim, dtype=dtype).unbind()
            self._scratch[key] = first, second
        return self._scratch[key]


def gathered_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: GatherPlan,
    *,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`paged_attention` by gathering, with the plan in place of the metadata; on the CPU."""
    if query.device.type != "cpu":
        raise KernelShapeError("device", query=query.device, gathered_attention="cpu")
    allocate = torch.empty if plan.num_rows == len(query) else torch.zeros
    result = allocate(query.shape, dtype=query.dtype)
    step = _Step(query, keys.flatten(0, 1), values.flatten(0, 1), result, plan, scale, soft_cap, sinks)
    for part in plan.parts:
        part.attend(step)
    return result


@attrs.frozen(eq=False)
class _Step:
    """One call's tensors, as each part of the plan needs them."""

    query: Tensor  # [num_tokens, num_heads, head_dim]
    keys: Tensor  # [num_slots, num_kv_heads, head_dim]
    values: Tensor  # the same
    result: Tensor  # like `query`
    plan: GatherPlan  # holds the scratch memory
    scale: float  # factor of the scores
    soft_cap: float | None  # bound of the scores, or None
    sinks: Tensor | None  # [num_heads] float32, or None

    def gather(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Gather the keys and values in `slots`, each [num_slots, num_kv_heads, head_dim] float32.

        The two are views of scratch memory, valid until the next call.
        """
        num_kv_heads, head_dim = self.keys.shape[1:]
        scratch = self.plan.scratch(self.keys.dtype, num_kv_heads, head_dim)
        gathered = tuple(
            torch.index_select(cache, 0, slots, out=buffer[: len(slots)])
            for cache, buffer in zip((self.keys, self.values), scratch, strict=True)
        )
        if self.keys.dtype != torch.float32:
            wide = self.plan.scratch(torch.float32, num_kv_heads, head_dim)
            gathered = tuple(
                buffer[: len(slots)].copy_(narrow) for buffer, narrow in zip(wide, gathered, strict=True)
            )
        return gathered[0], gathered[1]

    def attention(
        self,
        query: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        sinks: Tensor | None,
        *,
        causal: bool = False,
    ) -> Tensor:
        # dense, over the last two dimensions, [..., num_queries, head_dim]; sinks: [..., num_queries or 1, 1]
        if self.soft_cap is None and sinks is None:
            return functional.scaled_dot_product_attention(
                query, k, v, attn_mask=mask, is_causal=causal, scale=self.scale
            )
        if self.soft_cap is None:
            scores = query @ k.transpose(-1, -2) * self.scale
        else:
            scores = self.soft_cap * torch.tanh(query @ k.transpose(-1, -2) * (self.scale / self.soft_cap))
        if causal:
            mask = _causal_mask(0, k.shape[-2], 0, k.shape[-2], None)
        if mask is not None:
            scores += mask
        if sinks is None:
            return scores.softmax(dim=-1) @ v
        largest = torch.maximum(scores.amax(dim=-1, keepdim=True), sinks)
        weights = (scores - largest).exp_()
        return weights @ v / (weights.sum(dim=-1, keepdim=True) + (sinks - largest).exp())


@attrs.frozen
class _Single:
    """A sequence with one query: where its row is, and which keys it reads."""

    row: int
    sequence: int
    first_key: int
    end_key: int

    @property
    def num_keys(self) -> int:
        return self.end_key - self.first_key


def _alike(singles: list[_Single]) -> Iterator[list[_Single]]:
    """Part the decodes into lists of similar length, longest first."""
    alike: list[_Single] = []
    for single in sorted(singles, key=lambda single: (-single.num_keys, single.row)):
        longest = alike[0].num_keys if alike else 0
        if 2 * single.num_keys < longest and longest - single.num_keys > ALIKE_KEYS:
            yield alike
            alike = []
        alike.append(single)
    if alike:
        yield alike


@attrs.frozen(eq=False)
class _Planner:
    """Turns lengths into slots and masks."""

    block_tables: Tensor
    block_size: int
    sliding_window: int | None

    def first_key(self, position: int) -> int:
        return 0 if self.sliding_window is None else max(0, position - self.sliding_window + 1)

    def decodes(self, alike: list[_Single]) -> Iterator[_Decodes]:
        """Yield groups of at most `GROUP_KEYS` keys, from decodes that stand longest first."""
        slots = self._padded_slots(alike)  # [num_seqs, num_keys]
        mask = _padding_mask([single.num_keys for single in alike])  # [num_seqs, 1, 1, num_keys]
        start = 0
        while start < len(alike):
            num_keys = alike[start].num_keys
            group = alike[start : start + max(1, GROUP_KEYS // num_keys)]
            end = start + len(group)
            yield _Decodes(
                rows=_rows(group),
                slots=slots[start:end, :num_keys].flatten(),
                mask=mask[start:end, ..., :num_keys] if group[-1].num_keys < num_keys else None,
                num_seqs=len(group),
            )
            start = end

    def chunk(self, row: int, sequence: int, query_len: int, seq_len: int) -> _Chunk:
        first_query = seq_len - query_len
        first_key = self.first_key(first_query)
        tiles = tuple(
            self._tile(row - first_query, start, min(start + QUERY_TILE, seq_len), first_key)
            for start in range(first_query, seq_len, QUERY_TILE)
        )
        return _Chunk(slots=self._slots(sequence, first_key, seq_len), tiles=tiles)

    def _slots(self, sequence: int, first_key: int, end_key: int) -> Tensor:
        # [end_key - first_key] int64: slots of one sequence's keys
        first_block, end_block = first_key // self.block_size, -(-end_key // self.block_size)
        blocks = self.block_tables[sequence, first_block:end_block].long()
        slots = (blocks[:, None] * self.block_size + torch.arange(self.block_size)).flatten()
        skipped = first_block * self.block_size
        return slots[first_key - skipped : end_key - skipped]

    def _padded_slots(self, singles: list[_Single]) -> Tensor:
        # [num_seqs, largest num_keys] int64: slots of their keys, padded with the last one
        if len(singles) == 1:
            return self._slots(singles[0].sequence, singles[0].first_key, singles[0].end_key)[None]
        facts = torch.tensor([(single.sequence, single.first_key, single.end_key - 1) for single in singles])
        sequence, first_key, last_key = facts.unbind(1)
        positions = first_key[:, None] + torch.arange(max(single.num_keys for single in singles))
        positions = torch.minimum(positions, last_key[:, None])
        blocks = self.block_tables[sequence].gather(1, positions // self.block_size)
        return blocks.long() * self.block_size + positions % self.block_size

    def _tile(self, row_of_position_0: int, start: int, end: int, first_gathered: int) -> _Tile:
        first_key = self.first_key(start)
        plainly_causal = first_key == start and (
            self.sliding_window is None or end - start <= self.sliding_window
        )
        return _Tile(
            rows=slice(row_of_position_0 + start, row_of_position_0 + end),
            keys=slice(first_key - first_gathered, end - first_gathered),
            mask=None if plainly_causal else _causal_mask(start, end, first_key, end, self.sliding_window),
        )


def _rows(group: list[_Single]) -> Tensor | slice:
    rows = [single.row for single in group]
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return torch.tensor(rows)


def _padding_mask(num_keys: list[int]) -> Tensor:
    # [num_seqs, 1, 1, num_keys[0]] float32: 0 for a sequence's keys, -inf past them
    past_end = torch.arange(num_keys[0]) >= torch.tensor(num_keys)[:, None]
    return torch.zeros(past_end.shape).masked_fill_(past_end, float("-inf"))[:, None, None]


def _causal_mask(start: int, end: int, first_key: int, end_key: int, sliding_window: int | None) -> Tensor:
    # [end - start, end_key - first_key] float32: 0 where the query sees the key, -inf elsewhere
    position = torch.arange(start, end)[:, None]
    key_position = torch.arange(first_key, end_key)
    hidden = key_position > position
    if sliding_window is not None:
        hidden |= key_position <= position - sliding_window
    return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
