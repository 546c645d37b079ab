"""Turn queues of one connection: first in, first out within a lane, and a limit on active turns."""

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
    """Lanes of one connection, each a queue of turns; the one without a name always exists.

    Args:
        max_active: most active turns, of all lanes together.
        max_lanes: most named lanes; a used name counts until the connection ends.
        max_queued: most queued turns.
        max_queued_bytes: most bytes of their messages together.
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
        """Active turns, and those told to start."""
        return [lane.active for lane in self._lanes.values() if lane.active is not None]

    def active_in(self, stream_id: str | None) -> Turn | None:
        """Return the active turn of a lane."""
        lane = self._lanes.get(stream_id)
        return None if lane is None else lane.active

    def is_active(self, turn: Turn) -> bool:
        """Return whether this turn is the active one of its lane."""
        return self.active_in(turn.stream_id) is turn

    def add(self, turn: Turn) -> None:
        """Append a turn to its lane.

        Raises:
            WireError: there are too many lanes or queued turns.
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
                f"{self.num_queued} responses wait on this connection; wait for their responses first.",
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
        """Insert a turn right after the active one of its lane."""
        self._lanes[turn.stream_id].queue.appendleft(turn)
        self.num_queued += 1
        self.num_queued_bytes += turn.num_bytes

    def take_next(self) -> Turn | None:
        """Activate and return the next turn, if one may start."""
        if not self._waiting or self.num_active >= self.max_active:
            return None
        lane = self._lanes[self._waiting.popleft()]
        turn = lane.active = lane.queue.popleft()
        self.num_queued -= 1
        self.num_queued_bytes -= turn.num_bytes
        self.num_active += 1
        return turn

    def end(self, turn: Turn) -> None:
        """End an active turn."""
        lane = self._lanes[turn.stream_id]
        lane.active = None
        self.num_active -= 1
        if lane.queue:
            self._waiting.append(turn.stream_id)

    def take_queued(self) -> list[Turn]:
        """Remove and return all queued turns."""
        turns = [turn for lane in self._lanes.values() for turn in lane.queue]
        for lane in self._lanes.values():
            lane.queue.clear()
        self._waiting.clear()
        self.num_queued = self.num_queued_bytes = 0
        return turns
