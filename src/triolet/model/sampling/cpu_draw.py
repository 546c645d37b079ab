"""Draw tokens on a CPU: all rows in one call into C++, which sorts only the few tokens that are drawn from.

It is the same draw as `triolet.model.sampling.random_draw`'s in torch, with the same noise; exponentials and
logarithms may differ
in their last bit. A row always goes this way or never: what it gets does not depend on the rows beside it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from triolet.core.request.params import SamplingParams
from triolet.kernels.cpu.abi import DrawStruct
from triolet.kernels.cpu.library import library
from triolet.kernels.cpu.sampling.draw import draw
from triolet.model.sampling.top_k_top_p import NO_TOP_P, has_top_k

_DRAW = np.dtype(DrawStruct)


class CpuDraws:
    """Sampling parameters of some rows, as C++ reads them step after step.

    Args:
        cpp: the kernels.
        params: of each row, none of them greedy.
        answers: [num_rows] int64, where the noise of each answer begins.
        vocab_size: width of the logits.
    """

    def __init__(
        self, cpp: ctypes.CDLL, params: Sequence[SamplingParams], answers: Tensor, vocab_size: int
    ) -> None:
        self._cpp = cpp
        self._draws: npt.NDArray[np.void] = np.zeros(len(params), dtype=_DRAW)
        self._draws["answer"] = answers.numpy()
        self._draws["temperature"] = [p.temperature for p in params]
        self._draws["top_k"] = [p.top_k if has_top_k(p, vocab_size) else 0 for p in params]
        self._draws["top_p"] = [p.top_p if p.top_p < 1.0 else NO_TOP_P for p in params]
        self._draws["log_min_p"] = [math.log(p.min_p) if p.min_p else -math.inf for p in params]

    def draw(self, logits: Tensor, max_logits: Tensor, positions: Sequence[int]) -> Tensor:
        """Draw a token per row; the logits are not changed."""
        self._draws["max_logit"] = max_logits.numpy()
        self._draws["position"] = positions
        return draw(self._cpp, self._draws.ctypes.data, logits)


def make_cpu_draws(
    params: Sequence[SamplingParams], answers: Tensor, vocab_size: int, device: torch.device
) -> CpuDraws | None:
    """Prepare draws for rows whose logits are on this device; None where torch has to draw."""
    cpp = library() if device.type == "cpu" else None
    return None if cpp is None else CpuDraws(cpp, params, answers, vocab_size)
