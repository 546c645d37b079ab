"""Router: one port for the clients of a fleet of engines, until a signal.

router             one nursery
  engines          watches each engine's readiness
  listener         HTTP (`http`) and WebSockets (`websocket`) on one port, as in `triolet serve`
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import attrs
import trio
from prometheus_client import Counter, Gauge
from trio_websocket import ConnectionClosed

from triolet.client.address import ServerAddress, ServerError
from triolet.client.http import HttpError, get_json
from triolet.config.server import GatewayConfig
from triolet.core.recovery.supervision import shortage_of
from triolet.core.request.request import TraceHeaders
from triolet.observability.prometheus import UNMATCHED, GatewayMetrics
from triolet.protocol.access import Access
from triolet.protocol.errors import WireError, of_exception
from triolet.protocol.responses.session import shutting_down
from triolet.router.engines import CHECK_TIMEOUT_S, CONNECTION, Engines, RoutedEngine
from triolet.router.homes import Homes
from triolet.router.http import RouterApp
from triolet.router.refusals import is_of_engine, passed_on, unavailable
from triolet.router.websocket import RoutedConnection
from triolet.server.transport.client_stream import client_address
from triolet.server.transport.ids import request_id_of
from triolet.server.transport.input_limits import input_budget, json_limits, socket_limits
from triolet.server.transport.listener import WEBSOCKET_PATH, Listener
from triolet.server.transport.shutdown import drain_deadlines
from triolet.server.transport.websocket import NO_CLOSE_FRAME, PING, Handshake, ServerSocket

logger = logging.getLogger("triolet.router")


class Router:
    """Router of a fleet.

    Args:
        addresses: of the engines' APIs, at least one.
        config: where to listen, the access rules, and the limits on clients; the fields about engines are not used.
    """

    def __init__(self, addresses: Sequence[ServerAddress], config: GatewayConfig) -> None:
        self.config = config
        self.engines = Engines(addresses)
        self._homes = Homes(self.engines)
        self._connections: set[RoutedConnection] = set()
        self._metrics = GatewayMetrics(
            f"{config.metrics_prefix}router_",
            lambda: len(self._connections),
            lambda: sum(one.num_waiting_bytes for one in self._connections),
        )
        self._add_engine_metrics()
        # A router with a key has engines with keys, and a page that is bound to a foreign name has none.
        keys = {one.api_key for one in addresses if one.api_key is not None}
        self._access = Access(
            listens_on=config.host,
            api_keys=tuple(keys),
            allowed_origins=config.allowed_origins,
            allowed_hosts=config.allowed_hosts,
        )
        self._budget = input_budget(config)
        self._app = RouterApp(self.engines, self._homes, self._access, config, self._budget, self._metrics)
        self._listener = Listener(config, self._app, self.serve_websocket, self._metrics)
        self._limits, self._json_limits = socket_limits(config), json_limits(config)

    def _add_engine_metrics(self) -> None:
        prefix, registry = f"{self.config.metrics_prefix}router_", self._metrics.registry
        engines = self.engines
        measured: tuple[tuple[str, str, Callable[[RoutedEngine], float]], ...] = (
            ("engine_up", "Whether an engine gets new requests.", lambda one: one in engines.up),
            (
                "engine_requests",
                "Requests that an engine is computing for this router.",
                lambda one: len(one.uses),
            ),
        )
        for name, text, value_of in measured:
            gauge = Gauge(prefix + name, text, ["engine"], registry=registry)
            for engine in engines.all:
                gauge.labels(engine=str(engine.address)).set_function(partial(value_of, engine))
        moved = Counter(
            prefix + "moved_requests", "Requests that went on at another engine.", registry=registry
        )
        engines.on_move = moved.inc

    async def run(self, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; report the URL through `task_status`.

        Raises:
            ConfigError: the address or port cannot be used.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.engines.run)
            await self._listener.run(task_status=task_status)

    async def drain(self) -> None:
        """Refuse new work, let answers end within the grace period, fail those that have not, and stop listening."""
        deadline, closed_by = drain_deadlines(self.config)
        logger.info("draining: at most %g s", self.config.grace_period)
        self._app.is_draining = True
        for connection in tuple(self._connections):
            connection.drain()
        await self._listener.drain()
        with trio.move_on_at(deadline):
            await self._listener.wait_for_ends()
        self.engines.close()
        await self._listener.stop(closed_by)

    async def serve_websocket(self, stream: trio.abc.Stream) -> None:
        """Serve a client whose upgrade request is the next thing to read; the stream is closed at the end."""
        try:
            socket = ServerSocket(stream, self._limits)
            handshake: Handshake | None = None
            with trio.move_on_after(self.config.handshake_timeout):
                handshake = await socket.handshake()
            if handshake is not None and await self._is_accepted(handshake):
                key = (handshake.authorization or "").removeprefix("Bearer ") or None
                # Engines that check no keys let clients call themselves anything, and many of them alike.
                name = key if self.engines.check_keys else None
                socket.use_budget(self._budget, name or client_address(stream))
                await self._serve_session(socket, key, handshake.trace_headers)
        except* (ConnectionClosed, trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        except* Exception:
            logger.exception("a WebSocket failed")
        finally:
            await trio.aclose_forcefully(stream)

    async def _is_accepted(self, handshake: Handshake) -> bool:
        """Ask an engine whether it serves this client, and answer the upgrade request."""
        try:
            host = handshake.header("host")
            self._access.check_host(host)
            self._access.check_origin(handshake.header("origin"), host)
            if self._app.is_draining:
                raise shutting_down()
            if handshake.path != WEBSOCKET_PATH:
                raise WireError("There is no WebSocket here.", code="not_found", status=404)
            await self._check_key((handshake.authorization or "").removeprefix("Bearer ") or None)
        except WireError as error:
            request_id = request_id_of(handshake.header("x-request-id"))
            self._metrics.note_error(error.status, error.code)
            is_route = handshake.path == WEBSOCKET_PATH
            self._metrics.note_response(WEBSOCKET_PATH if is_route else UNMATCHED, error.status)
            await handshake.refuse(error, {"x-request-id": request_id})
            return False
        self._metrics.note_response(WEBSOCKET_PATH, 101)
        await handshake.accept()
        return True

    async def _check_key(self, key: str | None) -> None:
        if not await self.engines.wait_for_one(self.config.handshake_timeout):
            raise unavailable("No engine is ready.")
        for engine in self.engines.up:
            try:
                with trio.move_on_after(CHECK_TIMEOUT_S):
                    await get_json(attrs.evolve(engine.address, api_key=key), "/models")
                    return
                # It may be busy: the checks of its health find out whether it is down.
                self.engines.note_not_ready(engine)
            except HttpError as error:
                if error.status < 500:  # it is this client that is refused
                    raise passed_on(error) from None
                if is_of_engine(passed_on(error)):
                    self.engines.note_not_ready(engine)
            except ServerError as error:
                if (shortage := shortage_of(error, CONNECTION)) is not None:
                    raise of_exception(shortage) from error
                self.engines.note_lost(engine)
        raise unavailable("No engine answers.")

    async def _serve_session(
        self, socket: ServerSocket, key: str | None, trace_headers: TraceHeaders
    ) -> None:
        """Run the session beside what reads the socket and asks whether the client is there."""
        connection = RoutedConnection(
            socket,
            self.engines,
            self._homes,
            key,
            self._json_limits,
            self.config.max_message_bytes,
            self._metrics.note_error,
            trace_headers,
        )
        self._connections.add(connection)
        if self._app.is_draining:  # began during the handshake
            connection.drain()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(socket.run)
                nursery.start_soon(self._ping, socket, connection, nursery.cancel_scope)
                await connection.run()
                nursery.cancel_scope.cancel()
        finally:
            self._connections.discard(connection)
            self._metrics.note_close(NO_CLOSE_FRAME if socket.closed is None else socket.closed.code)

    async def _ping(
        self, socket: ServerSocket, connection: RoutedConnection, scope: trio.CancelScope
    ) -> None:
        while trio.current_time() - socket.heard_s < 2 * self.config.ping_interval:
            with trio.move_on_after(self.config.ping_interval):
                await socket.stalled(self.config.write_timeout)
                break  # it does not read
            connection.send(PING)
        scope.cancel()
