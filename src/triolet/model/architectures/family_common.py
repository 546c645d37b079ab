"""Hold what the parsers of the families have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from triolet.errors import ModelFileError, UnsupportedModel, shown
from triolet.model.architectures.decoder_config import (
    DecoderConfig,
    LayerConfig,
    MoeConfig,
    NormConfig,
    TensorNames,
)
from triolet.model.architectures.rope import Rope, RopeContext, build_rope, rope_type
from triolet.model.folder.json_fields import Fields

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu2",
}
SLIDING, FULL = "sliding_attention", "full_attention"
LINEAR = "linear_attention"
OLD_KINDS = {"mamba": LINEAR, "attention": FULL}  # names in files of transformers 4


# Bounds far above any model's, so that a broken file is an error and not gigabytes.
_MOST_LAYERS, _MOST_HEAD_DIM, _MOST_STRETCH, _MOST_POSITIONS = 2**14, 2**16, 2**20, 2**40


@attrs.frozen(kw_only=True)
class Defaults:
    """Values that transformers' config class of a family fills in."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None  # as many as attention heads
    head_dim: int | None = None  # hidden_size / num_attention_heads
    max_position_embeddings: int = 2048
    original_max_position_embeddings: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    has_partial_rotary: bool = False  # `partial_rotary_factor` is honoured
    partial_rotary_factor: float = 1.0
    interleaved_rotary: bool = False


QWEN = Defaults(
    vocab_size=151936, intermediate_size=22016, num_key_value_heads=32, max_position_embeddings=32768
)
"""Of all Qwens."""


UNGATED = TensorNames(mlp_in=("mlp.up_proj",))
"""Llama's names without a gate."""


def unsupported(fields: Fields, name: str, rule: str) -> UnsupportedModel:
    """Return the error for a field `name` that asks for something the decoder does not support."""
    return UnsupportedModel(
        f"{fields.path}: {fields.prefix}{name} must be {rule}; got {shown(fields.values.get(name))}"
    )


def without(fields: Fields, *names: str) -> Fields:
    """Return the fields of a family that has none of these, and reads none that a file may have."""
    kept = {name: value for name, value in fields.values.items() if name not in names}
    return attrs.evolve(fields, values=kept)


def with_aliases(fields: Fields, aliases: Mapping[str, str]) -> Fields:
    """Return the fields with what stands under other names, which win as they do in transformers.

    Args:
        fields: of config.json.
        aliases: the name of each field's other name.
    """
    others = {name: fields.values[alias] for alias, name in aliases.items() if alias in fields}
    return attrs.evolve(fields, values={**fields.values, **others})


def positive(fields: Fields, name: str, default: float) -> float:
    """Return the number of field `name`, greater than 0."""
    value = fields.number(name, default)
    if value <= 0.0:
        raise fields.wrong(name, "greater than 0")
    return value


