"""Packed weights of all formats, of random bits, and the numbers that the formulas of the formats make of them."""

from __future__ import annotations

import torch
from torch import Tensor

from triolet.kernels.linear.weight_only import PackedWeight, byte_weight
from triolet.model.quantized import dequantize


def words(*shape: int) -> Tensor:
    """Return all bit patterns."""
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


def scales(*shape: int) -> Tensor:
    return (torch.rand(*shape) / 40).half()


def gptq(
    bits: int, num_in: int, num_out: int, group: int, *, v1: bool, order: bool = False
) -> tuple[PackedWeight, Tensor]:
    num_groups = -(-num_in // group)
    parts = (
        words(num_in * bits // 32, num_out),
        words(num_groups, num_out * bits // 32),
        scales(num_groups, num_out),
    )
    index = torch.randint(num_groups, (num_in,), dtype=torch.int32) if order else None
    expected = dequantize.gptq(*parts, num_in, bits=bits, stored_minus_one=v1)
    weight = PackedWeight(
        bits=bits, num_in=num_in, num_out=num_out, group_size=group, words=parts[0], zeros=parts[1],
        scales=parts[2], order=index, stored_minus_one=v1,
    )  # fmt: skip
    return weight, expected.dequantize(torch.arange(num_in) // group if index is None else index)


def awq(num_in: int, num_out: int, group: int) -> tuple[PackedWeight, Tensor]:
    num_groups = num_in // group
    parts = words(num_in, num_out // 8), words(num_groups, num_out // 8), scales(num_groups, num_out)
    weight = PackedWeight(
        bits=4, num_in=num_in, num_out=num_out, group_size=group, words=parts[0], zeros=parts[1],
        scales=parts[2], packs_outputs=True,
    )  # fmt: skip
    return weight, dequantize.awq(*parts).dequantize()


def packed(bits: int, num_in: int, num_out: int, group: int, *, zeros: bool) -> tuple[PackedWeight, Tensor]:
    """Return a weight of compressed-tensors, whose rows are outputs."""
    num_groups, per_word = num_in // group, 32 // bits
    parts = words(num_out, -(-num_in // per_word)), scales(num_out, num_groups)
    zero = words(-(-num_out // per_word), num_groups) if zeros else None
    weight = PackedWeight(
        bits=bits, num_in=num_in, num_out=num_out, group_size=group, words=parts[0].T,
        zeros=None if zero is None else zero.T, scales=parts[1].T,
    )  # fmt: skip
    return weight, dequantize.packed_int(*parts, zero, (num_out, num_in), bits).dequantize()


def bytes_of(kind: str, num_in: int, num_out: int, block: tuple[int, int]) -> tuple[PackedWeight, Tensor]:
    """Return a weight of int8 or float8 with a scale for each block, of all numbers that there are."""
    numbers = torch.arange(num_out * num_in, dtype=torch.int64).view(num_out, num_in) % 256
    scale = torch.rand(-(-num_out // block[0]), -(-num_in // block[1])) / 40
    if kind == "float8":
        numbers = torch.where(numbers % 128 == 127, 1, numbers)  # 127 and 255 are NaN
        stored = numbers.to(torch.uint8).view(torch.float8_e4m3fn)
        signs, exponents, fractions = 1 - 2 * (numbers // 128), numbers // 8 % 16, numbers % 8
        normal = (8 + fractions) * 2.0 ** (exponents - 10)
        plain = signs * torch.where(exponents > 0, normal, fractions * 2.0**-9)
    else:
        stored = (numbers - 128).to(torch.int8)
        plain = (numbers - 128).double()
    rows, columns = torch.arange(num_out) // block[0], torch.arange(num_in) // block[1]
    return byte_weight(stored, scale, block), (plain * scale.double()[rows][:, columns]).float()


CASES = {
    "fp8 by tensor": lambda: bytes_of("float8", 64, 33, (33, 64)),
    "fp8 by output": lambda: bytes_of("float8", 76, 24, (1, 76)),
    "fp8 by block": lambda: bytes_of("float8", 160, 40, (32, 128)),
    "int8 by group": lambda: bytes_of("int8", 64, 40, (1, 32)),
    "gptq": lambda: gptq(4, 128, 40, 64, v1=True),
    "gptq v2": lambda: gptq(4, 96, 72, 32, v1=False),
    "gptq 8 bits, a shorter last group": lambda: gptq(8, 80, 36, 64, v1=True),
    "gptq in another order": lambda: gptq(4, 72, 40, 24, v1=True, order=True),
    "gptq of one group": lambda: gptq(4, 72, 16, 72, v1=False),
    "awq": lambda: awq(128, 72, 64),
    "awq of small groups": lambda: awq(96, 40, 16),
    "w4a16": lambda: packed(4, 128, 37, 128, zeros=False),
    "w4a16 with zeros": lambda: packed(4, 72, 37, 24, zeros=True),
    "w8a16 by output": lambda: packed(8, 70, 33, 70, zeros=False),
}
