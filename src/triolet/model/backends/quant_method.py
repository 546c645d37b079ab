"""Weights of linear layers between the checkpoint and a backend, and the ways to store them."""

from __future__ import annotations

import ctypes
from typing import Protocol

import attrs
from torch import Tensor

from triolet.kernels.cpu.gemm.blocks import MappedRows, fits_panels, pack_blocks
from triolet.kernels.cpu.gemm.packing import (
    GROUP,
    CppLinear,
    pack_bf16x3,
    pack_int4,
    pack_int8,
    pack_linear,
)
from triolet.kernels.linear.weight_only import PackedWeight
from triolet.model.architectures.weight_map import WeightReader

INTEGER_DEVICES = ("cuda",)
"""Devices whose kernels multiply with the integers of GPTQ, AWQ and compressed-tensors as they are stored."""


@attrs.frozen(eq=False)
class LinearWeights:
    """Weights of one linear layer, y = x @ weight.T + bias, as they were read."""

    weight: Tensor  # [num_out, num_in], contiguous, in the model's dtype
    bias: Tensor | None = None  # [num_out], or None


class Pack(Protocol):
    """Function that copies the weights of a layer into the order in which the C++ kernels read them."""

    def __call__(
        self, library: ctypes.CDLL, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False
    ) -> CppLinear: ...


@attrs.frozen(kw_only=True)
class QuantMethod:
    """Storage format of a model's linear layers: which tensors a layer has, and how they are packed."""

    inputs_multiple: int  # `num_in` of every layer must be a multiple of it
    pack: Pack  # packs a layer of the decoder
    pack_head: Pack  # packs the head
    keeps_blocks: bool = (
        False  # layers of a quantised checkpoint stay in its blocks where the kernels know them
    )
    int8_activations: bool = False  # activations are rounded to int8 before they are multiplied with blocks

    def read(self, weights: WeightReader, name: str) -> LinearWeights:
        """Read the tensors of the layer `name`, such as `layers.0.qkv`."""
        return LinearWeights(weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def pack_kept(
        self, library: ctypes.CDLL, weights: WeightReader, name: str, *, gated: bool = False
    ) -> CppLinear | None:
        """Pack the blocks of the layer `name` as they are; None if it has none, or the kernels do not know them."""
        # Formats are asked for first: blocks that do not fit would be read twice.
        if not self.keeps_blocks or (formats := weights.block_formats(f"{name}.weight")) is None:
            return None
        if not fits_panels(library, formats, weights.num_in(f"{name}.weight"), gated=gated):
            return None
        blocks = weights.read_blocks(f"{name}.weight")
        bias = weights.get(f"{name}.bias")
        rounds = self.int8_activations
        return pack_blocks(library, blocks, bias, gated=gated, int8_activations=rounds, dtype=weights.dtype)

    def read_packed(self, weights: WeightReader, name: str) -> list[PackedWeight] | None:
        """Read the layer `name` as it is stored, for the kernels of a GPU; None if it has to be dequantised."""
        if not self.keeps_blocks or weights.device.type not in INTEGER_DEVICES:
            return None
        return weights.read_packed(f"{name}.weight")

    def map_kept(self, weights: WeightReader, name: str) -> MappedRows | None:
        """Map the blocks of the embedding `name`; None if it has none that can be used where they lie."""
        return weights.map_blocks(f"{name}.weight") if self.keeps_blocks else None

    def accepts(self, *widths: int) -> bool:
        """Tell whether layers with these numbers of inputs can be packed."""
        return not any(width % self.inputs_multiple for width in widths)


UNQUANTIZED = QuantMethod(
    inputs_multiple=2,  # bfloat16 is multiplied in pairs
    pack=pack_bf16x3,
    pack_head=pack_linear,
    keeps_blocks=True,
)

QUANT_METHODS: dict[str | None, QuantMethod] = {
    None: UNQUANTIZED,
    "int8-activations": attrs.evolve(UNQUANTIZED, int8_activations=True),
    "int8": QuantMethod(inputs_multiple=4, pack=pack_int8, pack_head=pack_int8),
    # The head stays int8 in int4: it decides between tokens that are nearly as likely, and a tied one is the embedding.
    "int4": QuantMethod(inputs_multiple=GROUP, pack=pack_int4, pack_head=pack_int8),
}
"""By the values of `EngineConfig.quantization`."""
