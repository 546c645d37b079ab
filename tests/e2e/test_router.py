"""Clients of a router with three engines, of which one is killed, one shuts down and one stops answering."""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from contextlib import AbstractAsyncContextManager
from typing import Any

import openai
import pytest
import trio

from tests.e2e.fleet import Fleet, ended, events_of, open_fleet, text_of
from triolet.client.address import ServerAddress
from triolet.client.http import request
from triolet.client.websocket import ClientWebSocket, open_responses_socket

MODEL = "triolet-nano"

pytestmark = pytest.mark.slow


def payload_of(index: int, num_tokens: int = 200) -> dict[str, Any]:
    """Return a request with a seed; every second one is greedy."""
    return {
        "model": MODEL,
        "input": f"Tell me story number {index}, please.",
        "max_output_tokens": num_tokens,
        "temperature": 0.8 if index % 2 else 0.0,
        "seed": index,
        "ignore_eos": True,
    }


async def texts_of(url: str, count: int, begun: trio.Event | None = None) -> dict[int, list[dict[str, Any]]]:
    """Read the events of many responses at the same time; set the event when most have text."""
    events: dict[int, list[dict[str, Any]]] = {}
    num_begun = 0

    async def read(index: int) -> None:
        nonlocal num_begun
        mine = events[index] = []
        async with open_responses_socket(ServerAddress.of(url)) as socket:
            await socket.send(json.dumps({"type": "response.create", **payload_of(index)}))
            while not mine or not ended(mine[-1]):
                mine.append(json.loads(await socket.receive()))
                if mine[-1]["type"] == "response.output_text.delta" and len(mine) == 12:
                    num_begun += 1
                    if begun is not None and num_begun >= count // 2:
                        begun.set()

    async with trio.open_nursery() as nursery:
        for index in range(count):
            nursery.start_soon(read, index)
    return events


async def test_one_engine_is_killed_and_one_drained_under_64_streams_and_none_is_lost() -> None:
    with open_fleet(3, "--max-num-seqs", "16") as fleet:
        expected = {i: text_of(e) for i, e in (await texts_of(fleet.engines[2].url, 64)).items()}
        begun = trio.Event()
        found: dict[int, list[dict[str, Any]]] = {}

        async def disturb() -> None:
            await begun.wait()
            fleet.engines[0].process.kill()
            fleet.engines[1].process.send_signal(signal.SIGTERM)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(disturb)
            found = await texts_of(fleet.router.url, 64, begun)
            nursery.cancel_scope.cancel()
        assert begun.is_set()
        assert fleet.moved() > 0
        for index, events in found.items():
            assert events[-1]["type"] == "response.incomplete", events[-1]  # its tokens are used up
            assert text_of(events) == expected[index]
            numbered = [event for event in events if "sequence_number" in event]
            assert [event["sequence_number"] for event in numbered] == list(range(len(numbered)))
            assert len({event["response"]["id"] for event in events if "response" in event}) == 1
        states = [engine["state"] for engine in json.loads(fleet.router.get("/health"))["engines"]]
        assert states[0] == "down"
        assert states[2] == "up"


async def test_an_engine_that_answers_nothing_loses_its_streams_to_another_one() -> None:
    with open_fleet(2) as fleet:
        expected = {i: text_of(e) for i, e in (await texts_of(fleet.engines[1].url, 8)).items()}
        begun = trio.Event()

        async def stop() -> None:
            await begun.wait()
            fleet.engines[0].process.send_signal(signal.SIGSTOP)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(stop)
            found = await texts_of(fleet.router.url, 8, begun)
            nursery.cancel_scope.cancel()
        fleet.engines[0].process.send_signal(signal.SIGCONT)
        assert {i: text_of(e) for i, e in found.items()} == expected


def chat(url: str, *, stream: bool, index: int) -> str:
    """Ask for a chat completion with the official client."""
    messages: Any = [{"role": "user", "content": f"Tell me story number {index}."}]
    fields: dict[str, Any] = {
        "model": MODEL,
        "messages": messages,
        "max_tokens": 150,
        "temperature": 0.7,
        "seed": index,
    }
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        if not stream:
            return client.chat.completions.create(**fields).choices[0].message.content or ""
        with client.chat.completions.create(stream=True, **fields) as chunks:
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


@pytest.mark.parametrize("stream", [True, False])
async def test_http_answers_survive_the_death_of_their_engine(stream: bool) -> None:
    with open_fleet(2) as fleet:
        expected = [chat(fleet.engines[1].url, stream=False, index=index) for index in range(8)]
        answers: dict[int, str] = {}

        async def ask(index: int) -> None:
            answers[index] = await trio.to_thread.run_sync(
                lambda: chat(fleet.router.url, stream=stream, index=index)
            )

        async with trio.open_nursery() as nursery:
            for index in range(8):
                nursery.start_soon(ask, index)
            await trio.sleep(0.3)
            fleet.engines[0].process.kill()
        assert [answers[index] for index in range(8)] == expected


