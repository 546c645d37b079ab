"""From config.json to `DecoderConfig`: families of state-space layers alone, and Jamba, a few with attention."""

from __future__ import annotations

import math
from typing import Any

import attrs

from triolet.model.architectures.decoder_config import (
    DecoderConfig,
    LayerConfig,
    MoeConfig,
    NormConfig,
    TensorNames,
)
from triolet.model.architectures.family_common import (
    Defaults,
    activation_of,
    base_config,
    checked_experts,
    with_aliases,
    with_layers,
)
from triolet.model.architectures.recurrent.configs import Mamba1Config, MambaConfig
from triolet.model.architectures.recurrent.hybrid_families import check_step_limit
from triolet.model.folder.json_fields import Fields

LONGEST_SEQUENCE = 2**20
"""Tokens of the longest sequence of a model without positions, whose states have room for any length."""

_BACKBONE: dict[str, Any] = {
    "prefix": "backbone.",
    "embedding": "embeddings",
    "final_norm": "norm_f",
    "attention_norm": "norm",
    "recurrent_in": ("mixer.in_proj",),
    "recurrent_convolution": "mixer.conv1d",
    "recurrent_norm": "mixer.norm",
    "recurrent_out": "mixer.out_proj",
    "recurrent_decay": "mixer.A_log",
    "recurrent_skip": "mixer.D",
}
_MAMBA_NAMES = TensorNames(
    recurrent_select="mixer.x_proj.weight",
    recurrent_steps="mixer.dt_proj.weight",
    recurrent_step_bias="mixer.dt_proj.bias",
    **_BACKBONE,
)


