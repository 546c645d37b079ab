"""Building the torch decoder: its weights are read tensor by tensor, into the layers that compute with them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from triolet.model.architectures.decoder_config import (
    DecoderConfig,
    LatentConfig,
    LayerConfig,
    MoeConfig,
)
from triolet.model.architectures.kv_format import KvFormat
from triolet.model.architectures.recurrent.configs import (
    KimiDeltaConfig,
    LightningConfig,
    Mamba1Config,
    MambaConfig,
    RecurrentConfig,
    SharedBlockConfig,
    ShortConvolutionConfig,
)
from triolet.model.architectures.recurrent.plans import shared_block_name
from triolet.model.architectures.weight_map import WeightReader
from triolet.model.backends.decoder_facts import DecoderFacts, decoder_facts
from triolet.model.backends.layers.activation import (
    PLAIN,
    Activation,
    Xielu,
    clamped_gate,
    feed_forward_activation,
    scaled_gate,
)
from triolet.model.backends.layers.latent_attention import LatentAttention, split_latent_up
from triolet.model.backends.layers.layer_inputs import LayerInput, LayerInputs, layer_input_scales
from triolet.model.backends.layers.linear import LinearLayer, make_linear, read_linear
from triolet.model.backends.layers.mixture_of_experts import (
    DenseBesideExperts,
    ExpertRouter,
    GroupedExperts,
    GroupedRouter,
    MixtureOfExperts,
    SoftmaxRouter,
    read_experts,
)
from triolet.model.backends.layers.recurrent.delta_net import build_delta_net
from triolet.model.backends.layers.recurrent.kimi_delta import build_kimi_delta
from triolet.model.backends.layers.recurrent.lightning import build_lightning_attention
from triolet.model.backends.layers.recurrent.mamba import build_mamba
from triolet.model.backends.layers.recurrent.mamba1 import build_mamba1
from triolet.model.backends.layers.recurrent.short_convolution import (
    build_short_convolution,
)
from triolet.model.backends.layers.shared_block import LowRankSum, SharedBlockBeforeRecurrence
from triolet.model.backends.quant_method import LinearWeights

if TYPE_CHECKING:
    from triolet.model.adapters import LayerAdapters


from triolet.model.backends.torch_decoder import (
    Attention,
    AttentionBesideRecurrence,
    Decoder,
    DecoderLayer,
    FeedForward,
    Mixer,
    Norm,
    NormOfHeads,
    Recurrence,
    with_kv_format,
)


def build_decoder(
    config: DecoderConfig,
    weights: WeightReader,
    *,
    max_model_len: int | None = None,
    adapters: LayerAdapters | None = None,
    kv_format: KvFormat | None = None,
) -> Decoder:
    """Read the weights, tensor by tensor, into a decoder.

    Args:
        config: the model.
        weights: loaded by the plans of `config`.
        max_model_len: longest sequence that will be asked for, tokens; bounds the rotary tables.
        adapters: LoRA adapters that change its layers.
        kv_format: of a KV cache in float8; None for one in the dtype of the weights.
    """
    facts = decoder_facts(config, weights, max_model_len)
    embedding = weights["embedding.weight"]
    learned_positions = learned_positions_of(config, weights)
    shared = _build_shared_blocks(config, weights, facts)
    layers = tuple(
        _build_layer(config, layer, f"layers.{index}.", weights, facts, adapters, shared)
        for index, layer in enumerate(config.layers)
    )
    stored_head = weights.get("head.weight")
    head = make_linear(
        LinearWeights(embedding if stored_head is None else stored_head, weights.get("head.bias"))
    )
    if adapters is not None:
        adapters.bank.add_layer("head", head.stored)
    decoder = Decoder(
        spec=facts.spec,
        embedding=embedding,
        embedding_scale=embedding_scale_of(config, weights.dtype),
        learned_positions=learned_positions,
        layers=layers,
        cache_places=facts.cache_places,
        layer_inputs=_build_layer_inputs(config, weights),
        final_norm=_build_norm(config, "final_norm", weights),
        head=head,
        logit_scale=config.logit_scale,
        logit_soft_cap=config.logit_soft_cap,
        adapters=adapters,
    )
    return decoder if kv_format is None else with_kv_format(decoder, kv_format)


def _build_layer(
    config: DecoderConfig,
    layer: LayerConfig,
    prefix: str,
    weights: WeightReader,
    facts: DecoderFacts,
    adapters: LayerAdapters | None,
    shared: Mapping[str, _SharedBlock],
) -> DecoderLayer:
    norm = _build_optional_norm(config, prefix + "attention_norm", weights)
    mixer: Mixer
    if layer.shared_block is None:
        mixer = _build_mixer(config, layer, prefix, weights, facts, adapters)
    else:
        assert norm is not None and layer.recurrent is not None, "the block is in front of a recurrence"
        recurrence = _build_recurrence(config, layer.recurrent, prefix, weights)
        block = shared[shared_block_name(layer.shared_block)]
        mixer = _before_recurrence(layer.shared_block, block, prefix, weights, norm, recurrence)
        norm = None
    return DecoderLayer(
        attention_norm=norm,
        attention=mixer,
        post_attention_norm=_build_optional_norm(config, prefix + "post_attention_norm", weights),
        mlp_norm=_build_optional_norm(config, prefix + "mlp_norm", weights),
        mlp=_build_mlp(config, layer, prefix, weights, adapters) if layer.has_feed_forward else None,
        post_mlp_norm=_build_optional_norm(config, prefix + "post_mlp_norm", weights),
        parallel_block=config.parallel_block,
        residual_scale=config.residual_scale,
        layer_input=None if config.layer_inputs is None else _build_layer_input(config, prefix, weights),
        output_scale=weights.get(prefix + "scale"),
        norm_residuals=layer.norm_residuals,
    )


@attrs.frozen(eq=False)
class _SharedBlock:
    """What the layers with a shared block have in common."""

    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: FeedForward


def _build_shared_blocks(
    config: DecoderConfig, weights: WeightReader, facts: DecoderFacts
) -> dict[str, _SharedBlock]:
    found: dict[str, _SharedBlock] = {}
    for layer in config.layers:
        if layer.shared_block is None or (name := shared_block_name(layer.shared_block)) in found:
            continue
        mlp = _build_mlp(config, layer, name, weights, None)
        assert isinstance(mlp, FeedForward), "it has no experts"
        found[name] = _SharedBlock(
            _build_norm(config, name + "attention_norm", weights),
            _build_attention(config, layer, name, weights, facts, None),
            _build_norm(config, name + "mlp_norm", weights),
            mlp,
        )
    return found


def _before_recurrence(
    config: SharedBlockConfig,
    block: _SharedBlock,
    prefix: str,
    weights: WeightReader,
    norm: Norm,
    recurrence: Recurrence,
) -> SharedBlockBeforeRecurrence:
    """Return a layer's mixer with the shared weights and its own."""

    def adapted(plain: LinearLayer, *parts: str) -> LinearLayer:
        names = [f"{prefix}{part}_adapter" for part in parts]
        pairs = [(read_linear(f"{name}.in", weights), read_linear(f"{name}.out", weights)) for name in names]
        return LowRankSum(plain, tuple(pairs))

    attention, mlp = block.attention, block.mlp
    if config.adapter is not None:
        mlp = attrs.evolve(mlp, project_in=adapted(mlp.project_in, "mlp"))
        if config.adapts_attention:
            attention = attrs.evolve(attention, qkv=adapted(attention.qkv, "query", "key", "value"))
    return SharedBlockBeforeRecurrence(
        attention_norm=block.attention_norm,
        attention=attention,
        mlp_norm=block.mlp_norm,
        mlp=mlp,
        out=read_linear(prefix + "shared_out", weights),
        recurrent_norm=norm,
        recurrence=recurrence,
    )


