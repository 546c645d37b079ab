"""Engines that answer from a script over streams in memory, and a router in front of them."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import unquote

import attrs
import h11
import pytest
import trio
import trio.testing
import wsproto
from wsproto.events import (
    AcceptConnection,
    CloseConnection,
    Ping,
    RejectConnection,
    RejectData,
    Request,
    TextMessage,
)

from triolet.client.address import ServerAddress
from triolet.client.websocket import ClientWebSocket
from triolet.config.server import GatewayConfig
from triolet.router.service import Router

# What an answer is made of: bytes or a text to send, an event to wait for, the code of a close frame, or None for a
# connection that breaks.
Piece = bytes | str | trio.Event | int | None
HOST = "127.0.0.1:8000"


@attrs.define
class Answer:
    """Answer of an engine over HTTP."""

    pieces: list[Piece] = attrs.field(factory=list)
    status: int = 200
    headers: dict[str, str] = attrs.field(factory=lambda: {"content-type": "application/json"})
    after: trio.Event | None = None  # without which nothing of it is sent


@attrs.define
class Asked:
    """Request that an engine got."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def key(self) -> str | None:
        return self.headers.get("authorization")


@attrs.define(eq=False)
class FakeEngine:
    """One engine.

    Args:
        models: that it serves.
        key: without which it tells no models; None if it wants none.
        health: answer to the check.
        answer: to a request over HTTP, by what was asked.
        refusal: answer to an upgrade by the key; None if the WebSocket is accepted.
        events: of the answer to a message on a WebSocket.
        session: makes what `events` is for each WebSocket; None if they are all alike.
        listing: what it answers instead of its models.
        is_there: False if nothing listens at its address.
    """

    models: tuple[str, ...] = ("m",)
    key: str | None = None
    health: Answer = attrs.field(factory=lambda: Answer([b"{}"]))
    answer: Callable[[Asked], Answer] = lambda asked: Answer([b"{}"])
    refusal: Callable[[str | None], Answer | None] = lambda key: None
    events: Callable[[dict[str, Any]], list[Piece]] = lambda message: []
    session: Callable[[], Callable[[dict[str, Any]], list[Piece]]] | None = None
    listing: bytes | trio.Event | None = None
    is_there: bool = True
    asked: list[Asked] = attrs.field(factory=list)
    upgrades: list[dict[str, str]] = attrs.field(factory=list)  # headers of each
    num_websockets: int = 0  # that are open

    def num_asked(self, target: str) -> int:
        """Return how often a path was asked for."""
        return sum(one.target == target for one in self.asked)

    async def serve(self, stream: trio.abc.Stream) -> None:
        """Serve one connection."""
        try:
            data = b""
            while b"\r\n\r\n" not in data:
                if not (more := bytes(await stream.receive_some())):
                    return
                data += more
            if b"upgrade: websocket" in data.lower():
                self.num_websockets += 1
                try:
                    await self._serve_websocket(stream, data)
                finally:
                    self.num_websockets -= 1
            else:
                await self._serve_http(stream, data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            await trio.aclose_forcefully(stream)

    async def _serve_http(self, stream: trio.abc.Stream, data: bytes) -> None:
        protocol = h11.Connection(h11.SERVER)
        protocol.receive_data(data)
        head, body = protocol.next_event(), b""
        assert isinstance(head, h11.Request)
        while not isinstance(event := protocol.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                protocol.receive_data(bytes(await stream.receive_some()))
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
        headers = {name.decode(): value.decode() for name, value in head.headers}
        asked = Asked(head.method.decode(), head.target.decode(), headers, body)
        self.asked.append(asked)
        answer = self._answer_to(asked)
        if answer.after is not None:
            await answer.after.wait()
        encoded = [(name.encode(), value.encode()) for name, value in answer.headers.items()]
        await stream.send_all(protocol.send(h11.Response(status_code=answer.status, headers=encoded)) or b"")
        for piece in answer.pieces:
            if piece is None:
                return
            if isinstance(piece, trio.Event):
                await piece.wait()
            else:
                assert isinstance(piece, bytes)
                await stream.send_all(protocol.send(h11.Data(data=piece)) or b"")
        await stream.send_all(protocol.send(h11.EndOfMessage()) or b"")

    def _answer_to(self, asked: Asked) -> Answer:
        if asked.target == "/health/ready":
            return self.health
        if asked.target == "/v1/models":
            if self.key is not None and asked.key != f"Bearer {self.key}":
                return error_answer(401, "invalid_api_key")
            listing = json.dumps({"data": [{"id": name} for name in self.models]}).encode()
            return Answer([listing if self.listing is None else self.listing])
        return self.answer(asked)

    async def _serve_websocket(self, stream: trio.abc.Stream, data: bytes) -> None:
        protocol = wsproto.WSConnection(wsproto.ConnectionType.SERVER)
        protocol.receive_data(data)
        events_of = self.events if self.session is None else self.session()
        while True:
            for event in protocol.events():
                if isinstance(event, Request):
                    headers = {name.decode().lower(): value.decode() for name, value in event.extra_headers}
                    self.upgrades.append(headers)
                    if (refusal := self.refusal(headers.get("authorization"))) is not None:
                        await stream.send_all(_refused(protocol, refusal))
                        return
                    await stream.send_all(protocol.send(AcceptConnection()))
                elif isinstance(event, TextMessage):
                    for piece in events_of(json.loads(event.data)):
                        if piece is None:
                            return
                        if isinstance(piece, trio.Event):
                            await piece.wait()
                        elif isinstance(piece, int):
                            await stream.send_all(protocol.send(CloseConnection(code=piece)))
                            return
                        else:
                            assert isinstance(piece, str)
                            await stream.send_all(protocol.send(TextMessage(data=piece)))
                elif isinstance(event, Ping):
                    await stream.send_all(protocol.send(event.response()))
                elif isinstance(event, CloseConnection):
                    return
            if not (more := bytes(await stream.receive_some())):
                return
            protocol.receive_data(more)


def _refused(protocol: wsproto.WSConnection, refusal: Answer) -> bytes:
    headers = [(name.encode(), value.encode()) for name, value in refusal.headers.items()]
    body = b"".join(piece for piece in refusal.pieces if isinstance(piece, bytes))
    head = RejectConnection(status_code=refusal.status, headers=headers, has_body=True)
    return protocol.send(head) + protocol.send(RejectData(data=body))


def error_answer(status: int, code: str, **headers: str) -> Answer:
    """Return an engine's answer with an error."""
    error = {"type": "a type", "code": code, "message": f"It is {code}.", "param": None}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer([json.dumps({"error": error}).encode()], status, named)


@attrs.define(eq=False)
class FakeFleet:
    """Engines at ports from 1 on, and a router that knows them."""

    engines: list[FakeEngine]
    router: Router
    nursery: trio.Nursery
    has_descriptors: bool = True  # False while this machine has none for another connection

    async def connect(self, address: ServerAddress) -> trio.abc.Stream:
        """Connect to an engine."""
        await trio.lowlevel.checkpoint()
        if not self.has_descriptors:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        engine = self.engines[address.port - 1]
        if not engine.is_there:
            raise OSError("nothing is there")
        ours, theirs = trio.testing.memory_stream_pair()
        self.nursery.start_soon(engine.serve, theirs)
        return ours

    def states(self) -> list[str]:
        """Return what the router knows of the engines."""
        return [engine.state.value for engine in self.router.engines.all]

    @asynccontextmanager
    async def websocket(
        self, key: str | None = None, host: str = HOST, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[ClientWebSocket]:
        """Open a client's WebSocket to the router."""
        ours, theirs = trio.testing.memory_stream_pair()
        self.nursery.start_soon(self.router.serve_websocket, theirs)
        socket = ClientWebSocket(ours)
        await socket.shake_hands(ServerAddress.of(host, key), "/v1/responses", (headers or {}).items())
        yield socket
        await socket.close()
        await ours.aclose()

    async def ask(
        self,
        method: str,
        target: str,
        payload: Mapping[str, Any] | Sequence[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Received:
        """Ask the router over HTTP; return the answer."""
        received = Received()
        await self.ask_into(received, method, target, payload, headers)
        return received

    async def ask_into(
        self,
        received: Received,
        method: str,
        target: str,
        payload: Mapping[str, Any] | Sequence[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        client: str = "10.0.0.1",
    ) -> None:
        """Ask the router over HTTP; the answer can be seen while it comes.

        Args:
            received: the answer.
            method: of the request.
            target: path and query.
            payload: of the body; as bytes the pieces in which it comes, of which an empty one never comes.
            headers: of the request.
            client: address.
        """
        path, _, query = target.partition("?")
        named = {"host": HOST, **(headers or {})}
        scope = {
            "type": "http",
            "method": method,
            "path": unquote(path),
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in named.items()],
            "client": (client, 1),
        }
        pieces = [b""] if payload is None else payload
        if isinstance(pieces, Mapping):
            pieces = [json.dumps(pieces).encode()]
        coming = [
            {"type": "http.request", "body": piece, "more_body": number < len(pieces)}
            for number, piece in enumerate(pieces, 1)
        ]
        coming.reverse()

        async def receive() -> dict[str, Any]:
            if coming and (coming[-1]["body"] or len(pieces) == 1):
                return coming.pop()
            await trio.sleep_forever()
            raise AssertionError

        await self.router._app(scope, receive, received.take)


@attrs.define(eq=False)
class Received:
    """Answer of the router, as far as it has come."""

    status: int = 0
    headers: list[tuple[str, str]] = attrs.field(factory=list)
    body: bytes = b""

    async def take(self, message: dict[str, Any]) -> None:
        """Take a message of the app."""
        await trio.lowlevel.checkpoint()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = [(name.decode(), value.decode()) for name, value in message["headers"]]
        else:
            self.body += message["body"]

    def header(self, name: str) -> str | None:
        """Return a header; None without it."""
        [*found] = [value for key, value in self.headers if key.lower() == name]
        assert len(found) <= 1
        return found[0] if found else None

    @property
    def code(self) -> str:
        """Code of the error."""
        code: str = json.loads(self.body)["error"]["code"]
        return code

    def events(self) -> list[dict[str, Any]]:
        """Return the server-sent events."""
        blocks = [block.split(b"data: ")[1] for block in self.body.split(b"\n\n") if b"data: " in block]
        return [json.loads(block) for block in blocks if block != b"[DONE]"]


@asynccontextmanager
async def open_fleet(
    patch: pytest.MonkeyPatch, *engines: FakeEngine, key: str | None = None, **fields: Any
) -> AsyncGenerator[FakeFleet]:
    """Run a router without a listener, until its first checks have been made."""
    addresses = [ServerAddress.of(f"engine:{number + 1}", key) for number in range(len(engines))]
    router = Router(addresses, GatewayConfig(**fields))
    async with trio.open_nursery() as nursery:
        fleet = FakeFleet(list(engines), router, nursery)
        for module in ("client.http", "client.websocket", "router.http"):
            patch.setattr(f"triolet.{module}.connect", fleet.connect)
        nursery.start_soon(router.engines.run)
        await router.engines.wait_for_first_checks(60.0)
        yield fleet
        nursery.cancel_scope.cancel()


def response_events(response_id: str, *texts: str) -> list[dict[str, Any]]:
    """Return the events of a response, as an engine numbers them."""
    whole = {"id": response_id, "created_at": 1, "status": "in_progress"}
    place = {"item_id": f"item_{response_id}", "output_index": 0, "content_index": 0}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": whole},
        *({"type": "response.output_text.delta", **place, "delta": text} for text in texts),
        {"type": "response.completed", "response": {**whole, "status": "completed"}},
    ]
    return [{**event, "sequence_number": number} for number, event in enumerate(events)]


def sse(event: Mapping[str, Any]) -> bytes:
    """Return an event as a stream over HTTP has it."""
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()
