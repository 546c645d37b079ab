"""From config.json to `DecoderConfig`: Gemma, Gemma 2 and Gemma 3."""

from __future__ import annotations

import attrs

from triolet.model.architectures.decoder_config import DecoderConfig, TensorNames
from triolet.model.architectures.family_common import (
    FULL,
    SLIDING,
    Defaults,
    activation_of,
    base_config,
    full_every,
    layer_types,
    rope_of,
    rope_parameters_by_kind,
    unsupported,
    with_attention_bias,
    with_layers,
    with_windows,
)
from triolet.model.folder.json_fields import Fields

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
    return attrs.evolve(
        with_attention_bias(fields, base),
        norm=attrs.evolve(base.norm, weight_offset=1.0),
        embedding_scale=base.hidden_size**0.5,
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


def gemma(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a Gemma: Llama with norm weights counted from 1 and scaled embeddings."""
    config = _gemma_like(fields, _GEMMA, max_model_len)
    # the first releases say `gelu` and mean its tanh form
    return attrs.evolve(config, activation="gelu_tanh" if config.activation == "gelu" else config.activation)


def gemma2(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a Gemma 2: Gemma with norms around each block, capped scores, and a window in every other layer."""
    config = _gemma_like(fields, _GEMMA2, max_model_len)
    kinds = layer_types(fields, [(SLIDING, FULL)[index % 2] for index in range(len(config.layers))])
    window = fields.optional_integer("sliding_window", 4096)
    scale = fields.number("query_pre_attn_scalar", 256) ** -0.5
    return attrs.evolve(
        with_layers(with_windows(config, kinds, window), [{"attention_scale": scale}] * len(kinds)),
        activation=activation_of(fields, "hidden_activation", _GEMMA2.hidden_act),
        names=_GEMMA_NAMES,
        attention_soft_cap=fields.optional_number("attn_logit_softcapping", 50.0),
        logit_soft_cap=fields.optional_number("final_logit_softcapping", 30.0),
    )


def gemma3(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a Gemma 3: Gemma 2 with norms of queries and keys in place of caps, and two rotary encodings."""
    if fields.optional_number("attn_logit_softcapping") is not None:
        raise unsupported(fields, "attn_logit_softcapping", "null: Gemma 3 does not cap attention scores")
    defaults = attrs.evolve(_GEMMA2, vocab_size=262_208, max_position_embeddings=131_072)
    globally, locally = rope_parameters_by_kind(fields)
    config = _gemma_like(fields, attrs.evolve(defaults, rope_theta=1_000_000.0), max_model_len, globally)
    # local layers never take the config's own rope_theta, which is the global one
    local_theta = fields.number("rope_local_base_freq", 10_000.0)
    locally = attrs.evolve(locally, values={"rope_theta": local_theta, **locally.values})
    local_rope, _ = rope_of(fields, locally, defaults, config.head_dim, max_model_len)

    pattern = full_every(fields, "sliding_window_pattern", 6, len(config.layers))
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