def _build_layer_inputs(config: DecoderConfig, weights: WeightReader) -> LayerInputs | None:
    if (inputs := config.layer_inputs) is None:
        return None
    return LayerInputs(
        embedding=weights["layer_inputs.embedding.weight"],
        projection=_build_linear("layer_inputs.projection", weights),
        norm=_build_norm(config, "layer_inputs.norm", weights),
        size=inputs.size,
        scales=layer_input_scales(config, inputs, weights.dtype),
    )


def _build_layer_input(config: DecoderConfig, prefix: str, weights: WeightReader) -> LayerInput:
    return LayerInput(
        gate=_build_linear(prefix + "layer_input.in", weights),
        out=_build_linear(prefix + "layer_input.out", weights),
        norm=_build_norm(config, prefix + "post_layer_input_norm", weights),
        activation=PLAIN[config.activation],
    )


def _build_mixer(
    config: DecoderConfig,
    layer: LayerConfig,
    prefix: str,
    weights: WeightReader,
    facts: DecoderFacts,
    adapters: LayerAdapters | None,
) -> Mixer:
    if layer.latent is not None:
        return _build_latent_attention(config, layer, layer.latent, prefix, weights, facts, adapters)
    recurrence = None
    if layer.recurrent is not None:
        recurrence = _build_recurrence(config, layer.recurrent, prefix, weights)
        if layer.parallel_mixers is None:
            return recurrence
    attention = _build_attention(config, layer, prefix, weights, facts, adapters)
    if recurrence is None or layer.parallel_mixers is None:
        return attention
    return AttentionBesideRecurrence(attention, recurrence, layer.parallel_mixers)


