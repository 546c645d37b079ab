"""Layers with Kimi delta attention over a paged cache of states: Kimi Linear.

A gated delta net of which each number of a key decays by itself. A layer projects a token to queries, keys and values,
which pass a convolution over the last few tokens, to a rate per head, and through two small matrices each to decays and
to a gate. `kimi_delta_scan` is the recurrence. Its outputs are normalised per head, multiplied by the sigmoid of the
gate and projected. Source: Kimi Linear, arXiv 2510.26692.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from triolet.kernels.attention_metadata import AttentionMetadata
from triolet.model.architectures.recurrent.configs import KimiDeltaConfig
from triolet.model.architectures.weight_map import WeightReader
from triolet.model.backends.layers.linear import LinearLayer, read_linear
from triolet.model.backends.layers.recurrent.batches import over_batches
from triolet.model.backends.layers.recurrent.convolution import Convolution, read_convolution
from triolet.model.backends.layers.recurrent.delta_rule import DeltaInput
from triolet.model.backends.layers.recurrent.kimi_delta_rule import kimi_delta_scan, kimi_delta_step
from triolet.model.interface import LayerCache


@attrs.frozen(eq=False)
class LowRank:
    """Two projections, one behind the other."""

    down: LinearLayer
    up: LinearLayer

    def __call__(self, x: Tensor) -> Tensor:
        # [num_tokens, in] -> [num_tokens, out]
        return self.up(self.down(x))


@attrs.frozen(eq=False, kw_only=True)
class KimiDelta:
    """A layer with Kimi delta attention; takes the place of `Attention`."""

    project_in: LinearLayer  # [num_tokens, hidden] to queries, keys and values
    project_rates: LinearLayer  # to [num_tokens, num_heads]
    project_decays: LowRank  # to [num_tokens, num_heads * head_dim]
    project_gate: LowRank  # likewise
    convolution: Convolution
    step_bias: Tensor  # [num_heads * head_dim] float32
    decay: Tensor  # [num_heads] float32, below 0
    norm_weight: Tensor  # [head_dim] float32
    norm_eps: float
    out: LinearLayer  # [num_tokens, num_heads * head_dim] to [num_tokens, hidden]
    config: KimiDeltaConfig

    def __call__(
        self, x: Tensor, positions: Tensor, cache: LayerCache, attention: AttentionMetadata
    ) -> Tensor:
        # [num_tokens, hidden] -> [num_tokens, hidden]
        heads = (self.config.num_heads, self.config.head_dim)
        rates = self.project_rates(x).float().sigmoid()
        steps = functional.softplus(self.project_decays(x).float() + self.step_bias)
        log_decays = steps.unflatten(1, heads) * self.decay[:, None]

        def compute(
            convolved: Tensor, tokens: Tensor, states: Tensor, ends: tuple[int, ...] | None
        ) -> tuple[Tensor, Tensor]:
            query, key, value = (part.unflatten(1, heads) for part in convolved.chunk(3, dim=1))
            step = DeltaInput.normalised(query, key, value, log_decays[tokens], rates[tokens])
            return kimi_delta_step(step, states) if ends is None else kimi_delta_scan(step, states[0], ends)

        size = self.config.inner_size
        mixed = over_batches(self.project_in(x), size, cache, attention, self.convolution, compute)
        outputs = mixed.unflatten(1, heads)
        scale = torch.rsqrt(outputs.square().mean(dim=-1, keepdim=True) + self.norm_eps)
        gated = (outputs * scale * self.norm_weight).flatten(1) * self.project_gate(x).float().sigmoid()
        return self.out(gated.to(x.dtype))


def build_kimi_delta(
    config: KimiDeltaConfig,
    prefix: str,
    weights: WeightReader,
    *,
    norm_eps: float,
    activation: Callable[[Tensor], Tensor],
) -> KimiDelta:
    """Read the weights of a layer; the arguments are those of `build_mamba`."""

    def low_rank(name: str) -> LowRank:
        down, up = (read_linear(f"{prefix}recurrent_{name}.{part}", weights) for part in ("in", "out"))
        return LowRank(down, up)

    return KimiDelta(
        project_in=read_linear(prefix + "recurrent_in", weights),
        project_rates=read_linear(prefix + "recurrent_rates", weights),
        project_decays=low_rank("decays"),
        project_gate=low_rank("gate"),
        convolution=read_convolution(prefix + "convolution", weights, activation),
        step_bias=weights.read_float32(prefix + "recurrent_step_bias"),
        decay=-weights.read_float32(prefix + "recurrent_decay").exp().flatten(),
        norm_weight=weights.read_float32(prefix + "recurrent_norm.weight"),
        norm_eps=norm_eps,
        out=read_linear(prefix + "recurrent_out", weights),
        config=config,
    )
