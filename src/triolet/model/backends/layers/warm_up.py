"""Steps that make a decoder launch every kernel of its layers, so that none is compiled while it serves.

A binary of a kernel depends on the model and on the tile, which follows from a step's lengths: prompts, decodes of one
part or of several, and few, some or many tokens in the product with packed weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from triolet.kernels.attention_metadata import AttentionMetadata
from triolet.kernels.paged_attention import SEGMENT_TOKENS
from triolet.model.interface import CausalModel, ForwardBatch
from triolet.model.memory.kv_cache import allocate_layer

# (query length, sequence length) of each sequence of a step
WARM_UP_STEPS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((1, 1),),
    ((1, SEGMENT_TOKENS + 1),),
    ((40, 40),),
    ((200, 200), (1, 9), (1, SEGMENT_TOKENS + 1)),
)


def compute_warm_up_steps(
    model: CausalModel, device: torch.device, block_size: int, lengths: Sequence[int] = ()
) -> None:
    """Compute all `WARM_UP_STEPS` that are not longer than the model allows, over a cache of their own.

    Args:
        model: whose kernels are to be compiled.
        device: of it.
        block_size: tokens in a block.
        lengths: tokens of further steps.
    """
    further = tuple(((1, 1),) * length for length in lengths)
    for step in WARM_UP_STEPS + further:
        if max(seq_len for _, seq_len in step) <= model.spec.max_position:
            model.forward(_batch(model, step, device, block_size))


def _batch(
    model: CausalModel, step: tuple[tuple[int, int], ...], device: torch.device, block_size: int
) -> ForwardBatch:
    """Return a step of tokens 0 whose sequences share their blocks: what they read does not matter."""
    spec = model.spec
    query_lens, seq_lens = zip(*step, strict=True)
    num_tokens, num_blocks = sum(query_lens), -(-max(seq_lens) // block_size)

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    def on_device(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    ends = [sum(query_lens[:index]) for index in range(len(step) + 1)]
    cache = tuple(
        allocate_layer(
            layer,
            num_blocks,
            block_size,
            spec.cache_dtype,
            lambda shape, dtype: zeros(*shape, dtype=dtype or spec.dtype),
        )
        for layer in spec.cache_layers
    )
    metadata = AttentionMetadata(
        cu_query_lens=on_device(ends),
        seq_lens=on_device(list(seq_lens)),
        block_tables=zeros(len(step), num_blocks, dtype=torch.int32),
        slot_mapping=zeros(num_tokens),
        query_lens_host=query_lens,
        seq_lens_host=seq_lens,
    )
    tokens = zeros(num_tokens)
    return ForwardBatch(
        token_ids=tokens, positions=tokens, cache=cache, attention=metadata, logits_indices=zeros(1)
    )
