"""Vendor events over HTTP: events of a response's stream, and chunks without choices of the older routes."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.actors.harness import STEP_S
from tests.server.routes.harness import HELLO, MODEL, Scene, serving, texts

RESPONSES, CHAT, TEXT = "/v1/responses", "/v1/chat/completions", "/v1/completions"
ASK = {"model": MODEL, "input": "HELLO", "max_output_tokens": 3, "seed": 1}
BODIES: dict[str, dict[str, Any]] = {
    RESPONSES: ASK,
    CHAT: {**HELLO, "max_tokens": 3, "seed": 1},
    TEXT: {"model": MODEL, "prompt": "HELLO", "max_tokens": 3, "seed": 1},
}


async def behind_another(scene: Scene, path: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream that has to wait for a request before it."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scene.call("POST", CHAT, {**HELLO, "max_tokens": 40}).run)
        await trio.sleep(2.5 * STEP_S)
        return (await scene.post(path, {**body, "stream": True})).events


def without_ids(chunks: list[Any]) -> list[Any]:
    """The chunks less what is different in every stream."""
    return [
        {name: value for name, value in chunk.items() if name not in ("id", "created")} for chunk in chunks
    ]


@pytest.mark.parametrize("with_gateway", [True, False])
async def test_a_streamed_response_tells_its_place_in_events_without_a_number(
    with_gateway: bool, autojump_clock: MockClock
) -> None:
    async with serving(max_num_seqs=1, with_gateway=with_gateway) as scene:
        events = await behind_another(scene, RESPONSES, {**ASK, "triolet_events": True})
        quiet = await behind_another(scene, RESPONSES, ASK)
    response_id = events[0]["response"]["id"]
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[2] == {"type": "triolet:queue", "position": 0, "response_id": response_id}
    others = [event for event in events if not event["type"].startswith("triolet:")]
    assert [event["sequence_number"] for event in others] == list(range(len(others)))
    assert [event["type"] for event in others] == [event["type"] for event in quiet]


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_chunk_without_choices_tells_the_place_of_an_older_route(
    path: str, autojump_clock: MockClock
) -> None:
    async with serving(max_num_seqs=1) as scene:
        events = await behind_another(scene, path, {**BODIES[path], "triolet_events": True})
        quiet = await behind_another(scene, path, BODIES[path])
    vendor = [event for event in events if "triolet" in event]
    assert vendor[0]["triolet"] == {"type": "triolet:queue", "position": 0}
    assert vendor == events[: len(vendor)]
    frame = {name: value for name, value in quiet[0].items() if name not in ("choices", "id", "created")}
    for chunk in vendor:
        assert chunk["choices"] == []
        assert chunk["id"] == events[-1]["id"]
        assert frame.items() <= chunk.items()
    assert without_ids(events[len(vendor) :]) == without_ids(quiet)
    if path == CHAT:
        assert texts(events) == texts(quiet) != ""


@pytest.mark.parametrize("path", [RESPONSES, CHAT, TEXT])
async def test_an_answer_that_is_not_streamed_can_tell_nothing(path: str, autojump_clock: MockClock) -> None:
    async with serving() as scene:
        answer = await scene.post(path, {**BODIES[path], "triolet_events": True})
        assert answer.error == (400, "invalid_value", "triolet_events")
        assert (await scene.post(path, {**BODIES[path], "triolet_events": False})).status == 200


async def test_the_place_of_several_prompts_is_refused(autojump_clock: MockClock) -> None:
    async with serving() as scene:
        body = {**BODIES[TEXT], "prompt": ["A", "B"], "stream": True}
        assert (await scene.post(TEXT, {**body, "triolet_events": True})).error == (
            400,
            "invalid_value",
            "triolet_events",
        )
        assert (await scene.post(TEXT, body)).status == 200
