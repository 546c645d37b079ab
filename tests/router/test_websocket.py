"""Turns of a router's clients on WebSockets, before engines that answer from a script."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from tests.router.fake_fleet import (
    Answer,
    Asked,
    FakeEngine,
    FakeFleet,
    Piece,
    error_answer,
    open_fleet,
    response_events,
    sse,
)
from triolet.client.http import HttpError
from triolet.client.websocket import ClientWebSocket, ConnectionLost
from triolet.server.transport.input_limits import ROUTED_HEADER
from triolet.server.transport.parse_thread import LONG_INPUT_BYTES


async def create(socket: ClientWebSocket, **fields: Any) -> None:
    await socket.send(json.dumps({"type": "response.create", "model": "m", "input": "x", **fields}))


async def next_event(socket: ClientWebSocket) -> dict[str, Any]:
    with trio.fail_after(100):
        event: dict[str, Any] = json.loads(await socket.receive())
    return event


def dumped(response_id: str, *texts: str) -> list[Piece]:
    return [json.dumps(event) for event in response_events(response_id, *texts)]


@pytest.mark.parametrize(
    ("refused", "states"),
    [
        (error_answer(429, "rate_limit_exceeded", retry_after="7"), ["up"]),
        (error_answer(403, "priority_not_allowed"), ["up"]),
        (error_answer(401, "invalid_api_key"), ["up"]),
        (error_answer(500, "server_error"), ["up"]),
        (error_answer(503, "too_many_connections"), ["draining"]),
    ],
    ids=lambda value: str(getattr(value, "status", "")),
)
async def test_a_refusal_of_one_client_ends_no_other_clients_stream(
    refused: Any, states: list[str], monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    go_on = trio.Event()

    def events(message: dict[str, Any]) -> list[Piece]:
        first, *others = dumped("resp_1", "a", "b")
        return [first, go_on, *others] if "previous_response_id" in message else [first, *others]

    engine = FakeEngine(events=events, refusal=lambda key: refused if key == "Bearer k1" else None)
    async with (
        open_fleet(monkeypatch, engine) as fleet,
        fleet.websocket("k2") as victim,
        fleet.websocket("k1") as other,
    ):
        await create(victim)
        for _ in range(4):
            await next_event(victim)
        await create(victim, previous_response_id="resp_1")
        assert (await next_event(victim))["type"] == "response.created"
        seen = []
        fleet.router.engines.note_lost = lambda engine: seen.append("down")  # type: ignore[method-assign]
        await create(other, previous_response_id="resp_1")
        told = await next_event(other)
        code = json.loads(refused.pieces[0])["error"]["code"]
        assert (told["type"], told["status"], told["error"]["code"]) == ("error", refused.status, code)
        if refused.status == 429:
            assert told["error"]["retry_after"] == 7
        assert (fleet.states(), seen) == (states, [])
        go_on.set()
        assert [(await next_event(victim))["type"] for _ in range(3)][-1] == "response.completed"


async def test_a_reference_to_an_item_is_refused_on_a_websocket_and_the_next_turn_is_answered(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    engine = FakeEngine(events=lambda message: dumped("resp_1", "a"))
    async with open_fleet(monkeypatch, engine) as fleet, fleet.websocket() as socket:
        await create(socket, input=[{"type": "item_reference", "id": "msg_1"}], stream_id="lane")
        told = await next_event(socket)
        assert (told["error"]["code"], told["error"]["param"]) == ("unsupported_parameter", "input[0].type")
        assert told["stream_id"] == "lane"
        await create(socket)
        assert [(await next_event(socket))["type"] for _ in range(3)][-1] == "response.completed"


async def test_a_turn_that_a_busy_engine_refuses_with_503_goes_to_another_one(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    busy = FakeEngine(refusal=lambda key: error_answer(503, "too_many_connections"))
    free = FakeEngine(events=lambda message: dumped("resp_1", "a"))
    async with open_fleet(monkeypatch, busy, free) as fleet, fleet.websocket() as socket:
        await create(socket)
        assert [(await next_event(socket))["type"] for _ in range(3)][-1] == "response.completed"


@pytest.mark.parametrize(
    ("code", "status"), [(1009, 400), (1008, 400), (1013, 429), (1002, 400), (1007, 400)]
)
async def test_a_client_that_makes_an_engine_close_its_websocket_is_told_so_and_costs_no_other_one_anything(
    code: int, status: int, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    engines = [FakeEngine(events=lambda message: [code]) for _ in range(2)]
    async with open_fleet(monkeypatch, *engines) as fleet, fleet.websocket() as socket:
        await create(socket)
        told = await next_event(socket)
        assert (told["type"], told["status"]) == ("error", status)
        assert fleet.states() == ["up", "up"]


async def test_a_turn_at_an_engine_that_breaks_the_connection_goes_on_at_another_one_that_is_its_home_at_once(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    held = trio.Event()
    first, *others = dumped("resp_2", "abc")
    broken = FakeEngine(events=lambda message: [*dumped("resp_1", "a")[:2], None])
    whole = FakeEngine(events=lambda message: [first, held, *others])
    async with open_fleet(monkeypatch, broken, whole) as fleet, fleet.websocket() as socket:
        await create(socket)
        assert [(await next_event(socket))["type"] for _ in range(2)][-1] == "response.output_text.delta"
        await trio.testing.wait_all_tasks_blocked()
        home = fleet.router._homes.of("resp_1")
        assert home is not None
        assert (home.engine.number, home.response_id, home.is_moved) == (1, "resp_2", True)
        held.set()
        assert (await next_event(socket))["delta"] == "bc"
        assert (await next_event(socket))["type"] == "response.completed"


async def test_an_engine_that_is_refused_by_the_network_is_down(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    gone, left = FakeEngine(), FakeEngine(events=lambda message: dumped("resp_1", "a"))
    async with open_fleet(monkeypatch, gone, left) as fleet, fleet.websocket() as socket:
        gone.is_there = False
        await create(socket)
        assert [(await next_event(socket))["type"] for _ in range(3)][-1] == "response.completed"
        assert fleet.states() == ["down", "up"]


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"host": "evil.example"}, "host_not_allowed"),
        ({"origin": "https://evil.example"}, "origin_not_allowed"),
    ],
)
async def test_foreign_names_and_pages_get_no_websocket_of_a_router(
    headers: dict[str, str],
    code: str,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_fleet(monkeypatch, FakeEngine()) as fleet:
        status, error = await refused_upgrade(fleet, headers)
        assert (status, error["code"]) == (403, code)


async def refused_upgrade(fleet: FakeFleet, headers: dict[str, str]) -> tuple[int, dict[str, Any]]:
    """Ask for a WebSocket with further headers; return the status and the error."""
    ours, theirs = trio.testing.memory_stream_pair()
    fleet.nursery.start_soon(fleet.router.serve_websocket, theirs)
    named = {"host": "127.0.0.1:8000", "upgrade": "websocket", "connection": "Upgrade", **headers}
    named |= {"sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==", "sec-websocket-version": "13"}
    lines = "".join(f"{name}: {value}\r\n" for name, value in named.items())
    await ours.send_all(f"GET /v1/responses HTTP/1.1\r\n{lines}\r\n".encode())
    data = b""
    while more := await ours.receive_some():
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body[body.index(b"{") : body.rindex(b"}") + 1])["error"]


async def test_a_handshake_is_refused_as_the_engine_refuses_the_client(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_fleet(monkeypatch, FakeEngine(key="k"), key="k") as fleet:
        with pytest.raises(HttpError) as caught:
            async with fleet.websocket("wrong"):
                pass
        assert (caught.value.status, caught.value.error["code"]) == (401, "invalid_api_key")


async def test_a_websocket_ends_after_its_last_turn_when_the_router_drains(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    go_on = trio.Event()
    first, *others = dumped("resp_1", "a")
    engine = FakeEngine(events=lambda message: [first, go_on, *others])
    async with open_fleet(monkeypatch, engine) as fleet, fleet.websocket() as socket:
        await create(socket)
        await next_event(socket)
        [connection] = fleet.router._connections
        connection.drain()
        await create(socket, stream_id="b")
        assert (await next_event(socket))["error"]["code"] == "service_unavailable"
        metrics = (await fleet.ask("GET", "/metrics")).body.decode().splitlines()
        assert 'triolet:router_gateway_rejections_total{reason="service_unavailable"} 1.0' in metrics
        assert "triolet:router_open_websockets 1.0" in metrics
        go_on.set()
        assert [(await next_event(socket))["type"] for _ in range(2)][-1] == "response.completed"
        with pytest.raises(ConnectionLost) as caught:
            await next_event(socket)
        assert caught.value.close_code == 1001


async def test_a_turn_that_is_not_over_at_the_end_of_the_grace_period_ends_with_its_failure(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    engine = FakeEngine(events=lambda message: [*dumped("resp_1", "a")[:2], trio.Event()])
    async with open_fleet(monkeypatch, engine, grace_period=10.0) as fleet, fleet.websocket() as socket:
        await create(socket)
        for _ in range(2):
            await next_event(socket)
        monkeypatch.setattr(fleet.router._listener, "wait_for_ends", trio.sleep_forever)
        began_s = trio.current_time()
        fleet.nursery.start_soon(fleet.router.drain)
        failed = await next_event(socket)
        assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
        assert 5.0 <= trio.current_time() - began_s < 10.0
        with pytest.raises(ConnectionLost) as caught:
            await next_event(socket)
        assert caught.value.close_code == 1001


@pytest.mark.parametrize(
    ("engine_key", "keys", "names"),
    [
        (None, (None, None), ["10.0.0.1", "10.0.0.2"]),
        (None, ("EMPTY", "EMPTY"), ["10.0.0.1", "10.0.0.2"]),
        ("k", ("k", "k"), ["k", "k"]),
    ],
    ids=["no keys", "keys that no engine checks", "keys"],
)
async def test_limits_of_clients_with_keys_that_no_engine_checks_count_by_address(
    engine_key: str | None,
    keys: tuple[str | None, ...],
    names: list[str],
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: trio.testing.MockClock,
) -> None:
    addresses = iter(["10.0.0.1", "10.0.0.2"])
    monkeypatch.setattr("triolet.router.service.client_address", lambda stream: next(addresses))
    async with (
        open_fleet(monkeypatch, FakeEngine(key=engine_key), key=engine_key) as fleet,
        fleet.websocket(keys[0]),
        fleet.websocket(keys[1]),
    ):
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(one._socket.client for one in fleet.router._connections) == names


async def test_an_engine_that_hangs_when_it_is_asked_about_a_client_keeps_no_client_from_another_engine(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    held, go_on = dumped("resp_1", "a"), trio.Event()
    hanging = FakeEngine(events=lambda message: [held[0], go_on, *held[1:]])
    other = FakeEngine(events=lambda message: dumped("resp_2", "a"))
    async with open_fleet(monkeypatch, hanging, other) as fleet, fleet.websocket() as before:
        await create(before)
        assert (await next_event(before))["response"]["id"] == "resp_1"
        hanging.listing = trio.Event()
        with trio.fail_after(10):
            async with fleet.websocket() as socket:
                await create(socket)
                assert [(await next_event(socket))["type"] for _ in range(3)][-1] == "response.completed"
        go_on.set()
        assert [(await next_event(before))["type"] for _ in range(2)][-1] == "response.completed"


@pytest.mark.parametrize("over", ["websocket", "http"])
async def test_seeds_of_a_router_are_as_wide_as_an_engine_takes_them(
    over: str, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    seeds: list[int] = []

    def events(message: dict[str, Any]) -> list[Piece]:
        seeds.append(message["seed"])
        return dumped(f"resp_{len(seeds)}", "a")

    def answer(asked: Asked) -> Answer:
        seeds.append(json.loads(asked.body)["seed"])
        return Answer([b"data: [DONE]\n\n"])

    engine = FakeEngine(events=events, answer=answer)
    async with open_fleet(monkeypatch, engine) as fleet, fleet.websocket() as socket:
        for _ in range(64):
            if over == "http":
                await fleet.ask("POST", "/v1/completions", {"stream": True})
            else:
                await create(socket)
                for _ in range(3):
                    await next_event(socket)
    varied = 0
    for seed in seeds:
        varied |= seed ^ seeds[0]
    assert len(seeds) == 64 and varied.bit_count() >= 60


async def test_a_message_of_too_many_values_is_refused_and_the_connection_goes_on(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    engine = FakeEngine(events=lambda message: dumped("resp_1", "a"))
    async with open_fleet(monkeypatch, engine, max_json_values=20) as fleet, fleet.websocket() as socket:
        await create(socket, metadata=dict.fromkeys(map(str, range(20)), "x"))
        assert (await next_event(socket))["error"]["code"] == "json_too_large"
        await create(socket)
        assert [(await next_event(socket))["type"] for _ in range(3)][-1] == "response.completed"


async def test_a_long_message_is_parsed_in_the_parse_thread(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    num_parsed = 0

    async def in_thread(work: Callable[[], Any], client: str) -> Any:
        nonlocal num_parsed
        await trio.lowlevel.checkpoint()
        num_parsed += 1
        return work()

    monkeypatch.setattr("triolet.router.client_request.parse_in_thread", in_thread)
    got: list[str] = []

    def events(message: dict[str, Any]) -> list[Piece]:
        got.append(message["input"])
        return dumped("resp_1", "a")

    texts = ["x", "x" * LONG_INPUT_BYTES]
    async with open_fleet(monkeypatch, FakeEngine(events=events)) as fleet, fleet.websocket() as socket:
        for text in texts:
            await create(socket, input=text)
            for _ in range(3):
                await next_event(socket)
    assert (got, num_parsed) == (texts, 1)


def refusing(status: int, code: str, **fields: Any) -> Piece:
    """Return the event with which an engine refuses a message."""
    error = {"type": "a type", "code": code, "message": f"It is {code}.", "param": None, **fields}
    return json.dumps({"type": "error", "status": status, "error": error})


async def terminal_event(socket: ClientWebSocket) -> dict[str, Any]:
    """Return the last event of a turn."""
    ends = ("response.completed", "response.incomplete", "response.failed", "response.steer.failed", "error")
    while (event := await next_event(socket))["type"] not in ends:
        pass
    return event


@pytest.mark.parametrize("over", ["websocket", "http"])
@pytest.mark.parametrize(
    ("status", "code", "wait_s"), [(429, "rate_limit_exceeded", 7), (503, "service_unavailable", 0)]
)
async def test_a_stream_that_the_next_engine_refuses_for_now_goes_on_there_later(
    over: str,
    status: int,
    code: str,
    wait_s: int,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: trio.testing.MockClock,
) -> None:
    asked_s: list[float] = []

    def is_busy() -> bool:
        asked_s.append(trio.current_time())
        return len(asked_s) < 3

    def events(message: dict[str, Any]) -> list[Piece]:
        return [refusing(status, code, retry_after=7)] if is_busy() else dumped("resp_2", "abc")

    def answer(asked: Asked) -> Answer:
        if is_busy():
            return error_answer(status, code, retry_after="7")
        return Answer([sse(event) for event in response_events("resp_2", "abc")])

    first = response_events("resp_1", "a")[:2]
    broken = FakeEngine(
        events=lambda message: [*map(json.dumps, first), None],
        answer=lambda asked: Answer([*map(sse, first), None]),
    )
    busy = FakeEngine(events=events, answer=answer)
    async with open_fleet(monkeypatch, broken, busy) as fleet, fleet.websocket() as socket:
        if over == "http":
            got = (await fleet.ask("POST", "/v1/responses", {"input": "x", "stream": True})).events()
        else:
            await create(socket)
            got = [await next_event(socket) for _ in range(4)]
    assert [event.get("delta") for event in got] == [None, "a", "bc", None]
    assert got[-1]["type"] == "response.completed"
    assert wait_s <= asked_s[1] - asked_s[0] < 10


async def test_a_stream_that_an_engine_refuses_for_now_goes_on_at_once_at_an_engine_that_has_not(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    num_refused = 0

    def refuse(message: dict[str, Any]) -> list[Piece]:
        nonlocal num_refused
        num_refused += 1
        return [refusing(429, "rate_limit_exceeded", retry_after=7)]

    broken = FakeEngine(events=lambda message: [*dumped("resp_1", "a")[:2], None])
    busy, free = FakeEngine(events=refuse), FakeEngine(events=lambda message: dumped("resp_2", "ab"))
    async with open_fleet(monkeypatch, broken, busy, free) as fleet, fleet.websocket() as socket:
        # What waits at the third engine makes the second one the next to be chosen.
        fleet.router.engines._dispatcher.assign("other", 2, 10_000, 0.0)
        began_s = trio.current_time()
        await create(socket)
        assert (await terminal_event(socket))["type"] == "response.completed"
        assert (num_refused, trio.current_time() - began_s < 7) == (1, True)


@pytest.mark.parametrize(
    ("status", "code", "most"), [(429, "rate_limit_exceeded", 9), (400, "invalid_value", 1)]
)
async def test_a_stream_that_no_engine_goes_on_with_fails_and_its_lane_goes_on(
    status: int,
    code: str,
    most: int,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: trio.testing.MockClock,
) -> None:
    num_refused = 0

    def events(message: dict[str, Any]) -> list[Piece]:
        nonlocal num_refused
        if message["input"] == "another":
            return dumped("resp_2", "a")
        num_refused += 1
        return [refusing(status, code, retry_after=1)]

    broken = FakeEngine(events=lambda message: [*dumped("resp_1", "a")[:2], None])
    async with (
        open_fleet(monkeypatch, broken, FakeEngine(events=events)) as fleet,
        fleet.websocket() as socket,
    ):
        await create(socket)
        for _ in range(2):
            await next_event(socket)
        broken.is_there = False
        failed = await terminal_event(socket)
        assert (failed["type"], failed["response"]["id"]) == ("response.failed", "resp_1")
        assert 0 < num_refused <= most
        await create(socket, input="another")
        assert (await terminal_event(socket))["response"]["id"] == "resp_2"


STEER_FAILED: dict[str, Any] = {
    "type": "response.steer.failed",
    "sequence_number": 0,
    "error": {"code": "invalid_input"},
    "steer": {},
}


@pytest.mark.parametrize("late", [True, False], ids=["over", "active"])
async def test_a_steer_that_fails_ends_and_its_lane_goes_on(
    late: bool, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    def events(message: dict[str, Any]) -> list[Piece]:
        if message["type"] == "response.steer":
            return [json.dumps(STEER_FAILED), *([] if late else dumped("resp_1", "a", "b")[2:])]
        return dumped("resp_1", "a", "b")[: None if late or message["input"] == "another" else 2]

    async with open_fleet(monkeypatch, FakeEngine(events=events)) as fleet, fleet.websocket() as socket:
        await create(socket)
        for _ in range(4 if late else 2):
            await next_event(socket)
        await socket.send(
            json.dumps({"type": "response.steer", "previous_response_id": "resp_1", "input": "y"})
        )
        assert await terminal_event(socket) == STEER_FAILED
        if not late:
            assert (await terminal_event(socket))["type"] == "response.completed"
        await create(socket, input="another")
        assert (await terminal_event(socket))["type"] == "response.completed"


async def test_a_resume_without_further_events_ends_silently_and_its_lane_goes_on(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    def events(message: dict[str, Any]) -> list[Piece]:
        if message["type"] == "response.create":
            return dumped("resp_1", "a")
        if "response_id" not in message:
            return [refusing(400, "missing_required_parameter", param="response_id")]
        return [*dumped("resp_1", "a")[message["starting_after"] + 1 :]]

    async with open_fleet(monkeypatch, FakeEngine(events=events)) as fleet, fleet.websocket() as socket:
        for starting_after in (2, 1):
            resume = {
                "type": "response.resume",
                "response_id": "resp_1",
                "starting_after": starting_after,
                "stream_id": "b",
            }
            await socket.send(json.dumps(resume))
        assert [(await next_event(socket))["type"]] == ["response.completed"]
        await socket.send(json.dumps({"type": "response.resume", "stream_id": "b"}))
        assert (await next_event(socket))["error"]["param"] == "response_id"
        await create(socket, stream_id="b")
        assert [(await next_event(socket))["type"] for _ in range(3)][-1] == "response.completed"


@pytest.mark.parametrize("is_over", [False, True], ids=["active", "over"])
async def test_each_cancel_is_answered_by_the_end_of_its_response_or_by_an_error(
    is_over: bool, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    whole = dumped("resp_1", "a")
    ending = {"id": "resp_1", "status": "cancelled", "finish_reason": "abort"}
    cancelled = json.dumps({"type": "response.incomplete", "sequence_number": 2, "response": ending})
    too_late = refusing(404, "response_not_found", param="response_id")
    first: list[Piece] = [*whole[2:], too_late] if is_over else [cancelled]
    answers = iter([first, [too_late]])

    def events(message: dict[str, Any]) -> list[Piece]:
        if message["type"] == "response.cancel":
            return next(answers)
        return whole if message["input"] == "another" else whole[:2]

    async with open_fleet(monkeypatch, FakeEngine(events=events)) as fleet, fleet.websocket() as socket:
        await create(socket)
        for _ in range(2):
            await next_event(socket)
        for _ in range(2):
            await socket.send(json.dumps({"type": "response.cancel", "response_id": "resp_1"}))
        seen = [(await next_event(socket))["type"] for _ in range(2 + is_over)]
        end = "response.completed" if is_over else "response.incomplete"
        assert seen == [end, *["error"] * (1 + is_over)]
        await create(socket, input="another")
        assert (await terminal_event(socket))["type"] == "response.completed"


async def test_a_cancel_of_a_lane_does_not_end_a_response_of_another_one_that_has_not_begun(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    go_on = trio.Event()

    def events(message: dict[str, Any]) -> list[Piece]:
        if message["type"] == "response.cancel":
            return [refusing(404, "response_not_found", param="stream_id")]
        return [go_on, *dumped("resp_1", "a")]

    async with open_fleet(monkeypatch, FakeEngine(events=events)) as fleet, fleet.websocket() as socket:
        await create(socket, stream_id="a")
        await trio.testing.wait_all_tasks_blocked()
        await socket.send(json.dumps({"type": "response.cancel", "stream_id": "b"}))
        assert (await next_event(socket))["error"]["code"] == "response_not_found"
        go_on.set()
        assert (await terminal_event(socket))["type"] == "response.completed"


async def test_a_cancel_of_a_response_that_moves_comes_to_its_next_engine_when_that_has_caught_up(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    end, cancelled = trio.Event(), []
    ending = {"id": "resp_2", "created_at": 1, "status": "cancelled", "finish_reason": "abort"}

    def events(message: dict[str, Any]) -> list[Piece]:
        if message["type"] == "response.create":
            return dumped("resp_2", "ab")[:2]
        cancelled.append(message["response_id"])
        return [json.dumps({"type": "response.incomplete", "sequence_number": 2, "response": ending})]

    broken = FakeEngine(events=lambda message: [*dumped("resp_1", "a")[:2], end, None])
    next_one = FakeEngine(events=events, is_there=False)
    async with open_fleet(monkeypatch, broken, next_one) as fleet, fleet.websocket() as socket:
        await create(socket)
        for _ in range(2):
            await next_event(socket)
        broken.is_there = False
        end.set()
        await trio.testing.wait_all_tasks_blocked()
        await socket.send(json.dumps({"type": "response.cancel", "response_id": "resp_1"}))
        await trio.testing.wait_all_tasks_blocked()
        next_one.is_there = True
        assert (await next_event(socket))["delta"] == "b"
        told = await next_event(socket)
        assert (told["type"], told["response"]["id"]) == ("response.incomplete", "resp_1")
        assert cancelled == ["resp_2"]


@pytest.mark.parametrize("seed", [None, -1])
@pytest.mark.parametrize("over", ["websocket", "http"])
async def test_a_request_that_leaves_its_seed_to_the_engine_gets_one_of_the_router(
    seed: int | None, over: str, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    seeds: list[int] = []

    def events(message: dict[str, Any]) -> list[Piece]:
        seeds.append(message["seed"])
        return dumped("resp_1", "a")

    def answer(asked: Asked) -> Answer:
        seeds.append(json.loads(asked.body)["seed"])
        return Answer([b"data: [DONE]\n\n"])

    engine = FakeEngine(events=events, answer=answer)
    async with open_fleet(monkeypatch, engine) as fleet, fleet.websocket() as socket:
        if over == "http":
            await fleet.ask("POST", "/v1/chat/completions", {"stream": True, "seed": seed})
        else:
            await create(socket, seed=seed)
            await terminal_event(socket)
    assert len(seeds) == 1 and seeds[0] >= 0


async def test_trace_headers_of_a_websocket_come_to_each_engine_that_computes_a_response_of_it(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    trace = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "x=y"}
    broken = FakeEngine(events=lambda message: [*dumped("resp_1", "a")[:2], None])
    whole = FakeEngine(events=lambda message: dumped("resp_2", "ab"))
    async with (
        open_fleet(monkeypatch, broken, whole) as fleet,
        fleet.websocket(headers={**trace, "x-other": "1"}) as socket,
    ):
        await create(socket)
        assert (await terminal_event(socket))["type"] == "response.completed"
    for engine in (broken, whole):
        [headers] = engine.upgrades
        assert {name: value for name, value in headers.items() if name.startswith(("trace", "x-"))} == {
            **trace,
            ROUTED_HEADER: "1",
        }


@attrs.define(eq=False)
class LocalEngine:
    """Engine that continues a response on its own WebSocket alone, as one with `store: false`."""

    held: dict[str, trio.Event] = attrs.field(factory=dict)  # by input
    num_responses: int = 0

    def session(self) -> Callable[[dict[str, Any]], list[Piece]]:
        """Return the answers on one WebSocket."""
        mine: set[str] = set()

        def events(message: dict[str, Any]) -> list[Piece]:
            if message["type"] == "response.resume":
                return [refusing(400, "missing_required_parameter", param="response_id")]
            if message["input"] == "close":
                return [1000]
            previous = message.get("previous_response_id")
            if previous is not None and previous not in mine:
                return [refusing(400, "previous_response_not_found")]
            self.num_responses += 1
            response_id = f"resp_{self.num_responses}"
            mine.add(response_id)
            first, *others = dumped(response_id, "a")
            waits = [self.held[message["input"]]] if message["input"] in self.held else []
            return [first, *waits, *others, *([1001] if message["input"] == "last" else [])]

        return events


def local_engine(script: LocalEngine | None = None) -> FakeEngine:
    return FakeEngine(session=(script or LocalEngine()).session)


async def response_id_of(socket: ClientWebSocket, **fields: Any) -> str:
    """Ask for a response that is not stored; return its id."""
    await create(socket, store=False, **fields)
    end = await terminal_event(socket)
    assert end["type"] == "response.completed", end
    response_id: str = end["response"]["id"]
    return response_id


async def test_a_response_that_is_not_stored_is_continued_on_its_connection_and_on_no_other_one(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    async with (
        open_fleet(monkeypatch, local_engine(), local_engine(), ping_interval=1000.0) as fleet,
        fleet.websocket() as socket,
        fleet.websocket() as other,
    ):
        first = await response_id_of(socket)
        second = await response_id_of(socket, previous_response_id=first)
        # Idle for longer than an unanswered WebSocket lives.
        await trio.sleep(100)
        for previous in (first, second):
            await response_id_of(socket, previous_response_id=previous, stream_id="b")
        await socket.send(json.dumps({"type": "response.resume", "previous_response_id": []}))
        assert (await next_event(socket))["error"]["param"] == "response_id"
        await create(other, previous_response_id=first)
        assert (await next_event(other))["error"]["code"] == "previous_response_not_found"


async def test_responses_of_a_lane_that_are_not_stored_share_one_websocket_of_their_engine(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_fleet(monkeypatch, engine := local_engine()) as fleet, fleet.websocket() as socket:
        ids = [await response_id_of(socket) for _ in range(5)]
        assert len(engine.upgrades) == 1
        await response_id_of(socket, previous_response_id=ids[0])
        await create(socket)
        await terminal_event(socket)
        await trio.testing.wait_all_tasks_blocked()
        assert (len(engine.upgrades), engine.num_websockets) == (2, 1)
    assert engine.num_websockets == 0


async def test_two_turns_that_continue_one_response_that_is_not_stored_come_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    script = LocalEngine(held={"slow": trio.Event()})
    async with open_fleet(monkeypatch, local_engine(script)) as fleet, fleet.websocket() as socket:
        first = await response_id_of(socket)
        further = {"previous_response_id": first, "store": False}
        await create(socket, input="slow", stream_id="b", **further)
        assert (await next_event(socket))["type"] == "response.created"
        await create(socket, stream_id="c", **further)
        # A turn that continues nothing does not wait for them.
        await response_id_of(socket)
        script.held["slow"].set()
        ends = [await terminal_event(socket) for _ in range(2)]
        assert [(end["type"], end["response"]["id"]) for end in ends] == [
            ("response.completed", "resp_2"),
            ("response.completed", "resp_4"),
        ]


async def test_a_response_that_is_not_stored_is_gone_when_its_engine_has_closed_its_websocket(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_fleet(monkeypatch, local_engine()) as fleet, fleet.websocket() as socket:
        idle = await response_id_of(socket, input="last")
        await trio.testing.wait_all_tasks_blocked()
        await create(socket, previous_response_id=idle)
        assert (await terminal_event(socket))["error"]["code"] == "previous_response_not_found"
        assert fleet.states() == ["up"]
        first = await response_id_of(socket)
        await create(socket, input="close", store=False, previous_response_id=first)
        assert (await terminal_event(socket))["error"]["code"] == "service_unavailable"
        await create(socket, previous_response_id=first)
        assert (await terminal_event(socket))["error"]["code"] == "previous_response_not_found"


async def test_a_response_on_a_websocket_that_an_engine_closes_for_its_age_goes_on_at_another_one(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    old = [*dumped("resp_1", "a")[:2], refusing(400, "websocket_connection_limit_reached"), 1001]
    new = FakeEngine(events=lambda message: dumped("resp_2", "ab"))
    async with (
        open_fleet(monkeypatch, FakeEngine(events=lambda message: old), new) as fleet,
        fleet.websocket() as socket,
    ):
        await create(socket)
        seen = [await next_event(socket) for _ in range(4)]
        assert [event.get("delta") for event in seen] == [None, "a", "b", None]
        assert seen[-1]["type"] == "response.completed"


async def test_two_tasks_may_send_on_one_websocket_of_the_client_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_fleet(monkeypatch, local_engine()) as fleet, fleet.websocket() as socket:
        async with trio.open_nursery() as nursery:
            for lane in ("a", "b"):
                nursery.start_soon(partial(create, socket, stream_id=lane))
        ends = [await terminal_event(socket) for _ in range(2)]
    assert [end["type"] for end in ends] == ["response.completed"] * 2
