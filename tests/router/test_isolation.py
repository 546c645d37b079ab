"""What one client wants, or this machine lacks, costs no other client of a router anything."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
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
    Received,
    error_answer,
    open_fleet,
    response_events,
)
from triolet.client.http import HttpError
from triolet.client.websocket import ClientWebSocket
from triolet.protocol.json.parsing import JsonLimits
from triolet.router import run
from triolet.router.client_request import RoutedPrompt, parsed_request
from triolet.router.engines import Engines, EngineState, RoutedEngine

CHAT = "/v1/chat/completions"


def chunk(text: str) -> bytes:
    choice = {"index": 0, "delta": {"content": text}}
    return b"data: %s\n\n" % json.dumps({"id": "c", "created": 1, "choices": [choice]}).encode()


def last_chunk() -> bytes:
    choice = {"index": 0, "delta": {}, "finish_reason": "stop"}
    return (
        b"data: %s\n\ndata: [DONE]\n\n" % json.dumps({"id": "c", "created": 1, "choices": [choice]}).encode()
    )


def text_of(received: Received) -> str:
    choices = [choice for event in received.events() for choice in event.get("choices", ())]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def streaming(go_on: trio.Event, *, breaks: str = "") -> Callable[[Asked], Answer]:
    """Return the answers of an engine: a stream that goes on with an event, or breaks for a message of this text."""

    def answer(asked: Asked) -> Answer:
        if breaks and breaks in asked.body.decode():
            return Answer([chunk("a"), None])
        return Answer([chunk("a"), go_on, chunk("b"), last_chunk()])

    return answer


def begin(fleet: FakeFleet, text: str = "x") -> Received:
    """Ask for a stream in a task of its own; return what has come of it."""
    received = Received()
    payload = {"messages": [{"role": "user", "content": text}], "stream": True}
    fleet.nursery.start_soon(fleet.ask_into, received, "POST", CHAT, payload)
    return received


async def test_a_shortage_of_descriptors_at_the_router_refuses_the_request_and_ends_no_stream(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    go_on = trio.Event()
    engines = [FakeEngine(answer=streaming(go_on)) for _ in range(2)]
    async with open_fleet(monkeypatch, *engines) as fleet:
        streams = [begin(fleet) for _ in range(4)]
        await trio.testing.wait_all_tasks_blocked()
        fleet.has_descriptors = False
        refused = await fleet.ask("POST", CHAT, {"messages": [], "stream": True})
        assert (refused.status, refused.code) == (503, "resource_shortage")
        await trio.sleep(10)  # the checks find no descriptor either
        assert fleet.states() == ["up", "up"]
        fleet.has_descriptors = True
        go_on.set()
        await trio.sleep(1)
        assert [text_of(stream) for stream in streams] == ["ab"] * 4
        assert [engine.num_asked(CHAT) for engine in engines] == [2, 2]


async def test_a_shortage_of_descriptors_at_the_router_refuses_a_turn_on_a_websocket_and_a_handshake(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_fleet(monkeypatch, FakeEngine()) as fleet, fleet.websocket() as socket:
        fleet.has_descriptors = False
        await socket.send(json.dumps({"type": "response.create", "model": "m", "input": "x"}))
        told = json.loads(await socket.receive())
        assert (told["status"], told["error"]["code"]) == (503, "resource_shortage")
        with pytest.raises(HttpError) as refused:
            async with fleet.websocket():
                raise AssertionError
        assert (refused.value.status, refused.value.error["code"]) == (503, "resource_shortage")
        assert fleet.states() == ["up"]


async def test_a_stream_that_moves_while_there_are_no_descriptors_goes_on_when_there_are(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    break_it, go_on = trio.Event(), trio.Event()
    go_on.set()
    broken = FakeEngine(answer=lambda asked: Answer([chunk("a"), break_it, None]))
    async with open_fleet(monkeypatch, broken, FakeEngine(answer=streaming(go_on))) as fleet:
        stream = begin(fleet)
        await trio.testing.wait_all_tasks_blocked()
        fleet.has_descriptors = False
        break_it.set()
        await trio.sleep(3)
        fleet.has_descriptors = True
        await trio.sleep(5)
        assert text_of(stream) == "ab"


async def test_an_engine_that_breaks_one_connection_keeps_its_other_streams_and_is_up_at_once(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    go_on = trio.Event()
    engines = [FakeEngine(answer=streaming(go_on, breaks="poison")) for _ in range(2)]
    async with open_fleet(monkeypatch, *engines) as fleet:
        streams = [begin(fleet) for _ in range(4)]
        await trio.testing.wait_all_tasks_blocked()
        begin(fleet, "poison")
        await trio.testing.wait_all_tasks_blocked()
        assert fleet.states() == ["up", "up"]
        go_on.set()
        await trio.sleep(1)
        assert [text_of(stream) for stream in streams] == ["ab"] * 4
        assert (
            sum(
                "poison" not in asked.body.decode()
                for asked in engines[0].asked + engines[1].asked
                if asked.target == CHAT
            )
            == 4
        )


async def test_an_engine_that_breaks_a_connection_and_answers_no_check_loses_its_other_streams_at_once(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    go_on = trio.Event()
    lost = FakeEngine(answer=streaming(trio.Event(), breaks="last"))
    async with open_fleet(monkeypatch, lost, FakeEngine(answer=streaming(go_on))) as fleet:
        streams = [begin(fleet) for _ in range(3)]
        await trio.testing.wait_all_tasks_blocked()
        # The machine is gone: nothing ends its other connections.
        await trio.sleep(0.3)
        lost.is_there = False
        fleet.router.engines.note_lost(fleet.router.engines.all[0])
        go_on.set()
        await trio.sleep(0.1)  # before the next check that would have been made anyway
        assert [text_of(stream) for stream in streams] == ["ab"] * 3
        assert fleet.states() == ["down", "up"]


async def test_a_stream_that_breaks_each_connection_is_tried_again_with_pauses_and_fails(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    engines = [FakeEngine(answer=streaming(trio.Event(), breaks="poison")) for _ in range(2)]
    async with open_fleet(monkeypatch, *engines) as fleet:
        began_s = trio.current_time()
        stream = Received()
        payload = {"messages": [{"role": "user", "content": "poison"}], "stream": True}
        await fleet.ask_into(stream, "POST", CHAT, payload)
        assert stream.events()[-1]["error"]["code"] == "service_unavailable"
        assert sum(engine.num_asked(CHAT) for engine in engines) == 9
        assert trio.current_time() - began_s >= 3


@pytest.mark.parametrize("code", ["model_too_large", "model_load_failed", "resource_shortage"])
async def test_a_refusal_that_is_about_one_request_pauses_no_engine(
    code: str, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    engines = [FakeEngine(answer=lambda asked: error_answer(503, code)) for _ in range(3)]
    async with open_fleet(monkeypatch, *engines) as fleet:
        refused = await fleet.ask("POST", CHAT, {"messages": [], "model": "big"})
        assert (refused.status, refused.code) == (503, code)
        assert [engine.num_asked(CHAT) for engine in engines] == [1, 1, 1]
        assert fleet.states() == ["up"] * 3


async def test_an_engine_that_is_full_is_paused_and_the_request_goes_to_another_one(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    full = FakeEngine(answer=lambda asked: error_answer(503, "too_many_connections"))
    async with open_fleet(monkeypatch, full, FakeEngine()) as fleet:
        assert (await fleet.ask("POST", CHAT, {"messages": []})).status == 200
        assert fleet.states() == ["draining", "up"]


async def test_a_request_that_goes_on_at_another_engine_is_counted_once_for_each_other_one(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    engine = FakeEngine(answer=streaming(trio.Event(), breaks="poison"))
    async with open_fleet(monkeypatch, engine) as fleet:
        await fleet.ask_into(Received(), "POST", CHAT, {"prompt": "poison", "stream": True})
        metrics = (await fleet.ask("GET", "/metrics")).body.decode()
        assert "triolet:router_moved_requests_total 0.0" in metrics


async def create(socket: ClientWebSocket, text: str, **fields: Any) -> None:
    await socket.send(json.dumps({"type": "response.create", "model": "m", "input": text, **fields}))


async def next_code(socket: ClientWebSocket) -> str:
    """Return the code of the next error."""
    with trio.fail_after(100):
        while (event := json.loads(await socket.receive()))["type"] != "error":
            pass
    code: str = event["error"]["code"]
    return code


async def completed(socket: ClientWebSocket) -> None:
    """Wait until a response is whole."""
    with trio.fail_after(100):
        while json.loads(await socket.receive())["type"] != "response.completed":
            pass


async def test_turns_that_wait_on_a_websocket_take_no_more_memory_than_at_an_engine(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    go_on = trio.Event()

    def events(message: dict[str, Any]) -> list[Piece]:
        first, *others = map(json.dumps, response_events("resp_1", "a"))
        return [first, go_on, *others]

    async with (
        open_fleet(monkeypatch, FakeEngine(events=events), max_message_bytes=2048) as fleet,
        fleet.websocket() as socket,
    ):
        await create(socket, "x" * 1900)
        for _ in range(5):  # 4 of the longest messages may wait
            await create(socket, "x" * 1900)
        assert await next_code(socket) == "rate_limit_exceeded"
        go_on.set()
        for _ in range(5):
            await completed(socket)
        await create(socket, "x" * 1900)  # there is room again
        await completed(socket)


async def test_messages_about_a_turn_that_no_engine_has_got_take_bounded_memory(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    engine = FakeEngine()
    async with (
        open_fleet(monkeypatch, engine, max_message_bytes=2048) as fleet,
        fleet.websocket() as socket,
    ):
        fleet.router.engines.note_not_ready(fleet.router.engines.all[0])
        engine.health = error_answer(503, "sleeping")
        await create(socket, "x")
        for _ in range(5):
            await socket.send(json.dumps({"type": "response.cancel", "note": "x" * 1900}))
        assert await next_code(socket) == "rate_limit_exceeded"


async def test_steers_of_a_long_turn_are_forgotten_when_its_engine_has_got_them(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    got: list[str] = []

    def events(message: dict[str, Any]) -> list[Piece]:
        if message["type"] == "response.create":
            return [json.dumps(event) for event in response_events("resp_1", "a")[:2]]
        got.append(message["input"])
        return []

    async with (
        open_fleet(monkeypatch, FakeEngine(events=events), max_message_bytes=2048) as fleet,
        fleet.websocket() as socket,
    ):
        await create(socket, "x")
        await socket.receive()
        texts = [f"{number} " + "x" * 1500 for number in range(300)]
        for text in texts:
            await socket.send(
                json.dumps({"type": "response.steer", "previous_response_id": "resp_1", "input": text})
            )
        await trio.testing.wait_all_tasks_blocked()
        assert got == texts


def test_a_router_has_as_many_descriptors_as_the_system_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    interval_s = sys.getswitchinterval()
    seen: list[int] = []

    def serve(*args: object, **options: object) -> None:
        seen.append(resource.getrlimit(resource.RLIMIT_NOFILE)[0])

    monkeypatch.setattr(trio, "run", serve)
    monkeypatch.setattr("triolet.router.run.StopSignals", _NoSignals)
    monkeypatch.setattr("triolet.router.run.Router", lambda *args: None)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        run.run([], None)  # type: ignore[arg-type]
        assert seen == [hard]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        sys.setswitchinterval(interval_s)


class _NoSignals:
    def raise_for_interrupt(self) -> None:
        pass


async def test_of_a_request_that_an_engine_answers_its_text_is_kept_and_not_what_was_parsed(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    placed: list[RoutedPrompt] = []

    def place(engines: Engines, name: str, prompt: RoutedPrompt, *refused: Any) -> RoutedEngine | None:
        placed.append(prompt)
        return choose(engines, name, prompt, *refused)

    choose = Engines.place
    monkeypatch.setattr(Engines, "place", place)
    payload = {"type": "response.create", "input": "x" * 1000, "store": True, "tools": [{"name": "t" * 100}]}
    engine = FakeEngine(events=lambda message: [trio.Event()])
    async with open_fleet(monkeypatch, engine) as fleet, fleet.websocket() as socket:
        await socket.send(json.dumps(payload))
        await trio.testing.wait_all_tasks_blocked()
        [connection] = fleet.router._connections
        [turn] = connection._lanes[None]
        assert turn.payload == {"type": "response.create", "store": True}
        await fleet.ask("POST", "/v1/embeddings", payload)
    assert placed == [RoutedPrompt.of("x" * 1000)] * 2
    assert len(placed[0].hashes) == 3  # of 256 characters each


async def test_prompts_of_different_keys_have_no_beginning_in_common(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    body = json.dumps({"input": "x" * 1000})
    limits = JsonLimits(max_values=100, max_members=100, max_depth=10)
    first, again, other = [await parsed_request(body, limits, "c", key) for key in ("a", "a", "b")]
    assert first.prompt == again.prompt
    assert not set(first.prompt.hashes) & set(other.prompt.hashes)


@attrs.define(eq=False)
class Ending(Received):
    """Answer whose engine is found to be down in the moment in which its last piece is sent."""

    down: Callable[[], None] = lambda: None
    num_ends: int = 0

    async def take(self, message: dict[str, Any]) -> None:
        await Received.take(self, message)
        if message["type"] == "http.response.body" and not message["more_body"]:
            self.num_ends += 1
            self.down()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_of_an_engine_that_is_down_when_all_of_it_is_sent_is_not_computed_again(
    stream: bool, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    go_on = trio.Event()
    go_on.set()
    answers = streaming(go_on) if stream else lambda asked: Answer([b'{"id": "c"}'])
    engines = [FakeEngine(answer=answers) for _ in range(2)]
    async with open_fleet(monkeypatch, *engines) as fleet:

        def down() -> None:
            for engine in fleet.router.engines.all:
                fleet.router.engines._become(engine, EngineState.DOWN)

        received = Ending(down=down)
        await fleet.ask_into(received, "POST", CHAT, {"messages": [], "stream": stream})
        assert (received.status, received.num_ends) == (200, 1)
        assert sum(engine.num_asked(CHAT) for engine in engines) == 1


@attrs.define(eq=False)
class Slow(Received):
    """Answer to a client that reads nothing for a while: of a piece whose sending is broken off it gets nothing."""

    reads: trio.Event = attrs.field(factory=trio.Event)

    async def take(self, message: dict[str, Any]) -> None:
        if self.body:  # the first piece fits into its buffers
            await self.reads.wait()
        await Received.take(self, message)


async def test_a_client_that_is_slow_to_read_loses_nothing_when_its_engine_is_lost(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    chunks = [chunk(letter) for letter in "abc"]
    lost = FakeEngine(answer=lambda asked: Answer([*chunks, trio.Event()]))
    whole = FakeEngine(answer=lambda asked: Answer([*chunks, chunk("d"), last_chunk()]))
    async with open_fleet(monkeypatch, lost, whole) as fleet:
        received = Slow()
        fleet.nursery.start_soon(fleet.ask_into, received, "POST", CHAT, {"messages": [], "stream": True})
        await trio.testing.wait_all_tasks_blocked()
        assert text_of(received) == "a"
        lost.is_there = False
        await trio.sleep(10)
        assert fleet.states() == ["down", "up"]
        received.reads.set()
        await trio.sleep(1)
        assert text_of(received) == "abcd"
        assert received.body.endswith(b"data: [DONE]\n\n")
