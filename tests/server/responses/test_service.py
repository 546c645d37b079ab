from __future__ import annotations

import json
import random
import re
from itertools import pairwise
from typing import Any

import pytest
import trio
import trio.testing
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection, Request

from tests.actors.harness import STEP_S, FakeExecutor, answer_of, assert_all_blocks_back, fake_engine
from tests.protocol.make import assert_valid
from tests.protocol.talk import endings
from tests.server.responses.websocket_client import (
    PATH,
    ChatTokenizer,
    Client,
    connected,
    connected_through,
    text_of,
)
from triolet.config.server import GatewayConfig
from triolet.core.step_plan import StepPlan
from triolet.server.responses.service import open_gateway
from triolet.server.transport import websocket
from triolet.server.transport.parse_thread import LONG_INPUT_BYTES

LONG = 200


def expected_text(prompt: str, seed: int, num_tokens: int) -> str:
    token_ids = answer_of([ord(char) % 50 for char in prompt], seed, num_tokens)
    return "".join(chr(65 + token_id) for token_id in token_ids)


def chatting_engine(**fields: Any) -> Any:
    return fake_engine(
        FakeExecutor(num_blocks=2048, block_size=4),
        tokenizer=ChatTokenizer(),
        **{"max_num_seqs": 16, "max_num_batched_tokens": 256, **fields},
    )


async def test_a_request_is_answered_event_by_event(autojump_clock: trio.testing.MockClock) -> None:
    async with chatting_engine() as engine, open_gateway(engine) as gateway:
        async with connected(gateway) as client:
            await client.create(input="Hello", seed=7)
            events = await client.until_ended()
        for number, event in enumerate(events):
            assert event["sequence_number"] == number
            assert_valid(event)
        assert text_of(events) == expected_text("Hello", 7, 8)
        assert events[-1]["response"]["usage"]["input_tokens"] == 5
        assert_all_blocks_back(engine)


@pytest.mark.parametrize("num_chars", [2, LONG_INPUT_BYTES], ids=["short", "long"])
async def test_a_response_without_a_model_is_that_of_the_servers_own(
    num_chars: int, autojump_clock: trio.testing.MockClock
) -> None:
    names = {"served_model_name": ("first", "second")}
    async with (
        chatting_engine(**names) as engine,
        open_gateway(engine) as gateway,
        connected(gateway) as client,
    ):
        for model in (None, "", "second"):
            await client.create(
                model=model, input="Hi" if num_chars == 2 else " ", metadata={}, pad="x" * num_chars
            )
            assert (await client.until_ended())[-1]["response"]["model"] == "first"
        await client.create(model="other", pad="x" * num_chars)
        assert (await client.until_ended())[-1]["error"]["code"] == "model_not_found"


