"""Sampling noise as a pure function of (seed, position, token id).

There is no generator and no state: a token that is drawn again, after a preemption, a crash or in another batch, gets
the same noise. The bits come from a tree of SplitMix64 streams: seed -> answer -> position -> token id. The output of a
stream at any index costs one multiplication and one mix, so noise can be computed for a few token ids only.

Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014 (SplitMix64 with the mixing
constants of Stafford's variant 13; it passes BigCrush).
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor


def _signed(bits: int) -> int:
    # torch has no uint64 arithmetic; int64 products wrap around to the same bits
    return bits - 2**64 if bits >= 2**63 else bits


GOLDEN_GAMMA: Final = _signed(0x9E3779B97F4A7C15)
FIRST_MIX: Final = _signed(0xBF58476D1CE4E5B9)
SECOND_MIX: Final = _signed(0x94D049BB133111EB)
BELOW_ONE: Final = 1.0 - 2.0**-24  # the largest float32 below 1


def _xor_shift_(bits: Tensor, distance: int) -> Tensor:
    # >> on int64 copies the sign bit; the mask removes it, which makes this the unsigned shift of SplitMix64
    return bits.bitwise_xor_((bits >> distance).bitwise_and_((1 << (64 - distance)) - 1))


def _mix_(bits: Tensor) -> Tensor:
    _xor_shift_(bits, 30).mul_(FIRST_MIX)
    _xor_shift_(bits, 27).mul_(SECOND_MIX)
    return _xor_shift_(bits, 31)


def _stream_output(start: Tensor, index: Tensor) -> Tensor:
    """Return number `index` (from 0) of the SplitMix64 stream that starts at `start`; the two are broadcast."""
    return _mix_(start + (index + 1) * GOLDEN_GAMMA)


def answer_streams(seeds: Tensor) -> Tensor:
    """Return the start of each answer's noise stream, fixed for the answer.

    Args:
        seeds: [n] int64, any.
    Returns:
        [n] int64.
    """
    return _stream_output(seeds, torch.zeros_like(seeds))


def position_streams(answers: Tensor, positions: Tensor) -> Tensor:
    """Return the start of the noise stream of each answer's next token.

    Args:
        answers: [n] int64, from `answer_streams`.
        positions: [n] int64, index in the answer of the token to be drawn.
    Returns:
        [n] int64.
    """
    return _stream_output(answers, positions)


def random_bits(streams: Tensor, token_ids: Tensor) -> Tensor:
    """Generate 64 random bits for each token id of each row.

    Args:
        streams: [n] int64, from `position_streams`.
        token_ids: [m], the same for all rows, or [n, m] int64.
    Returns:
        [n, m] int64.
    """
    return _stream_output(streams[:, None], token_ids)


def uniform_noise(streams: Tensor, token_ids: Tensor) -> Tensor:
    """Generate uniform numbers in the open interval (0, 1); arguments as for `random_bits`.

    Returns:
        [n, m] float32.
    """
    # All 63 bits go into the float32: small numbers keep a full mantissa down to 2**-63. Noise near 0 decides whether
    # an unlikely token wins; with 24 bits a token of probability 1e-8 would be drawn never, or twice too often.
    positive = (random_bits(streams, token_ids) >> 1).bitwise_and_(2**63 - 1).bitwise_or_(1)
    return positive.to(torch.float32).mul_(2.0**-63).clamp_(max=BELOW_ONE)


def exponential_noise(streams: Tensor, token_ids: Tensor) -> Tensor:
    """Generate exponential numbers of mean 1, in (0, 17); arguments as for `random_bits`.

    The token with the largest `probability / noise` is a draw from the probabilities.
    """
    # the bits are equal on every device, the logarithm may differ in its last bit
    return uniform_noise(streams, token_ids).neg_().log1p_().neg_()
