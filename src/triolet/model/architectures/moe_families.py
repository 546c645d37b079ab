"""From config.json to `DecoderConfig`: families with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from triolet.model.architectures.decoder_config import (
    ClampedGate,
    DecoderConfig,
    GroupedRouting,
    MoeConfig,
    TensorNames,
)
from triolet.model.architectures.dense_families import (
    ERNIE,
    hunyuan,
    with_exaone_windows,
    with_granite_multipliers,
)
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
    moe = [checked_experts(fields, experts)] * len(config.layers)
    return attrs.evolve(with_layers(config, [{"moe": each} for each in moe]), names=MIXTRAL_NAMES)


MIXTRAL_NAMES = TensorNames(
    router="block_sparse_moe.gate",
    expert_in=("block_sparse_moe.experts.{expert}.w1", "block_sparse_moe.experts.{expert}.w3"),
    expert_out="block_sparse_moe.experts.{expert}.w2",
)


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


def minimax_m2(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a MiniMax M2: Mixtral with experts chosen by sigmoids, queries and keys normalised over all heads."""
    defaults = Defaults(
        vocab_size=200_064,
        hidden_size=3072,
        intermediate_size=1536,
        num_hidden_layers=62,
        num_attention_heads=48,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=196_608,
        rope_theta=5_000_000.0,
        has_partial_rotary=True,
    )
    # What the makers' files have in place of a share.
    if (rotary_dim := fields.optional_integer("rotary_dim")) is not None:
        share = rotary_dim / fields.integer("head_dim", 128)
        fields = attrs.evolve(fields, values={"partial_rotary_factor": share, **fields.values})
    config = base_config(fields, defaults, max_model_len)
    experts = MoeConfig(
        num_experts=fields.integer("num_experts", fields.integer("num_local_experts", 256)),
        experts_per_token=fields.integer("num_experts_per_tok", 8),
        intermediate_size=config.intermediate_size,
        normalize=True,
        routing=_of_one_group(is_sigmoid=True, is_corrected=True),
    )
    names = attrs.evolve(MIXTRAL_NAMES, router_correction="block_sparse_moe.e_score_correction_bias")
    moe = checked_experts(fields, experts)
    config = with_layers(config, [{"moe": moe}] * len(config.layers))
    return attrs.evolve(config, names=names, qk_norm=True, qk_norm_of_rows=True)


def _of_one_group(*, is_sigmoid: bool, is_corrected: bool) -> GroupedRouting:
    return GroupedRouting(
        num_groups=1,
        groups_per_token=1,
        group_top=1,
        scale=1.0,
        is_sigmoid=is_sigmoid,
        is_corrected=is_corrected,
    )


