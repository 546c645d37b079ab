"""Linear layers in float32 on tiles of bfloat16: as exact as float32, and every row for itself."""

from __future__ import annotations

import ctypes
import functools
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from triolet.kernels.cpu.build import SOURCES, BuildError, Toolchain
from triolet.kernels.cpu.targets import X86_TARGETS, missing

PANEL = 64  # TILE_COLUMNS, with AVX-512
ROW_COUNTS = (2, 5, 17, 32, 33, 100, 513, 530)

Multiply = Callable[..., Tensor]


@pytest.fixture(scope="module")
def multiply(tmp_path_factory: pytest.TempPathFactory) -> Multiply:
    """x [rows, num_in] times a weight [num_out, num_in], as `bf16x3.cpp` has it."""
    target = next(target for target in X86_TARGETS if target.tiles)
    if lacking := missing(target):
        pytest.skip(f"needs a CPU with {', '.join(sorted(lacking))}")
    library = tmp_path_factory.mktemp("bf16x3") / "bf16x3.so"
    source = Path(__file__).with_name("bf16x3.cpp")
    flags = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-fno-math-errno", "-fno-trapping-math")
    try:
        compiler = Toolchain.find()
    except BuildError as error:
        pytest.skip(str(error))
    if not compiler.accepts(target):
        pytest.skip("the compiler knows no tiles")
    subprocess.run(
        [str(compiler.compiler), *flags, *target.flags, f"-I{SOURCES}", str(source), "-o", str(library)],
        check=True,
    )
    cpp = ctypes.CDLL(str(library))
    if not cpp.has_tiles():
        pytest.skip("the system does not let this process use AMX")
    return functools.partial(_multiply, cpp)


def _multiply(
    cpp: ctypes.CDLL, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False
) -> Tensor:
    (rows, num_in), num_out = x.shape, len(weight)
    width = -(-num_out // PANEL) * PANEL
    out = torch.full((rows, width), -1.0)
    packed_bias = None if bias is None else torch.cat([bias, torch.zeros(width - num_out)])
    addresses = [None if part is None else part.data_ptr() for part in (weight, packed_bias, x, out)]
    weights, biases, rows_of_x, results = map(ctypes.c_void_p, addresses)
    cpp.multiply(weights, biases, num_out, num_in, gated, rows_of_x, rows, results)
    return out if gated else out[:, :num_out]


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.manual_seed(seed))


def wide(*shape: int, seed: int = 1) -> Tensor:
    """Numbers of either sign whose sizes have forty powers of two between them."""
    return normal(*shape, seed=seed) * 2.0 ** (40 * torch.rand(shape, generator=torch.manual_seed(seed)) - 20)


def positive(*shape: int, seed: int = 1) -> Tensor:
    return normal(*shape, seed=seed).abs()


def tiny(*shape: int, seed: int = 1) -> Tensor:
    return normal(*shape, seed=seed) * 2.0**-50


def error(result: Tensor, truth: Tensor) -> Tensor:
    return ((result.double() - truth) / truth.abs().mean()).square().mean().sqrt()


def summed_in_order(x: Tensor, weight: Tensor) -> Tensor:
    """Exact products, each added to a sum that is rounded to float32: what a loop of FMAs gives."""
    sums = torch.zeros(len(x), len(weight))
    for ours, theirs in zip(x.double().T, weight.double().T, strict=True):
        sums = torch.addcmul(sums.double(), ours[:, None], theirs).float()
    return sums


@pytest.mark.parametrize("numbers", [normal, wide, positive, tiny])
@pytest.mark.parametrize("num_in", [64, 288, 770, 4096])
def test_the_error_is_no_larger_than_that_of_sums_in_float32(
    num_in: int, numbers: Callable[..., Tensor], multiply: Multiply
) -> None:
    x, weight = numbers(40, num_in, seed=1), numbers(200, num_in, seed=2)
    truth = x.double() @ weight.double().T
    assert error(multiply(x, weight), truth) <= error(summed_in_order(x, weight), truth)


@pytest.mark.parametrize("num_in", [288, 770, 4096])
def test_the_error_is_no_larger_than_that_of_torch(num_in: int, multiply: Multiply) -> None:
    x, weight = normal(40, num_in), normal(200, num_in, seed=2)
    truth = x.double() @ weight.double().T
    assert error(multiply(x, weight), truth) <= error(x @ weight.T, truth)


@pytest.mark.parametrize("num_in", [96, 288, 1000])
def test_a_row_has_the_same_results_bit_for_bit_whatever_rows_are_beside_it(
    num_in: int, multiply: Multiply
) -> None:
    x, weight = wide(max(ROW_COUNTS), num_in), wide(130, num_in, seed=2)
    alone = torch.cat([multiply(row[None], weight) for row in x])
    for rows in ROW_COUNTS:
        assert multiply(x[:rows].contiguous(), weight).equal(alone[:rows]), rows


@pytest.mark.parametrize("num_in", [1, 31, 32, 33, 70])
@pytest.mark.parametrize("num_out", [1, 63, 65, 100])
@pytest.mark.parametrize("rows", [3, 40])
def test_widths_need_be_no_multiples_of_the_tiles(
    rows: int, num_out: int, num_in: int, multiply: Multiply
) -> None:
    x, weight, bias = normal(rows, num_in), normal(num_out, num_in, seed=2), normal(num_out, seed=3)
    truth = (x.double() @ weight.double().T + bias.double()).float()
    torch.testing.assert_close(multiply(x, weight, bias), truth, rtol=1e-5, atol=1e-5)


def test_a_panel_of_a_gated_layer_holds_gates_and_the_ups_that_they_go_with(multiply: Multiply) -> None:
    x, weight = normal(5, 96), normal(2 * 70, 96, seed=2)
    truth = (x.double() @ weight.double().T).float()
    result = multiply(x, weight, gated=True).unflatten(1, (-1, 2, PANEL // 2))
    for half, part in enumerate((truth[:, :70], truth[:, 70:])):
        torch.testing.assert_close(result[:, :, half].flatten(1)[:, :70], part, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("rows", [1, 20, 70])
def test_what_is_not_finite_stays_so_and_goes_nowhere_else(
    rows: int, number: float, multiply: Multiply
) -> None:
    x, weight = normal(rows, 100), normal(70, 100, seed=2)
    x[rows - 1, 37] = weight[66, 99] = number
    is_finite = multiply(x, weight).isfinite()
    expected = torch.ones_like(is_finite)
    expected[rows - 1], expected[:, 66] = False, False
    assert is_finite.equal(expected)


def test_numbers_that_are_too_small_for_tiles_do_no_harm_to_their_neighbours(multiply: Multiply) -> None:
    x, weight = normal(3, 64), normal(64, 64, seed=2)
    weight[:, 1::2] = 0.0
    truth = (x.double() @ weight.double().T).float()
    # the lower half is not zero, and the three parts are no numbers of a usual size
    weight[:, 1::2] = 1.1e-40
    torch.testing.assert_close(multiply(x, weight), truth, rtol=1e-5, atol=1e-5)
