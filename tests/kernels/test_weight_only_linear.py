"""Products with packed integers against weights that the formulas of the formats give from the same bits."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.kernels.packed_weights import CASES, words
from tests.kernels.targets import Target, on_every_triton_target
from tests.scale import one_in
from triolet.errors import KernelShapeError
from triolet.kernels.linear.weight_only import (
    PackedWeight,
    weight_only_linear,
    weight_only_linear_triton,
)


@on_every_triton_target
@pytest.mark.parametrize(("case", "num_tokens"), one_in(2, product(CASES, [1, 17, 65])))
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
