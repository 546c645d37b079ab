"""From config.json to `DecoderConfig`: dense families with layer norms, from GPT-2 on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from triolet.model.architectures.decoder_config import (
    DecoderConfig,
    LayerConfig,
    NormConfig,
    TensorNames,
)
from triolet.model.architectures.family_common import (
    SLIDING,
    UNGATED,
    Defaults,
    activation_of,
    base_config,
    full_every,
    layer_types,
    positive,
    rope_parameters_of,
    unsupported,
    with_attention_bias,
    with_layers,
    with_window,
    without,
)
from triolet.model.folder.json_fields import Fields


def gpt2(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a GPT-2."""
    if fields.flag("add_cross_attention", False):
        raise unsupported(fields, "add_cross_attention", "false: there is no encoder to attend to")
    # as in transformers, the general name wins over GPT-2's
    general = {
        own: fields.values[name] for name, own in _GPT2_FIELDS.items() if fields.values.get(name) is not None
    }
    fields = attrs.evolve(fields, values={**fields.values, **general})
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


_GPT2_FIELDS = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
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


def starcoder2(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a StarCoder 2: GPT-2's blocks with rotary positions and grouped queries."""
    defaults = Defaults(
        vocab_size=49152,
        hidden_size=3072,
        intermediate_size=12288,
        num_hidden_layers=30,
        num_attention_heads=24,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        hidden_act="gelu_pytorch_tanh",
        tie_word_embeddings=True,
    )
    config = base_config(fields, defaults, max_model_len)
    bias = fields.flag("use_bias", True)
    return attrs.evolve(
        with_window(config, fields.optional_integer("sliding_window")),
        norm=NormConfig(eps=fields.number("norm_epsilon", 1e-5), centered=True),
        names=TensorNames(mlp_in=("mlp.c_fc",), mlp_out="mlp.c_proj"),
        gated=False,
        qkv_bias=bias,
        attention_out_bias=bias,
        mlp_bias=bias,
    )


def opt(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read an OPT: GPT-2's blocks, whose learned positions begin behind two rows."""
    hidden_size, num_heads = fields.integer("hidden_size", 768), fields.integer("num_attention_heads", 12)
    if hidden_size % num_heads:
        raise fields.wrong("hidden_size", f"a multiple of num_attention_heads ({num_heads})")
    head_dim, bias = hidden_size // num_heads, fields.flag("enable_bias", True)
    return DecoderConfig(
        architecture="",
        vocab_size=fields.integer("vocab_size", 50272),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("ffn_dim", 3072),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        max_position=fields.integer("max_position_embeddings", 2048),
        layers=(LayerConfig(attention_scale=head_dim**-0.5),) * fields.integer("num_hidden_layers", 12),
        norm=NormConfig(eps=1e-5, centered=True),
        activation=activation_of(fields, "activation_function", "relu"),
        names=_OPT_NAMES,
        gated=False,
        qkv_bias=bias,
        attention_out_bias=bias,
        mlp_bias=bias,
        position_offset=2,
        tied_head=fields.flag("tie_word_embeddings", True),
    )


def is_plain_opt(config: Mapping[str, Any]) -> bool:
    """Return whether an OPT has norms in front of its blocks, and embeddings as wide as its layers (unlike 350m)."""
    width = config.get("word_embed_proj_dim")
    return (
        config.get("do_layer_norm_before") is not False
        and config.get("layer_norm_elementwise_affine") is not False
        and not config.get("_remove_final_layer_norm")
        and (width is None or width == config.get("hidden_size", 768))
    )


_OPT_NAMES = TensorNames(
    embedding="decoder.embed_tokens",
    positions="decoder.embed_positions",
    final_norm="decoder.final_layer_norm",
    layer="decoder.layers.{layer}.",
    attention_norm="self_attn_layer_norm",
    attention_out="self_attn.out_proj",
    mlp_norm="final_layer_norm",
    mlp_in=("fc1",),
    mlp_out="fc2",
)


def gpt_neox(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a GPT-NeoX or a Pythia: the blocks of a layer read norms of their own, at once."""
    defaults = Defaults(
        vocab_size=50432,
        hidden_size=6144,
        intermediate_size=24576,
        num_hidden_layers=44,
        num_attention_heads=64,
        hidden_act="gelu",
        has_partial_rotary=True,
    )
    parameters = rope_parameters_of(fields)
    of_old = {
        "rope_theta": fields.number("rotary_emb_base", defaults.rope_theta),
        "partial_rotary_factor": fields.number("rotary_pct", 0.25),
    }
    parameters = attrs.evolve(parameters, values={**of_old, **parameters.values})
    # This family has as many heads of keys as of queries, and no other size of a head.
    plain = without(fields, "head_dim", "num_key_value_heads")
    return attrs.evolve(
        with_attention_bias(fields, base_config(plain, defaults, max_model_len, parameters), default=True),
        norm=_layer_norm(fields),
        names=_GPT_NEOX_NAMES,
        gated=False,
        mlp_bias=True,
        parallel_block=fields.flag("use_parallel_residual", True),
    )


_GPT_NEOX_NAMES = TensorNames(
    prefix="gpt_neox.",
    embedding="embed_in",
    final_norm="final_layer_norm",
    head="lm_head",
    other_head="embed_out",
    qkv=("attention.query_key_value",),
    joined_by_heads=True,
    attention_out="attention.dense",
    mlp_in=("mlp.dense_h_to_4h",),
    mlp_out="mlp.dense_4h_to_h",
    ignored=(".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq"),
)


def phi(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a Phi 1, 1.5 or 2: both blocks of a layer read the same norm, and all projections have biases."""
    defaults = Defaults(
        vocab_size=51200,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=24,
        hidden_act="gelu_new",
        has_partial_rotary=True,
        partial_rotary_factor=0.5,
    )
    has_norms = fields.flag("qk_layernorm", False)
    return attrs.evolve(
        base_config(fields, defaults, max_model_len),
        norm=_layer_norm(fields),
        names=_PHI_NAMES,
        gated=False,
        qkv_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        head_bias=True,
        parallel_block=True,
        qk_norm=has_norms,
        qk_norm_bias=has_norms,
    )


_PHI_NAMES = TensorNames(
    final_norm="final_layernorm",
    query_norm="self_attn.q_layernorm",
    key_norm="self_attn.k_layernorm",
    attention_out="self_attn.dense",
    mlp_norm="",
    mlp_in=("mlp.fc1",),
    mlp_out="mlp.fc2",
)


def stablelm(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a StableLM: Llama with layer norms, of which a quarter of each head turns."""
    defaults = Defaults(
        vocab_size=50304,
        hidden_size=2560,
        intermediate_size=6912,
        num_key_value_heads=32,
        max_position_embeddings=4096,
        has_partial_rotary=True,
        partial_rotary_factor=0.25,
    )
    has_norms, is_parallel = fields.flag("qk_layernorm", False), fields.flag("use_parallel_residual", False)
    names = TensorNames(
        query_norm="self_attn.q_layernorm.norms.{head}", key_norm="self_attn.k_layernorm.norms.{head}"
    )
    return attrs.evolve(
        base_config(without(fields, "head_dim"), defaults, max_model_len),
        norm=_layer_norm(fields),
        names=attrs.evolve(names, mlp_norm="") if is_parallel else names,
        qkv_bias=fields.flag("use_qkv_bias", False),
        parallel_block=is_parallel,
        qk_norm=has_norms,
        qk_norm_of_heads=has_norms,
    )


_COHERE = Defaults(
    vocab_size=256_000,
    hidden_size=8192,
    intermediate_size=22528,
    num_hidden_layers=40,
    num_attention_heads=64,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    interleaved_rotary=True,
)


def cohere(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a Command R: both blocks of a layer read the same norm."""
    config = base_config(fields, attrs.evolve(_COHERE, rope_theta=500_000.0), max_model_len)
    has_norms = fields.flag("use_qk_norm", False)
    return attrs.evolve(_cohere(fields, config), qk_norm=has_norms, qk_norm_of_heads=has_norms)


def cohere2(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a Command R7B: both blocks of a layer read the same norm, and only windows encode positions."""
    # transformers computes head_dim, whatever the file says
    config = base_config(without(fields, "head_dim"), _COHERE, max_model_len)
    pattern = full_every(fields, "sliding_window_pattern", 4, len(config.layers))
    window = fields.optional_integer("sliding_window", 4096)
    kinds = layer_types(fields, pattern)
    slides = [kind == SLIDING and window is not None for kind in kinds]
    config = with_layers(config, [{"sliding_window": window} if each else {"rope": None} for each in slides])
    return _cohere(fields, config)


def _cohere(fields: Fields, config: DecoderConfig) -> DecoderConfig:
    return attrs.evolve(
        with_attention_bias(fields, config),
        norm=NormConfig(eps=fields.number("layer_norm_eps", 1e-5), centered=True, biased=False),
        names=TensorNames(mlp_norm=""),
        parallel_block=True,
        logit_scale=positive(fields, "logit_scale", 0.0625),
    )


def jais2(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a Jais 2: an Arcee with layer norms and biases."""
    defaults = Defaults(
        vocab_size=150_272,
        hidden_size=3328,
        intermediate_size=26_624,
        num_attention_heads=26,
        max_position_embeddings=8192,
        hidden_act="relu2",
    )
    config = with_attention_bias(fields, base_config(fields, defaults, max_model_len), default=True)
    return attrs.evolve(
        config,
        norm=_layer_norm(fields),
        names=UNGATED,
        gated=False,
        mlp_bias=fields.flag("mlp_bias", True),
    )


def _layer_norm(fields: Fields) -> NormConfig:
    return NormConfig(eps=fields.number("layer_norm_eps", 1e-5), centered=True)
