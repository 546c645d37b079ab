"""Derive from a config what both native decoders need before they read a weight: the spec, and tables of positions."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from triolet.model.architectures.decoder_config import DecoderConfig, LayerConfig
from triolet.model.architectures.rope import Rope, rope_table
from triolet.model.architectures.weight_map import WeightReader
from triolet.model.interface import STATE_WINDOW, LayerCacheSpec, LayerStateSpec, ModelSpec


@attrs.frozen(eq=False)
class DecoderFacts:
    """Spec and tables of a model."""

    spec: ModelSpec  # facts that the engine is built from
    rope_tables: dict[Rope, Tensor]  # cosines and sines, one table for all layers that rotate alike
    query_factors: Tensor | None  # [positions] float32: factors of rotated queries; None = 1
    cache_places: tuple[int, ...]  # of each layer: the entry of `spec.cache_layers` that it reads


def decoder_facts(config: DecoderConfig, weights: WeightReader, max_model_len: int | None) -> DecoderFacts:
    """Derive the model's spec and rotary tables.

    Args:
        config: the model.
        weights: give the dtype and the device.
        max_model_len: longest sequence that will be asked for, tokens; bounds the tables.
    """
    num_positions = min(config.max_position, max_model_len or config.max_position)
    ropes = {layer.rope for layer in config.layers if layer.rope is not None}
    owners = [index for index, layer in enumerate(config.layers) if layer.reads_cache_of is None]
    places = {owner: place for place, owner in enumerate(owners)}
    spec = ModelSpec(
        architecture=config.architecture,
        backend="native",
        vocab_size=config.vocab_size,
        max_position=num_positions,
        cache_layers=tuple(_cache_spec(config, config.layers[owner]) for owner in owners),
        dtype=weights.dtype,
        hidden_size=config.hidden_size,
        takes_cache_groups=True,
        takes_embeddings=config.layer_inputs is None,
        given_embedding_scale=(config.embedding_scale or 1.0) if config.scales_given_embeddings else 1.0,
    )
    tables = {rope: rope_table(rope, num_positions, weights.device) for rope in ropes}
    growth, factors = config.query_growth, None
    if growth is not None:
        times = torch.arange(num_positions, device=weights.device) // growth.length
        factors = 1.0 + growth.beta * torch.log(1.0 + times.float())
    read = tuple(
        places[index if layer.reads_cache_of is None else layer.reads_cache_of]
        for index, layer in enumerate(config.layers)
    )
    return DecoderFacts(spec, tables, factors, read)


def _cache_spec(config: DecoderConfig, layer: LayerConfig) -> LayerCacheSpec:
    state = None
    if (recurrent := layer.recurrent) is not None:
        convolution = (recurrent.kernel_size - 1, recurrent.channels)
        state = LayerStateSpec(convolution=convolution, recurrent=recurrent.state_shape)
    if not layer.attends:
        return LayerCacheSpec(num_kv_heads=0, head_dim=0, state=state, window=STATE_WINDOW)
    return LayerCacheSpec(
        num_kv_heads=config.num_kv_heads_of(layer),
        head_dim=config.head_dim_of(layer),
        is_latent=layer.latent is not None,
        state=state,
        window=layer.sliding_window,
    )
