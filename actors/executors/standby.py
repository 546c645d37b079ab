"""Standby of a model process: a second one that has imported torch by the time at which it replaces one that hangs."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

import trio

from triolet.errors import ResourceShortage
from triolet.ipc.messages import ImportModules

STANDBY_S = 10.0
"""Seconds that one is kept after a late reply; late ones often come in series."""


class Replacement(Protocol):
    """What a standby needs of a process."""

    @property
    def is_alive(self) -> bool:
        """False once the system says that it has ended."""
        ...

    def post(self, message: ImportModules) -> bool:
        """Send a request that is not answered."""
        ...

    def discard(self) -> None:
        """Kill it and close what belongs to it."""
        ...

    async def gone(self) -> None:
        """Wait until the system has freed what it held."""
        ...


P = TypeVar("P", bound=Replacement)


class Standby(Generic[P]):
    """Process that has imported what a load needs and holds no model; none at most times.

    Args:
        spawn: starts a process.
    """

    def __init__(self, spawn: Callable[[], P]) -> None:
        self._spawn = spawn
        self.process: P | None = None
        """The process, until it is taken or ended."""
        self._use = trio.CancelScope()

    def start(self) -> None:
        """Start the process unless there is one; where there is no room for one there is none."""
        if self.process is None:
            with suppress(ResourceShortage, OSError):
                self.process = self._spawn()
                self.process.post(ImportModules())
                self._use = trio.CancelScope()
                trio.lowlevel.spawn_system_task(self._end_unused, self.process, self._use)
        self._use.deadline = math.inf

    def expire(self) -> None:
        """Let the process end unless it is taken soon."""
        self._use.deadline = trio.current_time() + STANDBY_S

    def take(self) -> P | None:
        """Give the process away, if there is one that lives."""
        process, self.process = self.process, None
        self._use.cancel()
        if process is None or process.is_alive:
            return process
        process.discard()
        return None

    async def end(self) -> None:
        """End the process, if there is one, and wait until it has gone."""
        if (process := self.take()) is not None:
            process.discard()
            with trio.CancelScope(shield=True):
                await process.gone()

    async def _end_unused(self, process: P, use: trio.CancelScope) -> None:
        # a system task, since a killed process ends the scope of the executor before the next one takes this
        try:
            with use:
                await trio.sleep_forever()
        finally:  # also if all of Trio ends first
            if self.process is process:
                self.process = None
                process.discard()
