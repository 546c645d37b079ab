"""The native decoder: one compact transformer for every family that `families.py` can describe.

Queries, keys and values come from one merged projection, and so do gate and up; there is one residual
stream, and its additions are part of the norms; keys and values live in the paged cache. What sets families
apart is in the data: a norm that is absent, a bias that is None, a window, a soft cap.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Protocol

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from triolet.kernels.attention_metadata import AttentionMetadata
from triolet.kernels.flash_attention import FlashAttention
from triolet.kernels.kv_write import kv_write
from triolet.kernels.paged_attention import paged_attention
from triolet.kernels.qkv_prepare import HeadNorms, qkv_prepare
from triolet.kernels.rms_norm import rms_norm
from triolet.kernels.rotary import rotary
from triolet.model.architectures.decoder_config import (
    DecoderConfig,
    LatentConfig,
    LayerConfig,
    MambaConfig,
    MoeConfig,
    NormConfig,
    ShortConvolutionConfig,
)
from triolet.model.architectures.kv_format import NO_SCALES, KvFormat, KvScales
from triolet.model.architectures.weight_map import WeightReader
from triolet.model.backends.decoder_facts import DecoderFacts, decoder_facts
from triolet.model.backends.layers.activation import PLAIN, Activation, clamped_gate, feed_forward_activation
from triolet.model.backends.layers.latent_attention import LatentAttention, split_latent_up
from triolet.model.backends.layers.linear import LinearLayer, make_linear, read_linear
from triolet.model.backends.layers.mixture_of_experts import (
    ExpertRouter,
    GroupedExperts,
    GroupedRouter,
    MixtureOfExperts,
    SoftmaxRouter,
    read_experts,
)
from triolet.model.backends.layers.recurrent.delta_net import DeltaNet, build_delta_net
from triolet.model.backends.layers.recurrent.mamba import Mamba, build_mamba
from triolet.model.backends.layers.recurrent.short_convolution import (
    ShortConvolution,
    build_short_convolution,
)
from triolet.model.backends.quant_method import LinearWeights
from triolet.model.interface import ForwardBatch, LayerCache, ModelSpec

if TYPE_CHECKING:
    from triolet.model.adapters import LayerAdapters

# Layers are plain callables, not `torch.nn.Module`s: they are never trained or moved, and at small batches the overhead
# of a module's call would be a good part of a step.


class Head(Protocol):
    """Output head: [n, hidden] to logits [n, vocab_size]."""

    def __call__(self, x: Tensor) -> Tensor: ...


@attrs.frozen(eq=False)
class Norm:
    """A root-mean-square norm, or a layer norm where the config says `centered`."""

    weight: Tensor
    bias: Tensor | None
    config: NormConfig

    def __call__(self, x: Tensor) -> Tensor:
        if self.config.centered:
            return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.config.eps)
        return rms_norm(x, self.weight, self.config.eps, weight_offset=self.config.weight_offset)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add `x` to the residual stream; return the stream normalised, and the stream."""
        if residual is None:
            return self(x), x
        if self.config.centered:
            total = x + residual
            return self(total), total
        return rms_norm(
            x, self.weight, self.config.eps, residual=residual, weight_offset=self.config.weight_offset
        )


