"""Safetensors files of a model folder: their tensors, read one at a time."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn

import attrs
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from triolet.errors import InvariantViolated, ModelFileError, UnsupportedModel
from triolet.model.folder.json_fields import Fields, read_json_object

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_RAW_DTYPES = _DTYPES | {
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}
PART_BYTES = 32 * 2**20
"""Bytes of a tensor that one thread reads at a time."""
NUM_READERS = 4
_LENGTH_BYTES = 8  # of the number that a file begins with: the length of its header


@attrs.frozen
class StoredTensor:
    """One tensor of a checkpoint, not read yet."""

    shape: tuple[int, ...]  # as stored
    dtype: str  # in safetensors' words, such as `BF16`
    num_bytes: int  # what it takes on disk
    path: Path  # of its file
    begin: int  # where it begins there, bytes


@attrs.frozen
class Cut:
    """Rows or columns of one stored tensor."""

    dim: int  # 0: rows, 1: columns
    begin: int
    end: int


@attrs.frozen(eq=False)
class Checkpoint:
    """The tensors of a model folder, by name.

    Every file's header is read and checked when the checkpoint is opened; the tensors' bytes are not.
    """

    tensors: dict[str, StoredTensor]

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Open all safetensors files of a model folder.

        Raises:
            ModelFileError: a file is missing, truncated or not what its name says.
        """
        tensors: dict[str, StoredTensor] = {}
        for path, expected in _files_of(folder).items():
            stored = _stored_in(path)
            if lacking := sorted(expected - stored.keys()):
                raise ModelFileError(path, f"lacks tensors that {_INDEX} places there: {', '.join(lacking)}")
            tensors |= stored
        return cls(tensors)

    def renamed(self, rename: Callable[[str], str | None]) -> Checkpoint:
        """Return the checkpoint under other names, without the tensors that get none."""
        named = {rename(name): tensor for name, tensor in self.tensors.items()}
        return Checkpoint({name: tensor for name, tensor in named.items() if name is not None})

    def unstacked(self, stacks: Sequence[tuple[str, tuple[str, ...]]]) -> Checkpoint:
        """Return the checkpoint with tensors of one expert each in place of those of all experts, [experts, rows, ...].

        Args:
            stacks: endings of such tensors' names, each with those of its parts, which have the same number of rows;
                `{expert}` is filled in.
        """
        tensors: dict[str, StoredTensor] = {}
        for name, stack in self.tensors.items():
            found = next((pair for pair in stacks if name.endswith(f".{pair[0]}")), None)
            if found is None or len(stack.shape) < 2 or 0 in stack.shape or stack.shape[1] % len(found[1]):
                tensors[name] = stack
                continue
            ending, parts = found
            num_parts, (_, rows, *rest) = len(parts), stack.shape
            size = stack.num_bytes // (stack.shape[0] * num_parts)
            for index in range(stack.shape[0] * num_parts):
                part = parts[index % num_parts].format(expert=index // num_parts)
                tensors[name.removesuffix(ending) + part] = attrs.evolve(
                    stack,
                    shape=(rows // num_parts, *rest),
                    num_bytes=size,
                    begin=stack.begin + index * size,
                )
        return Checkpoint(tensors)

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype that a tensor is stored in.

        Raises:
            UnsupportedModel: not float64, float32, float16 or bfloat16.
        """
        stored = self.tensors[name]
        if stored.dtype not in _DTYPES:
            raise UnsupportedModel(
                f"tensor {name!r} must be of dtype {', '.join(_DTYPES)}; got {stored.dtype}: "
                "it is no plain weight"
            )
        return _DTYPES[stored.dtype]

    def read_raw(self, name: str) -> Tensor:
        """One tensor of a quantised layer, on the CPU, as stored: also integers and float8.

        Raises:
            UnsupportedModel: of a dtype that no format uses.
            ModelFileError: see `read`.
        """
        stored = self.tensors[name]
        if stored.dtype not in _RAW_DTYPES:
            raise UnsupportedModel(
                f"tensor {name!r} must be of dtype {', '.join(_RAW_DTYPES)}; got {stored.dtype}"
            )
        return self.read(name, torch.empty(stored.shape, dtype=_RAW_DTYPES[stored.dtype]))

    def read(self, name: str, out: Tensor | None = None) -> Tensor:
        """One tensor, on the CPU, as stored.

        Args:
            name: of the tensor.
            out: where to put it, contiguous, of its shape and dtype; by default memory of its own.

        Raises:
            UnsupportedModel: see `dtype_of`.
            ModelFileError: the file has gone, or become shorter, since the checkpoint was opened.
        """
        stored = self.tensors[name]
        tensor = torch.empty(stored.shape, dtype=self.dtype_of(name)) if out is None else out
        into = memoryview((ctypes.c_char * stored.num_bytes).from_address(tensor.data_ptr()))

        def read_part(first: int) -> None:
            part = into[first : first + PART_BYTES]
            with stored.path.open("rb", buffering=0) as file:
                file.seek(stored.begin + first)
                _fill(part, file, stored.path, name)

        begins = range(0, stored.num_bytes, PART_BYTES)
        try:
            if len(begins) < 2:
                read_part(0)
            else:  # a disk, and the copy out of the page cache, are faster with several readers
                with ThreadPoolExecutor(min(NUM_READERS, len(begins))) as readers:
                    list(readers.map(read_part, begins))
        except OSError as error:
            raise _unreadable(stored.path, error) from error
        return tensor

    def read_part(self, name: str, out: Tensor, cut: Cut | None) -> int:
        """Read rows or columns of one tensor, and no other bytes of its file.

        Args:
            name: of the tensor.
            out: where to put them, contiguous, of the shape of the part.
            cut: the part; None for all of it.
        Returns:
            Bytes that were read.
        Raises:
            ModelFileError: see `read`.
        """
        stored = self.tensors[name]
        if cut is None:
            self.read(name, out)
            return stored.num_bytes
        length = stored.shape[cut.dim]
        num_rows = 1 if cut.dim == 0 else stored.shape[0]
        row_bytes = stored.num_bytes // num_rows
        begin, end = cut.begin * row_bytes // length, cut.end * row_bytes // length
        part_bytes = end - begin
        into = memoryview((ctypes.c_char * (num_rows * part_bytes)).from_address(out.data_ptr()))
        try:
            with stored.path.open("rb", buffering=0) as file:
                for row in range(num_rows):
                    file.seek(stored.begin + row * row_bytes + begin)
                    _fill(into[row * part_bytes : (row + 1) * part_bytes], file, stored.path, name)
        except OSError as error:
            raise _unreadable(stored.path, error) from error
        return num_rows * part_bytes

    def block_format(self, name: str) -> None:
        """Return None: a plain tensor has no blocks."""
        return

    def read_blocks(self, name: str) -> NoReturn:
        raise InvariantViolated(f"tensor {name!r} has no blocks")

    def map_blocks(self, name: str) -> None:
        """Return None: a plain tensor has no blocks."""


def _fill(left: memoryview, file: FileIO, path: Path, name: str) -> None:
    while left:
        if not (count := file.readinto(left)):
            raise ModelFileError(path, f"is truncated: it ends within tensor {name!r}")
        left = left[count:]


def _files_of(folder: Path) -> dict[Path, set[str]]:
    """Return each weight file with the tensors that the index says it must hold, if the index counts."""
    single, index = folder / _SINGLE, folder / _INDEX
    # In a folder with both the single file counts, as in transformers.
    if single.exists():
        return {single: set()}
    if not index.exists():
        # AutoGPTQ names the file after bits and groups.
        if len(others := list(folder.glob("*.safetensors"))) == 1:
            return {others[0]: set()}
        raise ModelFileError(single, f"is missing, and so is {_INDEX}{_what_else(folder)}")
    files: dict[Path, set[str]] = {}
    for tensor, file in _weight_map(index).items():
        files.setdefault(folder / file, set()).add(tensor)
    if missing := [path.name for path in files if not path.exists()]:
        raise ModelFileError(index, f"names files that are missing: {', '.join(sorted(missing))}")
    return files


def _weight_map(index: Path) -> dict[str, str]:
    section = Fields(index, read_json_object(index)).section("weight_map")
    if section is None or not section.values:
        raise ModelFileError(index, "weight_map must say which file each tensor is in; got none")
    for tensor in section.values:
        file = section.text(tensor, "")
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise section.wrong(tensor, "the name of a safetensors file in the same folder")
    return dict(section.values)


def _what_else(folder: Path) -> str:
    pickled: Iterable[Path] = [*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]
    names = ", ".join(sorted(path.name for path in pickled))
    return f"; {names} will not be read: pickled weights can run code" if names else ""


def _stored_in(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors that a file's header lists."""
    try:
        # safe_open checks the header against the file, so the entries below need no check
        with safe_open(path, framework="pt", device="cpu"), path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header: dict[str, Any] = json.loads(file.read(header_bytes))
    except SafetensorError as error:
        raise ModelFileError(path, f"is truncated or not a safetensors file: {error}") from error
    except OSError as error:
        raise _unreadable(path, error) from error
    header.pop("__metadata__", None)
    return {name: _stored(path, entry, _LENGTH_BYTES + header_bytes) for name, entry in header.items()}


def _unreadable(path: Path, error: OSError) -> ModelFileError:
    return ModelFileError(path, f"cannot be read: {error.strerror or error}")


def _stored(path: Path, entry: dict[str, Any], data_begin: int) -> StoredTensor:
    begin, end = entry["data_offsets"]
    return StoredTensor(tuple(entry["shape"]), entry["dtype"], end - begin, path, data_begin + begin)
