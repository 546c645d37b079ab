"""From config.json to `DecoderConfig`: Zamba and Zamba2, of which some layers share an attention block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from triolet.model.architectures.decoder_config import DecoderConfig, TensorNames
from triolet.model.architectures.family_common import (
    LINEAR,
    Defaults,
    activation_of,
    base_config,
    recurrent_kinds,
    unsupported,
    with_aliases,
    with_layers,
)
from triolet.model.architectures.recurrent.configs import (
    Mamba1Config,
    MambaConfig,
    RecurrentConfig,
    SharedBlockConfig,
)
from triolet.model.architectures.recurrent.state_space_families import step_rank
from triolet.model.folder.json_fields import Fields

HYBRID = "hybrid"
"""Kind of a layer with a shared block in front of its recurrence."""

_HEAD_DIM = {"attention_head_dim": "head_dim"}

_ZAMBA_NAMES = TensorNames(
    final_norm="final_layernorm",
    mlp_norm="pre_ff_layernorm",
    mlp_in=("feed_forward.gate_proj", "feed_forward.up_proj"),
    mlp_out="feed_forward.down_proj",
    recurrent_select="mamba.x_proj_weight",
    recurrent_steps="mamba.dt_proj_weight",
    recurrent_step_bias="mamba.dt_proj_bias",
)
_ZAMBA2_NAMES = TensorNames(
    final_norm="final_layernorm",
    mlp_norm="pre_ff_layernorm",
    mlp_in=("feed_forward.gate_up_proj",),
    mlp_out="feed_forward.down_proj",
)


def zamba(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a Zamba: Mamba layers with heads, and one attention block that some of them share."""
    defaults = Defaults(
        hidden_size=3712,
        intermediate_size=14_848,
        num_hidden_layers=76,
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        hidden_act="gelu",
        tie_word_embeddings=True,
    )
    # As in transformers, the first name wins here, and the second in Zamba2.
    fields = with_aliases(with_aliases(fields, {"head_dim": "attention_head_dim"}), _HEAD_DIM)
    config = _base(fields, defaults, max_model_len)
    both = 2 * config.hidden_size
    if (width := fields.optional_integer("attention_hidden_size") or both) != both:
        raise unsupported(fields, "attention_hidden_size", f"{both}, of stream and embedding; got {width}")
    channels = fields.integer("mamba_expand", 2) * config.hidden_size
    num_heads = fields.integer("n_mamba_heads", 2)
    if channels % num_heads:
        raise fields.wrong("n_mamba_heads", f"a divisor of mamba_expand * hidden_size ({channels})")
    recurrent = Mamba1Config(
        channels=channels,
        state_size=fields.integer("mamba_d_state", 16),
        step_rank=step_rank(fields, "mamba_dt_rank", config.hidden_size),
        kernel_size=fields.integer("mamba_d_conv", 4, minimum=2),
        convolution_bias=fields.flag("mamba_conv_bias", True),
        projection_bias=fields.flag("mamba_proj_bias", False),
        activation=activation_of(fields, "hidden_mamba_act", "silu"),
        num_heads=num_heads,
        alternates=True,
    )
    every, offset = fields.integer("attn_layer_period", 6), fields.integer("attn_layer_offset", 4, minimum=0)
    rest = [HYBRID if index % every == offset else LINEAR for index in range(len(config.layers) - 3)]
    kinds = recurrent_kinds(fields, [LINEAR, LINEAR, HYBRID, *rest][: len(config.layers)], other=HYBRID)
    if HYBRID not in kinds:
        raise unsupported(fields, "layers_block_type", f"such that a layer is {HYBRID}")
    block = SharedBlockConfig(stored_in=kinds.index(HYBRID), name="shared_transf.")
    blocks = [block if kind == HYBRID else None for kind in kinds]
    return attrs.evolve(_with_blocks(config, recurrent, blocks), names=_with_copies(_ZAMBA_NAMES, blocks))