def base_config(
    fields: Fields, defaults: Defaults, max_model_len: int | None, rope_parameters: Fields | None = None
) -> DecoderConfig:
    """Return the configuration of a decoder with rotary positions, RMS norms and a gated feed-forward block.

    Every layer is the same here: full attention, one rotary encoding, no experts.
    """
    num_layers = fields.integer("num_hidden_layers", defaults.num_hidden_layers)
    if num_layers > _MOST_LAYERS:  # each has a configuration
        raise fields.wrong("num_hidden_layers", f"at most {_MOST_LAYERS}")
    num_heads = fields.integer("num_attention_heads", defaults.num_attention_heads)
    # Null is as many as attention heads, whatever the family has where nothing is said.
    num_kv_heads = fields.optional_integer("num_key_value_heads", defaults.num_key_value_heads) or num_heads
    hidden_size = fields.integer("hidden_size", defaults.hidden_size)
    head_dim = fields.integer("head_dim", defaults.head_dim or hidden_size // num_heads)
    if head_dim > _MOST_HEAD_DIM:  # its frequencies are a tensor
        raise fields.wrong("head_dim", f"at most {_MOST_HEAD_DIM}")
    if num_heads % num_kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    parameters = rope_parameters or rope_parameters_of(fields)
    rope, max_position = rope_of(fields, parameters, defaults, head_dim, max_model_len)
    return DecoderConfig(
        architecture="",
        vocab_size=fields.integer("vocab_size", defaults.vocab_size),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", defaults.intermediate_size),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        layers=(LayerConfig(attention_scale=head_dim**-0.5, rope=rope),) * num_layers,
        norm=NormConfig(eps=fields.number("rms_norm_eps", defaults.rms_norm_eps)),
        activation=activation_of(fields, "hidden_act", defaults.hidden_act),
        names=TensorNames(),
        tied_head=fields.flag("tie_word_embeddings", defaults.tie_word_embeddings),
    )


def activation_of(fields: Fields, name: str, default: str) -> str:
    """Return the decoder's name for the activation in field `name`."""
    activation = fields.text(name, default)
    if activation not in _ACTIVATIONS:
        raise unsupported(fields, name, f"one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[activation]


def rope_parameters_of(fields: Fields) -> Fields:
    """Return the parameters of the rotary encoding."""
    # transformers 5 writes `rope_parameters`, version 4 `rope_scaling`
    section = fields.section("rope_parameters") or fields.section("rope_scaling")
    return section or Fields(fields.path, {}, "rope_parameters.")


def rope_of(
    fields: Fields, parameters: Fields, defaults: Defaults, head_dim: int, max_model_len: int | None
) -> tuple[Rope, int]:
    """Return the rotary encoding and the longest sequence that it supports, tokens."""
    default_share = fields.number("partial_rotary_factor", defaults.partial_rotary_factor)
    share = parameters.number("partial_rotary_factor", default_share)
    if rope_type(parameters) == "proportional":
        share = 1.0  # the table is of the whole head
    if share != 1.0 and not defaults.has_partial_rotary:
        # transformers ignores it in these families, except that a scaling rule would make tables too narrow for a head
        if rope_type(parameters) != "default":
            raise unsupported(parameters, "partial_rotary_factor", "1: this family rotates the whole head")
        share = 1.0
    rotary_dim = int(head_dim * share)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise UnsupportedModel(
            f"{fields.path}: head_dim * partial_rotary_factor must be even and in [2, {head_dim}]; "
            f"got {rotary_dim}"
        )
    max_position = fields.integer("max_position_embeddings", defaults.max_position_embeddings)
    original = fields.optional_integer(
        "original_max_position_embeddings", defaults.original_max_position_embeddings
    )
    original = original or parameters.integer("original_max_position_embeddings", max_position)
    # LongRoPE divides by the logarithm of this length.
    least = 2 if rope_type(parameters) == "longrope" else 1
    if not least <= original <= _MOST_POSITIONS:
        places = [
            (fields, "original_max_position_embeddings"),
            (parameters, "original_max_position_embeddings"),
        ]
        where, name = next(
            ((at, key) for at, key in places if key in at), (fields, "max_position_embeddings")
        )
        raise where.wrong(name, f"from {least} to {_MOST_POSITIONS}")
    reach, long_context = _reach(parameters, max_position, original, max_model_len)
    theta = parameters.number("rope_theta", fields.number("rope_theta", defaults.rope_theta))
    if theta <= 1.0:
        raise (parameters if "rope_theta" in parameters else fields).wrong("rope_theta", "greater than 1")
    context = RopeContext(
        rotary_dim=rotary_dim,
        theta=theta,
        max_position=max_position,
        original_max_position=original,
        long_context=long_context,
    )
    rope = build_rope(parameters, context)
    return attrs.evolve(rope, interleaved=defaults.interleaved_rotary), reach


def _reach(
    parameters: Fields, max_position: int, original: int, max_model_len: int | None
) -> tuple[int, bool]:
    """Return the longest sequence, tokens, and whether LongRoPE's long factors are used.

    LongRoPE rotates short sequences by other angles than long ones, and keys in the cache cannot be rotated
    again when a sequence grows. So an engine serves one of the two: short sequences unless `max_model_len`
    asks for more.
    """
    match rope_type(parameters):
        case "yarn":
            factor = parameters.number("factor", 1.0)
            if factor > _MOST_STRETCH:
                raise parameters.wrong("factor", f"at most {_MOST_STRETCH}")
            return max(max_position, int(original * factor)), False
        case "longrope" if max_model_len is None or max_model_len <= original:
            return min(original, max_position), False
        case "longrope":
            return max_position, True
        case _:
            return max_position, False


def with_layers(config: DecoderConfig, changes: Sequence[dict[str, Any]]) -> DecoderConfig:
    """Change some fields of each layer."""
    changed = (attrs.evolve(layer, **change) for layer, change in zip(config.layers, changes, strict=True))
    return attrs.evolve(config, layers=tuple(changed))


def with_window(config: DecoderConfig, window: int | None) -> DecoderConfig:
    """Give every layer the same sliding window, tokens."""
    return with_layers(config, [{"sliding_window": window}] * len(config.layers))


def with_windows(config: DecoderConfig, kinds: Sequence[str], window: int | None) -> DecoderConfig:
    """Give the sliding layers among `kinds` a window, tokens, and the others none."""
    return with_layers(config, [{"sliding_window": window if kind == SLIDING else None} for kind in kinds])


def window_in_use(fields: Fields, *, minimum: int = 1) -> int | None:
    """Return `sliding_window`, tokens, where `use_sliding_window` switches it on."""
    if not fields.flag("use_sliding_window", False):
        return None
    return fields.optional_integer("sliding_window", 4096, minimum=minimum)


def with_attention_bias(fields: Fields, config: DecoderConfig, *, default: bool = False) -> DecoderConfig:
    """Read whether the four projections of attention have a bias: `attention_bias`."""
    bias = fields.flag("attention_bias", default)
    return attrs.evolve(config, qkv_bias=bias, attention_out_bias=bias)


def full_every(fields: Fields, name: str, default: int, count: int) -> list[str]:
    """Return the pattern of `count` layers of which every n-th, as field `name` says, has no window."""
    every = fields.integer(name, default)
    return [SLIDING if (index + 1) % every else FULL for index in range(count)]


def rope_parameters_by_kind(fields: Fields) -> tuple[Fields, Fields]:
    """Return the rotary parameters of the layers without and of those with a window."""
    nothing = Fields(fields.path, {}, "rope_parameters.")
    by_kind = fields.section("rope_parameters") or nothing
    # transformers 4 writes one `rope_scaling`; it is for the layers without a window only
    whole = by_kind.section(FULL) or fields.section("rope_scaling") or nothing
    return whole, by_kind.section(SLIDING) or nothing


def layer_types(fields: Fields, default: Sequence[str]) -> tuple[str, ...]:
    """Return the kind of each layer, sliding or full: `layer_types`, or without it the family's pattern."""
    kinds = fields.texts("layer_types") or tuple(default)
    if len(kinds) != len(default) or not set(kinds) <= {SLIDING, FULL}:
        raise unsupported(fields, "layer_types", f"{len(default)} times {SLIDING} or {FULL}")
    return kinds


def recurrent_kinds(
    fields: Fields, default: Sequence[str], recurrent: str = LINEAR, other: str = FULL
) -> list[str]:
    """Return the kind of each layer, recurrent or the other: of the config, or without it the family's pattern."""
    name = "layers_block_type" if "layers_block_type" in fields else "layer_types"
    kinds = [OLD_KINDS.get(kind, kind) for kind in fields.texts(name) or default]
    if len(kinds) != len(default) or not set(kinds) <= {recurrent, other}:
        raise unsupported(fields, name, f"{len(default)} times {recurrent} or {other}")
    return kinds


def checked_experts(fields: Fields, moe: MoeConfig) -> MoeConfig:
    """Return `moe`, checked: a token uses at most as many experts as there are."""
    if moe.experts_per_token > moe.num_experts:
        raise ModelFileError(
            fields.path,
            f"num_experts_per_tok must be at most the number of experts ({moe.num_experts}); "
            f"got {moe.experts_per_token}",
        )
    return moe
