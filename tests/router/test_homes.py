"""Responses that a router has not seen itself are found at the engine that has them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
import trio.testing

from tests.router.fake_fleet import (
    Answer,
    Asked,
    FakeEngine,
    Piece,
    error_answer,
    open_fleet,
    response_events,
)
from tests.router.test_http import storing
from tests.router.test_websocket import create, next_event

EVENTS = response_events("resp_b", "a", "b")


def owning(*known: str, key: str | None = None) -> FakeEngine:
    """Return an engine with these responses, which only one client may read if it has a key."""

    def is_there(response_id: object, authorization: str | None) -> bool:
        return response_id in known and (key is None or authorization == f"Bearer {key}")

    def answer(asked: Asked) -> Answer:
        payload = json.loads(asked.body or b"{}")
        wanted = payload.get("previous_response_id") or asked.target.partition("?")[0].split("/")[3]
        if not is_there(wanted, asked.key):
            return error_answer(404, "response_not_found")
        return Answer([json.dumps({"id": wanted}).encode()])

    def events(message: dict[str, Any]) -> list[Piece]:
        resumed = message.get("response_id")
        if (resumed or message.get("previous_response_id")) not in known:
            error = {"code": "response_not_found", "message": "There is none.", "param": "response_id"}
            return [json.dumps({"type": "error", "status": 404, "error": error})]
        first = message["starting_after"] + 1 if resumed else 0
        return [json.dumps(event) for event in EVENTS[first:]]

    return FakeEngine(answer=answer, events=events)


@pytest.mark.parametrize(
    ("method", "target", "payload"),
    [
        ("GET", "/v1/responses/resp_b", None),
        ("GET", "/v1/responses/resp_b?stream=true&starting_after=1", None),
        ("DELETE", "/v1/responses/resp_b", None),
        ("POST", "/v1/responses/resp_b/cancel", {}),
        ("POST", "/v1/responses", {"input": "y", "previous_response_id": "resp_b"}),
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
async def test_a_response_that_was_begun_before_the_router_was_started_is_found_at_its_engine(
    method: str,
    target: str,
    payload: Any,
    place: int,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: trio.testing.MockClock,
) -> None:
    engines = [owning("resp_b") if number == place else owning("resp_other") for number in range(3)]
    async with open_fleet(monkeypatch, *engines) as fleet:
        got = await fleet.ask(method, target, payload)
        assert (got.status, json.loads(got.body)["id"]) == (200, "resp_b")


@pytest.mark.parametrize("place", [0, 1, 2])
async def test_a_response_is_read_on_through_another_router_than_the_one_that_began_it(
    place: int, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    engines = [owning("resp_b") if number == place else owning("resp_other") for number in range(3)]
    async with open_fleet(monkeypatch, *engines) as fleet, fleet.websocket() as socket:
        resume = {"type": "response.resume", "response_id": "resp_b", "starting_after": 1}
        await socket.send(json.dumps(resume))
        assert [(await next_event(socket))["sequence_number"] for _ in range(2)] == [2, 3]
        await create(socket, previous_response_id="resp_b")
        assert [(await next_event(socket))["sequence_number"] for _ in range(4)] == [0, 1, 2, 3]


async def test_a_response_is_looked_for_with_the_key_of_the_client_that_asks(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    engines = [owning("resp_other"), owning("resp_b", key="k1")]
    async with open_fleet(monkeypatch, *engines) as fleet:
        for name, status in (("k2", 404), ("k1", 200)):
            got = await fleet.ask("GET", "/v1/responses/resp_b", headers={"authorization": f"Bearer {name}"})
            assert got.status == status


async def test_an_engine_that_hangs_keeps_no_response_of_another_one_from_being_found(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    hanging = FakeEngine(answer=lambda asked: Answer(after=trio.Event()))
    async with open_fleet(monkeypatch, hanging, owning("resp_b")) as fleet:
        began_s = trio.current_time()
        got = await fleet.ask("GET", "/v1/responses/resp_b")
        assert (got.status, trio.current_time() - began_s) == (200, 0)


async def test_what_is_no_id_of_a_response_is_asked_of_one_engine_alone(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    engines = [storing(name) for name in "ab"]
    async with open_fleet(monkeypatch, *engines) as fleet:
        for name in ("../models", "a b", "a?b", "x" * 200, ""):
            await fleet.ask("POST", "/v1/responses", {"input": "y", "previous_response_id": name})
        asked = [one.target for engine in engines for one in engine.asked if "responses" in one.target]
        assert asked == ["/v1/responses"] * 5
