"""A response is ended by its id, and says what it was asked in."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from tests.actors.harness import STEP_S, FakeExecutor, assert_all_blocks_back
from tests.server.responses.websocket_client import connected
from tests.server.routes.harness import MODEL, Call, Scene, serving
from triolet.config.server import GatewayConfig

RESPONSES = "/v1/responses"
ASK: dict[str, Any] = {"model": MODEL, "input": "HELLO", "max_output_tokens": 100, "seed": 1}


def endless() -> FakeExecutor:
    return FakeExecutor(num_blocks=64, block_size=4)


async def id_of(call: Any) -> str:
    """Of the response that a stream tells of."""
    await call.has_received(b"response.output_text.delta")
    return str(call.received.partition(b'"id":"')[2].partition(b'"')[0].decode())


def is_idle(scene: Scene) -> bool:
    assert_all_blocks_back(scene.engine)
    return scene.engine.statistics().num_requests_live == 0


@pytest.mark.parametrize("with_gateway", [True, False])
async def test_a_stream_is_cancelled_by_another_request_and_frees_its_blocks_within_a_step(
    with_gateway: bool, autojump_clock: trio.testing.MockClock
) -> None:
    async with serving(endless(), with_gateway=with_gateway) as scene, trio.open_nursery() as nursery:
        call = scene.call("POST", RESPONSES, {**ASK, "stream": True})
        nursery.start_soon(call.run)
        path = f"{RESPONSES}/{await id_of(call)}"
        assert (await scene.get(path)).json["status"] == "in_progress"
        cancelled = (await scene.post(f"{path}/cancel")).json
        assert (cancelled["object"], cancelled["status"]) == ("response", "cancelled")
        assert 0 < cancelled["usage"]["output_tokens"] < 100
        await trio.sleep(1.5 * STEP_S)  # the step in flight ends, and the next one has not
        assert is_idle(scene)
        await call.has_received(b"[DONE]")
        assert b'"type":"response.incomplete"' in call.received
        # It is remembered as what it was, and to cancel it once more changes nothing.
        assert (await scene.get(path)).json == cancelled
        assert (await scene.post(f"{path}/cancel")).json == cancelled


async def test_a_client_that_waits_for_the_whole_of_a_cancelled_response_gets_what_there_is(
    autojump_clock: trio.testing.MockClock,
) -> None:
    answers = []
    async with serving(endless()) as scene, trio.open_nursery() as nursery:

        async def ask() -> None:
            answers.append(await scene.post(RESPONSES, ASK))

        nursery.start_soon(ask)
        await trio.sleep(10 * STEP_S)
        assert scene.gateway is not None
        [response_id] = scene.gateway.active.ids
        cancelled = (await scene.post(f"{RESPONSES}/{response_id}/cancel")).json
        await trio.testing.wait_all_tasks_blocked()
    assert (answers[0].status, answers[0].json) == (200, cancelled)


async def test_a_response_of_a_websocket_is_cancelled_over_http_and_its_lane_goes_on(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with serving(endless()) as scene:
        assert scene.gateway is not None
        async with connected(scene.gateway) as client:
            await client.create(input="HELLO", max_output_tokens=100)
            created = (await client.next_events())[0]
            await client.create(input="AND", max_output_tokens=1)
            await trio.sleep(5 * STEP_S)
            path = f"{RESPONSES}/{created['response']['id']}/cancel"
            assert (await scene.post(path)).json["status"] == "cancelled"
            last = (await client.until_ended())[-1]
            assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")
            assert (await client.until_ended())[-1]["response"]["usage"]["output_tokens"] == 1
        assert is_idle(scene)


async def test_a_resumable_response_that_no_client_reads_can_be_cancelled(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with serving(endless()) as scene, trio.open_nursery() as nursery:
        call = scene.call("POST", RESPONSES, {**ASK, "stream": True, "resumable": True})
        nursery.start_soon(call.run)
        path = f"{RESPONSES}/{await id_of(call)}"
        call.leave()
        await trio.sleep(1)
        assert (await scene.post(f"{path}/cancel")).json["status"] == "cancelled"
        await trio.sleep(1.5 * STEP_S)
        assert is_idle(scene)
        assert (await scene.get(path)).json["status"] == "cancelled"


async def test_a_deleted_response_can_be_neither_read_nor_resumed(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with serving() as scene:
        wish = {**ASK, "max_output_tokens": 2, "resumable": True}
        for store in (True, False):
            path = f"{RESPONSES}/{(await scene.post(RESPONSES, {**wish, 'store': store})).json['id']}"
            assert (await scene.get(path)).status == 200
            assert (await scene.call("DELETE", path).run()).json["deleted"]
            for again in (path, f"{path}/input_items", f"{path}?stream=true"):
                assert (await scene.get(again)).error == (404, "response_not_found", "response_id")
            assert (await scene.call("DELETE", path).run()).status == 404


def at_last_event(scene: Scene, act: Callable[[], Awaitable[object]], **fields: Any) -> Call:
    """Return the call for a stream whose client acts when it has read the last event, and not a moment later."""

    async def app(scope: Any, receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        async def send_and_act(message: Any) -> None:
            await send(message)
            if b"event: response.incomplete" in message.get("body", b""):
                await act()

        await scene.app(scope, receive, send_and_act)

    call = scene.call("POST", RESPONSES, {**ASK, "max_output_tokens": 2, "stream": True, **fields})
    call.app = app
    return call


WAYS = pytest.mark.parametrize(
    ("with_gateway", "resumable"),
    [(True, False), (True, True), (False, False)],
    ids=["gateway", "resumable", "app"],
)


@WAYS
async def test_a_streamed_response_can_be_continued_as_soon_as_its_last_event_is_read(
    with_gateway: bool, resumable: bool, autojump_clock: trio.testing.MockClock
) -> None:
    statuses: list[int] = []

    async def act() -> None:
        response_id = call.received.partition(b'"id":"')[2].partition(b'"')[0].decode()
        statuses.append((await scene.post(RESPONSES, {**ASK, "previous_response_id": response_id})).status)
        path = f"{RESPONSES}/{response_id}"
        statuses.append((await scene.call("DELETE", path).run()).status)
        statuses.append((await scene.get(path)).status)

    async with serving(with_gateway=with_gateway) as scene:
        call = at_last_event(scene, act, resumable=resumable)
        response_id = (await call.run()).events[0]["response"]["id"]
        assert statuses == [200, 200, 404]
        assert (await scene.get(f"{RESPONSES}/{response_id}")).status == 404, "it comes back"


@WAYS
async def test_a_streamed_response_is_stored_for_a_client_that_leaves_at_its_last_event(
    with_gateway: bool, resumable: bool, autojump_clock: trio.testing.MockClock
) -> None:
    async def act() -> None:
        call.leave()
        await trio.sleep_forever()

    async with serving(with_gateway=with_gateway) as scene:
        call = at_last_event(scene, act, resumable=resumable)
        await call.run()
        response_id = call.received.partition(b'"id":"')[2].partition(b'"')[0].decode()
        assert (await scene.post(RESPONSES, {**ASK, "previous_response_id": response_id})).status == 200


async def test_a_running_response_is_not_deleted(autojump_clock: trio.testing.MockClock) -> None:
    async with serving(endless()) as scene, trio.open_nursery() as nursery:
        call = scene.call("POST", RESPONSES, {**ASK, "stream": True})
        nursery.start_soon(call.run)
        path = f"{RESPONSES}/{await id_of(call)}"
        answer = await scene.call("DELETE", path).run()
        assert answer.error == (409, "response_in_progress", "response_id")
        nursery.cancel_scope.cancel()


async def test_no_key_cancels_or_sees_what_is_another_ones(autojump_clock: trio.testing.MockClock) -> None:
    config = GatewayConfig(api_keys=("mine", "yours"))
    mine, yours = ({"authorization": f"Bearer {key}"} for key in config.api_keys)
    async with serving(endless(), config) as scene, trio.open_nursery() as nursery:
        call = scene.call("POST", RESPONSES, {**ASK, "stream": True}, headers=mine)
        nursery.start_soon(call.run)
        path = f"{RESPONSES}/{await id_of(call)}"
        for answer in (
            await scene.post(f"{path}/cancel", headers=yours),
            await scene.get(f"{path}/input_items", headers=yours),
            await scene.get(path, headers=yours),
            await scene.post(f"{RESPONSES}/resp_none/cancel", headers=mine),
            await scene.get(f"{RESPONSES}/resp_none/input_items", headers=mine),
        ):
            assert answer.error == (404, "response_not_found", "response_id")
        assert (await scene.get(path, headers=mine)).json["status"] == "in_progress"
        nursery.cancel_scope.cancel()


async def test_the_input_of_a_response_is_listed_with_the_turns_before(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with serving() as scene:
        wish = {**ASK, "max_output_tokens": 2, "instructions": "BE"}
        first = (await scene.post(RESPONSES, wish)).json
        second = (
            await scene.post(RESPONSES, {**wish, "input": "AND", "previous_response_id": first["id"]})
        ).json
        answer = (await scene.get(f"{RESPONSES}/{second['id']}/input_items?order=asc")).json
        said = [(item["role"], item["content"][0]["text"]) for item in answer["data"]]
        told = first["output"][0]["content"][0]["text"]
        assert said == [("user", "HELLO"), ("assistant", told), ("user", "AND")]
        assert (answer["object"], answer["has_more"]) == ("list", False)
        assert (await scene.get(f"{RESPONSES}/{second['id']}/input_items?limit=0")).error[2] == "limit"


async def test_the_input_of_a_running_response_is_listed(autojump_clock: trio.testing.MockClock) -> None:
    async with serving(endless()) as scene, trio.open_nursery() as nursery:
        call = scene.call("POST", RESPONSES, {**ASK, "stream": True, "store": False})
        nursery.start_soon(call.run)
        path = f"{RESPONSES}/{await id_of(call)}/input_items"
        [item] = (await scene.get(path)).json["data"]
        assert item["content"] == [{"type": "input_text", "text": "HELLO"}]
        nursery.cancel_scope.cancel()


async def test_a_stream_that_the_next_server_continues_ends_with_openais_error_event(
    autojump_clock: trio.testing.MockClock, tmp_path: Path
) -> None:
    config = GatewayConfig(snapshot=str(tmp_path / "kept"), resume_grace=100.0)
    async with serving(endless(), config) as scene, trio.open_nursery() as nursery:
        call = scene.call("POST", RESPONSES, {**ASK, "stream": True, "resumable": True})
        nursery.start_soon(call.run)
        await id_of(call)
        await scene.engine.drain(trio.current_time())
        await call.has_received(b"[DONE]")
    *told, last = [
        line.removeprefix(b"data: ") for line in call.received.splitlines() if line.startswith(b"data: {")
    ]
    assert b"event: error\ndata: " + last in call.received
    event = json.loads(last)
    assert event.pop("message")
    assert event == {
        "type": "error",
        "code": "service_unavailable",
        "param": None,
        "retry_after": 5,
        "sequence_number": json.loads(told[-1])["sequence_number"],
    }
