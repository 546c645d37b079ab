"""Draw within top_k and top_p.

A row is not sorted: top_k and top_p keep few tokens of a large vocabulary. The most likely tokens are taken as
candidates; if they do not include every token that is kept, the row is repeated with more candidates, at last with all.
Of equally likely tokens top_p keeps those with lower ids, whatever the number of candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from triolet.core.request.params import SamplingParams
from triolet.model.sampling.logits_processors import NEVER
from triolet.model.sampling.noise import exponential_noise

# Probabilities are rounded, so a sum that is mathematically top_p may come out a little below it; close enough counts.
# 1e-6 is above the error of float32 logits of ordinary size and below any useful difference of top_p.
TOP_P_TOLERANCE = 1e-6
NO_TOP_P = 2.0  # a share that is never reached
FIRST_WIDTH, SECOND_WIDTH = 128, 2048  # most nuclei have fewer than 100 tokens


@attrs.frozen(eq=False, kw_only=True)
class TopKTopP:
    """The top_k and top_p of some rows, each of which has one of them at least."""

    top_k: Tensor  # [num_rows, 1] int64; the vocabulary's size where there is none
    top_p: Tensor  # [num_rows, 1] float64; `NO_TOP_P` where there is none
    max_top_k: int  # the largest top_k there is, 0 if none
    needs_totals: bool  # whether some row has a top_p and no top_k

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> TopKTopP:
        """For rows with `is_limited`."""
        top_k = [p.top_k if has_top_k(p, vocab_size) else vocab_size for p in params]
        top_p = [p.top_p if p.top_p < 1.0 else NO_TOP_P for p in params]
        return cls(
            top_k=torch.tensor(top_k, dtype=torch.int64, device=device)[:, None],
            top_p=torch.tensor(top_p, dtype=torch.float64, device=device)[:, None],
            max_top_k=max((k for k in top_k if k < vocab_size), default=0),
            needs_totals=any(k == vocab_size for k in top_k),
        )

    def widths(self, vocab_size: int) -> list[int]:
        """Return the numbers of candidates to try in turn: first, second, worst case."""
        # One more than top_k shows that nothing ties with the k-th; fewer than 16 are not faster.
        first = max(FIRST_WIDTH if self.needs_totals else 16, self.max_top_k + 1)
        return [*sorted(width for width in {first, SECOND_WIDTH} if first <= width < vocab_size), vocab_size]


def has_top_k(params: SamplingParams, vocab_size: int) -> bool:
    """Tell whether top_k leaves any token out."""
    return 0 < params.top_k < vocab_size


def is_limited(params: SamplingParams, vocab_size: int) -> bool:
    """Tell whether there is a top_k or top_p to apply."""
    return has_top_k(params, vocab_size) or params.top_p < 1.0


def draw_within(limits: TopKTopP, logits: Tensor, max_logits: Tensor, streams: Tensor) -> Tensor:
    """Draw a token for each row from what its top_k and then its top_p leave.

    Args:
        limits: of each row.
        logits: [num_rows, vocab_size] float32, after temperature.
        max_logits: [num_rows, 1] float32, each row's largest logit; if it is not finite, the row gives any token.
        streams: [num_rows] int64, where each row's noise begins.
    Returns:
        [num_rows] int64.
    """
    if limits.needs_totals:  # the candidates of a top_p alone do not give the sum over the vocabulary
        totals = (logits - max_logits).exp_().sum(dim=1, keepdim=True).double()
    else:
        totals = torch.zeros_like(limits.top_p)
    rows = _Rows(logits, max_logits, streams, limits.top_k, limits.top_p, totals)
    return _draw(rows, limits.widths(logits.shape[1]))


def keep_within(limits: TopKTopP, logits: Tensor, max_logits: Tensor) -> Tensor:
    """Mask the logits that each row's top_k and then its top_p leave out with -inf.

    Args:
        limits: of each row.
        logits: [num_rows, vocab_size] float32, after temperature.
        max_logits: [num_rows, 1] float32, each row's largest logit.
    """
    totals = (logits - max_logits).exp_().sum(dim=1, keepdim=True).double()
    rows = _Rows(logits, max_logits, torch.zeros_like(logits[:, 0]), limits.top_k, limits.top_p, totals)
    ordered, token_ids = _likeliest(logits, logits.shape[1])
    # By what is dropped: a token far below the likeliest has a weight of zero, whether it is kept or not.
    _, dropped, _ = _weigh(rows, ordered)
    return torch.empty_like(logits).scatter_(1, token_ids, ordered.masked_fill(dropped, NEVER))


@attrs.frozen(eq=False)
class _Rows:
    """Rows without a token yet."""

    logits: Tensor
    max_logits: Tensor
    streams: Tensor
    top_k: Tensor
    top_p: Tensor
    totals: Tensor  # [num_rows, 1] float64, sum of exp(logit - max_logit); used only without top_k

    def take(self, rows: Tensor) -> _Rows:
        return _Rows(
            self.logits[rows],
            self.max_logits[rows],
            self.streams[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.totals[rows],
        )


def _draw(rows: _Rows, widths: Sequence[int]) -> Tensor:
    width, *wider = widths
    logits, token_ids = _likeliest(rows.logits, width)
    weights, _, settled = _weigh(rows, logits)
    best = weights.div_(exponential_noise(rows.streams, token_ids)).max(dim=1, keepdim=True).indices
    tokens = token_ids.gather(1, best)[:, 0]
    if (
        wider and not settled.all()
    ):  # noise depends on the token id only: the repetition draws from the same numbers
        rest = ~settled
        tokens[rest] = _draw(rows.take(rest), wider)
    return tokens


def _likeliest(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    # logits and token ids, [num_rows, width], in descending order; equal logits by ascending token id
    if width == logits.shape[1]:
        ordered = torch.sort(logits, dim=1, descending=True, stable=True)
        return ordered.values, ordered.indices
    # topk leaves the order of equal entries open.
    token_ids = logits.topk(width, dim=1, sorted=False).indices.sort(dim=1).values
    values, order = torch.sort(logits.gather(1, token_ids), dim=1, descending=True, stable=True)
    return values, token_ids.gather(1, order)


def _weigh(rows: _Rows, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weigh the candidates that top_k and then top_p leave.

    Args:
        rows: that they come from.
        logits: [num_rows, width], of the candidates, in falling order.
    Returns:
        [num_rows, width] float64, probabilities up to a factor, 0 for what is dropped; [num_rows, width] bool, what is
        dropped; and [num_rows] bool, whether no token outside of the candidates would have been kept.
    """
    num_candidates, vocab_size = logits.shape[1], rows.logits.shape[1]
    has_top_k = rows.top_k < vocab_size
    weights = (logits.double() - rows.max_logits).exp_()
    kth = logits.gather(1, rows.top_k.clamp(max=num_candidates) - 1)
    below = logits < kth  # ties with the k-th stay
    weights = weights.masked_fill_(below, 0.0)
    sums = weights.cumsum(dim=1)
    totals = sums[:, -1:].where(has_top_k, rows.totals)
    dropped = below | (sums - weights >= rows.top_p * totals * (1.0 - TOP_P_TOLERANCE))
    # What is not among the candidates is at most as likely as the last of them. A top_k is settled if its k-th is above
    # that, for then the total is right, too; a top_p alone, if the last token it keeps is.
    num_kept = num_candidates - dropped.sum(dim=1, keepdim=True)
    least = kth.where(has_top_k, logits.gather(1, num_kept.clamp_(min=1) - 1))
    last = logits[:, -1:]
    settled = (least > last) | (last == NEVER)
    return weights.masked_fill_(dropped, 0.0), dropped, settled[:, 0]
