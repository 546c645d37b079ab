"""Layers with lightning attention over a paged cache of states: MiniMax-01.

Attention without a softmax, whose past decays: each head has a state, [value, key], that is multiplied by a fixed
number below 1 for each token, and to which the product of the token's value and key is added. A query reads it. That is
the recurrence of Mamba-2 with steps of 1 and one rate per head. What the heads give is normalised over all heads,
multiplied by the sigmoid of a gate and projected. Source: MiniMax-01, arXiv 2501.08313.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch import Tensor

from triolet.kernels.attention_metadata import AttentionMetadata
from triolet.model.architectures.recurrent.configs import LightningConfig
from triolet.model.architectures.weight_map import WeightReader
from triolet.model.backends.layers.linear import LinearLayer, read_linear
from triolet.model.backends.layers.recurrent.batches import over_batches
from triolet.model.backends.layers.recurrent.convolution import Convolution
from triolet.model.backends.layers.recurrent.mamba_scan import ScanInput, scan, scan_step
from triolet.model.interface import LayerCache


@attrs.frozen(eq=False, kw_only=True)
class LightningAttention:
    """A layer with lightning attention; takes the place of `Attention`."""

    project_in: LinearLayer  # [num_tokens, hidden] to each head's query, key and value, head after head
    activated: Convolution  # of one token: the activation of what they are projected to
    rates: Tensor  # [num_heads] float32, below 0: logarithms of what a token leaves
    norm_weight: Tensor  # [num_heads * head_dim] float32
    gate: LinearLayer  # [num_tokens, hidden] to [num_tokens, num_heads * head_dim]
    out: LinearLayer  # [num_tokens, num_heads * head_dim] to [num_tokens, hidden]
    config: LightningConfig

    def __call__(
        self, x: Tensor, positions: Tensor, cache: LayerCache, attention: AttentionMetadata
    ) -> Tensor:
        # [num_tokens, hidden] -> [num_tokens, hidden]
        sizes = self.config

        def compute(
            heads: Tensor, tokens: Tensor, states: Tensor, ends: tuple[int, ...] | None
        ) -> tuple[Tensor, Tensor]:
            query, key, value = heads.unflatten(1, (sizes.num_heads, 3, sizes.head_dim)).unbind(2)
            steps = torch.ones(value.shape[:2], device=value.device)
            step = ScanInput(value, steps, key, query)
            return (
                scan_step(step, self.rates, states)
                if ends is None
                else scan(step, self.rates, states[0], ends)
            )

        mixed = over_batches(self.project_in(x), sizes.inner_size, cache, attention, self.activated, compute)
        scale = torch.rsqrt(mixed.square().mean(dim=-1, keepdim=True) + sizes.norm_eps)
        gated = mixed * scale * self.norm_weight * self.gate(x).float().sigmoid()
        return self.out(gated.to(x.dtype))


def build_lightning_attention(
    config: LightningConfig, prefix: str, weights: WeightReader, activation: Callable[[Tensor], Tensor]
) -> LightningAttention:
    """Read the weights of a layer; the arguments are those of `build_mamba`."""
    stored = prefix + "recurrent_decay"
    rates = torch.tensor(config.slopes, device=weights.device)
    if stored in weights:
        rates = weights.read_float32(stored).flatten()
    return LightningAttention(
        project_in=read_linear(prefix + "recurrent_in", weights),
        activated=Convolution(torch.ones(1, config.channels, device=weights.device), None, activation),
        rates=-rates,
        norm_weight=weights.read_float32(prefix + "recurrent_norm.weight"),
        gate=read_linear(prefix + "recurrent_gate", weights),
        out=read_linear(prefix + "recurrent_out", weights),
        config=config,
    )
