"""Cell in which one task waits until another task wakes it."""

from __future__ import annotations

import trio


class WaitCell:
    """`trio.lowlevel.ParkingLot` for a single task, at half of its cost: a reader waits here for each token.

    Only one task may wait at a time. A ring while no task waits is forgotten.
    """

    def __init__(self) -> None:
        self._waiting: trio.lowlevel.Task | None = None

    async def wait(self) -> None:
        """Wait until it rings. A checkpoint."""
        assert self._waiting is None, "a task waits here already"
        self._waiting = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._leave)

    def _leave(self, raise_cancel: object) -> trio.lowlevel.Abort:
        self._waiting = None
        return trio.lowlevel.Abort.SUCCEEDED

    def ring(self) -> None:
        """Wake the task that waits, if there is one. Never waits."""
        if (waiting := self._waiting) is not None:
            self._waiting = None
            trio.lowlevel.reschedule(waiting)
