"""A port for an engine that one's own program has open: what `triolet serve` listens with."""

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
        config: where to listen, whom to let in, and how much one of them may take.
    Raises:
        ConfigError: it can not listen there.
    """
    config = config or GatewayConfig()
    async with open_gateway(engine, config) as gateway:
        front = Listener(config, create_app(engine, config, gateway=gateway), gateway.serve_websocket)
        await front.run(task_status=task_status)
