"""WebSocket connection of a public server, on trio-websocket. Its internals are used only here.

trio-websocket and wsproto handle all frames of a received chunk without a checkpoint, and without a limit on their
number. What is added:

* A client that violates the protocol gets a close frame with the reason (1002, 1007).
* The length of a message is limited in bytes, not in characters (1009), and so is its number of fragments (1008).
* Frames of any kind are limited per second, and pings and pongs more tightly (1008). A client that stays below still
  does not hold the event loop: after MAX_WORK_S the reader waits for the client's next turn (`ClientTurns`).
* Long messages take memory from the server's `InputBudget` (1013 when it is used up).
* The rest of the input is read for a moment before the connection is closed: a TCP reset would destroy the close frame.
* Several short messages are sent as one piece.
"""

from __future__ import annotations

import time
from base64 import urlsafe_b64decode
from collections import deque
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

from triolet.config.fields import is_key
from triolet.core.request.request import TraceHeaders, pick_trace_headers
from triolet.protocol.errors import WireError
from triolet.protocol.json.encoding import encode
from triolet.server.transport.client_stream import ClientStream, InputBudget, InputReservation

RECEIVE_BYTES = 2**16
KEY_PROTOCOL = "openai-insecure-api-key."  # OpenAI's name
# A browser refuses a subprotocol with `/` or `=` in it: before base64url, any key can be sent.
ENCODED_KEY_PROTOCOL = "triolet-api-key."
KEY_PROTOCOLS = (KEY_PROTOCOL, ENCODED_KEY_PROTOCOL)
SEND_BYTES = 2**14  # a client that takes this much is reading
SEND_MESSAGES = 64  # framed without a checkpoint: about 1 ms
END_OF_HEAD = b"\r\n\r\n"
MAX_HEAD_BYTES = 2**15
MAX_REASON_BYTES = 123  # of a close frame
PING: Final = "\0ping"  # no message begins like this
POLICY_VIOLATION, TOO_BIG, TRY_AGAIN_LATER = 1008, 1009, 1013
NO_CLOSE_FRAME: Final = 1006  # stands for the close code of a connection that ended without one
MAX_WORK_S: Final = 0.0005  # of the reader in one turn
MAX_PARTS: Final = (
    256  # received parts of a message before they are joined: a part of one character takes 70 bytes
)


@attrs.frozen(kw_only=True)
class SocketLimits:
    """Limits on the input of one client."""

    max_message_bytes: int  # of one message
    max_message_fragments: int  # of one message
    max_frames_per_second: int  # of any kind
    max_pings_per_second: int  # pings and pongs
    close_timeout: float  # seconds for the closing handshake


class Handshake:
    """Upgrade request of a client."""

    def __init__(self, request: WebSocketRequest) -> None:
        self._request = request
        event: Request = request._event
        self.path = event.target.partition("?")[0]
        self._headers = {
            name.decode("latin-1").lower(): value.decode("latin-1") for name, value in event.extra_headers
        }
        self._headers["host"] = event.host

    def header(self, name: str) -> str | None:
        """Return the value of a header; None if there is none."""
        return self._headers.get(name)

    @property
    def trace_headers(self) -> TraceHeaders:
        """W3C trace headers of the request."""
        return pick_trace_headers(self._headers)

    @property
    def authorization(self) -> str | None:
        """The header, or the key of a web page, which cannot set headers and sends it as a subprotocol."""
        if (header := self.header("authorization")) is not None:
            return header
        return next((f"Bearer {key}" for key in map(_key_of, self._protocols) if key is not None), None)

    @property
    def _protocols(self) -> tuple[str, ...]:
        return tuple(self._request.proposed_subprotocols)

    async def accept(self) -> None:
        """Accept the upgrade."""
        # Browsers and npm's `ws` close the connection if none of the offered subprotocols is chosen. One with a key is
        # echoed only if there is no other: a proxy may log the headers of the answer.
        others = [name for name in self._protocols if not name.startswith(KEY_PROTOCOLS)]
        chosen = "realtime" if "realtime" in others else next(iter((*others, *self._protocols)), None)
        await self._request.accept(subprotocol=chosen)

    async def refuse(self, error: WireError, headers: Mapping[str, str] | None = None) -> None:
        """Answer with an HTTP error.

        Args:
            error: why the WebSocket is refused.
            headers: further ones.
        """
        all_headers = {"content-type": "application/json", **error.headers, **(headers or {})}
        encoded = [(name.encode(), value.encode()) for name, value in all_headers.items()]
        body = encode({"error": error.body()}).encode()
        await self._request.reject(error.status, extra_headers=encoded, body=body)


