"""Checkpoint of a quantised model folder, as one of plain weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from triolet.errors import ConfigError, UnsupportedModel
from triolet.kernels.cpu.gemm.blocks import BlockFormat, BlockRows
from triolet.kernels.linear.weight_only import PackedWeight
from triolet.model.folder.checkpoint import Checkpoint, StoredTensor
from triolet.model.folder.json_fields import Fields
from triolet.model.quantized.layer import Module, QuantizedFormat, QuantizedLayer
from triolet.model.quantized.methods import ALIASES, FORMATS

SECTION = "quantization_config"


@attrs.frozen
class DequantizedTensor:
    """Weight of a quantised layer, not read yet."""

    shape: tuple[int, ...]
    num_bytes: int  # of all its parts, on disk


@attrs.frozen(eq=False)
class QuantizedCheckpoint:
    """Tensors of a quantised model folder, by the names that they have without quantisation.

    `read` dequantises a quantised weight, in float32; everything else is read as it is stored.
    """

    tensors: Mapping[str, StoredTensor | DequantizedTensor]
    _stored: Checkpoint
    _layers: Mapping[str, QuantizedLayer]
    kept: set[str] = attrs.field(factory=set, init=False)  # weights that were read as they are stored

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype in which `read` gives a tensor."""
        return torch.float32 if name in self._layers else self._stored.dtype_of(name)

    def read(self, name: str, out: Tensor | None = None) -> Tensor:
        """One tensor, on the CPU; errors are those of `Checkpoint.read`."""
        if (layer := self._layers.get(name)) is None:
            return self._stored.read(name, out)
        parts = {part: self._stored.read_raw(full) for part, full in layer.parts.items()}
        weight = layer.dequantize(parts)
        # Into its place among joined weights, where there is one.
        return weight if out is None else out.copy_(weight)

    def block_format(self, name: str) -> BlockFormat | None:
        layer = self._layers.get(name)
        return None if layer is None or layer.blocks is None else layer.blocks.format

    def read_blocks(self, name: str) -> BlockRows:
        """Read the integers and scales of one layer; errors are those of `read`."""
        layer = self._layers[name]
        assert layer.blocks is not None
        self.kept.add(name)
        return layer.blocks.rows({part: self._stored.read_raw(full) for part, full in layer.parts.items()})

    @property
    def has_blocks(self) -> bool:
        """True if the CPU kernels can keep a layer's integers and scales as they are."""
        return any(layer.blocks is not None for layer in self._layers.values())

    def is_packed(self, name: str) -> bool:
        """Tell whether the GPU kernels can multiply with a tensor as it is stored."""
        layer = self._layers.get(name)
        return layer is not None and layer.packed is not None

    def read_packed(self, name: str) -> PackedWeight:
        """Read a tensor that `is_packed` as it is stored; errors are those of `read`."""
        layer = self._layers[name]
        assert layer.packed is not None
        self.kept.add(name)
        weight = layer.packed({part: self._stored.read_raw(full) for part, full in layer.parts.items()})
        weight.check()
        return weight

    def map_blocks(self, name: str) -> None:
        """Return None: these files do not have an output's weights in one place."""

    def is_zero_bias(self, name: str) -> bool:
        """Tell whether a tensor is the bias of a quantised module, and zeros: some tools store one for every module."""
        module, _, part = name.rpartition(".")
        return part == "bias" and f"{module}.weight" in self._layers and not self._stored.read(name).any()

    @property
    def num_quantized(self) -> int:
        """Number of quantised weights."""
        return len(self._layers)


def open_quantized(checkpoint: Checkpoint, config: Mapping[str, Any], folder: Path) -> QuantizedCheckpoint:
    """Find the quantised layers of a checkpoint and check their tensors.

    Args:
        checkpoint: of the model folder.
        config: its config.json, with a `quantization_config`.
        folder: where it lies, for error messages.
    Raises:
        UnsupportedModel: the format is not known, or a layer's tensors do not fit each other.
        ModelFileError: a field of `quantization_config` is wrong.
    """
    fmt = format_of(config, folder)
    layers: dict[str, QuantizedLayer] = {}
    hidden: set[str] = set()
    for name in modules_of(checkpoint, fmt):
        module = Module(name, checkpoint)
        layer = fmt.layer(module)
        if layer is not None:
            layers[f"{name}.weight"] = layer
            hidden.update(layer.parts.values())
    # Tensors that no weight depends on would count as unused weights.
    marks = tuple(f".{part}" for part in (*fmt.unused, *fmt.marks))
    tensors: dict[str, StoredTensor | DequantizedTensor] = {
        name: stored
        for name, stored in checkpoint.tensors.items()
        if name not in hidden and not name.endswith(marks)
    }
    for name, layer in layers.items():
        num_bytes = sum(checkpoint.tensors[full].num_bytes for full in layer.parts.values())
        tensors[name] = DequantizedTensor(layer.shape, num_bytes)
    return QuantizedCheckpoint(tensors, checkpoint, layers)


def format_of(config: Mapping[str, Any], folder: Path) -> QuantizedFormat:
    """Return the format that `quantization_config` names.

    Raises:
        UnsupportedModel: it is not one of `FORMATS`.
        ModelFileError: a field is wrong.
    """
    fields = Fields(folder / "config.json", dict(config)).section(SECTION)
    assert fields is not None
    method = _method_of(fields)
    if method not in FORMATS:
        raise UnsupportedModel(
            f"{fields.path}: {SECTION}.quant_method must be one of {', '.join(FORMATS)}; got {method!r}"
        )
    return FORMATS[method](fields)


def check_method(method: str, config: Mapping[str, Any], folder: Path) -> None:
    """Check that a model is stored in the way that `EngineConfig.quantization` names.

    Args:
        method: one of `STORED_METHODS`.
        config: contents of config.json; empty for a GGUF file.
        folder: of the model, or its GGUF file.
    Raises:
        ConfigError: it is stored in another way; says in which.
        ModelFileError: `quantization_config` is wrong.
    """
    if folder.is_file():
        found = "gguf"
    else:
        fields = Fields(folder / "config.json", dict(config)).section(SECTION)
        found = _method_of(fields) if fields is not None and fields.values else ""
    if found != method:
        what = f"in {found}" if found else "not quantized"
        rule = f"{found or 'none'} or left out for {folder.name}, which is {what}"
        raise ConfigError("quantization", rule, method)


def _method_of(fields: Fields) -> str:
    """Return the method that a `quantization_config` names; empty if it names none."""
    method = fields.text("quant_method", "")
    if not method and (fields.values.get("load_in_4bit") or fields.values.get("load_in_8bit")):
        return "bitsandbytes"  # early versions do not name themselves
    return ALIASES.get(method, method)


def modules_of(checkpoint: Checkpoint, fmt: QuantizedFormat) -> list[str]:
    """Return the names of the modules that have a tensor which marks them as quantised."""
    found = {
        name.removesuffix(f".{mark}")
        for mark in fmt.marks
        for name in checkpoint.tensors
        if name.endswith(f".{mark}")
    }
    return sorted(found)
