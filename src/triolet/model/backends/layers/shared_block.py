"""Attention and a feed-forward block in front of a recurrence, with weights that several layers share: Zamba.

The block reads the residual stream and the token's embedding side by side. A projection of the layer's own makes of
what it gives what is added to the input of the recurrence, and of the recurrence alone: the stream itself is left as it
was. Each layer may have adapters of low rank beside the shared projections. Source: arXiv 2405.16712 and 2411.15242.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import attrs
import torch
from torch import Tensor

from triolet.kernels.attention_metadata import AttentionMetadata
from triolet.model.backends.layers.linear import LinearLayer
from triolet.model.interface import LayerCache


class CachedLayer(Protocol):
    """Attention or a recurrence over the paged cache, [num_tokens, size in] to [num_tokens, size out]."""

    def __call__(
        self, x: Tensor, positions: Tensor, cache: LayerCache, attention: AttentionMetadata
    ) -> Tensor: ...


@attrs.frozen(eq=False)
class LowRankSum:
    """A projection, and those of adapters that are added to its parts."""

    plain: LinearLayer
    adapters: tuple[tuple[LinearLayer, LinearLayer], ...]  # down and up, of each part of the outputs in turn

    def __call__(self, x: Tensor) -> Tensor:
        # [num_tokens, in] -> [num_tokens, out]
        return self.plain(x) + torch.cat([up(down(x)) for down, up in self.adapters], dim=1)


@attrs.frozen(eq=False, kw_only=True)
class SharedBlockBeforeRecurrence:
    """A shared block and a recurrence behind it; takes the place of `Attention`, and of the norm before it."""

    attention_norm: Callable[[Tensor], Tensor]  # of stream and embedding, 2 * hidden
    attention: CachedLayer  # [num_tokens, 2 * hidden] to [num_tokens, hidden]
    mlp_norm: Callable[[Tensor], Tensor]
    mlp: Callable[[Tensor], Tensor]
    out: LinearLayer  # of the layer's own
    recurrent_norm: Callable[[Tensor], Tensor]
    recurrence: CachedLayer

    def __call__(
        self,
        stream: Tensor,
        embeddings: Tensor,
        positions: Tensor,
        cache: LayerCache,
        attention: AttentionMetadata,
    ) -> Tensor:
        """Return what is added to the residual stream, [num_tokens, hidden].

        Args:
            stream: the residual stream, [num_tokens, hidden].
            embeddings: of the tokens, likewise.
            positions: of the tokens, [num_tokens].
            cache: of the layer, with keys and values and with states.
            attention: the step's sequences.
        """
        both = self.attention_norm(torch.cat((stream, embeddings), dim=1))
        attended = self.attention(both, positions, cache, attention)
        shared = self.out(self.mlp(self.mlp_norm(attended)))
        return self.recurrence(self.recurrent_norm(stream + shared), positions, cache, attention)
