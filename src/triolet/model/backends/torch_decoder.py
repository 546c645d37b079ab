"""The native decoder: one compact transformer for every family that `families.py` can describe.

Queries, keys and values come from one merged projection, and so do gate and up; there is one residual
stream, and its additions are part of the norms; keys and values live in the paged cache. What sets families
apart is in the data: a norm that is absent, a bias that is None, a window, a soft cap.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from triolet.kernels.attention_metadata import AttentionMetadata
from triolet.kernels.kv_write import kv_write
from triolet.kernels.paged_attention import paged_attention
from triolet.kernels.rms_norm import rms_norm
from triolet.kernels.rotary import rotary
from triolet.kernels.silu_mul import gelu_tanh_mul, silu_mul
from triolet.model.architectures.decoder_config import (
    ClampedGate,
    DecoderConfig,
    LayerConfig,
    MoeConfig,
    NormConfig,
)
from triolet.model.architectures.rope import Rope, rope_table
from triolet.model.architectures.weight_map import WeightReader
from triolet.model.backends.quant_method import UNQUANTIZED, LinearWeights
from triolet.model.interface import ForwardBatch, LayerCache, LayerCacheSpec, ModelSpec

if TYPE_CHECKING:
    from triolet.model.adapters import LayerAdapters

# Layers are plain callables, not `torch.nn.Module`s: they are never trained or moved, and at small batches the overhead
# of a module's call would be a good part of a step.


@attrs.frozen(eq=False, slots=True)
class Linear:
    """x @ weight.T + bias."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        # [..., in] -> [..., out]
        return functional.linear(x, self.weight, self.bias)

    def stored(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight [num_out, num_in] and the bias."""
        return self.weight, self.bias


@attrs.frozen(eq=False, slots=True)
class PackedLinear:
    """The same with weights in oneDNN's blocked layout; float32 and bfloat16 on the CPU.

    About twice as fast there as `Linear`.
    """

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        # [num_tokens, in] -> [num_tokens, out]
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y

    def stored(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight [num_out, num_in], unpacked, and the bias."""
        return self.weight.to_dense(), self.bias


# [num_tokens, in] to [num_tokens, out]: a `Linear`, a `PackedLinear`, or one of them with adapters.
LinearLayer = Callable[[Tensor], Tensor]


class Head(Protocol):
    """Output head: [n, hidden] to logits [n, vocab_size]."""

    def __call__(self, x: Tensor) -> Tensor: ...


def make_linear(weights: LinearWeights) -> Linear | PackedLinear:
    """Choose the fastest layer for these weights."""
    if not _can_pack(weights.weight):
        return Linear(weights.weight, weights.bias)
    return PackedLinear(torch.ops.mkldnn._reorder_linear_weight(weights.weight, None), weights.bias)


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return supported
    return weight.dtype == torch.float32


Activation = Callable[[Tensor], Tensor]


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
    cos_sin: Tensor | None  # this layer's rotary table; None where positions are learned vectors
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    sinks: Tensor | None  # [num_heads] float32: adds to the softmax's denominator

    def __call__(
        self, x: Tensor, positions: Tensor, cache: LayerCache, attention: AttentionMetadata
    ) -> Tensor:
        # [num_tokens, hidden] -> [num_tokens, hidden]
        heads = self.qkv(x).view(len(x), self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        query, key, value = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.cos_sin is not None:
            rotary(query, key, self.cos_sin, positions)
        kv_write(key, cache.keys, attention.slot_mapping)
        kv_write(value, cache.values, attention.slot_mapping)
        mixed = paged_attention(
            query,
            cache.keys,
            cache.values,
            attention,
            scale=self.scale,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
            sinks=self.sinks,
        )
        return self.out(mixed.flatten(1))


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

    attention_norm: Norm
    attention: Attention
    post_attention_norm: Norm | None
    mlp_norm: Norm
    mlp: FeedForward | MixtureOfExperts
    post_mlp_norm: Norm | None

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        cache: LayerCache,
        attention: AttentionMetadata,
    ) -> tuple[Tensor, Tensor]:
        """Return what is yet to be added to the residual stream, and the stream; [num_tokens, hidden] each."""
        x, residual = self.attention_norm.add(x, residual)
        x = self.attention(x, positions, cache, attention)
        if self.post_attention_norm is not None:
            x = self.post_attention_norm(x)
        x, residual = self.mlp_norm.add(x, residual)
        x = self.mlp(x)
        if self.post_mlp_norm is not None:
            x = self.post_mlp_norm(x)
        return x, residual


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
    logit_soft_cap: float | None
    adapters: LayerAdapters | None = None

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
        for layer, layer_cache in zip(self.layers, batch.cache, strict=True):
            x, residual = layer(x, residual, positions, layer_cache, batch.attention)
        return x, residual

    def _logits(self, x: Tensor, rows: Tensor) -> Tensor:
        logits = self.head(x)
        if self.adapters is not None:
            self.adapters.add_to_logits(logits, x, rows)
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
) -> Decoder:
    """Read the weights, tensor by tensor, into a decoder.

    Args:
        config: the model.
        weights: loaded by the plans of `config`.
        max_model_len: longest sequence that will be asked for, tokens; bounds the rotary tables.
        adapters: LoRA adapters that change its layers.
    """
    facts = decoder_facts(config, weights, max_model_len)
    embedding = weights["embedding.weight"]
    learned_positions = weights.get("positions.weight")
    layers = tuple(
        _build_layer(config, layer, f"layers.{index}.", weights, facts.rope_tables, adapters)
        for index, layer in enumerate(config.layers)
    )
    stored_head = weights.get("head.weight")
    head = make_linear(LinearWeights(embedding if stored_head is None else stored_head))
    if adapters is not None:
        adapters.bank.add_layer("head", head.stored)
    return Decoder(
        spec=facts.spec,
        embedding=embedding,
        embedding_scale=rounded_scale(config.embedding_scale, weights.dtype),
        learned_positions=learned_positions,
        layers=layers,
        final_norm=_build_norm(config, "final_norm", weights),
        head=head,
        logit_soft_cap=config.logit_soft_cap,
        adapters=adapters,
    )


