"""Reader of GGUF files: header, metadata and tensor table, of one file or of all parts of a split model.

A GGUF file comes from anywhere, so nothing in it is believed: each length, count, offset and type is compared with
what is left of the file before anything is allocated or skipped by it. Arrays stay in the file until they are asked
for their items, so that opening a file takes memory for its keys and tensor names only.

Source: the GGUF specification, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import itertools
import math
import mmap
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import attrs
import numpy as np

from triolet.errors import ModelFileError, UnsupportedModel
from triolet.model.gguf.ggml_types import REFUSED, TYPES, GgmlType

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
# Bounds far above any real model's: the longest name that ggml takes is 64 bytes, a file has some hundred keys.
_MAX_DIMENSIONS = 4
_MAX_KEY_BYTES = 2**16 - 1
_MAX_NAME_BYTES = 2**10
_MAX_KEYS = _MAX_TENSORS = 2**16
_MIN_PAIR_BYTES = 8 + 1 + 4 + 1  # length, one byte of key, type, the smallest value
_MIN_ENTRY_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # length, one byte of name, one dimension, type, offset

_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS: dict[int, str] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "<u1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
"""NumPy's names of the scalar types, by their number in the file."""

_PART = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE | re.DOTALL)

GgufValue: TypeAlias = "int | float | bool | str | GgufArray"


@attrs.frozen
class GgufTensor:
    """One tensor of a GGUF file, not read yet."""

    name: str
    shape: tuple[int, ...]  # outermost first, as in torch; the file has it the other way round
    type: GgmlType
    path: Path  # of its file
    begin: int  # where it begins there, bytes
    num_bytes: int

    @property
    def row_bytes(self) -> int:
        """The bytes of one row, that is of `shape[-1]` values."""
        return self.shape[-1] // self.type.block_values * self.type.block_bytes


@attrs.frozen(eq=False)
class GgufArray:
    """Array in the metadata, still in the file."""

    key: str
    path: Path
    item_type: int
    count: int
    _data: mmap.mmap
    _begin: int

    def __repr__(self) -> str:  # in error messages
        return f"<array of {self.count}>"

    @property
    def holds_numbers(self) -> bool:
        return self.item_type in _NUMBERS

    def texts(self) -> list[str]:
        """Return the items of an array of strings.

        Raises:
            ModelFileError: they are no strings, or not in UTF-8.
        """
        if self.item_type != _STRING:
            raise ModelFileError(self.path, f"{self.key} must be an array of strings")
        cursor = _Cursor(self.path, self._data, self._begin)
        return [cursor.text(f"item {index} of {self.key}") for index in range(self.count)]

    def numbers(self) -> list[int] | list[float]:
        """Return the items of an array of numbers.

        Raises:
            ModelFileError: they are no numbers.
        """
        if not self.holds_numbers:
            raise ModelFileError(self.path, f"{self.key} must be an array of numbers")
        dtype = np.dtype(_NUMBERS[self.item_type])
        items: list[int] | list[float] = np.frombuffer(self._data, dtype, self.count, self._begin).tolist()
        return items


