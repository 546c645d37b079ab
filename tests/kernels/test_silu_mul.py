from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.kernels.targets import Target, on_every_triton_target
from triolet.errors import KernelShapeError
from triolet.kernels import silu_mul as gates

SILU = (gates.silu_mul, gates.silu_mul_reference, gates.silu_mul_triton)
GELU = (gates.gelu_tanh_mul, gates.gelu_tanh_mul_reference, gates.gelu_tanh_mul_triton)


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def gelu_tanh(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize(("ways", "activation"), [(SILU, silu), (GELU, gelu_tanh)], ids=["silu", "gelu"])
def test_the_activation_of_the_first_half_times_the_second(ways: Any, activation: Any) -> None:
    gate_up = torch.tensor([[0.0, 1.5, -2.0, 3.0, -4.0, 0.5], [30.0, -30.0, 0.1, 1.0, 1.0, 2.0]])
    truth = torch.tensor(
        [[activation(g) * u for g, u in zip(row[:3], row[3:], strict=True)] for row in gate_up.tolist()]
    )
    for run in ways[:2]:
        torch.testing.assert_close(run(gate_up), truth, rtol=1e-5, atol=1e-6)


@on_every_triton_target
@pytest.mark.parametrize("ways", [SILU, GELU], ids=["silu", "gelu"])
@pytest.mark.parametrize("shape", [(1, 2), (3, 66), (2, 4100), (0, 8), (2, 3, 10)])
def test_triton_agrees(target: Target, ways: Any, shape: tuple[int, ...]) -> None:
    _, reference, in_triton = ways
    gate_up = 3 * target.randn(*shape)
    torch.testing.assert_close(in_triton(gate_up), reference(gate_up), **target.tolerance)


@on_every_triton_target
@pytest.mark.parametrize("ways", [SILU, GELU], ids=["silu", "gelu"])
def test_large_gates_do_not_overflow_in_triton(target: Target, ways: Any) -> None:
    gate_up = torch.tensor([[200.0, -200.0, 40.0, 1.0, 1.0, 2.0]], dtype=target.dtype, device=target.device)
    torch.testing.assert_close(ways[2](gate_up).cpu().float(), torch.tensor([[200.0, 0.0, 80.0]]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ways", [SILU, GELU], ids=["silu", "gelu"])
def test_narrow_dtypes_stay_within_two_roundings(ways: Any, dtype: torch.dtype) -> None:
    gate_up = torch.randn(7, 64).to(dtype)
    got = ways[0](gate_up)
    assert got.dtype == dtype
    torch.testing.assert_close(got, ways[1](gate_up), **Target("cpu", dtype).tolerance)


@pytest.mark.parametrize("ways", [SILU, GELU], ids=["silu", "gelu"])
def test_a_row_that_has_no_two_halves_is_refused(ways: Any) -> None:
    with pytest.raises(KernelShapeError, match="must agree"):
        ways[0](torch.zeros(2, 7))
