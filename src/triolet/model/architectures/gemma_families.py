"""From config.json to `DecoderConfig`: Gemma, Gemma 2, Gemma 3 and Gemma 4."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from triolet.model.architectures.decoder_config import (
    DecoderConfig,
    LayerInputsConfig,
    MoeConfig,
    TensorNames,
)
from triolet.model.architectures.family_common import (
    FULL,
    SLIDING,
    Defaults,
    activation_of,
    base_config,
    checked_experts,
    full_every,
    layer_types,
    positive,
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
    scale = positive(fields, "query_pre_attn_scalar", 256) ** -0.5
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
    scale = {"attention_scale": positive(fields, "query_pre_attn_scalar", 256) ** -0.5}
    kinds = layer_types(fields, pattern)
    return attrs.evolve(
        with_layers(config, [scale | sliding if kind == SLIDING else scale for kind in kinds]),
        activation=activation_of(fields, "hidden_activation", defaults.hidden_act),
        names=_GEMMA_NAMES,
        qk_norm=True,
        logit_soft_cap=fields.optional_number("final_logit_softcapping"),
    )


_GEMMA4_NAMES = attrs.evolve(
    _GEMMA_NAMES,
    layer_scale="layer_scalar",
    router="router.proj",
    expert_in=("experts.{expert}.gate_proj", "experts.{expert}.up_proj"),
    expert_out="experts.{expert}.down_proj",
    expert_stacks=(
        (
            "experts.gate_up_proj",
            ("experts.{expert}.gate_proj.weight", "experts.{expert}.up_proj.weight"),
        ),
        ("experts.down_proj", ("experts.{expert}.down_proj.weight",)),
    ),
)
_SHARED = tuple(f"self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm"))


def gemma4(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a Gemma 4: Gemma 3 with heads of two shapes, normed values, and a scale of each layer's output.

    The small ones have inputs of each layer beside the residual stream, and their last layers read the caches of
    earlier ones.
    """
    if fields.text("use_bidirectional_attention", "vision") != "vision":
        raise unsupported(fields, "use_bidirectional_attention", "null or vision: attention is causal")
    defaults = attrs.evolve(
        _GEMMA2, vocab_size=262_144, num_hidden_layers=30, max_position_embeddings=131_072
    )
    parameters = _gemma4_rope_parameters(fields)
    config = base_config(fields, defaults, max_model_len, parameters[SLIDING])
    kinds = layer_types(fields, full_every(fields, "sliding_window_pattern", 6, len(config.layers)))
    kinds = (*kinds[:-1], FULL)  # as transformers has it, whatever the file says
    layers = _gemma4_layers(fields, kinds, config)
    for kind, layer in zip(kinds, layers, strict=True):
        head_dim = layer.get("head_dim", config.head_dim)
        layer["rope"], _ = rope_of(fields, parameters[kind], defaults, head_dim, max_model_len)
    # a checkpoint may have keys and values of layers that do not use them
    unused = tuple(
        f"layers.{index}.{name}"
        for index, layer in enumerate(layers)
        if "reads_cache_of" in layer
        for name in _SHARED
    )
    size = fields.integer("hidden_size_per_layer_input", 256, minimum=0)
    rows = fields.integer("vocab_size_per_layer_input", 262_144)
    return attrs.evolve(
        with_attention_bias(fields, with_layers(config, layers)),
        activation=activation_of(fields, "hidden_activation", defaults.hidden_act),
        names=attrs.evolve(_GEMMA4_NAMES, ignored=(*_GEMMA4_NAMES.ignored, *unused)),
        qk_norm=True,
        value_norm=True,
        layer_inputs=LayerInputsConfig(size=size, vocab_size=rows) if size else None,
        embedding_scale=config.hidden_size**0.5,
        logit_soft_cap=fields.optional_number("final_logit_softcapping"),
    )


