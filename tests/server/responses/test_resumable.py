from __future__ import annotations

import trio
import trio.testing

from tests.server.responses.test_service import chatting_engine
from tests.server.routes.harness import Scene
from triolet.config.server import GatewayConfig
from triolet.server import create_app
from triolet.server.responses.service import open_gateway


async def test_a_resumable_response_that_is_refused_at_once_is_refused_to_its_reader(
    autojump_clock: trio.testing.MockClock,
) -> None:
    config = GatewayConfig()
    async with chatting_engine() as engine, open_gateway(engine, config) as gateway:
        await engine.drain(trio.current_time())
        scene = Scene(engine, create_app(engine, config, gateway=gateway), gateway)
        with trio.fail_after(60):
            answer = await scene.post(
                "/v1/responses", {"model": "triolet-nano", "input": "Hi", "resumable": True}
            )
    assert answer.error == (503, "service_unavailable", None)
