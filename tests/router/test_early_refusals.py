"""Engines that refuse a request before they have read it, and hang up, over real sockets."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import trio
import trio.testing
import wsproto
from wsproto.events import AcceptConnection, CloseConnection, Request

from triolet.client.address import ServerAddress
from triolet.client.websocket import ClientWebSocket
from triolet.config.server import GatewayConfig
from triolet.router.service import Router

LONG = (
    "x" * 8_000_000
)  # more than the buffers of a connection hold: it is not all sent when the engine hangs up
LIMITS: dict[str, Any] = {
    "max_body_bytes": 2**26,
    "max_message_bytes": 2**26,
    "max_input_bytes": 2**30,
    "max_input_bytes_per_client": 2**30,
}
REFUSAL = json.dumps({"error": {"code": "body_too_large", "message": "It is long."}}).encode()
HEAD = b"HTTP/1.1 %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
MODELS = b'{"data": [{"id": "m"}]}'


async def impatient_engine(stream: trio.SocketStream) -> None:
    """Answer a POST when its head is there, and close a WebSocket amid its first message."""
    async with stream:
        data = bytes(await stream.receive_some())
        if b"upgrade: websocket" in data.lower():
            protocol = wsproto.WSConnection(wsproto.ConnectionType.SERVER)
            protocol.receive_data(data)
            assert isinstance(next(protocol.events()), Request)
            await stream.send_all(protocol.send(AcceptConnection()))
            await stream.receive_some(100)
            await stream.send_all(protocol.send(CloseConnection(code=1009, reason="too long")))
        elif data.startswith(b"POST"):
            await stream.send_all(HEAD % (b"413 Too Long", len(REFUSAL)) + REFUSAL)
        else:
            await stream.send_all(HEAD % (b"200 OK", len(MODELS)) + MODELS)


@asynccontextmanager
async def routed() -> AsyncGenerator[Router]:
    """Run two such engines, and a router that knows them."""
    async with trio.open_nursery() as nursery:
        addresses = []
        for _ in range(2):
            [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
            listener.socket.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, 2**16)
            nursery.start_soon(trio.serve_listeners, impatient_engine, [listener])
            addresses.append(ServerAddress.of(f"127.0.0.1:{listener.socket.getsockname()[1]}"))
        router = Router(addresses, GatewayConfig(**LIMITS))
        nursery.start_soon(router.engines.run)
        await router.engines.wait_for_first_checks(60.0)
        yield router
        nursery.cancel_scope.cancel()


def states(router: Router) -> list[str]:
    return [engine.state.value for engine in router.engines.all]


async def test_a_body_that_an_engine_refuses_before_it_has_read_it_is_refused_and_no_engine_is_lost() -> None:
    coming = [{"type": "http.request", "body": json.dumps({"input": LONG}).encode()}]
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        if not coming:
            await trio.sleep_forever()
        return coming.pop()

    async def send(message: dict[str, Any]) -> None:
        await trio.lowlevel.checkpoint()
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/responses",
        "headers": [(b"host", b"127.0.0.1:8000")],
        "client": ("127.0.0.1", 1),
    }
    async with routed() as router:
        await router._app(scope, receive, send)
        assert sent[0]["status"] == 413
        assert b"".join(message["body"] for message in sent[1:]) == REFUSAL
        assert states(router) == ["up", "up"]


async def test_a_message_that_an_engine_refuses_before_it_has_read_it_is_refused_and_no_engine_is_lost() -> (
    None
):
    async with routed() as router, trio.open_nursery() as nursery:
        ours, theirs = trio.testing.memory_stream_pair()
        nursery.start_soon(router.serve_websocket, theirs)
        client = ClientWebSocket(ours)
        await client.shake_hands(ServerAddress.of("127.0.0.1:8000"), "/v1/responses")
        await client.send(json.dumps({"type": "response.create", "model": "m", "input": LONG}))
        with trio.fail_after(100):
            told = json.loads(await client.receive())
        assert (told["type"], told["status"], told["error"]["code"]) == ("error", 400, "invalid_request")
        assert states(router) == ["up", "up"]
        await ours.aclose()
        nursery.cancel_scope.cancel()