def ernie4_5_moe(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read an ERNIE 4.5 with experts, and some for all tokens."""
    if fields.number("moe_norm_min", 1e-12) > 1e-6:
        raise unsupported(fields, "moe_norm_min", "at most 1e-6: shares are divided by their sum")
    defaults = attrs.evolve(
        ERNIE,
        hidden_size=2560,
        intermediate_size=12_288,
        num_hidden_layers=28,
        num_attention_heads=20,
        num_key_value_heads=4,
        head_dim=None,
    )
    config = base_config(fields, defaults, max_model_len)
    count = len(config.layers)
    size, num_shared = (
        fields.integer("moe_intermediate_size", 1536),
        fields.integer("moe_num_shared_experts", 2, minimum=0),
    )
    experts = MoeConfig(
        num_experts=fields.integer("num_experts", fields.integer("moe_num_experts", 64)),
        experts_per_token=fields.integer("num_experts_per_tok", fields.integer("moe_k", 6)),
        intermediate_size=size,
        normalize=True,
        shared_size=num_shared * size or None,
        has_shared_gate=False,
        routing=_of_one_group(is_sigmoid=False, is_corrected=True),
    )
    first = fields.integer("moe_layer_start_index", 1, minimum=0)
    last = fields.integer("moe_layer_end_index", -1, minimum=-1)
    last, every = count - 1 if last == -1 else last, fields.integer("moe_layer_interval", 1)
    moe = checked_experts(fields, experts)
    sparse = [first <= index <= last and (index + 1) % every == 0 for index in range(count)]
    return attrs.evolve(
        with_layers(config, [{"moe": moe if is_sparse else None} for is_sparse in sparse]),
        names=attrs.evolve(
            SHARED_EXPERTS,
            router_correction="mlp.moe_statics.e_score_correction_bias",
            correction_is_row=True,
            ignored_prefixes=("mtp", "model.mtp"),  # of layers that draft tokens
        ),
    )


def has_no_biases(config: Mapping[str, Any]) -> bool:
    """Return whether an ERNIE 4.5 with experts has no biases: they are of all its projections but the experts'."""
    return not config.get("use_bias")


def hunyuan_moe(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a HunYuan with experts, and a block of all tokens beside them."""
    config = hunyuan(fields, max_model_len)
    count = len(config.layers)
    each = fields.values.get("moe_topk")
    used = fields.integers("moe_topk") if isinstance(each, list) else (fields.integer("moe_topk", 1),) * count
    if "num_experts_per_tok" in fields:
        used = (fields.integer("num_experts_per_tok", 1),) * count
    if len(used) != count:
        raise fields.wrong("moe_topk", f"a number, or one for each of {count} layers")
    experts = [
        MoeConfig(
            num_experts=fields.integer("num_local_experts", fields.integer("num_experts", 1)),
            experts_per_token=each,
            intermediate_size=config.intermediate_size,
            normalize=True,
            shared_size=config.intermediate_size,
            has_shared_gate=False,
        )
        for each in used
    ]
    names = attrs.evolve(
        config.names,
        router="mlp.gate.wg",
        shared_in=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
        shared_out="mlp.shared_mlp.down_proj",
    )
    layers = with_layers(config, [{"moe": checked_experts(fields, moe)} for moe in experts])
    return attrs.evolve(layers, names=names)


def exaone_moe(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read an EXAONE with experts as in DeepSeek V3; layers without a window do not encode positions."""
    defaults = Defaults(
        vocab_size=102_400, intermediate_size=16_384, num_key_value_heads=32, rms_norm_eps=1e-5
    )
    experts = ExpertDefaults(
        num_experts=64,
        experts_per_token=8,
        intermediate_size=1024,
        scale=2.5,
        count_name="num_experts",
        shared_name="num_shared_experts",
    )
    config = with_exaone_windows(fields, base_config(fields, defaults, max_model_len))
    moe = checked_groups(fields, sigmoid_experts(fields, experts))
    count, first_sparse = len(config.layers), fields.integer("first_k_dense_replace", 1, minimum=0)
    kinds = fields.texts("mlp_layer_types") or tuple(
        "sparse" if index >= first_sparse else "dense" for index in range(count)
    )
    if len(kinds) != count or not set(kinds) <= {"sparse", "dense"}:
        raise unsupported(fields, "mlp_layer_types", f"{count} times sparse or dense")
    return attrs.evolve(
        with_layers(config, [{"moe": moe if kind == "sparse" else None} for kind in kinds]),
        names=attrs.evolve(
            SHARED_EXPERTS, router_correction="mlp.e_score_correction_bias", ignored_prefixes=("mtp.",)
        ),
        qk_norm=True,
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
    # Fields with the number of experts, and of those of all tokens.
    count_name: str = "n_routed_experts"
    shared_name: str = "n_shared_experts"


def sigmoid_experts(fields: Fields, defaults: ExpertDefaults) -> MoeConfig:
    """Read experts as DeepSeek V3 has them: chosen in groups by corrected sigmoids, beside some of all tokens."""
    if fields.text("scoring_func", "sigmoid") != "sigmoid":
        raise unsupported(fields, "scoring_func", "sigmoid in this family")
    intermediate_size = fields.integer("moe_intermediate_size", defaults.intermediate_size)
    return MoeConfig(
        num_experts=fields.integer(
            "num_local_experts", fields.integer(defaults.count_name, defaults.num_experts)
        ),
        experts_per_token=fields.integer("num_experts_per_tok", defaults.experts_per_token),
        intermediate_size=intermediate_size,
        normalize=fields.flag("norm_topk_prob", True),
        shared_size=fields.integer(defaults.shared_name, 1) * intermediate_size,
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


_MOST_DRAFTING = 1024
"""Layers that draft tokens; models have one or a few."""


def sigmoid_names(fields: Fields, count: int) -> TensorNames:
    """Return the names of a model with `sigmoid_experts`, but for its layers that draft tokens.

    Args:
        fields: of config.json.
        count: number of layers.
    """
    num_drafting = fields.integer("num_mtp_layers", 1, minimum=0)
    num_drafting = fields.integer("num_nextn_predict_layers", num_drafting, minimum=0)
    if num_drafting > _MOST_DRAFTING:  # each has a name
        name = "num_nextn_predict_layers" if "num_nextn_predict_layers" in fields else "num_mtp_layers"
        raise fields.wrong(name, f"at most {_MOST_DRAFTING}")
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
        rule = f"a divisor of the number of experts ({moe.num_experts}) that leaves {routing.group_top} in a group"
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


def solar_open(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a Solar Open: Llama with experts as in DeepSeek V3."""
    defaults = Defaults(
        vocab_size=196_608,
        num_hidden_layers=48,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        rope_theta=1_000_000.0,
    )
    experts = ExpertDefaults(num_experts=128, experts_per_token=8, intermediate_size=1280, scale=1.0)
    config = base_config(fields, defaults, max_model_len)
    moe = checked_groups(fields, sigmoid_experts(fields, experts))
    return attrs.evolve(
        with_layers(config, [{"moe": moe}] * len(config.layers)),
        names=attrs.evolve(SHARED_EXPERTS, router_correction="mlp.gate.e_score_correction_bias"),
        qkv_bias=fields.flag("attention_bias", False),
    )
