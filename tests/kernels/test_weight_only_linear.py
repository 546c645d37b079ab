"""Products with packed integers against weights that the formulas of the formats give from the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.targets import Target, on_every_triton_target
from triolet.errors import KernelShapeError
from triolet.kernels.linear.weight_only import (
    PackedWeight,
    byte_weight,
    weight_only_linear,
    weight_only_linear_triton,
)
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


@on_every_triton_target
@pytest.mark.parametrize("num_tokens", [1, 17, 65])
@pytest.mark.parametrize("case", CASES)
def test_triton_agrees_with_the_dequantised_weight(target: Target, case: str, num_tokens: int) -> None:
    weight, plain = CASES[case]()
    weight.check()
    assert weight.dequantize().equal(plain)
    x = target.randn(num_tokens, weight.num_in + 3)[:, : weight.num_in]
    bias = target.randn(weight.num_out) if num_tokens == 17 else None
    wide = torch.full((num_tokens, weight.num_out + 2), float("nan")).to(target.dtype).to(target.device)
    out = wide[:, 1:-1]
    weight_only_linear_triton(x, weight.to(torch.device(target.device)), bias, out)
    expected = x.cpu().double() @ plain.to(target.dtype).double().T
    if bias is not None:
        expected += bias.cpu().double()
    scale = expected.abs().max()
    torch.testing.assert_close(out.cpu().double() / scale, expected / scale, **target.tolerance)
    assert wide[:, [0, -1]].isnan().all()  # what is beside the result stays


def test_the_reference_agrees_and_no_tokens_give_none() -> None:
    weight, plain = CASES["awq"]()
    for num_tokens in (0, 3):
        x, out = torch.randn(num_tokens, 128), torch.empty(num_tokens, 72)
        weight_only_linear(x, weight, torch.ones(72), out)
        torch.testing.assert_close(out, x @ plain.T + 1.0)


def test_parts_that_do_not_fit_together_are_refused() -> None:
    weight, _ = CASES["gptq"]()
    with pytest.raises(KernelShapeError, match="words"):
        PackedWeight(
            bits=4, num_in=128, num_out=40, group_size=64, words=weight.words[:-1], scales=weight.scales
        ).check()
    with pytest.raises(KernelShapeError, match="zeros"):
        PackedWeight(
            bits=4, num_in=128, num_out=40, group_size=64, words=weight.words, scales=weight.scales,
            zeros=words(2, 4),
        ).check()  # fmt: skip
    with pytest.raises(KernelShapeError, match="num_in"):
        weight_only_linear(torch.zeros(1, 127), weight, None, torch.zeros(1, 40))
