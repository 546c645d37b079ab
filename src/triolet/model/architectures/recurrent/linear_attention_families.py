"""From config.json to `DecoderConfig`: families of which most layers have linear attention of a kind of their own."""

from __future__ import annotations

from typing import Any

import attrs

from triolet.model.architectures.decoder_config import (
    DecoderConfig,
    LatentConfig,
    MoeConfig,
    NormResiduals,
    TensorNames,
)
from triolet.model.architectures.dense_families import POST_NORM_NAMES
from triolet.model.architectures.family_common import (
    FULL,
    LINEAR,
    Defaults,
    base_config,
    checked_experts,
    recurrent_kinds,
    rope_parameters_of,
    unsupported,
    with_aliases,
    with_attention_bias,
    with_layers,
)
from triolet.model.architectures.latent_families import latent_config, with_query_name
from triolet.model.architectures.moe_families import (
    MIXTRAL_NAMES,
    ExpertDefaults,
    checked_groups,
    sigmoid_experts,
)
from triolet.model.architectures.recurrent.configs import DeltaNetConfig, KimiDeltaConfig, LightningConfig
from triolet.model.folder.json_fields import Fields

_OLMO_NAMES: dict[str, Any] = {
    "recurrent_in": (
        "linear_attn.q_proj",
        "linear_attn.k_proj",
        "linear_attn.v_proj",
        "linear_attn.g_proj",
    ),
    "recurrent_rates": ("linear_attn.b_proj", "linear_attn.a_proj"),
    "recurrent_convolution": "linear_attn.conv1d",
    "recurrent_convolutions": ("linear_attn.q_conv1d", "linear_attn.k_conv1d", "linear_attn.v_conv1d"),
    "recurrent_norm": "linear_attn.o_norm",
    "recurrent_out": "linear_attn.o_proj",
    "recurrent_step_bias": "linear_attn.dt_bias",
    "recurrent_decay": "linear_attn.A_log",
    # Files have the norms of recurrent layers under names of their own, transformers has them under Llama's.
    "other_parts": (
        ("attention_layer_norm", "input_layernorm"),
        ("feedforward_layer_norm", "post_attention_layernorm"),
        ("post_attention_layernorm", "feedforward_layer_norm"),
    ),
}


