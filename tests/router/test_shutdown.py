"""Streams of engines that shut down go on at an engine that takes them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
import trio.testing

from tests.router.fake_fleet import (
    Answer,
    FakeEngine,
    FakeFleet,
    Piece,
    Received,
    error_answer,
    open_fleet,
    response_events,
    sse,
)
from tests.router.test_websocket import create, dumped, next_event

SHUTTING_DOWN = Answer([b'{"error": {"message": "The server is shutting down."}}'], status=503)
READY = Answer([b"{}"])
CHUNKS = [
    {"id": "c", "created": 1, "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": reason}]}
    for text, reason in (("a", None), ("b", None), ("", "stop"))
]


def chunk(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


def cut_off(response_id: str) -> dict[str, Any]:
    """Return the event with which an engine ends a response because it shuts down."""
    first = response_events(response_id)[0]["response"]
    failed = {**first, "status": "failed", "finish_reason": "shutdown"}
    return {"type": "response.failed", "sequence_number": 2, "response": failed}


async def becomes(fleet: FakeFleet, *states: str) -> None:
    with trio.fail_after(60):
        while fleet.states() != list(states):
            await fleet.router.engines._changed.park()


@pytest.mark.parametrize("is_http", [True, False], ids=["http", "websocket"])
async def test_a_stream_of_an_engine_that_shuts_down_goes_on_at_one_that_comes_up_later(
    is_http: bool, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    begun = response_events("resp_1", "a")[:2]
    old = FakeEngine(
        answer=lambda asked: Answer([*map(sse, begun), trio.Event()]),
        events=lambda message: [*map(json.dumps, begun), trio.Event()],
    )
    new = FakeEngine(
        answer=lambda asked: Answer([*map(sse, response_events("resp_2", "ab"))]),
        events=lambda message: dumped("resp_2", "ab"),
        health=error_answer(503, "not_ready"),
    )
    async with open_fleet(monkeypatch, old, new) as fleet, fleet.websocket() as socket:
        received = Received()
        if is_http:
            payload = {"input": "x", "stream": True}
            fleet.nursery.start_soon(fleet.ask_into, received, "POST", "/v1/responses", payload)
        else:
            await create(socket)
            for _ in begun:
                await next_event(socket)
        await trio.testing.wait_all_tasks_blocked()
        old.health = SHUTTING_DOWN
        await becomes(fleet, "leaving", "draining")
        new.health = READY
        await becomes(fleet, "leaving", "up")
        up_s = trio.current_time()
        if is_http:
            await trio.testing.wait_all_tasks_blocked()
            events = received.events()[len(begun) :]
        else:
            events = [await next_event(socket) for _ in range(2)]
        assert [event["type"] for event in events] == ["response.output_text.delta", "response.completed"]
        assert (events[0]["delta"], events[1]["response"]["id"]) == ("b", "resp_1")
        assert trio.current_time() == up_s


@pytest.mark.parametrize("num_others", [0, 1])
async def test_a_response_that_its_engine_ends_because_it_shuts_down_goes_on(
    num_others: int, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """Without another engine it goes on at the same one, which has been started again."""
    answers: list[list[Piece]] = [
        dumped("resp_2", "ab"),
        [*dumped("resp_1", "a")[:2], json.dumps(cut_off("resp_1"))],
    ]
    engines = [FakeEngine(events=lambda message: answers.pop()) for _ in range(1 + num_others)]
    async with open_fleet(monkeypatch, *engines) as fleet, fleet.websocket() as socket:
        await create(socket)
        events = [await next_event(socket) for _ in range(4)]
        assert [event.get("delta") for event in events] == [None, "a", "b", None]
        assert [event["sequence_number"] for event in events] == [0, 1, 2, 3]
        assert (events[3]["type"], events[3]["response"]["id"]) == ("response.completed", "resp_1")


@pytest.mark.parametrize("at_once", [True, False], ids=["in one piece", "in pieces"])
@pytest.mark.parametrize(
    ("path", "events", "end"),
    [
        ("/v1/responses", [*map(sse, response_events("resp_1", "a", "b"))], sse(cut_off("resp_1"))),
        (
            "/v1/responses",  # one that its engine's next run would go on with
            [*map(sse, response_events("resp_1", "a", "b"))],
            sse({"type": "error", "code": "service_unavailable", "sequence_number": 1}),
        ),
        (
            "/v1/chat/completions",
            [*map(chunk, CHUNKS)],
            chunk({"error": {"code": "service_unavailable", "message": "It ends."}}),
        ),
    ],
)
async def test_a_stream_over_http_that_its_engine_ends_because_it_shuts_down_goes_on(
    path: str,
    events: list[bytes],
    end: bytes,
    at_once: bool,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: trio.testing.MockClock,
) -> None:
    last = b"data: [DONE]\n\n"
    cut = [*events[: len(events) - 2], end, last]
    pieces: list[Piece] = [b"".join(cut)] if at_once else [*cut]
    answers = [Answer([*events, last]), Answer(pieces)]
    engine = FakeEngine(answer=lambda asked: answers.pop())
    async with open_fleet(monkeypatch, engine) as fleet:
        streamed = await fleet.ask("POST", path, {"input": "x", "stream": True, "seed": 1})
        assert streamed.body.count(b"[DONE]") == 1
        assert (streamed.body.count(b'"a"'), streamed.body.count(b'"b"')) == (1, 1)
        assert b"shutdown" not in streamed.body
        assert b"service_unavailable" not in streamed.body
        if path == "/v1/responses":
            numbers = [event["sequence_number"] for event in streamed.events()]
            assert numbers == list(range(len(events)))


async def test_a_response_that_continues_one_of_an_engine_ends_with_that_engine(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    def events(message: dict[str, Any]) -> list[Piece]:
        if "previous_response_id" in message:
            return [*dumped("resp_2", "a")[:2], json.dumps(cut_off("resp_2"))]
        return dumped("resp_1", "a")

    engines = [FakeEngine(events=events) for _ in range(2)]
    async with open_fleet(monkeypatch, *engines) as fleet, fleet.websocket() as socket:
        await create(socket)
        for _ in range(3):
            await next_event(socket)
        await create(socket, previous_response_id="resp_1")
        told = [await next_event(socket) for _ in range(3)][-1]
        assert (told["type"], told["response"]["finish_reason"]) == ("response.failed", "shutdown")


async def test_a_client_has_all_that_came_before_the_place_where_another_answer_begins(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    def piece(index: int, text: str) -> bytes:
        return chunk({"id": "c", "created": 1, "choices": [{"index": index, "delta": {"content": text}}]})

    answers = [Answer([piece(0, "ab") + piece(1, "other")]), Answer([piece(0, "a"), piece(1, "x"), None])]
    engine = FakeEngine(answer=lambda asked: answers.pop())
    async with open_fleet(monkeypatch, engine) as fleet:
        streamed = await fleet.ask("POST", "/v1/chat/completions", {"stream": True, "n": 2})
        texts = [one["choices"][0]["delta"]["content"] for one in streamed.events() if "choices" in one]
        assert (texts, "error" in streamed.events()[-1]) == (["a", "x", "b"], True)
