"""From logits to tokens, for a whole batch at once.

The order is vLLM's, and users rely on it:

    mask of a grammar -> raw log-probabilities (or logits) -> float32 -> allowed_token_ids -> bad_words -> min_tokens
    -> logit_bias -> repetition -> frequency -> presence -> greedy rows take the largest
    -> temperature -> min_p -> top_k -> top_p -> processed log-probabilities (or logits)
    -> softmax and exponential noise

The first of these has happened to the logits that come here (`triolet.model.sampling.logits_processors`).

A row passes only through what it asks for: a batch of plain greedy rows is one `max`. Noise is a function of seed and
position (`triolet.model.sampling.noise`), so a row's token depends on its own logits and parameters and on nothing
beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor

from triolet.core.step_plan import TokenLogprobs
from triolet.kernels.cpu.sampling.draw import row_argmax
from triolet.model.sampling.logits_processors import LogitEdits
from triolet.model.sampling.logprobs import read_together, token_logprobs
from triolet.model.sampling.random_draw import RandomDraw
from triolet.model.sampling.sampling_row import SamplingRow

NOT_NUMBERS = "its logits are not finite numbers"
NOTHING_ALLOWED = "no token is left to choose from: all are masked"


@attrs.frozen
class Samples:
    """Tokens, failures and log-probabilities of a batch; indices are those of the rows."""

    token_ids: list[int]  # one per row; without meaning for a row that failed
    failures: dict[int, str]  # why a row got no token
    logprobs: dict[int, TokenLogprobs]  # for the rows that asked and did not fail


NO_SAMPLES = Samples([], {}, {})


def greedy_samples(max_logits: Sequence[float], token_ids: list[int]) -> Samples:
    """Build the samples of greedy rows.

    Args:
        max_logits: each row's largest logit; NaN is larger than everything.
        token_ids: the tokens that have them.
    """
    return Samples(token_ids, _failures(max_logits), {})


class SamplingBatch:
    """Rows that are sampled together, with everything about them that stays the same from step to step.

    Args:
        rows: in the order of the logits.
        vocab_size: width of the logits.
        device: where the logits are.
        logprobs_mode: what log-probabilities are told of; see `EngineConfig`.
    """

    # Building a batch costs more than one step's sampling: the runner keeps it while the rows are the same.
    def __init__(
        self,
        rows: Sequence[SamplingRow],
        vocab_size: int,
        device: torch.device,
        logprobs_mode: str = "raw_logprobs",
    ) -> None:
        self._rows = tuple(rows)
        self._device = device
        self._is_processed = logprobs_mode.startswith("processed")
        self._is_normalised = logprobs_mode.endswith("logprobs")
        self._with_logprobs = [i for i, row in enumerate(rows) if row.params.wants_logprobs]
        self._worked = [i for i, row in enumerate(rows) if row.has_edits or not row.params.is_greedy]
        edited = [(place, rows[i]) for place, i in enumerate(self._worked) if rows[i].has_edits]
        self._edits = LogitEdits(edited, device) if edited else None
        self._drawn = [place for place, i in enumerate(self._worked) if not rows[i].params.is_greedy]
        self._random_rows = [rows[self._worked[place]] for place in self._drawn]
        self._random = RandomDraw.of(self._random_rows, vocab_size, device) if self._drawn else None
        self._logprobs_index = self._index(self._with_logprobs)
        both = [i for i in self._with_logprobs if i in self._worked] if self._is_processed else []
        self._told_of_work = self._index([self._worked.index(i) for i in both])
        self._told_places = self._index([self._with_logprobs.index(i) for i in both])
        self._worked_index = self._index(self._worked)
        self._drawn_index = self._index(self._drawn)

    @property
    def is_greedy(self) -> bool:
        """True if every row takes the argmax of the unchanged logits and wants no log-probabilities."""
        return not (self._worked or self._with_logprobs)

    @property
    def is_open(self) -> bool:
        """True if every row takes its token from the unchanged logits, without top_k and top_p, and wants no more."""
        is_limited = self._random is not None and len(self._random.limited_rows) > 0
        return not self._with_logprobs and self._edits is None and not is_limited

    def _index(self, rows: list[int]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=self._device)

    def sample(self, logits: Tensor) -> Samples:
        """Choose the next token of every row.

        Args:
            logits: [num_rows, vocab_size] of any floating dtype; may be overwritten.
        Returns:
            Tokens, failures and log-probabilities; the rows' histories are not changed (see `SamplingRow.append`).
        """
        max_logits, tokens = row_argmax(logits)  # NaN is larger than everything
        told = self._raw(logits)
        read = [max_logits, tokens]
        if self._worked:
            worked_max_logits, worked_tokens = self._draw_as_is(logits, max_logits) or self._work(
                logits, told
            )
            tokens[self._worked_index] = worked_tokens
            read.append(worked_max_logits)
        # Nothing is read before everything is launched. Only a GPU's tensors are read together: it is waited for once.
        lists = read_together(read) if logits.is_cuda else [tensor.tolist() for tensor in read]
        failures = _failures(lists[0])
        for i, max_logit in zip(self._worked, lists[2] if self._worked else (), strict=True):
            if not math.isfinite(max_logit):
                failures.setdefault(i, _problem(max_logit))
        return Samples(lists[1], failures, self._logprobs(told, tokens, failures))

    def sample_part(self, logits: Tensor, first_id: int, gather: Callable[[Tensor], Tensor]) -> Samples:
        """Choose the next token of every row together with processes that have the logits of other tokens.

        The batch must be `is_open`. All processes get the same tokens: those that `sample` gives for the whole logits.

        Args:
            logits: [num_rows, part_size] of any floating dtype; may be overwritten.
            first_id: token of the first column.
            gather: from a tensor of each process to all of them, [num_processes, ...] in the order of their tokens.
        """
        max_logits, columns = row_argmax(logits)
        max_logits, tokens = _largest(max_logits, columns + first_id, gather)
        if self._random is not None:
            drawn = self._worked_index  # nothing else is worked on: there are no edits
            shares = self._random.draw_part(
                _take(logits, drawn).to(torch.float32), _take(max_logits, drawn), self._positions(), first_id
            )
            tokens[drawn] = _largest(*shares, gather)[1]
        return Samples(tokens.tolist(), _failures(max_logits.tolist()), {})

    def _draw_as_is(self, logits: Tensor, max_logits: Tensor) -> tuple[Tensor, Tensor] | None:
        # the same as `_work` without its float32 copy; None if the rows have edits or torch must draw
        if self._random is None or self._edits is not None or self._is_processed or logits.is_cuda:
            return None
        work = _take(logits, self._worked_index)
        if not self._random.draws_from(work):
            return None
        work_max_logits = _take(max_logits, self._worked_index)
        return work_max_logits, self._random.draw(work, work_max_logits, self._positions())

    def _positions(self) -> list[int]:
        return [len(row.output_token_ids) for row in self._random_rows]

    def _work(self, logits: Tensor, told: Tensor | None) -> tuple[Tensor, Tensor]:
        # largest logit after the edits, and chosen token, of the rows with edits or random sampling
        work = _take(logits, self._worked_index).to(torch.float32)
        if self._edits is not None:
            self._edits.apply_(work)
        max_logits, tokens = row_argmax(work)
        if told is not None and len(self._told_places):
            told[self._told_places] = self._processed(work, max_logits)[self._told_of_work]
        if self._random is not None:
            drawn = self._drawn_index
            tokens[drawn] = self._random.draw(_take(work, drawn), _take(max_logits, drawn), self._positions())
        return max_logits, tokens

    def _raw(self, logits: Tensor) -> Tensor | None:
        # a copy, because the edits are applied to the logits in place
        if not self._with_logprobs:
            return None
        raw = logits.index_select(0, self._logprobs_index).to(torch.float32)
        return raw if self._is_processed or not self._is_normalised else raw.log_softmax(dim=1)

    def _processed(self, work: Tensor, max_logits: Tensor) -> Tensor:
        # a copy: the draw still needs the logits before temperature
        processed = work.clone()
        if self._random is not None:
            drawn = self._drawn_index
            processed[drawn] = self._random.filtered(_take(work, drawn), _take(max_logits, drawn))
        return processed

    def _logprobs(
        self, told: Tensor | None, tokens: Tensor, failures: dict[int, str]
    ) -> dict[int, TokenLogprobs]:
        if told is None:
            return {}
        if self._is_processed and self._is_normalised:
            told = told.log_softmax(dim=1)
        params = [self._rows[i].params for i in self._with_logprobs]
        named = token_logprobs(
            told,
            _take(tokens, self._logprobs_index),
            [p.logprobs or 0 for p in params],
            [p.logprob_token_ids for p in params],
        )
        return {
            i: logprobs for i, logprobs in zip(self._with_logprobs, named, strict=True) if i not in failures
        }


def _largest(values: Tensor, tokens: Tensor, gather: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    # of all processes; NaN is larger than everything, and of equal numbers the first is taken
    parts = gather(
        torch.stack([values.to(torch.float64), tokens.to(torch.float64)])
    )  # both are exact in float64
    largest, best = parts[0]
    for other, found in parts[1:]:
        is_larger = (other > largest) | (other.isnan() & ~largest.isnan())
        largest, best = torch.where(is_larger, other, largest), torch.where(is_larger, found, best)
    return largest.to(torch.float32), best.to(torch.int64)


def _failures(max_logits: Sequence[float]) -> dict[int, str]:
    return {i: _problem(value) for i, value in enumerate(max_logits) if not math.isfinite(value)}


def _problem(max_logit: float) -> str:
    return NOTHING_ALLOWED if max_logit == -math.inf else NOT_NUMBERS


def _take(tensor: Tensor, rows: Tensor) -> Tensor:
    # rows are in ascending order: as many as the tensor has are all of them, and need no copy
    return tensor if len(rows) == len(tensor) else tensor[rows]
