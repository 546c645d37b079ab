"""Linear layers of transformers' models on the C++ kernels: packed weights, and BF16x3 splitting where there is AMX.

Source: gemm/linear.h and gemm/bf16x3.h say how they multiply.
"""

from __future__ import annotations

import ctypes
from typing import Final

import torch
from torch import Tensor, nn

from triolet.kernels.cpu.abi import no_memory
from triolet.kernels.cpu.attention.paged_attention import DTYPES
from triolet.kernels.cpu.gemm.packing import MODEL_DTYPES, pack_bf16x3
from triolet.kernels.cpu.library import library
from triolet.model.memory.out_of_memory import trim_heap

_MIN_OUT: Final = 64  # a panel of the widest kernels: smaller layers are heads, which cost nothing


class CppLinearLayer(nn.Module):
    """Linear layer on the C++ kernels.

    Args:
        plain: the layer; its weights are copied.
        cpp: the kernels.
    """

    def __init__(self, plain: nn.Linear, cpp: ctypes.CDLL) -> None:
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self._packed = pack_bf16x3(cpp, plain.weight.detach().contiguous(), getattr(plain, "bias", None))
        self._struct = self._packed.struct()
        self._dtype, self._cpp = plain.weight.dtype, cpp

    def forward(self, x: Tensor) -> Tensor:
        # [..., in] -> [..., out]
        if x.dtype != self._dtype:  # the kernels read memory as the dtype of the weights
            raise TypeError(f"x must be {self._dtype}; got {x.dtype}")
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self.out_features)
        if self._cpp.triolet_linear(
            ctypes.byref(self._struct),
            ctypes.c_int32(DTYPES[self._dtype]),
            ctypes.c_void_p(x.data_ptr()),
            ctypes.c_int32(x.numel() // self.in_features),
            ctypes.c_int32(torch.get_num_threads()),
            ctypes.c_void_p(out.data_ptr()),
        ):
            raise no_memory()
        return out


def use_cpp_linear_layers(model: nn.Module) -> None:
    """Replace the large linear layers of a model on a CPU that has the kernels; other models stay as they are."""
    if (cpp := library()) is None:
        return
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear and _can_pack(child):  # a subclass may compute something else
                # one at a time: the plain weights go before the next are copied
                setattr(module, name, CppLinearLayer(child, cpp))
    trim_heap()


def _can_pack(layer: nn.Linear) -> bool:
    weight = layer.weight
    return (
        weight.device.type == "cpu"
        and weight.dtype in MODEL_DTYPES
        and layer.in_features % 2 == 0  # bfloat16 is multiplied in pairs
        and layer.out_features >= _MIN_OUT
    )
