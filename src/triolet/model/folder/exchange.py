"""New weights for a running model: the check that they fit it, and folders in which only some of them are new.

An update of some tensors becomes a model folder of its own: one file with the updated tensors, links to the files with
the others, and an index. The runner reads it like any other, also after a crash.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from triolet.errors import (
    InvalidRequest,
    ModelFileError,
    ModelNotFound,
    UnsupportedModel,
    WeightsMismatch,
    shown,
)
from triolet.model.architectures.language_part import language_name
from triolet.model.folder.checkpoint import Checkpoint
from triolet.model.folder.json_fields import read_json_object

CONFIG: Final = "config.json"
SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
KEPT: Final = "model-kept.safetensors"
"""Name of a link to a single file beside an index, which would not count otherwise."""
UPDATED: Final = "model-updated.safetensors"
HEAD: Final = "lm_head.weight"
EMBEDDINGS: Final = ("embed_tokens.weight", "embeddings.weight", "wte.weight", "embed_in.weight")
FIXED: Final = ("architectures", "model_type", "vocab_size", "quantization_config")
"""Fields of config.json in which the weights must agree: the engine's tokenizer and its requests go by them."""


def check_exchange(current: Path, new: Path) -> None:
    """Check the weights of a folder against those in use: names, shapes, dtypes, and that no file is cut off.

    Args:
        current: folder of the weights in use.
        new: the other folder.
    Raises:
        ModelNotFound: the other folder does not exist.
        ModelFileError: a file in it is missing, truncated or no safetensors file.
        UnsupportedModel: it is a model of another architecture, or the engine reads a GGUF file.
        WeightsMismatch: tensors are missing, too many, or of another shape or dtype; names them.
    """
    if not new.is_dir():
        raise ModelNotFound(f"{new}: new weights must be a folder; there is none")
    if current.is_file():
        raise UnsupportedModel("the weights of a GGUF file cannot be exchanged")
    mine, theirs = (read_json_object(folder / CONFIG) for folder in (current, new))
    for field in FIXED:
        if mine.get(field) != theirs.get(field):
            raise UnsupportedModel(
                f"{new / CONFIG}: {field} must be {mine.get(field)!r}, as of the weights in use; "
                f"got {theirs.get(field)!r}"
            )
    check_tensors(Checkpoint.open(current), Checkpoint.open(new))


def check_tensors(current: Checkpoint, new: Checkpoint) -> None:
    """Check the tensors of a checkpoint against those in use.

    Raises:
        WeightsMismatch: they differ.
    """
    mine, theirs = current.tensors, new.tensors
    misshapen = [
        f"{name} must be {one.dtype} {one.shape}; got {theirs[name].dtype} {theirs[name].shape}"
        for name, one in mine.items()
        if name in theirs and (one.shape, one.dtype) != (theirs[name].shape, theirs[name].dtype)
    ]
    missing, unused = sorted(mine.keys() - theirs.keys()), sorted(theirs.keys() - mine.keys())
    if missing or unused or misshapen:
        raise WeightsMismatch(missing=missing, unused=unused, misshapen=misshapen)


def new_updates_folder(parent: Path | None = None) -> Path:
    """Make an empty folder for updated weights.

    Args:
        parent: folder that it is made in; None for that of temporary files.
    Raises:
        ModelFileError: it cannot be made.
    """
    try:
        return Path(tempfile.mkdtemp(prefix="triolet-weights-", dir=parent))
    except OSError as error:
        # It names no file where none of the folders for temporary files can be written.
        where = error.filename or "the folder of temporary files"
        raise ModelFileError(where, f"cannot be written: {error.strerror}") from error


