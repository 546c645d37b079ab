"""HTTP/1.1 through hypercorn. hypercorn's internals are used only here, and they are not public: hence the exact pin.

hypercorn parses HTTP/1.1 and calls the ASGI app. Eight things differ from hypercorn's own server:

* A connection on which nothing has come yet is a single task with little memory. hypercorn's parts have more than
  a hundred objects: with hundreds of silent connections a full garbage collection takes tens of milliseconds.
* A send to a client that does not read times out (`ClientStream`) and can be cancelled. hypercorn shields it without a
  limit, so that SIGTERM would not end the server.
* The connection is read while a request is being answered. Otherwise the bytes of a next request would hide that the
  client has disconnected.
* An upgrade to a WebSocket is returned to the caller with all its bytes, also when other requests came before it on the
  same connection. Every other upgrade, h2c included, is ignored.
* A request passes the event loop a quarter as often. Beside many busy connections each pass takes milliseconds, and a
  short request would wait for twenty of them. What has arrived when a connection begins is read and parsed in the pass
  in which it begins, and the end of a response that closes its connection is told at once.
* A client that asks whether to send its body (`Expect: 100-continue`) is told to when the app wants the body. To an app
  that refuses the request for its head it sends nothing.
* A request head must be complete within a few seconds, even if its bytes arrive one by one.
* After the server has closed a connection that still has unread input, it lingers for a moment: a TCP reset would
  destroy the response on its way.
"""

from __future__ import annotations

import logging
import math
import re
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, NoReturn

import h11
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import MAX_RECV, TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, ConnectionState, H11SendableEvent, Scope
from hypercorn.utils import parse_socket_addr

from triolet.observability.prometheus import UNMATCHED, GatewayMetrics
from triolet.server.transport.client_stream import ClientStream

MAX_HEAD_BYTES = 32 * 2**10
KEEP_ALIVE_S = 75.0  # longer than the idle limit of the usual proxies, so that the proxy closes first
LINGER_S = 1.0
READ_AHEAD_BYTES = 2**18  # read while h11 does not need them yet

logger = logging.getLogger("triolet.http")


class HttpServer:
    """Settings shared by all HTTP connections of a listener.

    Args:
        app: the ASGI app.
        is_upgrade: tells whether an upgrade request with this method and path may become a WebSocket.
        head_timeout: seconds in which a request head must be complete.
        metrics: counts connections, and responses that the app does not see.
    """

    def __init__(
        self,
        app: Callable[..., Any],
        is_upgrade: Callable[[str, str], bool],
        head_timeout: float,
        metrics: GatewayMetrics,
    ) -> None:
        self.app = _App(app)
        self.is_upgrade = is_upgrade
        self.head_timeout = head_timeout
        self.metrics = metrics
        self._silent: set[trio.CancelScope] = set()  # waits for the first bytes of connections
        self.context = WorkerContext(None)
        self.config = Config()
        self.config.h11_max_incomplete_size = MAX_HEAD_BYTES
        self.config.include_server_header = False
        self.config.accesslog = None
        self.config.errorlog = logger

    async def drain(self) -> None:
        """Close idle connections now, and busy ones and new ones after their response."""
        await self.context.terminated.set()
        for wait in tuple(self._silent):
            wait.cancel()

    @property
    def end_reason(self) -> str:
        """Reason of a connection that ends without one of its own."""
        return "shutdown" if self.context.terminated.is_set() else "error"

    async def serve(self, stream: ClientStream) -> bool:
        """Serve the requests of one connection.

        Args:
            stream: the connection; closed afterwards, unless this returns True.
        Returns:
            Whether the client asked for a WebSocket; the upgrade request is then the next thing to read.
        """
        is_upgraded = False
        began_in_drain = self.context.terminated.is_set()
        self.metrics.num_http_connections += 1
        reason: str | None = None
        try:
            data, reason = await self._silence(stream, began_in_drain)
            if data:
                connection = _Connection(self, stream, began_in_drain, data)
                try:
                    await connection.run()
                finally:
                    reason, is_upgraded = connection.close_reason, connection.is_upgraded
                    connection.forget()
        finally:
            self.metrics.num_http_connections -= 1
            self.metrics.note_http_close(reason or self.end_reason)
            if not is_upgraded:
                await trio.aclose_forcefully(stream)
        return is_upgraded

    async def _silence(self, stream: ClientStream, began_in_drain: bool) -> tuple[bytes, str | None]:
        """Wait for the first bytes of a connection; return them, or why it ends without any."""
        data = b""
        with trio.move_on_after(self.head_timeout) as wait:
            if not began_in_drain:  # has the usual time for a request, which is answered with 503
                self._silent.add(wait)
            try:
                data = stream.receive_nowait(MAX_RECV) or await stream.receive_some(MAX_RECV)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return b"", "client"
            finally:
                self._silent.discard(wait)
        if wait.cancelled_caught:
            await stream.take_turn()  # connections that began together end together
            is_shutdown = self.context.terminated.is_set() and not began_in_drain
            return b"", "shutdown" if is_shutdown else "idle"
        return data, None if data else "client"


