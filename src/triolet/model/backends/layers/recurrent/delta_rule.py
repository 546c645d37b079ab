"""The gated delta rule, over one sequence's tokens in pieces or over one token of many sequences.

Theory of operation
-------------------
Each head has a state, [key_dim, value_dim], that maps keys to values. A token multiplies it by exp(log_decay), looks up
what the state says of its key, and corrects that towards its value: the state becomes state + key (outer product)
rate * (value - said). Its output is what the state says of its query. The corrections of a piece of L tokens depend on
each other: that of token i on what those before it wrote for keys like its own. They are the solution of a triangular
system of L equations, which is linear in the first state as well; with them, outputs and the last state are matrix
products. Source: Gated Delta Networks, arXiv 2412.06464; Parallelizing Linear Transformers, arXiv 2406.06484.

Everything is in float32, as in `mamba_scan`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor

from triolet.model.backends.layers.recurrent.mamba_scan import PIECE_TOKENS, decays_between

_EPS = 1e-6  # of the norm of keys and queries; as they were trained


@attrs.frozen(eq=False)
class DeltaInput:
    """Input of the recurrence, float32; its tokens are those of one sequence, or of as many sequences."""

    query: Tensor  # [num_tokens, num_heads, key_dim], of length key_dim ** -0.5
    key: Tensor  # [num_tokens, num_heads, key_dim], of length 1
    value: Tensor  # [num_tokens, num_heads, value_dim]
    log_decays: Tensor  # [num_tokens, num_heads], at most 0; for `kimi_delta_rule` of each number of a key
    rates: Tensor  # [num_tokens, num_heads], from 0 to 2

    @classmethod
    def normalised(
        cls, query: Tensor, key: Tensor, value: Tensor, log_decays: Tensor, rates: Tensor
    ) -> DeltaInput:
        """Scale queries and keys, [num_tokens, num_key_heads, key_dim], and give them to the heads that share them."""
        shared = value.shape[1] // key.shape[1]

        def scaled(x: Tensor) -> Tensor:
            unit = x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + _EPS)
            return unit.repeat_interleave(shared, dim=1)

        return cls(scaled(query) * query.shape[-1] ** -0.5, scaled(key), value, log_decays, rates)

    def part(self, begin: int, end: int) -> DeltaInput:
        """Return the tokens at `begin : end`."""
        parts = (self.query, self.key, self.value, self.log_decays, self.rates)
        return DeltaInput(*(tensor[begin:end] for tensor in parts))


def delta_scan(tokens: DeltaInput, state: Tensor, ends: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Compute the recurrence over tokens of one sequence.

    Args:
        tokens: one after the other.
        state: [num_heads, key_dim, value_dim], before the first token.
        ends: rising numbers of tokens, the last one that of all, after which states are wanted.
    Returns:
        Outputs [num_tokens, num_heads, value_dim], and the states [len(ends), num_heads, key_dim, value_dim].
    """
    return over_pieces(tokens, state, ends, _scan_piece, PIECE_TOKENS)


def over_pieces(
    tokens: DeltaInput,
    state: Tensor,
    ends: Sequence[int],
    compute: Callable[[DeltaInput, Tensor], tuple[Tensor, Tensor]],
    piece_tokens: int,
) -> tuple[Tensor, Tensor]:
    """Compute a recurrence piece by piece; see `delta_scan`.

    Args:
        tokens: one after the other.
        state: before the first token.
        ends: numbers of tokens after which states are wanted.
        compute: outputs of a piece and the state after it, from the tokens and the state before it.
        piece_tokens: most tokens of a piece.
    """
    outputs, states, begin = torch.empty_like(tokens.value), [], 0
    for wanted in ends:
        while begin < wanted:
            end = min(begin + piece_tokens, wanted)
            outputs[begin:end], state = compute(tokens.part(begin, end), state)
            begin = end
        states.append(state)
    return outputs, torch.stack(states)


def _scan_piece(tokens: DeltaInput, state: Tensor) -> tuple[Tensor, Tensor]:
    # Heads come first: each has products of its own.
    query, key, value = (tensor.transpose(0, 1) for tensor in (tokens.query, tokens.key, tokens.value))
    rates = tokens.rates.T[..., None]  # [num_heads, length, 1]
    decays = decays_between(tokens.log_decays).permute(2, 0, 1)  # [num_heads, length, length]
    since_begin = tokens.log_decays.cumsum(dim=0).exp().T[..., None]
    # What the corrections are without each other: rate * (value - what the first state says of the key).
    wanted = rates * (value - since_begin * (key @ state))
    others = rates * (key @ key.transpose(1, 2)) * decays  # its diagonal is taken for ones
    corrections = torch.linalg.solve_triangular(others, wanted, upper=False, unitriangular=True)
    outputs = since_begin * (query @ state) + (query @ key.transpose(1, 2) * decays) @ corrections
    kept = key * decays[:, -1, :, None]  # what is left at the end of what each token writes
    state = since_begin[:, -1, :, None] * state + kept.transpose(1, 2) @ corrections
    return outputs.transpose(0, 1), state


def delta_step(tokens: DeltaInput, states: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the recurrence over one token of each of several sequences.

    Args:
        tokens: one of each sequence.
        states: [num_tokens, num_heads, key_dim, value_dim], before the tokens.
    Returns:
        Outputs [num_tokens, num_heads, value_dim], and the states after the tokens.
    """
    return corrected(tokens, states * tokens.log_decays.exp()[..., None, None])


def corrected(tokens: DeltaInput, states: Tensor) -> tuple[Tensor, Tensor]:
    """Correct states, which have decayed, by one token each; return what `delta_step` does."""
    said = torch.einsum("nhkv,nhk->nhv", states, tokens.key)
    corrections = tokens.rates[..., None] * (tokens.value - said)
    states = states + tokens.key[..., None] * corrections[:, :, None]
    return torch.einsum("nhkv,nhk->nhv", states, tokens.query), states
