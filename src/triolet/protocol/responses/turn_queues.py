"""Which turn of a connection is next: first in, first out within a lane, and a bound on how many are active."""

from __future__ import annotations

from collections import deque

import attrs

from triolet.protocol.errors import WireError
from triolet.protocol.responses.turns import Turn


@attrs.define(eq=False)
class _Lane:
    queue: deque[Turn] = attrs.field(factory=deque)
    active: Turn | None = None


@attrs.define(eq=False, kw_only=True)
class TurnQueues:
    """The lanes of one connection; the one without a name is always there.

    Args:
        max_active: turns at the same time, of all lanes together.
        max_lanes: named ones; a name that was used counts as long as the connection lives.
        max_queued: turns that wait.
        max_queued_bytes: how long what they were asked with may be together.
    """

    max_active: int
    max_lanes: int
    max_queued: int
    max_queued_bytes: int
    num_active: int = attrs.field(default=0, init=False)
    num_queued: int = attrs.field(default=0, init=False)
    num_queued_bytes: int = attrs.field(default=0, init=False)
    _lanes: dict[str | None, _Lane] = attrs.field(factory=lambda: {None: _Lane()}, init=False)
    _waiting: deque[str | None] = attrs.field(
        factory=deque, init=False
    )  # idle lanes with a turn, oldest first

    @property
    def active(self) -> list[Turn]:
        """The turns that are active, or were told to start."""
        return [lane.active for lane in self._lanes.values() if lane.active is not None]

    def active_in(self, stream_id: str | None) -> Turn | None:
        """The active turn of a lane."""
        lane = self._lanes.get(stream_id)
        return None if lane is None else lane.active

    def is_active(self, turn: Turn) -> bool:
        """Whether this turn is its lane's active one."""
        return self.active_in(turn.stream_id) is turn

    def add(self, turn: Turn) -> None:
        """Put a turn at the end of its lane.

        Raises:
            WireError: there are too many lanes, or too many turns wait.
        """
        if (
            turn.stream_id not in self._lanes and len(self._lanes) > self.max_lanes
        ):  # one more than the named ones
            raise WireError(
                f"A connection can have {self.max_lanes} named lanes; open another one.",
                code="websocket_stream_limit_reached",
                param="stream_id",
            )
        if self.num_queued >= self.max_queued or (
            self.num_queued and self.num_queued_bytes + turn.num_bytes > self.max_queued_bytes
        ):
            raise WireError(
                f"{self.num_queued} responses wait on this connection; read their answers first.",
                code="rate_limit_exceeded",
                status=429,
                type="rate_limit_error",
            )
        lane = self._lanes.setdefault(turn.stream_id, _Lane())
        lane.queue.append(turn)
        self.num_queued += 1
        self.num_queued_bytes += turn.num_bytes
        if lane.active is None and len(lane.queue) == 1:
            self._waiting.append(turn.stream_id)

    def put_first(self, turn: Turn) -> None:
        """Put a turn right behind the active one of its lane."""
        self._lanes[turn.stream_id].queue.appendleft(turn)
        self.num_queued += 1
        self.num_queued_bytes += turn.num_bytes

    def take_next(self) -> Turn | None:
        """The turn whose place has come, if there is one; it is active from now on."""
        if not self._waiting or self.num_active >= self.max_active:
            return None
        lane = self._lanes[self._waiting.popleft()]
        turn = lane.active = lane.queue.popleft()
        self.num_queued -= 1
        self.num_queued_bytes -= turn.num_bytes
        self.num_active += 1
        return turn

    def end(self, turn: Turn) -> None:
        """An active turn is over."""
        lane = self._lanes[turn.stream_id]
        lane.active = None
        self.num_active -= 1
        if lane.queue:
            self._waiting.append(turn.stream_id)

    def take_queued(self) -> list[Turn]:
        """Everything that waits; nothing waits any more."""
        turns = [turn for lane in self._lanes.values() for turn in lane.queue]
        for lane in self._lanes.values():
            lane.queue.clear()
        self._waiting.clear()
        self.num_queued = self.num_queued_bytes = 0
        return turns
