"""Linear layers; on the CPU with weights packed once for oneDNN, about twice as fast as torch's own."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor
from torch.nn import functional


@attrs.frozen(eq=False, slots=True)
class Linear:
    """x @ weight.T + bias."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return functional.linear(x, self.weight, self.bias)


@attrs.frozen(eq=False, slots=True)
class PackedLinear:
    """The same with weights in oneDNN's blocked layout; float32 and bfloat16 on the CPU."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, in] to [num_tokens, out]."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear | PackedLinear:
    """The fastest layer for these weights.

    Args:
        weight: [out, in], contiguous.
        bias: [out], or None.
    """
    if not _can_pack(weight):
        return Linear(weight, bias)
    return PackedLinear(torch.ops.mkldnn._reorder_linear_weight(weight, None), bias)


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return supported
    return weight.dtype == torch.float32
