"""Turns of the owners of grammars: few are compiled at one time, and one owner does not keep the others waiting."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import attrs
import trio

from triolet.errors import ResourceShortage


@attrs.define(eq=False)
class CompilerTurns:
    """Places of the grammars that are compiled at one time; the owners of grammars that wait take turns."""

    num_free: int
    _waiting: OrderedDict[str | None, deque[trio.Event]] = attrs.field(factory=OrderedDict, init=False)

    @asynccontextmanager
    async def turn(self, owner: str | None, max_wait_s: float) -> AsyncGenerator[None]:
        """Hold a place within the scope.

        Raises:
            ResourceShortage: none has become free in time.
        """
        await trio.lowlevel.checkpoint()
        if self.num_free:
            self.num_free -= 1
        else:
            await self._wait(owner, max_wait_s)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, owner: str | None, max_wait_s: float) -> None:
        place = trio.Event()
        self._waiting.setdefault(owner, deque()).append(place)
        try:
            with trio.move_on_after(max_wait_s):
                await place.wait()
        except BaseException:
            self._leave(owner, place)
            raise
        if not place.is_set():
            self._leave(owner, place)
            raise ResourceShortage("processor time", "compiling one more grammar", retry_after_s=max_wait_s)

    def _leave(self, owner: str | None, place: trio.Event) -> None:
        if place.is_set():  # it was given the place in the moment in which it left
            self._pass_on()
            return
        self._waiting[owner].remove(place)
        if not self._waiting[owner]:
            del self._waiting[owner]

    def _pass_on(self) -> None:
        if not self._waiting:
            self.num_free += 1
            return
        owner, places = self._waiting.popitem(last=False)
        places.popleft().set()
        if places:
            self._waiting[owner] = places  # behind all other owners