def mamba(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a Mamba: every layer is a Mamba layer and nothing else."""
    recurrent = _plain_mamba(fields)
    return _state_space(fields, recurrent, recurrent.channels, vocab_size=50_280, hidden_size=768, layers=32)


def falcon_mamba(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a Falcon Mamba: a Mamba that normalises what steps come from, and what states are written and read with."""
    recurrent = attrs.evolve(_plain_mamba(fields), norm_eps=fields.number("mixer_rms_eps", 1e-6))
    return _state_space(fields, recurrent, recurrent.channels, vocab_size=50_280, hidden_size=768, layers=32)


def _plain_mamba(fields: Fields) -> Mamba1Config:
    hidden_size = fields.integer("hidden_size", 768)
    return Mamba1Config(
        channels=fields.integer("expand", 2) * hidden_size,
        state_size=fields.integer("state_size", 16),
        step_rank=step_rank(fields, "time_step_rank", hidden_size),
        kernel_size=fields.integer("conv_kernel", 4, minimum=2),
        convolution_bias=fields.flag("use_conv_bias", True),
        projection_bias=fields.flag("use_bias", False),
        activation=activation_of(fields, "hidden_act", "silu"),
    )


def step_rank(fields: Fields, name: str, hidden_size: int) -> int:
    """Return the numbers that the steps of a Mamba layer's channels are projected from, of field `name`."""
    if fields.values.get(name) in (None, "auto"):
        return math.ceil(hidden_size / 16)
    return fields.integer(name, 1)


def mamba2(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a Mamba-2: every layer is a Mamba-2 layer and nothing else."""
    check_step_limit(fields)
    hidden_size = fields.integer("hidden_size", 4096)
    num_heads, num_groups = fields.integer("num_heads", 128), fields.integer("n_groups", 8)
    recurrent = MambaConfig(
        num_heads=num_heads,
        head_dim=fields.integer("head_dim", 64),
        state_size=fields.integer("state_size", 128),
        num_groups=num_groups,
        kernel_size=fields.integer("conv_kernel", 4, minimum=2),
        convolution_bias=fields.flag("use_conv_bias", True),
        projection_bias=fields.flag("use_bias", False),
        activation=activation_of(fields, "hidden_act", "silu"),
    )
    if recurrent.inner_size != (inner := fields.integer("expand", 2) * hidden_size):
        raise fields.wrong("num_heads", f"so many that they have {inner} numbers: expand * hidden_size")
    if num_heads % num_groups:
        raise fields.wrong("n_groups", f"a divisor of num_heads ({num_heads})")
    config = _state_space(fields, recurrent, inner, vocab_size=32_768, hidden_size=4096, layers=64)
    return attrs.evolve(
        config,
        tied_head=fields.flag("tie_word_embeddings", False),
        names=TensorNames(recurrent_step_bias="mixer.dt_bias", **_BACKBONE),
    )


def _state_space(
    fields: Fields,
    recurrent: MambaConfig | Mamba1Config,
    inner_size: int,
    *,
    vocab_size: int,
    hidden_size: int,
    layers: int,
) -> DecoderConfig:
    """Return the configuration of a decoder of recurrent layers that are all alike; the sizes are defaults."""
    count = fields.integer("num_hidden_layers", layers)
    return DecoderConfig(
        architecture="",
        vocab_size=fields.integer("vocab_size", vocab_size),
        hidden_size=fields.integer("hidden_size", hidden_size),
        intermediate_size=inner_size,
        # There is no attention; so large are the outputs of the recurrence, which the last projection reads.
        num_heads=1,
        num_kv_heads=1,
        head_dim=inner_size,
        max_position=LONGEST_SEQUENCE,
        layers=tuple(
            LayerConfig(attention_scale=1.0, recurrent=recurrent, stored_as=(index, None))
            for index in range(count)
        ),
        norm=NormConfig(eps=fields.number("layer_norm_epsilon", 1e-5)),
        activation="silu",
        names=_MAMBA_NAMES,
        tied_head=fields.flag("tie_word_embeddings", True),
    )


def jamba(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a Jamba: Mamba layers, a few with attention, experts in every other layer; nothing encodes positions."""
    defaults = Defaults(
        vocab_size=65_536,
        intermediate_size=14_336,
        num_key_value_heads=8,
        max_position_embeddings=262_144,
    )
    fields = with_aliases(fields, {"num_local_experts": "num_experts"})
    config = base_config(fields, defaults, max_model_len)
    recurrent = Mamba1Config(
        channels=fields.integer("mamba_expand", 2) * config.hidden_size,
        state_size=fields.integer("mamba_d_state", 16),
        step_rank=step_rank(fields, "mamba_dt_rank", config.hidden_size),
        kernel_size=fields.integer("mamba_d_conv", 4, minimum=2),
        convolution_bias=fields.flag("mamba_conv_bias", True),
        projection_bias=fields.flag("mamba_proj_bias", False),
        activation=config.activation,
        norm_eps=config.norm.eps,
        has_norm_weights=True,
    )
    moe = None
    if (num_experts := fields.integer("num_experts", 16)) > 1:
        moe = checked_experts(
            fields,
            MoeConfig(
                num_experts=num_experts,
                experts_per_token=fields.integer("num_experts_per_tok", 2),
                intermediate_size=config.intermediate_size,
                normalize=False,
            ),
        )
    count = len(config.layers)
    attending, sparse = _every(fields, "attn_layer", 8, 4, count), _every(fields, "expert_layer", 2, 1, count)
    changes: list[dict[str, Any]] = [
        {
            "recurrent": None if index in attending else recurrent,
            "moe": moe if index in sparse else None,
            "rope": None,
        }
        for index in range(count)
    ]
    return attrs.evolve(with_layers(config, changes), names=_JAMBA_NAMES)


def _every(fields: Fields, name: str, period: int, offset: int, count: int) -> range:
    """Return the layers of a kind among `count`, one in each period; the numbers are defaults."""
    period = fields.integer(f"{name}_period", period)
    offset = fields.integer(f"{name}_offset", offset, minimum=0)
    if offset >= period:
        raise fields.wrong(f"{name}_offset", f"less than {name}_period ({period})")
    return range(offset, count, period)


_JAMBA_NAMES = TensorNames(
    final_norm="final_layernorm",
    mlp_norm="pre_ff_layernorm",
    mlp_in=("feed_forward.gate_proj", "feed_forward.up_proj"),
    mlp_out="feed_forward.down_proj",
    router="feed_forward.router",
    expert_in=("feed_forward.experts.{expert}.gate_proj", "feed_forward.experts.{expert}.up_proj"),
    expert_out="feed_forward.experts.{expert}.down_proj",
    recurrent_step_bias="mamba.dt_proj.bias",
)
