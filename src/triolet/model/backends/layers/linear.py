"""Linear layers of the native decoder, by the way in which their weights are stored."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from triolet.kernels.linear.weight_only import PackedWeight, weight_only_linear
from triolet.model.architectures.weight_map import WeightReader
from triolet.model.backends.quant_method import UNQUANTIZED, LinearWeights


@attrs.frozen(eq=False, slots=True)
class Linear:
    """x @ weight.T + bias."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        # [..., in] -> [..., out]
        return functional.linear(x, self.weight, self.bias)

    def stored(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight [num_out, num_in] and the bias."""
        return self.weight, self.bias


@attrs.frozen(eq=False, slots=True)
class PackedLinear:
    """The same with weights in oneDNN's blocked layout; float32 and bfloat16 on the CPU.

    About twice as fast there as `Linear`.
    """

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        # [num_tokens, in] -> [num_tokens, out]
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y

    def stored(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight [num_out, num_in], unpacked, and the bias."""
        return self.weight.to_dense(), self.bias


@attrs.frozen(eq=False, slots=True)
class WeightOnlyLinear:
    """The same with packed integers, joined along the outputs."""

    parts: tuple[PackedWeight, ...]
    bias: Tensor | None
    dtype: torch.dtype

    def __call__(self, x: Tensor) -> Tensor:
        # [num_tokens, in] -> [num_tokens, out]
        sizes = [part.num_out for part in self.parts]
        y = x.new_empty(len(x), sum(sizes))
        biases = (None,) * len(sizes) if self.bias is None else self.bias.split(sizes)
        for part, bias, out in zip(self.parts, biases, y.split(sizes, dim=1), strict=True):
            weight_only_linear(x, part, bias, out)
        return y

    def stored(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight [num_out, num_in], dequantised, and the bias."""
        return torch.cat([part.dequantize() for part in self.parts]).to(self.dtype), self.bias


# [num_tokens, in] to [num_tokens, out]: a `Linear`, a `PackedLinear`, a `WeightOnlyLinear`, or one with adapters.
LinearLayer = Callable[[Tensor], Tensor]


def make_linear(weights: LinearWeights) -> Linear | PackedLinear:
    """Choose the fastest layer for these weights."""
    if not _can_pack(weights.weight):
        return Linear(weights.weight, weights.bias)
    return PackedLinear(torch.ops.mkldnn._reorder_linear_weight(weights.weight, None), weights.bias)


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return supported
    return weight.dtype == torch.float32


def read_linear(name: str, weights: WeightReader) -> Linear | PackedLinear | WeightOnlyLinear:
    """Read the layer `name`, such as `layers.0.qkv`."""
    if (parts := UNQUANTIZED.read_packed(weights, name)) is not None:
        return WeightOnlyLinear(tuple(parts), weights.get(f"{name}.bias"), weights.dtype)
    return make_linear(UNQUANTIZED.read(weights, name))
