"""From config.json to `DecoderConfig`: families with experts."""

from __future__ import annotations

import attrs

from triolet.model.architectures.decoder_config import (
    ClampedGate,
    DecoderConfig,
    GroupedRouting,
    MoeConfig,
    TensorNames,
)
from triolet.model.architectures.dense_families import with_granite_multipliers
from triolet.model.architectures.family_common import (
    FULL,
    QWEN,
    SLIDING,
    Defaults,
    base_config,
    checked_experts,
    layer_types,
    rope_parameters_of,
    unsupported,
    window_in_use,
    with_attention_bias,
    with_layers,
    with_window,
    with_windows,
)
from triolet.model.folder.json_fields import Fields


def mixtral(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a Mixtral: Mistral with experts in every layer."""
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
        num_experts=fields.integer("num_experts", fields.integer("num_local_experts", 8)),
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


GRANITE_STACKS = tuple(
    (f"block_sparse_moe.{name}.weight", (f"block_sparse_moe.{name}.{{expert}}.weight",))
    for name in ("input_linear", "output_linear")
)
"""`TensorNames.expert_stacks` of the Granites."""


def granite_moe(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a Granite with experts."""
    config = base_config(fields, Defaults(), max_model_len)
    experts = MoeConfig(
        num_experts=fields.integer("num_local_experts", 8),
        experts_per_token=fields.integer("num_experts_per_tok", 2),
        intermediate_size=config.intermediate_size,
        normalize=True,
    )
    moe = checked_experts(fields, experts)
    names = TensorNames(
        router="block_sparse_moe.router.layer",
        expert_in=("block_sparse_moe.input_linear.{expert}",),
        expert_out="block_sparse_moe.output_linear.{expert}",
        expert_stacks=GRANITE_STACKS,
    )
    config = with_granite_multipliers(fields, with_layers(config, [{"moe": moe}] * len(config.layers)))
    return attrs.evolve(with_attention_bias(fields, config), names=names)


def granite_moe_shared(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a Granite with experts, and one for all tokens."""
    config = granite_moe(fields, max_model_len)
    size, moe = fields.integer("shared_intermediate_size", 0, minimum=0), config.layers[0].moe
    if moe is None or not size:
        return config
    moe = attrs.evolve(moe, shared_size=size, has_shared_gate=False)
    names = attrs.evolve(
        config.names, shared_in=("shared_mlp.input_linear",), shared_out="shared_mlp.output_linear"
    )
    return attrs.evolve(with_layers(config, [{"moe": moe}] * len(config.layers)), names=names)


def olmoe(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read an OLMoE: small experts, queries and keys normalised over all heads."""
    if fields.values.get("clip_qkv") is not None:
        raise unsupported(fields, "clip_qkv", "null: queries, keys and values are not clipped")
    defaults = Defaults(
        vocab_size=50_304,
        hidden_size=2048,
        intermediate_size=2048,
        num_hidden_layers=16,
        num_attention_heads=16,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
    )
    config = base_config(fields, defaults, max_model_len)
    experts = MoeConfig(
        num_experts=fields.integer("num_local_experts", fields.integer("num_experts", 64)),
        experts_per_token=fields.integer("num_experts_per_tok", 8),
        intermediate_size=config.intermediate_size,
        normalize=fields.flag("norm_topk_prob", False),
    )
    moe = checked_experts(fields, experts)
    config = with_layers(config, [{"moe": moe}] * len(config.layers))
    return attrs.evolve(with_attention_bias(fields, config), qk_norm=True, qk_norm_of_rows=True)


def qwen2_moe(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a Qwen 2 with experts, of which one is for all tokens."""
    defaults = attrs.evolve(
        QWEN,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=16,
    )
    config = base_config(fields, defaults, max_model_len)
    count = len(config.layers)
    window = window_in_use(fields, minimum=0)
    last_sliding = fields.integer("max_window_layers", 28, minimum=0) if window else 0
    kinds = layer_types(fields, [FULL if i % 2 or i >= last_sliding else SLIDING for i in range(count)])
    experts = MoeConfig(
        num_experts=fields.integer("num_experts", 60),
        experts_per_token=fields.integer("num_experts_per_tok", 4),
        intermediate_size=fields.integer("moe_intermediate_size", 1408),
        normalize=fields.flag("norm_topk_prob", False),
        shared_size=fields.integer("shared_expert_intermediate_size", 5632),
    )
    moe = checked_experts(fields, experts)
    return attrs.evolve(
        with_layers(
            with_windows(config, kinds, window),
            [{"moe": moe if is_sparse else None} for is_sparse in sparse_layers(fields, count)],
        ),
        qkv_bias=fields.flag("qkv_bias", True),
    )


def sparse_layers(fields: Fields, count: int) -> list[bool]:
    """Return of each layer whether it has experts, by the fields of the Qwens."""
    every, dense = fields.integer("decoder_sparse_step", 1), set(fields.integers("mlp_only_layers"))
    return [(index + 1) % every == 0 and index not in dense for index in range(count)]


def qwen3_moe(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a Qwen 3 with many small experts."""
    defaults = attrs.evolve(
        QWEN, hidden_size=2048, intermediate_size=6144, num_hidden_layers=24, num_key_value_heads=4
    )
    config = base_config(fields, defaults, max_model_len)
    window = window_in_use(fields)
    experts = MoeConfig(
        num_experts=fields.integer("num_local_experts", fields.integer("num_experts", 128)),
        experts_per_token=fields.integer("num_experts_per_tok", 8),
        intermediate_size=fields.integer("moe_intermediate_size", 768),
        normalize=fields.flag("norm_topk_prob", False),
    )
    sparse = sparse_layers(fields, len(config.layers))
    moe = checked_experts(fields, experts)
    config = with_layers(
        with_window(config, window), [{"moe": moe if is_sparse else None} for is_sparse in sparse]
    )
    return attrs.evolve(with_attention_bias(fields, config), qk_norm=True)


def gpt_oss(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a gpt-oss: attention sinks, and experts with biases and clamped gates."""
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
        num_experts=fields.integer("num_experts", fields.integer("num_local_experts", 128)),
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
    config = with_layers(with_windows(config, kinds, window), [{"moe": moe}] * len(kinds))
    return attrs.evolve(
        with_attention_bias(fields, config, default=True),
        mlp_bias=True,
        names=TensorNames(router="mlp.router", sinks="self_attn.sinks", stacked_experts=True),
    )


SHARED_EXPERTS = TensorNames(
    shared_in=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    shared_out="mlp.shared_experts.down_proj",
)
"""Names of the DeepSeeks and of the families that follow them."""


@attrs.frozen(kw_only=True)
class ExpertDefaults:
    """Values that transformers' config class of a family with `sigmoid_experts` fills in."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    num_groups: int = 1
    groups_per_token: int = 1
    scale: float


def sigmoid_experts(fields: Fields, defaults: ExpertDefaults) -> MoeConfig:
    """Read experts as DeepSeek V3 has them: chosen in groups by corrected sigmoids, beside some of all tokens."""
    if fields.text("scoring_func", "sigmoid") != "sigmoid":
        raise unsupported(fields, "scoring_func", "sigmoid in this family")
    intermediate_size = fields.integer("moe_intermediate_size", defaults.intermediate_size)
    return MoeConfig(
        num_experts=fields.integer(
            "num_local_experts", fields.integer("n_routed_experts", defaults.num_experts)
        ),
        experts_per_token=fields.integer("num_experts_per_tok", defaults.experts_per_token),
        intermediate_size=intermediate_size,
        normalize=fields.flag("norm_topk_prob", True),
        shared_size=fields.integer("n_shared_experts", 1) * intermediate_size,
        has_shared_gate=False,
        routing=GroupedRouting(
            num_groups=fields.integer("n_group", defaults.num_groups),
            groups_per_token=fields.integer("topk_group", defaults.groups_per_token),
            group_top=2,
            scale=fields.number("routed_scaling_factor", defaults.scale),
            is_sigmoid=True,
            is_corrected=True,
        ),
    )


def sigmoid_names(fields: Fields, count: int) -> TensorNames:
    """Return the names of a model with `sigmoid_experts`, but for its layers that draft tokens.

    Args:
        fields: of config.json.
        count: number of layers.
    """
    num_drafting = fields.integer("num_mtp_layers", 1, minimum=0)
    num_drafting = fields.integer("num_nextn_predict_layers", num_drafting, minimum=0)
    return attrs.evolve(
        SHARED_EXPERTS,
        router_correction="mlp.gate.e_score_correction_bias",
        # They lie behind the last layer.
        ignored_prefixes=tuple(f"model.layers.{index}." for index in range(count, count + num_drafting)),
    )


def checked_groups(fields: Fields, moe: MoeConfig) -> MoeConfig:
    """Return `moe`, checked: its experts divide into groups, of which a token uses at most all."""
    routing = moe.routing
    assert routing is not None
    if moe.num_experts % routing.num_groups or moe.num_experts // routing.num_groups < routing.group_top:
        rule = f"a divisor of n_routed_experts ({moe.num_experts}) that leaves {routing.group_top} in a group"
        raise fields.wrong("n_group", rule)
    if routing.groups_per_token > routing.num_groups:
        raise fields.wrong("topk_group", f"at most n_group, {routing.num_groups}")
    return checked_experts(fields, moe)


def glm4_moe(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a GLM 4.5, 4.6 or 4.7: half of each head turns, and experts as in DeepSeek V3."""
    defaults = Defaults(
        vocab_size=151_552,
        intermediate_size=10_944,
        num_hidden_layers=46,
        num_attention_heads=96,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        has_partial_rotary=True,
        partial_rotary_factor=0.5,
    )
    experts = ExpertDefaults(num_experts=128, experts_per_token=8, intermediate_size=1408, scale=1.0)
    config = base_config(fields, defaults, max_model_len)
    moe = checked_groups(fields, sigmoid_experts(fields, experts))
    first_sparse = fields.integer("first_k_dense_replace", 1, minimum=0)
    count = len(config.layers)
    return attrs.evolve(
        with_layers(config, [{"moe": moe if index >= first_sparse else None} for index in range(count)]),
        names=sigmoid_names(fields, count),
        qkv_bias=fields.flag("attention_bias", False),
        qk_norm=fields.flag("use_qk_norm", False),
    )