def _gemma4_layers(fields: Fields, kinds: Sequence[str], config: DecoderConfig) -> list[dict[str, Any]]:
    """Return the fields of each layer's configuration, but for its positions."""
    moe = _gemma4_experts(fields) if fields.flag("enable_moe_block", False) else None
    whole: dict[str, Any] = {"values_are_keys": fields.flag("attention_k_eq_v", False)}
    by_kind = {SLIDING: {"sliding_window": fields.optional_integer("sliding_window", 512)}, FULL: whole}
    layers = [
        {"attention_scale": 1.0, "moe": moe, **shape, **by_kind[kind]}
        for kind, shape in zip(kinds, _gemma4_heads(fields, kinds, config), strict=True)
    ]
    is_wide = fields.flag("use_double_wide_mlp", False)
    for index, owner in _shared_caches(fields, kinds).items():
        layers[index] |= {"reads_cache_of": owner, "values_are_keys": False}
        if is_wide:
            layers[index]["intermediate_size"] = 2 * config.intermediate_size
    return layers


def _gemma4_experts(fields: Fields) -> MoeConfig:
    for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        if fields.values.get(name) is None:
            raise fields.wrong(name, "given beside enable_moe_block")
    experts = MoeConfig(
        num_experts=fields.integer("num_experts", 1),
        experts_per_token=fields.integer("top_k_experts", 1),
        intermediate_size=fields.integer("moe_intermediate_size", 1),
        normalize=True,
        is_beside_dense=True,
        has_expert_scales=True,
    )
    return checked_experts(fields, experts)


def _gemma4_rope_parameters(fields: Fields) -> dict[str, Fields]:
    """Return the rotary parameters of the layers of each kind."""
    globally, locally = rope_parameters_by_kind(fields)
    if not globally.values:
        share = {"partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0}
        globally = attrs.evolve(globally, values={"rope_type": "proportional", **share})
    return {FULL: globally, SLIDING: locally}


def _gemma4_heads(fields: Fields, kinds: Sequence[str], config: DecoderConfig) -> list[dict[str, Any]]:
    """Return what each layer's heads have in place of the model's shape; it is one for all layers of a kind."""
    by_layer = fields.section("per_layer_config")
    if by_layer is None:
        whole: dict[str, Any] = {"head_dim": fields.integer("global_head_dim", 512)}
        heads = fields.optional_integer("num_global_key_value_heads")
        if heads is not None and fields.flag("attention_k_eq_v", False):
            whole["num_kv_heads"] = heads
        shapes = [whole if kind == FULL else {} for kind in kinds]
    else:
        shapes = [{} for _ in kinds]
        for key in by_layer.values:  # transformers writes "05" where there are more than ten layers
            if not key.isdecimal() or int(key) >= len(kinds):
                raise by_layer.wrong(key, f"under the number of one of {len(kinds)} layers")
            shapes[int(key)] = _own_heads(by_layer.section(key))
    for kind in (SLIDING, FULL):
        found = [shape for shape, its_kind in zip(shapes, kinds, strict=True) if its_kind == kind]
        if any(shape != found[0] for shape in found):
            raise unsupported(fields, "per_layer_config", f"the same for all layers of the kind {kind}")
    for shape in shapes:
        if config.num_heads % shape.get("num_kv_heads", config.num_kv_heads):
            raise fields.wrong("num_attention_heads", f"a multiple of the KV heads of each layer: {shape}")
    return shapes


def _own_heads(layer: Fields | None) -> dict[str, Any]:
    """Return what one layer's heads have in place of the model's shape, of its section in `per_layer_config`."""
    if layer is None:
        return {}
    known = {"head_dim": "head_dim", "num_key_value_heads": "num_kv_heads"}
    for name in layer.values:
        if name not in known:
            raise unsupported(layer, name, f"left out: layers may differ in {' and '.join(known)}")
    return {own: layer.integer(name, 1) for name, own in known.items() if name in layer.values}


def _shared_caches(fields: Fields, kinds: Sequence[str]) -> dict[int, int]:
    """Return of each layer that reads another one's cache: that layer, the last of its kind that has its own."""
    count = fields.integer("num_kv_shared_layers", 0, minimum=0)
    own = kinds[: len(kinds) - count]
    if not set(kinds) <= set(own):
        raise fields.wrong("num_kv_shared_layers", "few enough for a layer of each kind to have a cache")
    last = {kind: index for index, kind in enumerate(own)}
    return {index: last[kinds[index]] for index in range(len(own), len(kinds))}
