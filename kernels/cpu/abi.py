"""Structs that Python and the C++ kernels share: the ctypes mirror of each, and the check that both sides agree.

A struct is passed by address: a field that only one side has would shift every field after it, and the kernels would
read numbers as pointers. abi.cpp therefore describes each struct as the compiler lays it out, and `check_layouts`
compares that with the mirrors when a library is loaded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

from torch import Tensor

from triolet.errors import InvariantViolated

Field = tuple[str, int, int]
"""Name, offset and size in bytes."""

# Pointers, 32-bit integers and floats: nearly all fields of the structs.
_P, _I, _F = ctypes.c_void_p, ctypes.c_int32, ctypes.c_float


class BlockPanelStruct(ctypes.Structure):
    """`BlockPanel` in gemm/linear.h."""

    _fields_ = (("blocks", _P), ("format", _I), ("inputs", _I))


class LinearStruct(ctypes.Structure):
    """`Linear` in gemm/linear.h."""

    _fields_ = (
        *((name, _P) for name in ("weights", "bias", "scales", "zero_point_offsets", "panels")),
        *((name, _I) for name in ("num_out", "num_in", "bits", "gated")),
    )


class ArgmaxFilterStruct(ctypes.Structure):
    """`ArgmaxFilter` in sampling/argmax_candidates.h."""

    _fields_ = (("int8", LinearStruct), ("bounds", _P), ("max_rows", _I))


class ExpertsStruct(ctypes.Structure):
    """`Experts` in step.h."""

    _fields_ = (
        ("router", LinearStruct),
        *((name, _P) for name in ("in", "out", "correction", "scales")),
        *((name, _P) for name in ("router_norm", "norm", "post_norm", "post_dense_norm")),
        *((name, _I) for name in ("num_experts", "per_token", "is_sigmoid", "is_normalised")),
        *((name, _I) for name in ("has_shared", "has_shared_gate")),
        *((name, _F) for name in ("share_scale", "gate_alpha", "gate_limit")),
    )


class LayerStruct(ctypes.Structure):
    """`Layer` in step.h."""

    _fields_ = (
        *((name, LinearStruct) for name in ("qkv", "attention_out", "gate_up", "down")),
        *((name, LinearStruct) for name in ("input_gate", "input_out")),
        *((name, _P) for name in ("experts", "sinks")),
        *((name, _P) for name in ("attention_norm", "query_norm", "key_norm", "value_norm", "mlp_norm")),
        *(
            (name, _P)
            for name in ("attention_norm_bias", "mlp_norm_bias", "query_norm_bias", "key_norm_bias")
        ),
        *((name, _P) for name in ("post_attention_norm", "post_mlp_norm", "post_input_norm", "cos_sin")),
        *((name, _I) for name in ("num_kv_heads", "head_dim", "rotary_dim", "sliding_window")),
        *((name, _I) for name in ("interleaved", "only_queries")),
        *((name, _F) for name in ("scale", "output_scale")),
        *((name, _F) for name in ("xielu_positive", "xielu_negative", "xielu_slope", "xielu_largest")),
    )


class LayerInputsStruct(ctypes.Structure):
    """`LayerInputs` in step.h."""

    _fields_ = (
        ("embedding", _P),
        ("projection", LinearStruct),
        ("norm", _P),
        *((name, _I) for name in ("size", "embedding_format")),
        *((name, _F) for name in ("embedding_scale", "projection_scale", "scale")),
    )


class ModelStruct(ctypes.Structure):
    """`Model` in step.h."""

    _fields_ = (
        *((name, _P) for name in ("layers", "embedding", "learned_positions", "query_factors")),
        *((name, _P) for name in ("final_norm", "final_norm_bias")),
        ("head", LinearStruct),
        ("argmax_filter", ArgmaxFilterStruct),
        ("layer_inputs", LayerInputsStruct),
        *((name, _I) for name in ("num_layers", "hidden", "num_heads", "dtype", "activation")),
        *((name, _I) for name in ("embedding_format", "norms_rows", "norms_heads", "norms_turned")),
        *((name, _I) for name in ("parallel", "few_rows")),
        *((name, _F) for name in ("eps", "attention_soft_cap", "logit_soft_cap")),
        *((name, _F) for name in ("embedding_scale", "residual_scale", "logit_scale")),
    )


class CacheGroupStruct(ctypes.Structure):
    """`CacheGroup` in step.h."""

    _fields_ = (("slots", _P), ("block_tables", _P))


class StepStruct(ctypes.Structure):
    """`Step` in step.h."""

    _fields_ = (
        *((name, _P) for name in ("token_ids", "positions", "logits_indices", "cu_query_lens", "seq_lens")),
        *((name, _P) for name in ("groups", "group_of_layer")),
        *(
            (name, _P)
            for name in ("keys", "values", "embeddings", "hidden", "logits", "max_logits", "argmax")
        ),
        *((name, _P) for name in ("adapter_slots", "adapters")),
        ("block_tables_stride", ctypes.c_int64),
        *((name, _I) for name in ("num_groups", "num_tokens", "num_seqs", "num_logits")),
        *((name, _I) for name in ("block_size", "num_threads")),
    )
    kept: tuple[object, ...] = ()
    """Tensors and arrays that the addresses point at, alive as long as the struct is."""


class AdapterPieceStruct(ctypes.Structure):
    """`AdapterPiece` in gemm/lora.h."""

    _fields_ = (
        ("b", _P),
        *((name, _I) for name in ("first_half", "step", "num_halves", "first_rank", "rank")),
    )


class AdapterLinearStruct(ctypes.Structure):
    """`AdapterLinear` in gemm/lora.h."""

    _fields_ = (
        *((name, _P) for name in ("a", "pieces", "bias", "magnitude")),
        *((name, _I) for name in ("num_pieces", "rank")),
    )


class AdapterStruct(ctypes.Structure):
    """`Adapter` in gemm/lora.h."""

    _fields_ = (
        ("layers", _P),
        *((name, AdapterLinearStruct) for name in ("embedding", "head")),
        *((name, _I) for name in ("dtype", "max_rank")),
    )


class MultiStepStruct(ctypes.Structure):
    """`MultiStepRun` in step.h."""

    _fields_ = (
        ("elapsed_s", _P),
        *((name, _I) for name in ("num_steps", "is_halted", "lacks_memory", "num_done")),
    )


class AttentionCall(ctypes.Structure):
    """`AttentionCall` in attention/work_items.h."""

    _fields_ = (
        *((name, _P) for name in ("query", "keys", "values", "sinks", "out")),
        *((name, _P) for name in ("cu_query_lens", "seq_lens", "block_tables")),
        *((name, ctypes.c_int64) for name in ("query_stride_t", "query_stride_h", "block_tables_stride")),
        *((name, _I) for name in ("num_seqs", "num_heads", "num_kv_heads", "head_dim")),
        *((name, _I) for name in ("block_size", "sliding_window", "dtype", "num_threads")),
        *((name, _F) for name in ("scale", "soft_cap")),
    )


class DrawStruct(ctypes.Structure):
    """`Draw` in sampling/draw.h."""

    _fields_ = (
        ("top_p", ctypes.c_double),
        *((name, ctypes.c_int64) for name in ("answer", "position")),
        *((name, _F) for name in ("temperature", "max_logit", "log_min_p")),
        ("top_k", _I),
    )


MIRRORS: dict[str, type[ctypes.Structure]] = {
    "BlockPanel": BlockPanelStruct,
    "Linear": LinearStruct,
    "ArgmaxFilter": ArgmaxFilterStruct,
    "Experts": ExpertsStruct,
    "Layer": LayerStruct,
    "LayerInputs": LayerInputsStruct,
    "Model": ModelStruct,
    "CacheGroup": CacheGroupStruct,
    "Step": StepStruct,
    "AdapterPiece": AdapterPieceStruct,
    "AdapterLinear": AdapterLinearStruct,
    "Adapter": AdapterStruct,
    "MultiStepRun": MultiStepStruct,
    "AttentionCall": AttentionCall,
    "Draw": DrawStruct,
}
"""Every struct that is shared with C++, by its name there."""


def check_layouts(library: ctypes.CDLL) -> None:
    """Compare the mirrors with the structs that a library was compiled with.

    Raises:
        InvariantViolated: a struct differs in its size, or in a field's name, offset or size.
    """
    described = _described(library)
    if described.keys() != MIRRORS.keys():
        raise InvariantViolated(
            f"abi.py must mirror the structs of abi.cpp, {sorted(described)}; got {sorted(MIRRORS)}"
        )
    for name, (size, fields) in described.items():
        _check_struct(name, MIRRORS[name], size, fields)


def addresses(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    """Return the tensors' addresses as the array of pointers that C++ takes."""
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def _described(library: ctypes.CDLL) -> dict[str, tuple[int, list[Field]]]:
    # lines of `triolet_struct_layouts`: `Struct size`, then `Struct.field offset size` for each field in order
    library.triolet_struct_layouts.restype = ctypes.c_char_p
    structs: dict[str, tuple[int, list[Field]]] = {}
    for line in library.triolet_struct_layouts().decode().splitlines():
        name, *numbers = line.split()
        struct, _, field = name.partition(".")
        if field:
            structs[struct][1].append((field, int(numbers[0]), int(numbers[1])))
        else:
            structs[struct] = int(numbers[0]), []
    return structs


