"""Keys and values in float8, E4M3 or E5M2: a number of the KV cache is a code of one byte, times a scale of its layer.

Kernels take the codes as bytes. They make them by integer arithmetic, and read them by the instructions that GPUs have
for it, E4M3 from sm_89 on: beside the tiles of a prompt, arithmetic would take more registers than there are. A code is
torch's for a number within the format's range; one beyond it becomes the greatest that the format has, and NaN stays
NaN.

Source: the formats, arXiv 2209.05433.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from triolet.kernels._triton import device_function

if TYPE_CHECKING:
    import triton.language as tl

_MANTISSA_BITS = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}


def mantissa_of(dtype: torch.dtype) -> int:
    """Return the bits of a number's mantissa; 0 for a dtype that is not float8."""
    return _MANTISSA_BITS.get(dtype, 0)


def fits_cache(dtype: torch.dtype, cache_dtype: torch.dtype) -> bool:
    """Tell whether keys and values that are computed in one dtype can be kept in another."""
    return dtype == cache_dtype or cache_dtype in _MANTISSA_BITS


def as_bytes(cache: Tensor) -> Tensor:
    """Return a cache as the kernels take it: codes of float8 as bytes, all else as it is."""
    return cache.view(torch.uint8) if cache.dtype in _MANTISSA_BITS else cache


def to_float8(numbers: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Return numbers divided by a scale in float8, those beyond its range as its greatest."""
    greatest = torch.finfo(dtype).max
    return (numbers.float() / scale).clamp(-greatest, greatest).to(dtype)


def gather_float32(cache: Tensor, blocks: Tensor) -> Tensor:
    """Return blocks of a cache in float32, without its scale."""
    # as bytes, since torch cannot index all of its dtypes
    return as_bytes(cache)[blocks].view(cache.dtype).float()


@device_function
def float8_codes(numbers, scale, MANTISSA: tl.constexpr):
    """Return the codes, uint8, of float32 numbers divided by a scale."""
    BIAS: tl.constexpr = (1 << (6 - MANTISSA)) - 1
    SHIFT: tl.constexpr = 23 - MANTISSA
    GREATEST: tl.constexpr = ((125 + BIAS + MANTISSA) << 23) + 0x600000  # 1.75 * 2 ** (BIAS - 2 + MANTISSA)
    SMALLEST_NORMAL: tl.constexpr = (128 - BIAS) << 23
    STEP: tl.constexpr = (151 - BIAS - MANTISSA) << 23  # the float32 whose last bit is the least number
    bits = tl.div_rn(numbers, scale).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    small = tl.minimum(magnitude, GREATEST)
    # Half to even: the last bit that stays decides what is added below it.
    rounded = small + ((1 << (SHIFT - 1)) - 1) + ((small >> SHIFT) & 1)
    code = (rounded >> SHIFT) - ((127 - BIAS) << MANTISSA)
    step = tl.full(small.shape, STEP, tl.int32).to(tl.float32, bitcast=True)
    subnormal = (small.to(tl.float32, bitcast=True) + step).to(tl.int32, bitcast=True) - STEP
    code = tl.where(small < SMALLEST_NORMAL, subnormal, code)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@device_function
def float8_numbers(codes, MANTISSA: tl.constexpr, NATIVE: tl.constexpr):
    """Return the numbers, float16, of codes, uint8; float16 holds all of them exactly.

    NATIVE: by the GPU's instruction, which the interpreter has not.
    """
    if NATIVE and MANTISSA == 2:
        numbers = codes.to(tl.float8e5, bitcast=True).to(tl.float16)
    elif NATIVE:
        numbers = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif MANTISSA == 2:  # the upper byte of a float16
        numbers = (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    else:
        wide = codes.to(tl.int16)
        magnitude = wide & 0x7F
        bits = tl.where(magnitude == 0x7F, 0x7E00, magnitude << 7) | ((wide & 0x80) << 8)
        # The exponents of a float16 have a bias that is larger by 8.
        numbers = bits.to(tl.int16).to(tl.float16, bitcast=True) * 256.0
    return numbers
