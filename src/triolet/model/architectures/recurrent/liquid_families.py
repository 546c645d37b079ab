"""From config.json to `DecoderConfig`: Liquid's families, of which most layers are short convolutions."""

from __future__ import annotations

import math
from typing import Any

import attrs

from triolet.model.architectures.decoder_config import (
    DecoderConfig,
    GroupedRouting,
    MoeConfig,
    TensorNames,
)
from triolet.model.architectures.family_common import (
    FULL,
    SLIDING,
    Defaults,
    base_config,
    checked_experts,
    recurrent_kinds,
    rope_of,
    rope_parameters_by_kind,
    unsupported,
    with_attention_bias,
    with_layers,
)
from triolet.model.architectures.recurrent.configs import ShortConvolutionConfig
from triolet.model.folder.json_fields import Fields

_CONVOLUTION = "conv"

_LFM2 = Defaults(
    vocab_size=65536,
    hidden_size=2560,
    intermediate_size=12288,
    num_key_value_heads=8,
    max_position_embeddings=128_000,
    rope_theta=1_000_000.0,
    tie_word_embeddings=True,
)
_LFM2_NAMES = TensorNames(
    final_norm="embedding_norm",
    attention_norm="operator_norm",
    query_norm="self_attn.q_layernorm",
    key_norm="self_attn.k_layernorm",
    attention_out="self_attn.out_proj",
    mlp_norm="ffn_norm",
    mlp_in=("feed_forward.w1", "feed_forward.w3"),
    mlp_out="feed_forward.w2",
    router="feed_forward.gate",
    expert_in=("feed_forward.experts.{expert}.w1", "feed_forward.experts.{expert}.w3"),
    expert_out="feed_forward.experts.{expert}.w2",
    recurrent_in=("conv.in_proj",),
    recurrent_convolution="conv.conv",
    recurrent_out="conv.out_proj",
)


def lfm2(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a Liquid LFM2: short convolutions, and a few layers with attention."""
    config = _lfm2(fields, max_model_len, _LFM2)
    size = _adjusted(fields, fields.integer("block_ff_dim", config.intermediate_size))
    return attrs.evolve(config, intermediate_size=size)


def lfm2_moe(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a Liquid LFM2 with experts, which are chosen by sigmoids."""
    config = _lfm2(fields, max_model_len, attrs.evolve(_LFM2, hidden_size=2048, intermediate_size=7168))
    is_corrected = fields.flag("use_expert_bias", True)
    experts = MoeConfig(
        num_experts=fields.integer("num_experts", 32),
        experts_per_token=fields.integer("num_experts_per_tok", 4),
        intermediate_size=fields.integer("moe_intermediate_size", 1792),
        normalize=fields.flag("norm_topk_prob", True),
        routing=GroupedRouting(
            num_groups=1,
            groups_per_token=1,
            group_top=1,
            scale=fields.number("routed_scaling_factor", 1.0),
            is_sigmoid=True,
            is_corrected=is_corrected,
        ),
    )
    moe, num_dense = checked_experts(fields, experts), fields.integer("num_dense_layers", 2, minimum=0)
    sparse = [{"moe": moe if index >= num_dense else None} for index in range(len(config.layers))]
    names = attrs.evolve(_LFM2_NAMES, router_correction="feed_forward.expert_bias" if is_corrected else "")
    return attrs.evolve(with_layers(config, sparse), names=names)


def lfm3(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a Liquid LFM3: LFM2 with windows, gates of heads, and norms behind the blocks as well."""
    defaults = Defaults(
        vocab_size=128_000,
        hidden_size=2048,
        intermediate_size=7680,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=128_000,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
    )
    globally, locally = _lfm3_rope_parameters(fields)
    config = base_config(fields, defaults, max_model_len, globally)
    local_rope, _ = rope_of(fields, locally, defaults, config.head_dim, max_model_len)
    convolution, window = (
        _short_convolution(fields, config, 7),
        fields.optional_integer("sliding_window", 256),
    )
    of_kinds: dict[str, dict[str, Any]] = {
        _CONVOLUTION: {"recurrent": convolution},
        SLIDING: {"sliding_window": window, "rope": local_rope},
        FULL: {},
    }
    default = [
        {2: FULL, 0: SLIDING if index else _CONVOLUTION}.get(index % 4, _CONVOLUTION)
        for index in range(len(config.layers))
    ]
    kinds = fields.texts("layer_types") or default
    if len(kinds) != len(default) or not set(kinds) <= of_kinds.keys():
        raise unsupported(fields, "layer_types", f"{len(default)} times {', '.join(of_kinds)}")
    names = attrs.evolve(
        _LFM2_NAMES,
        query_norm="self_attn.q_norm",
        key_norm="self_attn.k_norm",
        attention_out="self_attn.o_proj",
    )
    if fields.flag("use_sandwich_norm", True):
        names = attrs.evolve(names, post_attention_norm="post_operator_norm", post_mlp_norm="post_ffn_norm")
    # In this family the config class knows both names.
    eps = fields.number("rms_norm_eps", fields.number("norm_eps", 1e-5))
    return attrs.evolve(
        with_attention_bias(fields, with_layers(config, [of_kinds[kind] for kind in kinds])),
        norm=attrs.evolve(config.norm, eps=eps),
        activation="silu",
        qk_norm=True,
        head_gate=fields.flag("use_attention_gate", True),
        names=names,
    )


def _lfm3_rope_parameters(fields: Fields) -> tuple[Fields, Fields]:
    """Return the rotary parameters of the layers without and of those with a window."""
    if fields.section("rope_parameters") is not None:
        return rope_parameters_by_kind(fields)
    whole = {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5}
    return (
        Fields(fields.path, whole, "rope_parameters."),
        Fields(fields.path, {"rope_theta": 10_000.0}, "rope_parameters."),
    )


def _short_convolution(fields: Fields, config: DecoderConfig, kernel_size: int) -> ShortConvolutionConfig:
    return ShortConvolutionConfig(
        channels=config.hidden_size,
        kernel_size=fields.integer("conv_L_cache", kernel_size, minimum=2),
        bias=fields.flag("conv_bias", False),
    )


def _lfm2(fields: Fields, max_model_len: int | None, defaults: Defaults) -> DecoderConfig:
    config = base_config(fields, defaults, max_model_len)
    convolution = _short_convolution(fields, config, 3)
    count = len(config.layers)
    attending = fields.integers("full_attn_idxs") if "full_attn_idxs" in fields else range(count)
    default = [FULL if index in attending else _CONVOLUTION for index in range(count)]
    kinds = recurrent_kinds(fields, default, _CONVOLUTION)
    return attrs.evolve(
        with_layers(config, [{"recurrent": None if kind == FULL else convolution} for kind in kinds]),
        norm=attrs.evolve(config.norm, eps=fields.number("norm_eps", 1e-5)),
        tied_head=fields.flag("tie_embedding", config.tied_head),
        activation="silu",
        qk_norm=True,
        names=_LFM2_NAMES,
    )


def _adjusted(fields: Fields, size: int) -> int:
    """Return the numbers within a feed-forward block: two thirds, times a factor, rounded up."""
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return size
    multiple = fields.integer("block_multiple_of", 256)
    size = int(fields.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    return multiple * math.ceil(size / multiple)
