"""Random sampling: temperature, min_p, then a draw, with or without top_k and top_p.

On a CPU all rows are drawn in one call into C++, which sorts only the few tokens that are drawn from, and on a GPU in
three kernels of Triton, which sort nothing. It is the same draw as that in torch, with the same noise; exponentials and
logarithms may differ in their last bit. A row always goes this way or never: what it gets does not depend on the rows
beside it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from triolet.core.request.params import SamplingParams
from triolet.kernels.cpu.abi import DrawStruct
from triolet.kernels.cpu.library import library
from triolet.kernels.cpu.sampling.draw import can_choose, draw
from triolet.model.sampling.logits_processors import NEVER
from triolet.model.sampling.noise import answer_streams, exponential_noise, position_streams
from triolet.model.sampling.sampling_row import SamplingRow
from triolet.model.sampling.top_k_top_p import (
    NO_TOP_P,
    TOP_P_TOLERANCE,
    TopKTopP,
    draw_within,
    has_top_k,
    is_limited,
    keep_within,
)

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
    """Prepare draws on this device; None if torch must draw."""
    cpp = library() if device.type == "cpu" else None
    return None if cpp is None else CpuDraws(cpp, params, answers, vocab_size)


@attrs.frozen(eq=False)
class GpuDraws:
    """Sampling parameters of some rows, as the kernels on a GPU read them step after step."""

    columns: dict[str, Tensor]  # [num_rows] each, by the names of `draw_triton`'s arguments

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], answers: Tensor, vocab_size: int, device: torch.device
    ) -> GpuDraws:
        """For rows that are not greedy; `answers`: [num_rows] int64, where the noise of each answer begins."""
        top_k = [p.top_k if has_top_k(p, vocab_size) else vocab_size for p in params]
        columns = {
            "temperature": torch.tensor([p.temperature for p in params], dtype=torch.float32),
            "log_min_p": torch.tensor([p.min_p for p in params], dtype=torch.float64).log().float(),
            "top_k": torch.tensor(top_k, dtype=torch.int64),
            "top_p": torch.tensor([p.top_p for p in params], dtype=torch.float64),
            "answers": answers,
        }
        return cls({name: column.to(device) for name, column in columns.items()})

    def draw(self, logits: Tensor, max_logits: Tensor, positions: Sequence[int]) -> Tensor:
        """Draw a token per row; the logits are not changed, and the host waits for nothing."""
        from triolet.kernels.random_draw import draw_triton

        at = torch.tensor(positions, dtype=torch.int64)
        if logits.is_cuda:  # from pinned memory the copy need not be waited for
            at = at.pin_memory().to(logits.device, non_blocking=True)
        return draw_triton(
            logits,
            max_logits,
            **self.columns,
            positions=at,
            tolerance=TOP_P_TOLERANCE,
        )


def draw_columns(
    logits: Tensor,
    max_logits: Tensor,
    *,
    temperature: Tensor,
    log_min_p: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    answers: Tensor,
    positions: Tensor,
) -> Tensor:
    """Draw a token per row with parameters that are on the device; see `draw_triton`."""
    draw = draw_on_gpu if logits.is_cuda else draw_columns_in_torch
    return draw(
        logits, max_logits, temperature=temperature, log_min_p=log_min_p, top_k=top_k, top_p=top_p,
        answers=answers, positions=positions,
    )  # fmt: skip


def draw_on_gpu(logits: Tensor, max_logits: Tensor, **columns: Tensor) -> Tensor:
    """`draw_columns` in Triton: the same launches for all parameters."""
    from triolet.kernels.random_draw import draw_triton

    return draw_triton(logits, max_logits, **columns, tolerance=TOP_P_TOLERANCE)


def draw_columns_in_torch(
    logits: Tensor,
    max_logits: Tensor,
    *,
    temperature: Tensor,
    log_min_p: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    answers: Tensor,
    positions: Tensor,
) -> Tensor:
    """`draw_columns` in torch."""
    tokens = torch.zeros_like(positions)
    vocab_size = logits.shape[1]
    limited = (top_k < vocab_size) | (top_p < 1.0)
    for rows in ((temperature > 0) & ~limited, (temperature > 0) & limited):
        if not len(places := rows.nonzero()[:, 0]):
            continue
        scaled = logits[places] / temperature[places, None]
        largest = max_logits[places, None] / temperature[places, None]
        scaled.masked_fill_(scaled < largest + log_min_p[places, None], NEVER)
        streams = position_streams(answers[places], positions[places])
        if limited[places[0]]:
            k, p = top_k[places, None], top_p[places, None]
            has_k = k < vocab_size
            limits = TopKTopP(
                top_k=k,
                top_p=torch.where(p < 1.0, p, NO_TOP_P),
                max_top_k=int(torch.where(has_k, k, 0).max()),
                needs_totals=not bool(has_k.all()),
            )
            tokens[places] = draw_within(limits, scaled, largest, streams)
        else:
            token_ids = torch.arange(vocab_size)
            weights = (scaled - largest).exp() / exponential_noise(streams, token_ids)
            tokens[places] = weights.argmax(dim=1)
    return tokens


def make_gpu_draws(
    params: Sequence[SamplingParams], answers: Tensor, vocab_size: int, device: torch.device
) -> GpuDraws | None:
    """Prepare draws on a GPU; None on any other device."""
    return GpuDraws.of(params, answers, vocab_size, device) if device.type == "cuda" else None


BLOCK_ENTRIES = 2**17  # of full rows handled at a time on a CPU: a few arrays of this size stay in the cache


@attrs.frozen(eq=False, kw_only=True)
class RandomDraw:
    """Rows that get a drawn token, with their parameters on the device."""

    temperature: Tensor  # [num_rows, 1] float32, positive
    log_min_p: Tensor | None  # [num_rows, 1] float32, -inf where there is no min_p; None if no row has one
    # [num_rows] int64, where the noise of each answer begins; on the CPU, where positions come from.
    answers: Tensor
    # [num_open] int64, rows with neither top_k nor top_p: they meet the noise of the whole vocabulary.
    open_rows: Tensor
    limited_rows: Tensor  # [num_limited] int64, the others
    limits: TopKTopP  # of the limited rows
    vocabulary: Tensor  # [vocab_size] int64, all token ids
    on_cpu: CpuDraws | None  # draws them, where it can
    on_gpu: GpuDraws | None  # draws them on a GPU

    @classmethod
    def of(cls, rows: Sequence[SamplingRow], vocab_size: int, device: torch.device) -> RandomDraw:
        """Build the draw of rows that are not greedy."""
        params = [row.params for row in rows]
        limited = [i for i, p in enumerate(params) if is_limited(p, vocab_size)]
        opened = [i for i, p in enumerate(params) if not is_limited(p, vocab_size)]
        log_min_p = None
        if any(p.min_p for p in params):
            log_min_p = (
                torch.tensor([[p.min_p] for p in params], dtype=torch.float64).log().float().to(device)
            )
        answers = answer_streams(torch.tensor([row.seed for row in rows], dtype=torch.int64))
        return cls(
            temperature=torch.tensor([[p.temperature] for p in params], dtype=torch.float32, device=device),
            log_min_p=log_min_p,
            answers=answers,
            open_rows=torch.tensor(opened, dtype=torch.int64, device=device),
            limited_rows=torch.tensor(limited, dtype=torch.int64, device=device),
            limits=TopKTopP.of([params[i] for i in limited], vocab_size, device),
            vocabulary=torch.arange(vocab_size, device=device),
            on_cpu=make_cpu_draws(params, answers, vocab_size, device),
            on_gpu=make_gpu_draws(params, answers, vocab_size, device),
        )

    def draws_from(self, logits: Tensor) -> bool:
        """Tell whether tokens can be drawn from logits of this dtype, without a float32 copy."""
        return self.on_cpu is not None and can_choose(logits)

    def draw(self, logits: Tensor, max_logits: Tensor, positions: Sequence[int]) -> Tensor:
        """Draw a token for every row.

        Args:
            logits: [num_rows, vocab_size] float32, or what `draws_from` takes; overwritten.
            max_logits: [num_rows] float32, the largest of each row; if it is not finite, the row gives any token.
            positions: one per row, index in the answer of the token to be drawn.
        Returns:
            [num_rows] int64.
        """
        if self.on_cpu is not None and can_choose(logits):  # by dtype and layout: the same way in every batch
            return self.on_cpu.draw(logits, max_logits, positions)
        if self.on_gpu is not None:
            return self.on_gpu.draw(logits, max_logits, positions)
        scaled, max_logits = self._scale_(logits, max_logits)
        streams = position_streams(self.answers, torch.tensor(positions)).to(logits.device)
        if not len(self.open_rows):
            return draw_within(self.limits, scaled, max_logits, streams)
        if not len(self.limited_rows):
            return self._draw_open(scaled, max_logits, streams)
        tokens = torch.empty_like(streams)
        opened, limited = self.open_rows, self.limited_rows
        tokens[opened] = self._draw_open(scaled[opened], max_logits[opened], streams[opened])
        tokens[limited] = draw_within(self.limits, scaled[limited], max_logits[limited], streams[limited])
        return tokens

    def draw_part(
        self, logits: Tensor, max_logits: Tensor, positions: Sequence[int], first_id: int
    ) -> tuple[Tensor, Tensor]:
        """Draw a candidate for every row out of a part of the vocabulary; there are neither top_k nor top_p.

        The candidate of all parts that has the largest share is what `draw` draws from the whole.

        Args:
            logits: [num_rows, part_size] float32; overwritten.
            max_logits: [num_rows] float32, the largest of each row in the whole vocabulary.
            positions: as for `draw`.
            first_id: token of the first column.
        Returns:
            Shares, [num_rows] float32, and tokens, [num_rows] int64.
        """
        scaled, max_logits = self._scale_(logits, max_logits)
        streams = position_streams(self.answers, torch.tensor(positions)).to(logits.device)
        return self._shares(
            scaled, max_logits, streams, self.vocabulary[first_id : first_id + logits.shape[1]]
        )

    def _scale_(self, logits: Tensor, max_logits: Tensor) -> tuple[Tensor, Tensor]:
        scaled = logits.div_(self.temperature)
        max_logits = max_logits[:, None] / self.temperature
        if self.log_min_p is not None:
            scaled.masked_fill_(scaled < max_logits + self.log_min_p, NEVER)
        return scaled, max_logits

    def filtered(self, logits: Tensor, max_logits: Tensor) -> Tensor:
        """Return the scaled logits that `draw` draws from, -inf for tokens that are left out. Slower than drawing.

        Args:
            logits: [num_rows, vocab_size] float32; stay as they are.
            max_logits: [num_rows] float32, the largest of each row.
        Returns:
            [num_rows, vocab_size] float32.
        """
        scaled, max_logits = self._scale_(logits.clone(), max_logits)
        if len(limited := self.limited_rows):
            scaled[limited] = keep_within(self.limits, scaled[limited], max_logits[limited])
        return scaled

    # Draw for rows without top_k and top_p: every token of the vocabulary gets noise.
    def _draw_open(self, scaled: Tensor, max_logits: Tensor, streams: Tensor) -> Tensor:
        return self._shares(scaled, max_logits, streams, self.vocabulary)[1]

    def _shares(
        self, scaled: Tensor, max_logits: Tensor, streams: Tensor, token_ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        # the largest weight / noise of each row, and the token that has it
        found = []
        for block in _row_blocks(scaled):
            weights = (scaled[block] - max_logits[block]).exp_()
            noise = exponential_noise(streams[block], token_ids)
            found.append(weights.div_(noise).max(dim=1))
        return torch.cat([each.values for each in found]), token_ids[
            torch.cat([each.indices for each in found])
        ]


def _row_blocks(scaled: Tensor) -> Iterator[slice]:
    # on a CPU the noise and weights of a block stay in the cache; a GPU is faster with all rows at once
    num_rows, vocab_size = scaled.shape
    step = num_rows if scaled.is_cuda else max(1, BLOCK_ENTRIES // vocab_size)
    return (slice(first, first + step) for first in range(0, num_rows, step))
