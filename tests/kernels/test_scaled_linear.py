"""Rounding of tokens to float8, and products of float8 with float8."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.packed_weights import CASES, bytes_of
from tests.kernels.targets import Target, on_every_triton_target
from triolet.kernels.linear.scaled import (
    ScaledWeight,
    round_tokens,
    round_tokens_reference,
    round_tokens_triton,
    scaled_linear,
)

E4M3 = torch.float8_e4m3fn


def nearest(numbers: Tensor) -> Tensor:
    """The nearest of all numbers of E4M3, the even code of two that are equally near; float64."""
    codes = torch.arange(127, dtype=torch.uint8)
    known = codes.view(E4M3).double()
    distance = (numbers.abs()[..., None] - known).abs()
    best = distance.amin(-1, keepdim=True)
    is_even = codes % 2 == 0
    place = torch.where(distance == best, 1 + is_even.int(), 0).argmax(-1)
    return known[place] * numbers.sign()


@on_every_triton_target
@pytest.mark.parametrize("dim", [16, 100, 768])
def test_triton_rounds_as_the_reference_does_to_the_bit(target: Target, dim: int) -> None:
    x = target.randn(9, dim + 8)[:, :dim]
    x[1] = 0
    x[2] *= 1e-4
    x[3, ::2] *= 300
    for got, expected in zip(round_tokens_triton(x), round_tokens_reference(x.cpu()), strict=True):
        assert got.shape == expected.shape
        assert got.cpu().view(torch.uint8).equal(expected.view(torch.uint8))


def test_a_token_is_rounded_to_the_nearest_with_its_largest_number_at_the_end_of_the_range() -> None:
    x = torch.randn(20, 64, generator=torch.manual_seed(1)) * torch.logspace(-6, 6, 20)[:, None]
    codes, scales = round_tokens(x)
    assert codes.dtype == E4M3
    assert scales.equal((x.abs().amax(1, keepdim=True) / 448).float())
    wide = (x / scales).double()
    assert codes.double().equal(nearest(wide))
    assert codes.double().abs().amax(1).eq(448).all()


def test_tokens_of_zeros_stay_zero_and_no_tokens_give_none() -> None:
    codes, scales = round_tokens(torch.zeros(2, 32))
    assert not codes.double().any()
    assert scales.isfinite().all()
    assert (scales > 0).all()
    codes, scales = round_tokens_triton(torch.zeros(0, 32))
    assert codes.shape == (0, 32)
    assert scales.shape == (0, 1)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_spoils_its_own_token_alone(value: float) -> None:
    x = torch.randn(3, 32)
    x[1, 5] = value
    rounded, scales = round_tokens(x)
    weight = ScaledWeight(torch.randn(16, 32).to(E4M3), torch.ones(1, 16))
    y = scaled_linear(rounded, scales, weight, torch.float32)
    assert y[[0, 2]].isfinite().all()
    assert not y[1].isfinite().any()


@pytest.mark.parametrize("block", [(48, 64), (1, 64)], ids=["tensor", "output"])
def test_the_product_is_that_of_both_rounded_sides(block: tuple[int, int]) -> None:
    packed, plain = bytes_of("float8", 64, 48, block)
    weight = ScaledWeight.of(packed)
    assert weight is not None
    assert (weight.values.float() * weight.scales.T).equal(plain)
    x = torch.randn(5, 64, generator=torch.manual_seed(2))
    codes, scales = round_tokens(x)
    expected = (codes.double() * scales.double()) @ plain.double().T
    y = scaled_linear(codes, scales, weight, torch.float32)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    short = scaled_linear(codes, scales, weight, torch.bfloat16)
    assert short.dtype == torch.bfloat16
    torch.testing.assert_close(short.double(), expected, rtol=2**-8, atol=1e-5 * expected.abs().max().item())


def test_joined_weights_compute_what_each_does() -> None:
    parts = []
    for num_out in (32, 16):
        weight = ScaledWeight.of(bytes_of("float8", 64, num_out, (1, 64))[0])
        assert weight is not None
        parts.append(weight)
    codes, scales = round_tokens(torch.randn(5, 64))
    apart = [scaled_linear(codes, scales, part, torch.float32) for part in parts]
    together = scaled_linear(codes, scales, ScaledWeight.joined(parts), torch.float32)
    torch.testing.assert_close(together, torch.cat(apart, dim=1))


@pytest.mark.parametrize("case", ["gptq", "awq", "fp8 by block", "fp8 by output"])
def test_other_weights_and_sizes_are_left_to_the_other_kernel(case: str) -> None:
    packed, _ = CASES[case]()  # "fp8 by output" has 76 inputs
    assert ScaledWeight.of(packed) is None
