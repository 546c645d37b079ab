"""Layers with a gated convolution over the last few tokens, whose inputs are all that the cache keeps: LFM2.

A layer projects a token to three vectors. The product of the first and the third passes the convolution, and what comes
of it is multiplied by the second and projected. Source: arXiv 2511.23404.
"""

from __future__ import annotations

import attrs
from torch import Tensor

from triolet.kernels.attention_metadata import AttentionMetadata
from triolet.model.architectures.recurrent.configs import ShortConvolutionConfig
from triolet.model.architectures.weight_map import WeightReader
from triolet.model.backends.layers.linear import LinearLayer, read_linear
from triolet.model.backends.layers.recurrent.batches import over_batches
from triolet.model.backends.layers.recurrent.convolution import Convolution, read_convolution
from triolet.model.interface import LayerCache


@attrs.frozen(eq=False, kw_only=True)
class ShortConvolution:
    """A layer with a gated convolution; takes the place of `Attention`."""

    project_in: LinearLayer  # [num_tokens, hidden] to [num_tokens, 3 * channels]
    convolution: Convolution
    out: LinearLayer  # [num_tokens, channels] to [num_tokens, hidden]
    config: ShortConvolutionConfig

    def __call__(
        self, x: Tensor, positions: Tensor, cache: LayerCache, attention: AttentionMetadata
    ) -> Tensor:
        # [num_tokens, hidden] -> [num_tokens, hidden]
        before, behind, inputs = self.project_in(x).chunk(3, dim=1)

        def compute(
            convolved: Tensor, tokens: Tensor, states: Tensor, ends: tuple[int, ...] | None
        ) -> tuple[Tensor, Tensor]:
            # There is no state beside the convolution's.
            return convolved[:, None], states if ends is None else states.expand(len(ends), *states.shape[1:])

        mixed = over_batches(
            before * inputs, self.config.channels, cache, attention, self.convolution, compute
        )
        return self.out((mixed * behind).to(x.dtype))


def build_short_convolution(
    config: ShortConvolutionConfig, prefix: str, weights: WeightReader
) -> ShortConvolution:
    """Read the weights of a layer; the arguments are those of `build_mamba`."""
    return ShortConvolution(
        project_in=read_linear(prefix + "recurrent_in", weights),
        convolution=read_convolution(prefix + "convolution", weights, lambda x: x),
        out=read_linear(prefix + "recurrent_out", weights),
        config=config,
    )
