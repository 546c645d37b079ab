"""Formulas of the formats: from stored integers and scales to a weight of [out, in], float32.

Each is the format's documented one, with one rounding: integers are exact in float32, and a product with a scale rounds
once. Integers are packed as a stream of bits, lowest first, in 32-bit words; only AWQ has an order of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import attrs
import torch
from torch import Tensor

WORD_BITS = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column, within its eight, of the k-th four bits of an AWQ word."""

INT8_MAX = 127.0

MXFP4_BLOCK_BYTES = 16
"""Bytes of the 32 values that share an exponent."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of a 4-bit float by its lower three bits; the fourth is the sign."""

_E8M0_BIAS = 127

_CHUNK_VALUES: Final = 2**20
"""Values of a weight that are computed at a time, with some 20 bytes each on the way."""


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """Return the first `count` unsigned integers of each row.

    Args:
        words: int32 [rows, num_words].
        bits: of one integer; one that does not divide 32 lies across words.
        count: at most num_words * 32 / bits.
    Returns:
        int32 [rows, count].
    """
    if WORD_BITS % bits == 0:  # none lies across words
        shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32, device=words.device)
        integers = words[:, :, None] >> shifts
        # torch shifts int32 with its sign, which the mask takes away.
        integers &= (1 << bits) - 1
        return integers.flatten(1)[:, :count]
    # As int64 the bits are those of the word.
    unsigned = words.to(torch.int64) & 0xFFFFFFFF
    unsigned = torch.nn.functional.pad(unsigned, (0, 1))  # the last integer may end with its word
    begins = torch.arange(count, device=words.device) * bits
    index, shift = begins // WORD_BITS, begins % WORD_BITS
    # A value that crosses the end of its word is within two words together.
    pairs = unsigned[:, index] | (unsigned[:, index + 1] << WORD_BITS)
    return ((pairs >> shift) & ((1 << bits) - 1)).to(torch.int32)


def _row_slices(num_rows: int, num_columns: int) -> Iterator[slice]:
    """Yield some rows at a time, so that what is computed on the way to a weight stays small beside it."""
    step = max(1, _CHUNK_VALUES // max(1, num_columns))
    for first in range(0, num_rows, step):
        yield slice(first, first + step)


@attrs.frozen(eq=False)
class GroupedIntegers:
    """Weight of scale * (integer - zero), with a scale and a zero for each group of inputs."""

    weight: Tensor  # int32 [out, in]
    zeros: Tensor  # int32 [out, num_groups]
    scales: Tensor  # [out, num_groups]

    def dequantize(self, groups: Tensor | None = None) -> Tensor:
        """Return the weight, float32; `groups` is the group of each input, None for consecutive ones."""
        if groups is None:
            num_in = self.weight.shape[1]
            groups = torch.arange(num_in) // (num_in // self.scales.shape[1])
        return _scaled(self.weight, self.zeros, self.scales, groups)


def gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, num_in: int, *, bits: int, stored_minus_one: bool
) -> GroupedIntegers:
    """Unpack a GPTQ layer.

    Args:
        qweight: int32 [in * bits / 32, out], packed along the input.
        qzeros: int32 [num_groups, out * bits / 32], packed along the output.
        scales: [num_groups, out].
        num_in: inputs.
        bits: 2, 3, 4 or 8.
        stored_minus_one: version 1 of the format, which stores zero - 1. A stored 15 of four bits is then 0: a zero
            of 16 does not exist.
    """
    num_out = scales.shape[1]
    weight = unpack(qweight.T.contiguous(), bits, num_in)  # [out, in]
    zeros = unpack(qzeros, bits, num_out)  # [num_groups, out]
    if stored_minus_one:
        # Wraps around: there is no zero of 2 ** bits.
        zeros = (zeros + 1) & ((1 << bits) - 1)
    return GroupedIntegers(weight, zeros.T, scales.T)


def awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> GroupedIntegers:
    """Unpack an AWQ layer of the layout `gemm`.

    Args:
        qweight: int32 [in, out / 8].
        qzeros: int32 [num_groups, out / 8].
        scales: [num_groups, out].
    """
    return GroupedIntegers(_unpack_awq(qweight).T, _unpack_awq(qzeros).T, scales.T)


def _unpack_awq(words: Tensor) -> Tensor:
    rows, num_words = words.shape
    packed = unpack(words, 4, 8 * num_words).view(rows, num_words, len(AWQ_ORDER))
    columns = torch.empty_like(packed)
    columns[:, :, list(AWQ_ORDER)] = packed
    return columns.view(rows, -1)


def packed_int(
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    shape: tuple[int, int],
    bits: int,
) -> GroupedIntegers:
    """Unpack a compressed-tensors layer of the format `pack-quantized`.

    Args:
        packed: int32 [out, ceil(in * bits / 32)], of q + 2 ** (bits - 1).
        scale: [out, num_groups].
        zero_point: int32 [ceil(out * bits / 32), num_groups], packed along the output; None if it is symmetric.
        shape: [out, in].
        bits: 4 or 8.
    """
    num_out, num_in = shape
    # Both have the same offset, which is lost in their difference.
    weight = unpack(packed, bits, num_in)
    num_groups = scale.shape[1]
    if zero_point is None:
        zeros = torch.full((num_out, num_groups), 1 << (bits - 1), dtype=torch.int32)
    else:
        zeros = unpack(zero_point.T.contiguous(), bits, num_out).T
    return GroupedIntegers(weight, zeros, scale)


