"""From config.json to `DecoderConfig`: families with experts."""

from __future__ import annotations

import attrs

from triolet.model.architectures.decoder_config import (
    ClampedGate,
    DecoderConfig,
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
