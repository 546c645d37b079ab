"""WebSockets of one client at the engines, one for each turn.

An engine keeps a response with `store: false` for its own connection alone. So the WebSocket of such a turn is kept for
the turns that continue its response, and for the next turns of its lane that are not stored:

    opened --turn--> in use --turn is over, nothing to continue--> closed
                       | ^
                 turn is over
                       v |
                     kept: answers pings --connection ends--> forgotten, with its responses
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

import attrs
import trio

from triolet.client.address import ServerAddress
from triolet.client.websocket import ClientWebSocket, ConnectionLost, open_responses_socket
from triolet.core.request.request import TraceHeaders
from triolet.protocol.responses.session import MAX_LOCAL_RESPONSES
from triolet.router.engines import RoutedEngine
from triolet.server.transport.input_limits import ROUTED_HEADER

MAX_KEPT: Final = 64  # as many as a client has lanes


@attrs.define(eq=False)
class Upstream:
    """One WebSocket at an engine."""

    engine: RoutedEngine
    lane: str | None  # of its first turn
    socket: ClientWebSocket
    exits: AsyncExitStack
    # Ids, as the client knows them, of the responses that no other connection can continue; the oldest first.
    response_ids: dict[str, None] = attrs.field(factory=dict)
    is_clean: bool = False  # nothing is to come of its last turn
    num_users: int = 0  # turns that use it, or wait for it
    lock: trio.Lock = attrs.field(factory=trio.Lock)  # of the task that receives
    watch: trio.CancelScope = attrs.field(factory=trio.CancelScope)  # of what receives while no turn uses it

    def keep_for(self, response_ids: set[str]) -> None:
        """Keep the WebSocket, whose turn is over, for what continues these responses."""
        self.is_clean = True
        self.response_ids |= dict.fromkeys(response_ids)
        while len(self.response_ids) > MAX_LOCAL_RESPONSES:
            del self.response_ids[next(iter(self.response_ids))]


@attrs.define(eq=False)
class Upstreams:
    """All WebSockets of one client at the engines.

    Args:
        nursery: of the client's connection, with which they are closed.
        address_of: returns the address of an engine for this client.
        trace_headers: of the client's upgrade request.
    """

    nursery: trio.Nursery
    address_of: Callable[[RoutedEngine], ServerAddress]
    trace_headers: TraceHeaders = ()
    _kept: dict[Upstream, None] = attrs.field(
        factory=dict, init=False
    )  # the one that was used last comes last

    @asynccontextmanager
    async def use(
        self, engine: RoutedEngine, lane: str | None, previous_id: str | None, *, is_stored: bool
    ) -> AsyncIterator[Upstream]:
        """Enclose a turn on a WebSocket; it is closed behind it unless `keep_for` was called.

        Args:
            engine: that computes it.
            lane: of the turn.
            previous_id: of the response that it continues; None for none.
            is_stored: its response outlives the connection.
        Raises:
            ConnectionLost: the engine cannot be reached.
            HttpError: it refuses the WebSocket.
        """
        while True:
            upstream = self._fitting(engine, lane, previous_id, is_stored=is_stored)
            if upstream is None:
                upstream = await self._opened(engine, lane)
            upstream.num_users += 1
            upstream.watch.cancel()
            try:
                async with upstream.lock:
                    if upstream in self._kept:  # else the turn before has lost it
                        upstream.is_clean = False
                        yield upstream
                        return
            finally:
                upstream.num_users -= 1
                await self._put_back(upstream)

    def _fitting(
        self, engine: RoutedEngine, lane: str | None, previous_id: str | None, *, is_stored: bool
    ) -> Upstream | None:
        mine = [one for one in self._kept if one.engine is engine]
        found = [one for one in mine if previous_id in one.response_ids]
        if not found and not is_stored:
            found = [one for one in mine if one.lane == lane and not one.num_users]
        return next(iter(found), None)

    async def _opened(self, engine: RoutedEngine, lane: str | None) -> Upstream:
        async with AsyncExitStack() as exits:
            address = self.address_of(engine)
            headers = (*self.trace_headers, (ROUTED_HEADER, "1"))
            socket = await exits.enter_async_context(open_responses_socket(address, headers))
            upstream = Upstream(engine, lane, socket, exits.pop_all())
        self._kept[upstream] = None
        return upstream

    async def _put_back(self, upstream: Upstream) -> None:
        if not upstream.is_clean or not upstream.response_ids:
            await self._close(upstream)
        elif not upstream.num_users and upstream in self._kept:
            del self._kept[upstream]
            self._kept[upstream] = None
            upstream.watch = trio.CancelScope()
            self.nursery.start_soon(self._watch, upstream)
            idle = [one for one in self._kept if not one.num_users]
            for one in idle[: max(len(idle) - MAX_KEPT, 0)]:
                await self._close(one)

    async def _watch(self, upstream: Upstream) -> None:
        """Answer an engine's pings until a turn wants the WebSocket, or the engine closes it."""
        try:
            with upstream.watch:
                async with upstream.lock:
                    while True:
                        await upstream.socket.receive()
        except (ConnectionLost, trio.ClosedResourceError):
            pass
        finally:
            if not upstream.watch.cancelled_caught:
                await self._close(upstream)

    async def _close(self, upstream: Upstream) -> None:
        self._kept.pop(upstream, None)
        await upstream.exits.aclose()
