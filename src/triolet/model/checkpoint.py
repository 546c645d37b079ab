"""The safetensors files of a model folder: which tensors there are, and reading them one at a time."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
from safetensors import SafetensorError, safe_open
from torch import Tensor

from triolet.errors import ModelFileError, UnsupportedModel
from triolet.model.config_fields import Fields, read_json_object

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@attrs.frozen
class StoredTensor:
    """One tensor of a checkpoint, not read yet.

    Args:
        shape: as stored.
        dtype: in safetensors' words, such as `BF16`.
        num_bytes: what it takes on disk.
    """

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


@attrs.frozen(eq=False)
class Checkpoint:
    """The tensors of a model folder, by name.

    Every file's header is read and checked when the checkpoint is opened; the tensors' bytes are not.
    """

    tensors: dict[str, StoredTensor]
    _files: dict[str, Any]  # safetensors' open file of each tensor

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Open all safetensors files of a model folder.

        Raises:
            ModelFileError: a file is missing, truncated or not what its name says.
        """
        tensors: dict[str, StoredTensor] = {}
        files: dict[str, Any] = {}
        for path, expected in _files_of(folder).items():
            opened = _open_file(path)
            names = set(opened.keys())
            if lacking := sorted(expected - names):
                raise ModelFileError(path, f"lacks tensors that {_INDEX} places there: {', '.join(lacking)}")
            for name in names:
                tensors[name] = _stored(opened, name)
                files[name] = opened
        return cls(tensors, files)

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU, as stored; it may share the file's memory.

        Raises:
            UnsupportedModel: its dtype is not one of float64, float32, float16 and bfloat16.
        """
        stored = self.tensors[name]
        if stored.dtype not in _ITEM_BYTES:
            raise UnsupportedModel(
                f"tensor {name!r} must be of dtype {', '.join(_ITEM_BYTES)}; got {stored.dtype}: "
                "quantised weights are not supported"
            )
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


def _files_of(folder: Path) -> dict[Path, set[str]]:
    """Each weight file with the tensors that the index, if there is one, says it must hold."""
    index = folder / _INDEX
    if not index.exists():
        if not (folder / _SINGLE).exists():
            raise ModelFileError(folder / _SINGLE, f"is missing, and so is {_INDEX}{_what_else(folder)}")
        return {folder / _SINGLE: set()}
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


def _open_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ModelFileError(path, f"is truncated or not a safetensors file: {error}") from error
    except OSError as error:
        raise ModelFileError(path, f"can not be read: {error.strerror or error}") from error


def _stored(file: Any, name: str) -> StoredTensor:
    entry = file.get_slice(name)
    shape, dtype = tuple(entry.get_shape()), entry.get_dtype()
    num_bytes = _ITEM_BYTES.get(dtype, 1)
    for size in shape:
        num_bytes *= size
    return StoredTensor(shape, dtype, num_bytes)
