"""From config.json to `DecoderConfig`, one function per family.

Defaults of absent keys are those of transformers' config classes; a feature that the decoder would not
honour is refused by name. Configs come as transformers 5 writes them (`rope_parameters`, `dtype`) or as
version 4 did (`rope_theta` and `rope_scaling`, `torch_dtype`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from triolet.errors import UnsupportedModel
from triolet.model.architectures.decoder_config import (
    ClampedGate,
    DecoderConfig,
    LayerConfig,
    MoeConfig,
    NormConfig,
    TensorNames,
    first_architecture,
)
from triolet.model.architectures.family_common import (
    FULL,
    SLIDING,
    Defaults,
    activation_of,
    base_config,
    checked_experts,
    layer_types,
    rope_of,
    rope_parameters_of,
    unsupported,
    with_layers,
    with_window,
)
from triolet.model.architectures.rope import rope_type
from triolet.model.folder.json_fields import Fields


def is_native(architecture: str) -> bool:
    """Return whether the native decoder knows this architecture."""
    return architecture in _FAMILIES


def native_family(architecture: str) -> str | None:
    """Return the name under which the native decoder knows a class; None if it does not.

    A class without an output head, or with one of a sequence classification or a reward model, has the decoder of the
    class that generates text.
    """
    # "ForProcessRewardModel" ends with "Model", too: the longer endings come first
    for ending in ("", "ForSequenceClassification", "ForProcessRewardModel", "ForRewardModel", "Model"):
        if architecture.endswith(ending):
            stem = architecture.removesuffix(ending)
            for name in (architecture,) if not ending else (f"{stem}ForCausalLM", f"{stem}LMHeadModel"):
                if is_native(name):
                    return name
    return None


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
    return parse_decoder_fields(Fields(folder / "config.json", config), max_model_len=max_model_len)


def parse_decoder_fields(fields: Fields, *, max_model_len: int | None = None) -> DecoderConfig:
    """Read what the native decoder needs from the fields of a config.json, whatever file they come from.

    Raises:
        ModelFileError: a field is of the wrong type or out of its range.
        UnsupportedModel: the architecture, or a feature that the config asks for, is not known.
    """
    architecture = first_architecture(fields)
    if not is_native(architecture):
        raise UnsupportedModel(
            f"{fields.path}: the native decoder does not know the architecture {architecture!r}"
        )
    family = _FAMILIES[architecture]
    parsed = family.parse(fields, max_model_len)
    return attrs.evolve(parsed, architecture=architecture, runs_on_cpu_decoder=family.runs_on_cpu_decoder)


# --------------------------------------------------------------------------------------- the families


def _llama(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    bias = fields.flag("attention_bias", False)
    return attrs.evolve(
        base_config(fields, Defaults(), max_model_len),
        qkv_bias=bias,
        attention_out_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


def _mistral(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    defaults = Defaults(intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=131072)
    return with_window(
        base_config(fields, defaults, max_model_len), fields.optional_integer("sliding_window", 4096)
    )


_QWEN = Defaults(
    vocab_size=151936, intermediate_size=22016, num_key_value_heads=32, max_position_embeddings=32768
)


def _qwen_windows(fields: Fields, config: DecoderConfig) -> DecoderConfig:
    window = (
        fields.optional_integer("sliding_window", 4096) if fields.flag("use_sliding_window", False) else None
    )
    first_sliding = fields.integer("max_window_layers", 28, minimum=0) if window else len(config.layers)
    pattern = [SLIDING if index >= first_sliding else FULL for index in range(len(config.layers))]
    kinds = layer_types(fields, pattern)
    return with_layers(config, [{"sliding_window": window if kind == SLIDING else None} for kind in kinds])


def _qwen2(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    return attrs.evolve(_qwen_windows(fields, base_config(fields, _QWEN, max_model_len)), qkv_bias=True)


def _qwen3(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    base = base_config(fields, attrs.evolve(_QWEN, head_dim=128), max_model_len)
    bias = fields.flag("attention_bias", False)
    return attrs.evolve(_qwen_windows(fields, base), qk_norm=True, qkv_bias=bias, attention_out_bias=bias)


def _phi3(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    defaults = Defaults(
        vocab_size=32064,
        hidden_size=3072,
        intermediate_size=8192,
        max_position_embeddings=4096,
        original_max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        has_partial_rotary=True,
    )
    parameters = rope_parameters_of(fields)
    if rope_type(parameters) == "yarn":  # what early Phi-3 configs call LongRoPE
        parameters = attrs.evolve(parameters, values={**parameters.values, "rope_type": "longrope"})
    base = base_config(fields, defaults, max_model_len, parameters)
    names = TensorNames(qkv=("self_attn.qkv_proj",), mlp_in=("mlp.gate_up_proj",))
    return attrs.evolve(with_window(base, fields.optional_integer("sliding_window")), names=names)


_GEMMA_NAMES = TensorNames(
    mlp_norm="pre_feedforward_layernorm",
    post_attention_norm="post_attention_layernorm",
    post_mlp_norm="post_feedforward_layernorm",
)


def _gemma_like(
    fields: Fields, defaults: Defaults, max_model_len: int | None, rope_parameters: Fields | None = None
) -> DecoderConfig:
    if fields.flag("use_bidirectional_attention", False):
        raise unsupported(fields, "use_bidirectional_attention", "false: attention is causal")
    base = base_config(fields, defaults, max_model_len, rope_parameters)
    bias = fields.flag("attention_bias", False)
    return attrs.evolve(
        base,
        norm=attrs.evolve(base.norm, weight_offset=1.0),
        embedding_scale=base.hidden_size**0.5,
        qkv_bias=bias,
        attention_out_bias=bias,
    )


_GEMMA = Defaults(
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
    kinds = layer_types(fields, [(SLIDING, FULL)[index % 2] for index in range(len(config.layers))])
    window = fields.optional_integer("sliding_window", 4096)
    scale = fields.number("query_pre_attn_scalar", 256) ** -0.5
    config = with_layers(
        config,
        [{"sliding_window": window if kind == SLIDING else None, "attention_scale": scale} for kind in kinds],
    )
    return attrs.evolve(
        config,
        activation=activation_of(fields, "hidden_activation", _GEMMA2.hidden_act),
        names=_GEMMA_NAMES,
        attention_soft_cap=fields.optional_number("attn_logit_softcapping", 50.0),
        logit_soft_cap=fields.optional_number("final_logit_softcapping", 30.0),
    )


def _gemma3(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    if fields.optional_number("attn_logit_softcapping") is not None:
        raise unsupported(fields, "attn_logit_softcapping", "null: Gemma 3 does not cap attention scores")
    defaults = attrs.evolve(_GEMMA2, vocab_size=262_208, max_position_embeddings=131_072)
    globally, locally = _gemma3_rope_parameters(fields)
    config = _gemma_like(fields, attrs.evolve(defaults, rope_theta=1_000_000.0), max_model_len, globally)
    # local layers never take the config's own rope_theta, which is the global one
    local_theta = fields.number("rope_local_base_freq", 10_000.0)
    locally = attrs.evolve(locally, values={"rope_theta": local_theta, **locally.values})
    local_rope, _ = rope_of(fields, locally, defaults, config.head_dim, max_model_len)

    every = fields.integer("sliding_window_pattern", 6)
    pattern = [SLIDING if (index + 1) % every else FULL for index in range(len(config.layers))]
    sliding = {"sliding_window": fields.optional_integer("sliding_window", 4096), "rope": local_rope}
    scale = {"attention_scale": fields.number("query_pre_attn_scalar", 256) ** -0.5}
    kinds = layer_types(fields, pattern)
    return attrs.evolve(
        with_layers(config, [scale | sliding if kind == SLIDING else scale for kind in kinds]),
        activation=activation_of(fields, "hidden_activation", defaults.hidden_act),
        names=_GEMMA_NAMES,
        qk_norm=True,
        logit_soft_cap=fields.optional_number("final_logit_softcapping"),
    )


def _gemma3_rope_parameters(fields: Fields) -> tuple[Fields, Fields]:
    """Return the rotary parameters of the global and of the local layers."""
    nothing = Fields(fields.path, {}, "rope_parameters.")
    by_kind = fields.section("rope_parameters") or nothing
    # transformers 4 writes one `rope_scaling`; it is for the global layers only
    globally = by_kind.section(FULL) or fields.section("rope_scaling") or nothing
    return globally, by_kind.section(SLIDING) or nothing


def _gpt2(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    if fields.flag("add_cross_attention", False):
        raise unsupported(fields, "add_cross_attention", "false: there is no encoder to attend to")
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
        activation=activation_of(fields, "activation_function", "gelu_new"),
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
    defaults = Defaults(
        intermediate_size=14336,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=1_000_000.0,
    )
    config = with_window(
        base_config(fields, defaults, max_model_len), fields.optional_integer("sliding_window")
    )
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
    moe = [checked_experts(fields, experts)] * len(config.layers)
    return attrs.evolve(with_layers(config, [{"moe": each} for each in moe]), names=names)


def _qwen3_moe(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    defaults = attrs.evolve(
        _QWEN, hidden_size=2048, intermediate_size=6144, num_hidden_layers=24, num_key_value_heads=4
    )
    config = base_config(fields, defaults, max_model_len)
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
    moe = checked_experts(fields, experts)
    return attrs.evolve(
        with_layers(
            with_window(config, window), [{"moe": moe if is_sparse else None} for is_sparse in sparse]
        ),
        qk_norm=True,
        qkv_bias=bias,
        attention_out_bias=bias,
    )


def _gpt_oss(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    defaults = Defaults(
        vocab_size=201_088,
        hidden_size=2880,
        intermediate_size=2880,
        num_hidden_layers=36,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        rope_theta=150_000.0,
    )
    parameters = rope_parameters_of(fields)
    if not parameters.values:
        scaling = {"factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
        parameters = attrs.evolve(parameters, values={"rope_type": "yarn", **scaling})
    config = base_config(fields, defaults, max_model_len, parameters)
    experts = MoeConfig(
        num_experts=fields.integer("num_local_experts", fields.integer("num_experts", 128)),
        experts_per_token=fields.integer("num_experts_per_tok", fields.integer("experts_per_token", 4)),
        intermediate_size=config.intermediate_size,
        normalize=True,
        router_bias=True,
        gate=ClampedGate(
            alpha=fields.number("swiglu_alpha", 1.702), limit=fields.number("swiglu_limit", 7.0)
        ),
    )
    moe = checked_experts(fields, experts)
    kinds = layer_types(fields, [(SLIDING, FULL)[index % 2] for index in range(len(config.layers))])
    window = fields.optional_integer("sliding_window", 128)
    bias = fields.flag("attention_bias", True)
    return attrs.evolve(
        with_layers(
            config, [{"moe": moe, "sliding_window": window if kind == SLIDING else None} for kind in kinds]
        ),
        qkv_bias=bias,
        attention_out_bias=bias,
        mlp_bias=True,
        names=TensorNames(router="mlp.router", sinks="self_attn.sinks", stacked_experts=True),
    )


@attrs.frozen
class Family:
    """One architecture that the native decoder knows."""

    # Reads its config.json; the second argument is `max_model_len`.
    parse: Callable[[Fields, int | None], DecoderConfig]
    # The C++ decoder has been tested with this family. Without it a CPU runs the torch decoder: a family may
    # compute something that no field of `DecoderConfig` names yet.
    runs_on_cpu_decoder: bool = False


_FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(_llama, runs_on_cpu_decoder=True),
    "MistralForCausalLM": Family(_mistral, runs_on_cpu_decoder=True),
    "Qwen2ForCausalLM": Family(_qwen2, runs_on_cpu_decoder=True),
    "Qwen3ForCausalLM": Family(_qwen3, runs_on_cpu_decoder=True),
    "Phi3ForCausalLM": Family(_phi3, runs_on_cpu_decoder=True),
    "GemmaForCausalLM": Family(_gemma, runs_on_cpu_decoder=True),
    "Gemma2ForCausalLM": Family(_gemma2, runs_on_cpu_decoder=True),
    "Gemma3ForCausalLM": Family(_gemma3, runs_on_cpu_decoder=True),
    "GPT2LMHeadModel": Family(_gpt2, runs_on_cpu_decoder=True),
    "MixtralForCausalLM": Family(_mixtral),
    "Qwen3MoeForCausalLM": Family(_qwen3_moe),
    "GptOssForCausalLM": Family(_gpt_oss),
}