def _build_recurrence(
    config: DecoderConfig, recurrent: RecurrentConfig, prefix: str, weights: WeightReader
) -> Recurrence:
    eps = config.norm.eps
    if isinstance(recurrent, ShortConvolutionConfig):
        return build_short_convolution(recurrent, prefix, weights)
    if isinstance(recurrent, MambaConfig):
        activation = PLAIN[recurrent.activation]
        eps = eps if recurrent.norm_eps is None else recurrent.norm_eps
        return build_mamba(recurrent, prefix, weights, norm_eps=eps, activation=activation)
    if isinstance(recurrent, Mamba1Config):
        return build_mamba1(recurrent, prefix, weights, PLAIN[recurrent.activation])
    activation = PLAIN[config.activation]
    if isinstance(recurrent, LightningConfig):
        return build_lightning_attention(recurrent, prefix, weights, activation)
    if isinstance(recurrent, KimiDeltaConfig):
        return build_kimi_delta(recurrent, prefix, weights, norm_eps=eps, activation=activation)
    return build_delta_net(recurrent, prefix, weights, norm_eps=eps, activation=activation)


def _build_attention(
    config: DecoderConfig,
    layer: LayerConfig,
    prefix: str,
    weights: WeightReader,
    facts: DecoderFacts,
    adapters: LayerAdapters | None,
) -> Attention:
    sinks = weights.get(prefix + "sinks")
    return Attention(
        qkv=_build_linear(prefix + "qkv", weights, adapters),
        out=_build_linear(prefix + "attention_out", weights, adapters),
        query_norm=_build_head_norm(config, prefix + "query_norm", layer, weights),
        key_norm=_build_head_norm(config, prefix + "key_norm", layer, weights),
        norms_after_rope=config.qk_norm_after_rope,
        value_norm=_unweighted(config, layer, weights) if config.value_norm else None,
        norms_rows=config.qk_norm_of_rows,
        cos_sin=None if layer.rope is None else facts.rope_tables[layer.rope],
        interleaved=layer.rope is not None and layer.rope.interleaved,
        query_factors=facts.query_factors,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads_of(layer),
        head_dim=config.head_dim_of(layer),
        scale=layer.attention_scale,
        sliding_window=layer.sliding_window,
        soft_cap=config.attention_soft_cap,
        sinks=None if sinks is None else sinks.float(),
        only_queries=layer.reads_cache_of is not None,
        is_gated=config.attention_gate,
        head_gate=_build_linear(prefix + "head_gate", weights) if config.head_gate else None,
    )


def _build_latent_attention(
    config: DecoderConfig,
    layer: LayerConfig,
    latent: LatentConfig,
    prefix: str,
    weights: WeightReader,
    facts: DecoderFacts,
    adapters: LayerAdapters | None,
) -> LatentAttention:
    query_down = None
    if latent.query_size is not None:
        down = _build_linear(prefix + "query_down", weights)
        norm = _build_norm(config, prefix + "query_down_norm", weights)
        query_down = functools.partial(_normalized, norm, down)
    key_up, value_up = split_latent_up(weights[prefix + "latent_up.weight"], config.num_heads, latent)
    return LatentAttention(
        query_down=query_down,
        query_up=_build_linear(prefix + "query_up", weights),
        latent_down=_build_linear(prefix + "latent_down", weights),
        latent_norm=_build_norm(config, prefix + "latent_norm", weights),
        key_up=key_up,
        value_up=value_up,
        out=_build_linear(prefix + "attention_out", weights, adapters),
        cos_sin=None if layer.rope is None else facts.rope_tables[layer.rope],
        interleaved=layer.rope is not None and layer.rope.interleaved,
        num_heads=config.num_heads,
        scale=layer.attention_scale,
        config=latent,
    )


def _normalized(norm: Norm, down: LinearLayer, x: Tensor) -> Tensor:
    return norm(down(x))


