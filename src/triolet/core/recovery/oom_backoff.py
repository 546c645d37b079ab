"""Limits on the size of steps after an out-of-memory error: smaller at once, then doubled step by step.

A forward pass needs memory beside the weights and the KV cache, and how much is known only when it was tried. A step
that finds none changes nothing, so it can be tried again: its largest rows leave, one the first time, then two, four
and so on, until what is left fits. A row that is alone is cut in halves. One token, alone, is as small as a step can
be: what does not fit then never will.

After a number of steps that fit, the limits are doubled, until they limit nothing. Each new out-of-memory error doubles
that number.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

CALM_STEPS, MAX_CALM_STEPS = 32, 4096


@attrs.define
class OomBackoff:
    """Limits of a step; none, as long as memory was always found."""

    _max_rows: int | None = None
    _max_tokens: int | None = None
    _patience: int = CALM_STEPS
    _num_calm: int = 0
    _num_misfits: int = 0

    def max_rows(self, wanted: int) -> int:
        """Return how many of the wanted rows a step may have."""
        return wanted if self._max_rows is None else min(wanted, self._max_rows)

    def max_tokens(self, wanted: int) -> int:
        """Return how many of the wanted tokens a step may have."""
        return wanted if self._max_tokens is None else min(wanted, self._max_tokens)

    def step_did_not_fit(self, row_tokens: Sequence[int]) -> int | None:
        """Make the next step smaller.

        Args:
            row_tokens: tokens of each row, the largest first.
        Returns:
            How many rows, the largest, must leave the batch; None if it cannot be any smaller.
        """
        self._num_misfits += 1
        self._num_calm = 0
        self._patience = min(2 * self._patience, MAX_CALM_STEPS)
        if sum(row_tokens) <= 1:
            self._lift()
            return None
        if len(row_tokens) == 1:
            self._max_rows, self._max_tokens = 1, row_tokens[0] // 2
            return 0
        num_leaving = min(1 << (self._num_misfits - 1), len(row_tokens) - 1)
        rest = row_tokens[num_leaving:]
        self._max_rows, self._max_tokens = len(rest), sum(rest)
        return num_leaving

    def step_done(self, most_rows: int, most_tokens: int) -> None:
        """Count a step that fitted, and raise the limits after enough of them.

        Args:
            most_rows: rows that the configuration allows a step.
            most_tokens: tokens that it allows a step.
        """
        self._num_misfits = 0
        if self._max_rows is None or self._max_tokens is None:
            return
        self._num_calm += 1
        if self._num_calm >= self._patience:
            self._num_calm = 0
            self._max_rows, self._max_tokens = 2 * self._max_rows, 2 * self._max_tokens
            if self._max_rows >= most_rows and self._max_tokens >= most_tokens:
                self._lift()

    def _lift(self) -> None:
        self._max_rows = self._max_tokens = None
