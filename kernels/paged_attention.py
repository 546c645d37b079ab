# mypy: allow-untyped-defs, allow-incomplete-defs
"""Attention over block tables: prefill chunks and decodes in one call."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from triolet.errors import KernelShapeError
from triolet.kernels.gathered_attention import GatherPlan, gathered_attention


@attrs.frozen(eq=False, kw_only=True)
class AttentionMetadata:
    """Where this step's sequences stand: built once per step, shared by every layer.

    Args:
        cu_query_lens: [num_seqs + 1] int32; sequence i's tokens are rows cu[i]:cu[i+1] of the step's tensors.
        seq_lens: [num_seqs] int32, tokens in the cache once this step's are written (last query's position + 1).
        block_tables: [num_seqs, max_blocks] int32, block ids in order; entries past a sequence's end are never read.
        slot_mapping: [num_tokens] int64, block_id * block_size + offset for each of this step's tokens;
            negative = padding.
        query_lens_host: `diff(cu_query_lens)` as Python ints, so that the host need not wait for the device.
        seq_lens_host: `seq_lens` as Python ints.
    """

    cu_query_lens: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    query_lens_host: tuple[int, ...]
    seq_lens_host: tuple[int, ...]
    _gather_plans: dict[tuple[int, int | None], GatherPlan] = attrs.field(factory=dict, init=False, repr=False)

    def gather_plan(self, block_size: int, sliding_window: int | None) -> GatherPlan:
        """Which slots each sequence reads, and what it masks: made by the first layer that asks, for all of them."""
        plan = self._gather_plans.get((block_size, sliding_window))
        if plan is None:
            plan = GatherPlan.of(
                self.query_lens_host, self.seq_lens_host, self.block_tables, block_size, sliding_window
            )
            self._gather_plans[block_size, sliding_window] = plan
        return plan


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Attend from each of this step's tokens to its own sequence's past and itself.

    The query at position p sees the keys j <= p, and with a window of w only those with j > p - w. The keys and values
    of this step's tokens are in the cache already. Query head h reads KV head h * num_kv_heads // num_heads.

    Args:
        query: [num_tokens, num_heads, head_dim], last dim contiguous.
        keys: [num_blocks, block_size, num_kv_heads, head_dim], contiguous, dtype and device of `query`.
        values: the same.
        metadata: whose tokens these are and where their sequences' blocks lie.
        scale: factor of the scores, usually head_dim ** -0.5.
        sliding_window: keys that a query sees at most, itself among them; None = all.
        soft_cap: scores s become soft_cap * tanh(s / soft_cap); None = they stay.

    Returns:
        [num_tokens, num_heads, head_dim], dtype of `query`, contiguous; zero in rows that belong to no sequence.

    Raises:
        KernelShapeError: the tensors disagree on head_dim, dtype, device or the numbers of tokens and sequences, or
            num_heads is no multiple of num_kv_heads.

    Source: PagedAttention, arXiv 2309.06180; FlashAttention-2, arXiv 2307.08691; split over keys: Flash-Decoding.
        Moves 2 * query.nbytes and each sequence's keys and values, once per tile of queries.
    """
    _check(query, keys, values, metadata)
    plan = metadata.gather_plan(keys.shape[1], sliding_window)
    return gathered_attention(query, keys, values, plan, scale=scale, soft_cap=soft_cap)


def paged_attention_reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    block_size, group = keys.shape[1], query.shape[1] // keys.shape[2]
    start = 0
    for sequence, (query_len, seq_len) in enumerate(
        zip(metadata.query_lens_host, metadata.seq_lens_host, strict=True)
    ):
        blocks = metadata.block_tables[sequence, : -(-seq_len // block_size)].long()
        k, v = (cache[blocks].flatten(0, 1)[:seq_len].float() for cache in (keys, values))  # [seq_len, kv_heads, dim]
        rows = slice(start, start + query_len)
        scores = scale * torch.einsum("qhd,khd->hqk", query[rows].float(), k.repeat_interleave(group, dim=1))
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        position = torch.arange(seq_len - query_len, seq_len, device=query.device)[:, None]
        key_position = torch.arange(seq_len, device=query.device)
        hidden = key_position > position
        if sliding_window is not None:
            hidden |= key_position <= position - sliding_window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, dim=1)).to(query.dtype)
        start += query_len
    return out


def _check(query: Tensor, keys: Tensor, values: Tensor, metadata: AttentionMetadata) -> None:
    if keys.ndim != 4 or keys.shape != values.shape or query.ndim != 3 or query.shape[2] != keys.shape[3]:
        raise KernelShapeError(
            "head_dim and the caches' shapes",
            query=tuple(query.shape), keys=tuple(keys.shape), values=tuple(values.shape),
        )  # fmt: skip
    if query.shape[1] % keys.shape[2]:
        raise KernelShapeError("num_heads and num_kv_heads", query=tuple(query.shape), keys=tuple(keys.shape))
    if not query.dtype == keys.dtype == values.dtype:
        raise KernelShapeError("dtype", query=query.dtype, keys=keys.dtype, values=values.dtype)
    if not query.device == keys.device == values.device == metadata.block_tables.device:
        raise KernelShapeError(
            "device", query=query.device, keys=keys.device, block_tables=metadata.block_tables.device
        )
    if not (keys.is_contiguous() and values.is_contiguous()) or query.stride(2) != 1:
        raise KernelShapeError(
            "strides with contiguous rows", query=query.stride(), keys=keys.stride(), values=values.stride()
        )
    num_seqs = len(metadata.query_lens_host)
    if len(metadata.seq_lens_host) != num_seqs or len(metadata.block_tables) != num_seqs:
        raise KernelShapeError(
            "num_seqs",
            query_lens=num_seqs, seq_lens=len(metadata.seq_lens_host), block_tables=len(metadata.block_tables),
        )  # fmt: skip
    if sum(metadata.query_lens_host) > len(query):
        raise KernelShapeError("num_tokens", query=len(query), query_lens=metadata.query_lens_host)
