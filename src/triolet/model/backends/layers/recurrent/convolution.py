"""The convolution of recurrent layers: of each channel, over the last few tokens."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch import Tensor

from triolet.model.architectures.weight_map import WeightReader
from triolet.model.backends.layers.recurrent.block_states import FoundStates, StateBatch


@attrs.frozen(eq=False)
class Convolution:
    """A causal convolution, each channel by itself; its state are the inputs of the last tokens, one less than it."""

    kernel: Tensor  # [kernel_size, channels] float32, the latest token's last
    bias: Tensor | None  # [channels] float32
    activation: Callable[[Tensor], Tensor]  # of the output

    def __call__(self, channels: Tensor, batch: StateBatch, found: FoundStates) -> tuple[Tensor, Tensor]:
        """Compute it for the tokens of a batch.

        Args:
            channels: [num_tokens, channels], their inputs.
            batch: sequences of these tokens.
            found: the states before them.
        Returns:
            Outputs [num_tokens, channels] float32, and what is written: [num_writes, kernel_size - 1, channels].
        """
        num_before = len(self.kernel) - 1
        if not batch.is_chunk:
            windows = torch.cat((found.convolution, channels[:, None]), dim=1)
            return self._activated((windows * self.kernel).sum(dim=1)), windows[:, 1:]
        padded = torch.cat((found.convolution[0], channels))
        sums = torch.zeros_like(channels, dtype=torch.float32)
        for place, weights in enumerate(self.kernel):
            sums.addcmul_(padded[place : place + len(channels)].float(), weights)
        return self._activated(sums), torch.stack([padded[end : end + num_before] for end in batch.ends])

    def _activated(self, sums: Tensor) -> Tensor:
        return self.activation(sums if self.bias is None else sums + self.bias)


def read_convolution(name: str, weights: WeightReader, activation: Callable[[Tensor], Tensor]) -> Convolution:
    """Read the weights of a convolution, which a checkpoint has as [channels, 1, kernel_size]."""
    bias = f"{name}.bias"
    return Convolution(
        weights.read_float32(f"{name}.weight")[:, 0].T.contiguous(),
        weights.read_float32(bias) if bias in weights else None,
        activation,
    )
