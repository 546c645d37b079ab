"""A connection to the app through all of the server but its sockets."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import trio
import trio.testing

from tests.server.routes.harness import Scene
from triolet.server.transport.client_stream import ClientStream
from triolet.server.transport.client_turns import ClientTurns
from triolet.server.transport.hypercorn_adapter import HttpServer
from triolet.server.transport.listener import is_websocket


class _NoSocket:
    family = 2

    def getpeername(self) -> tuple[str, int]:
        return ("127.0.0.1", 1)

    getsockname = getpeername


class MemoryStream(ClientStream):
    """A client's stream without a socket."""

    def __init__(self, transport: Any, turns: ClientTurns) -> None:
        super().__init__(transport, 5.0, turns, "127.0.0.1")

    @property
    def socket(self) -> Any:
        return _NoSocket()


@asynccontextmanager
async def connected(scene: Scene) -> AsyncGenerator[trio.StapledStream[Any, Any]]:
    """A connection to the app, through all of the server but the sockets."""
    metrics = scene.app.state.context.gateway_metrics
    server = HttpServer(scene.app, is_websocket, head_timeout=10.0, metrics=metrics)
    server.config.keep_alive_max_requests = 10**9
    client, other = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        turns = ClientTurns()
        nursery.start_soon(turns.run)
        nursery.start_soon(server.serve, MemoryStream(other, turns))
        yield client
        nursery.cancel_scope.cancel()