async def test_a_second_turn_finds_the_first_in_the_prefix_cache(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with chatting_engine() as engine, open_gateway(engine) as gateway:
        async with connected(gateway) as client:
            await client.create(input="Hello there, how are you?", generate=False)
            first = (await client.until_ended())[-1]["response"]
            await client.create(input="!", previous_response_id=first["id"])
            second = (await client.until_ended())[-1]["response"]
    assert first["output"] == [] and first["usage"]["output_tokens"] == 0
    assert second["usage"]["input_tokens"] == 26
    assert second["usage"]["input_tokens_details"]["cached_tokens"] == 24


@pytest.mark.slow
async def test_a_hundred_streams_on_one_socket_of_which_half_are_cancelled(
    autojump_clock: trio.testing.MockClock,
) -> None:
    rng = random.Random(1)
    cancelled = {f"lane{number}" for number in rng.sample(range(100), 50)}
    config = GatewayConfig(max_lanes=100, max_active_responses=100)
    async with chatting_engine(max_num_seqs=100) as engine, open_gateway(engine, config) as gateway:
        async with connected(gateway) as client:
            for number in range(100):
                lane = f"lane{number}"
                length = LONG if lane in cancelled else 20
                await client.create(input="Hi", seed=number, stream_id=lane, max_output_tokens=length)
            async with trio.open_nursery() as nursery:
                for lane in cancelled:
                    nursery.start_soon(cancel_after, client, lane, rng.uniform(0, 30 * STEP_S))
                events = await client.until_ended(100)
        await trio.sleep(STEP_S)  # the step in flight has ended
        assert_all_blocks_back(engine)
    last = {event["stream_id"]: event["response"] for event in events if event["type"] in ENDED}
    assert len(last) == 100
    for number in range(100):
        lane = f"lane{number}"
        assert last[lane]["status"] == ("cancelled" if lane in cancelled else "incomplete")
        whole = expected_text("Hi", number, LONG if lane in cancelled else 20)
        text = text_of(events, lane)
        assert whole.startswith(text) if lane in cancelled else text == whole


ENDED = ("response.completed", "response.incomplete", "response.failed")


async def cancel_after(client: Client, lane: str, delay_s: float) -> None:
    await trio.sleep(delay_s)
    await client.send({"type": "response.cancel", "stream_id": lane})


@pytest.mark.parametrize("way", ["close", "reset"])
async def test_a_client_that_is_gone_holds_nothing(way: str, autojump_clock: trio.testing.MockClock) -> None:
    async with chatting_engine() as engine, open_gateway(engine) as gateway:
        async with connected(gateway) as client:
            for lane in "abc":
                await client.create(stream_id=lane, max_output_tokens=LONG)
            await trio.sleep(5.5 * STEP_S)
            assert engine.statistics().num_requests_running == 3
            if way == "close":
                await client.stream.send_all(client.protocol.send(CloseConnection(code=1000)))
            else:
                await trio.aclose_forcefully(client.stream)
            await trio.sleep(STEP_S)
            await trio.testing.wait_all_tasks_blocked()
            assert_all_blocks_back(engine)


async def test_the_deadline_of_a_request_ends_it_with_what_there_is(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with chatting_engine() as engine, open_gateway(engine) as gateway:
        async with connected(gateway) as client:
            await client.create(seed=3, max_output_tokens=LONG, timeout=10.5 * STEP_S)
            events = await client.until_ended()
    response = events[-1]["response"]
    assert (response["status"], response["finish_reason"]) == ("cancelled", "deadline")
    assert 0 < len(text_of(events)) < LONG and expected_text("Hi", 3, LONG).startswith(text_of(events))


async def test_a_crash_of_the_engine_costs_a_stream_a_pause(autojump_clock: trio.testing.MockClock) -> None:
    executor = FakeExecutor(num_blocks=2048, block_size=4)

    def crash(plan: StepPlan) -> None:
        if len(executor.plans) == 5:
            raise RuntimeError("planted")

    executor.before_step = crash
    async with fake_engine(executor, tokenizer=ChatTokenizer(), max_num_batched_tokens=256) as engine:
        async with open_gateway(engine) as gateway, connected(gateway) as client:
            await client.create(seed=3, max_output_tokens=20)
            events = await client.until_ended()
    assert executor.num_lives == 2
    assert text_of(events) == expected_text("Hi", 3, 20)


async def test_what_the_engine_can_not_take_is_an_error(autojump_clock: trio.testing.MockClock) -> None:
    async with chatting_engine(max_queued_requests=1, max_num_seqs=1) as engine:
        async with open_gateway(engine) as gateway, connected(gateway) as client:
            await client.create(input="x" * 9000, stream_id="long")
            [error] = await client.until_ended()
            assert error["error"]["code"] == "context_length_exceeded" and error["stream_id"] == "long"
            for lane in "abcd":
                await client.create(stream_id=lane, max_output_tokens=20)
            events = await client.until_ended(4)
            refused = [event for event in events if event["type"] == "error"]
            assert refused and all(event["error"]["code"] == "rate_limit_exceeded" for event in refused)
            assert {event["status"] for event in refused} == {429}


async def test_a_chat_that_is_too_long_is_shortened_where_that_is_asked_for(
    autojump_clock: trio.testing.MockClock,
) -> None:
    chat = [{"role": "user", "content": str(number) * 1000} for number in range(1, 10)]
    async with chatting_engine() as engine, open_gateway(engine) as gateway, connected(gateway) as client:
        await client.create(input=chat)
        assert (await client.until_ended())[-1]["error"]["code"] == "context_length_exceeded"
        await client.create(input=chat, truncation="auto", seed=3)
        events = await client.until_ended()
    assert events[-1]["response"]["usage"]["input_tokens"] == 8000
    assert text_of(events) == expected_text("".join(message["content"] for message in chat[1:]), 3, 8)


# -------------------------------------------------------------------------------- which clients may enter


@pytest.mark.parametrize(
    ("config", "headers", "status", "code"),
    [
        (GatewayConfig(), {"host": "evil.example"}, 403, "host_not_allowed"),
        (GatewayConfig(), {"origin": "https://evil.example"}, 403, "origin_not_allowed"),
        (GatewayConfig(), {"path": "/v1/elsewhere"}, 404, "not_found"),
        (GatewayConfig(api_keys=("secret",)), {}, 401, "invalid_api_key"),
        (GatewayConfig(api_keys=("secret",)), {"authorization": "Bearer secreT"}, 401, "invalid_api_key"),
    ],
)
async def test_a_client_that_may_not_enter_is_told_so(
    config: GatewayConfig, headers: dict[str, str], status: int, code: str
) -> None:
    async with chatting_engine() as engine, open_gateway(engine, config) as gateway:
        ours, theirs = trio.testing.memory_stream_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(gateway.serve_websocket, theirs)
            client = Client(ours)
            assert not await client.open(**headers)
            assert client.rejection is not None and client.rejection.status_code == status
            assert json.loads(client.body)["error"]["code"] == code
            await trio.aclose_forcefully(ours)


async def test_a_key_and_an_allowed_origin_open_the_door() -> None:
    config = GatewayConfig(
        api_keys=("secret", "other"), allowed_origins=("https://good.example",), max_connections_per_key=1
    )
    async with chatting_engine() as engine, open_gateway(engine, config) as gateway:
        headers = {"authorization": "Bearer secret", "origin": "https://good.example"}
        async with connected(gateway, **headers) as client:
            ours, theirs = trio.testing.memory_stream_pair()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(gateway.serve_websocket, theirs)
                second = Client(ours)
                assert not await second.open(**headers)
                assert second.rejection is not None and second.rejection.status_code == 429
                await trio.aclose_forcefully(ours)
            await client.create()
            assert endings(await client.until_ended()) == [":response.incomplete"]
            async with connected(gateway, authorization="Bearer other"):
                assert gateway.num_connections == 2


@pytest.mark.parametrize(
    ("offered", "chosen"),
    [
        (["openai-insecure-api-key.secret"], "openai-insecure-api-key.secret"),
        (["openai-insecure-api-key.secret", "x"], "x"),
        (["openai-beta.realtime-v1", "openai-insecure-api-key.secret", "realtime"], "realtime"),
        (["triolet-api-key.c2VjcmV0"], "triolet-api-key.c2VjcmV0"),  # base64 of "secret"
        (["triolet-api-key.c2VjcmV0", "x"], "x"),
        (["triolet-api-key.", "triolet-api-key.c2VjcmV0", "realtime"], "realtime"),
    ],
)
async def test_one_of_the_offered_subprotocols_is_chosen_and_a_key_only_where_there_is_no_other(
    offered: list[str], chosen: str
) -> None:
    async with (
        chatting_engine() as engine,
        open_gateway(engine, GatewayConfig(api_keys=("secret",))) as gateway,
    ):
        ours, theirs = trio.testing.memory_stream_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(gateway.serve_websocket, theirs)
            client = Client(ours)
            request = Request(host="localhost", target=PATH, subprotocols=offered)
            await ours.send_all(client.protocol.send(request))
            [accepted] = await client._receive()
            assert isinstance(accepted, AcceptConnection) and accepted.subprotocol == chosen
            await trio.aclose_forcefully(ours)


# By Python: base64.urlsafe_b64encode(b"pN3/xQ==-_~,;"), its padding left out.
ENCODED = "triolet-api-key.cE4zL3hRPT0tX34sOw"


@pytest.mark.parametrize(
    ("offered", "is_open"),
    [
        (ENCODED, True),
        ("triolet-api-key.cE4zL3hRPT0tX34sOA", False),  # another key
        ("triolet-api-key.c", False),  # no base64
        ("triolet-api-key.AAAA", False),  # characters that no header can carry
    ],
)
async def test_a_page_can_send_a_key_with_characters_that_no_subprotocol_may_have(
    offered: str, is_open: bool
) -> None:
    config = GatewayConfig(api_keys=("pN3/xQ==-_~,;",))
    async with chatting_engine() as engine, open_gateway(engine, config) as gateway:
        ours, theirs = trio.testing.memory_stream_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(gateway.serve_websocket, theirs)
            client = Client(ours)
            request = Request(host="localhost", target=PATH, subprotocols=[offered, "realtime"])
            await ours.send_all(client.protocol.send(request))
            answer = (await client._receive())[0]
            assert isinstance(answer, AcceptConnection) is is_open
            await trio.aclose_forcefully(ours)


async def test_an_error_event_says_when_to_try_again_in_a_field(
    autojump_clock: trio.testing.MockClock,
) -> None:
    config = GatewayConfig(api_keys=("secret",), max_active_per_key=1)
    async with chatting_engine() as engine, open_gateway(engine, config) as gateway:
        async with connected(gateway, authorization="Bearer secret") as client:
            for lane in "ab":
                await client.create(stream_id=lane)
            events = await client.until_ended(2)
            [refused] = [event for event in events if event["type"] == "error"]
            assert (refused["status"], refused["error"]["retry_after"]) == (429, 1)
            await client.create(model="another")
            [unknown] = await client.until_ended()
            assert (unknown["status"], "retry_after" in unknown["error"]) == (404, False)


async def test_a_key_has_only_so_many_responses_at_the_same_time(
    autojump_clock: trio.testing.MockClock,
) -> None:
    config = GatewayConfig(api_keys=("secret",), max_active_per_key=1)
    async with chatting_engine() as engine, open_gateway(engine, config) as gateway:
        async with connected(gateway, authorization="Bearer secret") as client:
            for lane in "ab":
                await client.create(stream_id=lane)
            assert sorted(endings(await client.until_ended(2))) == ["a:response.incomplete", "b:error"]


@pytest.mark.parametrize("resumable", [False, True])
async def test_a_turn_gives_its_place_back_before_the_next_one_of_its_lane_starts(
    resumable: bool, autojump_clock: trio.testing.MockClock
) -> None:
    config = GatewayConfig(api_keys=("secret",), max_active_per_key=1)
    async with chatting_engine() as engine, open_gateway(engine, config) as gateway:
        async with connected(gateway, authorization="Bearer secret") as client:
            for _ in range(8):
                await client.create(resumable=resumable)
            assert endings(await client.until_ended(8)) == [":response.incomplete"] * 8


async def test_a_cancelled_turn_gives_its_place_back_before_the_next_one_of_its_lane_starts(
    autojump_clock: trio.testing.MockClock,
) -> None:
    config = GatewayConfig(api_keys=("secret",), max_active_per_key=1)
    async with chatting_engine() as engine, open_gateway(engine, config) as gateway:
        async with connected(gateway, authorization="Bearer secret") as client:
            for _ in range(8):
                await client.create(max_output_tokens=LONG)
            for _ in range(8):
                await trio.sleep(3 * STEP_S)
                await client.send({"type": "response.cancel"})
            ended = [event for event in await client.until_ended(8) if event["type"] in ("error", *ENDED)]
            assert [event.get("response", {}).get("status") for event in ended] == ["cancelled"] * 8


async def test_a_turn_of_a_key_without_permission_for_its_priority_ends_with_an_error(
    autojump_clock: trio.testing.MockClock,
) -> None:
    config = GatewayConfig(api_keys=("plain",), priority_keys=("first",))
    async with chatting_engine() as engine, open_gateway(engine, config) as gateway:
        async with connected(gateway, authorization="Bearer plain") as client:
            await client.create(priority=-1)
            await client.create(priority=1)
            events = await client.until_ended(2)
            assert events[0]["error"]["code"] == "priority_not_allowed"
            assert (events[0]["status"], events[0]["error"]["param"]) == (403, "priority")
            assert endings(events) == [":error", ":response.incomplete"]
        async with connected(gateway, authorization="Bearer first") as client:
            await client.create(priority=-1)
            assert endings(await client.until_ended()) == [":response.incomplete"]


async def test_a_handshake_that_never_ends_is_ended(autojump_clock: trio.testing.MockClock) -> None:
    async with chatting_engine() as engine, open_gateway(engine) as gateway:
        ours, theirs = trio.testing.memory_stream_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(gateway.serve_websocket, theirs)
            await ours.send_all(b"GET /v1/responses HTTP/1.1\r\nHost: localh")
            assert await ours.receive_some() == b""
            assert trio.current_time() < 15


# ------------------------------------------------------------------------------------- slow readers


async def test_what_a_slow_reader_has_not_read_is_joined_and_nothing_is_lost(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "HIGH_WATER_BYTES", 1000)
    pair = trio.testing.lockstep_stream_pair()  # a send waits until it has been read
    async with chatting_engine() as engine, open_gateway(engine) as gateway:
        async with connected_through(gateway, pair) as client:
            await client.create(seed=5, max_output_tokens=LONG)
            await trio.sleep(LONG * STEP_S / 2)
            events = await client.until_ended()
    assert text_of(events) == expected_text("Hi", 5, LONG)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert len(events) < LONG


async def test_a_client_that_reads_nothing_is_given_up_and_frees_what_it_held(
    autojump_clock: trio.testing.MockClock,
) -> None:
    pair = trio.testing.lockstep_stream_pair()
    config = GatewayConfig(write_timeout=2.0)
    async with chatting_engine() as engine, open_gateway(engine, config) as gateway:
        async with connected_through(gateway, pair) as stalled, connected(gateway) as neighbour:
            for lane in "ab":
                await stalled.create(stream_id=lane, max_output_tokens=4000)
            await neighbour.create(seed=9, max_output_tokens=50)
            assert text_of(await neighbour.until_ended()) == expected_text("Hi", 9, 50)
            assert engine.statistics().num_requests_running == 2
            await trio.sleep(2.5)
            assert engine.statistics().num_requests_live == 0
            assert await stalled.until_closed() == 1013
            assert_all_blocks_back(engine)


async def gaps_of_a_neighbour(num_stalled: int) -> list[float]:
    """Times between the deltas of one client beside others that have asked for much and read nothing."""
    async with chatting_engine() as engine, open_gateway(engine) as gateway, trio.open_nursery() as nursery:
        for _ in range(num_stalled):
            ours, theirs = trio.testing.lockstep_stream_pair()
            nursery.start_soon(gateway.serve_websocket, theirs)
            stalled = Client(ours)
            assert await stalled.open()
            for lane in "abcd":
                await stalled.create(stream_id=lane, max_output_tokens=4000)
        times = []
        async with connected(gateway) as client:
            await client.create(max_output_tokens=LONG)
            while client.events[-1:] == [] or client.events[-1]["type"] not in ENDED:
                if any(event["type"] == "response.output_text.delta" for event in await client.next_events()):
                    times.append(trio.current_time())
        nursery.cancel_scope.cancel()
    return [later - earlier for earlier, later in pairwise(times)]


@pytest.mark.slow
async def test_clients_that_read_nothing_do_not_slow_their_neighbours_down(
    autojump_clock: trio.testing.MockClock,
) -> None:
    alone, beside = await gaps_of_a_neighbour(0), await gaps_of_a_neighbour(3)
    assert len(beside) == len(alone) == LONG - 1
    assert sorted(beside)[int(0.99 * LONG)] <= 1.05 * sorted(alone)[int(0.99 * LONG)]


async def test_a_client_that_never_comes_back_is_forgotten(autojump_clock: trio.testing.MockClock) -> None:
    pair = trio.testing.lockstep_stream_pair()
    async with chatting_engine() as engine:
        async with open_gateway(engine, GatewayConfig(write_timeout=2.0)) as gateway:
            async with connected_through(gateway, pair) as stalled:
                await stalled.create(max_output_tokens=4000)
                await trio.sleep(10)
                assert gateway.num_connections == 0


@pytest.mark.slow
async def test_a_client_that_reads_slowly_is_alive_though_it_comes_late_to_its_pings(
    autojump_clock: trio.testing.MockClock,
) -> None:
    config = GatewayConfig(ping_interval=2.0, write_timeout=5.0)
    pair = trio.testing.lockstep_stream_pair()
    async with chatting_engine() as engine, open_gateway(engine, config) as gateway:
        async with connected_through(gateway, pair) as slow:
            await slow.create(max_output_tokens=4000)
            for _ in range(20):
                await trio.sleep(1)
                assert await slow.stream.receive_some(6000)
            assert gateway.num_connections == 1 and engine.statistics().num_requests_live == 1


async def test_a_client_without_a_sign_of_life_is_disconnected(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with chatting_engine() as engine:
        async with open_gateway(engine, GatewayConfig(ping_interval=5.0)) as gateway:
            async with connected(gateway) as alive, connected(gateway):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(alive.next_events)  # answers pings
                    await trio.sleep(21)
                    assert gateway.num_connections == 1
                    nursery.cancel_scope.cancel()


# ------------------------------------------------------------------------------------- the way down


async def test_a_drain_lets_active_answers_finish_and_refuses_new_ones(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with chatting_engine() as engine, open_gateway(engine) as gateway:
        async with connected(gateway) as busy, connected(gateway) as idle:
            await busy.create(seed=4, max_output_tokens=50)
            await trio.sleep(5 * STEP_S)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(gateway.drain, trio.current_time() + 60)
                await trio.testing.wait_all_tasks_blocked()
                await busy.create(stream_id="late")
                nursery.start_soon(idle.until_closed)
                events = await busy.until_ended(2)
                assert await busy.until_closed() == 1001
            assert sorted(endings(events)) == [":response.incomplete", "late:error"]
            assert text_of(events) == expected_text("Hi", 4, 50)
            assert idle.closed is not None and idle.closed.code == 1001
        ours, theirs = trio.testing.memory_stream_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(gateway.serve_websocket, theirs)
            late = Client(ours)
            assert not await late.open() and late.rejection is not None
            assert late.rejection.status_code == 503
            await trio.aclose_forcefully(ours)


async def test_a_drain_ends_in_time_whatever_clients_read(autojump_clock: trio.testing.MockClock) -> None:
    pair = trio.testing.lockstep_stream_pair()
    async with chatting_engine() as engine, open_gateway(engine) as gateway:
        async with connected_through(gateway, pair) as stalled, connected(gateway) as reading:
            await stalled.create(max_output_tokens=4000)
            await reading.create(max_output_tokens=4000)
            await trio.sleep(5 * STEP_S)
            began = trio.current_time()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(gateway.drain, began + 3)
                events = await reading.until_ended()
                assert await reading.until_closed() == 1001
            assert trio.current_time() - began <= 3 + gateway.config.close_timeout + 0.1
            assert events[-1]["type"] == "response.failed"
            assert engine.statistics().num_requests_live == 0


async def test_an_old_connection_is_ended_with_a_code_to_come_back_on(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with chatting_engine() as engine:
        async with open_gateway(engine, GatewayConfig(connection_lifetime=5.0)) as gateway:
            async with connected(gateway) as client:
                assert await client.until_closed() == 1001
    assert [event["error"]["code"] for event in client.events] == ["websocket_connection_limit_reached"]


# --------------------------------------------------------------------------------------- resumption


async def test_a_resumed_answer_is_the_unbroken_one(autojump_clock: trio.testing.MockClock) -> None:
    async with chatting_engine() as engine, open_gateway(engine) as gateway:
        async with connected(gateway) as first:
            await first.create(seed=6, max_output_tokens=LONG, resumable=True, stream_id="a")
            while len(first.events) < 20:
                await first.next_events()
        before = first.events
        response_id = before[0]["response"]["id"]
        await trio.sleep(10)
        async with connected(gateway) as second:
            wish = {"response_id": response_id, "starting_after": before[-1]["sequence_number"]}
            await second.send({"type": "response.resume", "stream_id": "b", **wish})
            after = await second.until_ended()
            assert {event["stream_id"] for event in after} == {"b"}
            await second.create(previous_response_id=response_id, input="!")
            assert endings(await second.until_ended()) == [":response.incomplete"]
        assert_all_blocks_back(engine)
    numbers = [event["sequence_number"] for event in before + after]
    assert numbers == list(range(len(numbers)))
    assert text_of(before, "a") + text_of(after, "b") == expected_text("Hi", 6, LONG)


async def test_a_client_that_has_the_last_event_gets_no_other_one_and_keeps_its_lane(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with chatting_engine() as engine, open_gateway(engine) as gateway:
        async with connected(gateway) as first:
            await first.create(resumable=True, max_output_tokens=3)
            events = await first.until_ended()
        response_id, last = events[0]["response"]["id"], events[-1]["sequence_number"]
        async with connected(gateway) as second:
            resume = {"type": "response.resume", "response_id": response_id}
            await second.send({**resume, "starting_after": last})
            await second.create(max_output_tokens=1)
            assert (
                {event["response"]["id"] for event in await second.until_ended() if "response" in event}
                == {second.events[0]["response"]["id"]}
                != {response_id}
            )
            await second.send({**resume, "starting_after": last + 1})
            [refused] = await second.next_events()
            assert (refused["status"], refused["error"]["param"]) == (400, "starting_after")
            await second.create(max_output_tokens=1)
            assert endings(await second.until_ended()) == [":response.incomplete"]


async def test_a_resumable_answer_that_no_client_comes_back_for_is_aborted(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with chatting_engine() as engine:
        async with open_gateway(engine, GatewayConfig(resume_grace=5.0)) as gateway:
            async with connected(gateway) as client:
                await client.create(max_output_tokens=4000, resumable=True)
                response_id = (await client.next_events())[0]["response"]["id"]
            await trio.sleep(4.5)
            assert engine.statistics().num_requests_live == 1
            await trio.sleep(1)
            assert_all_blocks_back(engine)
            async with connected(gateway) as late:
                await late.send({"type": "response.resume", "response_id": response_id})
                [error] = await late.until_ended()
                assert error["error"]["code"] == "response_not_found"


async def test_an_answer_that_is_over_can_be_read_again_for_a_while(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with chatting_engine() as engine:
        async with open_gateway(engine, GatewayConfig(resume_grace=5.0)) as gateway:
            async with connected(gateway) as client:
                await client.create(resumable=True)
                events = await client.until_ended()
            async with connected(gateway) as second:
                wish = {"response_id": events[0]["response"]["id"], "starting_after": 6}
                await second.send({"type": "response.resume", **wish})
                assert await second.until_ended() == events[7:]


async def test_a_message_may_come_in_a_binary_frame(autojump_clock: trio.testing.MockClock) -> None:
    async with chatting_engine() as engine, open_gateway(engine) as gateway, connected(gateway) as client:
        wish = {"type": "response.create", "model": "triolet-nano", "input": "Hi", "max_output_tokens": 2}
        await client.stream.send_all(client.protocol.send(BytesMessage(data=json.dumps(wish).encode())))
        assert endings(await client.until_ended()) == [":response.incomplete"]


async def test_a_long_message_is_read_elsewhere_and_in_its_turn(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with chatting_engine() as engine, open_gateway(engine) as gateway, connected(gateway) as client:
        await client.create(input="Hi", chat_template_kwargs={"filler": "x" * LONG_INPUT_BYTES}, seed=1)
        await client.create(input="Ho", seed=2)
        events = await client.until_ended(2)
    texts = expected_text("Hi", 1, 8), expected_text("Ho", 2, 8)
    assert text_of(events) == "".join(texts)


async def test_a_cancelled_resumable_answer_holds_nothing(autojump_clock: trio.testing.MockClock) -> None:
    async with chatting_engine() as engine, open_gateway(engine) as gateway:
        async with connected(gateway) as client:
            await client.create(max_output_tokens=4000, resumable=True)
            await client.next_events()
            await client.send({"type": "response.cancel"})
            assert endings(await client.until_ended()) == [":response.incomplete"]
            await trio.sleep(2 * STEP_S)
            assert_all_blocks_back(engine)


async def test_another_key_resumes_nothing(autojump_clock: trio.testing.MockClock) -> None:
    config = GatewayConfig(api_keys=("one", "two"))
    async with chatting_engine() as engine, open_gateway(engine, config) as gateway:
        async with connected(gateway, authorization="Bearer one") as client:
            await client.create(max_output_tokens=4000, resumable=True)
            response_id = (await client.next_events())[0]["response"]["id"]
            async with connected(gateway, authorization="Bearer two") as other:
                await other.send({"type": "response.resume", "response_id": response_id})
                assert (await other.until_ended())[0]["error"]["code"] == "response_not_found"


async def test_a_bug_in_one_connection_ends_that_one_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with chatting_engine() as engine, open_gateway(engine) as gateway:
        async with connected(gateway) as good, connected(gateway) as bad:
            with monkeypatch.context() as patch:
                patch.setattr("triolet.server.responses.service.read_event", lambda *arguments: 1 / 0)
                await bad.create()
                assert await bad.until_closed() == 1011
            await good.create()
            assert endings(await good.until_ended()) == [":response.incomplete"]
    assert "a WebSocket failed" in caplog.text


async def test_open_websockets_their_closes_by_code_and_bytes_that_wait_are_counted(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with chatting_engine() as engine, open_gateway(engine) as gateway:
        async with connected(gateway) as client:
            await client.create()
            await client.until_ended()
            text = gateway.metrics.render().decode()
            assert "triolet:open_websockets 1.0" in text
            assert "triolet:send_queue_bytes 0.0" in text
            await client.stream.send_all(client.protocol.send(CloseConnection(code=1000)))
            await client.until_closed()
        async with connected(gateway):
            pass
        await trio.sleep(10)
        text = gateway.metrics.render().decode()
        assert "triolet:open_websockets 0.0" in text
        assert 'triolet:websocket_closes_total{code="1000"} 1.0' in text
        assert 'triolet:websocket_closes_total{code="1006"} 1.0' in text


async def test_every_refused_turn_is_counted_once_by_the_code_of_its_error(
    autojump_clock: trio.testing.MockClock,
) -> None:
    config = GatewayConfig(
        max_queued_responses=1, max_active_responses=1, max_active_per_key=1, api_keys=("plain",)
    )
    plain = {"Authorization": "Bearer plain"}
    async with chatting_engine() as engine:
        async with open_gateway(engine, config) as gateway:
            async with connected(gateway, **plain) as client, connected(gateway, **plain) as other:
                await client.create(stream_id="a", max_output_tokens=LONG)
                while not text_of(client.events, "a"):
                    await client.next_events()
                await client.create(stream_id="b")
                await client.create(stream_id="c")  # one more than may wait: refused by the session
                await other.create()  # one more than the key may have: refused by the service
                await other.create(model="unknown")  # an error, and no refusal
                await other.until_ended(2)
                await client.until_ended(3)
                await client.create(priority=-1)
                await client.until_ended()
            text = gateway.metrics.render().decode()
    refusals = dict(re.findall(r'gateway_rejections_total{reason="(\w+)"} (\S+)', text))
    assert refusals == {"rate_limit_exceeded": "2.0", "priority_not_allowed": "1.0"}
    assert 'triolet:http_responses_total{route="/v1/responses",status="101"} 2.0' in text


async def test_a_refused_handshake_is_counted_as_a_response_and_a_refusal(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with chatting_engine() as engine, open_gateway(engine) as gateway:
        await gateway.drain(trio.current_time())
        ours, theirs = trio.testing.memory_stream_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(gateway.serve_websocket, theirs)
            assert not await Client(ours).open()
        text = gateway.metrics.render().decode()
    assert 'triolet:http_responses_total{route="/v1/responses",status="503"} 1.0' in text
    assert 'triolet:gateway_rejections_total{reason="service_unavailable"} 1.0' in text
