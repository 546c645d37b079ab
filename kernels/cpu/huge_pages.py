"""Memory of large pages, for weights: a step reads every weight once, so with pages of 4 KiB most reads miss the TLB.

A large page holds the weights of several layers of a small model, so that tensors share mappings.
"""

from __future__ import annotations

import mmap
import threading
import weakref

import torch
from torch import Tensor

_PAGE_BYTES = 2 * 2**20
# Smallest mapping: a model that is closed while another lives gives back all but a part of one.
_MAPPING_BYTES = 16 * 2**20
_ALIGNMENT = 64


class _Mappings:
    """Hands out parts of mappings; one is given back to the system when no tensor lies in it any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: weakref.ref[mmap.mmap] | None = None
        self._used = 0  # bytes of the newest

    def take(self, size: int) -> tuple[mmap.mmap, int]:
        """Return a mapping and the offset of `size` bytes of it."""
        with self._lock:
            newest = None if self._newest is None else self._newest()
            if newest is None or self._used + size > len(newest):
                newest = _map(max(size, _MAPPING_BYTES))
                self._newest, self._used = weakref.ref(newest), 0
            place = self._used
            self._used = place + -(-size // _ALIGNMENT) * _ALIGNMENT
            return newest, place


def _map(size: int) -> mmap.mmap:
    # Linux aligns mappings of whole large pages to them.
    whole = -(-size // _PAGE_BYTES) * _PAGE_BYTES
    pages = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


_MAPPINGS = _Mappings()


def huge_page_tensor(count: int, dtype: torch.dtype) -> Tensor:
    """Allocate an uninitialised tensor of `count` elements."""
    pages, place = _MAPPINGS.take(max(1, count) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype, count=count, offset=place)
