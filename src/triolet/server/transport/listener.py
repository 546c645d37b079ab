"""Listener: one port for HTTP and WebSockets, with connection limits and TLS.

Every connection begins as HTTP (`hypercorn_adapter`) and is handed over when a request on it upgrades to a WebSocket.
So one parser reads every request head, and the upgrade need not be the first request of its connection.

Every connection is a task of its own. An exception in it is logged and ends only this connection.

Connections wait in one queue of the system, whichever client they are from. So it is emptied many at a time, which
takes little for each, and the connections of one client then wait for their turns (`ClientTurns`), not those of all
clients for each other. A connection has no task before its turn: a hundred that start together would be a long pass.

    running --drain--> draining --stop--> closed
    connections: served     new ones served, idle ones closed     the last ones may end, then cancelled

While it drains, the app answers new requests with 503, so that a load balancer learns why and clients when to try
again; a socket that refuses would tell them nothing.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import ssl
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import trio

from triolet.config.server import GatewayConfig
from triolet.errors import ConfigError
from triolet.observability.prometheus import UNMATCHED, GatewayMetrics
from triolet.server.transport.client_stream import ClientStream, address_of
from triolet.server.transport.client_turns import ClientTurns
from triolet.server.transport.hypercorn_adapter import HttpServer

WEBSOCKET_PATH = "/v1/responses"
MAX_PORT = 65_535
FULL_TIMEOUT_S = 1.0  # for sending the 503 to a client over the limit
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
    b"connection: close\r\ncontent-length: %d\r\n\r\n%s"
)
FULL_BODY = (
    b'{"error":{"type":"server_error","code":"too_many_connections",'
    b'"message":"The server has no room for another connection.","param":null}}'
)
BACKLOG = 65_535  # connections that wait to be accepted; the system lowers it to what it allows
ACCEPTED_AT_ONCE = 128  # in one step of the loop: about 2 ms
ACCEPT_AGAIN_S = 0.1  # after the system had no room for a connection
OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
# Exceptions that mean that the client has disconnected.
CLIENT_GONE = (
    trio.BrokenResourceError,
    trio.ClosedResourceError,
    trio.TooSlowError,
    ssl.SSLError,
    ConnectionError,
)

ServeWebSocket = Callable[[ClientStream], Awaitable[None]]
logger = logging.getLogger("triolet.front")


class Listener:
    """Listening socket and its connections.

    Args:
        config: where to listen, and the limits.
        app: the ASGI app for HTTP.
        serve_websocket: serves a WebSocket, handshake included; the stream is closed when it returns.
        metrics: counts connections and refusals.
        sockets: of `bind`; by default the listener binds its own when it runs.
    """

    def __init__(
        self,
        config: GatewayConfig,
        app: Callable[..., Any],
        serve_websocket: ServeWebSocket,
        metrics: GatewayMetrics | None = None,
        sockets: Sequence[trio.socket.SocketType] = (),
    ) -> None:
        self.config = config
        self._sockets = sockets
        self._serve_websocket = serve_websocket
        self._metrics = metrics or GatewayMetrics(config.metrics_prefix)
        self._http = HttpServer(app, is_websocket, config.handshake_timeout, self._metrics)
        self._tls = tls_context(config)
        self._turns = ClientTurns()
        self._by_address: Counter[str] = Counter()
        self._num_connections = 0
        # By address: connections that have had no turn yet. No queue is empty, and each has a task that empties it.
        self._arrived: dict[str, deque[trio.SocketStream]] = {}
        self._before_drain: set[trio.SocketStream] = set()  # connections opened before `drain`
        self._is_draining = False
        self._gone = trio.lowlevel.ParkingLot()
        self._listening = trio.CancelScope()
        self._connections = trio.CancelScope()

    @property
    def num_connections(self) -> int:
        return self._num_connections

    async def run(self, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen until `stop` or cancellation; report the URL through `task_status`.

        Raises:
            ConfigError: the address or port cannot be used.
        """
        listeners = open_listeners(self._sockets or await bind(self.config), self.config)
        with self._connections:
            async with trio.open_nursery() as connections:
                connections.start_soon(self._turns.run)
                # Two scopes: `stop` ends the listening at once, and the connections at its deadline.
                with self._listening:
                    async with trio.open_nursery() as listening:
                        for listener in listeners:
                            listening.start_soon(self._accept, listener, connections)
                        task_status.started(self._url(listeners[0]))

    async def drain(self) -> None:
        """Close idle connections now, and each of the others after its response; go on accepting new ones."""
        self._is_draining = True
        await self._http.drain()

    async def stop(self, deadline: float) -> None:
        """Stop accepting connections and wait until those opened before the drain have ended.

        Args:
            deadline: absolute `trio.current_time()`; what is still open then is cancelled.
        """
        await self.drain()
        self._listening.cancel()
        with trio.move_on_at(deadline):
            await self.wait_for_ends()
        self._connections.cancel()

    async def wait_for_ends(self) -> None:
        """Wait until the connections opened before the drain have ended."""
        # Later connections are not waited for: nothing is answered on them but 503.
        while self._before_drain:
            await self._gone.park()

    def _url(self, listener: trio.SocketListener) -> str:
        if self.config.uds is not None:
            return f"unix:{self.config.uds}"
        host, port = listener.socket.getsockname()[:2]
        return f"{'https' if self._tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"

    async def _accept(self, listener: trio.SocketListener, connections: trio.Nursery) -> None:
        """Take connections from the system, each to the others of its client."""
        async with listener:
            while True:
                try:
                    stream = await listener.accept()
                except OSError as error:
                    if error.errno not in OUT_OF_RESOURCES:
                        raise
                    logger.warning("no connection can be accepted: %s", errno.errorcode[error.errno])
                    await trio.sleep(ACCEPT_AGAIN_S)
                    continue
                self._take_in(stream, connections)
                for stream in waiting_connections(listener.socket):
                    self._take_in(stream, connections)

    def _take_in(self, stream: trio.SocketStream, connections: trio.Nursery) -> None:
        """Count a connection, or refuse it, and let it wait for a turn of its client."""
        try:
            # Fails if the client has disconnected already.
            address = address_of(stream.socket)
        except OSError:
            stream.socket.close()
            return
        if self._is_full(address):
            connections.start_soon(self._reject, stream)
            return
        self._num_connections += 1
        self._by_address[address] += 1
        if not self._is_draining:
            self._before_drain.add(stream)
        if address in self._arrived:
            self._arrived[address].append(stream)
        else:
            self._arrived[address] = deque([stream])
            connections.start_soon(self._admit, address, connections)

    # ------------------------------------------------------------------------------- one connection

    async def _admit(self, address: str, connections: trio.Nursery) -> None:
        """Start the connections of one client that have arrived, each in a turn; the last one goes on in this task."""
        arrived = self._arrived[address]
        try:
            while True:
                await self._turns.take(address)
                stream = arrived.popleft()
                if not arrived:
                    break
                connections.start_soon(self._receive, stream, address)
        finally:
            del self._arrived[address]
            for waiting in arrived:  # the listener is being stopped
                self._forget(address, waiting)
                waiting.socket.close()
        await self._receive(stream, address)

    async def _receive(self, socket_stream: trio.SocketStream, address: str) -> None:
        """Serve one connection within the limits; only Trio's own exceptions leave this task."""
        try:
            await self._serve(socket_stream, address)
        except* CLIENT_GONE:
            pass
        except* Exception:
            logger.exception("a connection failed")
        finally:
            self._forget(address, socket_stream)
            await trio.aclose_forcefully(socket_stream)

    async def _serve(self, socket_stream: trio.SocketStream, address: str) -> None:
        transport = await self._secured(socket_stream)
        stream = ClientStream(transport, self.config.write_timeout, self._turns, address)
        if await self._http.serve(stream):
            await self._serve_websocket(stream)

    async def _secured(
        self, socket_stream: trio.SocketStream
    ) -> trio.SocketStream | trio.SSLStream[trio.SocketStream]:
        if self._tls is None:
            return socket_stream
        stream = trio.SSLStream(socket_stream, self._tls, server_side=True, https_compatible=True)
        with trio.fail_after(self.config.handshake_timeout):
            await stream.do_handshake()
        return stream

    def _is_full(self, address: str) -> bool:
        limit = self.config.max_connections_per_address
        if limit is not None and self._by_address[address] >= limit:
            return True
        return self._num_connections >= self.config.max_connections

    async def _reject(self, socket_stream: trio.SocketStream) -> None:
        self._metrics.note_error(503, "too_many_connections")
        with trio.move_on_after(FULL_TIMEOUT_S):
            try:
                if self._tls is None:  # over TLS the handshake would cost too much
                    self._metrics.note_response(UNMATCHED, 503)
                    await socket_stream.send_all(FULL % (len(FULL_BODY), FULL_BODY))
                    await socket_stream.send_eof()
                    await socket_stream.receive_some(
                        2**16
                    )  # closing with unread input would reset the connection
            except (trio.BrokenResourceError, OSError):
                pass
        await trio.aclose_forcefully(socket_stream)

    def _forget(self, address: str, socket_stream: trio.SocketStream) -> None:
        self._num_connections -= 1
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]
        self._before_drain.discard(socket_stream)
        self._gone.unpark_all()


