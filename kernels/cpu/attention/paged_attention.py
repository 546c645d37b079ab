"""Launcher of paged_attention.cpp."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from triolet.kernels.cpu.abi import AttentionCall, no_memory

if TYPE_CHECKING:
    from triolet.kernels.attention_metadata import AttentionMetadata

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Storage types that the kernels know, by the numbers they have in C++."""


def paged_attention_cpp(
    library: ctypes.CDLL,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Run `paged_attention` in C++, without its checks, on torch's number of threads."""
    allocate = torch.empty if sum(metadata.query_lens_host) == len(query) else torch.zeros
    out = allocate(query.shape, dtype=query.dtype)
    call = AttentionCall(
        query=query.data_ptr(),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(),
        out=out.data_ptr(),
        cu_query_lens=metadata.cu_query_lens.data_ptr(),
        seq_lens=metadata.seq_lens.data_ptr(),
        block_tables=metadata.block_tables.data_ptr(),
        query_stride_t=query.stride(0),
        query_stride_h=query.stride(1),
        block_tables_stride=metadata.block_tables.stride(0),
        num_seqs=len(metadata.query_lens_host),
        num_heads=query.shape[1],
        num_kv_heads=keys.shape[2],
        head_dim=query.shape[2],
        block_size=keys.shape[1],
        sliding_window=sliding_window or 0,
        dtype=DTYPES[query.dtype],
        num_threads=torch.get_num_threads(),
        scale=scale,
        soft_cap=soft_cap or 0.0,
    )
    if library.triolet_paged_attention(ctypes.byref(call)):
        raise no_memory()
    return out