def _key_of(protocol: str) -> str | None:
    """Return the key that a subprotocol carries; None if it carries none."""
    if protocol.startswith(KEY_PROTOCOL):
        return protocol.removeprefix(KEY_PROTOCOL)
    if not protocol.startswith(ENCODED_KEY_PROTOCOL):
        return None
    encoded = protocol.removeprefix(ENCODED_KEY_PROTOCOL)
    try:
        key = urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).decode("ascii")
    except ValueError:
        return None
    # A router passes it on as a header, in which a line break would begin another one.
    return key if is_key(key) else None


class ServerSocket(WebSocketConnection):
    """Server side of one WebSocket.

    Args:
        stream: the connection, at the first byte of the upgrade request.
        limits: on what the client sends.
    """

    def __init__(self, stream: trio.abc.Stream, limits: SocketLimits) -> None:
        super().__init__(
            stream,
            wsproto.WSConnection(ConnectionType.SERVER),
            # One message waits here; the next ones wait in the socket buffers, which stops the client.
            message_queue_size=1,
            max_message_size=limits.max_message_bytes,
            receive_buffer_size=RECEIVE_BYTES,
        )
        self._limits = limits
        self.is_routed = False
        self._early = b""
        self._num_fragments = 0
        self._num_parts = 0  # of the message, since they were joined last
        self._num_frames = self._num_pings = 0  # of the last second
        self._second_began_s = -float("inf")
        self._yielded_s = time.monotonic()
        self._budget: InputBudget | None = None
        self.client = ""  # API key or address, once it is known
        self._reservations: deque[InputReservation] = deque()  # of messages that were received and not taken
        self._reservation: InputReservation | None = None  # of the message that is being received
        self.heard_s = trio.current_time()
        """When the client last sent something, or read on."""
        self.sending_since: float | None = None
        """Since when the client has read nothing of what is being sent; None while nothing is being sent."""
        self._is_sending = trio.lowlevel.ParkingLot()
        self.trace_headers: TraceHeaders = ()
        """W3C trace headers of the upgrade request."""
        self.ended = trio.Event()
        """Set when reading from the network has ended."""

    def allow_routed(self, more_bytes: int) -> None:
        """Allow the messages of a router to be this much longer, for what it adds to those of its clients."""
        self.is_routed = True
        self._max_message_size += more_bytes
        self._limits = attrs.evolve(
            self._limits, max_message_bytes=self._limits.max_message_bytes + more_bytes
        )

    def use_budget(self, budget: InputBudget | None, client: str) -> None:
        """Take the memory of received messages from a budget, and the turns from those of the same client."""
        self._budget, self.client = budget, client
        if isinstance(self._stream, ClientStream):
            self._stream.client = client

    async def take_turn(self) -> None:
        """Wait until the client may have its next piece of work done; no checkpoint if it has a turn now."""
        if isinstance(self._stream, ClientStream):
            await self._stream.take_turn()

    async def handshake(self) -> Handshake | None:
        """Read the upgrade request; None if the client sends none."""
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
        """Read from the network after the handshake; must run in a task beside all other methods."""
        try:
            self._wsproto.receive_data(
                self._early
            )  # from a client that did not wait for the answer; wsproto would drop it
            await self._reader_task()
        finally:
            self.ended.set()
            for reservation in (*self._reservations, self._reservation):
                if reservation is not None:
                    reservation.clear()
            self._reservations.clear()
            self._reservation = None
            # wsproto's parser refers to the generator that it reads with, and the generator to it and to the last
            # frame: 64 KiB of each connection would be kept until a full garbage collection.
            if self._wsproto.connection is not None:
                self._wsproto.connection._proto._parse_more.close()

    def message_taken(self) -> None:
        """Record that the oldest received message has been parsed: its memory goes back to the budget."""
        if self._reservations:
            self._reservations.popleft().clear()

    async def send_texts(self, texts: Sequence[str]) -> None:
        """Send messages together; the text `PING` stands for a ping frame.

        Raises:
            ConnectionClosed: the connection has ended.
        """
        self.sending_since = trio.current_time()
        self._is_sending.unpark_all()
        for start in range(0, len(texts), SEND_MESSAGES):
            await self._send_batch(texts[start : start + SEND_MESSAGES])
        self.sending_since = None

    async def _send_batch(self, texts: Sequence[str]) -> None:
        if self._close_reason:
            raise ConnectionClosed(self._close_reason)
        data = memoryview(b"".join(self._wsproto.send(_frame(text)) for text in texts))
        async with self._stream_lock:
            try:
                for start in range(0, len(data), SEND_BYTES):
                    await self._stream.send_all(data[start : start + SEND_BYTES])
                    self.sending_since = trio.current_time()
                    if list(texts) != [PING]:  # the socket buffer takes a ping even when the client is gone
                        self.heard_s = self.sending_since
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                await self._abort_web_socket()
                raise ConnectionClosed(self._close_reason) from None

    async def stalled(self, timeout_s: float) -> None:
        """Wait until the client has read nothing for `timeout_s` while something is being sent."""
        while True:
            if self.sending_since is None:
                await self._is_sending.park()
            elif trio.current_time() < (until := self.sending_since + timeout_s):
                await trio.sleep_until(until)
            else:
                return

    async def close(self, code: int, reason: str) -> None:
        """Send a close frame, and wait for the client's for at most `close_timeout`."""
        with trio.move_on_after(self._limits.close_timeout):
            await self.aclose(code, _short(reason))
        await trio.aclose_forcefully(self._stream)

    # ------------------------------------------------------------------------------ what the client sends

    async def _handle_message_event(self, event: BytesMessage | TextMessage) -> None:
        await self._count_frame(event)
        # The base class counts characters; the difference to bytes is added where there is one.
        if isinstance(event.data, str) and not event.data.isascii():
            self._message_size += len(event.data.encode()) - len(event.data)
        self._num_fragments += event.frame_finished
        max_bytes, max_fragments = self._limits.max_message_bytes, self._limits.max_message_fragments
        if self._message_size + len(event.data) > max_bytes:
            await self._refuse(TOO_BIG, f"a message must have at most {max_bytes} bytes")
        if self._num_fragments > max_fragments:
            await self._refuse(POLICY_VIOLATION, f"a message must have at most {max_fragments} fragments")
        await self._reserve(self._message_size + len(event.data))
        self._join_parts()
        if event.message_finished:
            self._num_fragments = self._num_parts = 0
            if self._reservation is not None:
                self._reservations.append(self._reservation)
                self._reservation = None
        await super()._handle_message_event(event)

    def _join_parts(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            parts = self._message_parts[-MAX_PARTS:]
            self._message_parts[-MAX_PARTS:] = [type(parts[0])().join(parts)]  # type: ignore[arg-type]
            self._num_parts = 1

    async def _reserve(self, num_bytes: int) -> None:
        if self._budget is None:
            return
        if self._reservation is None:
            self._reservation = self._budget.reservation(self.client)
        try:
            self._reservation.grow_to(num_bytes)
        except WireError as error:
            await self._refuse(TRY_AGAIN_LATER, error.message)

    async def _count_frame(self, event: BytesMessage | TextMessage | Ping | Pong) -> None:
        """Count a frame against the limits per second, and yield to other tasks when it is time."""
        self.heard_s = trio.current_time()
        if self.heard_s - self._second_began_s > 1.0:
            self._num_frames = self._num_pings = 0
            self._second_began_s = self.heard_s
        is_ping = isinstance(event, Ping | Pong)
        self._num_frames += is_ping or event.frame_finished  # type: ignore[union-attr]
        self._num_pings += is_ping
        if self._num_pings > self._limits.max_pings_per_second:
            await self._refuse(POLICY_VIOLATION, "too many pings or pongs in a second")
        if self._num_frames > self._limits.max_frames_per_second:
            await self._refuse(POLICY_VIOLATION, "too many frames in a second")
        # By the clock of the machine, not Trio's, which stands still between two checkpoints in tests.
        if time.monotonic() - self._yielded_s > MAX_WORK_S:
            await trio.lowlevel.checkpoint()  # in a later pass, also if there is a turn left in this one
            await self.take_turn()
            self._yielded_s = time.monotonic()

    async def _handle_ping_event(self, event: Ping) -> None:
        await self._count_frame(event)
        if self._wsproto.state is ConnectionState.OPEN:
            await super()._handle_ping_event(event)

    async def _handle_pong_event(self, event: Pong) -> None:
        await self._count_frame(event)

    async def _handle_close_connection_event(self, event: CloseConnection) -> None:
        if self._wsproto.state is ConnectionState.OPEN and event.code != CloseReason.ABNORMAL_CLOSURE:
            await self._refuse(event.code, event.reason or "")  # wsproto could not read on
        await super()._handle_close_connection_event(event)

    async def _refuse(self, code: int, reason: str) -> NoReturn:
        """Close the connection with a reason.

        Raises:
            ConnectionClosed: always.
        """
        self._message_parts.clear()
        self._close_reason = ClosedFor(
            code, _short(reason)
        )  # first: nothing may be sent after the close frame
        if self._wsproto.state is ConnectionState.OPEN:
            await self._send(CloseConnection(code=code, reason=_short(reason)))
        await self._close_web_socket(code, reason)
        self._close_handshake.set()
        await self._linger()
        await self._close_stream()
        raise ConnectionClosed(self._close_reason)

    async def _linger(self) -> None:
        """Read and drop what still comes."""
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


# The send queue never lets a producer wait: `put` has no limit, and producers call `wait_for_room` before
# they make more. So a slow reader delays only its own responses, while the engine's outputs are merged in
# their streams.
HIGH_WATER_BYTES = 2**16  # some hundred events
MAX_REPLIES = 1024  # to messages that start no response, such as errors


@attrs.define(eq=False)
class SendQueue:
    """Bounded by its producers: texts to send, then perhaps a close frame."""

    close: tuple[int, str] | None = None  # code and reason of the close frame, once queued
    _texts: list[str] = attrs.field(factory=list, init=False)
    num_bytes: int = attrs.field(default=0, init=False)
    _writer: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)
    _producers: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)

    def put(self, text: str) -> None:
        """Queue a text; ignored after `put_close`."""
        if self.close is None:
            self._texts.append(text)
            self.num_bytes += len(text)
            self._writer.unpark_all()

    def put_close(self, code: int, reason: str) -> None:
        """Queue the close frame; the first code and reason are kept."""
        if self.close is None:
            self.close = (code, reason)
            self._writer.unpark_all()

    def abort(self, code: int, reason: str) -> None:
        """Drop all queued texts and close the connection."""
        self.num_bytes -= sum(map(len, self._texts))
        self._texts.clear()
        self.put_close(code, reason)

    async def wait_for_room(self) -> None:
        """Wait until less than HIGH_WATER_BYTES are queued."""
        await trio.lowlevel.checkpoint()
        while self.num_bytes > HIGH_WATER_BYTES:
            await self._producers.park()

    async def wait_for_reply_room(self) -> None:
        """Wait until one more client message may be answered.

        This limit is higher than that of `wait_for_room`, so that a slow reader can still cancel a response.
        """
        await trio.lowlevel.checkpoint()
        while len(self._texts) > MAX_REPLIES:
            await self._producers.park()

    async def take(self) -> list[str]:
        """Take all queued texts; an empty list means that only the close frame is left."""
        while not self._texts and self.close is None:
            await self._writer.park()
        texts, self._texts = self._texts, []
        return texts

    def mark_sent(self, texts: list[str]) -> None:
        """Record that these texts were handed to the network."""
        self.num_bytes -= sum(map(len, texts))
        self._producers.unpark_all()
