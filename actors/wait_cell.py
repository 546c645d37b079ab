"""Where one task waits until another has news for it."""

from __future__ import annotations

import trio


class WaitCell:
    """A `trio.lowlevel.ParkingLot` for one, at half of its price: a reader waits here for each token.

    Nobody may wait while somebody does; a ring that nobody waits for is forgotten.
    """

    def __init__(self) -> None:
        self._waiting: trio.lowlevel.Task | None = None

    async def wait(self) -> None:
        """Until it rings. A checkpoint."""
        assert self._waiting is None, "somebody waits here already"
        self._waiting = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._leave)

    def _leave(self, raise_cancel: object) -> trio.lowlevel.Abort:
        self._waiting = None
        return trio.lowlevel.Abort.SUCCEEDED

    def ring(self) -> None:
        """Wake whoever waits. Never waits."""
        if (waiting := self._waiting) is not None:
            self._waiting = None
            trio.lowlevel.reschedule(waiting)
