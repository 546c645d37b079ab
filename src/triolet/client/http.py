"""HTTP/1.1 client on h11: one request on a connection of its own, and its answer whole or as server-sent events."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import attrs
import h11
import trio

import triolet
from triolet.client.address import ServerAddress, ServerError

RECEIVE_BYTES: Final = 65_536
CONNECT_TIMEOUT_S: Final = 10.0
# A server's machine, or a firewall on the way, may forget a connection without closing it. While nothing is sent, the
# system asks whether the other end is there: after the first time of silence, and then as often, seconds apart.
PROBED_AFTER_S, PROBE_INTERVAL_S, NUM_PROBES = 20, 5, 4
MAX_ERROR_CHARS: Final = 300  # of a body that is no JSON error
TRANSIENT_STATUSES: Final = (408, 425, 429, 500, 502, 503, 504)


class HttpError(ServerError):
    """Answer of a server with a status other than that of success.

    Args:
        address: of the server.
        status: of the answer.
        body: of the answer.
        headers: of the answer.
    """

    def __init__(
        self,
        address: ServerAddress,
        status: int,
        body: bytes = b"",
        headers: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        super().__init__(f"{address} answers {status}: {_sentence(body)}")
        self.status, self.error = status, _error_of(body)
        given = next((value for name, value in headers if name.lower() == b"retry-after"), b"")
        self.retry_after_s = float(given) if given.isdigit() else None

    @property
    def is_transient(self) -> bool:
        """True if another attempt may do better."""
        return self.status in TRANSIENT_STATUSES


@attrs.define(eq=False)
class HttpAnswer:
    """Answer that is being received."""

    _stream: trio.abc.Stream
    _protocol: h11.Connection
    status: int = 0
    _rest: bytes = attrs.field(default=b"", init=False)  # of the body, the beginning of a line

    async def body(self) -> bytes:
        """Return the rest of the body."""
        pieces = []
        while piece := await self._piece():
            pieces.append(piece)
        return b"".join(pieces)

    async def next_data(self) -> str | None:
        """Return the data of the next server-sent event; None at the end, which may be a `[DONE]`."""
        data: list[str] = []
        while (line := await self._line()) is not None:
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" ").decode())
            elif not line and data:  # an event without data is a comment that keeps the connection alive
                return None if data == ["[DONE]"] else "\n".join(data)
        return None

    async def _line(self) -> bytes | None:
        while b"\n" not in self._rest:
            if not (piece := await self._piece()):
                return None
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line.removesuffix(b"\r")

    async def _piece(self) -> bytes:
        """Return the next piece of the body; empty at its end."""
        event = await self.next_event()
        return bytes(event.data) if isinstance(event, h11.Data) else b""

    async def next_event(self) -> type[h11.NEED_DATA | h11.PAUSED] | h11.Event:
        """Return the next event of the protocol; a connection that ends amid an answer is a broken one."""
        while (event := self._protocol.next_event()) is h11.NEED_DATA:
            self._protocol.receive_data(bytes(await self._stream.receive_some(RECEIVE_BYTES)))
        return event


@asynccontextmanager
async def request(
    address: ServerAddress, path: str, body: Mapping[str, Any] | None = None
) -> AsyncIterator[HttpAnswer]:
    """Send a request, GET or with a body POST; the connection is closed with the scope.

    Args:
        address: of the server.
        path: behind its base path, such as `/models`.
        body: sent as JSON.
    Raises:
        ServerError: the server cannot be reached, or its answer is no HTTP.
        HttpError: it answers with an error.
    """
    try:
        stream = await connect(address)
    except OSError as error:
        raise ServerError(f"cannot connect to {address}: {reason_of(error)}") from error
    async with stream:
        try:
            answer = HttpAnswer(stream, h11.Connection(h11.CLIENT))
            await _send(answer, stream, address, path, body)
            head = await answer.next_event()
            while isinstance(head, h11.InformationalResponse):
                head = await answer.next_event()
            assert isinstance(head, h11.Response)
            answer.status = head.status_code
            if answer.status != 200:
                raise HttpError(address, answer.status, await answer.body(), head.headers)
            yield answer
        except (trio.BrokenResourceError, h11.RemoteProtocolError) as error:
            raise ServerError(f"the connection to {address} broke: {reason_of(error)}") from error


async def get_json(address: ServerAddress, path: str) -> Any:
    """Return the JSON of a route.

    Raises:
        ServerError: the server cannot be reached or its answer is no JSON.
    """
    async with request(address, path) as answer:
        try:
            return json.loads(await answer.body())
        except ValueError as error:
            raise ServerError(f"{address}{path} must answer JSON; {error}") from error


async def model_cards(address: ServerAddress) -> list[dict[str, Any]]:
    """Return what a server tells of its models.

    Raises:
        ServerError: the server cannot be reached, or lists no models.
    """
    match await get_json(address, "/models"):
        case {"data": list(cards)} if all(isinstance(card, dict) and "id" in card for card in cards):
            return cards
    raise ServerError(f"{address}/models must list models; got something else")


async def connect(address: ServerAddress) -> trio.abc.Stream:
    """Return a stream to a server, with TLS where its URL asks for it.

    Raises:
        OSError: there is no way to it.
    """
    with trio.move_on_after(CONNECT_TIMEOUT_S):
        if (tls := address.tls()) is None:
            plain = await trio.open_tcp_stream(address.host, address.port)
            _probe(plain.socket)
            return plain
        stream = await trio.open_ssl_over_tcp_stream(
            address.host, address.port, ssl_context=tls, https_compatible=True
        )
        try:
            _probe(stream.transport_stream.socket)
            await stream.do_handshake()
        except trio.BrokenResourceError as error:
            raise OSError(reason_of(error.__cause__ or error)) from error
        return stream
    raise OSError(f"no answer within {CONNECT_TIMEOUT_S:g} s")


def _probe(sock: trio.socket.SocketType) -> None:
    """Have the system break a connection when its other end has vanished."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Not every system has all of them.
    for name, value in (
        ("TCP_KEEPIDLE", PROBED_AFTER_S),
        ("TCP_KEEPINTVL", PROBE_INTERVAL_S),
        ("TCP_KEEPCNT", NUM_PROBES),
    ):
        if (number := getattr(socket, name, None)) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, number, value)


