from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from tests.actors.harness import assert_all_blocks_back
from tests.protocol.make import NOW, answer, output
from tests.protocol.talk import endings
from tests.server.responses.test_service import chatting_engine
from tests.server.responses.websocket_client import connected
from tests.server.routes.harness import Scene
from triolet.config.server import GatewayConfig
from triolet.core.request.request import FinishReason
from triolet.protocol.responses.output_items import Event
from triolet.protocol.responses.response import EventsGone, ResponseBuilder
from triolet.server import create_app
from triolet.server.responses.resumable import MAX_EVENTS_AT_ONCE, Generate, ResumableResponses
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


# ------------------------------------------------------------------------------------------ memory of the logs

GRACE_S = 30.0


@asynccontextmanager
async def opened(
    max_bytes: int | None = None, max_bytes_per_owner: int | None = None
) -> AsyncGenerator[ResumableResponses]:
    async with trio.open_nursery() as nursery:
        yield ResumableResponses(
            nursery,
            GRACE_S,
            100,
            lambda answer, owner: None,
            max_bytes=max_bytes,
            max_bytes_per_owner=max_bytes_per_owner,
        )
        nursery.cancel_scope.cancel()


def saying(num_outputs: int, *, ends: bool = True) -> Generate:
    async def generate(
        answer: ResponseBuilder,
        emit: Callable[[Sequence[Event]], None],
        wanted: Callable[[], Awaitable[None]],
    ) -> None:
        for number in range(num_outputs):
            reason = FinishReason.STOP if ends and number == num_outputs - 1 else None
            emit(answer.add(output("word ", reason), NOW))
            await wanted()
        if not ends:
            await trio.sleep_forever()

    return generate


async def read(
    resumable: ResumableResponses, built: ResponseBuilder, starting_after: int = -1
) -> list[Event]:
    events: list[Event] = []
    await resumable.read(built, starting_after, events.extend, trio.lowlevel.checkpoint)
    return events


async def finished(
    resumable: ResumableResponses, name: str, owner: str | None, num_outputs: int
) -> ResponseBuilder:
    """Have a response generated and read to its end."""
    built = answer(response_id=name, resumable=True)
    resumable.begin(built, owner, saying(num_outputs))
    await read(resumable, built)
    return built


async def size_of_log(num_outputs: int) -> int:
    async with opened() as resumable:
        await finished(resumable, "resp_0", None, num_outputs)
        return resumable.num_bytes


