"""Weights of linear layers, packed in the order in which the C++ kernels read them.

The layouts are described in linear.h, bf16x3.h, int8.h, int4.h and argmax_candidates.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import attrs
import torch
from torch import Tensor

from triolet.errors import KernelShapeError
from triolet.kernels.cpu.abi import ArgmaxFilterStruct, BlockPanelStruct, LinearStruct
from triolet.kernels.cpu.attention.paged_attention import DTYPES
from triolet.kernels.cpu.huge_pages import huge_page_tensor

MODEL_DTYPES = (torch.float32, torch.bfloat16)
"""Supported dtypes of weights and activations."""

MAX_ARGMAX_FILTER_BYTES = 64 * 2**20
"""Largest weights of an argmax filter, bytes: beyond it the time saved is not worth the memory."""

ANY_ROWS = 2**31 - 1
"""Limit of an argmax filter that is used for any number of rows."""

_PACKED_DTYPES = {**DTYPES, torch.int8: 3}


@attrs.frozen(eq=False)
class CppLinear:
    """Packed weights of a linear layer, with bias, scales and offsets in the same order."""

    weights: Tensor  # packed
    bias: Tensor | None  # float32, or None
    num_out: int  # outputs
    num_in: int  # inputs
    scales: Tensor | None = None  # float32, of weights that are bytes; None for others
    # Int32, of int8 weights: 128 times the sum of each output's weights.
    zero_point_offsets: Tensor | None = None
    bits: int = 0  # of a weight; 0 = those of the model's dtype; 32 = float32 in blocks
    gated: bool = False  # the first half of the outputs are gates of the second half
    panels: ctypes.Array[BlockPanelStruct] | None = None  # of quantised blocks, which lie in `weights`

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        parts = (self.weights, self.bias, self.scales, self.zero_point_offsets)
        return sum(part.nbytes for part in parts if part is not None)

    def struct(self) -> LinearStruct:
        """Return the struct that C++ reads; it is valid as long as this object lives."""
        return LinearStruct(
            self.weights.data_ptr(),
            pointer(self.bias),
            pointer(self.scales),
            pointer(self.zero_point_offsets),
            None if self.panels is None else ctypes.addressof(self.panels),
            self.num_out,
            self.num_in,
            self.bits,
            self.gated,
        )


@attrs.frozen(eq=False)
class CppArgmaxFilter:
    """Int8 copy of a linear layer with error bounds: finds the outputs that can be its argmax."""

    weights: CppLinear  # of the layer, as bytes
    # float32, packed: how far off an estimate from the bytes can be, for a row of length 1, and the length of the bytes
    bounds: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return self.weights.num_bytes + self.bounds.nbytes

    def struct(self) -> ArgmaxFilterStruct:
        """Return the struct that C++ reads; it is valid as long as this object lives."""
        return ArgmaxFilterStruct(self.weights.struct(), self.bounds.data_ptr(), ANY_ROWS)


def pack_linear(
    library: ctypes.CDLL, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False
) -> CppLinear:
    """Copy a weight into the order in which the inner loop reads it.

    Args:
        library: the kernels; their vector width decides the order.
        weight: [num_out, num_in] float32 or bfloat16, contiguous; `num_in` even for bfloat16.
        bias: [num_out].
        gated: the first half of the outputs are gates of the second half.

    Raises:
        KernelShapeError: dtype, strides or shapes are not like that.
    """
    num_out, num_in = weight.shape
    _check_weight(weight, bias, gated=gated)
    if weight.dtype == torch.bfloat16 and num_in % 2:
        raise KernelShapeError("pairs of inputs", weight=tuple(weight.shape))
    packed = _pack(library, weight, gated=gated)
    return CppLinear(packed, pack_column(library, bias, gated=gated), num_out, num_in, gated=gated)


def pack_bf16x3(
    library: ctypes.CDLL, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False
) -> CppLinear:
    """Pack float32 in blocks for BF16x3 splitting where AMX can be used; otherwise the same as `pack_linear`.

    Args:
        library: the kernels.
        weight: [num_out, num_in] float32 or bfloat16, contiguous; `num_in` even for bfloat16.
        bias: [num_out].
        gated: the first half of the outputs are gates of the second half.

    Raises:
        KernelShapeError: dtype, strides or shapes are not like that.
    """
    inputs = library.triolet_block_inputs()
    if weight.dtype != torch.float32 or not inputs:
        return pack_linear(library, weight, bias, gated=gated)
    _check_weight(weight, bias, gated=gated)
    num_out, num_in = weight.shape
    columns = library.triolet_panel_columns()
    padded = -(-num_out // columns) * columns * -(-num_in // inputs) * inputs
    spare = inputs * columns  # a step splits one block more than it uses
    packed = huge_page_tensor(padded + spare, torch.float32)
    library.triolet_pack_bf16x3_blocks(
        ctypes.c_void_p(weight.data_ptr()),
        *_sizes(num_out, num_in, gated=gated),
        ctypes.c_void_p(packed.data_ptr()),
    )
    return CppLinear(packed, pack_column(library, bias, gated=gated), num_out, num_in, bits=32, gated=gated)


def pack_int8(
    library: ctypes.CDLL, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False
) -> CppLinear:
    """Round a weight to int8, symmetric, with a scale for each output, and pack it.

    Args:
        library: the kernels.
        weight: [num_out, num_in] float32 or bfloat16, contiguous; `num_in` a multiple of four.
        bias: [num_out].
        gated: the first half of the outputs are gates of the second half.

    Raises:
        KernelShapeError: dtype, strides or shapes are not like that.
    """
    _check_weight(weight, bias, gated=gated)
    if weight.shape[1] % 4:
        raise KernelShapeError("groups of 4 inputs", weight=tuple(weight.shape))
    return _pack_rounded_int8(library, *_round(weight), bias, gated=gated)


def _pack_rounded_int8(
    library: ctypes.CDLL, rounded: Tensor, scales: Tensor, bias: Tensor | None = None, *, gated: bool = False
) -> CppLinear:
    num_out, num_in = rounded.shape
    return CppLinear(
        _pack(library, rounded, gated=gated),
        pack_column(library, bias, gated=gated),
        num_out,
        num_in,
        pack_column(library, scales, gated=gated),
        # packing only moves 4-byte elements, so int32 is packed as float32
        _pack(
            library, (128 * rounded.sum(dim=1, dtype=torch.int32)).view(torch.float32)[:, None], gated=gated
        ),
        bits=8,
        gated=gated,
    )


def _round(weight: Tensor) -> tuple[Tensor, Tensor]:
    # symmetric int8, one scale per output: float32 scales [num_out]
    rounded = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(len(weight))
    for part in _parts(len(weight)):
        wide = weight[part].float()
        scales[part] = wide.abs().amax(dim=1) / 127
        rounded[part] = (wide / scales[part, None].clamp(min=1e-30)).round_()
    return rounded, scales


def pack_argmax_filter(library: ctypes.CDLL, weight: Tensor) -> CppArgmaxFilter | None:
    """Pack the int8 copy that finds the argmax of a layer without a bias in a quarter or half of the time.

    Args:
        library: the kernels.
        weight: [num_out, num_in] float32 or bfloat16, contiguous.

    Returns:
        None if the weight is larger than `MAX_ARGMAX_FILTER_BYTES`, `num_in` is no multiple of four, or a weight is not
        finite.
    """
    num_out, num_in = weight.shape
    if num_out * num_in > MAX_ARGMAX_FILTER_BYTES or num_in % 4:
        return None
    rounded, scales = _round(weight)
    bounds = _bounds(weight, rounded, scales)
    if not bounds.isfinite().all():
        return None
    packed = _pack(library, torch.stack((bounds, _lengths(rounded, scales)), dim=1), gated=False)
    return CppArgmaxFilter(_pack_rounded_int8(library, rounded, scales), packed)


def _bounds(weight: Tensor, rounded: Tensor, scales: Tensor) -> Tensor:
    """Bound the error of each output's estimate for a row of L2 norm 1."""
    num_out, num_in = weight.shape
    lost, lengths = torch.empty(num_out), torch.empty(num_out)
    for part in _parts(num_out):
        wide = weight[part].float()
        lengths[part] = wide.norm(dim=1)
        lost[part] = (wide - rounded[part] * scales[part, None]).norm(dim=1)
    # A row that is quantised twice keeps an error of half a step of the second scale: 1 / (4 * 127**2) of its largest
    # number for each input. `of_sums` bounds the rounding of the float32 sums.
    of_row = num_in**0.5 / (4 * 127**2) * 1.01
    of_sums = (num_in + 64) * 2.0**-23
    bounds: Tensor = 1.001 * (lost + (lengths + lost) * (of_row + of_sums))
    return bounds


