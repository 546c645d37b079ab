from __future__ import annotations

import trio
import trio.testing

from tests.actors.test_gateway import chatting_engine
from tests.http.harness import Scene
from triolet.actors.gateway import open_gateway
from triolet.config_gateway import GatewayConfig
from triolet.http import create_app


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
