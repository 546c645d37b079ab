"""Engines of the responses that clients may ask for again.

A router notes where each response is. It knows nothing of those that were begun through another router, or before it
was started itself: all engines are asked for such a one, with the key of the client that asks.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import Final

import attrs
import trio

from triolet.client.address import ServerError
from triolet.client.http import request
from triolet.router.engines import CHECK_TIMEOUT_S, Engines, EngineState, RoutedEngine

MAX_HOMES: Final = 100_000  # responses of which the router knows where they are
# What is asked for stands in a path. Ids of engines look like that, and no engine has a response of another one.
_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")


@attrs.frozen
class Home:
    """Engine that has a response, and the id that it has there."""

    engine: RoutedEngine
    response_id: str
    is_moved: bool = False  # its events have other numbers there


@attrs.define(eq=False)
class Homes:
    """Homes of the responses that the router knows; the oldest are forgotten.

    Args:
        engines: the fleet.
    """

    _engines: Engines
    _homes: OrderedDict[str, Home] = attrs.field(factory=OrderedDict, init=False)

    def note(self, response_id: str, home: Home) -> None:
        """Note where a response is."""
        self._homes[response_id] = home
        self._homes.move_to_end(response_id)
        while len(self._homes) > MAX_HOMES:
            self._homes.popitem(last=False)

    def of(self, response_id: object) -> Home | None:
        """Return where a response is; None if that is not known."""
        return self._homes.get(response_id) if isinstance(response_id, str) else None

    async def find(self, response_id: object, api_key: str | None) -> Home | None:
        """Return where a response is, also one that the router has not seen; None if no engine has it.

        Args:
            response_id: as the client gives it.
            api_key: of the client; None without one.
        """
        known = self.of(response_id)
        # An only engine is asked with the request itself.
        if known is not None or not isinstance(response_id, str) or len(self._engines.all) == 1:
            return known
        if _ID.fullmatch(response_id) is None:
            return None
        async with trio.open_nursery() as nursery:
            for engine in self._engines.all:
                if engine.state not in (EngineState.STARTING, EngineState.DOWN):
                    nursery.start_soon(self._ask, engine, response_id, api_key, nursery.cancel_scope)
        return self.of(response_id)

    async def _ask(
        self, engine: RoutedEngine, response_id: str, api_key: str | None, scope: trio.CancelScope
    ) -> None:
        """Note an engine that has a response, and ask no other one any more."""
        address = attrs.evolve(engine.address, api_key=api_key)
        with trio.move_on_after(CHECK_TIMEOUT_S):
            try:
                async with request(address, f"/responses/{response_id}"):
                    self.note(response_id, Home(engine, response_id))
                    scope.cancel()
            except ServerError:
                pass  # it has no such response, or cannot be asked: its checks find out what is wrong with it