class _IdleTimer:
    """Time limit of a connection without a request, in hypercorn's interface but without a task for each request.

    Args:
        first_s: seconds until the head of the first request must be complete.
    """

    def __init__(self, first_s: float) -> None:
        self.is_idle = True
        self.scope = trio.CancelScope(deadline=trio.current_time() + first_s)  # of the task that waits

    async def restart(self, task_group: TaskGroup, action: Callable[..., Any]) -> None:
        self.is_idle = True
        self.scope.deadline = trio.current_time() + KEEP_ALIVE_S

    async def stop(self) -> None:
        self.is_idle = False
        self.scope.deadline = math.inf

    def note_input(self, patience_s: float) -> None:
        """Limit the time in which a request whose first bytes have come must be complete."""
        if self.is_idle:
            self.scope.deadline = min(self.scope.deadline, trio.current_time() + patience_s)


class _Connection(TCPServer):
    """hypercorn's connection, with the differences listed above."""

    def __init__(self, server: HttpServer, client: ClientStream, began_in_drain: bool, data: bytes) -> None:
        super().__init__(server.app, server.config, server.context, {}, client)  # type: ignore[arg-type]
        self.idle_task: _IdleTimer = _IdleTimer(server.head_timeout)  # type: ignore[assignment]
        self.is_upgraded = False
        self.is_torn = False
        self.close_reason: str | None = None  # one of `HTTP_CLOSE_REASONS`; the first one stays
        self._server, self._client = server, client
        self._began_in_drain = began_in_drain
        self._ahead = bytearray(data)
        self._news, self._space = trio.lowlevel.ParkingLot(), trio.lowlevel.ParkingLot()
        self._is_closing = False
        self._has_turn = False  # whether the next request is the first one of a piece of input
        self._was_closed = trio.Event()

    async def run(self) -> None:
        """Serve until one side closes the connection."""
        socket = self._client.socket
        try:
            peers = parse_socket_addr(socket.family, socket.getpeername())
            own = parse_socket_addr(socket.family, socket.getsockname())
        except OSError:  # disconnected already
            self.close_reason = "client"
            return
        async with trio.open_nursery() as nursery:
            self._task_group = TaskGroup()
            self._task_group._nursery = nursery
            self.protocol = _Http11(self, self._server, self._client.is_tls, peers, own)  # type: ignore[assignment]
            nursery.start_soon(self._close_when_idle)
            nursery.start_soon(self._read_data)
            await self._feed()  # here, and not in a task that begins a pass later: the first bytes are there

    def forget(self) -> None:
        """Take the parts of an ended connection apart: in cycles, only a full garbage collection would find them."""
        protocol = vars(self).get("protocol")  # none if the client had gone before it was made
        for part in filter(None, (protocol and protocol.ended, protocol and protocol.stream, protocol, self)):
            vars(part).clear()

    # ---------------------------------------------------------------------------------------- reading

    async def _read_data(self) -> None:
        """Read until the client disconnects, also while a request is being answered."""
        while True:
            while len(self._ahead) > READ_AHEAD_BYTES and not self._is_closing:
                await self._space.park()
            try:
                data = await self._client.receive_some(MAX_RECV)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                data = b""
            if not data:
                break
            if not self._is_closing:
                self._ahead += data
                self._news.unpark_all()
        self._note_reason("write_timeout" if self._client.has_timed_out else "client")
        self._was_closed.set()
        with trio.move_on_after(
            LINGER_S
        ):  # tell the handler; it is cancelled if it does not end in this time
            await self.protocol.handle(Closed())
        self._task_group._nursery.cancel_scope.cancel()  # type: ignore[union-attr]

    async def _feed(self) -> NoReturn:
        """Pass the received bytes to hypercorn."""
        while True:
            while not self._ahead:
                await self._news.park()
            data = bytes(self._ahead)
            self._ahead.clear()
            self._has_turn = True  # that of the piece
            self._space.unpark_all()
            self.idle_task.note_input(self._server.head_timeout)
            try:
                await self.protocol.handle(RawData(data))
            except _WebSocketUpgrade as wanted:
                self._client.unread(wanted.head + bytes(self._ahead))
                self.is_upgraded = True
                self._note_reason("upgrade")
                self._task_group._nursery.cancel_scope.cancel()  # type: ignore[union-attr]

    async def _close_when_idle(self) -> None:
        """Close the connection when no request comes, or when the server drains."""
        with self.idle_task.scope:
            if self._began_in_drain:  # has the usual time for a request, which is answered with 503
                await trio.sleep_forever()
            await self.context.terminated.wait()
            if not self.idle_task.is_idle:
                return  # hypercorn closes it after the response
        # Connections that began together are idle for too long together.
        await self._client.take_turn()
        await self._close("shutdown" if self.context.terminated.is_set() else "idle")

    # ---------------------------------------------------------------------------------------- writing

    async def protocol_send(self, event: Event) -> None:
        """Handle an event from hypercorn: send bytes, or close."""
        if isinstance(event, RawData):
            try:
                await self._send(event.data)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                await self.protocol.handle(Closed())
            except trio.Cancelled:
                # A part of the data at most is out, also if the lock was still waited for, and h11 has taken it for
                # sent: nothing may follow it.
                self.is_torn = True
                raise
        elif isinstance(event, Closed):
            await self._close("shutdown" if self.context.terminated.is_set() else "server")
            await self.protocol.handle(Closed())
        else:
            await super().protocol_send(event)

    async def _send(self, data: bytes) -> None:
        try:
            self.send_lock.acquire_nowait()  # `acquire` would be another pass
        except trio.WouldBlock:
            await self.send_lock.acquire()
        try:
            await self._client.send_all(data)
        finally:
            self.send_lock.release()

    def _note_reason(self, reason: str) -> None:
        self.close_reason = self.close_reason or reason

    async def _close(self, reason: str = "server") -> None:
        """Close from this side."""
        if not self._is_closing:
            self._is_closing = True
            self._note_reason(reason)
            # In a task of the connection: the caller may be an app's task, which is cancelled at any moment.
            self._space.unpark_all()
            self.start_soon(self._shut_down)

    async def _shut_down(self) -> None:
        """Close the write side, give the client a moment to read, and end the connection."""
        if self._client.can_half_close:
            with suppress(
                trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError, OSError
            ):
                await self._client.send_eof()
                with trio.move_on_after(LINGER_S):
                    await self._was_closed.wait()
        else:
            with suppress(trio.BrokenResourceError, OSError), trio.move_on_after(LINGER_S):
                await self._client.aclose()
        self._task_group._nursery.cancel_scope.cancel()  # type: ignore[union-attr]

    async def take_turn(self) -> None:
        """Wait until the client may have its next request handled."""
        if self._has_turn:
            self._has_turn = False
        else:
            await self._client.take_turn()

    def end_writing(self) -> None:
        """Tell the client that nothing more comes, without the passes that it takes to end the connection."""
        if not self._is_closing and not self.send_lock.locked():
            self._note_reason(
                "shutdown" if self.context.terminated.is_set() else "server"
            )  # before the client's end
            self._client.end_writing()

    def start_soon(self, work: Callable[[], Awaitable[None]]) -> None:
        """Start a task of this connection."""
        self._task_group._nursery.start_soon(work)  # type: ignore[union-attr]


