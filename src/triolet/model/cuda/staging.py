"""Pinned memory through which weights go to a GPU: one tensor is read while the one before it is copied."""

from __future__ import annotations

import math

import attrs
import torch
from torch import Tensor

from triolet.model.cuda.step_device import Mark, StepDevice

MAX_BYTES = 256 * 2**20
"""Largest tensor that goes this way: pinned memory is taken from the whole machine."""


@attrs.define(eq=False)
class _Buffer:
    """Pinned memory of one tensor."""

    words: Tensor  # int32
    copied: Mark | None = None  # end of the copy out of it


class PinnedStaging:
    """Two buffers in turn.

    Args:
        device: gets the tensors.
    """

    def __init__(self, device: StepDevice) -> None:
        self._device = device
        self._buffers = [_Buffer(torch.empty(0, dtype=torch.int32)) for _ in range(2)]

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Return pinned memory for a tensor, once what was in it has been copied; None if it is too large.

        Args:
            shape: of the tensor.
            dtype: of the tensor.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        if not 0 < num_bytes <= MAX_BYTES:
            return None
        self._buffers.reverse()
        buffer = self._buffers[0]
        if buffer.copied is not None:
            buffer.copied.wait()
            buffer.copied = None
        if 4 * len(buffer.words) < num_bytes:
            buffer.words = self._device.pinned(-(-num_bytes // 4))
        return buffer.words.view(torch.uint8)[:num_bytes].view(dtype).view(shape)

    def send(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Copy what `room` gave last to the device, and convert it there; the host does not wait.

        Args:
            tensor: from `room`.
            dtype: of the result.
        """
        there = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device.device)
        there.copy_(tensor, non_blocking=True)
        self._buffers[0].copied = self._device.mark()
        return there.to(dtype)