async def _send(
    answer: HttpAnswer,
    stream: trio.abc.Stream,
    address: ServerAddress,
    path: str,
    body: Mapping[str, Any] | None,
) -> None:
    content = b"" if body is None else json.dumps(body).encode()
    headers = [
        (b"Host", address.authority.encode()),
        (b"User-Agent", f"triolet/{triolet.__version__}".encode()),
        (b"Accept", b"application/json, text/event-stream"),
        (b"Connection", b"close"),
        *address.headers,
    ]
    if body is not None:
        headers += [(b"Content-Type", b"application/json"), (b"Content-Length", str(len(content)).encode())]
    head = h11.Request(
        method="GET" if body is None else "POST", target=address.base_path + path, headers=headers
    )
    protocol = answer._protocol
    # One segment: the server need not wait for a second one.
    data = [protocol.send(head), protocol.send(h11.Data(data=content)), protocol.send(h11.EndOfMessage())]
    await stream.send_all(b"".join(part for part in data if part))


def _error_of(body: bytes) -> Mapping[str, Any]:
    """Return the `error` object of an error's body; empty without one."""
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return {}
    return error if isinstance(error, dict) else {"message": str(error)}


def _sentence(body: bytes) -> str:
    """Return the message of an error's body."""
    try:
        return str(_error_of(body)["message"])
    except KeyError:
        return " ".join(body.decode(errors="replace").split())[:MAX_ERROR_CHARS] or "no message"


def reason_of(error: BaseException) -> str:
    """Return the words of a failed connection."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    # Trio tells of the addresses of a host together, and keeps the reasons behind that.
    cause = error.__cause__
    causes = cause.exceptions if isinstance(cause, BaseExceptionGroup) else (cause,)
    numbers = [one.errno for one in causes if isinstance(one, OSError) and one.errno]
    if reasons := [os.strerror(number) for number in numbers]:
        return ", ".join(dict.fromkeys(reasons))
    return str(error) or type(error).__name__
