"""Vendor events of a response: only for clients that asked, never before its first event, and the latest value only."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.actors.harness import STEP_S, FakeExecutor, fake_engine
from tests.server.responses.websocket_client import ChatTokenizer, Client, connected, text_of
from triolet import SamplingParams
from triolet.config.server import GatewayConfig
from triolet.core.step_plan import StepPlan
from triolet.server.responses.service import ResponsesService, open_gateway
from triolet.server.responses.vendor_events import INTERVAL_PER_PLACE_S, INTERVAL_S, vendor_events

LONG = 120


def engine_of_one_row(executor: FakeExecutor | None = None, **fields: Any) -> Any:
    return fake_engine(
        executor or FakeExecutor(num_blocks=2048, block_size=4),
        tokenizer=ChatTokenizer(),
        **{"max_num_seqs": 1, "max_num_batched_tokens": 16, **fields},
    )


def vendor(events: list[Any], stream_id: str | None = None) -> list[Any]:
    """The vendor events of a lane, less the fields that all of them have."""
    found = [event for event in events if event["type"].startswith("triolet:")]
    return [
        {name: value for name, value in event.items() if name not in ("response_id", "stream_id")}
        for event in found
        if event.get("stream_id") == stream_id
    ]


async def occupy(client: Client, num_tokens: int = LONG) -> None:
    """Begin a response that keeps the engine's only row."""
    await client.create(stream_id="busy", max_output_tokens=num_tokens, ignore_eos=True)
    while not text_of(client.events, "busy"):
        await client.next_events()


async def test_a_response_that_waits_is_told_its_place_and_then_the_progress_of_its_prompt(
    autojump_clock: MockClock,
) -> None:
    num_prompt_tokens = round(16 * 4 * INTERVAL_S / STEP_S)  # told about four times
    async with engine_of_one_row(max_model_len=8192) as engine, open_gateway(engine) as gateway:
        async with connected(gateway) as client:
            await occupy(client)
            await client.create(stream_id="first", max_output_tokens=LONG, ignore_eos=True)
            await client.create(input="x" * num_prompt_tokens, stream_id="next", triolet_events=True)
            events = await client.until_ended(3)
    lane = [event for event in events if event.get("stream_id") == "next"]
    told = vendor(events, "next")
    queue = [event["position"] for event in told if event["type"] == "triolet:queue"]
    prefill = [event for event in told if event["type"] == "triolet:prefill"]
    assert queue == [1, 0]
    assert len(prefill) >= 3
    assert told == [*({"type": "triolet:queue", "position": place} for place in queue), *prefill]
    counts = [event["num_computed_tokens"] for event in prefill]
    assert counts == sorted(set(counts))
    assert {event["num_prompt_tokens"] for event in prefill} == {num_prompt_tokens}
    # Between `response.in_progress` and the first output, and without numbers, so that the others have no gap.
    kinds = [event["type"] for event in lane]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[2 : 2 + len(told)] == [event["type"] for event in told]
    numbers = [event["sequence_number"] for event in lane if "sequence_number" in event]
    assert numbers == list(range(len(lane) - len(told)))
    assert {event["response_id"] for event in lane if "response_id" in event} == {lane[0]["response"]["id"]}


async def test_only_a_response_that_asked_for_them_gets_vendor_events(autojump_clock: MockClock) -> None:
    async with engine_of_one_row() as engine, open_gateway(engine) as gateway:
        async with connected(gateway) as client:
            await occupy(client)
            await client.create(stream_id="asked", triolet_events=True)
            await client.create(stream_id="quiet")
            await client.create(stream_id="said no", triolet_events=False)
            events = await client.until_ended(4)
    lanes = {event["stream_id"] for event in events if event["type"].startswith("triolet:")}
    assert lanes == {"asked"}


async def test_the_option_is_true_or_false(autojump_clock: MockClock) -> None:
    async with engine_of_one_row() as engine, open_gateway(engine) as gateway:
        async with connected(gateway) as client:
            await client.create(triolet_events="yes")
            [error] = await client.until_ended()
    assert (error["error"]["code"], error["error"]["param"]) == ("invalid_value", "triolet_events")


class CrashesOnce(FakeExecutor):
    """The first life ends with its fifth step, and the second one takes a while to start."""

    async def start(self, on_progress: Any) -> Any:
        if self.num_lives:
            await trio.sleep(1)
        return await super().start(on_progress)

    async def compute(self, plan: StepPlan) -> Any:
        if self.num_lives == 1 and len(self.plans) >= 5:
            raise ValueError("planted")
        return await super().compute(plan)


