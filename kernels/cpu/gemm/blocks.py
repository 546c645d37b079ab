"""Weights of linear layers kept in the blocks of a quantised checkpoint, for the product of gemm/blocks.h."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from triolet.errors import KernelShapeError
from triolet.kernels.cpu.abi import BlockPanelStruct
from triolet.kernels.cpu.gemm.packing import CppLinear, pack_column
from triolet.kernels.cpu.huge_pages import huge_page_tensor


@attrs.frozen
class BlockFormat:
    """Way to store `inputs` weights of an output in `num_bytes` bytes."""

    name: str
    number: int  # in C++: `BlockFormat` in gemm/blocks.h
    inputs: int
    num_bytes: int


GGUF_FORMATS = {
    kind.name: kind
    for kind in (
        BlockFormat("Q4_0", 2, 32, 18),
        BlockFormat("Q5_0", 6, 32, 22),
        BlockFormat("Q8_0", 8, 32, 34),
        BlockFormat("Q4_K", 12, 256, 144),
        BlockFormat("Q5_K", 13, 256, 176),
        BlockFormat("Q6_K", 14, 256, 210),
    )
}
"""Types of GGUF tensors that the kernels multiply with as they are, by name."""


def u4_format(inputs: int) -> BlockFormat:
    """Return the format of unsigned integers of four bits, with scale and zero point for `inputs` of them."""
    return BlockFormat("U4", 256, inputs, 5 + inputs // 2)


def i8_format(inputs: int) -> BlockFormat:
    """Return the format of signed bytes, with a scale for `inputs` of them."""
    return BlockFormat("I8", 257, inputs, 4 + inputs)


def u4_rows(weight: Tensor, zeros: Tensor, scales: Tensor) -> BlockRows:
    """Make blocks that stand for scale * (weight - zero).

    Args:
        weight: integers [num_out, num_in] from 0 to 15.
        zeros: integers [num_out, num_groups] from 0 to 255.
        scales: [num_out, num_groups], of a dtype that float32 has all values of.
    """
    num_out, num_groups = scales.shape
    kind = u4_format(weight.shape[1] // num_groups)
    rows = torch.empty(num_out, num_groups, kind.num_bytes, dtype=torch.uint8)
    rows[:, :, :4] = _scale_bytes(scales)
    rows[:, :, 4] = zeros
    even, odd = weight.reshape(num_out, num_groups, -1, 2).unbind(3)
    rows[:, :, 5:] = even | odd << 4
    return BlockRows(kind, rows.flatten(1))


def i8_rows(weight: Tensor, scales: Tensor) -> BlockRows:
    """Make blocks that stand for scale * weight.

    Args:
        weight: integers [num_out, num_in] from -128 to 127.
        scales: [num_out, num_groups], of a dtype that float32 has all values of.
    """
    num_out, num_groups = scales.shape
    kind = i8_format(weight.shape[1] // num_groups)
    rows = torch.empty(num_out, num_groups, kind.num_bytes, dtype=torch.uint8)
    rows[:, :, :4] = _scale_bytes(scales)
    rows[:, :, 4:] = weight.to(torch.int8).contiguous().view(torch.uint8).view(num_out, num_groups, -1)
    return BlockRows(kind, rows.flatten(1))


def _scale_bytes(scales: Tensor) -> Tensor:
    # flat first: torch calls a single column contiguous whatever its strides are, and bytes need a stride of 1
    return scales.float().contiguous().view(-1).view(torch.uint8).view(*scales.shape, 4)


@attrs.frozen(eq=False)
class MappedRows:
    """Rows of blocks in a mapped file, for an embedding: only rows that are looked up take memory."""

    format: BlockFormat
    address: int
    owner: object  # the mapping, which must live as long as the address is used


@attrs.frozen(eq=False)
class BlockRows:
    """Rows of blocks, in a file's order."""

    format: BlockFormat
    rows: Tensor  # [num_out, num_in / inputs * num_bytes] uint8, contiguous

    @property
    def num_in(self) -> int:
        """Inputs of each output."""
        return self.rows.shape[1] // self.format.num_bytes * self.format.inputs


