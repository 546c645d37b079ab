"""How large a step may be when memory for it has run out: smaller at once, larger again by and by.

A forward pass needs memory beside the weights and the KV cache, and how much is known only when it was tried. A step
that finds none changes nothing, so it can be tried again: its largest rows leave, one the first time, then two, four
and so on, until what is left fits. A row that is alone is cut in halves. One token, alone, is as small as a step can
be: what does not fit then never will.

After some steps without trouble the limits are doubled, until they are no limits any more; each new trouble makes the
patience twice as long.
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
        """Rows that a step may have, out of those it would have."""
        return wanted if self._max_rows is None else min(wanted, self._max_rows)

    def max_tokens(self, wanted: int) -> int:
        """Tokens that a step may have, out of those it would have."""
        return wanted if self._max_tokens is None else min(wanted, self._max_tokens)

    def step_did_not_fit(self, row_tokens: Sequence[int]) -> int | None:
        """Make the next step smaller.

        Args:
            row_tokens: tokens of each row, the largest first.
        Returns:
            How many rows, the largest, must leave the batch; None if it can not be any smaller.
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
        """A step has fitted.

        Args:
            most_rows: that a step has at most, whatever the memory.
            most_tokens: likewise.
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
