"""The native decoder: one compact transformer for every family that `families.py` can describe.

Queries, keys and values come from one merged projection, and so do gate and up; there is one residual
stream, and its additions are part of the norms; keys and values live in the paged cache. What sets families
apart is in the data: a norm that is absent, a bias that is None, a window, a soft cap.
"""

from __future__ import annotations

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
from triolet.model.architectures.decoder_config import NormConfig, NormResiduals, ParallelMixers
from triolet.model.architectures.kv_format import NO_SCALES, KvFormat, KvScales
from triolet.model.backends.layers.activation import Activation
from triolet.model.backends.layers.latent_attention import LatentAttention
from triolet.model.backends.layers.layer_inputs import LayerInput, LayerInputs
from triolet.model.backends.layers.linear import LinearLayer
from triolet.model.backends.layers.mixture_of_experts import (
    DenseBesideExperts,
    MixtureOfExperts,
)
from triolet.model.backends.layers.recurrent.delta_net import DeltaNet
from triolet.model.backends.layers.recurrent.kimi_delta import KimiDelta
from triolet.model.backends.layers.recurrent.lightning import LightningAttention
from triolet.model.backends.layers.recurrent.mamba import Mamba
from triolet.model.backends.layers.recurrent.mamba1 import Mamba1
from triolet.model.backends.layers.recurrent.short_convolution import (
    ShortConvolution,
)
from triolet.model.backends.layers.shared_block import SharedBlockBeforeRecurrence
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


@attrs.frozen(eq=False)
class NormOfHeads:
    """A layer norm of each head, with weights of its own and no bias."""

    weight: Tensor  # [num_heads, head_dim]
    config: NormConfig

    def __call__(self, x: Tensor) -> Tensor:
        # [num_tokens, num_heads, head_dim] to the same
        return functional.layer_norm(x, x.shape[-1:], eps=self.config.eps) * self.weight


