"""WebSocket client on wsproto, without tasks of its own: the task that waits for a message reads the socket.

So a cancelled wait loses nothing, and the same task can say goodbye afterwards.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Final

import attrs
import trio
import wsproto
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Ping,
    RejectConnection,
    RejectData,
    Request,
    TextMessage,
)
from wsproto.utilities import ProtocolError

from triolet.client.address import ServerAddress, ServerError
from triolet.client.http import RECEIVE_BYTES, HttpError, connect, reason_of

HANDSHAKE_WITHIN_S: Final = 10.0
CLOSE_WITHIN_S: Final = 1.0
# Of close frames over what was sent, which the server would refuse again (RFC 6455, section 7.4.1).
TOO_BIG: Final = 1009
REFUSALS: Final = (1003, 1007, 1008, TOO_BIG)
# A server that has vanished without closing anything is found by a ping that is not answered.
SILENCE_S: Final = 20.0


class ConnectionLost(ServerError):
    """Connection that could not be made or has ended; another one may do better unless the server refused what it got.

    Args:
        sentence: for people.
        close_code: of the server's close frame; None if the connection ended without one.
    """

    def __init__(self, sentence: str, close_code: int | None = None) -> None:
        super().__init__(sentence)
        self.close_code = close_code

    @property
    def is_transient(self) -> bool:
        """True if another attempt may do better."""
        return self.close_code not in REFUSALS


@attrs.define(eq=False)
class ClientWebSocket:
    """Client's end of a WebSocket."""

    _stream: trio.abc.Stream
    _protocol: wsproto.WSConnection = attrs.field(
        factory=lambda: wsproto.WSConnection(wsproto.ConnectionType.CLIENT), init=False
    )
    _parts: list[str | bytes | bytearray] = attrs.field(factory=list, init=False)  # of an incomplete message
    _has_pinged: bool = attrs.field(default=False, init=False)
    # One task sends while another one receives, and answers pings.
    _sending: trio.Lock = attrs.field(factory=trio.Lock, init=False)

    async def send(self, text: str) -> None:
        """Send a text message.

        Raises:
            ConnectionLost: the connection has ended.
        """
        await self._send(TextMessage(data=text))

    async def receive(self) -> str:
        """Return the next message.

        Raises:
            ConnectionLost: the connection has ended, or the server is silent and answers no ping.
        """
        while True:
            for event in self._protocol.events():
                if isinstance(event, TextMessage | BytesMessage):
                    self._parts.append(event.data)
                    if event.message_finished:
                        return self._message()
                elif isinstance(event, Ping):
                    await self._send(event.response())
                elif isinstance(event, CloseConnection):
                    raise ConnectionLost(_closing(event), int(event.code))
            await self._read()

    async def shake_hands(
        self, address: ServerAddress, path: str, headers: Iterable[tuple[str, str]] = ()
    ) -> None:
        """Open the WebSocket at a path.

        Args:
            address: of the server.
            path: of the WebSocket.
            headers: of the upgrade request, beside those of the address.
        Raises:
            ConnectionLost: the server does not answer.
            HttpError: it refuses the WebSocket.
        """
        body, refusal = b"", None
        more = [*address.headers, *((name.encode(), value.encode("latin-1")) for name, value in headers)]
        await self._send(Request(host=address.authority, target=path, extra_headers=more))
        while True:
            for event in self._protocol.events():
                if isinstance(event, AcceptConnection):
                    return
                if isinstance(event, RejectConnection):
                    refusal = event
                if isinstance(event, RejectData):
                    body += event.data
                if refusal is not None and (
                    not refusal.has_body or (isinstance(event, RejectData) and event.body_finished)
                ):
                    raise HttpError(address, refusal.status_code, body, refusal.headers)
            await self._read()

    async def refusal(self) -> ConnectionLost | None:
        """Return what the server said before it hung up on a message; for the one task that sends and receives."""
        with trio.move_on_after(CLOSE_WITHIN_S):
            try:
                while True:
                    await self.receive()
            except ConnectionLost as error:
                return error if error.close_code is not None else None
        return None

    async def close(self) -> None:
        """Say goodbye, if the server still listens."""
        with trio.move_on_after(CLOSE_WITHIN_S):
            try:
                await self._send(CloseConnection(code=1000))
            except (ConnectionLost, ProtocolError):
                return

    def _message(self) -> str:
        parts, self._parts = self._parts, []
        return "".join(
            part if isinstance(part, str) else bytes(part).decode("utf-8", "replace") for part in parts
        )

    async def _read(self) -> None:
        data: bytes | bytearray | None = None
        with trio.move_on_after(SILENCE_S):
            try:
                data = await self._stream.receive_some(RECEIVE_BYTES)
            except trio.BrokenResourceError as error:
                raise ConnectionLost("the connection broke") from error
        if data is None:
            if self._has_pinged:
                raise ConnectionLost("the server has stopped answering")
            self._has_pinged = True
            await self._send(Ping())
            return
        self._has_pinged = False
        if not data:
            raise ConnectionLost("the server has hung up")
        try:
            self._protocol.receive_data(bytes(data))
        except ProtocolError as error:
            raise ConnectionLost(f"the server broke the protocol: {error}") from error

    async def _send(self, event: wsproto.events.Event) -> None:
        try:
            async with self._sending:
                await self._stream.send_all(self._protocol.send(event))
        except (trio.BrokenResourceError, trio.ClosedResourceError, ProtocolError) as error:
            raise ConnectionLost("the connection broke") from error


def _closing(event: CloseConnection) -> str:
    return f"close code {int(event.code)}" + (f": {event.reason}" if event.reason else "")


@asynccontextmanager
async def open_responses_socket(
    address: ServerAddress, headers: Iterable[tuple[str, str]] = ()
) -> AsyncIterator[ClientWebSocket]:
    """Open a WebSocket of the Responses protocol; it is closed with the scope.

    Args:
        address: of the server.
        headers: of the upgrade request, beside those of the address.
    Raises:
        ConnectionLost: the server cannot be reached.
        HttpError: it refuses the WebSocket.
    """
    try:
        stream = await connect(address)
    except OSError as error:
        raise ConnectionLost(reason_of(error)) from error
    async with stream:
        socket = ClientWebSocket(stream)
        with trio.move_on_after(HANDSHAKE_WITHIN_S) as scope:
            await socket.shake_hands(address, f"{address.base_path}/responses", headers)
        if scope.cancelled_caught:
            raise ConnectionLost("the server does not answer the handshake")
        try:
            yield socket
        finally:
            await socket.close()