class _WebSocketUpgrade(Exception):
    """Accepted upgrade request, with all bytes received so far."""

    def __init__(self, head: bytes) -> None:
        super().__init__()
        self.head = head


class _Http11(H11Protocol):
    """hypercorn's HTTP/1.1 protocol, which hands WebSocket upgrades to the caller."""

    def __init__(
        self,
        connection: _Connection,
        server: HttpServer,
        is_tls: bool,
        client: tuple[str, int] | None,
        own: tuple[str, int] | None,
    ) -> None:
        super().__init__(
            server.app,
            server.config,
            server.context,
            connection._task_group,
            ConnectionState({}),
            is_tls,
            client,
            own,
            connection.protocol_send,
        )
        self._is_upgrade, self._metrics = server.is_upgrade, server.metrics
        self._whole_app = server.app.app
        self._connection = connection
        self.ended: object = None  # the stream of the last response that has ended
        self._head = b""  # of a response, until its body comes
        self._is_body_wanted = True  # by the app, of a client that asks whether to send it

    async def _check_protocol(self, event: h11.Request) -> None:
        """Ignore h2c upgrades: an HTTP/2 stream would bypass the checks made for HTTP/1.1."""

    async def _create_stream(self, request: h11.Request) -> None:
        if (status := _refusal(request)) is not None:
            await self._send_error_response(status)
            await self.send(Closed())
            return
        request = _with_origin_form(request)
        # One for each request: a piece of input may have a thousand of them.
        await self._connection.take_turn()
        path = request.target.partition(b"?")[0].decode("ascii")
        if _asks_for_websocket(request) and self._is_upgrade(request.method.decode("ascii"), path):
            raise _WebSocketUpgrade(_head(request) + self.connection.trailing_data[0])
        others = [(name, value) for name, value in request.headers.raw_items() if name.lower() != b"upgrade"]
        plain = h11.Request(
            method=request.method, target=request.target, headers=others, http_version=request.http_version
        )
        app = self.app
        if self.connection.they_are_waiting_for_100_continue:
            self._is_body_wanted = False
            self.app = _App(_TellingContinue(self._whole_app, self._tell_continue))
        try:
            await super()._create_stream(plain)
        finally:
            self.app = app

    async def _tell_continue(self) -> None:
        """Have the client send its body, if it still waits for that."""
        self._is_body_wanted = True
        if self.connection.they_are_waiting_for_100_continue:
            headers = self.config.response_headers("h11")
            await self._send_h11_event(h11.InformationalResponse(status_code=100, headers=headers))

    async def _maybe_recycle(self) -> None:
        # The response has ended. An app that is told of it may cancel its own task, and nothing here may depend on that
        # task: the connection goes on in one of its own.
        if self.stream is not None and self.stream is not self.ended:
            self.ended = self.stream
            states = (self.connection.our_state, self.connection.their_state)
            if self.context.terminated.is_set() or states != (h11.DONE, h11.DONE):
                self._connection.end_writing()  # clients wait for the end where they have asked for it
            self._connection.start_soon(super()._maybe_recycle)

    async def _send_h11_event(self, event: H11SendableEvent) -> None:
        is_early = isinstance(event, h11.InformationalResponse) and not self._is_body_wanted
        if self._connection.is_torn or is_early:
            return
        try:
            data = self._head + (self.connection.send(event) or b"")
        except h11.LocalProtocolError:
            if self.connection.their_state is not h11.ERROR:
                raise
            return
        # A response that knows its length has its body at hand: both are sent at once.
        waits = isinstance(event, h11.Response) and any(
            name == b"content-length" for name, _ in event.headers
        )
        self._head = data if waits else b""
        if data and not waits:
            await self.send(RawData(data=data))

    async def _send_error_response(self, status_code: int) -> None:
        """Answer a request that h11 cannot parse, with the same JSON error body as every other error."""
        if (error := sys.exception()) is not None:
            error.__traceback__ = None  # h11 leaves a frame in it that holds the error
        # h11 says 431 of a head that is too long so far. Where its target has not even ended, the answer is 414, as it
        # is for a head in a single piece: it must not go by how the head is cut up.
        if self.connection.their_state is h11.ERROR and status_code == 431:
            line = self.connection.trailing_data[0][: MAX_HEAD_BYTES + 2]
            if b" " in line and b"\r\n" not in line:
                status_code = 414
        self._metrics.note_response(UNMATCHED, status_code)
        code, sentence = _UNREADABLE.get(status_code, _UNREADABLE[400])
        body = b'{"error":{"type":"invalid_request_error","code":"%s","message":"%s","param":null}}' % (
            code,
            sentence,
        )
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
            *self.config.response_headers("h11"),
        ]
        await self._send_h11_event(h11.Response(status_code=status_code, headers=headers))
        await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())