def fits_panels(
    library: ctypes.CDLL, parts: Sequence[tuple[BlockFormat, int]], num_in: int, *, gated: bool
) -> bool:
    """Tell whether joined parts can be packed: a panel has one format, and whole blocks.

    Args:
        library: the kernels.
        parts: format and outputs of each.
        num_in: inputs of all.
        gated: see `pack_blocks`.
    """
    columns = library.triolet_panel_columns()
    begins = itertools.accumulate(num_out for _, num_out in parts)
    changes = [
        begin for (one, _), (other, _), begin in zip(parts, parts[1:], begins, strict=False) if one != other
    ]
    is_whole = all(kind.inputs % 32 == 0 and num_in % kind.inputs == 0 for kind, _ in parts)
    return is_whole and not (gated and changes) and not any(begin % columns for begin in changes)


def pack_blocks(
    library: ctypes.CDLL,
    parts: Sequence[BlockRows],
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    int8_activations: bool = False,
    dtype: torch.dtype = torch.float32,
) -> CppLinear:
    """Copy blocks into the order in which the product reads them; their integers and scales stay what they are.

    Args:
        library: the kernels.
        parts: of the layer, joined along the outputs.
        bias: [num_out].
        gated: the first half of the outputs are gates of the second half.
        int8_activations: activations are rounded to int8 within the product, see gemm/block_dots.h.
        dtype: of the activations; it decides the order where there are instructions for bfloat16, see there.

    Raises:
        KernelShapeError: the parts do not fit panels, see `fits_panels`.
    """
    num_in, num_out = parts[0].num_in, sum(len(part.rows) for part in parts)
    formats = [(part.format, len(part.rows)) for part in parts]
    if any(part.num_in != num_in for part in parts) or not fits_panels(library, formats, num_in, gated=gated):
        raise KernelShapeError("blocks and panels", parts=formats, num_in=num_in, gated=gated)
    joined = [(kind, _joined([part.rows for part in same])) for kind, same in _runs(parts)]
    columns = library.triolet_panel_columns()
    sizes = [
        num_in // kind.inputs * library.triolet_block_panel_bytes(kind.number, kind.inputs)
        for kind, _ in joined
    ]
    counts = [-(-len(rows) // columns) for _, rows in joined]
    packed = huge_page_tensor(sum(map(int.__mul__, sizes, counts)), torch.uint8)
    takes_bf16 = dtype == torch.bfloat16 and library.triolet_block_dots_take_bf16()
    bits = 8 if int8_activations else 16 if takes_bf16 else 0
    pack = library.triolet_pack_block_dots if bits else library.triolet_pack_blocks
    panels, place = list[BlockPanelStruct](), packed.data_ptr()
    for (kind, rows), size, count in zip(joined, sizes, counts, strict=True):
        pack(
            ctypes.c_int32(kind.number),
            ctypes.c_int32(kind.inputs),
            ctypes.c_void_p(rows.data_ptr()),
            *(ctypes.c_int32(number) for number in (len(rows), num_in, gated, torch.get_num_threads())),
            ctypes.c_void_p(place),
        )
        panels += [BlockPanelStruct(place + panel * size, kind.number, kind.inputs) for panel in range(count)]
        place += size * count
    table = (BlockPanelStruct * len(panels))(*panels)
    return CppLinear(
        packed,
        pack_column(library, bias, gated=gated),
        num_out,
        num_in,
        bits=bits,
        gated=gated,
        panels=table,
    )


def _joined(rows: list[Tensor]) -> Tensor:
    # A single part is used where it lies: a head is most of a small model.
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _runs(parts: Sequence[BlockRows]) -> list[tuple[BlockFormat, list[BlockRows]]]:
    # Adjacent parts of one format, which may share a panel.
    groups = itertools.groupby(parts, key=lambda part: part.format)
    return [(kind, list(same)) for kind, same in groups]
