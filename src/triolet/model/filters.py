"""Which tokens may be drawn, and the draw: min_p, top_k and top_p, then noise.

A vocabulary is long, and what top_k and top_p leave of it is short. So a row is not sorted: its likeliest few tokens
are taken out, and it is seen whether they hold all that is kept. If not, the row tries again with more of them, at last
with all. Noise is made for those tokens alone. Rows without top_k and top_p need no order, and meet the noise of every
token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import torch
from torch import Tensor

from triolet.model.logits import NEVER
from triolet.model.noise import answer_streams, exponential_noise, position_streams
from triolet.model.sampling_row import SamplingRow

# Probabilities are rounded, so a sum that is mathematically top_p may come out a little below it; close enough counts.
# 1e-6 is above the error of float32 logits of ordinary size and below what anybody means by a top_p.
TOP_P_TOLERANCE = 1e-6
NO_TOP_P = 2.0  # a share that is never reached
FIRST_WIDTH, SECOND_WIDTH = 128, 2048  # most nuclei have fewer than 100 tokens
BLOCK_ENTRIES = 2**17  # of full rows handled at a time on a CPU: a few arrays of this size stay in the cache


@attrs.frozen(eq=False, kw_only=True)
class RandomRows:
    """Rows whose token is drawn, and their parameters on the device.

    Args:
        temperature: [num_rows, 1] float32, positive.
        log_min_p: [num_rows, 1] float32, -inf where there is no min_p; None if no row has one.
        answers: [num_rows] int64, where the noise of each answer begins; on the CPU, where positions come from.
        open_rows: [num_open] int64, rows with neither top_k nor top_p.
        filtered_rows: [num_filtered] int64, the others.
        top_k: [num_filtered, 1] int64; the vocabulary's size where there is none.
        top_p: [num_filtered, 1] float64; `NO_TOP_P` where there is none.
        max_top_k: the largest top_k there is, 0 if none.
        needs_total: whether some row has a top_p and no top_k.
        vocabulary: [vocab_size] int64, all token ids.
    """

    temperature: Tensor
    log_min_p: Tensor | None
    answers: Tensor
    open_rows: Tensor
    filtered_rows: Tensor
    top_k: Tensor
    top_p: Tensor
    max_top_k: int
    needs_total: bool
    vocabulary: Tensor

    @classmethod
    def of(cls, rows: Sequence[SamplingRow], vocab_size: int, device: torch.device) -> RandomRows:
        """For rows none of which is greedy."""
        params = [row.params for row in rows]
        top_ks = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
        top_ps = [p.top_p if p.top_p < 1.0 else NO_TOP_P for p in params]
        is_open = [
            top_k == vocab_size and top_p == NO_TOP_P for top_k, top_p in zip(top_ks, top_ps, strict=True)
        ]
        filtered = [i for i in range(len(rows)) if not is_open[i]]

        def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        return cls(
            temperature=column([p.temperature for p in params], torch.float32),
            log_min_p=column([p.min_p for p in params], torch.float64).log().to(torch.float32)
            if any(p.min_p for p in params)
            else None,
            answers=answer_streams(torch.tensor([row.seed for row in rows], dtype=torch.int64)),
            open_rows=torch.tensor(
                [i for i in range(len(rows)) if is_open[i]], dtype=torch.int64, device=device
            ),
            filtered_rows=torch.tensor(filtered, dtype=torch.int64, device=device),
            top_k=column([top_ks[i] for i in filtered], torch.int64),
            top_p=column([top_ps[i] for i in filtered], torch.float64),
            max_top_k=max((top_ks[i] for i in filtered if top_ks[i] < vocab_size), default=0),
            needs_total=any(top_ks[i] == vocab_size for i in filtered),
            vocabulary=torch.arange(vocab_size, device=device),
        )

    def draw(self, logits: Tensor, peaks: Tensor, positions: Sequence[int]) -> Tensor:
        """Draw a token for every row.

        Args:
            logits: [num_rows, vocab_size] float32; overwritten.
            peaks: [num_rows] float32, the largest of each row. A row whose peak is not finite gives any token.
            positions: one per row, index in the answer of the token to be drawn.
        Returns:
            [num_rows] int64.
        """
        scaled = logits.div_(self.temperature)
        peaks = peaks[:, None] / self.temperature
        if self.log_min_p is not None:
            scaled.masked_fill_(scaled < peaks + self.log_min_p, NEVER)
        streams = position_streams(self.answers, torch.tensor(positions)).to(logits.device)
        tokens = torch.empty_like(streams)
        for rows, draw in ((self.open_rows, self._draw_open), (self.filtered_rows, self._draw_filtered)):
            if len(rows) == len(tokens):
                tokens = draw(scaled, peaks, streams)
            elif len(rows):
                tokens[rows] = draw(scaled[rows], peaks[rows], streams[rows])
        return tokens

    def _draw_open(self, scaled: Tensor, peaks: Tensor, streams: Tensor) -> Tensor:
        drawn = []
        for block in _row_blocks(scaled):
            weights = (scaled[block] - peaks[block]).exp_()
            noise = exponential_noise(streams[block], self.vocabulary)
            drawn.append(weights.div_(noise).max(dim=1).indices)
        return torch.cat(drawn)

    def _draw_filtered(self, scaled: Tensor, peaks: Tensor, streams: Tensor) -> Tensor:
        tokens = torch.empty_like(streams)
        totals = _total_weights(scaled, peaks) if self.needs_total else torch.zeros_like(self.top_p)
        waiting = torch.arange(len(streams), device=streams.device)
        for width in self._widths():
            everything = len(waiting) == len(streams)
            candidates = _likeliest(scaled if everything else scaled[waiting], width)
            weights, settled = candidates.keep(
                peaks[waiting],
                self.top_k[waiting],
                self.top_p[waiting],
                totals[waiting],
                len(self.vocabulary),
            )
            noise = exponential_noise(streams[waiting], candidates.token_ids)
            best = weights.div_(noise).max(dim=1, keepdim=True).indices
            tokens[waiting[settled]] = candidates.token_ids.gather(1, best)[settled, 0]
            waiting = waiting[~settled]
            if not len(waiting):
                break
        return tokens

    def _widths(self) -> Iterator[int]:
        """How many candidates to look at: first, then, and in the worst case."""
        vocab_size = len(self.vocabulary)
        if (first := max(FIRST_WIDTH, self.max_top_k + 1)) < min(SECOND_WIDTH, vocab_size):
            yield first
        if vocab_size > SECOND_WIDTH:
            yield SECOND_WIDTH
        yield vocab_size


@attrs.frozen(eq=False)
class Candidates:
    """The likeliest tokens of some rows in falling order, equal ones by rising id; both [num_rows, width]."""

    logits: Tensor
    token_ids: Tensor

    def keep(
        self, peaks: Tensor, top_k: Tensor, top_p: Tensor, totals: Tensor, vocab_size: int
    ) -> tuple[Tensor, Tensor]:
        """Weigh the tokens that top_k and then top_p leave.

        Args:
            peaks: [num_rows, 1] float32, each row's largest logit.
            top_k: [num_rows, 1] int64.
            top_p: [num_rows, 1] float64.
            totals: [num_rows, 1] float64, weight of the whole row; used where there is no top_k.
            vocab_size: width at which nothing is missing.
        Returns:
            [num_rows, width] float64, probabilities up to a factor, 0 for what is dropped; and [num_rows] bool, whether
            no token outside of the candidates would have been kept.
        """
        width = self.logits.shape[1]
        weights = (self.logits.double() - peaks.double()).exp_()
        kth = self.logits.gather(1, top_k.clamp(max=width) - 1)
        weights = weights.where(self.logits >= kth, 0.0)  # ties with the k-th stay
        up_to_here = weights.cumsum(dim=1)
        totals = up_to_here[:, -1:].where(top_k < vocab_size, totals)
        kept = up_to_here - weights < top_p * totals * (1.0 - TOP_P_TOLERANCE)
        # What is not among the candidates is at most as likely as the last of them. A top_k is settled if its k-th is
        # above that, for then the total is right, too; a top_p alone, if the last token it keeps is.
        last_kept = self.logits.gather(1, kept.sum(dim=1, keepdim=True).clamp(min=1) - 1)
        last = self.logits[:, -1:]
        settled = (kth.where(top_k < vocab_size, last_kept) > last) | (last == NEVER) | (width == vocab_size)
        return weights.where(kept, 0.0), settled[:, 0]


def _likeliest(scaled: Tensor, width: int) -> Candidates:
    if width == scaled.shape[1]:
        return Candidates(*torch.sort(scaled, dim=1, descending=True, stable=True))
    # topk leaves the order of equal entries open, and with it which of them a top_p would keep.
    token_ids = scaled.topk(width, dim=1, sorted=False).indices.sort(dim=1).values
    logits, order = torch.sort(scaled.gather(1, token_ids), dim=1, descending=True, stable=True)
    return Candidates(logits, token_ids.gather(1, order))


def _total_weights(scaled: Tensor, peaks: Tensor) -> Tensor:
    """Sum of exp(logit - peak) over each row, [num_rows, 1] float64."""
    sums = [(scaled[block] - peaks[block]).exp_().sum(dim=1, keepdim=True) for block in _row_blocks(scaled)]
    return torch.cat(sums).double()


def _row_blocks(scaled: Tensor) -> Iterator[slice]:
    """The rows in blocks whose scratch arrays fit a CPU's cache; all at once on a GPU."""
    num_rows, vocab_size = scaled.shape
    step = num_rows if scaled.is_cuda else max(1, BLOCK_ENTRIES // vocab_size)
    return (slice(first, first + step) for first in range(0, num_rows, step))
