"""The delta rule with decays of each number of a key, over one sequence's tokens in pieces or over one token of many.

Theory of operation
-------------------
The recurrence is that of `delta_rule`, but for the decays: a token multiplies row k of a head's state, [key_dim,
value_dim], by exp(log_decay[k]). What token i finds of token j is then no product of two keys times one decay, but a
sum over their numbers, each times its own decay between the two; the rest of the algebra of a piece is the same. The
decays between all pairs of tokens take key_dim numbers for each pair and head, so pieces are short. Source: Kimi
Linear, arXiv 2510.26692.

Everything is in float32, as in `mamba_scan`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from triolet.model.backends.layers.recurrent.delta_rule import DeltaInput, corrected, over_pieces
from triolet.model.backends.layers.recurrent.mamba_scan import decays_between

PIECE_TOKENS = 16


def kimi_delta_scan(tokens: DeltaInput, state: Tensor, ends: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Compute the recurrence over tokens of one sequence.

    Args:
        tokens: one after the other; their `log_decays` are [num_tokens, num_heads, key_dim].
        state: [num_heads, key_dim, value_dim], before the first token.
        ends: rising numbers of tokens, the last one that of all, after which states are wanted.
    Returns:
        Outputs [num_tokens, num_heads, value_dim], and the states [len(ends), num_heads, key_dim, value_dim].
    """
    return over_pieces(tokens, state, ends, _scan_piece, PIECE_TOKENS)


def _scan_piece(tokens: DeltaInput, state: Tensor) -> tuple[Tensor, Tensor]:
    length, num_heads, key_dim = tokens.key.shape
    between = decays_between(tokens.log_decays.flatten(1)).view(length, length, num_heads, key_dim)
    since_begin = tokens.log_decays.cumsum(dim=0).exp()
    rates = tokens.rates.T[..., None]  # [num_heads, length, 1]
    # What each token finds of what each one before it wrote: [num_heads, length, length].
    of_keys = torch.einsum("ihk,jhk,ijhk->hij", tokens.key, tokens.key, between)
    of_queries = torch.einsum("ihk,jhk,ijhk->hij", tokens.query, tokens.key, between)
    said = torch.einsum("ihk,hkv->hiv", tokens.key * since_begin, state)
    wanted = rates * (tokens.value.transpose(0, 1) - said)
    # Its diagonal is taken for ones.
    corrections = torch.linalg.solve_triangular(rates * of_keys, wanted, upper=False, unitriangular=True)
    outputs = torch.einsum("ihk,hkv->hiv", tokens.query * since_begin, state) + of_queries @ corrections
    kept = tokens.key * between[-1]  # what is left at the end of what each token writes
    state = since_begin[-1][..., None] * state + torch.einsum("jhk,hjv->hkv", kept, corrections)
    return outputs.transpose(0, 1), state


def kimi_delta_step(tokens: DeltaInput, states: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the recurrence over one token of each of several sequences.

    Args:
        tokens: one of each sequence; their `log_decays` are [num_tokens, num_heads, key_dim].
        states: [num_tokens, num_heads, key_dim, value_dim], before the tokens.
    Returns:
        Outputs [num_tokens, num_heads, value_dim], and the states after the tokens.
    """
    return corrected(tokens, states * tokens.log_decays.exp()[..., None])
