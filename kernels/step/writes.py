"""Apply the writes of a packet to the tables of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from triolet.kernels._triton import kernel
from triolet.kernels.step.layout import Header, RowTables

if TYPE_CHECKING:
    import triton.language as tl

_PROGRAMS = 16
_TILE = 256


@kernel
def _writes_kernel(
    packet_ptr,  # see `Header`
    words_ptr,  # `RowTables.words`
    PROGRAMS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    num_writes = tl.load(packet_ptr + 2)
    first = packet_ptr + tl.load(packet_ptr + 3)
    for start in range(tl.program_id(0) * TILE, num_writes, PROGRAMS * TILE):
        write = start + tl.arange(0, TILE)
        live = write < num_writes
        word = tl.load(first + 2 * write, mask=live, other=0)
        value = tl.load(first + 2 * write + 1, mask=live, other=0)
        tl.store(words_ptr + word, value, mask=live)


def apply_writes(packet: Tensor, tables: RowTables) -> None:
    """Write what a packet says into the tables; no word may be written twice.

    Args:
        packet: [any] int32, see `Header`.
        tables: changed in place.
    """
    if packet.is_cuda:
        apply_writes_triton(packet, tables)
    else:
        apply_writes_reference(packet, tables)


def apply_writes_triton(packet: Tensor, tables: RowTables) -> None:
    """`apply_writes` in Triton: a fixed number of programs, however many writes there are."""
    _writes_kernel[_PROGRAMS,](packet, tables.words, PROGRAMS=_PROGRAMS, TILE=_TILE)


def apply_writes_reference(packet: Tensor, tables: RowTables) -> None:
    """`apply_writes` in torch."""
    first, count = int(packet[Header.FIRST_WRITE]), int(packet[Header.NUM_WRITES])
    writes = packet[first : first + 2 * count].view(count, 2)
    tables.words[writes[:, 0].long()] = writes[:, 1]
