"""`GET /v1/requests`: the waiting and running requests."""

from __future__ import annotations

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.server.routes.harness import HELLO, serving
from triolet.config.server import GatewayConfig

LONG = {**HELLO, "max_tokens": 100}


async def test_live_requests_are_listed(autojump_clock: MockClock) -> None:
    async with serving() as scene, trio.open_nursery() as nursery:
        assert (await scene.get("/v1/requests")).json == {"object": "list", "data": []}
        nursery.start_soon(scene.call("POST", "/v1/chat/completions", {**LONG, "client": "me"}).run)
        await wait_all_tasks_blocked()
        [one] = (await scene.get("/v1/requests")).json["data"]
        assert (one["object"], one["client"], one["num_prompt_tokens"]) == ("request", "me", 5)
        assert one["status"] in ("waiting", "running")
        assert one["time_left_s"] is None
        nursery.cancel_scope.cancel()


async def test_a_key_sees_its_own_requests_and_no_client_sees_any_without_one(
    autojump_clock: MockClock,
) -> None:
    config = GatewayConfig(api_keys=("alice-key", "bob-key"))
    alice, bob = ({"authorization": f"Bearer {key}"} for key in config.api_keys)
    async with serving(config=config) as scene, trio.open_nursery() as nursery:
        assert (await scene.get("/v1/requests")).status == 401
        nursery.start_soon(scene.call("POST", "/v1/chat/completions", LONG, headers=alice).run)
        body = {"model": "triolet-nano", "input": "HELLO", "max_output_tokens": 100, "client": "alice"}
        nursery.start_soon(scene.call("POST", "/v1/responses", body, headers=bob).run)
        nursery.start_soon(
            scene.call("POST", "/v1/completions", {"model": "triolet-nano", "prompt": "AB"}, headers=bob).run
        )
        await wait_all_tasks_blocked()
        assert len(scene.engine.requests()) == 3
        seen = [(await scene.get("/v1/requests", headers=key)).json["data"] for key in (alice, bob)]
        assert [len(listed) for listed in seen] == [1, 2]
        assert not {one["request_id"] for one in seen[0]} & {one["request_id"] for one in seen[1]}
        nursery.cancel_scope.cancel()