@attrs.frozen(eq=False)
class GgufFile:
    """Metadata and tensors of a GGUF model, which may be split into several files."""

    path: Path  # of the (first) file
    metadata: Mapping[str, GgufValue]
    tensors: Mapping[str, GgufTensor]

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Read the metadata and the tensor table of a file, and of all its other parts.

        Args:
            path: the file, or any part of a split one (`-00001-of-00003.gguf`).

        Raises:
            ModelFileError: a file is missing, truncated or not what its name says; names the key or tensor.
            UnsupportedModel: a version or a tensor type that is not read.
        """
        paths = _parts(path)
        files = [_open_one(part) for part in paths]
        metadata, tensors = files[0].metadata, dict(files[0].tensors)
        if len(files) == 1 and metadata.get("split.count", 1) not in (0, 1):
            count = metadata["split.count"]
            raise ModelFileError(
                path, f"is one of {count} parts, so its name must end in -00001-of-{count:0>5}.gguf"
            )
        for index, file in enumerate(files if len(files) > 1 else []):
            for key, value in (("split.no", index), ("split.count", len(files))):
                if file.metadata.get(key) != value:
                    raise ModelFileError(file.path, f"{key} must be {value}; got {file.metadata.get(key)}")
            if index and (doubled := sorted(tensors.keys() & file.tensors.keys())):
                raise ModelFileError(file.path, f"tensor {doubled[0]!r} is in another part, too")
            tensors |= file.tensors
        expected = metadata.get("split.tensors.count", len(tensors))
        if len(files) > 1 and expected != len(tensors):
            raise ModelFileError(
                path, f"split.tensors.count must be {len(tensors)}, as in the parts; got {expected}"
            )
        return cls(paths[0], metadata, tensors)


@attrs.define
class _Cursor:
    """Place in a file; every step forward is checked against the file's size."""

    path: Path
    data: mmap.mmap
    at: int = 0

    def take(self, num_bytes: int, what: str) -> int:
        """Step over `num_bytes`, return where they begin."""
        begin = self.at
        if num_bytes > len(self.data) - begin:
            raise ModelFileError(
                self.path,
                f"is truncated: {what} takes {num_bytes} bytes of which {len(self.data) - begin} are there",
            )
        self.at = begin + num_bytes
        return begin

    def u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self.data, self.take(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        value: int = _U64.unpack_from(self.data, self.take(8, what))[0]
        return value

    def text(self, what: str, most_bytes: int | None = None) -> str:
        length = self.u64(f"the length of {what}")
        if most_bytes is not None and not 1 <= length <= most_bytes:
            raise ModelFileError(self.path, f"{what} must have 1 to {most_bytes} bytes; got {length}")
        begin = self.take(length, what)
        try:
            return self.data[begin : begin + length].decode()
        except UnicodeDecodeError as error:
            raise ModelFileError(self.path, f"{what} must be UTF-8: {error}") from error

    def skip_texts(self, count: int, what: str) -> None:
        # as `text` without the text: vocabularies have some hundred thousand items
        data, at, end, unpack = self.data, self.at, len(self.data), _U64.unpack_from
        for index in range(count):
            if at + 8 <= end:
                at += 8 + unpack(data, at)[0]
            if at + 8 > end and (at > end or index + 1 < count):
                raise ModelFileError(self.path, f"is truncated: it ends within {what}")
        self.at = at


_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


def _parts(path: Path) -> list[Path]:
    """Return the paths of all parts of the model that `path` is a part of."""
    if (match := _PART.fullmatch(path.name)) is None or int(match["count"]) < 1:
        return [path]
    count = int(match["count"])
    names = [f"{match['stem']}-{part:05}-of-{count:05}{path.suffix}" for part in range(1, count + 1)]
    for (
        name
    ) in names:  # before one is opened; the first that is missing ends the search, whatever the count says
        if not path.with_name(name).is_file():
            raise ModelFileError(path.with_name(name), "is missing")
    return [path.with_name(name) for name in names]


def _open_one(path: Path) -> GgufFile:
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelFileError(path, "is missing") from None
    except OSError as error:
        raise ModelFileError(path, f"cannot be read: {error.strerror or error}") from error
    except ValueError:  # mmap maps no empty file
        raise ModelFileError(path, "is truncated: it is empty") from None
    cursor = _Cursor(path, data)
    begin = cursor.take(4, "the magic number")
    if data[begin : begin + 4] != _MAGIC:
        raise ModelFileError(path, "is not a GGUF file: it does not begin with GGUF")
    version = cursor.u32("the version")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
        kind = "big-endian" if swapped else f"of version {version}"
        raise UnsupportedModel(f"{path}: GGUF files must be little-endian, of version 2 or 3; this is {kind}")
    num_tensors = _count(cursor, "tensor", _MIN_ENTRY_BYTES, _MAX_TENSORS)
    num_keys = _count(cursor, "key", _MIN_PAIR_BYTES, _MAX_KEYS)
    metadata: dict[str, GgufValue] = {}
    for index in range(num_keys):
        key = cursor.text(f"key {index}", _MAX_KEY_BYTES)
        if key in metadata:
            raise ModelFileError(path, f"key {key!r} is there twice")
        metadata[key] = _value(cursor, key, cursor.u32(f"the type of {key}"))
    return GgufFile(path, metadata, _tensor_table(cursor, num_tensors, _alignment(path, metadata)))


def _count(cursor: _Cursor, what: str, min_bytes: int, most: int) -> int:
    count = cursor.u64(f"the {what} count")
    if count > most:
        raise ModelFileError(cursor.path, f"{what} count must be at most {most}; got {count}")
    if count * min_bytes > len(cursor.data) - cursor.at:
        raise ModelFileError(cursor.path, f"is truncated: it is too short for its {what} count, {count}")
    return count


def _value(cursor: _Cursor, key: str, kind: int) -> GgufValue:
    if kind == _STRING:
        return cursor.text(key)
    if kind == _ARRAY:
        return _array(cursor, key)
    if kind not in _NUMBERS:
        raise ModelFileError(cursor.path, f"{key} has the type {kind}, which GGUF does not have")
    dtype = np.dtype(_NUMBERS[kind])
    number = np.frombuffer(cursor.data, dtype, 1, cursor.take(dtype.itemsize, key)).item()
    value: int | float = bool(number) if kind == _BOOL else number
    return value


def _array(cursor: _Cursor, key: str) -> GgufArray:
    item_type, count = cursor.u32(f"the item type of {key}"), cursor.u64(f"the length of {key}")
    begin = cursor.at
    if item_type == _STRING:
        cursor.skip_texts(count, key)
    elif item_type in _NUMBERS:
        cursor.take(count * np.dtype(_NUMBERS[item_type]).itemsize, key)
    else:  # arrays of arrays are in the specification and in no model
        raise ModelFileError(
            cursor.path, f"{key} must be an array of strings or numbers; got items of type {item_type}"
        )
    return GgufArray(key, cursor.path, item_type, count, cursor.data, begin)


def _alignment(path: Path, metadata: Mapping[str, GgufValue]) -> int:
    value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(value) is not int or not 1 <= value <= 2**20 or value & (value - 1):
        raise ModelFileError(path, f"general.alignment must be a power of two up to {2**20}; got {value!r}")
    return value


def _tensor_table(cursor: _Cursor, count: int, alignment: int) -> dict[str, GgufTensor]:
    entries = [_entry(cursor, index) for index in range(count)]
    data_begin = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise ModelFileError(cursor.path, f"tensor {name!r} is there twice")
        if offset % alignment:
            raise ModelFileError(
                cursor.path, f"offset of tensor {name!r} must be a multiple of {alignment}; got {offset}"
            )
        num_bytes, begin = math.prod(shape) // kind.block_values * kind.block_bytes, data_begin + offset
        if begin + num_bytes > len(cursor.data):
            raise ModelFileError(
                cursor.path,
                f"is truncated: tensor {name!r} ends at byte {begin + num_bytes} of {len(cursor.data)}",
            )
        tensors[name] = GgufTensor(name, shape, kind, cursor.path, begin, num_bytes)
    _check_no_overlap(cursor.path, tensors)
    return tensors


def _entry(cursor: _Cursor, index: int) -> tuple[str, tuple[int, ...], GgmlType, int]:
    name = cursor.text(f"the name of tensor {index}", _MAX_NAME_BYTES)
    what = f"the entry of tensor {name!r}"
    num_dimensions = cursor.u32(what)
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise ModelFileError(
            cursor.path, f"tensor {name!r} must have 1 to {_MAX_DIMENSIONS} dimensions; got {num_dimensions}"
        )
    dimensions = [cursor.u64(what) for _ in range(num_dimensions)]
    number, offset = cursor.u32(what), cursor.u64(what)
    if number not in TYPES:
        known = (
            f"{REFUSED[number]}, which is not supported"
            if number in REFUSED
            else f"{number}, which is not known"
        )
        names = ", ".join(kind.name for kind in TYPES.values())
        raise UnsupportedModel(f"{cursor.path}: tensor {name!r} is of type {known}; supported are {names}")
    kind = TYPES[number]
    if min(dimensions) < 1 or dimensions[0] % kind.block_values:
        rule = f"at least 1, and the first a multiple of {kind.block_values}"
        raise ModelFileError(
            cursor.path, f"dimensions of tensor {name!r} must be {rule} ({kind.name}); got {dimensions}"
        )
    return name, tuple(reversed(dimensions)), kind, offset


def _check_no_overlap(path: Path, tensors: Mapping[str, GgufTensor]) -> None:
    # a small file whose tensors all lie in the same place would otherwise become a large model
    in_order = sorted(tensors.values(), key=lambda tensor: tensor.begin)
    for one, other in itertools.pairwise(in_order):
        if one.begin + one.num_bytes > other.begin:
            raise ModelFileError(path, f"tensors {one.name!r} and {other.name!r} overlap")
