"""From config.json to `DecoderConfig`, one function per family.

Defaults of absent keys are those of transformers' config classes; a feature that the decoder would not
honour is refused by name. Configs come as transformers 5 writes them (`rope_parameters`, `dtype`) or as
version 4 did (`rope_theta` and `rope_scaling`, `torch_dtype`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

from triolet.errors import ModelFileError, UnsupportedModel
from triolet.model.config_fields import Fields
from triolet.model.model_config import (
    DecoderConfig,
    LayerConfig,
    MoeConfig,
    NormConfig,
    TensorNames,
    architecture_of,
)
from triolet.model.rope import Rope, RopeContext, build_rope, rope_type

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}
_SLIDING, _FULL = "sliding_attention", "full_attention"


@attrs.frozen(kw_only=True)
class _Defaults:
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


def is_native(architecture: str) -> bool:
    """Whether the native decoder knows this architecture."""
    return architecture in _FAMILIES


def parse_decoder_config(
    config: dict[str, Any], folder: Path, *, max_model_len: int | None = None
) -> DecoderConfig:
    """Read what the native decoder needs from a config.json.

    Args:
        config: the file's contents.
        folder: where it lies, for error messages.
        max_model_len: longest sequence that is wanted, tokens; decides which factors a LongRoPE model uses.

    Raises:
        ModelFileError: a field is of the wrong type or out of its range.
        UnsupportedModel: the architecture, or a feature that the config asks for, is not known.
    """
    fields = Fields(folder / "config.json", config)
    architecture = architecture_of(config, folder)
    if not is_native(architecture):
        raise UnsupportedModel(
            f"{fields.path}: the native decoder does not know the architecture {architecture!r}"
        )
    if config.get("quantization_config"):
        raise _unsupported(fields, "quantization_config", "absent: quantised weights are not supported")
    parsed = _FAMILIES[architecture](fields, max_model_len)
    return attrs.evolve(parsed, architecture=architecture)


def _unsupported(fields: Fields, name: str, rule: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{fields.path}: {fields.prefix}{name} must be {rule}; got {fields.values.get(name)!r}"
    )


# --------------------------------------------------------------------------------- shared by families


def _base(
    fields: Fields, defaults: _Defaults, max_model_len: int | None, rope_parameters: Fields | None = None
) -> DecoderConfig:
    """What the families with rotary positions, RMS norms and a gated feed-forward block have in common.

    Every layer is the same here: the whole context, one rotary encoding, no experts.
    """
    num_layers = fields.integer("num_hidden_layers", defaults.num_hidden_layers)
    num_heads = fields.integer("num_attention_heads", defaults.num_attention_heads)
    num_kv_heads = fields.integer("num_key_value_heads", defaults.num_key_value_heads or num_heads)
    hidden_size = fields.integer("hidden_size", defaults.hidden_size)
    head_dim = fields.integer("head_dim", defaults.head_dim or hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    parameters = rope_parameters or _rope_parameters(fields)
    rope, max_position = _rope(fields, parameters, defaults, head_dim, max_model_len)
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
        activation=_activation(fields, "hidden_act", defaults.hidden_act),
        names=TensorNames(),
        tied_head=fields.flag("tie_word_embeddings", defaults.tie_word_embeddings),
    )


def _activation(fields: Fields, name: str, default: str) -> str:
    activation = fields.text(name, default)
    if activation not in _ACTIVATIONS:
        raise _unsupported(fields, name, f"one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[activation]


def _rope_parameters(fields: Fields) -> Fields:
    section = fields.section("rope_parameters") or fields.section("rope_scaling")
    return section or Fields(fields.path, {}, "rope_parameters.")


def _rope(
    fields: Fields, parameters: Fields, defaults: _Defaults, head_dim: int, max_model_len: int | None
) -> tuple[Rope, int]:
    """The rotary encoding, and how long a sequence it is good for, tokens."""
    share = parameters.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
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
    reach, long_context = _reach(parameters, max_position, original, max_model_len)
    context = RopeContext(
        rotary_dim=rotary_dim,
        theta=parameters.number("rope_theta", fields.number("rope_theta", defaults.rope_theta)),
        max_position=max_position,
        original_max_position=original,
        long_context=long_context,
    )
    return build_rope(parameters, context), reach


def _reach(
    parameters: Fields, max_position: int, original: int, max_model_len: int | None
) -> tuple[int, bool]:
    """How long sequences may be, tokens, and whether LongRoPE's long factors are wanted.

    LongRoPE turns short sequences otherwise than long ones, and keys in the cache can not be turned anew
    when a sequence grows. So an engine is for the one or the other: for short ones unless `max_model_len`
    asks for more.
    """
    match rope_type(parameters):
        case "yarn":
            return max(max_position, int(original * parameters.number("factor", 1.0))), False
        case "longrope" if max_model_len is None or max_model_len <= original:
            return min(original, max_position), False
        case "longrope":
            return max_position, True
        case _:
            return max_position, False


def _with_layers(config: DecoderConfig, changes: Sequence[dict[str, Any]]) -> DecoderConfig:
    """Change some fields of each layer."""
    changed = (attrs.evolve(layer, **change) for layer, change in zip(config.layers, changes, strict=True))
    return attrs.evolve(config, layers=tuple(changed))


def _with_window(config: DecoderConfig, window: int | None) -> DecoderConfig:
    """Give every layer the same sliding window, tokens."""
    return _with_layers(config, [{"sliding_window": window}] * len(config.layers))


def _layer_types(fields: Fields, default: Sequence[str]) -> tuple[str, ...]:
    """Which layers see the whole context: by `layer_types`, or without it by the family's pattern."""
    kinds = fields.texts("layer_types") or tuple(default)
    if len(kinds) != len(default) or not set(kinds) <= {_SLIDING, _FULL}:
        raise _unsupported(fields, "layer_types", f"{len(default)} times {_SLIDING} or {_FULL}")
    return kinds


