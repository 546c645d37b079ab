"""Mamba layers over a paged cache of states: Mamba, Falcon Mamba, Jamba, Zamba.

A layer projects a token to the channels of a convolution over the last few tokens, and to a gate. What the convolution
gives are the inputs of the channels; steps, and what states are written and read with, are projected from them, in
some models through norms, in Zamba by each head for itself. `selective_scan` is the recurrence. Its outputs are
multiplied by the gate and projected. Source: arXiv 2312.00752.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from triolet.kernels.attention_metadata import AttentionMetadata
from triolet.model.architectures.recurrent.configs import Mamba1Config
from triolet.model.architectures.weight_map import WeightReader
from triolet.model.backends.layers.linear import LinearLayer, read_linear
from triolet.model.backends.layers.recurrent.batches import over_batches
from triolet.model.backends.layers.recurrent.convolution import Convolution, read_convolution
from triolet.model.backends.layers.recurrent.selective_scan import (
    SelectiveInput,
    selective_scan,
    selective_step,
)
from triolet.model.interface import LayerCache

Selected = tuple[Tensor, Tensor, Tensor]
"""Of what steps come from, of what is written, and of what is read."""


@attrs.frozen(eq=False, kw_only=True)
class Mamba1:
    """A Mamba layer; takes the place of `Attention`."""

    project_in: LinearLayer  # [num_tokens, hidden] to channels of the convolution, and gate
    convolution: Convolution
    select: Tensor  # [num_heads, step_rank + 2 * state_size, head_dim]: projects each head's channels
    select_norms: Selected | None  # weights of the norms of what they are projected to, float32; None without
    project_steps: Tensor  # [num_heads, head_dim, step_rank]
    step_bias: Tensor  # [channels] float32
    rates: Tensor  # [channels, state_size] float32, below 0: logarithms of the decay per unit of step
    skip: Tensor  # [channels] float32: inputs are added to outputs, times this
    out: LinearLayer  # [num_tokens, channels] to [num_tokens, hidden]
    config: Mamba1Config

    def __call__(
        self, x: Tensor, positions: Tensor, cache: LayerCache, attention: AttentionMetadata
    ) -> Tensor:
        # [num_tokens, hidden] -> [num_tokens, hidden]
        projected = self.project_in(x)
        if self.config.alternates:
            channels, gate = projected.unflatten(1, (-1, 2)).unbind(2)
        else:
            channels, gate = projected.chunk(2, dim=1)

        def compute(
            convolved: Tensor, tokens: Tensor, states: Tensor, ends: tuple[int, ...] | None
        ) -> tuple[Tensor, Tensor]:
            step = self._selected(convolved)
            if ends is None:
                outputs, states = selective_step(step, self.rates, states)
            else:
                outputs, states = selective_scan(step, self.rates, states[0], ends)
            return outputs + step.x * self.skip, states

        mixed = over_batches(channels, self.config.channels, cache, attention, self.convolution, compute)
        return self.out((mixed * functional.silu(gate.float())).to(x.dtype))

    def _selected(self, convolved: Tensor) -> SelectiveInput:
        sizes = self.config
        heads = convolved.to(self.select.dtype).unflatten(1, (len(self.select), -1))
        parts = torch.einsum("thc,hoc->tho", heads, self.select).split(
            (sizes.step_rank, sizes.state_size, sizes.state_size), dim=2
        )
        if self.select_norms is not None:
            parts = tuple(map(self._normalise, parts, self.select_norms))
        low, written, read = parts
        steps = torch.einsum("thr,hcr->thc", low, self.project_steps).flatten(1)
        steps = functional.softplus(steps.float() + self.step_bias)
        return SelectiveInput(convolved, steps, written.float(), read.float())

    def _normalise(self, x: Tensor, weight: Tensor) -> Tensor:
        # [num_tokens, num_heads, size]
        eps = self.config.norm_eps
        assert eps is not None, "there are norms"
        values = x.float()
        scale = torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps)
        normalised: Tensor = values * scale * weight
        return normalised.to(x.dtype)


def build_mamba1(
    config: Mamba1Config, prefix: str, weights: WeightReader, activation: Callable[[Tensor], Tensor]
) -> Mamba1:
    """Read the weights of a layer; the arguments are those of `build_mamba`."""
    num_heads, channels = config.num_heads or 1, config.channels
    head_dim = channels // num_heads
    return Mamba1(
        project_in=read_linear(prefix + "recurrent_in", weights),
        convolution=read_convolution(prefix + "convolution", weights, activation),
        select=weights[prefix + "recurrent_select"].view(num_heads, -1, head_dim),
        select_norms=_select_norms(config, prefix, weights),
        project_steps=weights[prefix + "recurrent_steps"].view(num_heads, head_dim, -1),
        step_bias=weights.read_float32(prefix + "recurrent_step_bias").flatten(),
        rates=-weights.read_float32(prefix + "recurrent_decay").exp().view(channels, -1),
        skip=weights.read_float32(prefix + "recurrent_skip").flatten(),
        out=read_linear(prefix + "recurrent_out", weights),
        config=config,
    )


def _select_norms(config: Mamba1Config, prefix: str, weights: WeightReader) -> Selected | None:
    if config.norm_eps is None:
        return None
    if not config.has_norm_weights:
        sizes = (config.step_rank, config.state_size, config.state_size)
        steps, written, read = (torch.ones(size, device=weights.device) for size in sizes)
    else:
        names = ("steps", "written", "read")
        steps, written, read = (
            weights.read_float32(f"{prefix}recurrent_{name}_norm.weight") for name in names
        )
    return steps, written, read
