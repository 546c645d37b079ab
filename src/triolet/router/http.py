"""HTTP of a router's clients: every request goes to an engine, and its answer comes back as it is.

A request that asks for a stream of events is moved to another engine if its own dies, and the client sees one stream.
Any other one is asked again of another engine, as long as nothing of its answer was sent.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import attrs
import h11
import trio

from triolet.client.address import ServerAddress, ServerError
from triolet.client.http import RECEIVE_BYTES, connect, reason_of
from triolet.protocol.errors import WireError
from triolet.router.chunks import ChunkContinuation, SentChunks
from triolet.router.continuation import Continuation, Diverged, SentEvents
from triolet.router.engines import Engines, RoutedEngine
from triolet.router.websocket import MAX_MOVES, NO_ENGINE_S, Home, Homes

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]

# Routes of the engines that a client of the fleet may use; all others are for the operator of one engine.
PREFIXES: Final = (
    "/v1/models", "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/score",
    "/v1/rerank", "/v2/rerank", "/tokenize", "/detokenize", "/classify", "/pooling", "/score", "/rerank", "/version",
)  # fmt: skip
CHUNKED: Final = ("/v1/chat/completions", "/v1/completions")
SEEDED: Final = (*CHUNKED, "/v1/responses")
# Headers that are about one connection, and not about the request or the answer.
HOP_HEADERS: Final = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"transfer-encoding",
        b"te",
        b"upgrade",
        b"host",
        b"content-length",
        b"expect",
    )
)


log = logging.getLogger("triolet.router")


class Broken(Exception):
    """The engine ends before its answer does."""


@attrs.frozen
class ClientRequest:
    """Request of a client, whole."""

    method: str
    target: str  # path and query
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    payload: Mapping[str, Any]  # the body, if it is a JSON object; else empty

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def is_stream(self) -> bool:
        return self.method == "POST" and self.payload.get("stream") is True

    @property
    def text(self) -> str:
        """Text of the prompt, for the choice of an engine."""
        names = ("instructions", "messages", "prompt", "input")
        values = [self.payload[name] for name in names if self.payload.get(name)]
        return "".join(one if isinstance(one, str) else json.dumps(one) for one in values)

    @property
    def key(self) -> str:
        """Authorization of the client; empty without one."""
        return next(
            (value.decode("latin-1") for name, value in self.headers if name.lower() == b"authorization"), ""
        )


class RouterApp:
    """ASGI app of a router.

    Args:
        engines: the fleet.
        homes: of all clients' responses.
        max_body_bytes: longest body.
        metrics: text of the router's own metrics.
    """

    def __init__(
        self, engines: Engines, homes: Homes, max_body_bytes: int, metrics: Callable[[], bytes]
    ) -> None:
        self._engines, self._homes = engines, homes
        self._max_body_bytes, self._metrics = max_body_bytes, metrics

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request."""
        assert scope["type"] == "http"
        try:
            await self._answer(scope, receive, send)
        except WireError as error:
            await _send_json(send, error.status, {"error": error.body()})

    async def _answer(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path in ("/health", "/ping", "/health/ready"):
            if not self._engines.up:
                raise unavailable("No engine is ready.")
            await _send_json(
                send, 200, {"status": "ok", "engines": [_facts(one) for one in self._engines.all]}
            )
        elif path == "/metrics":
            await _send(
                send, 200, [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")], self._metrics()
            )
        elif any(path == prefix or path.startswith(f"{prefix}/") for prefix in PREFIXES):
            await self._until_it_disconnects(await self._request(scope, receive), receive, send)
        else:
            message = f"A router has no {path}: ask the engine itself."
            raise WireError(message, code="not_found", status=404, type="invalid_request_error")

    async def _request(self, scope: Mapping[str, Any], receive: Receive) -> ClientRequest:
        pieces: list[bytes] = []
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise trio.BrokenResourceError("the client has disconnected")
            pieces.append(message.get("body", b""))
            more = message.get("more_body", False)
            if sum(map(len, pieces)) > self._max_body_bytes:
                message_text = f"A body must have at most {self._max_body_bytes} bytes."
                raise WireError(message_text, code="body_too_large", status=413, type="invalid_request_error")
        body, query = b"".join(pieces), scope.get("query_string", b"").decode("latin-1")
        try:
            payload = json.loads(body) if body else {}
        except (ValueError, RecursionError):
            payload = {}
        headers = tuple((name, value) for name, value in scope["headers"] if name.lower() not in HOP_HEADERS)
        target = scope["path"] + (f"?{query}" if query else "")
        if not isinstance(payload, dict):
            payload = {}
        if payload.get("stream") is True and payload.get("seed") is None and scope["path"] in SEEDED:
            payload["seed"] = secrets.randbits(62)  # the same for each engine that computes it
            body = json.dumps(payload).encode()
        return ClientRequest(scope["method"], target, headers, body, payload)

    async def _until_it_disconnects(self, request: ClientRequest, receive: Receive, send: Send) -> None:
        failure: Exception | None = None
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                while (await receive())["type"] != "http.disconnect":
                    pass
                nursery.cancel_scope.cancel()  # closes the connection to the engine, which aborts the request

            nursery.start_soon(watch)
            try:
                await self._pass_on(request, send)
            except Exception as error:  # raised again below, without the nursery's group around it
                failure = error
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _pass_on(self, request: ClientRequest, send: Send) -> None:
        answer, home = _Answer(request, send, _follower(request)), self._home_of(request)
        for attempt in range(MAX_MOVES + 1):
            if home is None and not await self._engines.wait_for_one(NO_ENGINE_S):
                break
            name = secrets.token_hex(8)
            engine = home.engine if home is not None else self._engines.place(name, request.text, request.key)
            if engine is None:
                continue
            if attempt:
                self._engines.on_move()
            try:
                answer.begin_again()
                scope = trio.CancelScope()
                with scope, self._engines.computing(engine, scope, lambda: home is None and answer.may_move):
                    async with _asked(engine.address, _body(request, home), request) as (head, pieces):
                        if head.status_code != 503 or home is not None or len(self._engines.up) < 2:
                            await self._relay(answer, engine, head, pieces, name)
                            return
                        self._engines.note_not_ready(engine)
            except (Broken, ServerError):
                self._engines.note_lost(engine)
            except Diverged as error:
                log.warning("an answer cannot go on at %s: %s", engine.address, error)
                break
            finally:
                self._engines.finish(name)
            if home is not None or not answer.may_move:
                break
        await answer.fail()

    async def _relay(
        self,
        answer: _Answer,
        engine: RoutedEngine,
        head: h11.Response,
        pieces: AsyncIterator[bytes],
        name: str,
    ) -> None:
        async for piece in pieces:
            await answer.add(head, piece)
            self._engines.note_progress(name, len(piece) // 64)
        response_id = answer.response_id
        if response_id is not None:
            self._homes.note(response_id, Home(engine, response_id))
        await answer.end(head)

    def _home_of(self, request: ClientRequest) -> Home | None:
        if (home := self._homes.of(request.payload.get("previous_response_id"))) is not None:
            return home
        parts = request.path.split("/")
        return self._homes.of(parts[3]) if request.path.startswith("/v1/responses/") else None


@attrs.define(eq=False)
class _Answer:
    """What a client has been sent of an answer."""

    request: ClientRequest
    send: Send
    follower: _Follower | None
    has_begun: bool = False
    response_id: str | None = None
    _whole: bytearray = attrs.field(factory=bytearray)

    @property
    def may_move(self) -> bool:
        """True if another engine can go on with it."""
        return not self.has_begun or self.follower is not None

    def begin_again(self) -> None:
        """Expect the answer of another engine from its beginning."""
        self._whole.clear()
        if self.follower is not None:
            self.follower.begin_again()

    async def add(self, head: h11.Response, piece: bytes) -> None:
        """Pass a piece of the answer on, or keep it where only a whole answer is of use."""
        if self.follower is not None and head.status_code == 200:
            if data := self.follower.follow(piece):
                await self._begin(head)
                await self.send({"type": "http.response.body", "body": data, "more_body": True})
        elif self.request.is_stream or head.status_code != 200 or self.request.method != "POST":
            await self._begin(head)
            await self.send({"type": "http.response.body", "body": piece, "more_body": True})
        else:
            self._whole += piece

    async def end(self, head: h11.Response) -> None:
        """Send the rest."""
        await self._begin(head)
        if self.request.path == "/v1/responses" and self._whole:
            self.response_id = json.loads(self._whole).get("id")
        await self.send({"type": "http.response.body", "body": bytes(self._whole), "more_body": False})

    async def fail(self) -> None:
        """End the answer with an error, as far as its protocol allows."""
        if not self.has_begun:
            raise unavailable("No engine could answer.")
        if self.follower is not None:
            await self.send(
                {"type": "http.response.body", "body": self.follower.failure(), "more_body": False}
            )
            return
        raise trio.BrokenResourceError("the engine ended amid its answer")

    async def _begin(self, head: h11.Response) -> None:
        if self.has_begun:
            return
        self.has_begun = True
        headers = [(name, value) for name, value in head.headers if name.lower() not in HOP_HEADERS]
        await self.send({"type": "http.response.start", "status": head.status_code, "headers": headers})


class _Follower:
    """Server-sent events of one answer, from one engine or from several."""

    def __init__(self, *, has_chunks: bool) -> None:
        self._has_chunks = has_chunks
        self._events, self._chunks = SentEvents(), SentChunks()
        self._continuation: Continuation | ChunkContinuation | None = None
        self._rest = b""
        self._has_sent = False

    def begin_again(self) -> None:
        """Expect the answer of another engine from its beginning."""
        self._rest = b""
        if self._has_sent:
            self._continuation = (
                ChunkContinuation(self._chunks) if self._has_chunks else Continuation(self._events)
            )

    def follow(self, piece: bytes) -> bytes:
        """Return what the client is to be sent for a piece of an engine's answer."""
        self._rest += piece
        *blocks, self._rest = self._rest.split(b"\n\n")
        return b"".join(self._block(block) for block in blocks)

    def _block(self, block: bytes) -> bytes:
        lines = block.split(b"\n")
        data = b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:"))
        if not data or data == b"[DONE]":
            return block + b"\n\n"
        event = json.loads(data)
        if self._continuation is not None:
            followed = self._continuation.follow(event)
            if followed is None:
                return b""
            event = followed
            others = [line for line in lines if not line.startswith(b"data:")]
            block = b"\n".join([*others, b"data: " + json.dumps(event).encode()])
        self._has_sent = True
        if self._has_chunks:
            self._chunks.note(event)
        else:
            self._events.note(event)
        return block + b"\n\n"

    def failure(self) -> bytes:
        """Return the event that ends the stream with an error."""
        message = "The answer could not be continued by another engine."
        if self._has_chunks or self._events.response is None:
            error = unavailable(message).body()
            return f"data: {json.dumps({'error': error})}\n\n".encode()
        event = self._events.failure("server_error", message)
        return f"event: response.failed\ndata: {json.dumps(event)}\n\n".encode()


def _follower(request: ClientRequest) -> _Follower | None:
    if not request.is_stream or request.payload.get("previous_response_id"):
        return None
    if request.path in CHUNKED:
        return _Follower(has_chunks=True)
    return _Follower(has_chunks=False) if request.path == "/v1/responses" else None


def _body(request: ClientRequest, home: Home | None) -> bytes:
    """Return the body for an engine, with the ids that it knows."""
    if home is None or not request.payload.get("previous_response_id"):
        return request.body
    return json.dumps({**request.payload, "previous_response_id": home.response_id}).encode()


@asynccontextmanager
async def _asked(
    address: ServerAddress, body: bytes, request: ClientRequest
) -> AsyncIterator[tuple[h11.Response, AsyncIterator[bytes]]]:
    """Send a request to an engine; yield the head of its answer, and the pieces of its body.

    Raises:
        ServerError: it cannot be reached.
        Broken: it ends before its answer does.
    """
    try:
        stream = await connect(address)
    except OSError as error:
        raise ServerError(f"cannot connect to {address}: {reason_of(error)}") from error
    protocol = h11.Connection(h11.CLIENT)
    headers = [(b"Host", address.authority.encode()), (b"Connection", b"close"), *request.headers]
    if body or request.method == "POST":
        headers.append((b"Content-Length", str(len(body)).encode()))
    target = address.base_path.removesuffix("/v1") + request.target

    async def next_event() -> Any:
        while (event := protocol.next_event()) is h11.NEED_DATA:
            protocol.receive_data(bytes(await stream.receive_some(RECEIVE_BYTES)))
        return event

    async def pieces() -> AsyncIterator[bytes]:
        while isinstance(event := await next_event(), h11.Data):
            yield bytes(event.data)

    async with stream:
        try:
            data = [
                protocol.send(h11.Request(method=request.method, target=target, headers=headers)),
                protocol.send(h11.Data(data=body)),
                protocol.send(h11.EndOfMessage()),
            ]
            await stream.send_all(b"".join(one for one in data if one))
            head = await next_event()
            while isinstance(head, h11.InformationalResponse):
                head = await next_event()
            if not isinstance(head, h11.Response):
                raise Broken
            yield head, pieces()
        except (trio.BrokenResourceError, trio.ClosedResourceError, h11.RemoteProtocolError) as error:
            raise Broken from error


def unavailable(message: str) -> WireError:
    """Return the error of a fleet without an engine for a request."""
    return WireError(message, code="service_unavailable", status=503, type="server_error", retry_after_s=1.0)


def _facts(engine: RoutedEngine) -> dict[str, Any]:
    return {
        "url": str(engine.address),
        "state": engine.state.value,
        "requests": len(engine.scopes),
        "requests_total": engine.num_requests,
    }


async def _send_json(send: Send, status: int, value: Mapping[str, Any]) -> None:
    await _send(send, status, [(b"content-type", b"application/json")], json.dumps(value).encode())


async def _send(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