def waiting_connections(listening: trio.socket.SocketType) -> Iterator[trio.SocketStream]:
    """Yield connections that have arrived already, at most ACCEPTED_AT_ONCE, without a checkpoint."""
    # The socket of Trio as a plain one, without a descriptor of its own: there may be none left.
    plain = socket.socket(fileno=listening.fileno())
    try:
        # An error is left to the next accept that waits: it tells those to be ignored from those that are not.
        with suppress(OSError):
            for _ in range(ACCEPTED_AT_ONCE):
                yield trio.SocketStream(trio.socket.from_stdlib_socket(plain.accept()[0]))
    finally:
        plain.detach()


def is_websocket(method: str, path: str) -> bool:
    """Return whether this request may become a WebSocket."""
    return method == "GET" and path == WEBSOCKET_PATH


def tls_context(config: GatewayConfig) -> ssl.SSLContext | None:
    """Return the TLS settings, or None without a certificate.

    Raises:
        ConfigError: the certificate or its key cannot be used.
    """
    if config.certfile is None:
        if config.keyfile is not None:
            raise ConfigError("keyfile", "given together with certfile", config.keyfile)
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # HTTP/2 is not offered: WebSockets start as HTTP/1.1.
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(config.certfile, config.keyfile)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            "certfile", f"a certificate chain that fits its key ({error})", config.certfile
        ) from None
    return context


