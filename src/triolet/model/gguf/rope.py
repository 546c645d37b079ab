"""Rotary positions of a GGUF file: from its keys and tensors of factors to the parameters of config.json."""

from __future__ import annotations

import math
from typing import Any

import torch

from triolet.errors import ModelFileError, UnsupportedModel
from triolet.model.gguf.checkpoint import gguf_checkpoint
from triolet.model.gguf.metadata import GgufMetadata

# Tensors of divisors of the rotary frequencies: one for every length, and two that LongRoPE chooses from.
DIVISORS = "rope_freqs.weight"
LONGROPE = {"short": "rope_factors_short.weight", "long": "rope_factors_long.weight"}

_MAX_CONTEXT = 2**24
"""Longest context, tokens: above any model's."""


def rope_parameters(metadata: GgufMetadata, default_theta: float = 10_000.0) -> dict[str, Any]:
    """Return the `rope_parameters` of config.json.

    Raises:
        ModelFileError: a key is wrong.
        UnsupportedModel: the rule is not known, or the file has factors that it does not use.
    """
    fields = metadata.fields
    base = {"rope_theta": fields.number("rope.freq_base", default_theta)}
    if base["rope_theta"] <= 1.0:
        raise fields.wrong("rope.freq_base", "a number greater than 1")
    context_length = metadata.required("context_length")
    if context_length > _MAX_CONTEXT:  # there is a row of cosines for each position
        raise fields.wrong("context_length", f"at most {_MAX_CONTEXT}")
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    kind = _scaling_type(metadata, factor)
    original = fields.integer("rope.scaling.original_context_length", context_length, minimum=2)
    attention_factor = fields.optional_number("rope.scaling.attn_factor")
    has_divisors = DIVISORS in metadata.file.tensors
    match kind:
        case "none" | "linear" if has_divisors or attention_factor not in (None, 1.0):
            # A divisor per frequency, such as Llama 3.1's rule worked out, and an attention factor: what LongRoPE does
            # without its two lengths.
            stretch = (factor or 1.0) if kind == "linear" else 1.0
            given = (
                _factors(metadata, DIVISORS) if has_divisors else [1.0] * (metadata.rotary_dimensions // 2)
            )
            divisors = [stretch * divisor for divisor in given]
            longrope = {"rope_type": "longrope", "short_factor": divisors, "long_factor": divisors}
            magnitude = 1.0 if attention_factor is None else attention_factor
            return {
                **base, **longrope, "attention_factor": magnitude, "original_max_position_embeddings": context_length
            }  # fmt: skip
        case "none":
            return {**base, "rope_type": "default"}
        case "linear":
            return {**base, "rope_type": "linear", "factor": factor or 1.0}
        case "yarn":
            beta_fast = fields.number("rope.scaling.yarn_beta_fast", 32.0)
            beta_slow = fields.number("rope.scaling.yarn_beta_slow", 1.0)
            if not 0 < beta_slow <= beta_fast:
                raise fields.wrong(
                    "rope.scaling.yarn_beta_fast", f"at least yarn_beta_slow ({beta_slow}), above 0"
                )
            yarn = {"rope_type": "yarn", "factor": factor, "beta_fast": beta_fast, "beta_slow": beta_slow}
            if fields.number("rope.scaling.yarn_ext_factor", 1.0) not in (1.0, -1.0):  # -1: not set
                raise fields.wrong("rope.scaling.yarn_ext_factor", "1")
            # What the converter writes is config.json's `attention_factor`: the whole factor. llama.cpp does not read
            # it for these architectures, and takes YaRN's own; `attn_factor` is multiplied with either.
            whole = fields.optional_number("rope.scaling.yarn_attn_factor")
            if whole is not None or attention_factor is not None:
                usual = 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0
                yarn["attention_factor"] = (usual if whole is None else whole) * (
                    1.0 if attention_factor is None else attention_factor
                )
            return {**base, **yarn, "original_max_position_embeddings": original}
        case "longrope":
            factors: dict[str, Any] = {
                f"{length}_factor": _factors(metadata, name) for length, name in LONGROPE.items()
            }
            if attention_factor is not None:
                factors["attention_factor"] = attention_factor
            return {**base, "rope_type": "longrope", **factors, "original_max_position_embeddings": original}
        case _:
            raise UnsupportedModel(
                f"{metadata.file.path}: {fields.prefix}rope.scaling.type must be one of none, linear, yarn, longrope; "
                f"got {kind!r}"
            )


def _scaling_type(metadata: GgufMetadata, factor: float) -> str:
    """Return the rule of rotary positions, by its key or, where that is missing, by the tensors that it needs.

    Raises:
        UnsupportedModel: the file has factors that this rule does not use.
    """
    fields, tensors = metadata.fields, metadata.file.tensors
    # llama.cpp's converter writes LongRoPE's tensors and not its name
    is_longrope = all(name in tensors for name in LONGROPE.values())
    implied = "longrope" if is_longrope else "none" if factor in (0.0, 1.0) else "linear"
    kind = fields.text("rope.scaling.type", implied)
    uses: tuple[str, ...] = {"longrope": tuple(LONGROPE.values()), "yarn": ()}.get(kind, (DIVISORS,))
    for name in (DIVISORS, *LONGROPE.values()):
        if name in tensors and name not in uses:
            raise UnsupportedModel(
                f"{metadata.file.path}: tensor {name!r} must be absent where {fields.prefix}rope.scaling.type is "
                f"{kind!r}; got a tensor of shape {list(tensors[name].shape)}"
            )
    return kind


def _factors(metadata: GgufMetadata, name: str) -> list[float]:
    tensor = metadata.file.tensors.get(name)
    if tensor is None or len(tensor.shape) != 1 or tensor.num_bytes > 2**16:
        raise ModelFileError(
            metadata.file.path, f"tensor {name!r} must be there, with a number per pair of a head"
        )
    values = gguf_checkpoint({name: tensor}, torch.float32, permuted_heads={}, norm_offset=0.0).read(name)
    factors: list[float] = values.tolist()
    return factors
