"""When requests have to end: a heap of times, in which those of ended requests lie until they come up."""

from __future__ import annotations

import heapq
from collections.abc import Container

import attrs

from triolet.core.journal import JournalEntry

NEVER = float("inf")


@attrs.define
class Deadlines:
    """Times, monotonic seconds, at which requests must be looked at."""

    _heap: list[tuple[float, int]] = attrs.field(factory=list, init=False)

    def add(self, serial: int, deadline_s: float) -> None:
        """Look at this request then."""
        if deadline_s != NEVER:
            heapq.heappush(self._heap, (deadline_s, serial))

    def next_s(self, live: Container[int]) -> float:
        """The first time that is some live request's; infinity if there is none."""
        while self._heap and self._heap[0][1] not in live:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else NEVER

    def pop(self) -> int:
        """Whose time `next_s` was."""
        return heapq.heappop(self._heap)[1]


def is_overdue(entry: JournalEntry, now_s: float) -> bool:
    """Whether a request has to end; the limit of its waiting counts until it is first scheduled."""
    request, is_queued = entry.request, entry.scheduled_s is None
    return request.deadline_s <= now_s or (is_queued and request.queue_deadline_s <= now_s)
