"""The recurrence of Mamba-2 layers, over one sequence's tokens in pieces or over one token of many sequences.

Theory of operation
-------------------
Each head has a state, [head_dim, state_size]. A token multiplies it by exp(step * rate), rate below 0, and adds
step * x (outer product) written; its output is the state times what it reads with. Token by token that is a loop
over small products. In a piece of L tokens, what token i takes from token j is a number, the product of what i reads
with and j wrote, times the decay between them: a lower triangle [L, L], and one matrix product gives what the piece
gives itself. What came before the piece enters by its first state, and the state after it follows from all its tokens
at once. Source: Transformers are SSMs, arXiv 2405.21060, section 6.

The decays of a triangle are exponentials of sums of rates between two tokens. They are summed up between the two, not
taken as the difference of two sums from the beginning, which would lose digits.

Everything is in float32, whatever the model's dtype is: a state sums up thousands of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

PIECE_TOKENS = 64  # the triangle costs time for each token, a piece some calls of torch


@attrs.frozen(eq=False)
class ScanInput:
    """Input of the recurrence, float32; its tokens are those of one sequence, or of as many sequences."""

    x: Tensor  # [num_tokens, num_heads, head_dim]
    steps: Tensor  # [num_tokens, num_heads], positive
    written: Tensor  # [num_tokens, num_groups, state_size]
    read: Tensor  # [num_tokens, num_groups, state_size]

    def part(self, begin: int, end: int) -> ScanInput:
        """Return the tokens at `begin : end`."""
        return ScanInput(*(tensor[begin:end] for tensor in (self.x, self.steps, self.written, self.read)))

    def of_heads(self, groups: Tensor) -> Tensor:
        """Return what each head has of its group: [num_tokens, num_heads, state_size]."""
        return groups.repeat_interleave(self.x.shape[1] // groups.shape[1], dim=1)


def scan(tokens: ScanInput, rates: Tensor, state: Tensor, ends: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Compute the recurrence over tokens of one sequence.

    Args:
        tokens: one after the other.
        rates: [num_heads], below 0.
        state: [num_heads, head_dim, state_size], before the first token.
        ends: rising numbers of tokens, the last one that of all, after which states are wanted.
    Returns:
        Outputs [num_tokens, num_heads, head_dim], and the states [len(ends), num_heads, head_dim, state_size].
    """
    outputs, states, begin = torch.empty_like(tokens.x), [], 0
    for wanted in ends:
        while begin < wanted:
            end = min(begin + PIECE_TOKENS, wanted)
            outputs[begin:end], state = _scan_piece(tokens.part(begin, end), rates, state)
            begin = end
        states.append(state)
    return outputs, torch.stack(states)


def _scan_piece(tokens: ScanInput, rates: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    logs = tokens.steps * rates  # [length, num_heads], of the decays
    decays = decays_between(logs)
    scores = torch.einsum("igs,jgs->ijg", tokens.read, tokens.written)
    weights = scores.repeat_interleave(decays.shape[2] // scores.shape[2], dim=2) * decays
    driven = tokens.x * tokens.steps[..., None]
    read, written = tokens.of_heads(tokens.read), tokens.of_heads(tokens.written)
    since_begin = logs.cumsum(dim=0).exp()
    outputs = torch.einsum("ijh,jhp->ihp", weights, driven)
    outputs += torch.einsum("ihs,hps->ihp", read, state) * since_begin[..., None]
    added = torch.einsum("jhp,jhs->hps", driven * decays[-1][..., None], written)
    return outputs, state * since_begin[-1][:, None, None] + added


def decays_between(logs: Tensor) -> Tensor:
    """Return what is left at each token of what each one wrote, 0 for those after it.

    Args:
        logs: [length, num_heads], the logarithm of what each token leaves.
    Returns:
        [length, length, num_heads]: at the first index, of the second.
    """
    length = len(logs)
    is_later = torch.ones(length, length, dtype=torch.bool, device=logs.device).tril(-1)[..., None]
    between = logs[:, None].expand(-1, length, -1).masked_fill(~is_later, 0.0).cumsum(dim=0)
    is_itself = torch.eye(length, dtype=torch.bool, device=logs.device)[..., None]
    decays: Tensor = between.exp() * (is_later | is_itself)
    return decays


def scan_step(tokens: ScanInput, rates: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the recurrence over one token of each of several sequences.

    Args:
        tokens: one of each sequence.
        rates: [num_heads], below 0.
        states: [num_tokens, num_heads, head_dim, state_size], before the tokens.
    Returns:
        Outputs [num_tokens, num_heads, head_dim], and the states after the tokens.
    """
    decays = (tokens.steps * rates).exp()[..., None, None]
    driven = (tokens.x * tokens.steps[..., None])[..., None]
    states = states * decays + driven * tokens.of_heads(tokens.written)[:, :, None]
    return torch.einsum("nhps,nhs->nhp", states, tokens.of_heads(tokens.read)), states
