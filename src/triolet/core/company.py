"""Which clients are there, and which of them have many requests beside one with few.

A client is there while it has a request, and `LINGER_S` longer: who asks, reads and asks again is there all the time.
It has *few* requests beside one that has at least `MANY` times as many as it ever had together since it last had none,
no matter how many of them run.
"""

from __future__ import annotations

from collections import OrderedDict

import attrs

MANY = 4
LINGER_S = 5.0  # somebody who reads a short answer and goes on is back by then
MAX_LINGERING = 64

Client = str | None


@attrs.define
class Company:
    """See the module's text."""

    _present: dict[Client, int] = attrs.field(factory=dict, init=False)
    _most: dict[Client, int] = attrs.field(factory=dict, init=False)
    _left: OrderedDict[Client, tuple[float, int]] = attrs.field(factory=OrderedDict, init=False)
    _now_s: float = attrs.field(default=0.0, init=False)

    def passes(self, now_s: float) -> None:
        """It is later now, monotonic seconds."""
        self._now_s = now_s
        while self._left and next(iter(self._left.values()))[0] + LINGER_S <= now_s:
            self._left.popitem(last=False)

    def has(self, client: Client, num_requests: int) -> None:
        """A client has so many requests; with none it has left."""
        if num_requests:
            self._left.pop(client, None)  # what it had before it left says nothing about what it wants now
            self._present[client] = num_requests
            self._most[client] = max(self._most.get(client, 0), num_requests)
        elif client in self._present:
            del self._present[client]
            self._left[client] = (self._now_s, self._most.pop(client))
            if len(self._left) > MAX_LINGERING:
                self._left.popitem(last=False)

    def few(self, beside: Client) -> list[Client]:
        """Those who have requests, and few beside a client's."""
        num_requests = self._present[beside]
        return [client for client, most in self._most.items() if MANY * most <= num_requests]

    def with_many(self) -> list[Client]:
        """Those who have many beside anybody who is there."""
        lingering = (most for _, most in self._left.values())
        fewest = min((*self._most.values(), *lingering), default=0)
        return [client for client, number in self._present.items() if number >= MANY * fewest]

    @property
    def is_lingered(self) -> bool:
        """Whether somebody is there who has no request just now."""
        return bool(self._left)
