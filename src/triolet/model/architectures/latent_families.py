"""From config.json to `DecoderConfig`: families with multi-head latent attention, DeepSeek V2 and V3, GLM 4.7 Flash."""

from __future__ import annotations

import math

import attrs

from triolet.model.architectures.decoder_config import (
    DecoderConfig,
    GroupedRouting,
    LatentConfig,
    MoeConfig,
    TensorNames,
)
from triolet.model.architectures.family_common import (
    Defaults,
    base_config,
    rope_parameters_of,
    unsupported,
    with_layers,
)
from triolet.model.architectures.moe_families import (
    SHARED_EXPERTS,
    ExpertDefaults,
    checked_groups,
    sigmoid_experts,
    sigmoid_names,
)
from triolet.model.architectures.rope import rope_type
from triolet.model.folder.json_fields import Fields


def deepseek_v2(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a DeepSeek V2."""
    defaults = Defaults(vocab_size=102_400)
    method = fields.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise unsupported(fields, "topk_method", "greedy or group_limited_greedy")
    for name in ("norm_topk_prob", "mlp_bias"):
        if fields.flag(name, False):
            raise unsupported(fields, name, "false in this family")
    if fields.text("scoring_func", "softmax") != "softmax":
        raise unsupported(fields, "scoring_func", "softmax in this family")
    experts_per_token = fields.optional_integer("num_experts_per_tok")
    if experts_per_token is None:
        raise fields.wrong("num_experts_per_tok", "an integer of at least 1")
    is_grouped = method == "group_limited_greedy"
    routing = GroupedRouting(
        num_groups=fields.integer("n_group", 1) if is_grouped else 1,
        groups_per_token=fields.integer("topk_group", 1) if is_grouped else 1,
        group_top=1,
        scale=fields.number("routed_scaling_factor", 1.0),
    )
    moe = MoeConfig(
        num_experts=fields.integer("num_experts", fields.integer("n_routed_experts", 64)),
        experts_per_token=experts_per_token,
        intermediate_size=fields.integer("moe_intermediate_size", 1407),
        normalize=False,
        shared_size=fields.integer("n_shared_experts", 2) * fields.integer("moe_intermediate_size", 1407),
        has_shared_gate=False,
        routing=routing,
    )
    config = latent_config(fields, defaults, max_model_len, is_interleaved=True)
    first_sparse = fields.integer("first_k_dense_replace", 0, minimum=0)
    return _with_experts(fields, config, moe, first_sparse, SHARED_EXPERTS)


def deepseek_v3(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a DeepSeek V3 or R1, or another model of this architecture, such as Kimi K2."""
    defaults = Defaults(
        vocab_size=129_280,
        hidden_size=7168,
        intermediate_size=18_432,
        num_hidden_layers=61,
        num_attention_heads=128,
        num_key_value_heads=128,
        max_position_embeddings=4096,
    )
    experts = ExpertDefaults(
        num_experts=256,
        experts_per_token=8,
        intermediate_size=2048,
        num_groups=8,
        groups_per_token=4,
        scale=2.5,
    )
    config = latent_config(
        fields, defaults, max_model_len, is_interleaved=fields.flag("rope_interleave", True)
    )
    first_sparse = fields.integer("first_k_dense_replace", 3, minimum=0)
    names = sigmoid_names(fields, len(config.layers))
    return _with_experts(fields, config, sigmoid_experts(fields, experts), first_sparse, names)


def youtu(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a Youtu: the attention of DeepSeek V3, and a dense feed-forward block in each layer."""
    defaults = Defaults(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=6144,
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=131_072,
        tie_word_embeddings=True,
    )
    is_interleaved = fields.flag("rope_interleave", True)
    config = latent_config(fields, defaults, max_model_len, is_interleaved=is_interleaved)
    return attrs.evolve(config, names=with_query_name(config, TensorNames()))


def glm4_moe_lite(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a GLM 4.7 Flash: a small DeepSeek V3."""
    defaults = Defaults(
        vocab_size=154_880,
        hidden_size=2048,
        intermediate_size=10_240,
        num_hidden_layers=47,
        num_attention_heads=20,
        num_key_value_heads=20,
        max_position_embeddings=202_752,
        rms_norm_eps=1e-5,
        has_partial_rotary=True,
    )
    experts = ExpertDefaults(num_experts=64, experts_per_token=4, intermediate_size=1536, scale=1.8)
    # as in transformers, the general name wins over DeepSeek's
    rotary_size = fields.integer("head_dim", fields.integer("qk_rope_head_dim", 64))
    fields = attrs.evolve(fields, values={**fields.values, "qk_rope_head_dim": rotary_size})
    latent = LatentConfig(query_size=768, latent_size=512, rotary_size=64, plain_size=192, value_size=256)
    is_interleaved = fields.flag("rope_interleave", True)
    config = latent_config(fields, defaults, max_model_len, latent, is_interleaved=is_interleaved)
    count = len(config.layers)
    kinds = fields.texts("mlp_layer_types") or ("dense", *("sparse",) * (count - 1))
    first_sparse = kinds.count("dense")
    if kinds != ("dense",) * first_sparse + ("sparse",) * (count - first_sparse):
        raise unsupported(fields, "mlp_layer_types", f"{count} times dense or sparse, dense ones first")
    names = sigmoid_names(fields, count)
    return _with_experts(fields, config, sigmoid_experts(fields, experts), first_sparse, names)


_DEEPSEEK_LATENT = LatentConfig(
    query_size=1536, latent_size=512, rotary_size=64, plain_size=128, value_size=128
)


def latent_config(
    fields: Fields,
    defaults: Defaults,
    max_model_len: int | None,
    default: LatentConfig = _DEEPSEEK_LATENT,
    *,
    is_interleaved: bool,
) -> DecoderConfig:
    """Return the configuration with the family's attention, and with a dense feed-forward block in each layer."""
    latent = LatentConfig(
        query_size=fields.optional_integer("q_lora_rank", default.query_size),
        latent_size=fields.integer("kv_lora_rank", default.latent_size),
        rotary_size=fields.integer("qk_rope_head_dim", default.rotary_size),
        plain_size=fields.integer("qk_nope_head_dim", default.plain_size),
        value_size=fields.integer("v_head_dim", default.value_size),
    )
    config = base_config(fields, attrs.evolve(defaults, head_dim=latent.rotary_size), max_model_len)
    if config.head_dim != latent.rotary_size:
        raise unsupported(fields, "head_dim", f"qk_rope_head_dim, {latent.rotary_size}")
    if config.num_kv_heads != config.num_heads:
        raise unsupported(fields, "num_key_value_heads", f"the number of attention heads, {config.num_heads}")
    bias = fields.flag("attention_bias", False)
    scale = _attention_scale(fields, latent)
    changed = [
        {
            "latent": latent,
            "attention_scale": scale,
            "rope": None if layer.rope is None else attrs.evolve(layer.rope, interleaved=is_interleaved),
        }
        for layer in config.layers
    ]
    return attrs.evolve(
        with_layers(config, changed),
        num_kv_heads=1,
        head_dim=latent.cached_size,
        qkv_bias=bias,
        attention_out_bias=bias,
    )


def _attention_scale(fields: Fields, latent: LatentConfig) -> float:
    scale: float = (latent.plain_size + latent.rotary_size) ** -0.5
    parameters = rope_parameters_of(fields)
    growth, factor = parameters.number("mscale_all_dim", 0.0), parameters.number("factor", 1.0)
    if rope_type(parameters) == "default" or not growth or factor <= 1:
        return scale
    return scale * (0.1 * growth * math.log(factor) + 1.0) ** 2


def _with_experts(
    fields: Fields, config: DecoderConfig, moe: MoeConfig, first_sparse: int, names: TensorNames
) -> DecoderConfig:
    """Give the layers from `first_sparse` on experts."""
    if fields.integer("moe_layer_freq", 1) != 1:
        raise unsupported(fields, "moe_layer_freq", "1: every layer after the dense ones has experts")
    names = with_query_name(config, names)
    moe = checked_groups(fields, moe)
    sparse = [{"moe": moe if index >= first_sparse else None} for index in range(len(config.layers))]
    return attrs.evolve(with_layers(config, sparse), names=names)


def with_query_name(config: DecoderConfig, names: TensorNames) -> TensorNames:
    """Return the names of tensors where queries may come from the residual stream itself."""
    latent = config.layers[0].latent
    is_direct = latent is not None and latent.query_size is None
    return attrs.evolve(names, query_up="self_attn.q_proj") if is_direct else names
