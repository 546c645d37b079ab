"""From config.json to `DecoderConfig`: dense families, Llama but for norms, biases or positions."""

from __future__ import annotations

from typing import Any

import attrs

from triolet.model.architectures.decoder_config import (
    DecoderConfig,
    QueryGrowth,
    TensorNames,
)
from triolet.model.architectures.family_common import (
    FULL,
    QWEN,
    SLIDING,
    UNGATED,
    Defaults,
    base_config,
    full_every,
    layer_types,
    positive,
    rope_of,
    rope_parameters_by_kind,
    rope_parameters_of,
    window_in_use,
    with_attention_bias,
    with_layers,
    with_window,
    with_windows,
    without,
)
from triolet.model.architectures.rope import rope_type
from triolet.model.folder.json_fields import Fields


def llama(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a Llama."""
    return with_biases(fields, base_config(fields, Defaults(), max_model_len))


def with_biases(fields: Fields, config: DecoderConfig) -> DecoderConfig:
    """Read whether attention and the feed-forward block have biases."""
    return attrs.evolve(with_attention_bias(fields, config), mlp_bias=fields.flag("mlp_bias", False))


def helium(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a Helium: Llama of which adjacent dimensions turn together."""
    defaults = Defaults(
        vocab_size=48_000,
        hidden_size=2560,
        intermediate_size=7040,
        num_hidden_layers=24,
        num_attention_heads=20,
        head_dim=128,
        max_position_embeddings=4096,
        rms_norm_eps=1e-8,
        rope_theta=100_000.0,
        interleaved_rotary=True,
    )
    config = with_biases(fields, base_config(fields, defaults, max_model_len))
    return attrs.evolve(config, attention_out_bias=False)


ERNIE = Defaults(
    vocab_size=103_424,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=18,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=128,
    max_position_embeddings=131_072,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    tie_word_embeddings=True,
    interleaved_rotary=True,
)
"""Of an ERNIE 4.5 without experts."""


def ernie4_5(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read an ERNIE 4.5: Llama of which adjacent dimensions turn together."""
    bias = fields.flag("use_bias", False)
    config = base_config(fields, ERNIE, max_model_len)
    return attrs.evolve(config, qkv_bias=bias, attention_out_bias=bias, mlp_bias=bias)


def seed_oss(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a Seed-OSS: Llama with biases in front of attention."""
    defaults = Defaults(
        vocab_size=155_136,
        intermediate_size=27_648,
        num_hidden_layers=64,
        num_attention_heads=80,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=524_288,
    )
    return attrs.evolve(
        base_config(fields, defaults, max_model_len),
        qkv_bias=fields.flag("attention_bias", True),
        attention_out_bias=fields.flag("attention_out_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
    )


def arcee(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read an Arcee: Llama whose feed-forward block has no gate, and squares what is above zero."""
    defaults = Defaults(
        hidden_size=2560,
        intermediate_size=18_432,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        hidden_act="relu2",
    )
    return attrs.evolve(
        with_biases(fields, base_config(fields, defaults, max_model_len)), names=UNGATED, gated=False
    )


def apertus(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read an Apertus: normalised queries and keys, and a feed-forward block whose activation is learned."""
    defaults = Defaults(
        vocab_size=131_072,
        intermediate_size=14_336,
        max_position_embeddings=65_536,
        rms_norm_eps=1e-5,
        rope_theta=12_000_000.0,
    )
    parameters = rope_parameters_of(fields)
    if not parameters.values:
        parameters = attrs.evolve(parameters, values=_APERTUS_ROPE)
    # A name that other families do not know.
    is_learned = fields.text("hidden_act", "xielu") == "xielu"
    config = base_config(
        without(fields, "hidden_act") if is_learned else fields, defaults, max_model_len, parameters
    )
    return attrs.evolve(
        with_attention_bias(fields, config),
        activation="xielu" if is_learned else config.activation,
        names=attrs.evolve(UNGATED, attention_norm="attention_layernorm", mlp_norm="feedforward_layernorm"),
        gated=False,
        qk_norm=True,
    )


_APERTUS_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


HUNYUAN = Defaults(vocab_size=290_943, rms_norm_eps=1e-5)
"""Of both kinds of HunYuans."""


def hunyuan(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a HunYuan: Llama whose queries and keys are normalised after they have turned."""
    parameters = rope_parameters_of(fields)
    if rope_type(parameters) == "dynamic" and parameters.number("alpha", 0.0):
        parameters = _stretched_once(fields, parameters)
    config = base_config(fields, HUNYUAN, max_model_len, parameters)
    names = TensorNames(query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm")
    return attrs.evolve(
        with_attention_bias(fields, config), names=names, qk_norm=True, qk_norm_after_rope=True
    )


def _stretched_once(fields: Fields, parameters: Fields) -> Fields:
    """Return parameters of a base that `alpha` stretches, for all sequences alike, whatever the rule's name is."""
    heads = fields.integer("num_attention_heads", HUNYUAN.num_attention_heads)
    head_dim = fields.integer("head_dim", fields.integer("hidden_size", HUNYUAN.hidden_size) // heads)
    if head_dim <= 2:
        raise fields.wrong("head_dim", "greater than 2 beside alpha")
    theta = parameters.number("rope_theta", fields.number("rope_theta", HUNYUAN.rope_theta))
    theta *= positive(parameters, "alpha", 1.0) ** (head_dim / (head_dim - 2))
    return attrs.evolve(parameters, values={"rope_type": "default", "rope_theta": theta})


def cwm(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a Code World Model: Llama with windows in three of four layers."""
    defaults = Defaults(
        vocab_size=128_256,
        hidden_size=6144,
        intermediate_size=21_504,
        num_hidden_layers=64,
        num_attention_heads=48,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        rope_theta=1_000_000.0,
    )
    parameters = rope_parameters_of(fields)
    if not parameters.values:
        parameters = attrs.evolve(parameters, values=_CWM_ROPE)
    config = base_config(fields, defaults, max_model_len, parameters)
    pattern = [SLIDING if index % 4 else FULL for index in range(len(config.layers))]
    config = with_windows(
        config, layer_types(fields, pattern), fields.optional_integer("sliding_window", 8192)
    )
    return attrs.evolve(config, mlp_bias=fields.flag("mlp_bias", False))


_CWM_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}


def mistral(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a Mistral: Llama with a window in every layer."""
    defaults = Defaults(intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=131072)
    return with_window(
        base_config(fields, defaults, max_model_len), fields.optional_integer("sliding_window", 4096)
    )


def _qwen_windows(fields: Fields, config: DecoderConfig) -> DecoderConfig:
    window = window_in_use(fields)
    first_sliding = fields.integer("max_window_layers", 28, minimum=0) if window else len(config.layers)
    pattern = [SLIDING if index >= first_sliding else FULL for index in range(len(config.layers))]
    return with_windows(config, layer_types(fields, pattern), window)


def qwen2(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a Qwen 2: Llama with biases in front of attention, and windows in the later layers."""
    return attrs.evolve(_qwen_windows(fields, base_config(fields, QWEN, max_model_len)), qkv_bias=True)


def qwen3(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a Qwen 3: Qwen 2 with norms of queries and keys."""
    base = base_config(fields, attrs.evolve(QWEN, head_dim=128), max_model_len)
    return attrs.evolve(with_attention_bias(fields, _qwen_windows(fields, base)), qk_norm=True)


def phi3(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a Phi-3: Llama with fused projections and LongRoPE."""
    defaults = Defaults(
        vocab_size=32064,
        hidden_size=3072,
        intermediate_size=8192,
        max_position_embeddings=4096,
        original_max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        has_partial_rotary=True,
    )
    parameters = rope_parameters_of(fields)
    if rope_type(parameters) == "yarn":  # what early Phi-3 configs call LongRoPE
        parameters = attrs.evolve(parameters, values={**parameters.values, "rope_type": "longrope"})
    base = base_config(fields, defaults, max_model_len, parameters)
    names = TensorNames(qkv=("self_attn.qkv_proj",), mlp_in=("mlp.gate_up_proj",))
    return attrs.evolve(with_window(base, fields.optional_integer("sliding_window")), names=names)


def granite(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a Granite: Llama with a multiplier at each place where numbers may grow."""
    return with_biases(
        fields, with_granite_multipliers(fields, base_config(fields, Defaults(), max_model_len))
    )


def with_granite_multipliers(fields: Fields, config: DecoderConfig) -> DecoderConfig:
    """Read the multipliers of a Granite, dense or with experts."""
    scale = fields.number("attention_multiplier", 1.0)
    return attrs.evolve(
        with_layers(config, [{"attention_scale": scale}] * len(config.layers)),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        scales_given_embeddings=True,
        residual_scale=fields.number("residual_multiplier", 1.0),
        logit_scale=1.0 / positive(fields, "logits_scaling", 1.0),
    )


def smollm3(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a SmolLM 3: Llama with layers that do not encode positions."""
    defaults = Defaults(
        vocab_size=128_256,
        hidden_size=2048,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=32768,
        rope_theta=2_000_000.0,
        tie_word_embeddings=True,
    )
    config = base_config(fields, defaults, max_model_len)
    count = len(config.layers)
    every = fields.integer("no_rope_layer_interval", 4)
    rotates = fields.integers("no_rope_layers") or tuple(int((i + 1) % every != 0) for i in range(count))
    if len(rotates) != count or not set(rotates) <= {0, 1}:
        raise fields.wrong("no_rope_layers", f"{count} times 0 or 1")
    window = fields.optional_integer("sliding_window") if fields.flag("use_sliding_window", False) else None
    kinds = layer_types(fields, [FULL if window is None or rotates[i] else SLIDING for i in range(count)])
    changes: list[dict[str, Any]] = [
        {"sliding_window": window if kind == SLIDING else None, **({} if turns else {"rope": None})}
        for kind, turns in zip(kinds, rotates, strict=True)
    ]
    return with_biases(fields, with_layers(config, changes))


POST_NORM_NAMES = TensorNames(
    attention_norm="",
    mlp_norm="",
    post_attention_norm="post_attention_layernorm",
    post_mlp_norm="post_feedforward_layernorm",
)
_OLMO2 = Defaults(vocab_size=50304, rms_norm_eps=1e-5)


def olmo2(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read an OLMo 2: blocks are normalised after they were computed, queries and keys over all heads."""
    return _olmo(fields, base_config(fields, _OLMO2, max_model_len))


def _olmo(fields: Fields, config: DecoderConfig) -> DecoderConfig:
    return attrs.evolve(
        with_attention_bias(fields, config), names=POST_NORM_NAMES, qk_norm=True, qk_norm_of_rows=True
    )


def olmo3(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read an OLMo 3: OLMo 2 with windows, in whose layers the rotary encoding is never scaled."""
    defaults = attrs.evolve(_OLMO2, rope_theta=500_000.0)
    globally, locally = rope_parameters_by_kind(fields)
    config = base_config(fields, defaults, max_model_len, globally)
    # transformers gives the config's own rope_theta to the layers without a window only
    locally = attrs.evolve(locally, values={"rope_theta": defaults.rope_theta, **locally.values})
    local_rope, _ = rope_of(fields, locally, defaults, config.head_dim, max_model_len)
    pattern = [SLIDING if (index + 1) % 4 else FULL for index in range(len(config.layers))]
    sliding = {"sliding_window": fields.optional_integer("sliding_window", 4096), "rope": local_rope}
    kinds = layer_types(fields, pattern)
    return _olmo(fields, with_layers(config, [sliding if kind == SLIDING else {} for kind in kinds]))


def exaone4(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read an EXAONE 4: norms behind the blocks, and layers without a window that do not encode positions."""
    defaults = Defaults(vocab_size=102_400, intermediate_size=16384, rms_norm_eps=1e-5)
    config = base_config(fields, defaults, max_model_len)
    return attrs.evolve(with_exaone_windows(fields, config), names=POST_NORM_NAMES, qk_norm=True)


def with_exaone_windows(fields: Fields, config: DecoderConfig) -> DecoderConfig:
    """Give the sliding layers of an EXAONE their window; with windows the others do not encode positions."""
    window = fields.optional_integer("sliding_window", 4096)
    pattern = [FULL] * len(config.layers)
    if window is not None and not fields.texts("layer_types"):
        pattern = full_every(fields, "sliding_window_pattern", 4, len(config.layers))
    kinds = layer_types(fields, pattern)
    if window is None:
        return config
    whole: dict[str, Any] = {"rope": None}
    return with_layers(config, [{"sliding_window": window} if kind == SLIDING else whole for kind in kinds])


_GLM = Defaults(
    vocab_size=151_552,
    intermediate_size=13696,
    num_hidden_layers=40,
    num_key_value_heads=2,
    head_dim=128,
    max_position_embeddings=131_072,
    rms_norm_eps=1.5625e-7,
    has_partial_rotary=True,
    partial_rotary_factor=0.5,
    interleaved_rotary=True,
)
_GLM_NAMES = TensorNames(mlp_in=("mlp.gate_up_proj",))


def glm(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a GLM: half of each head turns, adjacent dimensions together."""
    config = base_config(fields, _GLM, max_model_len)
    return attrs.evolve(config, names=_GLM_NAMES, qkv_bias=fields.flag("attention_bias", True))


def glm4(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a GLM 4: GLM with norms behind the blocks, too."""
    names = attrs.evolve(
        _GLM_NAMES, post_attention_norm="post_self_attn_layernorm", post_mlp_norm="post_mlp_layernorm"
    )
    return attrs.evolve(glm(fields, max_model_len), names=names)


def ministral(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a Ministral: Mistral with windows in the layers that ask for them."""
    defaults = Defaults(intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=131_072)
    config = base_config(fields, defaults, max_model_len)
    window = fields.optional_integer("sliding_window", 4096)
    kinds = layer_types(fields, [FULL if window is None else SLIDING] * len(config.layers))
    return with_windows(config, kinds, window)


def ministral3(fields: Fields, max_model_len: int | None) -> DecoderConfig:
    """Read a Ministral 3: Mistral with YaRN and queries that grow with their position."""
    defaults = Defaults(
        vocab_size=131_072,
        intermediate_size=14336,
        num_hidden_layers=34,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=262_144,
        rms_norm_eps=1e-5,
    )
    parameters = rope_parameters_of(fields)
    if not parameters.values:
        scaling = {"rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "mscale": 1.0}
        growth = {"original_max_position_embeddings": 16384, "llama_4_scaling_beta": 0.1}
        values = {**scaling, **growth, "mscale_all_dim": 1.0}
        parameters = attrs.evolve(parameters, values=values)
    config = base_config(fields, defaults, max_model_len, parameters)
    beta = parameters.number("llama_4_scaling_beta", 0.0)
    length = parameters.optional_integer("original_max_position_embeddings")
    if beta and length is None:
        raise parameters.wrong("original_max_position_embeddings", "given beside llama_4_scaling_beta")
    return attrs.evolve(
        with_window(config, fields.optional_integer("sliding_window")),
        query_growth=QueryGrowth(beta=beta, length=length) if beta and length else None,
    )
