"""The recurrence of Mamba layers, over one sequence's tokens in pieces or over one token of many sequences.

Theory of operation
-------------------
Each channel has a state of a few numbers, and each number a rate of its own. A token multiplies a number by
exp(step * rate), rate below 0, and adds step * x times what it writes; a channel's output is the product of its state
and what the token reads with. Since every number decays by itself, a piece of tokens is no product of matrices, as it
is in Mamba-2. Decays and what is added are computed for all tokens of a piece at once; the loop over them is one fused
multiplication and addition each, over memory that fits into caches. Source: Mamba, arXiv 2312.00752.

Everything is in float32, as in `mamba_scan`.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

PIECE_TOKENS = 32  # a piece takes the memory of as many states


@attrs.frozen(eq=False)
class SelectiveInput:
    """Input of the recurrence, float32; its tokens are those of one sequence, or of as many sequences."""

    x: Tensor  # [num_tokens, channels]
    steps: Tensor  # [num_tokens, channels], positive
    written: Tensor  # [num_tokens, num_heads, state_size]; the channels of a head share them
    read: Tensor  # [num_tokens, num_heads, state_size]

    def part(self, begin: int, end: int) -> SelectiveInput:
        """Return the tokens at `begin : end`."""
        return SelectiveInput(*(part[begin:end] for part in (self.x, self.steps, self.written, self.read)))

    def decays(self, rates: Tensor) -> Tensor:
        """Return what each token leaves of the states, [num_tokens, channels, state_size]."""
        return (self.steps[..., None] * rates).exp_()

    def added(self) -> Tensor:
        """Return what each token adds to the states, [num_tokens, channels, state_size]."""
        driven = (self.steps * self.x).unflatten(1, (self.written.shape[1], -1))
        added: Tensor = (driven[..., None] * self.written[:, :, None]).flatten(1, 2)
        return added

    def outputs(self, states: Tensor) -> Tensor:
        """Return what the tokens read, [num_tokens, channels], from the states after them."""
        of_heads = states.unflatten(1, (self.read.shape[1], -1))
        read: Tensor = (of_heads @ self.read[..., None]).flatten(1)
        return read


def selective_scan(
    tokens: SelectiveInput, rates: Tensor, state: Tensor, ends: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Compute the recurrence over tokens of one sequence.

    Args:
        tokens: one after the other.
        rates: [channels, state_size], below 0.
        state: [channels, state_size], before the first token.
        ends: rising numbers of tokens, the last one that of all, after which states are wanted.
    Returns:
        Outputs [num_tokens, channels], and the states [len(ends), channels, state_size].
    """
    outputs, states, begin = torch.empty_like(tokens.x), [], 0
    for wanted in ends:
        while begin < wanted:
            end = min(begin + PIECE_TOKENS, wanted)
            piece = tokens.part(begin, end)
            after = piece.added()
            for now, decay in zip(after, piece.decays(rates), strict=True):
                state = now.addcmul_(decay, state)
            outputs[begin:end] = piece.outputs(after)
            begin = end
        states.append(state.clone())  # not with the other states of its piece
    return outputs, torch.stack(states)


def selective_step(tokens: SelectiveInput, rates: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the recurrence over one token of each of several sequences.

    Args:
        tokens: one of each sequence.
        rates: [channels, state_size], below 0.
        states: [num_tokens, channels, state_size], before the tokens.
    Returns:
        Outputs [num_tokens, channels], and the states after the tokens.
    """
    states = tokens.added().addcmul_(tokens.decays(rates), states)
    return tokens.outputs(states), states
