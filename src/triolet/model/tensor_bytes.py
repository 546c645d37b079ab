"""Tensors as bytes of the safetensors format: they cross a pipe without a pickle."""

from __future__ import annotations

from typing import Any

import safetensors.torch
import torch

_NAME = "tensor"


def tensor_bytes(value: object) -> bytes | None:
    """Return the bytes of a tensor; None for anything else."""
    if not isinstance(value, torch.Tensor):
        return None
    # safetensors takes no views and no devices but the CPU
    data: bytes = safetensors.torch.save({_NAME: value.detach().cpu().contiguous()})
    return data


def tensor_of(data: bytes) -> Any:
    """Return the tensor that `tensor_bytes` wrote.

    Raises:
        SafetensorError: the bytes are not of the format.
    """
    return safetensors.torch.load(data)[_NAME]