async def test_a_key_over_its_bytes_loses_its_oldest_finished_log_and_no_other_key_does(
    autojump_clock: trio.testing.MockClock,
) -> None:
    size = await size_of_log(10)
    async with opened(max_bytes_per_owner=2 * size + size // 2) as resumable:
        other = await finished(resumable, "resp_other", "b", 10)
        built = [await finished(resumable, f"resp_{number}", "a", 10) for number in range(3)]
        found = [resumable.find(one.response_id, "a") for one in built]
        assert found == [None, built[1], built[2]]
        assert resumable.find("resp_other", "b") is other
        assert resumable.num_bytes == pytest.approx(3 * size, abs=100)  # their ids differ in length
        with pytest.raises(EventsGone):
            await read(resumable, built[0])
        assert len(await read(resumable, built[1], 5)) == built[1].events_after(-1)[-1]["sequence_number"] - 5
        await trio.sleep(GRACE_S + 1)
        assert resumable.num_bytes == 0


async def test_when_all_logs_are_over_their_bytes_the_key_that_holds_most_loses_one(
    autojump_clock: trio.testing.MockClock,
) -> None:
    size = await size_of_log(10)
    async with opened(max_bytes=3 * size + size // 2) as resumable:
        first = await finished(resumable, "resp_first", "modest", 10)
        greedy = [await finished(resumable, f"resp_{number}", "greedy", 10) for number in range(5)]
        last = await finished(resumable, "resp_last", "late", 10)
        assert resumable.find("resp_first", "modest") is first
        assert resumable.find("resp_last", "late") is last
        assert [resumable.find(one.response_id, "greedy") is not None for one in greedy] == [False] * 4 + [
            True
        ]
        assert resumable.num_bytes == pytest.approx(3 * size, abs=100)  # their ids differ in length


async def test_a_running_response_over_its_bytes_goes_on_for_its_reader_and_cannot_be_resumed(
    autojump_clock: trio.testing.MockClock,
) -> None:
    limit = await size_of_log(10)
    async with opened(max_bytes_per_owner=limit) as resumable:
        built = answer(response_id="resp_1", resumable=True)
        resumable.begin(built, "a", saying(200))
        events = await read(resumable, built)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["type"] == "response.completed" and len(events) > 200
        assert resumable.find("resp_1", "a") is None
        assert resumable.num_bytes == 0
        assert built.history() is None  # the next server does not get it either
        with pytest.raises(EventsGone):
            built.events_after(0)


async def test_a_response_without_a_reader_ends_when_its_log_is_dropped(
    autojump_clock: trio.testing.MockClock,
) -> None:
    limit = await size_of_log(100)
    async with opened(max_bytes_per_owner=limit) as resumable:
        left = answer(response_id="resp_left", resumable=True)
        resumable.begin(left, "a", saying(80, ends=False))
        with trio.move_on_after(1):
            await read(resumable, left)
        assert resumable.find("resp_left", "a") is left
        await finished(resumable, "resp_1", "a", 70)
        assert resumable.find("resp_left", "a") is None
        assert resumable.find("resp_1", "a") is not None
        await trio.testing.wait_all_tasks_blocked()
        assert len(resumable._responses) == 1


async def test_a_reader_that_is_behind_a_dropped_log_is_told_and_the_response_goes_on(
    autojump_clock: trio.testing.MockClock,
) -> None:
    limit = await size_of_log(10)
    outcomes: list[object] = []
    async with opened(max_bytes_per_owner=limit) as resumable, trio.open_nursery() as nursery:
        built = answer(response_id="resp_1", resumable=True)
        resumable.begin(built, "a", saying(200))

        async def sleep() -> None:
            await trio.sleep(5)

        async def read_slowly() -> None:
            try:
                await resumable.read(built, -1, lambda events: None, sleep)
            except EventsGone as error:
                outcomes.append(error.code)

        nursery.start_soon(read_slowly)
        events = await read(resumable, built)
        assert events[-1]["type"] == "response.completed"
    assert outcomes == ["response_not_found"]


async def test_a_long_log_is_emitted_in_parts_between_which_others_run(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with opened() as resumable:
        built = await finished(resumable, "resp_1", None, 500)
        parts: list[int] = []
        num_waits = 0

        def emit(events: Sequence[Event]) -> None:
            parts.append(len(events))

        async def wait_for_room() -> None:
            nonlocal num_waits
            num_waits += 1
            assert num_waits == len(parts)  # never two parts without a wait between them
            await trio.lowlevel.checkpoint()

        await resumable.read(built, -1, emit, wait_for_room)
        assert max(parts) <= MAX_EVENTS_AT_ONCE
        assert sum(parts) == len(built.events_after(-1)) > 500


async def test_a_reader_that_waits_for_room_misses_no_event_of_that_time(
    autojump_clock: trio.testing.MockClock,
) -> None:
    told = {"type": "triolet:restart", "restarting": []}
    begun = trio.Event()
    seen: list[Event] = []

    async def generate(
        answer: ResponseBuilder,
        emit: Callable[[Sequence[Event]], None],
        wanted: Callable[[], Awaitable[None]],
    ) -> None:
        emit(answer.add(output("word "), NOW))
        await begun.wait()
        emit([told])
        await trio.sleep_forever()

    async def wait_for_room() -> None:
        begun.set()
        await trio.sleep(1)

    async with opened() as resumable, trio.open_nursery() as nursery:
        built = answer(response_id="resp_1", resumable=True)
        resumable.begin(built, None, generate)
        nursery.start_soon(resumable.read, built, -1, seen.extend, wait_for_room)
        await trio.sleep(5)
        nursery.cancel_scope.cancel()
    assert seen[-1] is told


@pytest.mark.parametrize("is_read", [True, False])
async def test_a_failure_that_no_client_reads_is_logged(
    is_read: bool, caplog: pytest.LogCaptureFixture, autojump_clock: trio.testing.MockClock
) -> None:
    async def generate(
        answer: ResponseBuilder,
        emit: Callable[[Sequence[Event]], None],
        wanted: Callable[[], Awaitable[None]],
    ) -> None:
        await trio.sleep(1)
        raise RuntimeError("it broke")

    async with opened() as resumable:
        built = answer(response_id="resp_1", resumable=True)
        resumable.begin(built, None, generate)
        if is_read:
            with pytest.raises(RuntimeError):
                await read(resumable, built)
        else:
            await trio.sleep(2)
    assert [record.getMessage() for record in caplog.records] == (
        [] if is_read else ["response resp_1 failed while no client read it"]
    )


async def test_over_a_websocket_a_response_over_its_bytes_ends_well_and_is_not_found_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    config = GatewayConfig(max_resumable_bytes=20_000)
    async with chatting_engine() as engine, open_gateway(engine, config) as gateway:
        async with connected(gateway) as client:
            await client.create(max_output_tokens=100, resumable=True)
            events = await client.until_ended()
            assert endings(events) == [":response.incomplete"]
        async with connected(gateway) as second:
            await second.send({"type": "response.resume", "response_id": events[0]["response"]["id"]})
            assert (await second.until_ended())[0]["error"]["code"] == "response_not_found"
        assert_all_blocks_back(engine)


async def test_over_a_websocket_a_lost_connection_ends_a_response_over_its_bytes_at_once(
    autojump_clock: trio.testing.MockClock,
) -> None:
    config = GatewayConfig(max_resumable_bytes=20_000)
    async with chatting_engine() as engine, open_gateway(engine, config) as gateway:
        async with connected(gateway) as client:
            await client.create(max_output_tokens=4000, resumable=True)
            while len(client.events) < 60:
                await client.next_events()
        await trio.sleep(1)  # much less than the grace period
        assert_all_blocks_back(engine)
