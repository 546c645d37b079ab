"""trio-websocket's connection, with what a public server needs beyond it; the one module that knows its insides.

* A client that breaks the protocol is told so (1002, 1007) before the connection ends; as it comes, it only ends.
* A message that is too long, or in too many fragments, is refused (1009) by its bytes and not by its characters.
* Pings are answered, but not thousands a second (1008).
* Whatever is left to read is read for a moment before the connection is closed: a reset would destroy the goodbye.
* Several messages are sent as one piece.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NoReturn

import attrs
import trio
import wsproto
from trio_websocket import CloseReason as ClosedFor
from trio_websocket import ConnectionClosed, WebSocketConnection, WebSocketRequest
from wsproto.connection import ConnectionState, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Ping, Pong, Request, TextMessage
from wsproto.frame_protocol import CloseReason

from triolet.core.request.trace_context import TraceHeaders, pick_trace_headers

RECEIVE_BYTES = 2**16
KEY_PROTOCOL = "openai-insecure-api-key."  # OpenAI's own name for it
SEND_BYTES = 2**14  # a client that takes this much is reading
END_OF_HEAD = b"\r\n\r\n"
MAX_HEAD_BYTES = 2**15
MAX_REASON_BYTES = 123  # of a close frame
PING: Final = "\0ping"  # no message begins like this
POLICY_VIOLATION, TOO_BIG = 1008, 1009


@attrs.frozen(kw_only=True)
class SocketLimits:
    """What one client may send, and how long its end may take.

    Args:
        max_message_bytes: of one message.
        max_message_fragments: of one message.
        max_pings_per_second: that are answered.
        close_timeout: seconds for the closing handshake.
    """

    max_message_bytes: int
    max_message_fragments: int
    max_pings_per_second: int
    close_timeout: float


class Handshake:
    """A client's request for a WebSocket.

    Args:
        request: trio-websocket's.
    """

    def __init__(self, request: WebSocketRequest) -> None:
        self._request = request
        event: Request = request._event
        self.path = event.target.partition("?")[0]
        self._headers = {
            name.decode("latin-1").lower(): value.decode("latin-1") for name, value in event.extra_headers
        }
        self._headers["host"] = event.host

    def header(self, name: str) -> str | None:
        """The value of a header; None if there is none."""
        return self._headers.get(name)

    @property
    def trace_headers(self) -> TraceHeaders:
        """Of the trace that the connection belongs to."""
        return pick_trace_headers(self._headers)

    @property
    def authorization(self) -> str | None:
        """The header, or what a page sends in its place: it can set no headers, and says its key as a subprotocol."""
        if (header := self.header("authorization")) is not None:
            return header
        offered = (
            name.removeprefix(KEY_PROTOCOL) for name in self._protocols if name.startswith(KEY_PROTOCOL)
        )
        return next((f"Bearer {key}" for key in offered), None)

    @property
    def _protocols(self) -> tuple[str, ...]:
        return tuple(self._request.proposed_subprotocols)

    async def accept(self) -> None:
        """Let the client in."""
        # A browser closes a connection for which none of the subprotocols was chosen; a key is never said aloud.
        chosen = next((name for name in self._protocols if not name.startswith(KEY_PROTOCOL)), None)
        await self._request.accept(subprotocol=chosen)

    async def reject(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Do not."""
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._request.reject(status, extra_headers=encoded, body=body)


