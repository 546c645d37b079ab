"""From config.json to `DecoderConfig`: families of which most layers keep a state in place of keys and values."""

from __future__ import annotations

import math
from typing import Any

import attrs

from triolet.model.architectures.decoder_config import (
    DecoderConfig,
    MoeConfig,
    ParallelMixers,
    TensorNames,
)
from triolet.model.architectures.dense_families import with_biases, with_granite_multipliers
from triolet.model.architectures.family_common import (
    FULL,
    LINEAR,
    OLD_KINDS,
    QWEN,
    Defaults,
    activation_of,
    base_config,
    checked_experts,
    recurrent_kinds,
    unsupported,
    with_attention_bias,
    with_layers,
)
from triolet.model.architectures.moe_families import (
    GRANITE_STACKS,
    ExpertDefaults,
    checked_groups,
    sigmoid_experts,
    sparse_layers,
)
from triolet.model.architectures.recurrent.configs import DeltaNetConfig, MambaConfig
from triolet.model.folder.json_fields import Fields


def granite_moe_hybrid(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a Granite 4: Mamba layers, a few with attention, and perhaps experts beside one of all tokens."""
    config = with_granite_multipliers(fields, base_config(fields, Defaults(), max_model_len))
    mamba, moe = _mamba(fields, config.hidden_size), _experts(fields, config.intermediate_size)
    changes: list[dict[str, Any]] = [
        {"recurrent": mamba if kind == LINEAR else None, "moe": moe}
        for kind in recurrent_kinds(fields, (LINEAR,) * len(config.layers))
    ]
    if fields.text("position_embedding_type", "nope") != "rope":
        changes = [{**change, "rope": None} for change in changes]
    names = TensorNames(
        router="block_sparse_moe.router.layer",
        expert_in=("block_sparse_moe.input_linear.{expert}",),
        expert_out="block_sparse_moe.output_linear.{expert}",
        expert_stacks=GRANITE_STACKS,
        shared_in=("shared_mlp.input_linear",),
        shared_out="shared_mlp.output_linear",
        mlp_in=("shared_mlp.input_linear",),
        mlp_out="shared_mlp.output_linear",
    )
    config = with_attention_bias(fields, with_layers(config, changes))
    return attrs.evolve(config, intermediate_size=_shared_size(fields), names=names)


def bamba(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a Bamba: Mamba layers, and a few with attention of which half of each head turns."""
    defaults = Defaults(
        vocab_size=128_000,
        intermediate_size=14_336,
        num_key_value_heads=8,
        max_position_embeddings=262_144,
        rms_norm_eps=1e-5,
        has_partial_rotary=True,
        partial_rotary_factor=0.5,
    )
    config = base_config(fields, defaults, max_model_len)
    mamba, attending = _mamba(fields, config.hidden_size), fields.integers("attn_layer_indices")
    changes: list[dict[str, Any]] = [
        {"recurrent": None if index in attending else mamba} for index in range(len(config.layers))
    ]
    return attrs.evolve(with_biases(fields, with_layers(config, changes)), names=_FALCON_NAMES)


def falcon_h1(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a Falcon-H1: every layer has attention and Mamba side by side, and multipliers at each place."""
    defaults = Defaults(
        vocab_size=128_000,
        intermediate_size=14_336,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
    )
    config = base_config(fields, defaults, max_model_len)
    # A multiplier of inputs is one of outputs where no bias comes between.
    attention_in = _multiplier(fields, "attention_in_multiplier", "attention_bias")
    scale = fields.number("key_multiplier", 1.0) * attention_in**2 * config.layers[0].attention_scale
    mixers = ParallelMixers(
        attention_scale=fields.number("attention_out_multiplier", 1.0) * attention_in,
        recurrent_scale=fields.number("ssm_out_multiplier", 1.0),
    )
    change = {
        "attention_scale": scale,
        "recurrent": _falcon_mamba(fields, config.hidden_size),
        "parallel_mixers": mixers,
    }
    gate_scale, mlp_scale = _multipliers(fields, "mlp_multipliers", 2)
    config = with_biases(fields, with_layers(config, [change] * len(config.layers)))
    if config.mlp_bias and mlp_scale != 1.0:
        raise unsupported(fields, "mlp_bias", "false beside a second mlp_multipliers of another value than 1")
    return attrs.evolve(
        config,
        mlp_gate_scale=gate_scale,
        mlp_scale=mlp_scale,
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        scales_given_embeddings=True,
        logit_scale=fields.number("lm_head_multiplier", 1.0),
        names=_FALCON_NAMES,
    )


def _falcon_mamba(fields: Fields, hidden_size: int) -> MambaConfig:
    inner = fields.optional_integer("mamba_d_ssm", 1024)
    has_bias = fields.flag("mamba_proj_bias", False)
    if fields.flag("projectors_bias", False) != has_bias:
        raise unsupported(
            fields, "projectors_bias", "as mamba_proj_bias: both projections have a bias, or none"
        )
    scale = _multiplier(fields, "ssm_in_multiplier", "mamba_proj_bias")
    gate, heads, written, read, steps = (scale * one for one in _multipliers(fields, "ssm_multipliers", 5))
    return attrs.evolve(
        _mamba(fields, hidden_size, inner),
        projection_scales=(gate, heads, written, read, steps),
        is_normed=fields.flag("mamba_rms_norm", False),
        norms_before_gate=fields.flag("mamba_norm_before_gate", True),
    )


def _multiplier(fields: Fields, name: str, bias: str) -> float:
    """Return a multiplier of inputs of a projection that may have a bias."""
    multiplier = fields.number(name, 1.0)
    if multiplier != 1.0 and fields.flag(bias, False):
        raise unsupported(fields, name, f"1 beside {bias}")
    return multiplier


def _multipliers(fields: Fields, name: str, count: int) -> tuple[float, ...]:
    if fields.values.get(name) is None:
        return (1.0,) * count
    values = fields.numbers(name)
    if len(values) != count:
        raise fields.wrong(name, f"a list of {count} numbers")
    return tuple(map(float, values))


_FALCON_NAMES = TensorNames(
    final_norm="final_layernorm",
    mlp_norm="pre_ff_layernorm",
    mlp_in=("feed_forward.gate_proj", "feed_forward.up_proj"),
    mlp_out="feed_forward.down_proj",
)


def _shared_size(fields: Fields) -> int:
    return fields.integer("shared_intermediate_size", 1024)


def _experts(fields: Fields, intermediate_size: int) -> MoeConfig | None:
    if not (num_experts := fields.integer("num_local_experts", 8, minimum=0)):
        return None
    experts = MoeConfig(
        num_experts=num_experts,
        experts_per_token=fields.integer("num_experts_per_tok", 2),
        intermediate_size=intermediate_size,
        normalize=True,
        shared_size=_shared_size(fields),
        has_shared_gate=False,
    )
    return checked_experts(fields, experts)


def _mamba(fields: Fields, hidden_size: int, inner: int | None = None) -> MambaConfig:
    check_step_limit(fields)
    size_rule = "mamba_expand * hidden_size" if inner is None else "mamba_d_ssm"
    inner, num_heads = (
        inner or fields.integer("mamba_expand", 2) * hidden_size,
        fields.integer("mamba_n_heads", 128),
    )
    is_auto = fields.values.get("mamba_d_head") in (None, "auto")
    head_dim = inner // num_heads if is_auto else fields.integer("mamba_d_head", 0)
    if num_heads * head_dim != inner:
        raise fields.wrong("mamba_n_heads", f"so many that they have {inner} numbers: {size_rule}")
    num_groups = fields.integer("mamba_n_groups", 1)
    if num_heads % num_groups:
        raise fields.wrong("mamba_n_groups", f"a divisor of mamba_n_heads ({num_heads})")
    return MambaConfig(
        num_heads=num_heads,
        head_dim=head_dim,
        state_size=fields.integer("mamba_d_state", 256),
        num_groups=num_groups,
        kernel_size=fields.integer("mamba_d_conv", 4, minimum=2),
        convolution_bias=fields.flag("mamba_conv_bias", True),
        projection_bias=fields.flag("mamba_proj_bias", False),
        activation=activation_of(fields, "hidden_act", "silu"),
    )


_NEMOTRON_BLOCKS = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}
"""Letters of `hybrid_override_pattern`."""

_NEMOTRON_EXPERTS = ExpertDefaults(num_experts=8, experts_per_token=2, intermediate_size=7688, scale=1.0)


def nemotron_h(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a Nemotron-H, Nemotron Nano 2 or Nemotron 3 Nano: Mamba layers, a few with attention, perhaps experts."""
    if fields.flag("attention_bias", False):
        raise unsupported(fields, "attention_bias", "false: transformers knows no such biases in this family")
    name, blocks = _nemotron_blocks(fields)
    # A feed-forward block is a layer of its own there, and a part of the layer before it here.
    stored_as: list[tuple[int, int | None]] = []
    for index, block in enumerate(blocks):
        if block in (LINEAR, FULL):
            stored_as.append((index, None))
        else:
            if not stored_as or stored_as[-1][1] is not None:
                raise unsupported(fields, name, "such that an mlp or moe follows a layer of another kind")
            stored_as[-1] = (stored_as[-1][0], index)
    values = {**fields.values, "num_hidden_layers": len(stored_as), "hidden_act": "silu"}
    defaults = Defaults(
        vocab_size=131_072,
        intermediate_size=21_504,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
    )
    config = base_config(attrs.evolve(fields, values=values), defaults, max_model_len)
    mamba = _nemotron_mamba(fields)
    experts = _nemotron_experts(fields) if "moe" in blocks else None
    changes: list[dict[str, Any]] = [
        {
            "recurrent": mamba if blocks[first] == LINEAR else None,
            "moe": experts if second is not None and blocks[second] == "moe" else None,
            "rope": None,
            "stored_as": (first, second),
        }
        for first, second in stored_as
    ]
    return attrs.evolve(
        with_layers(config, changes),
        norm=attrs.evolve(config.norm, eps=fields.number("layer_norm_epsilon", 1e-5)),
        activation=activation_of(fields, "mlp_hidden_act", "relu2"),
        gated=False,
        mlp_bias=fields.flag("mlp_bias", False),
        names=_NEMOTRON_NAMES,
    )


def _nemotron_blocks(fields: Fields) -> tuple[str, list[str]]:
    """Return the kinds of the checkpoint's layers, and the field that says them."""
    kinds = tuple(_NEMOTRON_BLOCKS.values())
    for name in ("layers_block_type", "layer_types"):
        if blocks := [OLD_KINDS.get(kind, kind) for kind in fields.texts(name) or ()]:
            break
    else:
        name = "hybrid_override_pattern"
        blocks = [_NEMOTRON_BLOCKS.get(letter, letter) for letter in fields.text(name, "ME*-")]
    if not set(blocks) <= set(kinds):
        raise unsupported(fields, name, f"of {', '.join(kinds)} or the letters {''.join(_NEMOTRON_BLOCKS)}")
    return name, blocks


def _nemotron_mamba(fields: Fields) -> MambaConfig:
    # transformers raises the steps of prompts to time_step_min, unlike NVIDIA's own code: its pull request 48989.
    check_step_limit(fields)
    num_heads, num_groups = fields.integer("mamba_num_heads", 128), fields.integer("n_groups", 8)
    if num_heads % num_groups:
        raise fields.wrong("n_groups", f"a divisor of mamba_num_heads ({num_heads})")
    return MambaConfig(
        num_heads=num_heads,
        head_dim=fields.integer("mamba_head_dim", 64),
        state_size=fields.integer("ssm_state_size", 128),
        num_groups=num_groups,
        kernel_size=fields.integer("conv_kernel", 4, minimum=2),
        convolution_bias=fields.flag("use_conv_bias", True),
        projection_bias=fields.flag("use_bias", False),
        activation=activation_of(fields, "mamba_hidden_act", "silu"),
    )


def _nemotron_experts(fields: Fields) -> MoeConfig:
    if fields.values.get("moe_latent_size") is not None:
        raise unsupported(fields, "moe_latent_size", "null: experts read the residual stream itself")
    if fields.flag("mlp_bias", False):
        raise unsupported(fields, "mlp_bias", "false beside experts, which have none")
    shared_size = fields.integer("moe_shared_expert_intermediate_size", 7688)
    experts = attrs.evolve(sigmoid_experts(fields, _NEMOTRON_EXPERTS), shared_size=shared_size)
    return checked_groups(fields, experts)


_NEMOTRON_NAMES = TensorNames(
    prefix="backbone.",
    embedding="embeddings",
    final_norm="norm_f",
    attention_norm="norm",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    attention_out="mixer.o_proj",
    mlp_norm="norm",
    mlp_in=("mixer.up_proj",),
    mlp_out="mixer.down_proj",
    router="mixer.gate",
    router_correction="mixer.gate.e_score_correction_bias",
    expert_in=("mixer.experts.{expert}.up_proj",),
    expert_out="mixer.experts.{expert}.down_proj",
    shared_in=("mixer.shared_experts.up_proj",),
    shared_out="mixer.shared_experts.down_proj",
    recurrent_in=("mixer.in_proj",),
    recurrent_convolution="mixer.conv1d",
    recurrent_norm="mixer.norm",
    recurrent_out="mixer.out_proj",
    recurrent_step_bias="mixer.dt_bias",
    recurrent_decay="mixer.A_log",
    recurrent_skip="mixer.D",
    ignored_prefixes=("mtp.",),  # layers that draft tokens
)


def check_step_limit(fields: Fields) -> None:
    """Refuse limits of the steps of Mamba-2 layers.

    Raises:
        UnsupportedModel: there are some.
    """
    # Files have infinity as a number that JSON does not know, or as an object around it.
    if fields.values.get("time_step_limit") not in (None, [0, math.inf], [0, {"__float__": "Infinity"}]):
        raise unsupported(fields, "time_step_limit", "0 and infinity: steps are not limited")


_DELTA_NET_NAMES: dict[str, Any] = {
    "recurrent_convolution": "linear_attn.conv1d",
    "recurrent_norm": "linear_attn.norm",
    "recurrent_out": "linear_attn.out_proj",
    "recurrent_step_bias": "linear_attn.dt_bias",
    "recurrent_decay": "linear_attn.A_log",
    "ignored_prefixes": ("mtp.",),  # layers that draft tokens
}
_QWEN_HYBRID = attrs.evolve(
    QWEN,
    vocab_size=248320,
    num_attention_heads=16,
    head_dim=256,
    has_partial_rotary=True,
    partial_rotary_factor=0.25,
)

_QWEN3_5_NAMES = TensorNames(
    recurrent_in=("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    recurrent_rates=("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
    expert_stacks=(
        (
            "mlp.experts.gate_up_proj",
            ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"),
        ),
        ("mlp.experts.down_proj", ("mlp.experts.{expert}.down_proj.weight",)),
    ),
    **_DELTA_NET_NAMES,
)


def qwen3_next(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a Qwen3-Next: gated delta nets, every fourth layer with gated attention, and many small experts."""
    defaults = attrs.evolve(
        _QWEN_HYBRID,
        vocab_size=QWEN.vocab_size,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=48,
        num_key_value_heads=2,
    )
    names = TensorNames(
        recurrent_in=("linear_attn.in_proj_qkvz",),
        recurrent_rates=("linear_attn.in_proj_ba",),
        **_DELTA_NET_NAMES,
    )
    delta_net = attrs.evolve(_delta_net(fields), by_key_heads=True)
    return _qwen(fields, max_model_len, defaults, names, delta_net, _qwen_experts(fields, 512, 10))


def qwen3_5(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read the language part of a Qwen3.5: the layers of Qwen3-Next, with plain feed-forward blocks."""
    defaults = attrs.evolve(
        _QWEN_HYBRID, hidden_size=4096, intermediate_size=12288, num_hidden_layers=32, num_key_value_heads=4
    )
    return _qwen(fields, max_model_len, defaults, _QWEN3_5_NAMES, _delta_net(fields), None)


def qwen3_5_moe(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read the language part of a Qwen3.5 with experts."""
    defaults = attrs.evolve(_QWEN_HYBRID, hidden_size=2048, num_hidden_layers=40, num_key_value_heads=2)
    experts = _qwen_experts(fields, 256, 8)
    return _qwen(fields, max_model_len, defaults, _QWEN3_5_NAMES, _delta_net(fields), experts)


def _qwen(
    fields: Fields,
    max_model_len: int | None,
    defaults: Defaults,
    names: TensorNames,
    delta_net: DeltaNetConfig,
    experts: MoeConfig | None,
) -> DecoderConfig:
    config = base_config(fields, defaults, max_model_len)
    count, every = len(config.layers), fields.integer("full_attention_interval", 4)
    kinds = recurrent_kinds(fields, [LINEAR if (index + 1) % every else FULL for index in range(count)])
    changes = [
        {"recurrent": delta_net if kind == LINEAR else None, "moe": experts if is_sparse else None}
        for kind, is_sparse in zip(kinds, sparse_layers(fields, count), strict=True)
    ]
    return attrs.evolve(
        with_attention_bias(fields, with_layers(config, changes)),
        norm=attrs.evolve(config.norm, weight_offset=1.0),
        qk_norm=True,
        attention_gate=True,
        names=names,
    )


def _qwen_experts(fields: Fields, num_experts: int, experts_per_token: int) -> MoeConfig | None:
    if not (num_experts := fields.integer("num_experts", num_experts, minimum=0)):
        return None
    experts = MoeConfig(
        num_experts=num_experts,
        experts_per_token=fields.integer("num_experts_per_tok", experts_per_token),
        intermediate_size=fields.integer("moe_intermediate_size", 512),
        normalize=fields.flag("norm_topk_prob", True),
        shared_size=fields.integer("shared_expert_intermediate_size", 512),
    )
    return checked_experts(fields, experts)


def _delta_net(fields: Fields) -> DeltaNetConfig:
    config = DeltaNetConfig(
        num_heads=fields.integer("linear_num_value_heads", 32),
        num_key_heads=fields.integer("linear_num_key_heads", 16),
        key_dim=fields.integer("linear_key_head_dim", 128),
        value_dim=fields.integer("linear_value_head_dim", 128),
        kernel_size=fields.integer("linear_conv_kernel_dim", 4, minimum=2),
    )
    if config.num_heads % config.num_key_heads:
        raise fields.wrong(
            "linear_num_key_heads", f"a divisor of linear_num_value_heads ({config.num_heads})"
        )
    return config
