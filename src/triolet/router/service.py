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
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from trio_websocket import ConnectionClosed

from triolet.client.address import ServerAddress, ServerError
from triolet.client.http import HttpError, get_json
from triolet.config.server import GatewayConfig
from triolet.protocol.errors import WireError
from triolet.protocol.json import encode
from triolet.router.engines import Engines, RoutedEngine
from triolet.router.http import RouterApp, unavailable
from triolet.router.websocket import Homes, RoutedConnection
from triolet.server.transport.client_stream import InputBudget
from triolet.server.transport.listener import WEBSOCKET_PATH, Listener
from triolet.server.transport.websocket import PING, Handshake, ServerSocket, SocketLimits

log = logging.getLogger("triolet.router")


class Router:
    """Router of a fleet.

    Args:
        addresses: of the engines' APIs, at least one.
        config: where to listen, and the limits on clients; the fields about engines are not used.
    """

    def __init__(self, addresses: Sequence[ServerAddress], config: GatewayConfig) -> None:
        self.config = config
        self.engines, self._homes = Engines(addresses), Homes()
        self._registry = CollectorRegistry()
        self._num_websockets = 0
        self._set_up_metrics()
        app = RouterApp(
            self.engines, self._homes, config.max_body_bytes, lambda: generate_latest(self._registry)
        )
        self._listener = Listener(config, app, self.serve_websocket)
        self._budget = InputBudget(config.max_input_bytes, config.max_input_bytes_per_client)
        self._limits = SocketLimits(
            max_message_bytes=config.max_message_bytes,
            max_message_fragments=config.max_message_fragments,
            max_frames_per_second=config.max_frames_per_second,
            max_pings_per_second=config.max_pings_per_second,
            close_timeout=config.close_timeout,
        )

    def _set_up_metrics(self) -> None:
        prefix = f"{self.config.metrics_prefix}router_"
        engines = self.engines
        measured: tuple[tuple[str, str, Callable[[RoutedEngine], float]], ...] = (
            ("engine_up", "Whether an engine gets new requests.", lambda one: one in engines.up),
            (
                "engine_requests",
                "Requests that an engine is computing for this router.",
                lambda one: len(one.scopes),
            ),
        )
        for name, text, value_of in measured:
            gauge = Gauge(prefix + name, text, ["engine"], registry=self._registry)
            for engine in engines.all:
                gauge.labels(engine=str(engine.address)).set_function(partial(value_of, engine))
        Gauge(prefix + "open_websockets", "Open WebSockets.", registry=self._registry).set_function(
            lambda: self._num_websockets
        )
        self._moved = Counter(
            prefix + "moved_requests", "Requests that went on at another engine.", registry=self._registry
        )
        engines.on_move = self._moved.inc

    async def run(self, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; report the URL through `task_status`.

        Raises:
            ConfigError: the address or port cannot be used.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.engines.run)
            await self._listener.run(task_status=task_status)

    async def drain(self) -> None:
        """Let the connections that there are end within the grace period, and then stop listening."""
        await self._listener.stop(trio.current_time() + self.config.grace_period)

    async def serve_websocket(self, stream: trio.abc.Stream) -> None:
        """Serve a client whose upgrade request is the next thing to read; the stream is closed at the end."""
        try:
            socket = ServerSocket(stream, self._limits)
            handshake: Handshake | None = None
            with trio.move_on_after(self.config.handshake_timeout):
                handshake = await socket.handshake()
            if handshake is not None and await self._is_accepted(handshake):
                key = (handshake.authorization or "").removeprefix("Bearer ") or None
                socket.use_budget(self._budget, key or "")
                await self._serve_session(socket, key)
        except* (ConnectionClosed, trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        except* Exception:
            log.exception("a WebSocket failed")
        finally:
            await trio.aclose_forcefully(stream)

    async def _is_accepted(self, handshake: Handshake) -> bool:
        """Ask an engine whether it serves this client, and answer the upgrade request."""
        try:
            if handshake.path != WEBSOCKET_PATH:
                raise WireError("There is no WebSocket here.", code="not_found", status=404)
            await self._check_key((handshake.authorization or "").removeprefix("Bearer ") or None)
        except WireError as error:
            body = encode({"error": error.body()}).encode()
            await handshake.reject(error.status, {"Content-Type": "application/json"}, body)
            return False
        await handshake.accept()
        return True

    async def _check_key(self, key: str | None) -> None:
        if not await self.engines.wait_for_one(self.config.handshake_timeout):
            raise unavailable("No engine is ready.")
        for engine in self.engines.up:
            try:
                await get_json(attrs.evolve(engine.address, api_key=key), "/models")
                return
            except HttpError as error:
                if error.status in (401, 403):
                    raise WireError(
                        str(error), code="invalid_api_key", status=error.status, type="authentication_error"
                    ) from None
            except ServerError:
                self.engines.note_lost(engine)
        raise unavailable("No engine answers.")

    async def _serve_session(self, socket: ServerSocket, key: str | None) -> None:
        """Run the session beside what reads the socket and asks whether the client is there."""
        self._num_websockets += 1
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(socket.run)
                connection = RoutedConnection(socket, self.engines, self._homes, key)
                nursery.start_soon(self._ping, socket, connection, nursery.cancel_scope)
                await connection.run()
                nursery.cancel_scope.cancel()
        finally:
            self._num_websockets -= 1

    async def _ping(
        self, socket: ServerSocket, connection: RoutedConnection, scope: trio.CancelScope
    ) -> None:
        while trio.current_time() - socket.heard_s < 2 * self.config.ping_interval:
            with trio.move_on_after(self.config.ping_interval):
                await socket.stalled(self.config.write_timeout)
                break  # it does not read
            connection.send(PING)
        scope.cancel()
