"""Choices between two ways to the same result, measured on this machine with the model's own weights.

A choice here never changes a token: both ways give the same bits, so a measurement that other programs disturbed costs
time and nothing else.
"""

from __future__ import annotations

import ctypes
import math
import time

import torch

from triolet.kernels.cpu.abi import ModelStruct, StepStruct
from triolet.kernels.cpu.gemm.packing import ANY_ROWS

ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Rows of a step that are tried, until the filter loses."""

ROUNDS = 5
BUDGET_S = 0.2
"""Time after which nothing more is tried, seconds; a large head takes it all."""


def calibrate_argmax_filter(cpp: ctypes.CDLL, model: ModelStruct, dtype: torch.dtype) -> int:
    """Return up to how many rows the argmax filter of a model saves time: 0, one of `ROWS`, or `ANY_ROWS`.

    Few rows wait for the weights of the head, and the filter reads a quarter or half of the bytes. Many rows wait for
    the products, and the filter has two rows of int8 for each.

    Args:
        cpp: the kernels.
        model: with a filter; its `max_rows` is left as it was.
        dtype: of the model.
    """
    rows = torch.randn(ROWS[-1], model.hidden, generator=torch.Generator().manual_seed(0)).to(dtype)
    kept, fastest, lost = model.argmax_filter.max_rows, 0, 0
    end_s = time.perf_counter() + BUDGET_S
    for count in ROWS:
        filtered_s, full_s = _time_both(cpp, model, rows[:count])
        if filtered_s <= full_s:
            fastest, lost = count, 0
        else:
            lost += 1
        if lost == 2 or time.perf_counter() > end_s:  # one loss can be a disturbance
            break
    model.argmax_filter.max_rows = kept
    return ANY_ROWS if fastest == ROWS[-1] else fastest


def _time_both(cpp: ctypes.CDLL, model: ModelStruct, rows: torch.Tensor) -> tuple[float, float]:
    """Time the argmax of rows with and without the filter in turns, the best of `ROUNDS` each, seconds."""
    count = len(rows)
    max_logits, argmax = torch.empty(count), torch.empty(count, dtype=torch.int64)
    step = StepStruct(
        hidden=rows.data_ptr(),
        max_logits=max_logits.data_ptr(),
        argmax=argmax.data_ptr(),
        num_logits=count,
        num_threads=torch.get_num_threads(),
    )
    best_s = {0: math.inf, count: math.inf}
    for turn in range(ROUNDS + 1):
        for limit in (0, count):
            model.argmax_filter.max_rows = limit
            start_s = time.perf_counter()
            cpp.triolet_head(ctypes.byref(model), ctypes.byref(step))
            if turn:  # the first turn brings threads and weights into place
                best_s[limit] = min(best_s[limit], time.perf_counter() - start_s)
    return best_s[count], best_s[0]