@pytest.mark.parametrize("resumable", [False, True])
async def test_a_restart_is_told_when_it_begins_and_when_it_is_over(
    resumable: bool, autojump_clock: MockClock
) -> None:
    executor = CrashesOnce(num_blocks=2048, block_size=4)
    async with engine_of_one_row(executor) as engine, open_gateway(engine) as gateway:
        async with connected(gateway) as client:
            await client.create(seed=3, max_output_tokens=20, triolet_events=True, resumable=resumable)
            events = await client.until_ended()
    restarts = [event["restarting"] for event in vendor(events) if event["type"] == "triolet:restart"]
    assert executor.num_lives == 2
    assert restarts[0] in (["model_runner"], ["model_runner", "scheduler"])
    assert restarts[-1] == []
    assert len(text_of(events)) == 20
    numbers = [event["sequence_number"] for event in events if "sequence_number" in event]
    assert numbers == list(range(len(numbers)))


async def test_a_slow_reader_gets_the_latest_value_and_not_all_of_them(autojump_clock: MockClock) -> None:
    async with engine_of_one_row() as engine, open_gateway(engine) as gateway:
        async with connected(gateway) as client:
            await occupy(client, 4 * LONG)
            for number in range(12):
                await client.create(stream_id=f"lane{number}", max_output_tokens=1)
            await client.create(stream_id="last", triolet_events=True, resumable=True)
            while not vendor(client.events, "last"):
                await client.next_events()
            response_id = next(e["response_id"] for e in client.events if e["type"] == "triolet:queue")
            resumable = gateway.resumable._responses[response_id]
            assert [event["position"] for event in resumable.vendor_events.values()] == [12]
        # The connection is gone, and its other requests with it: no client reads the response meanwhile.
        async with connected(gateway) as client:
            await client.send({"type": "response.resume", "response_id": response_id, "starting_after": 1})
            events = await client.until_ended()
    positions = [event["position"] for event in vendor(events) if event["type"] == "triolet:queue"]
    assert len(positions) <= 2  # of the twelve that went before it
    assert events[-1]["type"] in ("response.completed", "response.incomplete")


async def resumed(gateway: ResponsesService, response_id: str, after: int) -> list[Any]:
    async with connected(gateway) as client:
        await client.send({"type": "response.resume", "response_id": response_id, "starting_after": after})
        return await client.until_ended()


async def test_a_client_that_resumes_is_told_where_the_response_is_now(autojump_clock: MockClock) -> None:
    config = GatewayConfig(resume_grace=60.0)
    async with engine_of_one_row() as engine, open_gateway(engine, config) as gateway:
        async with connected(gateway) as other:
            await occupy(other)
            async with connected(gateway) as client:
                await client.create(triolet_events=True, resumable=True)
                while not vendor(client.events):
                    await client.next_events()
                [first] = client.events[:1]
            events = await resumed(gateway, first["response"]["id"], 1)
            again = await resumed(gateway, first["response"]["id"], -1)
    assert events[0] == {
        "type": "triolet:queue",
        "position": 0,
        "response_id": first["response"]["id"],
    }
    numbers = [event["sequence_number"] for event in events if "sequence_number" in event]
    assert numbers == list(range(2, 2 + len(numbers)))
    assert vendor(again) == []  # it is over, and where it was then is no news
    assert [event["type"] for event in again[:2]] == ["response.created", "response.in_progress"]


async def test_the_further_back_in_the_queue_the_less_often_is_the_place_told(
    autojump_clock: MockClock,
) -> None:
    told: list[tuple[float, int]] = []

    async def tell(event: dict[str, Any]) -> None:
        told.append((trio.current_time(), event.get("position", 0)))

    short, long = SamplingParams(max_tokens=4), SamplingParams(max_tokens=4, seed=1)
    async with engine_of_one_row(max_queued_requests=200) as engine, trio.open_nursery() as nursery:
        for _ in range(120):
            nursery.start_soon(engine.complete, "x", short)
        await trio.testing.wait_all_tasks_blocked()
        async with engine.generate("y", long) as stream, vendor_events(engine, stream, tell):
            async for _ in stream:
                pass
    places = [place for _, place in told]
    assert places[0] >= 118 and places[-1] < 10
    assert places == sorted(places, reverse=True)
    for (before_s, place), (after_s, _) in pairwise(told):
        # Less than the whole, because the clock of a test adds up many short steps.
        assert after_s - before_s > 0.99 * max(INTERVAL_S, place * INTERVAL_PER_PLACE_S)
