"""From config.json to `DecoderConfig`: families with multi-head latent attention, DeepSeek V2 and V3."""

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
    checked_experts,
    rope_parameters_of,
    unsupported,
    with_layers,
)
from triolet.model.architectures.rope import rope_type
from triolet.model.folder.json_fields import Fields

_NAMES = TensorNames(
    shared_in=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    shared_out="mlp.shared_experts.down_proj",
)


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
    config = _latent_config(fields, defaults, max_model_len, is_interleaved=True)
    first_sparse = fields.integer("first_k_dense_replace", 0, minimum=0)
    return _with_experts(fields, config, moe, first_sparse, _NAMES)


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
    if fields.text("scoring_func", "sigmoid") != "sigmoid":
        raise unsupported(fields, "scoring_func", "sigmoid in this family")
    routing = GroupedRouting(
        num_groups=fields.integer("n_group", 8),
        groups_per_token=fields.integer("topk_group", 4),
        group_top=2,
        scale=fields.number("routed_scaling_factor", 2.5),
        is_sigmoid=True,
        is_corrected=True,
    )
    moe = MoeConfig(
        num_experts=fields.integer("num_local_experts", fields.integer("n_routed_experts", 256)),
        experts_per_token=fields.integer("num_experts_per_tok", 8),
        intermediate_size=fields.integer("moe_intermediate_size", 2048),
        normalize=fields.flag("norm_topk_prob", True),
        shared_size=fields.integer("n_shared_experts", 1) * fields.integer("moe_intermediate_size", 2048),
        has_shared_gate=False,
        routing=routing,
    )
    config = _latent_config(
        fields, defaults, max_model_len, is_interleaved=fields.flag("rope_interleave", True)
    )
    # Layers that draft tokens lie behind the last one.
    count = len(config.layers)
    num_drafting = fields.integer("num_mtp_layers", 1, minimum=0)
    num_drafting = fields.integer("num_nextn_predict_layers", num_drafting, minimum=0)
    names = attrs.evolve(
        _NAMES,
        router_correction="mlp.gate.e_score_correction_bias",
        ignored_prefixes=tuple(f"model.layers.{index}." for index in range(count, count + num_drafting)),
    )
    return _with_experts(fields, config, moe, fields.integer("first_k_dense_replace", 3, minimum=0), names)


def _latent_config(
    fields: Fields, defaults: Defaults, max_model_len: int | None, *, is_interleaved: bool
) -> DecoderConfig:
    """Return the configuration with the family's attention, and with a dense feed-forward block in each layer."""
    latent = LatentConfig(
        query_size=fields.optional_integer("q_lora_rank", 1536),
        latent_size=fields.integer("kv_lora_rank", 512),
        rotary_size=fields.integer("qk_rope_head_dim", 64),
        plain_size=fields.integer("qk_nope_head_dim", 128),
        value_size=fields.integer("v_head_dim", 128),
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
    routing = moe.routing
    assert routing is not None
    if moe.num_experts % routing.num_groups or moe.num_experts // routing.num_groups < routing.group_top:
        rule = f"a divisor of n_routed_experts ({moe.num_experts}) that leaves {routing.group_top} in a group"
        raise fields.wrong("n_group", rule)
    if routing.groups_per_token > routing.num_groups:
        raise fields.wrong("topk_group", f"at most n_group, {routing.num_groups}")
    latent = config.layers[0].latent
    if latent is not None and latent.query_size is None:
        names = attrs.evolve(names, query_up="self_attn.q_proj")
    moe = checked_experts(fields, moe)
    sparse = [{"moe": moe if index >= first_sparse else None} for index in range(len(config.layers))]
    return attrs.evolve(with_layers(config, sparse), names=names)