def zamba2(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a Zamba2: Mamba-2 layers, and a few attention blocks in turn that some of them share, with adapters."""
    if fields.flag("use_long_context", False):
        raise unsupported(fields, "use_long_context", "false")
    defaults = Defaults(
        hidden_size=2560,
        num_hidden_layers=54,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        hidden_act="gelu",
        tie_word_embeddings=True,
    )
    defaults = attrs.evolve(defaults, intermediate_size=4 * fields.integer("hidden_size", 2560))
    config = _base(with_aliases(fields, _HEAD_DIM), defaults, max_model_len)
    has_bias = fields.flag("add_bias_linear", False)
    recurrent = _zamba2_mamba(fields, config.hidden_size, has_bias)
    pattern = [
        LINEAR,
        *([LINEAR] * 5 + [HYBRID]) * 7,
        *[LINEAR] * 4,
        HYBRID,
        *[LINEAR] * 3,
        HYBRID,
        LINEAR,
        LINEAR,
    ]
    kinds = recurrent_kinds(fields, _as_long(pattern, len(config.layers)), other=HYBRID)
    places = [index for index, kind in enumerate(kinds) if kind == HYBRID]
    num_blocks = fields.integer("num_mem_blocks", 1)
    adapts_attention = fields.flag("use_shared_attention_adapter", False)
    if adapts_attention and config.num_kv_heads * config.head_dim != 2 * config.hidden_size:
        rule = "as many as attention heads, twice hidden_size together, with use_shared_attention_adapter"
        raise unsupported(fields, "num_key_value_heads", rule)
    blocks: list[SharedBlockConfig | None] = [None] * len(kinds)
    for number, index in enumerate(places):
        blocks[index] = SharedBlockConfig(
            stored_in=places[number % num_blocks],
            name="shared_transformer.",
            adapter=number,
            adapter_rank=fields.integer("adapter_rank", 128),
            adapts_attention=adapts_attention,
        )
    config = _with_blocks(config, recurrent, blocks)
    if not fields.flag("use_mem_rope", False):
        config = with_layers(config, [{"rope": None}] * len(kinds))
    return attrs.evolve(config, mlp_bias=has_bias, names=_with_copies(_ZAMBA2_NAMES, blocks))


def _zamba2_mamba(fields: Fields, hidden_size: int, has_bias: bool) -> MambaConfig:
    # transformers raises the steps of prompts to time_step_min, and not those of later tokens: its pull request 48989.
    inner, num_heads = fields.integer("mamba_expand", 2) * hidden_size, fields.integer("n_mamba_heads", 8)
    num_groups = fields.integer("mamba_ngroups", 1)
    if inner % num_heads:
        raise fields.wrong("n_mamba_heads", f"a divisor of mamba_expand * hidden_size ({inner})")
    if num_heads % num_groups:
        raise fields.wrong("mamba_ngroups", f"a divisor of n_mamba_heads ({num_heads})")
    return MambaConfig(
        num_heads=num_heads,
        head_dim=inner // num_heads,
        state_size=fields.integer("mamba_d_state", 64),
        num_groups=num_groups,
        kernel_size=fields.integer("mamba_d_conv", 4, minimum=2),
        convolution_bias=True,
        projection_bias=has_bias,
        activation="silu",
        norm_eps=1e-5,
    )


def _base(fields: Fields, defaults: Defaults, max_model_len: int | None) -> DecoderConfig:
    """Return the configuration without its recurrences; heads are parts of stream and embedding together."""
    if not fields.flag("tie_word_embeddings", True):
        # transformers then shares no blocks either.
        raise unsupported(fields, "tie_word_embeddings", "true")
    hidden_size = fields.integer("hidden_size", defaults.hidden_size)
    num_heads = fields.integer("num_attention_heads", defaults.num_attention_heads)
    defaults = attrs.evolve(defaults, head_dim=2 * hidden_size // num_heads)
    return base_config(fields, defaults, max_model_len)


def _with_blocks(
    config: DecoderConfig, recurrent: RecurrentConfig, blocks: Sequence[SharedBlockConfig | None]
) -> DecoderConfig:
    scale = (config.head_dim / 2) ** -0.5
    has_rope = isinstance(recurrent, MambaConfig)
    changes: list[dict[str, Any]] = [
        {
            "attention_scale": scale,
            "recurrent": recurrent,
            "shared_block": block,
            "stored_as": (index, None),
            **({} if has_rope else {"rope": None}),
        }
        for index, block in enumerate(blocks)
    ]
    return with_layers(config, changes)


def _with_copies(names: TensorNames, blocks: Sequence[SharedBlockConfig | None]) -> TensorNames:
    """Return names that leave out what other layers than the first of its users have of a block: copies of it."""
    copies = tuple(
        f"{names.prefix}{names.layer.format(layer=index)}{block.name}"
        for index, block in enumerate(blocks)
        if block is not None and block.stored_in != index
    )
    return attrs.evolve(names, ignored_prefixes=copies)


def _as_long(pattern: Sequence[str], count: int) -> list[str]:
    """Return the pattern of the family, which fits its default number of layers alone; as many as there are."""
    return [*pattern[:count], *[LINEAR] * (count - len(pattern))]