@attrs.frozen(eq=False, kw_only=True)
class Attention:
    """Causal attention over the paged cache, with grouped queries."""

    qkv: LinearLayer
    out: LinearLayer
    query_norm: Norm | NormOfHeads | None
    key_norm: Norm | NormOfHeads | None
    value_norm: Norm | None
    norms_rows: bool  # the two norms are over all heads of a token together
    norms_after_rope: bool  # the two are of queries and keys that have turned
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
    only_queries: bool = False  # keys and values are those of an earlier layer, in its cache
    is_gated: bool = False  # each query has a gate behind it, of which the sigmoid multiplies the output
    head_gate: LinearLayer | None = (
        None  # gives a gate for each head, of which the sigmoid multiplies its output
    )
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
        if self.head_gate is not None:
            gates = self.head_gate(x).unsqueeze(-1)
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
        if self.only_queries:
            return self._prepare_queries(heads, positions)
        query, key, value = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.value_norm is not None:
            value = self.value_norm(value)
        if not self.norms_after_rope:
            query, key = self._normed(query, key)
        if self.cos_sin is not None:
            rotary(query, key, self.cos_sin, positions, interleaved=self.interleaved)
        if self.norms_after_rope:
            query, key = self._normed(query, key)
        if self.query_factors is not None:
            query = query * self.query_factors[positions].to(query.dtype)[:, None, None]
        kv_write(key, cache.keys, attention.slot_mapping, self.kv_scales.keys)
        kv_write(value, cache.values, attention.slot_mapping, self.kv_scales.values)
        return query

    def _normed(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        if self.query_norm is None or self.key_norm is None:
            return query, key
        if not self.norms_rows:
            return self.query_norm(query), self.key_norm(key)
        normed = self.query_norm(query.flatten(1)).unflatten(1, query.shape[1:])
        return normed, self.key_norm(key.flatten(1)).unflatten(1, key.shape[1:])

    def _prepare_queries(self, query: Tensor, positions: Tensor) -> Tensor:
        query = query if self.query_norm is None else self.query_norm(query)
        if self.cos_sin is not None:
            nothing = query.new_empty(len(query), 0, self.head_dim)
            rotary(query, nothing, self.cos_sin, positions, interleaved=self.interleaved)
        return query

    @property
    def is_softmax_alone(self) -> bool:
        """Tell whether its weights are a softmax of the scores and nothing else."""
        return self.sinks is None and self.soft_cap is None

    @property
    def _is_plain(self) -> bool:
        """Tell whether one kernel can prepare the heads: it norms each head, and turns halves of one."""
        if self.norms_rows or self.norms_after_rope or self.interleaved or self.query_factors is not None:
            return False
        if self.only_queries or self.value_norm is not None:
            return False
        return self.query_norm is None or not self.query_norm.config.centered

    def _prepare_at_once(
        self, heads: Tensor, positions: Tensor, cache: LayerCache, attention: AttentionMetadata
    ) -> Tensor:
        """Do as `_prepare` does, in one launch."""
        norms = None
        if self.query_norm is not None and self.key_norm is not None:
            config = self.query_norm.config  # of an RMS norm: see `_is_plain`
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


Recurrence = Mamba | Mamba1 | DeltaNet | KimiDelta | LightningAttention | ShortConvolution


@attrs.frozen(eq=False)
class AttentionBesideRecurrence:
    """Attention and a recurrence that read the same numbers; what they give is scaled and added."""

    attention: Attention
    recurrence: Recurrence
    config: ParallelMixers

    def __call__(
        self, x: Tensor, positions: Tensor, cache: LayerCache, attention: AttentionMetadata
    ) -> Tensor:
        # [num_tokens, hidden] -> [num_tokens, hidden]
        attended = self.attention(x, positions, cache, attention) * self.config.attention_scale
        return attended + self.recurrence(x, positions, cache, attention) * self.config.recurrent_scale


Mixer = Attention | LatentAttention | Recurrence | AttentionBesideRecurrence | SharedBlockBeforeRecurrence


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
    attention: Mixer
    post_attention_norm: Norm | None
    mlp_norm: Norm | None
    mlp: FeedForward | MixtureOfExperts | DenseBesideExperts | None
    post_mlp_norm: Norm | None
    parallel_block: bool  # both blocks read the stream at once
    residual_scale: float  # what a block adds is multiplied by it
    layer_input: LayerInput | None  # what is added behind the two blocks, of an input of this layer alone
    output_scale: Tensor | None  # the residual stream behind it is multiplied by it
    norm_residuals: NormResiduals | None = (
        None  # what blocks read is in place of the stream that they are added to
    )

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        cache: LayerCache,
        attention: AttentionMetadata,
        value: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return what is yet to be added to the residual stream, and the stream; [num_tokens, hidden] each.

        `value` is the layer's own input, [num_tokens, size], or the tokens' embeddings.
        """
        x, residual = _add(self.attention_norm, x, residual)
        if isinstance(self.attention, SharedBlockBeforeRecurrence):
            assert value is not None, "the decoder gives its layers the embeddings"
            return self.attention(x, value, positions, cache, attention), residual
        mixed = self._scaled(self.attention(x, positions, cache, attention), self.post_attention_norm)
        if self.norm_residuals is not None:
            return self._added_to_norms(x, mixed, self.norm_residuals)
        if self.mlp is None:
            return mixed, residual
        if self.parallel_block:
            assert not isinstance(self.mlp, DenseBesideExperts), "no family has both"
            if self.mlp_norm is not None:
                x = self.mlp_norm(residual)
            return mixed + self._scaled(self.mlp(x), self.post_mlp_norm), residual
        x, residual = _add(self.mlp_norm, mixed, residual)
        added = self.mlp(x, residual) if isinstance(self.mlp, DenseBesideExperts) else self.mlp(x)
        x = self._scaled(added, self.post_mlp_norm)
        if self.layer_input is not None and value is not None:
            residual = x + residual
            x = self.layer_input(residual, value)
        return (x, residual) if self.output_scale is None else ((x + residual) * self.output_scale, None)

    def _added_to_norms(self, x: Tensor, mixed: Tensor, factors: NormResiduals) -> tuple[Tensor, Tensor]:
        (kept, added), (mlp_kept, mlp_added) = factors.attention, factors.mlp
        assert self.mlp is not None and self.mlp_norm is not None, "there are two blocks"
        assert not isinstance(self.mlp, DenseBesideExperts), "no family has both"
        x = self.mlp_norm(x * kept + mixed * added)
        return self.mlp(x) * mlp_added, x * mlp_kept

    @property
    def mixture(self) -> MixtureOfExperts | None:
        """Return its experts; None without any."""
        if isinstance(self.mlp, DenseBesideExperts):
            return self.mlp.mixture
        return self.mlp if isinstance(self.mlp, MixtureOfExperts) else None

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
    cache_places: tuple[int, ...]  # of each layer: the entry of the cache that it reads
    layer_inputs: LayerInputs | None
    final_norm: Norm
    head: Head
    logit_scale: float
    logit_soft_cap: float | None
    adapters: LayerAdapters | None = None

    @property
    def is_capturable(self) -> bool:
        """True if its steps can be captured as a graph: on a GPU it waits for nothing and looks at no result."""
        return all(
            isinstance(layer.attention, Attention) and (layer.mixture is None or layer.mixture.is_capturable)
            for layer in self.layers
        )

    @property
    def tile_lengths(self) -> tuple[int, ...]:
        """Return numbers of tokens of steps that launch what `WARM_UP_STEPS` do not."""
        mixtures = filter(None, (layer.mixture for layer in self.layers))
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
        embeddings = x
        values = None if self.layer_inputs is None else self.layer_inputs(batch.token_ids, x)
        for index, (layer, place) in enumerate(zip(self.layers, self.cache_places, strict=True)):
            cache, value = batch.cache[place], embeddings if values is None else values[:, index]
            x, residual = layer(x, residual, positions, cache, attention[cache.group], value)
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
