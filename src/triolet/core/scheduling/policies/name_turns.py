"""Turns of the names under one client: each name's next request before another one's second.

A server counts all requests of an API key as one client, and the body's `client` names a user of that key. Names divide
what the client gets, request by request: the first waiting request of every name has the same turn, the second the next
one, and so on, as packets have in start-time fair queueing (Goyal, Vin and Cheng, 1996) if all have one length. A name
that begins to wait starts at the turn that is being served, so that no credit is saved up.
"""

from __future__ import annotations

import attrs

MIN_PRUNED = 64  # fewer names are kept although they say nothing any more


@attrs.define
class NameTurns:
    """Turns of one client's requests; the smaller goes first."""

    _current: int = attrs.field(default=0, init=False)  # latest that has started
    _latest: dict[str | None, int] = attrs.field(factory=dict, init=False)  # of each name

    def next(self, name: str | None) -> int:
        """Return the turn of a new request of this name, and count it."""
        if len(self._latest) >= MIN_PRUNED:
            self._latest = {other: turn for other, turn in self._latest.items() if turn > self._current}
        turn = self._latest[name] = 1 + max(self._current, self._latest.get(name, 0))
        return turn

    def started(self, turn: int) -> None:
        """Note that a request with this turn is served."""
        self._current = max(self._current, turn)
