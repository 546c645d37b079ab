"""Values of GGUF tensors: each type's blocks to float32, by its definition's formula in the same order of operations.

NumPy, and a block per row: [num_blocks, block_bytes] uint8 becomes [num_blocks, block_values] float32. Callers cut a
tensor into some rows at a time, so that the intermediate arrays stay small.

Source: the reference code of ggml, `dequantize_row_*`; the layouts are tabulated in llama.cpp's ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Bytes: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float32]

_IQ4_LEVELS = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32
)
_FP4_LEVELS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)
"""Twice the values of a 4-bit float (e2m1); the exponent of MXFP4 is one less in turn."""


def dequantize(blocks: Bytes, type_name: str) -> Floats:
    """Return the values of some blocks.

    Args:
        blocks: [num_blocks, block_bytes].
        type_name: a name in `ggml_types.TYPES`.

    Returns:
        [num_blocks, block_values].
    """
    # a scale may be any bit pattern: infinities and NaNs pass through without a word
    with np.errstate(all="ignore"):
        return _FORMULAS[type_name](blocks)


def _f32(blocks: Bytes) -> Floats:
    return blocks.view(np.float32)


def _f16(blocks: Bytes) -> Floats:
    return blocks.view(np.float16).astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    # bfloat16 is the upper half of a float32.
    return (blocks.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _half(blocks: Bytes, begin: int) -> Floats:
    """Return the float16 at byte `begin` of each block: [num_blocks, 1]."""
    return np.ascontiguousarray(blocks[:, begin : begin + 2]).view(np.float16).astype(np.float32)


def _bits(packed: Bytes, group_bytes: int, shifts: tuple[int, ...], mask: int) -> Bytes:
    """Unpack fields of a few bits; all of a group's bytes give their field at one shift, then at the next.

    Args:
        packed: [num_blocks, num_bytes], `num_bytes` a multiple of `group_bytes`.

    Returns:
        [num_blocks, num_bytes * len(shifts)].
    """
    groups = packed.reshape(len(packed), -1, 1, group_bytes)
    fields = (groups >> np.array(shifts, dtype=np.uint8)[:, None]) & np.uint8(mask)
    return fields.reshape(len(packed), -1)


def _nibbles(packed: Bytes, group_bytes: int = 16) -> Bytes:
    return _bits(packed, group_bytes, (0, 4), 15)


def _fifth_bits(packed: Bytes) -> Bytes:
    """Return bit j of a little-endian word as the fifth bit of value j."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    values = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _half(blocks, 0) * (values.astype(np.float32) - 16)


def _q5_1(blocks: Bytes) -> Floats:
    values = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _half(blocks, 0) * values.astype(np.float32) + _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _half(blocks, 0)


def _sub_blocks(scale: Floats, values: NDArray[np.float32], minimum: Floats | None = None) -> Floats:
    """Return `scale` * `values` - `minimum`, scale and minimum given per sub-block: [num_blocks, num_sub_blocks]."""
    products = scale[:, :, None] * values.reshape(*scale.shape, -1)
    if minimum is not None:
        products -= minimum[:, :, None]
    return products.reshape(len(scale), -1)


def _q2_k(blocks: Bytes) -> Floats:
    scales, packed = blocks[:, :16], blocks[:, 16:80]
    scale = _half(blocks, 80) * (scales & 15).astype(np.float32)
    minimum = _half(blocks, 82) * (scales >> 4).astype(np.float32)
    return _sub_blocks(scale, _bits(packed, 32, (0, 2, 4, 6), 3).astype(np.float32), minimum)


def _q3_k(blocks: Bytes) -> Floats:
    high, low, scales = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108]
    # The upper two bits of the 16 scales are packed apart from the lower four.
    six_bits = _nibbles(scales[:, :8], 8) | (_bits(scales[:, 8:], 4, (0, 2, 4, 6), 3) << np.uint8(4))
    scale = _half(blocks, 108) * (six_bits.astype(np.float32) - 32)
    # a high bit that is NOT set takes 4 away
    values = _bits(low, 32, (0, 2, 4, 6), 3).astype(np.float32)
    values -= 4 - 4 * _bits(high, 32, tuple(range(8)), 1).astype(np.float32)
    return _sub_blocks(scale, values)


def _scales_and_minima(blocks: Bytes) -> tuple[Floats, Floats]:
    """Return scales and minima of the eight sub-blocks of Q4_K and Q5_K, six bits each in bytes 4 to 15."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((first & 63, (third & 15) | ((first >> 2) & 48)), axis=1)
    minima = np.concatenate((second & 63, (third >> 4) | ((second >> 2) & 48)), axis=1)
    return _half(blocks, 0) * scales.astype(np.float32), _half(blocks, 2) * minima.astype(np.float32)


def _q4_k(blocks: Bytes) -> Floats:
    scale, minimum = _scales_and_minima(blocks)
    return _sub_blocks(scale, _nibbles(blocks[:, 16:], 32).astype(np.float32), minimum)


def _q5_k(blocks: Bytes) -> Floats:
    scale, minimum = _scales_and_minima(blocks)
    high = _bits(blocks[:, 16:48], 32, tuple(range(8)), 1) << np.uint8(4)
    return _sub_blocks(scale, (_nibbles(blocks[:, 48:], 32) | high).astype(np.float32), minimum)


def _q6_k(blocks: Bytes) -> Floats:
    low = _nibbles(blocks[:, :128], 64)
    high = _bits(blocks[:, 128:192], 32, (0, 2, 4, 6), 3) << np.uint8(4)
    scale = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return _sub_blocks(scale, (low | high).astype(np.float32) - 32)


def _iq4_nl(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _IQ4_LEVELS[_nibbles(blocks[:, 2:])]


def _iq4_xs(blocks: Bytes) -> Floats:
    low = _nibbles_in_pairs(blocks[:, 4:8])
    high = np.ascontiguousarray(blocks[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16)
    scales = low | ((high & 3).astype(np.uint8) << np.uint8(4))
    scale = _half(blocks, 0) * (scales.astype(np.float32) - 32)
    return _sub_blocks(scale, _IQ4_LEVELS[_nibbles(blocks[:, 8:])])


def _nibbles_in_pairs(packed: Bytes) -> Bytes:
    """Return the low and the high nibble of each byte side by side."""
    return _bits(packed, 1, (0, 4), 15)


def _mxfp4(blocks: Bytes) -> Floats:
    exponent = blocks[:, :1].astype(np.uint32)
    # 2 ** (exponent - 128), of which the two smallest are subnormal
    bits = np.where(exponent < 2, np.uint32(1 << 21) << exponent, (exponent - 1) << 23)
    return bits.astype(np.uint32).view(np.float32) * _FP4_LEVELS[_nibbles(blocks[:, 1:])]


_FORMULAS: dict[str, Callable[[Bytes], Floats]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
