"""What the next process of a model runner comes from: a fork server, or a process that is there already.

It is started before it is needed, and lives as long as it may be (`process.ProcessExecutor`). One that ends by itself
is noticed at once, and started again where one is kept.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol

import attrs
import trio

from triolet.actors.executors.child_process import ForkServer
from triolet.actors.executors.connection import RunnerProcess
from triolet.core.recovery.supervision import typed_shortages
from triolet.errors import ResourceShortage

logger = logging.getLogger("triolet.runner")

STANDBY_S: Final = 10.0  # that a standby is kept after a late reply; late ones often come in series
# From a load, or the end of the last one, until one is started to be kept: its imports take the time of a processor.
KEPT_AFTER_S: Final = 10.0


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

    async def ended(self) -> None:
        """Wait until it ends by itself; nothing may wait so when it is taken or discarded."""
        ...

    def discard(self) -> None:
        """End it, and close what belongs to it."""
        ...

    async def gone(self) -> None:
        """Wait until it has ended, and the system has freed what it held."""
        ...


@attrs.frozen(eq=False)
class ForkSource(Source):
    """Source of forks of a server."""

    server: ForkServer

    @property
    def is_alive(self) -> bool:
        return self.server.is_alive

    async def take(self) -> RunnerProcess | None:
        forked = await self.server.fork()
        return forked and RunnerProcess(*forked)

    async def ended(self) -> None:
        await self.server.child.ended()

    def discard(self) -> None:
        self.server.discard()

    async def gone(self) -> None:
        await self.server.gone()


class Standby:
    """Source of the next process, or none.

    Args:
        spawn: starts a source.
        is_kept: whether one that ends before it is needed is replaced.
    """

    def __init__(self, spawn: Callable[[], Source], *, is_kept: bool) -> None:
        self._spawn, self._is_kept = spawn, is_kept
        self.source: Source | None = None
        self._use = trio.CancelScope()
        self._delay = trio.CancelScope()
        self._turn = trio.Lock()  # of what takes a process from the source

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
        """Start it unless there is one that lives; where there is no room for one there is none."""
        if (dead := self.source) is not None and not dead.is_alive:
            self._forget()
            dead.discard()
        if self.source is None:
            with suppress(ResourceShortage, OSError), typed_shortages("a process for the model runner"):
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
                async with self._turn:
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
                await trio.lowlevel.checkpoint_if_cancelled()  # it may have been taken already
                await source.ended()
                async with self._turn:  # what takes a process from it may discard it, too
                    self._note_end(is_needed=use.deadline == math.inf)
        finally:  # also if all of Trio ends first
            if self.source is source:
                self.source = None
                source.discard()

    def _note_end(self, *, is_needed: bool) -> None:
        """Log that the source has ended by itself, and have another one started if one is kept."""
        if is_needed and self._is_kept:
            logger.warning("the standby of the model runner has ended; another starts in %g s", KEPT_AFTER_S)
            self.keep()
        else:
            logger.warning("the standby of the model runner has ended")
