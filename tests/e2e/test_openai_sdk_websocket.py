"""The official clients over WebSocket, against `triolet serve` on triolet-nano."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI
from openai.lib.responses_websocket import (
    AsyncResponsesWebSocketSession,
    ResponsesWebSocketAccumulator,
    ResponsesWebSocketError,
    ResponsesWebSocketLimits,
    ResponsesWebSocketSession,
)

from tests.e2e.server import Server, serve
from tests.protocol.make import assert_valid

MODEL = "triolet-nano"
LIMITS = ResponsesWebSocketLimits(
    max_lanes=40, max_events_per_lane=10_000, max_events=100_000, max_bytes_per_lane=10**8, max_bytes=10**8
)
ENDINGS = ("error", "response.completed", "response.failed", "response.incomplete")
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


ABORTED = 'request_success_total{finished_reason="abort"}'


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve() as running:
        yield running


@pytest.fixture
def client(server: Server) -> Any:
    return OpenAI(base_url=server.url + "/v1", api_key="none")


def async_client(server: Server) -> Any:
    return AsyncOpenAI(base_url=server.url + "/v1", api_key="none")


def until_ended(connection: Any) -> list[Any]:
    events = []
    for event in connection:
        events.append(event)
        if event.type in ENDINGS:
            break
    return events


def nothing_runs_soon(server: Server, num_aborted: float) -> bool:
    """Wait until the last request is gone; whether so many more were aborted, and did not run to their ends."""
    until = time.monotonic() + 300
    while time.monotonic() < until:
        metrics = server.metrics()
        if metrics["num_requests_running"] == 0 and metrics['kv_blocks{state="in_use"}'] == 0:
            return metrics[ABORTED] == num_aborted
        time.sleep(0.01)
    return False


def test_every_event_of_a_stream_is_one_of_its_class(client: Any) -> None:
    with client.responses.connect() as connection:
        connection.response.create(
            **GREEDY, input="Count to five.", include=["message.output_text.logprobs"], top_logprobs=2
        )
        events: list[Any] = []
        while not events or events[-1]["type"] not in ENDINGS:
            events.append(json.loads(connection.recv_bytes()))
    for number, event in enumerate(events):
        assert event["sequence_number"] == number and "stream_id" not in event
        assert_valid(event)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    message = events[-1]["response"]["output"][0]["content"][0]
    assert "".join(delta["delta"] for delta in deltas) == message["text"]
    assert [one for delta in deltas for one in delta["logprobs"]] == message["logprobs"]
    assert all(len(one["top_logprobs"]) == 2 for one in message["logprobs"])
    assert len(message["logprobs"]) == events[-1]["response"]["usage"]["output_tokens"]


def test_a_chat_goes_on_from_turn_to_turn(client: Any) -> None:
    with client.responses.connect() as connection:
        connection.response.create(**GREEDY, input="Hello!", store=False)
        first = until_ended(connection)[-1].response
        connection.response.create(**GREEDY, input="Who are you?", previous_response_id=first.id, store=False)
        second = until_ended(connection)[-1].response
        assert second.previous_response_id == first.id
        assert second.usage.input_tokens > first.usage.total_tokens
        whole = [
            {"role": "user", "content": "Hello!"},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "Who are you?"},
        ]
        connection.response.create(**GREEDY, input=whole, store=False)
        assert until_ended(connection)[-1].response.output_text == second.output_text


def test_what_is_stored_is_found_over_http_and_on_another_connection(client: Any) -> None:
    with client.responses.connect() as connection:
        connection.response.create(**GREEDY, input="Hello!")
        first = until_ended(connection)[-1].response
    assert client.responses.retrieve(first.id).output_text == first.output_text
    with client.responses.connect() as connection:
        connection.response.create(**GREEDY, input="Who are you?", previous_response_id=first.id)
        assert until_ended(connection)[-1].type == "response.completed"
        connection.response.create(**GREEDY, input="x", previous_response_id="resp_unknown")
        error = until_ended(connection)[-1]
    assert (error.type, error.error.code) == ("error", "previous_response_not_found")


def test_a_session_tells_its_lanes_apart(client: Any) -> None:
    questions = {"a": "Hello!", "b": "Who are you?", "c": "Count to five."}
    alone = {
        lane: client.responses.create(**GREEDY, input=question).output_text
        for lane, question in questions.items()
    }
    with (
        client.responses.connect() as connection,
        ResponsesWebSocketSession(connection, limits=LIMITS) as session,
    ):
        lanes: dict[str, Any] = {name: session.lane(name) for name in questions}
        for name, lane in lanes.items():
            lane.send({"type": "response.create", **GREEDY, "input": questions[name]})
        for name, lane in lanes.items():
            assert lane.get_final_response(timeout=300).output_text == alone[name]
        lanes["a"].send({"type": "response.create", "model": "unknown", "input": "x"})
        with pytest.raises(ResponsesWebSocketError):
            lanes["a"].get_final_response(timeout=300)
        lanes["a"].send({"type": "response.create", **GREEDY, "input": questions["a"]})
        assert lanes["a"].get_final_response(timeout=300).output_text == alone["a"]


@pytest.mark.parametrize("triolet_events", [False, True])
def test_the_accumulator_follows_a_stream_also_one_with_vendor_events(
    client: Any, triolet_events: bool
) -> None:
    accumulator = ResponsesWebSocketAccumulator()
    with client.responses.connect() as connection:
        wish = {"type": "response.create", **GREEDY, "input": "Hello!", "triolet_events": triolet_events}
        connection.send(wish)
        events = until_ended(connection)
        for event in events:
            accumulator.add_event(event)
    # Without the wish there is none; with it chance decides, since an answer that begins at once waits for nothing.
    assert triolet_events or not any(event.type.startswith("triolet:") for event in events)
    assert accumulator.snapshot().output_text == accumulator.get_final_response().output_text != ""


def test_a_response_is_cancelled_by_name(client: Any, server: Server) -> None:
    num_before = server.metrics()[ABORTED]
    with client.responses.connect() as connection:
        connection.send({"type": "response.create", **GREEDY, "input": "Hello!", "ignore_eos": True})
        events: list[Any] = []
        was_cancelled = False
        for event in connection:
            events.append(event)
            if [event.type for event in events].count(
                "response.output_text.delta"
            ) == 3 and not was_cancelled:
                was_cancelled = True
                connection.send({"type": "response.cancel", "response_id": events[0].response.id})
            if event.type in ENDINGS:
                break
        last = events[-1]
        assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
        assert last.response.usage.output_tokens >= 3
        assert nothing_runs_soon(server, num_before + 1)
        connection.response.create(**GREEDY, input="Hello!")
        assert until_ended(connection)[-1].type == "response.completed"


def test_an_answer_has_the_form_that_was_asked_for(client: Any) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"enum": ["nano", "giant"]},
            "size": {"type": "integer", "maximum": 99, "minimum": 0},
        },
        "required": ["name", "size"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "name": "model", "schema": schema, "strict": True}
    with client.responses.connect() as connection:
        connection.response.create(
            **GREEDY, input="Who are you?", text={"format": form}, max_output_tokens=200
        )
        said = json.loads(until_ended(connection)[-1].response.output_text)
        connection.response.create(
            **GREEDY, input="x", text={"format": {**form, "schema": {"type": "nonsense"}}}
        )
        error = until_ended(connection)[-1]
    assert said["name"] in ("nano", "giant") and 0 <= said["size"] <= 99
    assert (error.type, error.status) == ("error", 400)


def test_a_function_that_is_named_is_called(client: Any) -> None:
    tool = {
        "type": "function",
        "name": "pick",
        "parameters": {
            "type": "object",
            "properties": {"side": {"enum": ["left", "right"]}},
            "required": ["side"],
            "additionalProperties": False,
        },
        "strict": True,
    }
    choice = {"type": "function", "name": "pick"}
    with client.responses.connect() as connection:
        connection.response.create(
            **GREEDY, input="Go.", tools=[tool], tool_choice=choice, max_output_tokens=200
        )
        last = until_ended(connection)[-1]
    [call] = last.response.output
    assert (call.type, call.name) == ("function_call", "pick")
    assert json.loads(call.arguments)["side"] in ("left", "right")


def test_a_response_is_steered(client: Any) -> None:
    with client.responses.connect() as connection:
        connection.send(
            {"type": "response.create", **GREEDY, "input": "Tell me a story.", "ignore_eos": True}
        )
        created = connection.recv()
        connection.response.steer(input="Hello!", previous_response_id=created.response.id)
        events = until_ended(connection)
        assert events[-1].response.incomplete_details.reason == "steered"
        assert "response.steer.accepted" in [event.type for event in events]
        successor = connection.recv()
        assert (successor.type, successor.response.previous_response_id) == (
            "response.created",
            created.response.id,
        )
        connection.send({"type": "response.cancel"})
        assert until_ended(connection)[-1].type == "response.incomplete"


@pytest.mark.slow
def test_leaving_in_the_middle_of_a_stream_frees_everything(client: Any, server: Server) -> None:
    num_before = server.metrics()[ABORTED]
    with client.responses.connect() as connection:
        for lane in "abc":
            connection.send(
                {"type": "response.create", **GREEDY, "input": "x", "ignore_eos": True, "stream_id": lane}
            )
        speaking: set[str] = set()
        while len(speaking) < 3:
            event: Any = connection.recv()
            if event.type == "response.output_text.delta":
                speaking.add(event.stream_id)
        assert server.metrics()["num_requests_running"] == 3
    assert nothing_runs_soon(server, num_before + 3)


def test_the_asynchronous_client_does_the_same(server: Server) -> None:
    async def story() -> tuple[str, str, str]:
        async with async_client(server) as client, client.responses.connect() as connection:
            async with AsyncResponsesWebSocketSession(connection, limits=LIMITS) as session:
                first: Any = session.lane("a")
                second: Any = session.lane("b")
                await first.send({"type": "response.create", **GREEDY, "input": "Hello!"})
                await second.send({"type": "response.create", **GREEDY, "input": "Who are you?"})
                said = await first.get_final_response(), await second.get_final_response()
                fork = {"previous_response_id": said[0].id, "input": "Who are you?"}
                await second.send({"type": "response.create", **GREEDY, **fork})
                forked = await second.get_final_response()
        return said[0].output_text, said[1].output_text, forked.previous_response_id or ""

    hello, who, parent = asyncio.run(story())
    assert hello and "triolet" in who and parent.startswith("resp_")


def test_the_agents_sdk_runs_over_the_websocket(server: Server) -> None:
    # Takes seconds to import, which only this test has to spend.
    from agents import Agent, OpenAIProvider, RunConfig, Runner, set_tracing_disabled

    async def story() -> tuple[str, str, list[str]]:
        async with async_client(server) as client:
            provider = OpenAIProvider(openai_client=client, use_responses=True, use_responses_websocket=True)
            config = RunConfig(model_provider=provider)
            agent = Agent(name="nano", model=MODEL)
            whole = await Runner.run(agent, "Hello!", run_config=config)
            streamed = Runner.run_streamed(agent, "Who are you?", run_config=config)
            kinds: list[str] = [event.type async for event in streamed.stream_events()]
            await provider.aclose()
            return str(whole.final_output), str(streamed.final_output), kinds

    set_tracing_disabled(True)
    whole, streamed, kinds = asyncio.run(story())
    assert whole and "triolet" in streamed
    assert "raw_response_event" in kinds
