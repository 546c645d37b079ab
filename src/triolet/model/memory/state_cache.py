"""Memory of recurrent layers' states, and the size of blocks that hold them.

A recurrent layer has a state in every block, however many tokens the block has. With blocks as small as those of other
models the states would take many times the memory of keys and values; with larger ones a sequence wastes more of its
last block, and a prefix is found in coarser steps. So by default a block has so many tokens that their keys and values
take as much memory as its states: then at most half of the memory is for states. A model that keeps states alone has
the tokens of a step in a block: a sequence reads the last of its blocks only, so that longer ones save nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from triolet.config.engine import DEFAULT_BLOCK_SIZE
from triolet.core.scheduling.budget import DEFAULT_BATCHED_TOKENS
from triolet.model.interface import NUM_VERSIONS, LayerStates, LayerStateSpec, ModelSpec


def block_size_of(spec: ModelSpec, longest: int) -> int:
    """Return the tokens in a block, where the operator does not set them: a power of two.

    Args:
        spec: the loaded model.
        longest: sequence, tokens; no more than these go into a block.
    """
    size, per_token = DEFAULT_BLOCK_SIZE, spec.kv_bytes_per_token()
    if not per_token:
        longest = min(longest, DEFAULT_BATCHED_TOKENS)
    while size < longest and size * per_token < spec.state_bytes_per_block():
        size *= 2
    return size


def allocate_states(
    spec: LayerStateSpec, num_blocks: int, zeros: Callable[[tuple[int, ...], torch.dtype | None], Tensor]
) -> LayerStates:
    """Allocate the states of a recurrent layer.

    Args:
        spec: shape of the state.
        num_blocks: blocks of the cache.
        zeros: returns zeros of a shape and a dtype, by default the model's.
    """
    versions = (num_blocks, NUM_VERSIONS)
    return LayerStates(
        convolution=zeros((*versions, *spec.convolution), None),
        recurrent=zeros((*versions, *spec.recurrent), torch.float32),
        lengths=zeros(versions, torch.int32),
    )