def _check_struct(name: str, mirror: type[ctypes.Structure], size: int, fields: Iterable[Field]) -> None:
    theirs = {field: (offset, num_bytes) for field, offset, num_bytes in fields}
    ours = {field: _place(mirror, field) for field, *_ in mirror._fields_}
    # Both ways, since a field may be missing on either side.
    for field in [*theirs, *ours]:
        if theirs.get(field) != ours.get(field):
            raise InvariantViolated(
                f"{mirror.__name__}.{field} must be the field of {name} in C++, "
                f"{_shown(theirs.get(field))}; got {_shown(ours.get(field))}"
            )
    if ctypes.sizeof(mirror) != size:
        raise InvariantViolated(
            f"{mirror.__name__} must have the size of {name} in C++, {size} bytes; got {ctypes.sizeof(mirror)}"
        )


def _place(mirror: type[ctypes.Structure], field: str) -> tuple[int, int]:
    descriptor = getattr(mirror, field)
    return descriptor.offset, descriptor.size


def _shown(place: tuple[int, int] | None) -> str:
    return "none" if place is None else f"{place[1]} bytes at offset {place[0]}"


def no_memory() -> MemoryError:
    """Return the error of a call of the kernels that returned 1: there is no memory for it."""
    return MemoryError("there is no memory for what the CPU kernels compute; a smaller step may have enough")