async def bind(config: GatewayConfig) -> list[trio.socket.SocketType]:
    """Bind the sockets to listen on; until `open_listeners` listens, every client is refused.

    Raises:
        ConfigError: the port or path is taken, or the address is not one of this machine.
    """
    if config.uds is not None:
        return [await _bound_to_path(config.uds)]
    if config.port > MAX_PORT:  # the system would silently take it modulo 65536
        raise ConfigError("port", f"at most {MAX_PORT}", config.port)
    with ExitStack() as opened, _named(config):
        found = await trio.socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        sockets, unsupported = [], None
        for family, kind, protocol, _, address in found:
            try:
                bound = opened.enter_context(trio.socket.socket(family, kind, protocol))
            except OSError as error:
                # IPv6 may be known to the resolver and not to the kernel.
                if error.errno != errno.EAFNOSUPPORT:
                    raise
                unsupported = error
                continue
            if os.name != "nt":
                # Otherwise the port cannot be bound for a minute after a server with connections has ended.
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            await bound.bind(address)
            sockets.append(bound)
            # A name with two addresses would get two different ports; only one can be reported.
            if config.port == 0:
                break
        if not sockets and unsupported is not None:
            raise unsupported
        opened.pop_all()
    return sockets


async def _bound_to_path(path: str) -> trio.socket.SocketType:
    """Bind a Unix socket; one that a server has left behind is replaced.

    Raises:
        ConfigError: another program listens there, or no socket can be there.
    """
    if not hasattr(socket, "AF_UNIX"):
        raise ConfigError("uds", "left out, since this system has no Unix sockets", path)
    with ExitStack() as opened:
        try:
            if await trio.Path(path).is_socket():
                with suppress(ConnectionRefusedError):
                    await trio.aclose_forcefully(await trio.open_unix_socket(path))
                    raise ConfigError("uds", "free; another program listens there", path)
                await trio.Path(path).unlink()
            bound = opened.enter_context(trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            await bound.bind(path)
        except OSError as error:
            raise ConfigError(
                "uds", f"a path where a socket can be made ({error.strerror or error})", path
            ) from None
        opened.pop_all()
    return bound


def open_listeners(
    sockets: Sequence[trio.socket.SocketType], config: GatewayConfig
) -> list[trio.SocketListener]:
    """Listen on sockets that are bound; if one of them cannot, all are closed.

    Raises:
        ConfigError: another program has begun to listen on the port.
    """
    with ExitStack() as opened, _named(config):
        for one in sockets:
            opened.callback(one.close)
            one.listen(BACKLOG)
        opened.pop_all()
    return [trio.SocketListener(one) for one in sockets]


@contextmanager
def _named(config: GatewayConfig) -> Iterator[None]:
    """Translate an error of the system to the field that is wrong."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError("port", "free; another program listens there", config.port) from None
        raise ConfigError("host", f"an address of this machine ({error})", config.host) from None
