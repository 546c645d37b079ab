"""Two servers, one after the other, with a file between them."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from tests.actors.harness import STEP_S, assert_all_blocks_back
from tests.protocol.talk import endings
from tests.server.responses.test_service import LONG, chatting_engine, expected_text
from tests.server.responses.websocket_client import Client, connected, text_of
from tests.server.routes.harness import Scene
from triolet.config.server import GatewayConfig
from triolet.errors import ConfigError, SnapshotError
from triolet.protocol.responses.output_items import Event
from triolet.protocol.responses.snapshot import to_bytes
from triolet.server import create_app
from triolet.server.responses.service import ResponsesService, open_gateway
from triolet.server.responses.snapshot_file import (
    check_directory,
    collect_responses,
    read_file,
    restore_responses,
    save_responses,
)

GRACE_S = 5.0


@asynccontextmanager
async def server(path: Path, **fields: Any) -> AsyncGenerator[ResponsesService]:
    """One that takes up what is in the file."""
    config = GatewayConfig(snapshot=str(path), resume_grace=GRACE_S, **fields)
    async with chatting_engine() as engine, open_gateway(engine, config) as gateway:
        restore_responses(path, gateway)
        yield gateway


async def end(gateway: ResponsesService, path: Path, within_s: float = 3 * STEP_S) -> None:
    """What SIGTERM does."""
    deadline = trio.current_time() + within_s
    async with trio.open_nursery() as nursery:
        nursery.start_soon(gateway.drain, deadline)
        snapshot = await gateway.engine.drain(deadline)
    await save_responses(path, gateway, snapshot)


async def begin(client: Client, num_events: int = 20, **fields: Any) -> str:
    """Ask for a resumable response and read so much of it; its id."""
    await client.create(**{"seed": 6, "max_output_tokens": LONG, "resumable": True, **fields})
    while len(client.events) < num_events:
        await client.next_events()
    response_id: str = client.events[0]["response"]["id"]
    return response_id


async def read_on(
    gateway: ResponsesService, response_id: str, starting_after: int, **headers: str
) -> list[Event]:
    async with connected(gateway, **headers) as client:
        wish = {"response_id": response_id, "starting_after": starting_after}
        await client.send({"type": "response.resume", **wish})
        return await client.until_ended()


@pytest.mark.parametrize("stays", [True, False])
async def test_a_response_goes_on_in_the_next_server_with_the_same_numbers_and_text(
    stays: bool, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    path = tmp_path / "kept"
    async with server(path) as gateway:
        async with connected(gateway) as client:
            response_id = await begin(client)
            if stays:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(end, gateway, path)
                    assert await client.until_closed() == 1001
        before = client.events
        if not stays:
            await trio.sleep(STEP_S)
            await end(gateway, path)
        await trio.sleep(2 * STEP_S)  # the step in flight has ended
        assert_all_blocks_back(gateway.engine)
    assert endings(before) == [] and len(before) < LONG
    async with server(path) as gateway:
        assert not path.exists()
        await trio.sleep(GRACE_S - 1)
        after = await read_on(gateway, response_id, before[-1]["sequence_number"])
        async with connected(gateway) as second:  # what it says is known to later turns
            await second.create(previous_response_id=response_id, input="!")
            assert endings(await second.until_ended()) == [":response.incomplete"]
        assert await read_on(gateway, response_id, -1) == before + after
        assert_all_blocks_back(gateway.engine)
    numbers = [event["sequence_number"] for event in before + after]
    assert numbers == list(range(len(numbers)))
    assert text_of(before + after) == expected_text("Hi", 6, LONG)
    assert after[-1]["response"]["usage"]["output_tokens"] == LONG


async def test_a_response_with_vendor_events_goes_on_with_them_and_its_numbers_stay_without_gaps(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    path = tmp_path / "kept"
    async with server(path) as gateway:
        async with connected(gateway) as client:
            response_id = await begin(client, triolet_events=True)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(end, gateway, path)
                await client.until_closed()
        before = [event for event in client.events if "sequence_number" in event]
        assert len(before) < len(client.events)
    async with server(path) as gateway:
        answer = gateway.context.find_resumable(response_id, None)
        assert answer is not None and answer.request.triolet_events
        after = await read_on(gateway, response_id, before[-1]["sequence_number"])
    numbered = [event for event in before + after if "sequence_number" in event]
    assert [event["sequence_number"] for event in numbered] == list(range(len(numbered)))
    assert text_of(numbered) == expected_text("Hi", 6, LONG)


async def test_a_response_that_no_client_read_to_its_end_can_be_read_in_the_next_server(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    path = tmp_path / "kept"
    async with server(path) as gateway:
        async with connected(gateway) as client:
            response_id = await begin(client)
        await trio.sleep(2 * LONG * STEP_S)  # the engine has all of it, and no client has
        assert gateway.engine.statistics().num_requests_running == 0
        await end(gateway, path)
    async with server(path) as gateway:
        after = await read_on(gateway, response_id, client.events[-1]["sequence_number"])
    events = client.events + after
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert text_of(events) == expected_text("Hi", 6, LONG)


async def test_a_response_goes_through_several_servers(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    path, events, response_id = tmp_path / "kept", list[Event](), ""
    for _ in range(4):
        async with server(path) as gateway:
            async with connected(gateway) as client:
                if not events:
                    response_id = await begin(client)
                else:
                    wish = {"response_id": response_id, "starting_after": events[-1]["sequence_number"]}
                    await client.send({"type": "response.resume", **wish})
                    while len(client.events) < 10:
                        await client.next_events()
                events += client.events
            await end(gateway, path)
    async with server(path) as gateway:
        events += await read_on(gateway, response_id, events[-1]["sequence_number"])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert text_of(events) == expected_text("Hi", 6, LONG)


async def test_only_the_key_that_asked_reads_on_in_the_next_server(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    path, keys = tmp_path / "kept", {"api_keys": ("one", "two"), "max_active_per_key": 1}
    async with server(path, **keys) as gateway:
        async with connected(gateway, authorization="Bearer one") as client:
            response_id = await begin(client)
        await end(gateway, path)
    assert b"one" not in path.read_bytes().replace(b'"none"', b"")
    async with server(path, **keys) as gateway:
        [error] = await read_on(gateway, response_id, 3, authorization="Bearer two")
        assert error["error"]["code"] == "response_not_found"
        [live] = gateway.engine.requests()
        assert gateway.engine.requests(gateway.access.owner("Bearer one")) == (live,)
        assert gateway.engine.requests(gateway.access.owner("Bearer two")) == ()
        events = await read_on(gateway, response_id, 3, authorization="Bearer one")
        assert endings(events) == [":response.incomplete"]


async def test_a_response_that_no_client_reads_on_in_the_next_server_is_aborted(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    path = tmp_path / "kept"
    async with server(path) as gateway:
        async with connected(gateway) as client:
            response_id = await begin(client, max_output_tokens=4000)
        await end(gateway, path)
    async with server(path) as gateway:
        await trio.sleep(GRACE_S - 0.5)
        assert gateway.engine.statistics().num_requests_live == 1
        await trio.sleep(1)
        assert_all_blocks_back(gateway.engine)
        [error] = await read_on(gateway, response_id, 3)
        assert error["error"]["code"] == "response_not_found"


async def test_a_response_of_the_last_server_can_be_cancelled(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    path = tmp_path / "kept"
    async with server(path) as gateway:
        async with connected(gateway) as client:
            response_id = await begin(client, max_output_tokens=4000)
        await end(gateway, path)
    async with server(path) as gateway:
        await trio.sleep(1)
        assert gateway.active.cancel(response_id, None, 0) is not None
        events = await read_on(gateway, response_id, 3)
        assert events[-1]["response"]["status"] == "cancelled"
        await trio.sleep(2 * STEP_S)
        assert_all_blocks_back(gateway.engine)


async def test_what_is_not_resumable_ends_with_its_server_and_leaves_no_file(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    path = tmp_path / "kept"
    async with server(path) as gateway, connected(gateway) as client:
        await begin(client, resumable=False)
        await end(gateway, path)
        assert endings(await client.until_ended()) == [":response.failed"]
    assert os.listdir(tmp_path) == []


async def test_a_stream_over_http_goes_on_in_the_next_server(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    path, url = tmp_path / "kept", "/v1/responses"
    wish = {"model": "triolet-nano", "input": "Hi", "seed": 6, "max_output_tokens": LONG, "resumable": True}
    async with server(path) as gateway, trio.open_nursery() as nursery:
        scene = scene_of(gateway)
        streamed = scene.call("POST", url, {**wish, "stream": True})
        nursery.start_soon(streamed.run)
        await streamed.has_received(b"output_text.delta")
        whole = scene.call("POST", url, wish)
        nursery.start_soon(whole.run)
        await trio.sleep(10 * STEP_S)
        await end(gateway, path)
    assert whole.status == 503 and b"service_unavailable" in whole.received
    *before, last = events_of(bytes(streamed.received))
    assert (last["type"], last["code"]) == ("error", "service_unavailable")
    async with server(path) as gateway:
        place = f"{before[0]['response']['id']}?stream=true&starting_after={last['sequence_number']}"
        after = (await scene_of(gateway).get(f"{url}/{place}")).events
    assert [event["sequence_number"] for event in before + after] == list(range(len(before + after)))
    assert text_of(before + after) == expected_text("Hi", 6, LONG)


def scene_of(gateway: ResponsesService) -> Scene:
    app = create_app(gateway.engine, gateway.config, gateway=gateway)
    return Scene(gateway.engine, app, gateway)


def events_of(received: bytes) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in received.decode().splitlines() if "data: {" in line]
    return list(map(json.loads, lines))


# ------------------------------------------------------------------------------------------ the file


async def a_file(tmp_path: Path) -> bytes:
    async with server(tmp_path / "kept") as gateway:
        async with connected(gateway) as client:
            await begin(client)
        await end(gateway, tmp_path / "kept")
    return (tmp_path / "kept").read_bytes()


async def of_another_model(tmp_path: Path) -> bytes:
    async with server(tmp_path / "kept") as gateway:
        async with connected(gateway) as client:
            await begin(client)
        snapshot = await gateway.engine.drain(trio.current_time())
        kept = await collect_responses(gateway, attrs.evolve(snapshot, architecture="OtherForCausalLM"))
    return to_bytes(kept)[0]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("foreign", "JSON"),
        ("old", "must be of version 1; got 0"),
        ("short", "whole lines"),
        ("model", "OtherForCausalLM"),
        ("mixed up", "its engine knew"),
    ],
)
async def test_a_file_that_can_not_be_taken_up_is_put_aside_and_the_server_begins_without_it(
    kind: str,
    reason: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    autojump_clock: trio.testing.MockClock,
) -> None:
    path = tmp_path / "kept"
    match kind:
        case "foreign":
            data = b"\x00\x01 something else"
        case "old":
            data = (await a_file(tmp_path)).replace(b'"version": 1', b'"version": 0')
        case "short":
            data = (await a_file(tmp_path))[:-100]
        case "model":
            data = await of_another_model(tmp_path)
        case _:
            head, line, end_of_file = (await a_file(tmp_path)).split(b"\n")
            line = json.dumps({**json.loads(line), "response_id": "resp_other"}).encode()
            data = b"\n".join([head, line, end_of_file])
    path.write_bytes(data)
    async with server(path) as gateway, connected(gateway) as client:
        await client.create()
        assert endings(await client.until_ended()) == [":response.incomplete"]
    [told] = [one.getMessage() for one in caplog.records if "cannot be restored" in one.getMessage()]
    assert str(path) in told and reason in told
    assert os.listdir(tmp_path) == ["kept.refused"]
    assert (tmp_path / "kept.refused").read_bytes() == data


def test_a_file_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    assert read_file(path) is None
    path.write_bytes(b"x" * 11)
    assert read_file(path, max_bytes=11) == b"x" * 11
    with pytest.raises(SnapshotError, match="at most 10 bytes"):
        read_file(path, max_bytes=10)


def test_a_place_where_there_can_be_no_file_is_told_at_the_beginning(tmp_path: Path) -> None:
    check_directory(None)
    check_directory(str(tmp_path / "kept"))
    for wrong in (tmp_path / "missing" / "kept", tmp_path):
        with pytest.raises(ConfigError, match="snapshot must be a file in a directory"):
            check_directory(str(wrong))
