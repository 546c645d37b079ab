"""What both decoders, the one in torch and the one in C++, derive from a config before they read a weight."""

from __future__ import annotations

import attrs
from torch import Tensor

from triolet.model.interface import LayerCacheSpec, ModelSpec
from triolet.model.model_config import DecoderConfig
from triolet.model.rope import Rope, rope_table
from triolet.model.weights import WeightReader


@attrs.frozen(eq=False)
class DecoderFacts:
    """See the module's text.

    Args:
        spec: what the engine is built from.
        rope_tables: cosines and sines, one table for all layers that rotate alike.
    """

    spec: ModelSpec
    rope_tables: dict[Rope, Tensor]


def decoder_facts(config: DecoderConfig, weights: WeightReader, max_model_len: int | None) -> DecoderFacts:
    """Derive them.

    Args:
        config: the model.
        weights: whose dtype and device they get.
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
    )
    return DecoderFacts(spec, {rope: rope_table(rope, num_positions, weights.device) for rope in ropes})