def _build_layer(
    config: DecoderConfig,
    layer: LayerConfig,
    prefix: str,
    weights: WeightReader,
    tables: dict[Rope, Tensor],
    adapters: LayerAdapters | None,
) -> DecoderLayer:
    sinks = weights.get(prefix + "sinks")
    attention = Attention(
        qkv=_build_linear(prefix + "qkv", weights, adapters),
        out=_build_linear(prefix + "attention_out", weights, adapters),
        query_norm=_build_optional_norm(config, prefix + "query_norm", weights),
        key_norm=_build_optional_norm(config, prefix + "key_norm", weights),
        cos_sin=None if layer.rope is None else tables[layer.rope],
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=layer.attention_scale,
        sliding_window=layer.sliding_window,
        soft_cap=config.attention_soft_cap,
        sinks=None if sinks is None else sinks.float(),
    )
    return DecoderLayer(
        attention_norm=_build_norm(config, prefix + "attention_norm", weights),
        attention=attention,
        post_attention_norm=_build_optional_norm(config, prefix + "post_attention_norm", weights),
        mlp_norm=_build_norm(config, prefix + "mlp_norm", weights),
        mlp=_build_mlp(config, layer, prefix, weights, adapters),
        post_mlp_norm=_build_optional_norm(config, prefix + "post_mlp_norm", weights),
    )


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

    activation = _activation(config.activation, gated=config.gated)
    if layer.moe is not None and layer.moe.gate is not None:
        activation = functools.partial(_clamped_gate, layer.moe.gate)
    if layer.moe is None:
        return block("mlp", adapters)
    experts = tuple(block(f"experts.{expert}") for expert in range(layer.moe.num_experts))
    return MixtureOfExperts(_build_linear(prefix + "router", weights), experts, layer.moe)


def _build_linear(name: str, weights: WeightReader, adapters: LayerAdapters | None = None) -> LinearLayer:
    plain = make_linear(UNQUANTIZED.read(weights, name))
    if adapters is None:
        return plain
    adapters.bank.add_layer(name, plain.stored)
    return adapters.adapted(plain, name)


def _build_norm(config: DecoderConfig, name: str, weights: WeightReader) -> Norm:
    return Norm(weights[f"{name}.weight"], weights.get(f"{name}.bias"), config.norm)