def write_update(current: Path, new: Path, updates: Mapping[str, Tensor]) -> None:
    """Make a folder of the weights in use with other values of some tensors.

    Args:
        current: folder of the weights in use; its files stay in use through links.
        new: folder to be made.
        updates: new values by the names of the checkpoint; a head that is tied to the embedding may be there, too.
    Raises:
        UnsupportedModel: the engine reads a GGUF file.
        WeightsMismatch: a name is unknown, a tensor has another shape or dtype, or a tied head has values of its own.
        InvalidRequest: a value is no dense tensor.
        ModelFileError: a file of the folder in use cannot be read, or the new one cannot be written.
    """
    if current.is_file():
        raise UnsupportedModel("the weights of a GGUF file cannot be exchanged")
    checkpoint = Checkpoint.open(current)
    _check_updates(checkpoint, updates)
    # An earlier update is taken over, since its file will be gone.
    earlier = [name for name, stored in checkpoint.tensors.items() if stored.path.name == UPDATED]
    tensors = {name: checkpoint.read_raw(name) for name in earlier} | {
        name: tensor.detach().to("cpu", copy=True).contiguous()
        for name, tensor in updates.items()
        if name in checkpoint.tensors
    }
    try:
        new.mkdir(parents=True)
        for path in current.iterdir():
            if path.name not in (INDEX, UPDATED):
                _link(path, new / _kept_name(path.name))
        save_file(tensors, new / UPDATED)
        places = {
            name: _kept_name(stored.path.name)
            for name, stored in checkpoint.tensors.items()
            if name not in tensors
        }
        # The updated file comes last: the other files hold the old values of its tensors, and the last one counts.
        places |= dict.fromkeys(tensors, UPDATED)
        (new / INDEX).write_text(json.dumps({"weight_map": places}), encoding="utf-8")
    except (OSError, SafetensorError) as error:  # a full disk may be either
        reason = os.strerror(error.errno or 0) if isinstance(error, OSError) else str(error)
        raise ModelFileError(new, f"cannot be written: {reason}") from error


def _link(path: Path, new: Path, above: frozenset[Path] = frozenset()) -> None:
    """Link a file; make a folder anew and link the files in it, since modules.json may not lead out of the model."""
    place = path.resolve()
    if not path.is_dir():
        new.symlink_to(place)
    elif place not in above:  # a link to a folder above has no end
        new.mkdir()
        for each in path.iterdir():
            _link(each, new / each.name, above | {place})


def _kept_name(name: str) -> str:
    return KEPT if name == SINGLE else name


def _check_updates(checkpoint: Checkpoint, updates: Mapping[Any, Any]) -> None:
    for name, tensor in updates.items():
        is_tensor = isinstance(tensor, Tensor) and tensor.layout is torch.strided and not tensor.is_meta
        if not isinstance(name, str) or not is_tensor:
            what = str(tensor.layout) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InvalidRequest(
                f"tensors must have names and dense torch tensors with values; got {shown(name)}: {what}",
                field="tensors",
                got=name,
            )
    unused: list[str] = []
    misshapen: list[str] = []
    for name, tensor in updates.items():
        if (stored := checkpoint.tensors.get(name)) is None:
            if (tied := _tied_name(name, checkpoint.tensors)) is None:
                unused.append(name)
            elif not _are_equal(tensor, updates[tied] if tied in updates else checkpoint.read(tied)):
                misshapen.append(f"{name} is tied to {tied} and must be equal to it; got another tensor")
            continue
        dtype: torch.dtype = checkpoint.dtype_of(name)
        if tuple(tensor.shape) != stored.shape or tensor.dtype != dtype:
            misshapen.append(
                f"{name} must be {dtype} {stored.shape}; got {tensor.dtype} {tuple(tensor.shape)}"
            )
    if unused or misshapen:
        raise WeightsMismatch(unused=unused, misshapen=misshapen)


def _tied_name(name: str, stored: Iterable[str]) -> str | None:
    """Return the stored tensor that counts as head and embedding, for the name of the one that is not stored."""
    heads = [one for one in stored if language_name(one) == HEAD]
    # The shortest: layers that draft tokens may have an embedding of their own.
    embeddings = sorted(filter(_is_embedding, stored), key=len)
    if language_name(name) == HEAD and not heads:
        return next(iter(embeddings), None)
    return heads[0] if _is_embedding(name) and heads and not embeddings else None


def _is_embedding(name: str) -> bool:
    return language_name(name) is not None and name.endswith(EMBEDDINGS)


def _are_equal(one: Tensor, other: Tensor) -> bool:
    one, other = one.detach().cpu(), other.detach().cpu()
    return one.dtype == other.dtype and torch.equal(one, other)
