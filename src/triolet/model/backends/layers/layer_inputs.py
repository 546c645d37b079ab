"""Inputs of the layers beside the residual stream: of rows that each token has in a table, and of its embedding.

Source: the per-layer embeddings of Gemma 3n and Gemma 4, as transformers computes them.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from triolet.model.architectures.decoder_config import DecoderConfig, LayerInputsConfig
from triolet.model.backends.layers.activation import Activation
from triolet.model.backends.layers.linear import LinearLayer


@attrs.frozen
class LayerInputScales:
    """Factors of a token's rows, of the projection of its embedding, and of their sum."""

    embedding: float
    projection: float
    sum: float


def layer_input_scales(
    config: DecoderConfig, inputs: LayerInputsConfig, dtype: torch.dtype
) -> LayerInputScales:
    """Return the factors for a model of `dtype`, to which that of the rows is rounded."""
    embedding = torch.tensor(inputs.size**0.5, dtype=dtype).item()
    return LayerInputScales(embedding, config.hidden_size**-0.5, 2.0**-0.5)


@attrs.frozen(eq=False, kw_only=True)
class LayerInputs:
    """Inputs of all layers."""

    embedding: Tensor  # [rows, num_layers * size]
    projection: LinearLayer
    norm: Callable[[Tensor], Tensor]
    size: int
    scales: LayerInputScales

    def __call__(self, token_ids: Tensor, embeddings: Tensor) -> Tensor:
        # [num_tokens], [num_tokens, hidden] -> [num_tokens, num_layers, size]
        rows = functional.embedding(token_ids, self.embedding) * self.scales.embedding
        projected = self.projection(embeddings) * self.scales.projection
        normed = self.norm(projected.unflatten(1, (-1, self.size)))
        return (normed + rows.view_as(normed)) * self.scales.sum


@attrs.frozen(eq=False, kw_only=True)
class LayerInput:
    """What a layer makes of its input: a gate of the residual stream multiplies it, and the product is projected."""

    gate: LinearLayer
    out: LinearLayer
    norm: Callable[[Tensor], Tensor]
    activation: Activation

    def __call__(self, x: Tensor, value: Tensor) -> Tensor:
        # [num_tokens, hidden], [num_tokens, size] -> [num_tokens, hidden]
        return self.norm(self.out(self.activation(self.gate(x)) * value))
