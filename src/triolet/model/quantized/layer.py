"""What the formats of quantised layers have in common: a layer, its tensors, and checks whose errors name them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import ClassVar, Protocol

import attrs
import torch
from torch import Tensor

from triolet.errors import UnsupportedModel
from triolet.kernels.cpu.gemm.blocks import BlockFormat, BlockRows
from triolet.kernels.linear.weight_only import PackedWeight
from triolet.model.folder.checkpoint import Checkpoint, StoredTensor

Parts = Mapping[str, Tensor]
"""Tensors of one layer, by their names after the module's, such as `qweight`."""

FLOATS = ("F64", "F32", "F16", "BF16")


@attrs.frozen(eq=False, kw_only=True)
class QuantizedLayer:
    """One linear layer of a quantised checkpoint."""

    shape: tuple[int, int]  # [out, in] of its weight
    parts: Mapping[str, str]  # names of its tensors, by the name after the module's
    dequantize: Callable[[Parts], Tensor]  # returns the weight, float32
    blocks: BlockLayout | None = None  # how the CPU kernels can keep it
    packed: Callable[[Parts], PackedWeight] | None = None  # as the GPU kernels can keep it


@attrs.frozen(eq=False)
class BlockLayout:
    """Blocks of the CPU kernels that a layer's integers and scales fit as they are."""

    format: BlockFormat
    rows: Callable[[Parts], BlockRows]


@attrs.frozen(eq=False)
class Module:
    """Tensors of one module, with checks whose errors name them."""

    name: str
    checkpoint: Checkpoint

    def full(self, part: str) -> str:
        """Return the name of a tensor of this module."""
        return f"{self.name}.{part}"

    def find(self, part: str) -> StoredTensor | None:
        """Return a tensor of this module, not read yet, or None."""
        return self.checkpoint.tensors.get(self.full(part))

    def need(self, part: str, dtypes: tuple[str, ...], *sizes: int | None) -> tuple[int, ...]:
        """Check that a tensor is there, and return its shape.

        Args:
            part: name after the module's.
            dtypes: those allowed, in safetensors' words.
            *sizes: its shape, None for a size that is free.
        Raises:
            UnsupportedModel: it is missing, or of another dtype or shape.
        """
        stored = self.find(part)
        if stored is None:
            raise UnsupportedModel(
                f"tensor {self.full(part)!r} is missing: {self.name!r} is quantised without it"
            )
        if stored.dtype not in dtypes:
            raise self.wrong(part, f"of dtype {' or '.join(dtypes)}", stored.dtype)
        fits = len(stored.shape) == len(sizes) and all(
            size in (None, got) for size, got in zip(sizes, stored.shape, strict=False)
        )
        if not fits:
            wanted = "[" + ", ".join("any" if size is None else str(size) for size in sizes) + "]"
            raise self.wrong(part, f"of shape {wanted}", list(stored.shape))
        return stored.shape

    def wrong(self, part: str, rule: str, got: object) -> UnsupportedModel:
        """Return the error of a tensor that breaks a rule."""
        return UnsupportedModel(f"tensor {self.full(part)!r} must be {rule}; got {got}")

    def layer(
        self,
        shape: tuple[int, int],
        parts: tuple[str, ...],
        formula: Callable[[Parts], Tensor],
        blocks: BlockLayout | None = None,
        packed: Callable[[Parts], PackedWeight] | None = None,
    ) -> QuantizedLayer:
        """Return a layer of these tensors."""
        return QuantizedLayer(
            shape=shape,
            parts={part: self.full(part) for part in parts},
            dequantize=formula,
            blocks=blocks,
            packed=packed,
        )

    def has_ordered_groups(self, part: str, size: int, unset: int | None = None) -> bool:
        """Tell whether an index, if there is one, gives each `size` consecutive inputs a group.

        Args:
            part: name of the index after the module's.
            size: of a group.
            unset: a number that says, wherever it stands, that the index was never filled in.
        """
        stored = self.find(part)
        if stored is None:
            return True
        index = self.checkpoint.read_raw(self.full(part))
        if unset is not None and bool((index == unset).any()):
            return True
        return torch.equal(index.long(), torch.arange(index.numel()) // size)

    def check_groups(self, part: str, num_groups: int, num_in: int, group_size: int | None = None) -> None:
        """Check that the inputs divide into so many groups.

        Raises:
            UnsupportedModel: they do not.
        """
        size = group_size or (num_in // num_groups if num_groups and num_in % num_groups == 0 else 0)
        if not size or num_groups != math.ceil(num_in / size):
            rule = "of equal ones" if group_size is None else f"of {group_size}"
            raise self.wrong(
                part, f"of one row or column for each group {rule} of the {num_in} inputs", num_groups
            )


class QuantizedFormat(Protocol):
    """One format, with what `quantization_config` says of it."""

    marks: ClassVar[tuple[str, ...]]  # a module with such a tensor is quantised
    unused: ClassVar[tuple[str, ...]]  # tensors of a quantised module that its weight does not depend on

    def layer(self, module: Module) -> QuantizedLayer | None:
        """Return the layer, or None if this module is not quantised after all.

        Raises:
            UnsupportedModel: a tensor is missing or does not fit the others.
        """
        ...