# --------------------------------------------------------------------------------------- the families


def _llama(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    bias = fields.flag("attention_bias", False)
    return attrs.evolve(
        _base(fields, _Defaults(), max_model_len),
        qkv_bias=bias,
        attention_out_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


def _mistral(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    defaults = _Defaults(intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=131072)
    return _with_window(
        _base(fields, defaults, max_model_len), fields.optional_integer("sliding_window", 4096)
    )


_QWEN = _Defaults(
    vocab_size=151936, intermediate_size=22016, num_key_value_heads=32, max_position_embeddings=32768
)


def _qwen_windows(fields: Fields, config: DecoderConfig) -> DecoderConfig:
    window = (
        fields.optional_integer("sliding_window", 4096) if fields.flag("use_sliding_window", False) else None
    )
    first_sliding = fields.integer("max_window_layers", 28, minimum=0) if window else len(config.layers)
    pattern = [_SLIDING if index >= first_sliding else _FULL for index in range(len(config.layers))]
    kinds = _layer_types(fields, pattern)
    return _with_layers(config, [{"sliding_window": window if kind == _SLIDING else None} for kind in kinds])


def _qwen2(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    return attrs.evolve(_qwen_windows(fields, _base(fields, _QWEN, max_model_len)), qkv_bias=True)


def _qwen3(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    base = _base(fields, attrs.evolve(_QWEN, head_dim=128), max_model_len)
    bias = fields.flag("attention_bias", False)
    return attrs.evolve(_qwen_windows(fields, base), qk_norm=True, qkv_bias=bias, attention_out_bias=bias)


def _phi3(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    defaults = _Defaults(
        vocab_size=32064,
        hidden_size=3072,
        intermediate_size=8192,
        max_position_embeddings=4096,
        original_max_position_embeddings=4096,
        rms_norm_eps=1e-5,
    )
    parameters = _rope_parameters(fields)
    if rope_type(parameters) == "yarn":  # what early Phi-3 configs call LongRoPE
        parameters = attrs.evolve(parameters, values={**parameters.values, "rope_type": "longrope"})
    base = _base(fields, defaults, max_model_len, parameters)
    names = TensorNames(qkv=("self_attn.qkv_proj",), mlp_in=("mlp.gate_up_proj",))
    return attrs.evolve(_with_window(base, fields.optional_integer("sliding_window")), names=names)


_GEMMA_NAMES = TensorNames(
    mlp_norm="pre_feedforward_layernorm",
    post_attention_norm="post_attention_layernorm",
    post_mlp_norm="post_feedforward_layernorm",
)


def _gemma_like(
    fields: Fields, defaults: _Defaults, max_model_len: int | None, rope_parameters: Fields | None = None
) -> DecoderConfig:
    if fields.flag("use_bidirectional_attention", False):
        raise _unsupported(fields, "use_bidirectional_attention", "false: attention is causal")
    base = _base(fields, defaults, max_model_len, rope_parameters)
    bias = fields.flag("attention_bias", False)
    return attrs.evolve(
        base,
        norm=attrs.evolve(base.norm, weight_offset=1.0),
        embedding_scale=base.hidden_size**0.5,
        qkv_bias=bias,
        attention_out_bias=bias,
    )


_GEMMA = _Defaults(
    vocab_size=256000,
    hidden_size=3072,
    intermediate_size=24576,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=16,
    head_dim=256,
    max_position_embeddings=8192,
    hidden_act="gelu_pytorch_tanh",
    tie_word_embeddings=True,
)
_GEMMA2 = attrs.evolve(
    _GEMMA,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=26,
    num_attention_heads=8,
    num_key_value_heads=4,
)


def _gemma(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    config = _gemma_like(fields, _GEMMA, max_model_len)
    # the first releases say `gelu` and mean its tanh form
    return attrs.evolve(config, activation="gelu_tanh" if config.activation == "gelu" else config.activation)


def _gemma2(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    config = _gemma_like(fields, _GEMMA2, max_model_len)
    kinds = _layer_types(fields, [(_SLIDING, _FULL)[index % 2] for index in range(len(config.layers))])
    window = fields.optional_integer("sliding_window", 4096)
    scale = fields.number("query_pre_attn_scalar", 256) ** -0.5
    config = _with_layers(
        config,
        [
            {"sliding_window": window if kind == _SLIDING else None, "attention_scale": scale}
            for kind in kinds
        ],
    )
    return attrs.evolve(
        config,
        activation=_activation(fields, "hidden_activation", _GEMMA2.hidden_act),
        names=_GEMMA_NAMES,
        attention_soft_cap=fields.optional_number("attn_logit_softcapping", 50.0),
        logit_soft_cap=fields.optional_number("final_logit_softcapping", 30.0),
    )


def _gemma3(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    if fields.optional_number("attn_logit_softcapping") is not None:
        raise _unsupported(fields, "attn_logit_softcapping", "null: Gemma 3 does not cap attention scores")
    defaults = attrs.evolve(_GEMMA2, vocab_size=262_208, max_position_embeddings=131_072)
    globally, locally = _gemma3_rope_parameters(fields)
    config = _gemma_like(fields, attrs.evolve(defaults, rope_theta=1_000_000.0), max_model_len, globally)
    # local layers never take the config's own rope_theta, which is the global one
    local_theta = fields.number("rope_local_base_freq", 10_000.0)
    locally = attrs.evolve(locally, values={"rope_theta": local_theta, **locally.values})
    local_rope, _ = _rope(fields, locally, defaults, config.head_dim, max_model_len)

    every = fields.integer("sliding_window_pattern", 6)
    pattern = [_SLIDING if (index + 1) % every else _FULL for index in range(len(config.layers))]
    sliding = {"sliding_window": fields.optional_integer("sliding_window", 4096), "rope": local_rope}
    scale = {"attention_scale": fields.number("query_pre_attn_scalar", 256) ** -0.5}
    kinds = _layer_types(fields, pattern)
    return attrs.evolve(
        _with_layers(config, [scale | sliding if kind == _SLIDING else scale for kind in kinds]),
        activation=_activation(fields, "hidden_activation", defaults.hidden_act),
        names=_GEMMA_NAMES,
        qk_norm=True,
        logit_soft_cap=fields.optional_number("final_logit_softcapping"),
    )


def _gemma3_rope_parameters(fields: Fields) -> tuple[Fields, Fields]:
    """The parameters of global and of local layers; version 4's `rope_scaling` is for the global ones."""
    nothing = Fields(fields.path, {}, "rope_parameters.")
    by_kind = fields.section("rope_parameters") or nothing
    globally = by_kind.section(_FULL) or fields.section("rope_scaling") or nothing
    return globally, by_kind.section(_SLIDING) or nothing


def _gpt2(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    if fields.flag("add_cross_attention", False):
        raise _unsupported(fields, "add_cross_attention", "false: there is no encoder to attend to")
    hidden_size, num_heads = fields.integer("n_embd", 768), fields.integer("n_head", 12)
    if hidden_size % num_heads:
        raise fields.wrong("n_embd", f"a multiple of n_head ({num_heads})")
    scale = (hidden_size // num_heads) ** -0.5 if fields.flag("scale_attn_weights", True) else 1.0
    by_depth = fields.flag("scale_attn_by_inverse_layer_idx", False)
    return DecoderConfig(
        architecture="",
        vocab_size=fields.integer("vocab_size", 50257),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("n_inner", 4 * hidden_size),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        max_position=fields.integer("n_positions", 1024),
        layers=tuple(
            LayerConfig(attention_scale=scale / (index + 1) if by_depth else scale)
            for index in range(fields.integer("n_layer", 12))
        ),
        norm=NormConfig(eps=fields.number("layer_norm_epsilon", 1e-5), centered=True),
        activation=_activation(fields, "activation_function", "gelu_new"),
        names=_GPT2_NAMES,
        gated=False,
        qkv_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        tied_head=fields.flag("tie_word_embeddings", True),
    )


_GPT2_NAMES = TensorNames(
    prefix="transformer.",
    embedding="wte",
    positions="wpe",
    final_norm="ln_f",
    layer="h.{layer}.",
    attention_norm="ln_1",
    qkv=("attn.c_attn",),
    attention_out="attn.c_proj",
    mlp_norm="ln_2",
    mlp_in=("mlp.c_fc",),
    mlp_out="mlp.c_proj",
    transposed=True,
    ignored=(".attn.bias", ".attn.masked_bias"),
)


def _mixtral(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    defaults = _Defaults(
        intermediate_size=14336,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=1_000_000.0,
    )
    config = _with_window(_base(fields, defaults, max_model_len), fields.optional_integer("sliding_window"))
    experts = MoeConfig(
        num_experts=fields.integer("num_local_experts", fields.integer("num_experts", 8)),
        experts_per_token=fields.integer("num_experts_per_tok", 2),
        intermediate_size=config.intermediate_size,
        normalize=True,
    )
    names = TensorNames(
        router="block_sparse_moe.gate",
        expert_in=("block_sparse_moe.experts.{expert}.w1", "block_sparse_moe.experts.{expert}.w3"),
        expert_out="block_sparse_moe.experts.{expert}.w2",
    )
    moe = [_checked_experts(fields, experts)] * len(config.layers)
    return attrs.evolve(_with_layers(config, [{"moe": each} for each in moe]), names=names)


def _qwen3_moe(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    defaults = attrs.evolve(
        _QWEN, hidden_size=2048, intermediate_size=6144, num_hidden_layers=24, num_key_value_heads=4
    )
    config = _base(fields, defaults, max_model_len)
    bias = fields.flag("attention_bias", False)
    window = (
        fields.optional_integer("sliding_window", 4096) if fields.flag("use_sliding_window", False) else None
    )
    experts = MoeConfig(
        num_experts=fields.integer("num_experts", fields.integer("num_local_experts", 128)),
        experts_per_token=fields.integer("num_experts_per_tok", 8),
        intermediate_size=fields.integer("moe_intermediate_size", 768),
        normalize=fields.flag("norm_topk_prob", False),
    )
    every, dense = fields.integer("decoder_sparse_step", 1), set(fields.integers("mlp_only_layers"))
    sparse = [(index + 1) % every == 0 and index not in dense for index in range(len(config.layers))]
    moe = _checked_experts(fields, experts)
    return attrs.evolve(
        _with_layers(
            _with_window(config, window), [{"moe": moe if is_sparse else None} for is_sparse in sparse]
        ),
        qk_norm=True,
        qkv_bias=bias,
        attention_out_bias=bias,
    )


def _checked_experts(fields: Fields, moe: MoeConfig) -> MoeConfig:
    if moe.experts_per_token > moe.num_experts:
        raise ModelFileError(
            fields.path,
            f"num_experts_per_tok must be at most the number of experts ({moe.num_experts}); "
            f"got {moe.experts_per_token}",
        )
    return moe


_FAMILIES: dict[str, Callable[[Fields, int | None], DecoderConfig]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Phi3ForCausalLM": _phi3,
    "GemmaForCausalLM": _gemma,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "GPT2LMHeadModel": _gpt2,
    "MixtralForCausalLM": _mixtral,
    "Qwen3MoeForCausalLM": _qwen3_moe,
}
