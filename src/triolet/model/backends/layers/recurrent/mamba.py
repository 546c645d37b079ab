"""Mamba-2 layers over a paged cache of states: Mamba-2 itself, Granite 4, Bamba, Nemotron-H, Falcon-H1, Zamba2.

A layer projects a token to a gate, to the channels of a convolution over the last few tokens, and to a step per head.
What the convolution gives are the heads' inputs and what their states are written and read with (`mamba_scan`). The
outputs are multiplied by the gate, normalised per group and projected; in some models the gate comes behind the norm,
or there is no norm. Source: arXiv 2405.21060.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from triolet.kernels.attention_metadata import AttentionMetadata
from triolet.model.architectures.recurrent.configs import MambaConfig
from triolet.model.architectures.weight_map import WeightReader
from triolet.model.backends.layers.linear import LinearLayer, read_linear
from triolet.model.backends.layers.recurrent.batches import over_batches
from triolet.model.backends.layers.recurrent.convolution import Convolution, read_convolution
from triolet.model.backends.layers.recurrent.mamba_scan import ScanInput, scan, scan_step
from triolet.model.interface import LayerCache


@attrs.frozen(eq=False, kw_only=True)
class Mamba:
    """A Mamba-2 layer; takes the place of `Attention`."""

    project_in: LinearLayer  # [num_tokens, hidden] to gate, channels of the convolution, and steps
    convolution: Convolution
    step_bias: Tensor  # [num_heads] float32
    rates: Tensor  # [num_heads] float32, below 0: logarithms of the decay per unit of step
    skip: Tensor  # [num_heads] float32: inputs are added to outputs, times this
    norm_weight: Tensor | None  # [inner_size] float32; None without a norm
    norm_eps: float
    out: LinearLayer  # [num_tokens, inner_size] to [num_tokens, hidden]
    # [outputs of project_in] in the model's dtype: they are multiplied by it; None for ones
    projection_scales: Tensor | None
    config: MambaConfig

    def __call__(
        self, x: Tensor, positions: Tensor, cache: LayerCache, attention: AttentionMetadata
    ) -> Tensor:
        # [num_tokens, hidden] -> [num_tokens, hidden]
        sizes = self.config
        parts = (sizes.inner_size, sizes.channels, sizes.num_heads)
        projected = self.project_in(x)
        if self.projection_scales is not None:
            projected = projected * self.projection_scales
        gate, channels, steps = projected.split(parts, dim=1)
        steps = functional.softplus(steps.float() + self.step_bias)

        def compute(
            convolved: Tensor, tokens: Tensor, states: Tensor, ends: tuple[int, ...] | None
        ) -> tuple[Tensor, Tensor]:
            step = self._scan_input(convolved, steps[tokens])
            if ends is None:
                outputs, states = scan_step(step, self.rates, states)
            else:
                outputs, states = scan(step, self.rates, states[0], ends)
            return outputs + step.x * self.skip[:, None], states

        mixed = over_batches(channels, sizes.inner_size, cache, attention, self.convolution, compute)
        return self.out(self._gated(mixed, functional.silu(gate.float())).to(x.dtype))

    def _scan_input(self, convolved: Tensor, steps: Tensor) -> ScanInput:
        sizes = self.config
        heads, written, read = convolved.split((sizes.inner_size, sizes.group_size, sizes.group_size), dim=1)
        groups = (sizes.num_groups, sizes.state_size)
        return ScanInput(
            heads.unflatten(1, (sizes.num_heads, sizes.head_dim)),
            steps,
            written.unflatten(1, groups),
            read.unflatten(1, groups),
        )

    def _gated(self, mixed: Tensor, gate: Tensor) -> Tensor:
        if self.norm_weight is None:
            return mixed * gate
        if self.config.norms_before_gate:
            return self._normalise(mixed, self.norm_weight) * gate
        return self._normalise(mixed * gate, self.norm_weight)

    def _normalise(self, x: Tensor, weight: Tensor) -> Tensor:
        # [num_tokens, inner_size] float32, each group by its own root mean square
        groups = x.unflatten(1, (self.config.num_groups, -1))
        scale = torch.rsqrt(groups.square().mean(dim=-1, keepdim=True) + self.norm_eps)
        normalised: Tensor = (groups * scale).flatten(1) * weight
        return normalised


def build_mamba(
    config: MambaConfig,
    prefix: str,
    weights: WeightReader,
    *,
    norm_eps: float,
    activation: Callable[[Tensor], Tensor],
) -> Mamba:
    """Read the weights of a layer.

    Args:
        config: the sizes.
        prefix: of the layer's names.
        weights: of the model.
        norm_eps: is added to mean squares.
        activation: of the convolution.
    """
    return Mamba(
        project_in=read_linear(prefix + "recurrent_in", weights),
        convolution=read_convolution(prefix + "convolution", weights, activation),
        step_bias=weights.read_float32(prefix + "recurrent_step_bias"),
        rates=-weights.read_float32(prefix + "recurrent_decay").exp(),
        skip=weights.read_float32(prefix + "recurrent_skip"),
        norm_weight=weights.read_float32(prefix + "recurrent_norm.weight") if config.is_normed else None,
        norm_eps=norm_eps,
        out=read_linear(prefix + "recurrent_out", weights),
        projection_scales=_projection_scales(config, weights),
        config=config,
    )


def _projection_scales(config: MambaConfig, weights: WeightReader) -> Tensor | None:
    if config.projection_scales is None:
        return None
    sizes = (config.inner_size, config.inner_size, config.group_size, config.group_size, config.num_heads)
    scales = torch.tensor(config.projection_scales, dtype=weights.dtype, device=weights.device)
    return scales.repeat_interleave(torch.tensor(sizes, device=weights.device))
