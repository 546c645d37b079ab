"""What decoder.cpp and run.cpp are given: a Llama-like decoder, one whole step of it, and several."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from triolet.kernels.cpu.gemm.packing import LinearStruct, ScreenStruct

_P, _I, _F = ctypes.c_void_p, ctypes.c_int32, ctypes.c_float


class LayerStruct(ctypes.Structure):
    """`Layer` in decoder.cpp."""

    _fields_ = (
        *((name, LinearStruct) for name in ("qkv", "attention_out", "gate_up", "down")),
        *((name, _P) for name in ("attention_norm", "query_norm", "key_norm", "mlp_norm", "cos_sin")),
        *((name, _I) for name in ("rotary_dim", "sliding_window")),
        ("scale", _F),
    )


class ModelStruct(ctypes.Structure):
    """`Model` in decoder.cpp."""

    _fields_ = (
        *((name, _P) for name in ("layers", "embedding", "final_norm")),
        ("head", LinearStruct),
        ("screen", ScreenStruct),
        *((name, _I) for name in ("num_layers", "hidden", "intermediate", "num_heads", "num_kv_heads")),
        *((name, _I) for name in ("head_dim", "dtype", "gelu")),
        *((name, _F) for name in ("eps", "attention_soft_cap")),
    )


class StepStruct(ctypes.Structure):
    """`Step` in decoder.cpp."""

    _fields_ = (
        *((name, _P) for name in ("token_ids", "positions", "slots", "logits_indices")),
        *((name, _P) for name in ("cu_query_lens", "seq_lens", "block_tables")),
        *((name, _P) for name in ("keys", "values", "logits", "peaks", "best")),
        ("block_tables_stride", ctypes.c_int64),
        *((name, _I) for name in ("num_tokens", "num_seqs", "num_logits", "block_size", "num_threads")),
    )
    kept: tuple[object, ...] = ()
    """What the addresses point at; alive as long as the struct is."""


class RunStruct(ctypes.Structure):
    """`Run` in decoder.cpp."""

    _fields_ = (("elapsed_s", _P), *((name, _I) for name in ("num_steps", "is_halted", "num_done")))


def addresses(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    """Their addresses, as C++ takes them."""
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
