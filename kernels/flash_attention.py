"""Attention of prompts by torch's flash attention over block tables, in place of the Triton kernel.

FlashAttention 2 is a part of torch; 3 and 4 are packages of their own, which torch puts in its place. None is needed.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import attrs
import torch
from torch import Tensor

from triolet.kernels.attention_metadata import AttentionMetadata

IMPLEMENTATIONS: Final = MappingProxyType({"fa2": None, "fa3": "FA3", "fa4": "FA4"})
"""Names in a configuration, and those in torch's registry; FlashAttention 2 is what torch has without one."""
FA2_BLOCK_SIZE: Final = 256
"""A block size of FlashAttention 2 is a multiple of it."""
MAX_HEAD_DIM: Final = 256


@attrs.frozen
class FlashAttention:
    """Attention of a step's sequences of many queries, by an implementation of torch's flash attention.

    Args:
        name: one of `IMPLEMENTATIONS`.

    Source: FlashAttention-2, arXiv 2307.08691; FlashAttention-3, arXiv 2407.08608.
    """

    name: str

    def activate(self) -> None:
        """Make it what torch calls, in all of this process.

        Raises:
            ImportError: its package is not installed, or this version of torch knows no such thing.
            RuntimeError: the package does not fit.
        """
        from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

        if (registered := IMPLEMENTATIONS[self.name]) is None:
            restore_flash_attention_impl(_raise_warn=False)
        else:
            activate_flash_attention_impl(registered)

    def problem_with(
        self, dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, block_size: int
    ) -> str | None:
        """Return what of a model it cannot compute; None if nothing is known to hinder it."""
        if dtype not in (torch.float16, torch.bfloat16):
            return f"float16 or bfloat16 is needed; got {dtype}"
        if cache_dtype != dtype:
            return f"a KV cache in the model's dtype is needed; got {cache_dtype}"
        if head_dim > MAX_HEAD_DIM or head_dim % 8:
            return f"a head_dim that is a multiple of 8 up to {MAX_HEAD_DIM} is needed; got {head_dim}"
        if self.name == "fa2" and block_size % FA2_BLOCK_SIZE:
            return f"block_size must be a multiple of {FA2_BLOCK_SIZE}; got {block_size}"
        return None

    def __call__(
        self,
        out: Tensor,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        metadata: AttentionMetadata,
        *,
        few_queries: int,
        scale: float,
        sliding_window: int | None,
    ) -> None:
        """Write the rows of sequences of more than `few_queries` queries; the others' are undefined afterwards.

        Args:
            out: [num_tokens, num_heads, head_dim], contiguous.
            query: see `paged_attention`, and so `keys`, `values`, `metadata`, `scale`, `sliding_window`.
            few_queries: of the longest sequence that is left out.
        """
        from torch.nn.attention.varlen import varlen_attn_out

        if (key := ("lengths of prompts", few_queries)) not in metadata.launches:
            # without keys a sequence costs nothing
            is_prompt = metadata.cu_query_lens.diff() > few_queries
            metadata.launches[key] = metadata.seq_lens.where(is_prompt, 0)
        varlen_attn_out(
            out,
            query,
            keys,
            values,
            metadata.cu_query_lens,
            None,
            max(metadata.query_lens_host),
            max(metadata.seq_lens_host),
            scale=scale,
            window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
            enable_gqa=query.shape[1] != keys.shape[2],
            seqused_k=metadata.launches[key],
            block_table=metadata.block_tables,
            num_splits=1,  # so that a row's bits do not depend on the rows beside it
        )
