"""Keys and values in float8: the codes are torch's, and attention reads what they stand for."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import torch
from torch import Tensor

from tests.kernels.targets import PagedCase, Target, on_every_triton_target
from tests.kernels.test_rotary import cos_sin_table
from triolet.errors import KernelShapeError
from triolet.kernels._triton import kernel
from triolet.kernels.float8 import float8_codes, float8_numbers, to_float8
from triolet.kernels.kv_write import kv_write, kv_write_reference, kv_write_triton
from triolet.kernels.paged_attention import paged_attention, paged_attention_reference, paged_attention_triton
from triolet.kernels.qkv_prepare import HeadNorms, qkv_prepare_triton

if TYPE_CHECKING:
    import triton.language as tl

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = pytest.mark.parametrize(("dtype", "mantissa"), [(E4M3, 3), (E5M2, 2)], ids=["e4m3", "e5m2"])
DTYPES = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
MIXED = [(7, 7), (1, 65), (16, 80), (1, 1), (0, 3), (1, 64), (40, 130), (1, 200)]


@kernel
def _encode_kernel(numbers_ptr, codes_ptr, scale, MANTISSA: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    place = tl.program_id(0) * 256 + tl.arange(0, 256)
    tl.store(codes_ptr + place, float8_codes(tl.load(numbers_ptr + place), scale, MANTISSA))


@kernel
def _decode_kernel(codes_ptr, numbers_ptr, MANTISSA: tl.constexpr, NATIVE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    place = tl.arange(0, 256)
    tl.store(numbers_ptr + place, float8_numbers(tl.load(codes_ptr + place), MANTISSA, NATIVE))


def encode(numbers: Tensor, mantissa: int, scale: float = 1.0) -> Tensor:
    """Return the kernels' codes of float32 numbers."""
    padded = torch.nn.functional.pad(numbers, (0, -len(numbers) % 256))
    codes = torch.empty(len(padded), dtype=torch.uint8, device=numbers.device)
    _encode_kernel[len(padded) // 256,](padded, codes, scale, MANTISSA=mantissa)
    return codes[: len(numbers)]


def torch_codes(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return torch's codes of numbers that are first brought into the format's range."""
    greatest = {E4M3: 448.0, E5M2: 57344.0}[dtype]
    return numbers.clamp(-greatest, greatest).to(dtype).view(torch.uint8)


def only_float32(target: Target) -> None:
    if target.dtype != torch.float32:
        pytest.skip("one dtype will do: nothing of the kind is computed")


def wide_numbers(dtype: torch.dtype) -> Tensor:
    """Return 10,000 numbers of all exponents, all halves between neighbours, and what lies beside those halves."""
    exponents = torch.empty(10_000).uniform_(-24, 18).exp2()
    scattered = (
        exponents * torch.empty(10_000).uniform_(1, 2) * torch.randint(0, 2, (10_000,)).sub(0.5).sign()
    )
    codes = torch.arange(128, dtype=torch.uint8).view(dtype).double()
    finite = codes[codes.isfinite()]
    halves = ((finite[1:] + finite[:-1]) / 2).float()
    above, below = torch.nextafter(halves, torch.tensor(math.inf)), torch.nextafter(halves, torch.tensor(0.0))
    greatest = float(finite[-1])
    edges = torch.tensor(
        [0.0, greatest, 1.01 * greatest, 1.2 * greatest, 1e30, 3e38, math.inf, 1e-30, 1e-42, math.nan]
    )
    special = torch.cat([finite.float(), halves, above, below, edges])
    return torch.cat([scattered, special, -special])


@on_every_triton_target
@FORMATS
def test_codes_are_those_of_torch_and_saturate(target: Target, dtype: torch.dtype, mantissa: int) -> None:
    only_float32(target)
    numbers = wide_numbers(dtype)
    expected = torch_codes(numbers, dtype)
    got = encode(numbers.to(target.device), mantissa).cpu()
    is_nan = numbers.isnan()
    assert got[~is_nan].equal(expected[~is_nan])
    assert got[is_nan].view(dtype).float().isnan().all()
    greatest = torch.tensor([math.inf, -math.inf]).to(target.device)
    top = {3: 0x7E, 2: 0x7B}[mantissa]
    assert encode(greatest, mantissa).tolist() == [top, top | 0x80]


@on_every_triton_target
@FORMATS
@pytest.mark.parametrize("scale", [0.037, 1.0, 3.1])
def test_numbers_are_divided_by_the_scale_and_rounded_once_more(
    target: Target, dtype: torch.dtype, mantissa: int, scale: float
) -> None:
    only_float32(target)
    numbers = 40 * torch.randn(10_000)
    expected = torch_codes(numbers / torch.tensor(scale), dtype)
    assert encode(numbers.to(target.device), mantissa, scale).cpu().equal(expected)
    assert to_float8(numbers, dtype, scale).view(torch.uint8).equal(expected)


@on_every_triton_target
@FORMATS
def test_every_code_stands_for_the_number_that_torch_says(
    target: Target, dtype: torch.dtype, mantissa: int
) -> None:
    only_float32(target)
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(dtype).float()
    numbers = torch.empty(256, dtype=torch.float16, device=target.device)
    for is_native in {False, target.device == "cuda"}:
        _decode_kernel[1,](codes.to(target.device), numbers, MANTISSA=mantissa, NATIVE=is_native)
        torch.testing.assert_close(numbers.cpu().float(), expected, rtol=0, atol=0, equal_nan=True)


@on_every_triton_target
@DTYPES
@pytest.mark.parametrize("head_dim", [24, 128])
def test_writes_convert_with_the_scale_and_touch_nothing_else(
    target: Target, dtype: torch.dtype, head_dim: int
) -> None:
    new = 200 * target.randn(33, 3, head_dim)[:, 1:]
    new[0, 0, :2] = torch.tensor([math.inf, -65504.0])
    slots = torch.randperm(48)[:33].to(target.device)
    slots[::5] = -1
    written = torch.full((3, 16, 2, head_dim), 0x55, dtype=torch.uint8, device=target.device).view(dtype)
    slow = written.clone()
    expected = written.clone().view(torch.uint8)
    kv_write_triton(new, written, slots, 0.7)
    kv_write_reference(new, slow, slots, 0.7)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected.flatten(0, 1)[slot] = torch_codes(new[token].float() / torch.tensor(0.7), dtype)
    assert written.view(torch.uint8).equal(expected)
    assert slow.view(torch.uint8).equal(expected)


@on_every_triton_target
@pytest.mark.parametrize("dtype", [E4M3, pytest.param(E5M2, marks=pytest.mark.slow)], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "has_norm"), [(16, 16, True), (80, 32, True), (40, 0, False)]
)
def test_the_fused_kernel_keeps_the_codes_of_what_it_would_have_kept(
    target: Target, dtype: torch.dtype, head_dim: int, rotary_dim: int, has_norm: bool
) -> None:
    heads = 20 * target.randn(5, 7, head_dim)
    weights = target.randn(2, head_dim)
    options: dict[str, Any] = {
        "num_heads": 3,
        "norms": HeadNorms(query_weight=weights[0], key_weight=weights[1], eps=1e-5, weight_offset=0.0)
        if has_norm
        else None,
        "cos_sin": cos_sin_table(rotary_dim).to(target.device) if rotary_dim else None,
    }
    slots = torch.tensor([7, -1, 0, 30, 12]).to(target.device)
    positions = torch.tensor([3, 0, 63, 1, 20]).to(target.device)
    plain = torch.zeros(2, 2, 16, 2, head_dim, dtype=target.dtype, device=target.device)
    caches = torch.zeros(2, 2, 16, 2, head_dim, dtype=torch.uint8, device=target.device).view(dtype)
    plain_query = qkv_prepare_triton(heads.clone(), plain[0], plain[1], slots, positions, **options)
    query = qkv_prepare_triton(
        heads.clone(), caches[0], caches[1], slots, positions, **options, key_scale=0.5, value_scale=3.0
    )
    assert query.equal(plain_query)
    for cache, kept, scale in ((caches[0], plain[0], 0.5), (caches[1], plain[1], 3.0)):
        assert cache.view(torch.uint8).equal(torch_codes(kept.float() / scale, dtype))


def float8_case(
    lens: list[tuple[int, int]], dtype: torch.dtype, target: Target, key_scale: float, value_scale: float,
    **sizes: int,
) -> tuple[PagedCase, PagedCase]:  # fmt: skip
    """Return a case whose cache is in float8, and one whose plain keys and values are what the codes stand for."""
    case = PagedCase.make(lens, target=target, **sizes)
    kept = attrs.evolve(
        case,
        keys=torch_codes(case.keys.float() / key_scale, dtype).view(dtype),
        values=torch_codes(case.values.float() / value_scale, dtype).view(dtype),
    )
    read = attrs.evolve(
        case,
        plain_keys=tuple(
            torch_codes(k.float() / key_scale, dtype).view(dtype).double() * key_scale
            for k in case.plain_keys
        ),
        plain_values=tuple(
            torch_codes(v.float() / value_scale, dtype).view(dtype).double() * value_scale
            for v in case.plain_values
        ),
    )
    return kept, read


@on_every_triton_target
@pytest.mark.parametrize("dtype", [E4M3, pytest.param(E5M2, marks=pytest.mark.slow)], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("segment_tokens", [None, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, {"num_heads": 4}),
        ({"sliding_window": 65, "soft_cap": 2.0}, {"num_heads": 6, "num_kv_heads": 2, "head_dim": 24}),
    ],
    ids=["plain", "window-and-cap"],
)
def test_attention_is_that_of_float64_over_what_the_codes_stand_for(
    target: Target,
    dtype: torch.dtype,
    options: dict[str, Any],
    sizes: dict[str, int],
    segment_tokens: int | None,
) -> None:
    kept, read = float8_case(MIXED, dtype, target, 0.3, 1.7, num_padding_rows=2, **sizes)
    inputs = kept.query, kept.keys, kept.values, kept.metadata
    scaled = {"scale": kept.scale, "key_scale": 0.3, "value_scale": 1.7, **options}
    truth = read.truth(**options)
    got = paged_attention_triton(*inputs, **scaled, segment_tokens=segment_tokens)
    torch.testing.assert_close(got.cpu().double(), truth, **target.tolerance)
    reference = paged_attention_reference(*inputs, **scaled)
    torch.testing.assert_close(reference.cpu().double(), truth, **target.tolerance)


@on_every_triton_target
@DTYPES
def test_sinks_are_not_multiplied_by_the_scales(target: Target, dtype: torch.dtype) -> None:
    kept, read = float8_case([(5, 40), (1, 33)], dtype, target, 0.5, 2.0)
    sinks = torch.tensor([1.0, -0.5], device=target.device)
    got = paged_attention_triton(
        kept.query, kept.keys, kept.values, kept.metadata, scale=kept.scale, sinks=sinks,
        key_scale=0.5, value_scale=2.0,
    )  # fmt: skip
    torch.testing.assert_close(got.cpu().double(), read.truth(sinks=sinks.cpu()), **target.tolerance)


def test_on_a_cpu_the_reference_reads_it() -> None:
    kept, read = float8_case(MIXED, E4M3, Target("cpu", torch.float32), 0.5, 2.0)
    got = paged_attention(
        kept.query, kept.keys, kept.values, kept.metadata, scale=kept.scale, key_scale=0.5, value_scale=2.0
    )
    torch.testing.assert_close(got.double(), read.truth(), rtol=1e-5, atol=2e-6)


def test_keys_and_values_of_two_formats_are_refused() -> None:
    kept, _ = float8_case([(1, 3)], E4M3, Target("cpu", torch.float32), 1.0, 1.0)
    other = kept.values.view(torch.uint8).view(E5M2)
    with pytest.raises(KernelShapeError, match="dtype"):
        paged_attention(kept.query, kept.keys, other, kept.metadata, scale=1.0)
    with pytest.raises(KernelShapeError, match="dtype"):
        kv_write(torch.zeros(1, 1, 16), kept.keys.view(torch.uint8), torch.zeros(1, dtype=torch.int64))