def olmo_hybrid(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read an OLMo Hybrid: gated delta nets between norms, every fourth layer with attention as in OLMo 3."""
    defaults = Defaults(
        vocab_size=100_352,
        hidden_size=3840,
        num_attention_heads=30,
        max_position_embeddings=65_536,
    )
    config = base_config(fields, defaults, max_model_len)
    count = len(config.layers)
    pattern = [FULL if index % 4 == 3 else LINEAR for index in range(count)]
    if FULL not in pattern:
        pattern[-1] = FULL
    delta_net, pre_norms = (
        _olmo_delta_net(fields, config),
        TensorNames(attention_norm="attention_layer_norm", mlp_norm="feedforward_layer_norm"),
    )
    recurrent: dict[str, Any] = {"recurrent": delta_net, "names": pre_norms, "rope": None}
    plain: dict[str, Any] = {} if _has_positions(fields) else {"rope": None}
    changes = [recurrent if kind == LINEAR else plain for kind in recurrent_kinds(fields, pattern)]
    return attrs.evolve(
        with_attention_bias(fields, with_layers(config, changes)),
        names=attrs.evolve(POST_NORM_NAMES, **_OLMO_NAMES),
        qk_norm=True,
        qk_norm_of_rows=True,
    )


def _has_positions(fields: Fields) -> bool:
    """Tell whether queries and keys turn: a base that is null, as in the published files, is none."""
    for values in (rope_parameters_of(fields).values, fields.values):
        if "rope_theta" in values:
            return values["rope_theta"] is not None
    return True


def _olmo_delta_net(fields: Fields, config: DecoderConfig) -> DeltaNetConfig:
    num_key_heads = fields.integer("linear_num_key_heads", config.num_heads)
    key_dim = fields.integer("linear_key_head_dim", int(0.75 * config.hidden_size / num_key_heads))
    delta_net = DeltaNetConfig(
        num_heads=fields.integer("linear_num_value_heads", config.num_heads),
        num_key_heads=num_key_heads,
        key_dim=key_dim,
        value_dim=fields.integer("linear_value_head_dim", 2 * key_dim),
        kernel_size=fields.integer("linear_conv_kernel_dim", 4, minimum=2),
        rate_scale=2.0 if fields.flag("linear_allow_neg_eigval", True) else 1.0,
        norm_eps=1e-5,
    )
    if delta_net.num_heads != num_key_heads:
        # transformers does not repeat them.
        raise unsupported(fields, "linear_num_key_heads", f"linear_num_value_heads, {delta_net.num_heads}")
    return delta_net


def minimax(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a MiniMax-01: a Mixtral of which most layers have lightning attention, and which adds to its norms."""
    defaults = Defaults(
        intermediate_size=14_336,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        rope_theta=1_000_000.0,
    )
    config = base_config(fields, defaults, max_model_len)
    count = len(config.layers)
    experts = MoeConfig(
        num_experts=fields.integer("num_experts", fields.integer("num_local_experts", 8)),
        experts_per_token=fields.integer("num_experts_per_tok", 2),
        intermediate_size=config.intermediate_size,
        normalize=True,
    )
    moe, window = checked_experts(fields, experts), fields.optional_integer("sliding_window")
    factors = {kind: _factors(fields, name) for kind, name in ((FULL, "full_attn"), (LINEAR, "linear_attn"))}
    mlp = _factors(fields, "mlp")
    kinds = recurrent_kinds(fields, [LINEAR if index % 2 else FULL for index in range(count)])
    changes: list[dict[str, Any]] = [
        {
            "moe": moe,
            "norm_residuals": NormResiduals(attention=factors[kind], mlp=mlp),
            **(
                {"sliding_window": window}
                if kind == FULL
                else {"recurrent": _lightning(config, index, count), "rope": None}
            ),
        }
        for index, kind in enumerate(kinds)
    ]
    names = attrs.evolve(
        MIXTRAL_NAMES,
        recurrent_in=("self_attn.qkv_proj",),
        recurrent_gates=("self_attn.output_gate",),
        recurrent_norm="self_attn.norm",
        recurrent_out="self_attn.out_proj",
        recurrent_decay="self_attn.slope_rate",
        # They follow from the slopes.
        ignored=("rotary_emb.inv_freq", ".query_decay", ".key_decay", ".diagonal_decay"),
    )
    return attrs.evolve(with_layers(config, changes), names=names)


def _factors(fields: Fields, name: str) -> tuple[float, float]:
    return fields.number(f"{name}_alpha_factor", 1.0), fields.number(f"{name}_beta_factor", 1.0)


def _lightning(config: DecoderConfig, index: int, count: int) -> LightningConfig:
    """Return the heads of a layer, whose past decays the slower the later the layer is."""
    base = 2.0 ** (-8.0 / config.num_heads)
    factor = 1.0 - index / (count - 1 + 1e-5) + 1e-5
    slopes = tuple(base ** (head + 1) * factor for head in range(config.num_heads))
    return LightningConfig(head_dim=config.head_dim, slopes=slopes)


_KIMI_ALIASES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
_KIMI_NAMES = TensorNames(
    router="block_sparse_moe.gate",
    router_correction="block_sparse_moe.gate.e_score_correction_bias",
    expert_in=("block_sparse_moe.experts.{expert}.w1", "block_sparse_moe.experts.{expert}.w3"),
    expert_out="block_sparse_moe.experts.{expert}.w2",
    shared_in=("block_sparse_moe.shared_experts.gate_proj", "block_sparse_moe.shared_experts.up_proj"),
    shared_out="block_sparse_moe.shared_experts.down_proj",
    recurrent_in=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    recurrent_rates=("self_attn.b_proj",),
    recurrent_decays=("self_attn.f_a_proj", "self_attn.f_b_proj"),
    recurrent_gates=("self_attn.g_a_proj", "self_attn.g_b_proj"),
    recurrent_convolution="self_attn.conv1d",
    recurrent_convolutions=("self_attn.q_conv1d", "self_attn.k_conv1d", "self_attn.v_conv1d"),
    recurrent_norm="self_attn.o_norm",
    recurrent_out="self_attn.o_proj",
    recurrent_step_bias="self_attn.dt_bias",
    recurrent_decay="self_attn.A_log",
    # transformers writes dense blocks under the name of those with experts.
    other_parts=((".mlp.", ".block_sparse_moe."),),
)
_KIMI_LATENT = LatentConfig(query_size=None, latent_size=512, rotary_size=64, plain_size=128, value_size=128)


def kimi_linear(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a Kimi Linear: Kimi delta attention, every fourth layer latent attention without positions, and experts."""
    fields = with_aliases(fields, _KIMI_ALIASES)
    defaults = Defaults(
        vocab_size=163_840,
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=27,
        num_key_value_heads=32,
        max_position_embeddings=1_048_576,
        rms_norm_eps=1e-5,
    )
    config = latent_config(fields, defaults, max_model_len, _KIMI_LATENT, is_interleaved=False)
    count = len(config.layers)
    experts = ExpertDefaults(
        num_experts=256, experts_per_token=8, intermediate_size=1024, scale=2.446, count_name="num_experts"
    )
    moe = checked_groups(fields, sigmoid_experts(fields, experts))
    recurrent, kinds = _kimi_delta(fields), _kimi_kinds(fields, count)
    changes: list[dict[str, Any]] = [
        {"rope": None, "moe": moe if is_sparse else None}
        | ({"recurrent": recurrent, "latent": None} if kind == LINEAR else {})
        for kind, is_sparse in zip(kinds, _kimi_sparse_layers(fields, count), strict=True)
    ]
    return attrs.evolve(with_layers(config, changes), names=with_query_name(config, _KIMI_NAMES))


def _kimi_delta(fields: Fields) -> KimiDeltaConfig:
    own = fields.section("linear_attn_config") or Fields(fields.path, {}, "linear_attn_config.")
    return KimiDeltaConfig(
        num_heads=own.integer("num_heads", fields.integer("linear_num_heads", 32)),
        head_dim=own.integer("head_dim", fields.integer("linear_head_dim", 128)),
        kernel_size=own.integer(
            "short_conv_kernel_size", fields.integer("linear_conv_kernel_dim", 4, minimum=2), minimum=2
        ),
    )


def _kimi_kinds(fields: Fields, count: int) -> list[str]:
    """Return the kind of each layer; published files number those of each kind, from 1 on."""
    own = fields.section("linear_attn_config")
    if fields.texts("layer_types") is None and own is not None and "full_attn_layers" in own:
        numbers = {FULL: own.integers("full_attn_layers"), LINEAR: own.integers("kda_layers")}
        if sorted(numbers[FULL] + numbers[LINEAR]) != list(range(1, count + 1)):
            raise own.wrong("full_attn_layers", f"with kda_layers the numbers from 1 to {count}, each once")
        return [FULL if index + 1 in numbers[FULL] else LINEAR for index in range(count)]
    return recurrent_kinds(fields, [FULL if index and index % 4 == 0 else LINEAR for index in range(count)])


def _kimi_sparse_layers(fields: Fields, count: int) -> list[bool]:
    first = fields.integer("first_k_dense_replace", 1, minimum=0)
    kinds = fields.texts("mlp_layer_types")
    if kinds is None:
        return [index >= first for index in range(count)]
    if len(kinds) != count or not set(kinds) <= {"dense", "sparse"}:
        raise unsupported(fields, "mlp_layer_types", f"{count} times dense or sparse")
    return [kind == "sparse" for kind in kinds]