class ServerSocket(WebSocketConnection):
    """A WebSocket, seen from the server.

    Args:
        stream: the connection, at the first byte of the request for a WebSocket.
        limits: see there.
    """

    def __init__(self, stream: trio.abc.Stream, limits: SocketLimits) -> None:
        super().__init__(
            stream,
            wsproto.WSConnection(ConnectionType.SERVER),
            # The next message waits in the socket, and those behind it in the network.
            message_queue_size=1,
            max_message_size=limits.max_message_bytes,
            receive_buffer_size=RECEIVE_BYTES,
        )
        self._limits = limits
        self._early = b""
        self._num_fragments = 0
        self._num_pings = 0
        self._pings_since = -float("inf")
        self.heard_s = trio.current_time()
        """When the client last gave a sign of life."""
        self.sending_since: float | None = None
        """Since when the client has taken nothing of what is being sent to it; None while nothing is."""
        self._is_sending = trio.lowlevel.ParkingLot()
        self.trace_headers: TraceHeaders = ()
        """Of the request for a WebSocket."""
        self.ended = trio.Event()
        """Set when nothing is read from the network any more."""

    async def handshake(self) -> Handshake | None:
        """The client's request for a WebSocket; None if it makes none."""
        data = b""
        while END_OF_HEAD not in data:
            if len(data) > MAX_HEAD_BYTES or not (more := await self._stream.receive_some(RECEIVE_BYTES)):
                return None
            data += more
        head, end, self._early = data.partition(END_OF_HEAD)
        try:
            self._wsproto.receive_data(head + end)
        except wsproto.utilities.RemoteProtocolError as error:
            if error.event_hint is not None:
                await self._send(error.event_hint)
            return None
        for event in self._wsproto.events():
            if isinstance(event, Request):
                handshake = Handshake(WebSocketRequest(self, event))
                self.trace_headers = handshake.trace_headers
                return handshake
        return None

    async def run(self) -> None:
        """Read from the network, once the client was let in; everything else needs this beside it."""
        try:
            self._wsproto.receive_data(self._early)  # from a client that did not wait; wsproto would drop it
            await self._reader_task()
        finally:
            self.ended.set()

    async def send_texts(self, texts: Sequence[str]) -> None:
        """Send messages, together; `PING` asks for a sign of life.

        Raises:
            ConnectionClosed: the connection has ended.
        """
        if self._close_reason:
            raise ConnectionClosed(self._close_reason)
        data = memoryview(b"".join(self._wsproto.send(_frame(text)) for text in texts))
        self.sending_since = trio.current_time()
        self._is_sending.unpark_all()
        async with self._stream_lock:
            try:
                for start in range(0, len(data), SEND_BYTES):
                    await self._stream.send_all(data[start : start + SEND_BYTES])
                    self.sending_since = trio.current_time()
                    if list(texts) != [PING]:  # which the network takes for a client that is gone, too
                        self.heard_s = self.sending_since
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                await self._abort_web_socket()
                raise ConnectionClosed(self._close_reason) from None
        self.sending_since = None

    async def stalled(self, patience_s: float) -> None:
        """Wait until the client has taken nothing for so long of what is being sent to it."""
        while True:
            if self.sending_since is None:
                await self._is_sending.park()
            elif trio.current_time() < (until := self.sending_since + patience_s):
                await trio.sleep_until(until)
            else:
                return

    async def close(self, code: int, reason: str) -> None:
        """Say goodbye, and wait for the answer as long as the limits let."""
        with trio.move_on_after(self._limits.close_timeout):
            await self.aclose(code, _short(reason))
        await trio.aclose_forcefully(self._stream)

    # ------------------------------------------------------------------------------ what the client sends

    async def _handle_message_event(self, event: BytesMessage | TextMessage) -> None:
        self.heard_s = trio.current_time()
        # The base class counts characters; the difference to bytes is added where there is one.
        if isinstance(event.data, str) and not event.data.isascii():
            self._message_size += len(event.data.encode()) - len(event.data)
        self._num_fragments += event.frame_finished
        max_bytes, max_fragments = self._limits.max_message_bytes, self._limits.max_message_fragments
        if self._message_size + len(event.data) > max_bytes:
            await self._refuse(TOO_BIG, f"a message must have at most {max_bytes} bytes")
        if self._num_fragments > max_fragments:
            await self._refuse(TOO_BIG, f"a message must have at most {max_fragments} fragments")
        if event.message_finished:
            self._num_fragments = 0
        await super()._handle_message_event(event)

    async def _handle_ping_event(self, event: Ping) -> None:
        now = self.heard_s = trio.current_time()
        if now - self._pings_since > 1.0:
            self._num_pings, self._pings_since = 0, now
        self._num_pings += 1
        if self._num_pings > self._limits.max_pings_per_second:
            await self._refuse(POLICY_VIOLATION, "too many pings")
        if self._wsproto.state is ConnectionState.OPEN:
            await super()._handle_ping_event(event)

    async def _handle_pong_event(self, event: Pong) -> None:
        self.heard_s = trio.current_time()

    async def _handle_close_connection_event(self, event: CloseConnection) -> None:
        if self._wsproto.state is ConnectionState.OPEN and event.code != CloseReason.ABNORMAL_CLOSURE:
            await self._refuse(event.code, event.reason or "")  # wsproto could not read on
        await super()._handle_close_connection_event(event)

    async def _refuse(self, code: int, reason: str) -> NoReturn:
        """The client may not go on like this: say why, and end the connection.

        Raises:
            ConnectionClosed: always.
        """
        self._message_parts.clear()
        self._close_reason = ClosedFor(code, _short(reason))  # first: nothing may be sent behind the goodbye
        if self._wsproto.state is ConnectionState.OPEN:
            await self._send(CloseConnection(code=code, reason=_short(reason)))
        await self._close_web_socket(code, reason)
        self._close_handshake.set()
        await self._linger()
        await self._close_stream()
        raise ConnectionClosed(self._close_reason)

    async def _linger(self) -> None:
        """Read what is still coming, and forget it."""
        with trio.move_on_after(self._limits.close_timeout):
            try:
                if isinstance(self._stream, trio.abc.HalfCloseableStream):
                    await self._stream.send_eof()
                while await self._stream.receive_some(RECEIVE_BYTES):
                    pass
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass


def _frame(text: str) -> TextMessage | Ping:
    return Ping(payload=b"triolet") if text == PING else TextMessage(data=text)


def _short(reason: str) -> str:
    return reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore")