class _App(ASGIWrapper):
    """ASGI app whose cancellation is one `Cancelled`, also where several of its tasks were cancelled.

    hypercorn keeps the group of them in a frame that the group's traceback holds: each client that leaves in the middle
    would leave a cycle, with its request and connection, to the garbage collector.
    """

    async def __call__(
        self,
        scope: Scope,
        receive: ASGIReceiveCallable,
        send: ASGISendCallable,
        sync_spawn: Callable[..., Any],
        call_soon: Callable[..., Any],
    ) -> None:
        try:
            await super().__call__(scope, receive, send, sync_spawn, call_soon)
        except BaseExceptionGroup as group:
            if group.split(trio.Cancelled)[1] is None:
                await trio.lowlevel.checkpoint_if_cancelled()
            raise


class _TellingContinue:
    """ASGI app for a request with `Expect: 100-continue`: the client is told to send the body when the app asks for it.

    Args:
        app: what answers.
        tell: tells the client.
    """

    def __init__(self, app: Callable[..., Any], tell: Callable[[], Awaitable[None]]) -> None:
        self._app, self._tell = app, tell

    async def __call__(self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Any) -> None:
        async def told_receive() -> Any:
            await self._tell()
            return await receive()

        await self._app(scope, told_receive, send)


_UNREADABLE = {
    400: (b"invalid_http", b"This is not a valid HTTP request."),
    414: (b"target_too_long", b"The head of the request must be at most %d bytes." % MAX_HEAD_BYTES),
    505: (b"http_version_not_supported", b"The server speaks HTTP/1.1."),
    431: (b"head_too_large", b"The head of the request must be at most %d bytes." % MAX_HEAD_BYTES),
}


