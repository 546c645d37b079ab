"""Serve an engine of the calling program on a port, as `triolet serve` does."""

from __future__ import annotations

import trio

from triolet.config.server import GatewayConfig
from triolet.engine.engine import Engine
from triolet.server.responses.service import open_gateway
from triolet.server.routes.app import create_app
from triolet.server.transport.listener import Listener


async def serve(
    engine: Engine,
    config: GatewayConfig | None = None,
    *,
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve an engine over HTTP and WebSockets until cancelled.

        async with triolet.open_engine() as engine, trio.open_nursery() as nursery:
            url = await nursery.start(serve, engine, GatewayConfig(port=0))

    Args:
        engine: a running engine.
        config: address, access and limits.
    Raises:
        ConfigError: the address or port cannot be used.
    """
    config = config or GatewayConfig()
    async with open_gateway(engine, config) as gateway:
        app = create_app(engine, config, gateway=gateway)
        listener = Listener(config, app, gateway.serve_websocket, gateway.metrics)
        await listener.run(task_status=task_status)
