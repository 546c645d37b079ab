"""Standby of an executor: what the next process comes from, if the one that computes dies or hangs."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import trio

from triolet.actors.executors.connection import RunnerProcess
from triolet.errors import ResourceShortage
from triolet.ipc.messages import ImportModules

STANDBY_S = 10.0  # that a standby is kept after a late reply; late ones often come in series
KEPT_AFTER_S = 10.0  # from a load until one is started to be kept: its imports take the time of a processor


class Source(Protocol):
    """Source of processes that have imported what a load needs: a fork server, or a process that is there already."""

    @property
    def is_alive(self) -> bool:
        """False once the system says that it has ended."""
        ...

    async def take(self) -> RunnerProcess | None:
        """Return a process; None if it gives none any more.

        Raises:
            ResourceShortage: there are no descriptors for it.
        """
        ...

    def discard(self) -> None:
        """End it, and close what belongs to it."""
        ...

    async def gone(self) -> None:
        """Wait until it has ended, and the system has freed what it held."""
        ...


def spawn_importing(spawn: Callable[[], RunnerProcess]) -> RunnerProcess:
    """Start a process that imports what a load needs, and waits."""
    process = spawn()
    process.post(ImportModules())
    return process


class Standby:
    """Source of the next process, or none.

    Args:
        spawn: starts a source.
    """

    def __init__(self, spawn: Callable[[], Source]) -> None:
        self._spawn = spawn
        self.source: Source | None = None
        self._use = trio.CancelScope()
        self._delay = trio.CancelScope()

    def keep(self) -> None:
        """Start it in `KEPT_AFTER_S`, unless it is called off before: then there is one."""
        self._delay.cancel()
        self._delay = trio.CancelScope()
        trio.lowlevel.spawn_system_task(self._start_at, trio.current_time() + KEPT_AFTER_S, self._delay)

    async def _start_at(self, time_s: float, delay: trio.CancelScope) -> None:
        with delay:
            await trio.sleep_until(time_s)
            self.start()

    def start(self) -> None:
        """Start it unless there is one; where there is no room for one there is none."""
        if self.source is None:
            with suppress(ResourceShortage, OSError):
                self.source = self._spawn()
                self._use = trio.CancelScope()
                trio.lowlevel.spawn_system_task(self._end_unused, self.source, self._use)
        self._use.deadline = math.inf

    def expire(self) -> None:
        """Let it end unless it is used soon."""
        self._delay.cancel()
        self._use.deadline = trio.current_time() + STANDBY_S

    async def take(self) -> RunnerProcess | None:
        """Return the next process, if the source gives one.

        Raises:
            ResourceShortage: there are no descriptors for it.
        """
        self._delay.cancel()
        self._use.deadline = math.inf
        process, source = None, self.source
        try:
            if source is not None and source.is_alive:
                process = await source.take()
        finally:
            if process is None or process is source:
                self._forget()
            else:  # a fork server has more of them
                self.expire()
            if process is None and source is not None:
                source.discard()
        return process

    def _forget(self) -> None:
        self.source = None
        self._delay.cancel()
        self._use.cancel()

    async def end(self) -> None:
        """End it, if there is one, and wait until it has gone."""
        source = self.source
        self._forget()
        if source is not None:
            source.discard()
            with trio.CancelScope(shield=True):
                await source.gone()

    async def _end_unused(self, source: Source, use: trio.CancelScope) -> None:
        # a system task, since a killed process ends the scope of the executor before the next one takes this
        try:
            with use:
                await trio.sleep_forever()
        finally:  # also if all of Trio ends first
            if self.source is source:
                self.source = None
                source.discard()