def _build_optional_norm(config: DecoderConfig, name: str, weights: WeightReader) -> Norm | None:
    weight = weights.get(f"{name}.weight")
    return None if weight is None else Norm(weight, None, config.norm)


def rounded_scale(scale: float | None, dtype: torch.dtype) -> float | None:
    """Return the scale rounded to the model's dtype."""
    # Gemma was trained with a scale rounded to bfloat16.
    return None if scale is None else torch.tensor(scale, dtype=dtype).item()


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


_PLAIN: dict[str, Activation] = {
    "silu": functional.silu,
    "gelu_tanh": _gelu_tanh,
    "gelu": functional.gelu,
    "relu": functional.relu,
}
_GATED: dict[str, Activation] = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}


def _activation(name: str, *, gated: bool) -> Activation:
    """Return the activation; a gated one maps [..., 2 * n], gate and up side by side, to [..., n]."""
    plain = _PLAIN[name]
    if not gated:
        return plain

    def activate_and_multiply(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return plain(gate) * up

    return _GATED.get(name, activate_and_multiply)


def _clamped_gate(config: ClampedGate, gate_up: Tensor) -> Tensor:
    # [..., 2 * n], gate and up side by side, to [..., n]
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=config.limit)
    return (up.clamp(-config.limit, config.limit) + 1) * (gate * torch.sigmoid(gate * config.alpha))


@attrs.frozen(eq=False)
class MixtureOfExperts:
    """Mixture of experts: a router picks a few feed-forward blocks for each token; the output is their weighted sum.

    Source: Mixtral of Experts, arXiv 2401.04088; Qwen3 technical report, arXiv 2505.09388; gpt-oss, arXiv 2508.10925.
    """

    router: Callable[[Tensor], Tensor]  # [num_tokens, hidden] to [num_tokens, num_experts]
    experts: tuple[Callable[[Tensor], Tensor], ...]  # [any number of tokens, hidden] to the same
    config: MoeConfig  # how many are picked, and whether their weights add up to one

    def __call__(self, x: Tensor) -> Tensor:
        # [num_tokens, hidden] -> [num_tokens, hidden]
        shares, chosen = self._route(x)
        top_k = self.config.experts_per_token
        by_expert = chosen.flatten().argsort(stable=True)  # [num_tokens * top_k] places, expert after expert
        counts = chosen.flatten().bincount(minlength=len(self.experts)).tolist()
        total = torch.zeros_like(x)
        for expert, places in zip(self.experts, by_expert.split(counts), strict=True):
            if len(places):
                tokens = places // top_k
                total.index_add_(0, tokens, expert(x[tokens]) * shares.flatten()[places, None])
        return total

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chosen experts' weights, dtype of `x`, and indices, each [num_tokens, experts_per_token]."""
        probabilities = self.router(x).softmax(dim=-1, dtype=torch.float32)
        shares, chosen = probabilities.topk(self.config.experts_per_token, dim=-1)
        if self.config.normalize:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        return shares.to(x.dtype), chosen


@attrs.frozen(eq=False)
class DecoderFacts:
    """Facts that both native decoders derive from a config before they read a weight."""

    spec: ModelSpec  # facts that the engine is built from
    rope_tables: dict[Rope, Tensor]  # cosines and sines, one table for all layers that rotate alike


def decoder_facts(config: DecoderConfig, weights: WeightReader, max_model_len: int | None) -> DecoderFacts:
    """Derive the model's spec and rotary tables.

    Args:
        config: the model.
        weights: give the dtype and the device.
        max_model_len: longest sequence that will be asked for, tokens; bounds the tables.
    """
    num_positions = min(config.max_position, max_model_len or config.max_position)
    ropes = {layer.rope for layer in config.layers if layer.rope is not None}
    spec = ModelSpec(
        architecture=config.architecture,
        backend="native",
        vocab_size=config.vocab_size,
        max_position=num_positions,
        cache_layers=(LayerCacheSpec(num_kv_heads=config.num_kv_heads, head_dim=config.head_dim),)
        * len(config.layers),
        dtype=weights.dtype,
        hidden_size=config.hidden_size,
    )
    return DecoderFacts(spec, {rope: rope_table(rope, num_positions, weights.device) for rope in ropes})
