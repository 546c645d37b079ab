"""Cache on disk of the weights that the C++ kernels read, in the order in which they read them.

The first load of a model packs its weights and writes them to one file; later loads map that file, so that nothing is
packed again, and processes with the same model share its pages. A file belongs to the files of a model as they are now
(path, size, times, inode), to a target of the kernels and to a dtype: if one of them differs it is written anew. Its
checksum covers all of its bytes, so that a damaged file is packed again instead of being computed with.

Layout: `_MAGIC`, the CRC-32 of all that follows, the length of the table, the table (JSON), then the tensors, each at a
multiple of a page.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import logging
import mmap
import os
import struct
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import attrs
import torch
from torch import Tensor

from triolet.kernels.cpu.abi import BlockPanelStruct
from triolet.kernels.cpu.gemm.packing import CppArgmaxFilter, CppLinear

logger = logging.getLogger(__name__)

_MAGIC: Final = (
    b"triolet weights\x04"  # the last byte is the version of the layout, and of how weights are packed
)
_CRC: Final = struct.Struct("<I")
_LENGTH: Final = struct.Struct("<Q")
_HEADER_BYTES: Final = len(_MAGIC) + _CRC.size + _LENGTH.size
_PAGE: Final = 4096
_CHUNK_BYTES: Final = 2**24
_TENSORS: Final = ("weights", "bias", "scales", "zero_point_offsets")
_HEAD, _FILTER, _BOUNDS = "head", "argmax_filter", "argmax_bounds"


class _BadFileError(Exception):
    """The file is not what this module writes, or is damaged."""


@attrs.define(eq=False)
class WeightsCache:
    """Packed weights of one model, from its file or to be written there.

    Args:
        path: of the file.
        key: what the weights depend on.
    """

    path: Path
    _key: list[Any]
    kept: frozenset[str] = attrs.field(default=frozenset(), init=False)  # stored tensors that stay in blocks
    _stored: dict[str, CppLinear] = attrs.field(factory=dict, init=False)
    _packed: dict[str, CppLinear] = attrs.field(factory=dict, init=False)

    def linear(self, name: str) -> CppLinear | None:
        """Return the layer `name` of the file; None if it must be packed."""
        return self._stored.get(name)

    def head(self) -> tuple[CppLinear | None, CppArgmaxFilter | None]:
        """Return the head and its argmax filter; None for what the file has not."""
        weights, bounds = self._stored.get(_FILTER), self._stored.get(_BOUNDS)
        found = None if weights is None or bounds is None else CppArgmaxFilter(weights, bounds.weights)
        return self._stored.get(_HEAD), found

    def add(self, name: str, linear: CppLinear) -> None:
        """Add a layer that was packed, for `save`."""
        self._packed[name] = linear

    def add_head(self, head: CppLinear, argmax_filter: CppArgmaxFilter | None) -> None:
        """Add the head and its argmax filter, for `save`."""
        self._packed[_HEAD] = head
        if argmax_filter is not None:
            self._packed[_FILTER] = argmax_filter.weights
            # Two numbers per output are a weight with two inputs.
            self._packed[_BOUNDS] = CppLinear(argmax_filter.bounds, None, argmax_filter.weights.num_out, 2)

    def load(self) -> None:
        """Map the file, if it is there and fits; a damaged one is logged, and packed again."""
        try:
            table, mapped, begin = _map(self.path)
            if table["key"] != self._key:
                logger.info("the weights cache %s is of other weights: it is written anew", self.path)
                return
            self._stored = {name: _restore(entry, mapped, begin) for name, entry in table["layers"].items()}
            self.kept = frozenset(table["kept"])
        except FileNotFoundError:
            return
        except (OSError, ValueError, _BadFileError) as error:
            logger.warning("the weights cache %s cannot be used and is written anew: %s", self.path, error)
            return
        logger.info("the packed weights are mapped from %s", self.path)

    def save(self, kept: Iterable[str]) -> None:
        """Write what was packed, unless it came from the file; a failure is logged, and the model runs without.

        Args:
            kept: names of the stored tensors that stay in their blocks.
        """
        packed, self._packed = self._packed, {}
        if self._stored:
            return
        temporary: str | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=f"{self.path.name}.")
            with open(descriptor, "wb") as file:
                _write(file, {"key": self._key, "kept": sorted(kept)}, packed)
            # Renamed when it is whole: a process that starts meanwhile finds the old file or the new one.
            os.replace(temporary, self.path)
        except OSError as error:
            logger.warning("the weights cache %s cannot be written: %s", self.path, error)
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)


def weights_cache(
    folder: str, sources: Iterable[Path], kernels_digest: str, *settings: object
) -> WeightsCache:
    """Return the cache of a model, with its weights if they are there.

    Args:
        folder: of the caches; made if it is missing.
        sources: all files that the weights are read from, before they are read.
        kernels_digest: of the library that the weights are packed for.
        settings: what else the packed weights depend on; plain values.
    """
    files = identity_of(sources)
    named = [file[0] for file in files]
    # The name has no times and no digests in it: a changed model replaces its file instead of leaving it behind.
    name = hashlib.sha256(json.dumps([named, *map(str, settings)]).encode()).hexdigest()[:32]
    cache = WeightsCache(Path(folder, f"{name}.weights"), [files, kernels_digest, *map(str, settings)])
    cache.load()
    return cache


def identity_of(sources: Iterable[Path]) -> list[list[str | int]]:
    """Return what `stat` tells of files: it changes with their contents, which would take a second to digest."""
    # A file that is written to gets another change time, whatever its modification time is set to.
    stats = [(os.path.realpath(path), os.stat(path)) for path in sorted(sources)]
    return [[path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino] for path, stat in stats]


def _write(file: BinaryIO, table: dict[str, Any], layers: dict[str, CppLinear]) -> None:
    place, entries, tensors = 0, dict[str, Any](), list[Tensor]()
    for name, linear in layers.items():
        places: dict[str, tuple[int, int, str]] = {}
        for field in _TENSORS:
            tensor: Tensor | None = getattr(linear, field)
            if tensor is not None:
                places[field] = place, tensor.numel(), str(tensor.dtype).removeprefix("torch.")
                tensors.append(tensor)
                place += _padded(tensor.nbytes)
        base = linear.weights.data_ptr()
        entries[name] = {
            "tensors": places,
            "sizes": (linear.num_out, linear.num_in, linear.bits, linear.gated),
            "panels": [(panel.blocks - base, panel.format, panel.inputs) for panel in linear.panels or ()],
        }
    header = json.dumps({**table, "layers": entries}).encode()
    file.write(_MAGIC + _CRC.pack(0))
    crc = 0
    for part in _parts(header, tensors):
        crc = zlib.crc32(part, crc)
        file.write(part)
    file.seek(len(_MAGIC))
    file.write(_CRC.pack(crc))


def _parts(header: bytes, tensors: list[Tensor]) -> Iterator[bytes | memoryview]:
    begin = _HEADER_BYTES + len(header)
    yield _LENGTH.pack(len(header)) + header + bytes(_padded(begin) - begin)
    for tensor in tensors:
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
        for first in range(0, len(data), _CHUNK_BYTES):
            yield data[first : first + _CHUNK_BYTES]
        yield bytes(_padded(len(data)) - len(data))


def _map(path: Path) -> tuple[dict[str, Any], mmap.mmap, int]:
    """Map a file: its table, all of it, and where its tensors begin."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < _HEADER_BYTES or file.read(len(_MAGIC)) != _MAGIC:
            raise _BadFileError("it is no weights cache of this version")
        # Private: whatever writes to a weight changes its own copy, and the pages nothing writes to are shared.
        mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    (crc,) = _CRC.unpack_from(mapped, len(_MAGIC))
    with memoryview(mapped) as view, view[len(_MAGIC) + _CRC.size :] as rest:
        if zlib.crc32(rest) != crc:
            raise _BadFileError("it is damaged: its checksum differs")
    (length,) = _LENGTH.unpack_from(mapped, len(_MAGIC) + _CRC.size)
    table = json.loads(mapped[_HEADER_BYTES : _HEADER_BYTES + length])
    return table, mapped, _padded(_HEADER_BYTES + length)


def _restore(entry: dict[str, Any], mapped: mmap.mmap, begin: int) -> CppLinear:
    tensors: dict[str, Tensor] = {
        field: torch.frombuffer(mapped, dtype=getattr(torch, dtype), count=count, offset=begin + place)
        for field, (place, count, dtype) in entry["tensors"].items()
    }
    num_out, num_in, bits, gated = entry["sizes"]
    weights = tensors["weights"]
    base = weights.data_ptr()
    panels = [BlockPanelStruct(base + offset, kind, inputs) for offset, kind, inputs in entry["panels"]]
    table: ctypes.Array[BlockPanelStruct] | None = (
        (BlockPanelStruct * len(panels))(*panels) if panels else None
    )
    return CppLinear(
        weights,
        tensors.get("bias"),
        num_out,
        num_in,
        tensors.get("scales"),
        tensors.get("zero_point_offsets"),
        bits=bits,
        gated=gated,
        panels=table,
    )


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE
