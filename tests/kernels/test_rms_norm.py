from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.kernels.targets import Target, on_every_triton_target
from triolet.errors import KernelShapeError
from triolet.kernels.rms_norm import rms_norm, rms_norm_reference, rms_norm_triton


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("theirs", "weight_offset"), [(LlamaRMSNorm, 0.0), (GemmaRMSNorm, 1.0)])
def test_rounding_is_that_of_transformers(theirs: Any, weight_offset: float, dtype: torch.dtype) -> None:
    module = theirs(48, eps=1e-6).to(dtype)
    module.weight.data = torch.randn(48).to(dtype)
    x = (5 * torch.randn(9, 48)).to(dtype)
    ours = rms_norm(x, module.weight.data, 1e-6, weight_offset=weight_offset)
    torch.testing.assert_close(ours, module(x).detach(), rtol=0, atol=0)


@pytest.mark.parametrize("weight_offset", [0.0, 1.0])
def test_every_row_is_divided_by_its_root_mean_square(weight_offset: float) -> None:
    x, weight = torch.randn(5, 33), torch.randn(33)
    wide = x.double()
    truth = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (weight.double() + weight_offset)
    reference, _ = rms_norm_reference(x, weight, 1e-5, residual=None, weight_offset=weight_offset)
    for normed in (reference, rms_norm(x, weight, 1e-5, weight_offset=weight_offset)):
        torch.testing.assert_close(normed.double(), truth, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_residual_is_added_first_and_comes_back(dtype: torch.dtype) -> None:
    x, residual, weight = (
        torch.randn(4, 32).to(dtype),
        torch.randn(4, 32).to(dtype),
        torch.randn(32).to(dtype),
    )
    before = x.clone(), residual.clone()
    normed, new_residual = rms_norm(x, weight, 1e-6, residual=residual)
    assert new_residual.equal(x + residual)
    assert normed.equal(rms_norm(x + residual, weight, 1e-6))
    assert (x.equal(before[0]), residual.equal(before[1])) == (True, True)


@on_every_triton_target
@pytest.mark.parametrize("dim", [1, 8, 33, 1000])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("weight_offset", [0.0, 1.0])
def test_triton_agrees(target: Target, dim: int, with_residual: bool, weight_offset: float) -> None:
    x, weight = target.randn(5, dim), target.randn(dim)
    residual = target.randn(5, dim) if with_residual else None
    got = rms_norm_triton(x, weight, 1e-5, residual=residual, weight_offset=weight_offset)
    expected = rms_norm_reference(x, weight, 1e-5, residual=residual, weight_offset=weight_offset)
    torch.testing.assert_close(got, expected, **target.tolerance)


@on_every_triton_target
def test_triton_agrees_on_the_heads_of_a_merged_projection(target: Target) -> None:
    heads, weight = target.randn(3, 6, 24)[:, 1:5], target.randn(24)
    got, _ = rms_norm_triton(heads, weight, 1e-6, residual=None, weight_offset=0.0)
    expected, _ = rms_norm_reference(heads, weight, 1e-6, residual=None, weight_offset=0.0)
    assert got.is_contiguous()
    torch.testing.assert_close(got, expected, **target.tolerance)


def test_no_rows_give_no_rows() -> None:
    assert rms_norm(torch.zeros(0, 8), torch.ones(8), 1e-6).shape == (0, 8)
    assert rms_norm_triton(torch.zeros(0, 8), torch.ones(8), 1e-6, residual=None, weight_offset=0.0)[
        0
    ].shape == (0, 8)


@pytest.mark.parametrize(
    ("x", "weight", "residual"),
    [
        (torch.zeros(2, 8), torch.zeros(9), None),
        (torch.zeros(8), torch.zeros(8), None),
        (torch.zeros(2, 8), torch.zeros(8).half(), None),
        (torch.zeros(2, 8), torch.zeros(8, device="meta"), None),
        (torch.zeros(2, 16)[:, ::2], torch.zeros(8), None),
        (torch.zeros(2, 8), torch.zeros(8), torch.zeros(3, 8)),
        (torch.zeros(2, 8), torch.zeros(8), torch.zeros(2, 8).half()),
    ],
    ids=["dim", "one dimension", "dtype", "device", "rows with gaps", "residual shape", "residual dtype"],
)
def test_tensors_that_do_not_fit_together_are_refused(
    x: Tensor, weight: Tensor, residual: Tensor | None
) -> None:
    with pytest.raises(KernelShapeError, match="must agree"):
        rms_norm(x, weight, 1e-6, residual=residual)