def _scaled(weight: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor) -> Tensor:
    """Return scale * (weight - zero), with zeros and scales [out, num_groups] taken by group."""
    index = groups.to(torch.int64)
    scaled = torch.empty(weight.shape, dtype=torch.float32)
    for rows in _row_slices(*weight.shape):
        spread = scales[rows].to(torch.float32)[:, index]
        torch.mul(weight[rows] - zeros[rows][:, index], spread, out=scaled[rows])
    return scaled


def scaled_blocks(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Return weight * scale, with one scale for each block of the weight; the last blocks may be cut off.

    Args:
        weight: [out, in], int8 or float8.
        scale: [ceil(out / block[0]), ceil(in / block[1])].
        block: rows and columns of a block.
    """
    num_out, num_in = weight.shape
    places = torch.arange(num_out) // block[0]
    columns = torch.arange(num_in) // block[1]
    scaled = torch.empty(num_out, num_in, dtype=torch.float32)
    for rows in _row_slices(num_out, num_in):
        spread = scale.to(torch.float32)[places[rows]][:, columns]
        torch.mul(weight[rows].to(torch.float32), spread, out=scaled[rows])
    return scaled


def bnb_4bit(packed: Tensor, absmax: Tensor, code: Tensor, shape: tuple[int, int], block_size: int) -> Tensor:
    """Dequantise a bitsandbytes layer of four bits (nf4, fp4): code[q] * absmax.

    Args:
        packed: uint8, two values each, the high four bits first, in the order of the weight's rows.
        absmax: float32, one for each `block_size` values.
        code: float32 [16], the value of each q.
        shape: [out, in].
        block_size: values that share an absmax.
    """
    # Each byte is looked up at once, both of its values.
    byte, values = torch.arange(256), code.to(torch.float32)
    pairs = torch.stack((values[byte >> 4], values[byte & 15]), dim=1)  # [256, 2]
    weight = pairs[packed.flatten().to(torch.int32)].flatten()[: shape[0] * shape[1]]
    weight *= absmax.repeat_interleave(block_size)[: weight.numel()]
    return weight.view(shape)


def mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantise a matrix in MXFP4: 4-bit floats, times a power of two for each 32.

    Args:
        blocks: uint8 [out, num_groups, 16], two values each, the low four bits first.
        scales: uint8 [out, num_groups], exponents with a bias of 127.
    Returns:
        float32 [out, num_groups * 32]; exact but where the exponent leaves float32's range.

    Source: OCP Microscaling Formats Specification 1.0.
    """
    # Doubled, and the powers halved: twice the greatest power would be more than float32 has.
    powers = torch.ldexp(torch.ones(scales.shape), scales.to(torch.int32) - _E8M0_BIAS - 1)
    weight = (2.0 * _e2m1_pairs())[blocks.flatten().to(torch.int32)].view(*scales.shape, -1)
    weight *= powers[..., None]
    return weight.flatten(1)


def float4(packed: Tensor, scales: Tensor) -> Tensor:
    """Dequantise a matrix of 4-bit floats with a scale for each group of inputs.

    Args:
        packed: uint8 [out, in / 2], two values each, the low four bits first.
        scales: float32 [out, num_groups].
    Returns:
        float32 [out, in].
    """
    weight = _e2m1_pairs()[packed.flatten().to(torch.int32)].view(*scales.shape, -1)
    weight *= scales[..., None]
    return weight.flatten(1)


def _e2m1_pairs() -> Tensor:
    """Return the two values of each byte, the low four bits first, [256, 2]."""
    values, byte = torch.tensor((*E2M1, *(-value for value in E2M1))), torch.arange(256)
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=1)


def bnb_nested_absmax(absmax: Tensor, code: Tensor, nested: Tensor, offset: float, block_size: int) -> Tensor:
    """Dequantise the absmax values of a bitsandbytes layer with double quantisation.

    Args:
        absmax: uint8, one for each block of weights.
        code: float32 [256], the value of each.
        nested: float32, one for each `block_size` absmax values.
        offset: added to all.
        block_size: absmax values that share a nested one.
    """
    scale = nested.repeat_interleave(block_size)[: absmax.numel()]
    return code[absmax.to(torch.int64)] * scale + offset


def bnb_8bit(weight: Tensor, row_absmax: Tensor) -> Tensor:
    """Dequantise a bitsandbytes layer of eight bits: q * row_absmax / 127.

    Args:
        weight: int8 [out, in].
        row_absmax: float32 [out].
    """
    return weight.to(torch.float32) * row_absmax.to(torch.float32)[:, None] / INT8_MAX