def _build_mlp(
    config: DecoderConfig,
    layer: LayerConfig,
    prefix: str,
    weights: WeightReader,
    adapters: LayerAdapters | None,
) -> FeedForward | MixtureOfExperts | DenseBesideExperts:
    def block(name: str, adapters: LayerAdapters | None = None) -> FeedForward:
        project_in = _build_linear(f"{prefix}{name}.in", weights, adapters)
        project_out = _build_linear(f"{prefix}{name}.out", weights, adapters)
        return FeedForward(project_in, project_out, activation)

    activation: Activation
    if config.activation == "xielu":
        activation = xielu_of(prefix, weights)
    else:
        activation = feed_forward_activation(config.activation, gated=config.gated)
    if (config.mlp_gate_scale, config.mlp_scale) != (1.0, 1.0):
        has_bias = config.mlp_bias and config.mlp_scale != 1.0
        assert config.gated and not has_bias, "the output's bias would have to be multiplied, too"
        activation = functools.partial(
            scaled_gate, config.activation, config.mlp_gate_scale, config.mlp_scale
        )
    if layer.moe is not None and layer.moe.gate is not None:
        activation = functools.partial(clamped_gate, layer.moe.gate)
    if layer.moe is None:
        return block("mlp", adapters)
    names = [f"{prefix}experts.{expert}" for expert in range(layer.moe.num_experts)]
    experts: tuple[FeedForward, ...] | GroupedExperts | None = read_experts(names, weights, activation)
    if experts is None:
        experts = tuple(block(f"experts.{expert}") for expert in range(layer.moe.num_experts))
    shared = None if layer.moe.shared_size is None else block("shared")
    has_gate = shared is not None and layer.moe.has_shared_gate
    mixture = MixtureOfExperts(
        _build_router(layer.moe, prefix, weights),
        experts,
        shared,
        _build_linear(prefix + "shared_gate", weights) if has_gate else None,
    )
    if not layer.moe.is_beside_dense:
        return mixture
    return DenseBesideExperts(
        dense=block("mlp", adapters),
        post_dense_norm=_build_norm(config, prefix + "post_dense_norm", weights),
        mixture=mixture,
        router_norm=Norm(router_norm_weight(config, prefix, weights), None, config.norm),
        experts_norm=_build_norm(config, prefix + "experts_norm", weights),
        post_experts_norm=_build_norm(config, prefix + "post_experts_norm", weights),
    )


def router_norm_weight(config: DecoderConfig, prefix: str, weights: WeightReader) -> Tensor:
    """Return the weight of the norm through which the router reads the residual stream, [hidden]."""
    scale: Tensor = weights[prefix + "router_norm"]
    return scale.mul(config.hidden_size**-0.5)


def _build_router(moe: MoeConfig, prefix: str, weights: WeightReader) -> ExpertRouter:
    if moe.routing is None:
        scales = weights.read_float32(prefix + "expert_scales") if moe.has_expert_scales else None
        linear = _build_linear(prefix + "router", weights)
        return SoftmaxRouter(linear, moe.experts_per_token, moe.normalize, scales)
    correction = None
    if moe.routing.is_corrected:
        correction = weights.read_float32(prefix + "router_correction").flatten()
    weight = weights.read_float32(prefix + "router.weight")
    return GroupedRouter(weight, correction, moe.routing, moe.experts_per_token, moe.normalize)


def _build_linear(name: str, weights: WeightReader, adapters: LayerAdapters | None = None) -> LinearLayer:
    plain = read_linear(name, weights)
    if adapters is None:
        return plain
    adapters.bank.add_layer(name, plain.stored)
    return adapters.adapted(plain, name)


def _build_norm(config: DecoderConfig, name: str, weights: WeightReader) -> Norm:
    return Norm(weights[f"{name}.weight"], weights.get(f"{name}.bias"), config.norm)


def _unweighted(config: DecoderConfig, layer: LayerConfig, weights: WeightReader) -> Norm:
    ones = torch.ones(config.head_dim_of(layer), dtype=weights.dtype, device=weights.device)
    return Norm(ones, None, config.norm)


def _build_head_norm(
    config: DecoderConfig, name: str, layer: LayerConfig, weights: WeightReader
) -> Norm | NormOfHeads | None:
    norm = _build_optional_norm(config, name, weights)
    if norm is None or not config.qk_norm_of_heads:
        return norm
    return NormOfHeads(norm.weight.view(-1, config.head_dim_of(layer)), config.norm)


def learned_positions_of(config: DecoderConfig, weights: WeightReader) -> Tensor | None:
    """Return the learned vectors of the positions, [max_position, hidden]; None without any."""
    rows = weights.get("positions.weight")
    return None if rows is None else rows[config.position_offset :]


def xielu_of(prefix: str, weights: WeightReader) -> Xielu:
    """Read the activation of a layer that has learned it."""
    numbers = {"beta": 0.5, "eps": -1e-6}  # of files that lack them
    for name in ("alpha_p", "alpha_n", "beta", "eps"):
        if (stored := f"{prefix}xielu.{name}") in weights:
            numbers[name] = weights.read_float32(stored).item()
    return Xielu.of(**numbers)


def _build_optional_norm(config: DecoderConfig, name: str, weights: WeightReader) -> Norm | None:
    return _build_norm(config, name, weights) if f"{name}.weight" in weights else None


def embedding_scale_of(config: DecoderConfig, dtype: torch.dtype) -> float | None:
    """Return the scale of the embeddings; where it belongs to the table it is rounded to the model's dtype."""
    scale = config.embedding_scale
    # Gemma was trained with a scale rounded to bfloat16.
    return (
        scale if scale is None or config.scales_given_embeddings else torch.tensor(scale, dtype=dtype).item()
    )
