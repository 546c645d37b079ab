"""Multi-head latent attention over a paged cache of latents: DeepSeek V2 and V3.

All heads share one latent per token, from which their keys and values are projected, and one rotated key. The cache
holds the rotated key and the latent, side by side, and nothing per head: a tenth of the memory of other models. The
projections of keys are applied to the queries instead, and those of values to the attended latents, so that attention
has one head of keys whose values are a part of them. Source: DeepSeek-V2, arXiv 2405.04434.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch import Tensor

from triolet.kernels.attention_metadata import AttentionMetadata
from triolet.kernels.kv_write import kv_write
from triolet.kernels.paged_attention import paged_attention
from triolet.kernels.rotary import rotary
from triolet.model.architectures.decoder_config import LatentConfig
from triolet.model.interface import LayerCache


@attrs.frozen(eq=False, kw_only=True)
class LatentAttention:
    """Causal attention whose heads share one latent per token; takes the place of `Attention` in a layer."""

    # [num_tokens, hidden] to the input of `query_up`, normalised; None where that is the hidden state itself.
    query_down: Callable[[Tensor], Tensor] | None
    query_up: Callable[[Tensor], Tensor]  # to [num_tokens, num_heads * (plain_size + rotary_size)]
    latent_down: Callable[[Tensor], Tensor]  # [num_tokens, hidden] to [num_tokens, latent_size + rotary_size]
    latent_norm: Callable[[Tensor], Tensor]
    key_up: Tensor  # [num_heads, plain_size, latent_size]
    value_up: Tensor  # [num_heads, latent_size, value_size]
    out: Callable[[Tensor], Tensor]  # [num_tokens, num_heads * value_size] to [num_tokens, hidden]
    cos_sin: Tensor | None  # None where nothing turns (Kimi Linear)
    interleaved: bool  # adjacent dimensions turn together
    num_heads: int
    scale: float
    config: LatentConfig

    def __call__(
        self, x: Tensor, positions: Tensor, cache: LayerCache, attention: AttentionMetadata
    ) -> Tensor:
        # [num_tokens, hidden] -> [num_tokens, hidden]
        sizes = self.config
        rotated = sizes.rotary_size
        heads = self.query_up(x if self.query_down is None else self.query_down(x))
        heads = heads.view(len(x), self.num_heads, sizes.plain_size + rotated)
        query = x.new_empty(len(x), self.num_heads, sizes.cached_size)
        query[..., :rotated] = heads[..., sizes.plain_size :]
        plain = heads[..., : sizes.plain_size].transpose(0, 1)  # [num_heads, num_tokens, plain_size]
        query[..., rotated:] = torch.bmm(plain, self.key_up).transpose(0, 1)
        down = self.latent_down(x)
        key = x.new_empty(len(x), 1, sizes.cached_size)
        key[:, 0, :rotated] = down[:, sizes.latent_size :]
        key[:, 0, rotated:] = self.latent_norm(down[:, : sizes.latent_size].contiguous())
        if self.cos_sin is not None:
            rotary(query, key, self.cos_sin, positions, interleaved=self.interleaved)
        kv_write(key, cache.keys, attention.slot_mapping)
        mixed = paged_attention(query, cache.keys, cache.keys, attention, scale=self.scale)
        latents = mixed[..., rotated:].transpose(0, 1)  # [num_heads, num_tokens, latent_size]
        return self.out(torch.bmm(latents, self.value_up).transpose(0, 1).flatten(1))


def split_latent_up(weight: Tensor, num_heads: int, config: LatentConfig) -> tuple[Tensor, Tensor]:
    """Return `key_up` and `value_up` of the projection from latents to the keys and values of all heads.

    Args:
        weight: [num_heads * (plain_size + value_size), latent_size].
        num_heads: query heads.
        config: the sizes.
    """
    heads = weight.view(num_heads, config.plain_size + config.value_size, config.latent_size)
    keys, values = heads.split((config.plain_size, config.value_size), dim=1)
    return keys.contiguous(), values.transpose(1, 2).contiguous()