def _lengths(rounded: Tensor, scales: Tensor) -> Tensor:
    """Bound the L2 norm of each output as its bytes have it."""
    norms = torch.empty(len(rounded))
    for part in _parts(len(rounded)):
        norms[part] = rounded[part].float().norm(dim=1)
    return 1.001 * norms * scales


def pack_int4(
    library: ctypes.CDLL, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False
) -> CppLinear:
    """Round a weight to int4 with a scale for every `GROUP` inputs of an output, and pack it.

    Args:
        library: the kernels.
        weight: [num_out, num_in] float32 or bfloat16, contiguous; `num_in` a multiple of `GROUP`.
        bias: [num_out].
        gated: the first half of the outputs are gates of the second half.

    Raises:
        KernelShapeError: dtype, strides or shapes are not like that.
    """
    num_out, num_in = weight.shape
    _check_weight(weight, bias, gated=gated)
    if num_in % GROUP:
        raise KernelShapeError("groups of inputs", weight=tuple(weight.shape), group=GROUP)
    rounded = torch.empty(weight.shape, dtype=torch.uint8)
    scales = torch.empty(num_out, num_in // GROUP, dtype=torch.bfloat16)
    for part in _parts(num_out):
        steps, scales[part] = round_groups(weight[part].float())
        rounded[part] = steps + 8
    columns = library.triolet_panel_columns()
    packed = huge_page_tensor(
        -(-num_out // columns) * columns * (num_in // 2 + num_in // GROUP * 2), torch.uint8
    )
    library.triolet_pack_int4(
        ctypes.c_void_p(rounded.data_ptr()),
        ctypes.c_void_p(scales.data_ptr()),
        *_sizes(num_out, num_in, gated=gated),
        ctypes.c_void_p(packed.data_ptr()),
    )
    return CppLinear(packed, pack_column(library, bias, gated=gated), num_out, num_in, bits=4, gated=gated)


GROUP = 32
"""Number of inputs that share a scale; GROUP in linear.h."""


def round_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round to int4 in groups.

    Args:
        weight: [num_out, num_in] float32.

    Returns:
        Whole numbers from -8 to 7, float32, [num_out, num_in]; and scales, bfloat16, [num_out, num_in / GROUP].
    Source: llama.cpp's Q4_0, ggml-quants.c, for the first half.
    """
    groups = weight.unflatten(1, (-1, GROUP))
    largest = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
    # the largest number becomes -8, so that all 16 steps are used
    steps = _steps(groups, (largest / -8).bfloat16().float())
    # then the scale with the least squared error for these steps
    sizes = (
        (groups * steps).sum(2, keepdim=True) / steps.square().sum(2, keepdim=True).clamp(min=1)
    ).bfloat16()
    return _steps(groups, sizes.float()).flatten(1), sizes.squeeze(2)


def _steps(groups: Tensor, size: Tensor) -> Tensor:
    tiny = size.abs() < 1e-30
    return (groups / size.masked_fill(tiny, 1.0)).round_().clamp_(-8, 7).masked_fill_(tiny, 0.0)


def _parts(num_out: int) -> Iterator[slice]:
    # a head or embedding converted to float32 at once would be the peak of the memory that loading takes
    return (slice(first, first + ROWS_AT_ONCE) for first in range(0, num_out, ROWS_AT_ONCE))


ROWS_AT_ONCE = 256


def _check_weight(weight: Tensor, bias: Tensor | None, *, gated: bool) -> None:
    num_out = len(weight)
    if weight.dtype not in MODEL_DTYPES or not weight.is_contiguous() or (gated and num_out % 2):
        raise KernelShapeError("dtype, strides and gate", weight=(weight.dtype, weight.stride()), gated=gated)
    if bias is not None and bias.shape != (num_out,):
        raise KernelShapeError("num_out", weight=tuple(weight.shape), bias=tuple(bias.shape))


def pack_column(library: ctypes.CDLL, column: Tensor | None, *, gated: bool) -> Tensor | None:
    """Pack one number per output, as float32, in the order of the packed outputs."""
    # like a weight with one input
    return None if column is None else _pack(library, column.float().contiguous()[:, None], gated=gated)


def _pack(library: ctypes.CDLL, weight: Tensor, *, gated: bool) -> Tensor:
    num_out, num_in = weight.shape
    columns = library.triolet_panel_columns()
    padded_out = -(-num_out // columns) * columns
    packed = huge_page_tensor(padded_out * num_in, weight.dtype)
    library.triolet_pack(
        ctypes.c_int32(_PACKED_DTYPES[weight.dtype]),
        ctypes.c_void_p(weight.data_ptr()),
        *_sizes(num_out, num_in, gated=gated),
        ctypes.c_void_p(packed.data_ptr()),
    )
    return packed


def _sizes(num_out: int, num_in: int, *, gated: bool) -> tuple[ctypes.c_int32, ...]:
    # arguments that all packing functions have in common
    return tuple(map(ctypes.c_int32, (num_out, num_in, gated, torch.get_num_threads())))


def pointer(tensor: Tensor | None) -> int | None:
    """Return the address of a tensor's first element; None stays None."""
    return None if tensor is None else tensor.data_ptr()