async def test_turns_of_a_conversation_go_to_the_engine_that_has_it() -> None:
    with open_fleet(2) as fleet:
        for _ in range(6):
            first = await events_of(fleet.router.url, payload_of(0, 8))
            response_id = first[-1]["response"]["id"]
            second = await events_of(
                fleet.router.url, {**payload_of(1, 8), "previous_response_id": response_id}
            )
            assert second[-1]["type"] == "response.incomplete", second[-1]
        assert read_json(fleet, f"/v1/responses/{response_id}")["id"] == response_id


async def test_a_cancel_reaches_the_engine_and_bad_requests_cost_other_requests_nothing() -> None:
    with open_fleet(2) as fleet:
        async with open_responses_socket(ServerAddress.of(fleet.router.url)) as socket:
            await socket.send("no JSON")
            assert json.loads(await socket.receive())["type"] == "error"
            await socket.send(json.dumps({"type": "response.create", "model": "no such", "input": "x"}))
            assert json.loads(await socket.receive())["error"]["code"] == "model_not_found"
            await socket.send(json.dumps({"type": "response.create", **payload_of(0, 1000)}))
            events = [json.loads(await socket.receive()) for _ in range(12)]
            response_id = events[0]["response"]["id"]
            await socket.send(json.dumps({"type": "response.cancel", "response_id": response_id}))
            while not ended(event := json.loads(await socket.receive())):
                pass
            assert event["response"]["status"] in ("cancelled", "incomplete")
        with pytest.raises(urllib.error.HTTPError) as caught:
            fleet.router.get("/is_sleeping")
        with caught.value:
            assert caught.value.code == 404


async def test_a_wrong_key_is_refused_as_the_engine_refuses_it() -> None:
    with open_fleet(1, "--api-keys", "secret") as fleet:
        events = await events_of(fleet.router.url, payload_of(0, 8), api_key="secret")
        assert ended(events[-1])
        with pytest.raises(Exception, match="answers 401"):
            await events_of(fleet.router.url, payload_of(0, 8), api_key="wrong")
        with pytest.raises(Exception, match="answers 401"):
            async with request(
                ServerAddress.of(fleet.router.url, "wrong"), "/chat/completions", {"model": MODEL}
            ):
                pass


async def test_a_router_that_ctrl_c_ends_fails_its_streams_first_and_exits_with_130(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRIOLET_GRACE_PERIOD", "5")
    with open_fleet(1) as fleet:
        async with open_responses_socket(ServerAddress.of(fleet.router.url)) as socket:
            await socket.send(json.dumps({"type": "response.create", **payload_of(0, 1800)}))
            events = [json.loads(await socket.receive()) for _ in range(3)]
            fleet.router.process.send_signal(signal.SIGINT)
            assert await refusal(fleet) == (503, "5")
            fleet.engines[0].process.send_signal(signal.SIGSTOP)  # the response does not end by itself
            while not ended(events[-1]):
                events.append(json.loads(await socket.receive()))
        assert events[-1]["type"] == "response.failed"
        assert await trio.to_thread.run_sync(fleet.router.process.wait, 300) == 130


async def refusal(fleet: Fleet) -> tuple[int, str]:
    """Return status and `Retry-After` of a router's first refusal; until then it answers."""
    while True:
        try:
            await trio.to_thread.run_sync(fleet.router.get, "/v1/models")
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.headers["retry-after"]


async def test_a_second_signal_ends_a_router_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIOLET_GRACE_PERIOD", "600")
    with open_fleet(1) as fleet:
        async with open_responses_socket(ServerAddress.of(fleet.router.url)) as socket:
            await socket.send(json.dumps({"type": "response.create", **payload_of(0, 1800)}))
            await socket.receive()
            fleet.router.process.send_signal(signal.SIGTERM)
            await refusal(fleet)  # two signals that wait together are one
            fleet.engines[0].process.send_signal(signal.SIGSTOP)  # the response does not end by itself
            fleet.router.process.send_signal(signal.SIGTERM)
            assert await trio.to_thread.run_sync(fleet.router.process.wait, 300) == 143


async def test_one_key_over_its_limit_of_connections_ends_no_stream_of_another_key() -> None:
    with open_fleet(1, "--api-keys", "k1,k2", "--max-connections-per-key", "1") as fleet:

        def socket_of(key: str) -> AbstractAsyncContextManager[ClientWebSocket]:
            return open_responses_socket(ServerAddress.of(fleet.router.url, key))

        async def turn(socket: ClientWebSocket, **fields: Any) -> None:
            await socket.send(json.dumps({"type": "response.create", **payload_of(0), **fields}))

        async def end(socket: ClientWebSocket) -> dict[str, Any]:
            event: dict[str, Any] = {"type": ""}
            while not ended(event):
                event = json.loads(await socket.receive())
            return event

        async with socket_of("k2") as victim, socket_of("k1") as first, socket_of("k1") as second:
            await turn(victim, max_output_tokens=3)
            response_id = (await end(victim))["response"]["id"]
            await turn(victim, previous_response_id=response_id, max_output_tokens=1700)
            await victim.receive()
            await turn(first, max_output_tokens=1800)
            await first.receive()
            await turn(second)
            refused = await end(second)
            assert (refused["type"], refused["status"]) == ("error", 429)
            assert (await end(victim))["type"] == "response.incomplete"
            assert (await end(first))["type"] == "response.incomplete"


def read_json(fleet: Fleet, path: str) -> Any:
    return json.loads(fleet.router.get(path))
