"""Batches of a recurrent layer over the paged cache: what those of all kinds have in common."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from triolet.kernels.attention_metadata import AttentionMetadata
from triolet.model.backends.layers.recurrent.block_states import read_states, state_batches, write_states
from triolet.model.backends.layers.recurrent.convolution import Convolution
from triolet.model.interface import LayerCache

Recurrence = Callable[[Tensor, Tensor, Tensor, tuple[int, ...] | None], tuple[Tensor, Tensor]]
"""Recurrence of a layer over a batch. It takes:

what the convolution gives, [num_tokens, channels] float32; the places of these tokens in the step, [num_tokens] int64;
the states before them, [num_seqs, ...] float32; and for a chunk of one sequence the numbers of its tokens after which
states are wanted, None where each sequence has one token. It returns outputs [num_tokens, num_heads, size] float32, and
the wanted states, or those after each token.
"""


def over_batches(
    channels: Tensor,
    size: int,
    cache: LayerCache,
    attention: AttentionMetadata,
    convolution: Convolution,
    recurrence: Recurrence,
) -> Tensor:
    """Compute convolution and recurrence of a step, from the states in the cache, and write those that follow.

    Args:
        channels: [num_tokens, channels], input of the convolution.
        size: numbers of a token's output, all heads together.
        cache: of the layer.
        attention: the step's sequences.
        convolution: of the layer.
        recurrence: of the layer.
    Returns:
        [num_tokens, size] float32.
    """
    states = cache.states
    assert states is not None, "the cache of this layer has states"
    outputs = torch.empty(len(channels), size, dtype=torch.float32, device=channels.device)
    for batch in state_batches(attention, cache.keys.shape[1]):
        found = read_states(states, batch)
        convolved, inputs = convolution(channels[batch.tokens], batch, found)
        ends = batch.ends if batch.is_chunk else None
        output, recurrent = recurrence(convolved, batch.tokens, found.recurrent, ends)
        write_states(states, batch, found, inputs, recurrent)
        outputs[batch.tokens] = output.flatten(1)
    return outputs
