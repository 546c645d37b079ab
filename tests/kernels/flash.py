"""Stand-in on the CPU for torch's flash attention over block tables, which runs on a GPU alone."""

from __future__ import annotations

import itertools
from typing import Any

import attrs
import torch
from torch import Tensor


@attrs.define
class FakeFlash:
    """`torch.nn.attention.varlen.varlen_attn_out` by its documentation, computed in float64.

    Args:
        factor: of all results; other than 1 it is an implementation that is wrong.
    """

    factor: float = 1.0
    calls: list[dict[str, Any]] = attrs.field(factory=list)

    def __call__(
        self,
        out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        window_size: tuple[int, int],
        enable_gqa: bool,
        seqused_k: Tensor,
        block_table: Tensor,
        num_splits: int,
    ) -> None:
        self.calls.append({"num_splits": num_splits, "seqused_k": seqused_k.tolist()})
        assert cu_seq_k is None
        assert enable_gqa or query.shape[1] == key.shape[2]
        assert {tensor.dtype for tensor in (cu_seq_q, seqused_k, block_table)} == {torch.int32}
        block_size, group = key.shape[1], query.shape[1] // key.shape[2]
        ends = cu_seq_q.tolist()
        for row, (first, end) in enumerate(itertools.pairwise(ends)):
            num_keys, num_queries = int(seqused_k[row]), end - first
            assert num_queries <= max_q
            assert num_keys <= max_k
            if not num_queries:
                continue
            if not num_keys:
                out[first:end] = torch.nan  # undefined
                continue
            blocks = block_table[row, : -(-num_keys // block_size)].long()
            k, v = (
                each[blocks].flatten(0, 1)[:num_keys].double().repeat_interleave(group, dim=1)
                for each in (key, value)
            )
            scores = torch.einsum("qhd,khd->hqk", query[first:end].double(), k) * scale
            # the last query is at the last key
            distance = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)
            hidden = distance < -window_size[1]
            if window_size[0] >= 0:
                hidden |= distance > window_size[0]
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            out[first:end] = (self.factor * torch.einsum("hqk,khd->qhd", weights, v)).to(out.dtype)
