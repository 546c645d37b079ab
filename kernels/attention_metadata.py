"""Sequences of a step and the places of their keys, for attention over block tables."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import attrs
import torch
from torch import Tensor

from triolet.errors import KernelShapeError
from triolet.kernels.float8 import fits_cache
from triolet.kernels.gathered_attention import GatherPlan


@attrs.frozen(eq=False, kw_only=True)
class AttentionMetadata:
    """Lengths, block tables and slots of a step's sequences; built once per step, shared by every layer."""

    # [num_seqs + 1] int32; sequence i's tokens are rows cu[i]:cu[i+1] of the step's tensors.
    cu_query_lens: Tensor
    # [num_seqs] int32, tokens in the cache once this step's are written (last query's position + 1).
    seq_lens: Tensor
    # [num_seqs, max_blocks] int32, block ids in order; entries past a sequence's end are never read.
    block_tables: Tensor
    # [num_tokens] int64, block_id * block_size + offset for each of this step's tokens; negative = padding.
    slot_mapping: Tensor
    # `diff(cu_query_lens)` as Python ints, so that the host need not wait for the device.
    query_lens_host: tuple[int, ...]
    # `seq_lens` as Python ints. For the kernels on a GPU they may be greater, as those of a captured graph are.
    seq_lens_host: tuple[int, ...]
    # Whether the host knows bounds alone, as where a step with prompts is captured: a sequence may have no token, one,
    # or more than `MAX_FEW_QUERIES`, all together as many as `query_lens_host` says. For the kernels on a GPU.
    has_any_lengths: bool = False
    # What layers of one shape launch, by that shape; the first of them fills it in.
    launches: dict[Hashable, Any] = attrs.field(factory=dict, init=False, repr=False)
    _gather_plans: dict[tuple[int, int | None], GatherPlan] = attrs.field(
        factory=dict, init=False, repr=False
    )

    def gather_plan(self, block_size: int, sliding_window: int | None) -> GatherPlan:
        """Return the slots and masks of each sequence; the first layer that asks computes them."""
        plan = self._gather_plans.get((block_size, sliding_window))
        if plan is None:
            plan = GatherPlan.of(
                self.query_lens_host, self.seq_lens_host, self.block_tables, block_size, sliding_window
            )
            self._gather_plans[block_size, sliding_window] = plan
        return plan

    def check(self, query: Tensor, keys: Tensor, values: Tensor) -> None:
        """Hold the shapes, dtypes and devices of one attention against each other and against this step.

        Raises:
            KernelShapeError: what they disagree on, and what came.
        """
        if keys.ndim != 4 or keys.shape != values.shape or query.ndim != 3 or query.shape[2] != keys.shape[3]:
            raise KernelShapeError(
                "head_dim and the caches' shapes",
                query=tuple(query.shape), keys=tuple(keys.shape), values=tuple(values.shape),
            )  # fmt: skip
        if query.shape[1] % keys.shape[2]:
            raise KernelShapeError(
                "num_heads and num_kv_heads", query=tuple(query.shape), keys=tuple(keys.shape)
            )
        if keys.dtype != values.dtype or not fits_cache(query.dtype, keys.dtype):
            raise KernelShapeError("dtype", query=query.dtype, keys=keys.dtype, values=values.dtype)
        if not query.device == keys.device == values.device == self.block_tables.device:
            raise KernelShapeError(
                "device", query=query.device, keys=keys.device, block_tables=self.block_tables.device
            )
        if not (keys.is_contiguous() and values.is_contiguous()) or query.stride(2) != 1:
            raise KernelShapeError(
                "strides with contiguous rows",
                query=query.stride(),
                keys=keys.stride(),
                values=values.stride(),
            )
        num_seqs = len(self.query_lens_host)
        if len(self.seq_lens_host) != num_seqs or len(self.block_tables) != num_seqs:
            raise KernelShapeError(
                "num_seqs",
                query_lens=num_seqs, seq_lens=len(self.seq_lens_host), block_tables=len(self.block_tables),
            )  # fmt: skip
        tables = self.cu_query_lens, self.seq_lens, self.block_tables
        if any(table.dtype != torch.int32 or table.stride(-1) != 1 for table in tables):
            raise KernelShapeError(
                "int32 and contiguous rows", tables=[(table.dtype, table.stride()) for table in tables]
            )
        if len(self.cu_query_lens) != num_seqs + 1 or len(self.seq_lens) != num_seqs:
            raise KernelShapeError(
                "num_seqs", cu_query_lens=len(self.cu_query_lens), seq_lens=len(self.seq_lens)
            )
        if sum(self.query_lens_host) > len(query):
            raise KernelShapeError("num_tokens", query=len(query), query_lens=self.query_lens_host)
