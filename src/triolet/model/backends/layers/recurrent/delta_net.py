"""Layers with the gated delta rule over a paged cache of states: Qwen3-Next, Qwen3.5 and OLMo Hybrid.

A layer projects a token to queries, keys, values and a gate, and to a decay and a rate per head. Queries, keys and
values pass a convolution over the last few tokens; `delta_rule` is the recurrence. Its outputs are normalised per head,
multiplied by the gate and projected. Source: arXiv 2412.06464.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from triolet.kernels.attention_metadata import AttentionMetadata
from triolet.model.architectures.recurrent.configs import DeltaNetConfig
from triolet.model.architectures.weight_map import WeightReader
from triolet.model.backends.layers.linear import LinearLayer, read_linear
from triolet.model.backends.layers.recurrent.batches import over_batches
from triolet.model.backends.layers.recurrent.convolution import Convolution, read_convolution
from triolet.model.backends.layers.recurrent.delta_rule import DeltaInput, delta_scan, delta_step
from triolet.model.interface import LayerCache


@attrs.frozen(eq=False, kw_only=True)
class DeltaNet:
    """A layer with the gated delta rule; takes the place of `Attention`."""

    # [num_tokens, hidden] to queries, keys, values and gates; with `by_key_heads` to the heads of keys one after the
    # other, each with its query, its key, and the values and gates of the heads that share it
    project_in: LinearLayer
    project_rates: LinearLayer  # likewise, to what rates and then to what decays follow from
    convolution: Convolution
    step_bias: Tensor  # [num_heads] float32
    decay: Tensor  # [num_heads] float32, below 0
    norm_weight: Tensor  # [value_dim] float32
    norm_eps: float
    out: LinearLayer  # [num_tokens, num_heads * value_dim] to [num_tokens, hidden]
    config: DeltaNetConfig

    def __call__(
        self, x: Tensor, positions: Tensor, cache: LayerCache, attention: AttentionMetadata
    ) -> Tensor:
        # [num_tokens, hidden] -> [num_tokens, hidden]
        sizes = self.config
        channels, gate = self._projected(x)
        rates, steps = self._projected_rates(x)
        rates = rates.sigmoid() * sizes.rate_scale
        log_decays = functional.softplus(steps + self.step_bias) * self.decay

        def compute(
            convolved: Tensor, tokens: Tensor, states: Tensor, ends: tuple[int, ...] | None
        ) -> tuple[Tensor, Tensor]:
            step = self._input(convolved, log_decays[tokens], rates[tokens])
            return delta_step(step, states) if ends is None else delta_scan(step, states[0], ends)

        outputs = over_batches(channels, sizes.value_size, cache, attention, self.convolution, compute)
        outputs = outputs.unflatten(1, (sizes.num_heads, sizes.value_dim))
        scale = torch.rsqrt(outputs.square().mean(dim=-1, keepdim=True) + self.norm_eps)
        gated = (outputs * scale * self.norm_weight).flatten(1) * functional.silu(gate.float())
        return self.out(gated.to(x.dtype))

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor]:
        # [num_tokens, channels] and [num_tokens, num_heads * value_dim]: what the convolution reads, and the gates
        sizes, projected = self.config, self.project_in(x)
        if not sizes.by_key_heads:
            channels, gate = projected.split((sizes.channels, sizes.value_size), dim=1)
            return channels, gate
        values = sizes.value_size // sizes.num_key_heads
        heads = projected.view(len(x), sizes.num_key_heads, -1)
        *mixed, gates = heads.split((sizes.key_dim, sizes.key_dim, values, values), dim=2)
        return torch.cat([part.flatten(1) for part in mixed], dim=1), gates.flatten(1)

    def _projected_rates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        # [num_tokens, num_heads] float32 each: what rates and what decays follow from
        sizes, projected = self.config, self.project_rates(x).float()
        num_groups = sizes.num_key_heads if sizes.by_key_heads else 1
        rates, steps = projected.view(len(x), num_groups, 2, -1).unbind(2)
        return rates.flatten(1), steps.flatten(1)

    def _input(self, convolved: Tensor, log_decays: Tensor, rates: Tensor) -> DeltaInput:
        sizes = self.config
        parts = (sizes.key_size, sizes.key_size, sizes.value_size)
        query, key, value = convolved.split(parts, dim=1)
        return DeltaInput.normalised(
            query.unflatten(1, (sizes.num_key_heads, sizes.key_dim)),
            key.unflatten(1, (sizes.num_key_heads, sizes.key_dim)),
            value.unflatten(1, (sizes.num_heads, sizes.value_dim)),
            log_decays,
            rates,
        )


def build_delta_net(
    config: DeltaNetConfig,
    prefix: str,
    weights: WeightReader,
    *,
    norm_eps: float,
    activation: Callable[[Tensor], Tensor],
) -> DeltaNet:
    """Read the weights of a layer; the arguments are those of `build_mamba`."""
    return DeltaNet(
        project_in=read_linear(prefix + "recurrent_in", weights),
        project_rates=read_linear(prefix + "recurrent_rates", weights),
        convolution=read_convolution(prefix + "convolution", weights, activation),
        step_bias=weights.read_float32(prefix + "recurrent_step_bias"),
        decay=-weights.read_float32(prefix + "recurrent_decay").exp(),
        norm_weight=weights.read_float32(prefix + "recurrent_norm.weight"),
        norm_eps=norm_eps if config.norm_eps is None else config.norm_eps,
        out=read_linear(prefix + "recurrent_out", weights),
        config=config,
    )
