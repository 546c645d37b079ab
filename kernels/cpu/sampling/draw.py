"""Launchers of draw.cpp: the argmax of each row of logits, and a token drawn from each."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from triolet.kernels.cpu.abi import no_memory
from triolet.kernels.cpu.attention.paged_attention import DTYPES
from triolet.kernels.cpu.gemm.packing import MODEL_DTYPES
from triolet.kernels.cpu.library import library


def row_argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `logits.max(dim=1)`: NaN is larger than everything, and of equal numbers the first is taken.

    Args:
        logits: [num_rows, vocab_size].

    Returns:
        Values, of the dtype of the logits, or float32; and indices, int64; [num_rows] each.
    """
    cpp = library() if can_choose(logits) else None
    if cpp is None:
        found = logits.max(dim=1)
        return found.values, found.indices
    num_rows, vocab_size = logits.shape
    max_logits = torch.empty(num_rows, dtype=torch.float32)
    tokens = torch.empty(num_rows, dtype=torch.int64)
    if cpp.triolet_argmax(
        *_rows(logits),
        ctypes.c_void_p(max_logits.data_ptr()),
        ctypes.c_void_p(tokens.data_ptr()),
    ):
        raise no_memory()
    return max_logits, tokens


def draw(cpp: ctypes.CDLL, draws: int, logits: Tensor) -> Tensor:
    """Draw a token from every row.

    Args:
        cpp: the kernels.
        draws: address of [num_rows] `Draw`s, see draw.h.
        logits: [num_rows, vocab_size] that `can_choose`.

    Returns:
        [num_rows] int64.
    """
    tokens = torch.empty(len(logits), dtype=torch.int64)
    if cpp.triolet_draw(ctypes.c_void_p(draws), *_rows(logits), ctypes.c_void_p(tokens.data_ptr())):
        raise no_memory()
    return tokens


def can_choose(logits: Tensor) -> bool:
    """Tell whether the kernels take logits like these."""
    return (
        logits.device.type == "cpu"
        and logits.dtype in MODEL_DTYPES
        and logits.stride(1) == 1
        and logits.numel() > 0
    )


def _rows(
    logits: Tensor,
) -> tuple[ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_int64, ctypes.c_int32]:
    num_rows, vocab_size = logits.shape
    num_threads = min(num_rows, torch.get_num_threads())
    return (
        ctypes.c_int32(DTYPES[logits.dtype]),
        ctypes.c_void_p(logits.data_ptr()),
        ctypes.c_int64(logits.stride(0)),
        ctypes.c_int32(num_rows),
        ctypes.c_int64(vocab_size),
        ctypes.c_int32(num_threads),
    )
