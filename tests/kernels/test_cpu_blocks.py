"""Products with the blocks of quantised checkpoints have the bits of those with the float32 weights that they are."""

from __future__ import annotations

import ctypes

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from tests.kernels.cpu_variants import compiled, on_every_cpu_variant
from tests.kernels.rounded_activations import rounded
from triolet.errors import KernelShapeError
from triolet.kernels.cpu.abi import LayerStruct, ModelStruct, StepStruct
from triolet.kernels.cpu.attention.paged_attention import DTYPES
from triolet.kernels.cpu.gemm.blocks import GGUF_FORMATS, BlockRows, i8_rows, pack_blocks, u4_rows
from triolet.kernels.cpu.gemm.packing import CppLinear, pack_linear

SCALES = {"Q8_0": [0], "Q4_0": [0], "Q5_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
"""Where the float16 scales of a block begin: all other bit patterns are valid."""


INTEGERS = {"U4": 96, "I8": 768}
"""Inputs that share a scale, of integers that are put into blocks here."""


def random_rows(name: str, num_out: int, num_in: int, seed: int = 0) -> tuple[BlockRows, Tensor]:
    """Random blocks, and their float32 values: gguf-py's, or by the format's formula."""
    generator = np.random.default_rng(seed)
    if name in INTEGERS:
        return random_integers(name, num_out, num_in, generator)
    kind = GGUF_FORMATS[name]
    blocks = generator.integers(0, 256, (num_out * num_in // kind.inputs, kind.num_bytes), dtype=np.uint8)
    for at in SCALES[name]:
        scale = generator.normal(0, 0.01, (len(blocks), 1)).astype(np.float16)
        blocks[:, at : at + 2] = scale.view(np.uint8)
    rows = blocks.reshape(num_out, -1)
    values = gguf.dequantize(rows, Type[name]).reshape(num_out, num_in)
    return BlockRows(kind, torch.from_numpy(rows.copy())), torch.from_numpy(values.copy())


def random_integers(
    name: str, num_out: int, num_in: int, dice: np.random.Generator
) -> tuple[BlockRows, Tensor]:
    scales = dice.normal(0, 0.01, (num_out, num_in // INTEGERS[name])).astype(np.float32)
    if name == "U4":
        weight = dice.integers(0, 16, (num_out, num_in), dtype=np.int32)
        zeros = dice.integers(0, 17, scales.shape, dtype=np.int32)
        rows = u4_rows(*map(torch.from_numpy, (weight, zeros, scales)))
        weight = weight - zeros.repeat(INTEGERS[name], axis=1)
    else:
        weight = dice.integers(-128, 128, (num_out, num_in), dtype=np.int32)
        rows = i8_rows(*map(torch.from_numpy, (weight, scales)))
    return rows, torch.from_numpy(weight.astype(np.float32) * scales.repeat(INTEGERS[name], axis=1))


def product(cpp: ctypes.CDLL, linear: CppLinear, x: Tensor) -> Tensor:
    """The layer's outputs, computed as those of an output head."""
    out = torch.full((len(x), linear.num_out), float("nan"), dtype=x.dtype)
    model = ModelStruct(
        layers=ctypes.addressof(layers := (LayerStruct * 1)()),
        head=linear.struct(),
        hidden=linear.num_in,
        num_heads=1,
        num_kv_heads=1,
        head_dim=16,
        dtype=DTYPES[x.dtype],
        logit_scale=1.0,
    )
    step = StepStruct(hidden=x.data_ptr(), logits=out.data_ptr(), num_logits=len(x), num_threads=2)
    cpp.triolet_head(ctypes.byref(model), ctypes.byref(step))
    del layers
    return out


@on_every_cpu_variant
@pytest.mark.parametrize("name", [*GGUF_FORMATS, *INTEGERS])
def test_the_product_has_the_bits_of_the_float32_weights(name: str, variant: str) -> None:
    cpp = compiled(variant)
    rows, weight = random_rows(name, 210, 768)
    bias = torch.randn(210, generator=torch.manual_seed(1))
    kept, whole = pack_blocks(cpp, [rows], bias), pack_linear(cpp, weight, bias)
    for num_rows in (1, 2, 7, 130):
        x = torch.randn(num_rows, 768, generator=torch.manual_seed(num_rows))
        assert product(cpp, kept, x).equal(product(cpp, whole, x))
        # of bfloat16 activations, results alone are rounded
        short = x.bfloat16()
        assert product(cpp, kept, short).equal(product(cpp, whole, short.float()).bfloat16())


@on_every_cpu_variant
@pytest.mark.parametrize("name", [*GGUF_FORMATS, *INTEGERS])
def test_products_packed_for_bfloat16_activations_round_nothing_but_the_result(
    name: str, variant: str
) -> None:
    cpp = compiled(variant)
    rows, weight = random_rows(name, 210, 768)
    bias = torch.randn(210, generator=torch.manual_seed(1))
    kept = pack_blocks(cpp, [rows], bias, dtype=torch.bfloat16)
    x = torch.randn(131, 768, generator=torch.manual_seed(2)).bfloat16()
    x[:, 40:50] *= 20
    right = x.double() @ weight.double().T + bias
    found = product(cpp, kept, x)
    assert ((found - right).abs() <= 2**-8 * right.abs() + 2e-5 * right.abs().mean()).all()
    # Tiles, which multiply more than six rows, add in another order than vectors.
    for num_rows in (1, 2, 7, 130) if variant != "amx" else (7, 16, 33, 130):
        assert product(cpp, kept, x[-num_rows:]).equal(found[-num_rows:])
    x[0, 7] = float("inf")
    assert not product(cpp, kept, x)[0].isfinite().any()


@on_every_cpu_variant
def test_joined_projections_may_differ_in_format_from_panel_to_panel(variant: str) -> None:
    cpp = compiled(variant)
    parts = [random_rows(name, 128, 512, seed) for seed, name in enumerate(("Q4_K", "Q4_K", "Q6_K"))]
    kept = pack_blocks(cpp, [rows for rows, _ in parts])
    whole = pack_linear(cpp, torch.cat([weight for _, weight in parts]))
    for num_rows in (1, 3):
        x = torch.randn(num_rows, 512, generator=torch.manual_seed(num_rows))
        assert product(cpp, kept, x).equal(product(cpp, whole, x))


@pytest.mark.parametrize("name", [*GGUF_FORMATS, *INTEGERS])
def test_packed_blocks_take_the_memory_of_the_file(name: str) -> None:
    rows, _ = random_rows(name, 256, 768)  # whole panels of every target
    assert pack_blocks(compiled(), [rows]).num_bytes <= 1.03 * rows.rows.nbytes


def test_scales_of_whole_rows_are_put_into_blocks_whatever_their_strides() -> None:
    # A row of scales, turned: torch calls the column contiguous, though its strides are not those of a column.
    scales = np.array([[0.5, 0.25, 2.0]], dtype=np.float32)
    column = torch.from_numpy(scales).T
    weight = torch.full((3, 32), 5)
    zeros = torch.full((3, 1), 8)
    for blocks in (u4_rows(weight, zeros, column), i8_rows(weight, column)):
        assert blocks.rows[:, :4].numpy().tobytes() == scales.tobytes()


def test_formats_that_change_within_a_panel_are_refused() -> None:
    cpp = compiled()
    parts = [random_rows(name, 130, 256)[0] for name in ("Q4_K", "Q6_K")]
    for gated in (False, True):
        with pytest.raises(KernelShapeError):
            pack_blocks(cpp, parts, gated=gated)


# --------------------------------------------------------------------------------- int8 activations


@on_every_cpu_variant
@pytest.mark.parametrize("name", [*GGUF_FORMATS, *INTEGERS])
def test_with_int8_activations_the_product_is_that_of_the_rounded_ones(name: str, variant: str) -> None:
    cpp = compiled(variant)
    rows, weight = random_rows(name, 210, 768)
    bias = torch.randn(210, generator=torch.manual_seed(1))
    kept = pack_blocks(cpp, [rows], bias, int8_activations=True)
    x = torch.randn(131, 768, generator=torch.manual_seed(2))
    x[:, 40:50] *= 20  # scales differ from group to group
    x[:, 64:96] = 0
    x[5, 256:512] = 0
    x[:, 704:736] = 127 * x[:, 704:736].sign()  # the largest sums that integers must hold
    right = rounded(x.double()) @ weight.double().T + bias
    found = product(cpp, kept, x)
    # A number half way between two integers may become either.
    assert (found - right).abs().max() < 2e-4 * right.abs().mean()
    for num_rows in (1, 2, 7, 130):
        assert product(cpp, kept, x[-num_rows:]).equal(found[-num_rows:])
    short = x.bfloat16()
    assert product(cpp, kept, short).equal(product(cpp, kept, short.float()).bfloat16())


@on_every_cpu_variant
@pytest.mark.parametrize("outlier", [1, 20])
def test_scales_in_eighths_round_little_more_away_than_scales_of_32_and_less_than_one_of_256(
    outlier: int, variant: str
) -> None:
    cpp = compiled(variant)
    rows, weight = random_rows("Q4_K", 64, 1024)
    kept = pack_blocks(cpp, [rows], int8_activations=True)
    x = torch.randn(300, 1024, generator=torch.manual_seed(1))
    x[:, 7::256] *= outlier

    def error(of: Tensor) -> float:
        return float((of - x.double() @ weight.double().T).square().mean().sqrt())

    def with_scales_of(count: int) -> float:
        groups = x.double().view(len(x), -1, count)
        scales = groups.abs().amax(2, keepdim=True) / 127
        return error(((groups / scales).round() * scales).view(x.shape) @ weight.double().T)

    found = error(product(cpp, kept, x))
    assert found < 1.15 * with_scales_of(32)
    assert found < 0.9 * with_scales_of(256)


@on_every_cpu_variant
@pytest.mark.parametrize("name", GGUF_FORMATS)
@pytest.mark.parametrize("byte", [0, 128, 255])
def test_with_int8_activations_the_largest_products_do_not_overflow(
    name: str, byte: int, variant: str
) -> None:
    cpp = compiled(variant)
    rows, _ = random_rows(name, 32, 256)
    blocks = rows.rows.numpy().reshape(-1, rows.format.num_bytes)
    integers = np.full_like(blocks, byte)
    for at in SCALES[name]:
        integers[:, at : at + 2] = blocks[:, at : at + 2]
    if name == "Q6_K":
        integers[:, 192:200], integers[:, 200:208] = 127, 128  # the largest scales, and the smallest
    values = gguf.dequantize(integers.reshape(32, -1), Type[name]).reshape(32, 256)
    kept = pack_blocks(
        cpp, [BlockRows(rows.format, torch.from_numpy(integers.reshape(32, -1)))], int8_activations=True
    )
    ones = torch.ones(256)
    x = torch.stack([ones, -ones, ones.view(-1, 4).mul(torch.tensor([1, 1, -1, -1])).flatten()] * 3)
    right = x.double() @ torch.from_numpy(values).double().T
    scale = x.double().abs() @ torch.from_numpy(values).double().abs().T
    for num_rows in (1, 2, 9):
        assert ((product(cpp, kept, x[:num_rows]) - right[:num_rows]).abs() <= 1e-5 * scale[:num_rows]).all()


@on_every_cpu_variant
def test_joined_formats_and_numbers_that_are_not_finite_are_dotted_row_by_row(variant: str) -> None:
    cpp = compiled(variant)
    parts = [random_rows(name, 128, 512, seed) for seed, name in enumerate(("Q4_K", "Q4_K", "Q6_K"))]
    kept = pack_blocks(cpp, [rows for rows, _ in parts], int8_activations=True)
    x = torch.randn(3, 512, generator=torch.manual_seed(3))
    right = rounded(x.double()) @ torch.cat([weight for _, weight in parts]).double().T
    assert (product(cpp, kept, x) - right).abs().max() < 2e-4 * right.abs().mean()
    assert product(cpp, kept, x[:1]).equal(product(cpp, kept, x)[:1])
    x[1, 7] = float("inf")
    found = product(cpp, kept, x)
    assert found[1].isnan().all() and found[[0, 2]].isfinite().all()