@attrs.frozen(eq=False, kw_only=True)
class Attention:
    """Causal attention over the paged cache, with grouped queries."""

    qkv: LinearLayer
    out: LinearLayer
    query_norm: Norm | None
    key_norm: Norm | None
    norms_rows: bool  # the two norms are over all heads of a token together
    cos_sin: Tensor | None  # this layer's rotary table; None where queries and keys do not turn
    interleaved: bool  # adjacent dimensions turn together
    query_factors: Tensor | None  # [positions] float32: rotated queries are multiplied by them
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    sinks: Tensor | None  # [num_heads] float32: adds to the softmax's denominator
    is_gated: bool = False  # each query has a gate behind it, of which the sigmoid multiplies the output
    kv_scales: KvScales = NO_SCALES  # of a cache in float8
    prompts: FlashAttention | None = None  # on a GPU, in place of the Triton kernel

    def __call__(
        self, x: Tensor, positions: Tensor, cache: LayerCache, attention: AttentionMetadata
    ) -> Tensor:
        # [num_tokens, hidden] -> [num_tokens, hidden]
        heads = self.qkv(x).view(len(x), -1, self.head_dim)
        gates = None
        if self.is_gated:
            gates, heads = self._without_gates(heads)
        query = (self._prepare_at_once if heads.is_cuda and self._is_plain else self._prepare)(
            heads, positions, cache, attention
        )
        mixed = paged_attention(
            query,
            cache.keys,
            cache.values,
            attention,
            scale=self.scale,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
            sinks=self.sinks,
            key_scale=self.kv_scales.keys,
            value_scale=self.kv_scales.values,
            prompts=self.prompts,
        )
        return self.out((mixed if gates is None else mixed * gates.sigmoid()).flatten(1))

    def _without_gates(self, heads: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gates, one behind each query, and the heads without them."""
        gated = heads[:, : 2 * self.num_heads].unflatten(1, (self.num_heads, 2))
        return gated[:, :, 1], torch.cat((gated[:, :, 0], heads[:, 2 * self.num_heads :]), dim=1)

    def _prepare(
        self, heads: Tensor, positions: Tensor, cache: LayerCache, attention: AttentionMetadata
    ) -> Tensor:
        """Normalise and turn the heads, write keys and values into the cache, and return the queries."""
        query: Tensor
        query, key, value = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            if self.norms_rows:
                query = self.query_norm(query.flatten(1)).unflatten(1, query.shape[1:])
                key = self.key_norm(key.flatten(1)).unflatten(1, key.shape[1:])
            else:
                query, key = self.query_norm(query), self.key_norm(key)
        if self.cos_sin is not None:
            rotary(query, key, self.cos_sin, positions, interleaved=self.interleaved)
        if self.query_factors is not None:
            query = query * self.query_factors[positions].to(query.dtype)[:, None, None]
        kv_write(key, cache.keys, attention.slot_mapping, self.kv_scales.keys)
        kv_write(value, cache.values, attention.slot_mapping, self.kv_scales.values)
        return query

    @property
    def is_softmax_alone(self) -> bool:
        """Tell whether its weights are a softmax of the scores and nothing else."""
        return self.sinks is None and self.soft_cap is None

    @property
    def _is_plain(self) -> bool:
        """Tell whether one kernel can prepare the heads: it norms each head, and turns halves of one."""
        if self.norms_rows or self.interleaved or self.query_factors is not None:
            return False
        return self.query_norm is None or not self.query_norm.config.centered

    def _prepare_at_once(
        self, heads: Tensor, positions: Tensor, cache: LayerCache, attention: AttentionMetadata
    ) -> Tensor:
        """Do as `_prepare` does, in one launch."""
        norms = None
        if self.query_norm is not None and self.key_norm is not None:
            config = self.query_norm.config
            norms = HeadNorms(
                query_weight=self.query_norm.weight,
                key_weight=self.key_norm.weight,
                eps=config.eps,
                weight_offset=config.weight_offset,
            )
        return qkv_prepare(
            heads,
            cache.keys,
            cache.values,
            attention.slot_mapping,
            positions,
            num_heads=self.num_heads,
            norms=norms,
            cos_sin=self.cos_sin,
            key_scale=self.kv_scales.keys,
            value_scale=self.kv_scales.values,
        )


@attrs.frozen(eq=False)
class FeedForward:
    """Project up, activate (and gate), project down."""

    project_in: LinearLayer
    project_out: LinearLayer
    activation: Activation

    def __call__(self, x: Tensor) -> Tensor:
        # [num_tokens, hidden] -> [num_tokens, hidden]
        return self.project_out(self.activation(self.project_in(x)))


@attrs.frozen(eq=False, kw_only=True)
class DecoderLayer:
    """Attention and feed-forward, each between a norm and the residual stream."""

    attention_norm: Norm | None
    attention: Attention | LatentAttention | Mamba | DeltaNet | ShortConvolution
    post_attention_norm: Norm | None
    mlp_norm: Norm | None
    mlp: FeedForward | MixtureOfExperts | None
    post_mlp_norm: Norm | None
    parallel_block: bool  # the feed-forward block reads what attention reads
    residual_scale: float  # what a block adds is multiplied by it

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        cache: LayerCache,
        attention: AttentionMetadata,
    ) -> tuple[Tensor, Tensor]:
        """Return what is yet to be added to the residual stream, and the stream; [num_tokens, hidden] each."""
        x, residual = _add(self.attention_norm, x, residual)
        mixed = self._scaled(self.attention(x, positions, cache, attention), self.post_attention_norm)
        if self.mlp is None:
            return mixed, residual
        if self.parallel_block:
            return mixed + self._scaled(self.mlp(x), self.post_mlp_norm), residual
        x, residual = _add(self.mlp_norm, mixed, residual)
        return self._scaled(self.mlp(x), self.post_mlp_norm), residual

    def _scaled(self, x: Tensor, norm: Norm | None) -> Tensor:
        x = x if norm is None else norm(x)
        return x if self.residual_scale == 1.0 else x * self.residual_scale


def _add(norm: Norm | None, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Add `x` to the residual stream; return what a block reads, and the stream."""
    if norm is not None:
        return norm.add(x, residual)
    total = x if residual is None else x + residual
    return total, total


@attrs.frozen(eq=False, kw_only=True)
class Decoder:
    """A causal language model over a paged cache; see `triolet.model.interface.CausalModel`."""

    spec: ModelSpec
    embedding: Tensor
    embedding_scale: float | None
    learned_positions: Tensor | None
    layers: tuple[DecoderLayer, ...]
    final_norm: Norm
    head: Head
    logit_scale: float
    logit_soft_cap: float | None
    adapters: LayerAdapters | None = None

    @property
    def is_capturable(self) -> bool:
        """True if its steps can be captured as a graph: on a GPU it waits for nothing and looks at no result."""
        return all(
            isinstance(layer.attention, Attention)
            and (not isinstance(layer.mlp, MixtureOfExperts) or layer.mlp.is_capturable)
            for layer in self.layers
        )

    @property
    def tile_lengths(self) -> tuple[int, ...]:
        """Return numbers of tokens of steps that launch what `WARM_UP_STEPS` do not."""
        mixtures = (layer.mlp for layer in self.layers if isinstance(layer.mlp, MixtureOfExperts))
        return tuple(sorted({length for mixture in mixtures for length in mixture.tile_lengths}))

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        x, residual = self._layers(batch)
        return self.final_norm.add(x, residual)[0]

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Compute the logits of rows. An inference tensor: only inference mode may change it."""
        return self._logits(hidden[rows], rows)

    @torch.inference_mode()
    def forward_logits(self, batch: ForwardBatch) -> Tensor:
        """Compute the logits of a batch. An inference tensor: only inference mode may change it."""
        x, residual = self._layers(batch)
        rows = batch.logits_indices  # only these are normalised
        hidden = self.final_norm.add(x[rows], None if residual is None else residual[rows])[0]
        return self._logits(hidden, rows)

    def _layers(self, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        """Return what is yet to be added to the residual stream, and the stream."""
        positions = batch.positions
        x = functional.embedding(batch.token_ids, self.embedding)
        if self.adapters is not None:
            self.adapters.begin(batch.adapter_slots)
            self.adapters.add_to_embeddings(x, batch.token_ids)
        if self.embedding_scale is not None:
            x = x * self.embedding_scale
        if (virtual := batch.embeddings) is not None:
            x = x.index_copy(0, virtual.tokens, virtual.values)
        if self.learned_positions is not None:
            x = x + functional.embedding(positions, self.learned_positions)
        residual: Tensor | None = None
        attention = (batch.attention, *batch.further_attention)
        for layer, layer_cache in zip(self.layers, batch.cache, strict=True):
            x, residual = layer(x, residual, positions, layer_cache, attention[layer_cache.group])
        return x, residual

    def _logits(self, x: Tensor, rows: Tensor) -> Tensor:
        logits = self.head(x)
        if self.adapters is not None:
            self.adapters.add_to_logits(logits, x, rows)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.logit_soft_cap is not None:
            logits = torch.tanh(logits / self.logit_soft_cap) * self.logit_soft_cap
        return logits


# ------------------------------------------------------------------------------- building from weights


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
    learned_positions = weights.get("positions.weight")
    layers = tuple(
        _build_layer(config, layer, f"layers.{index}.", weights, facts, adapters)
        for index, layer in enumerate(config.layers)
    )
    stored_head = weights.get("head.weight")
    head = make_linear(LinearWeights(embedding if stored_head is None else stored_head))
    if adapters is not None:
        adapters.bank.add_layer("head", head.stored)
    decoder = Decoder(
        spec=facts.spec,
        embedding=embedding,
        embedding_scale=rounded_scale(config.embedding_scale, weights.dtype),
        learned_positions=learned_positions,
        layers=layers,
        final_norm=_build_norm(config, "final_norm", weights),
        head=head,
        logit_scale=config.logit_scale,
        logit_soft_cap=config.logit_soft_cap,
        adapters=adapters,
    )
    return decoder if kv_format is None else with_kv_format(decoder, kv_format)


def with_kv_format(decoder: Decoder, kv_format: KvFormat) -> Decoder:
    """Return a decoder of attention layers alone with a KV cache in float8."""

    def scaled(index: int, layer: DecoderLayer) -> DecoderLayer:
        assert isinstance(layer.attention, Attention), "the other kinds are refused"
        attention = attrs.evolve(layer.attention, kv_scales=kv_format.of_layer(index))
        return attrs.evolve(layer, attention=attention)

    layers = tuple(scaled(index, layer) for index, layer in enumerate(decoder.layers))
    return attrs.evolve(decoder, layers=layers, spec=attrs.evolve(decoder.spec, kv_dtype=kv_format.dtype))


def with_prompt_attention(decoder: Decoder, prompts: FlashAttention) -> Decoder:
    """Return a decoder whose prompts are attended to in another way, where a layer has neither sinks nor a soft cap."""

    def changed(layer: DecoderLayer) -> DecoderLayer:
        if not (isinstance(layer.attention, Attention) and layer.attention.is_softmax_alone):
            return layer
        return attrs.evolve(layer, attention=attrs.evolve(layer.attention, prompts=prompts))

    return attrs.evolve(decoder, layers=tuple(map(changed, decoder.layers)))


def _build_layer(
    config: DecoderConfig,
    layer: LayerConfig,
    prefix: str,
    weights: WeightReader,
    facts: DecoderFacts,
    adapters: LayerAdapters | None,
) -> DecoderLayer:
    return DecoderLayer(
        attention_norm=_build_optional_norm(config, prefix + "attention_norm", weights),
        attention=_build_attention(config, layer, prefix, weights, facts, adapters),
        post_attention_norm=_build_optional_norm(config, prefix + "post_attention_norm", weights),
        mlp_norm=_build_optional_norm(config, prefix + "mlp_norm", weights),
        mlp=_build_mlp(config, layer, prefix, weights, adapters) if layer.has_feed_forward else None,
        post_mlp_norm=_build_optional_norm(config, prefix + "post_mlp_norm", weights),
        parallel_block=config.parallel_block,
        residual_scale=config.residual_scale,
    )


def _build_attention(
    config: DecoderConfig,
    layer: LayerConfig,
    prefix: str,
    weights: WeightReader,
    facts: DecoderFacts,
    adapters: LayerAdapters | None,
) -> Attention | LatentAttention | Mamba | DeltaNet | ShortConvolution:
    if layer.latent is not None:
        return _build_latent_attention(config, layer, layer.latent, prefix, weights, facts, adapters)
    if (recurrent := layer.recurrent) is not None:
        eps = config.norm.eps
        if isinstance(recurrent, ShortConvolutionConfig):
            return build_short_convolution(recurrent, prefix, weights)
        if isinstance(recurrent, MambaConfig):
            activation = PLAIN[recurrent.activation]
            return build_mamba(recurrent, prefix, weights, norm_eps=eps, activation=activation)
        activation = PLAIN[config.activation]
        return build_delta_net(recurrent, prefix, weights, norm_eps=eps, activation=activation)
    sinks = weights.get(prefix + "sinks")
    return Attention(
        qkv=_build_linear(prefix + "qkv", weights, adapters),
        out=_build_linear(prefix + "attention_out", weights, adapters),
        query_norm=_build_optional_norm(config, prefix + "query_norm", weights),
        key_norm=_build_optional_norm(config, prefix + "key_norm", weights),
        norms_rows=config.qk_norm_of_rows,
        cos_sin=None if layer.rope is None else facts.rope_tables[layer.rope],
        interleaved=layer.rope is not None and layer.rope.interleaved,
        query_factors=facts.query_factors,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=layer.attention_scale,
        sliding_window=layer.sliding_window,
        soft_cap=config.attention_soft_cap,
        sinks=None if sinks is None else sinks.float(),
        is_gated=config.attention_gate,
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
    assert layer.rope is not None, "a part of each head is rotated"
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
        cos_sin=facts.rope_tables[layer.rope],
        interleaved=layer.rope.interleaved,
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
) -> FeedForward | MixtureOfExperts:
    def block(name: str, adapters: LayerAdapters | None = None) -> FeedForward:
        project_in = _build_linear(f"{prefix}{name}.in", weights, adapters)
        project_out = _build_linear(f"{prefix}{name}.out", weights, adapters)
        return FeedForward(project_in, project_out, activation)

    activation = feed_forward_activation(config.activation, gated=config.gated)
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
    return MixtureOfExperts(
        _build_router(layer.moe, prefix, weights),
        experts,
        shared,
        _build_linear(prefix + "shared_gate", weights) if has_gate else None,
    )


def _build_router(moe: MoeConfig, prefix: str, weights: WeightReader) -> ExpertRouter:
    if moe.routing is None:
        return SoftmaxRouter(_build_linear(prefix + "router", weights), moe.experts_per_token, moe.normalize)
    correction = weights.read_float32(prefix + "router_correction") if moe.routing.is_corrected else None
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


def _build_optional_norm(config: DecoderConfig, name: str, weights: WeightReader) -> Norm | None:
    return _build_norm(config, name, weights) if f"{name}.weight" in weights else None


def rounded_scale(scale: float | None, dtype: torch.dtype) -> float | None:
    """Return the scale rounded to the model's dtype."""
    # Gemma was trained with a scale rounded to bfloat16.
    return None if scale is None else torch.tensor(scale, dtype=dtype).item()
