"""Who is let in: bounded by requests and by waiting tokens, and never a queue without end."""

from __future__ import annotations

from collections import deque

import attrs

from triolet.core.journal import Journal
from triolet.core.param_checks import refuse
from triolet.errors import Overloaded

RECENT_ENDINGS = 64
MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 0.1, 60.0


@attrs.define
class Admission:
    """Counts the requests between the caller and the journal, and those in the journal.

    Args:
        journal: the requests that were taken.
        max_num_seqs: requests that run together.
        max_queued_requests: requests that may wait besides.
        max_queued_tokens: a request that finds this many prompt tokens waiting is refused.
    """

    journal: Journal
    max_num_seqs: int
    max_queued_requests: int
    max_queued_tokens: int
    _num_reserved: int = attrs.field(default=0, init=False)
    _endings: deque[float] = attrs.field(factory=lambda: deque(maxlen=RECENT_ENDINGS), init=False)

    @property
    def max_live_requests(self) -> int:
        """Requests that can be in the engine at one time; every channel's capacity follows from this."""
        return self.max_num_seqs + self.max_queued_requests

    def reserve(self, now_s: float, num_places: int = 1, *, was_let_in: bool = False) -> None:
        """Take places for a request whose prompt is not known in tokens yet: one for each of its answers, or none.

        Args:
            now_s: monotonic seconds.
            num_places: answers.
            was_let_in: by another engine, which found its tokens few enough.
        Raises:
            Overloaded: there are not so many.
            InvalidParams: there never will be.
        """
        if num_places > self.max_live_requests:
            raise refuse(
                "n",
                f"must be at most {self.max_live_requests} (max_num_seqs + max_queued_requests)",
                num_places,
            )
        if self._num_reserved + len(self.journal) + num_places > self.max_live_requests:
            raise Overloaded("max_queued_requests", self.max_queued_requests, self.retry_after_s(now_s))
        if not was_let_in:
            self.check_tokens(now_s)
        self._num_reserved += num_places

    def check_tokens(self, now_s: float) -> None:
        """Look at the waiting tokens; again once the prompt is tokenised, since others came meanwhile.

        Raises:
            Overloaded: as many as may wait do.
        """
        if self.journal.num_queued_tokens >= self.max_queued_tokens:
            raise Overloaded("max_queued_tokens", self.max_queued_tokens, self.retry_after_s(now_s))

    def give_back(self, num_places: int = 1) -> None:
        """The request is in the journal now, or was never taken."""
        assert self._num_reserved >= num_places, "a place was given back twice"
        self._num_reserved -= num_places

    def ended(self, now_s: float) -> None:
        """A request has ended; the pace of endings is what `retry_after_s` is estimated from."""
        self._endings.append(now_s)

    def retry_after_s(self, now_s: float) -> float:
        """When one more request may find a place, seconds from now: the mean time between recent endings."""
        if len(self._endings) < 2:
            return 1.0
        pace = (now_s - self._endings[0]) / len(self._endings)
        return min(max(pace, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
