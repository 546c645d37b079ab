"""Admission control: the queue is bounded by requests and by waiting tokens.

Under `fair` no client can fill the queue alone. The last eighth of the places, and of the tokens that may wait, is
reserved for clients below their share: the total, divided by the number of active clients and one more, for a client
that may arrive. A single client gets seven eighths; with many, each is sure of its share until the very last place is
taken. A request that was admitted is never removed for another one.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Container
from typing import Protocol

import attrs

from triolet.core.journal import Journal, JournalEntry
from triolet.core.request.param_validation import refuse
from triolet.core.scheduling.policies.registry import POLICIES
from triolet.errors import Overloaded

RECENT_ENDINGS = 64
KEPT = 8  # one part in so many is for clients below their share
MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 0.1, 60.0


class AdmissionLimits(Protocol):
    """Fields of an `EngineConfig` that bound the queue; see `Admission`."""

    @property
    def max_num_seqs(self) -> int: ...

    @property
    def max_queued_requests(self) -> int: ...

    @property
    def max_queued_tokens(self) -> int: ...

    @property
    def policy(self) -> str: ...


@attrs.define
class Admission:
    """Counter of the requests between the caller and the journal, and of those in the journal.

    Args:
        journal: the requests that were taken.
        max_num_seqs: requests that run together.
        max_queued_requests: requests that may wait besides.
        max_queued_tokens: a request that finds this many prompt tokens waiting is refused.
        is_fair: whether clients above their share leave a part of both to others.
    """

    journal: Journal
    max_num_seqs: int
    max_queued_requests: int
    max_queued_tokens: int
    is_fair: bool = False
    _num_reserved: int = attrs.field(default=0, init=False)
    _reserved: Counter[str | None] = attrs.field(factory=Counter, init=False)  # by client; none is 0
    _endings: deque[float] = attrs.field(factory=lambda: deque(maxlen=RECENT_ENDINGS), init=False)

    @classmethod
    def of(cls, limits: AdmissionLimits, journal: Journal) -> Admission:
        """Return the admission control of an engine with these limits."""
        return cls(
            journal,
            limits.max_num_seqs,
            limits.max_queued_requests,
            limits.max_queued_tokens,
            is_fair=POLICIES[limits.policy].keeps_accounts,
        )

    @property
    def max_live_requests(self) -> int:
        """Requests that can be in the engine at one time; every channel's capacity follows from this."""
        return self.max_num_seqs + self.max_queued_requests

    def reserve(
        self, now_s: float, num_places: int = 1, *, client: str | None = None, was_admitted: bool = False
    ) -> None:
        """Take places for a request whose prompt is not known in tokens yet: one for each of its answers, or none.

        Args:
            now_s: monotonic seconds.
            num_places: answers.
            client: owner of the request.
            was_admitted: by another engine before, so that its waiting tokens are not checked again.
        Raises:
            Overloaded: too few places are free, or the free ones are reserved for other clients.
            InvalidParams: the engine never has so many places.
        """
        if num_places > self.max_live_requests:
            raise refuse(
                "n",
                f"must be at most {self.max_live_requests} (max_num_seqs + max_queued_requests)",
                num_places,
            )
        num_left = self.max_live_requests - self._num_reserved - len(self.journal) - num_places
        if num_left < 0:
            raise Overloaded("max_queued_requests", self.max_queued_requests, self.retry_after_s(now_s))
        is_kept = self.is_fair and num_left < self.max_live_requests // KEPT
        if is_kept and not was_admitted and self._places(client) + num_places > self.share(client):
            raise Overloaded(
                "max_queued_requests", self.max_queued_requests, self.retry_after_s(now_s), is_for_others=True
            )
        if not was_admitted:
            self.check_tokens(now_s, client)
        self._num_reserved += num_places
        self._reserved[client] += num_places

    def check_tokens(self, now_s: float, client: str | None = None) -> None:
        """Check the limit of waiting tokens; again once the prompt is tokenised, since others came meanwhile.

        Raises:
            Overloaded: the limit is reached, in all or for this client.
        """
        most, num_queued = self.max_queued_tokens, self.journal.num_queued_tokens
        if num_queued >= most:
            raise Overloaded("max_queued_tokens", most, self.retry_after_s(now_s))
        is_kept = self.is_fair and num_queued >= most - most // KEPT
        if is_kept and self._queued_tokens(client) >= self._divided(most, client):
            raise Overloaded("max_queued_tokens", most, self.retry_after_s(now_s), is_for_others=True)

    def share(self, client: str | None) -> int:
        """Return how many places this client may have when few are left."""
        return self._divided(self.max_live_requests, client)

    def _divided(self, number: int, client: str | None) -> int:
        clients = {entry.request.client for entry in self.journal} | self._reserved.keys() | {client}
        return number // (len(clients) + 1)

    def _places(self, client: str | None) -> int:
        num_live = sum(entry.request.client == client for entry in self.journal)
        return num_live + self._reserved[client]

    def _queued_tokens(self, client: str | None) -> int:
        waiting = (entry.request for entry in self.journal if entry.scheduled_s is None)
        return sum(len(request.prompt_token_ids) for request in waiting if request.client == client)

    def give_back(self, num_places: int = 1, client: str | None = None) -> None:
        """Return reserved places: the request is in the journal now, or was refused."""
        assert self._reserved[client] >= num_places, "a place was given back twice"
        self._num_reserved -= num_places
        self._reserved[client] -= num_places
        if not self._reserved[client]:
            del self._reserved[client]

    def ended(self, now_s: float) -> None:
        """Record the end of a request, from which `retry_after_s` is estimated."""
        self._endings.append(now_s)

    def retry_after_s(self, now_s: float) -> float:
        """Return the estimated wait for a free place, seconds: the mean time between recent endings."""
        if len(self._endings) < 2:
            return 1.0
        mean_s = (now_s - self._endings[0]) / len(self._endings)
        return min(max(mean_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)


NEVER = float("inf")


@attrs.define
class Deadlines:
    """Heap of times, monotonic seconds, at which requests must be checked; ended requests are removed lazily."""

    _heap: list[tuple[float, int]] = attrs.field(factory=list, init=False)

    def add(self, serial: int, deadline_s: float) -> None:
        """Add the time at which to check a request."""
        if deadline_s != NEVER:
            heapq.heappush(self._heap, (deadline_s, serial))

    def next_s(self, live: Container[int]) -> float:
        """Return the earliest time of a live request; infinity if there is none."""
        while self._heap and self._heap[0][1] not in live:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else NEVER

    def pop(self) -> int:
        """Remove the earliest time, and return the serial of its request."""
        return heapq.heappop(self._heap)[1]


def is_overdue(entry: JournalEntry, now_s: float) -> bool:
    """Return True if a request must end; its queue deadline counts until it is first scheduled."""
    request, is_queued = entry.request, entry.scheduled_s is None
    return request.deadline_s <= now_s or (is_queued and request.queue_deadline_s <= now_s)