def _refusal(request: h11.Request) -> int | None:
    """Return the status for a request that is not served although h11 can parse it; None if it is served."""
    if request.http_version not in (b"1.0", b"1.1"):
        return 505
    # h11 limits only a head that is still incomplete: one that came in a single piece passes it.
    if len(request.method) + len(request.target) + len(b"  HTTP/1.1") > MAX_HEAD_BYTES:
        return 414
    if len(_head(request)) > MAX_HEAD_BYTES:
        return 431
    names = {name for name, _ in request.headers}
    # A proxy in front may go by the other one of the two lengths, and take the rest of the body for a request of
    # another client (RFC 9112, 6.3).
    if {b"content-length", b"transfer-encoding"} <= names:
        return 400
    scheme, separator, _ = request.target.partition(b"://")
    if separator and scheme.lower() in (b"http", b"https") and not _ABSOLUTE.fullmatch(request.target):
        return 400
    return None


# Without the user part, which no request of HTTP may have (RFC 9110, 4.2.4).
_ABSOLUTE = re.compile(rb"https?://([^/?@]+)(/[^?]*)?(\?.*)?", re.IGNORECASE)


def _with_origin_form(request: h11.Request) -> h11.Request:
    """Return a request whose target is a path; the host of an absolute target replaces the Host header.

    Source: RFC 9112, 3.2.2.
    """
    if (absolute := _ABSOLUTE.fullmatch(request.target)) is None:
        return request
    host, path, query = absolute.groups(default=b"")
    others = [(name, value) for name, value in request.headers.raw_items() if name.lower() != b"host"]
    return h11.Request(
        method=request.method,
        target=(path or b"/") + query,
        headers=[(b"Host", host), *others],
        http_version=request.http_version,
    )


def _asks_for_websocket(request: h11.Request) -> bool:
    wanted = {name: value.lower() for name, value in request.headers}
    tokens = [token.strip() for token in wanted.get(b"connection", b"").split(b",")]
    return b"upgrade" in tokens and wanted.get(b"upgrade") == b"websocket"


def _head(request: h11.Request) -> bytes:
    """Serialize a request head again, for the next reader of the stream."""
    lines = [b"%s %s HTTP/%s" % (request.method, request.target, request.http_version)]
    lines += [b"%s: %s" % (name, value) for name, value in request.headers.raw_items()]
    return b"\r\n".join(lines) + b"\r\n\r\n"
