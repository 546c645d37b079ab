"""Inputs of responses: how many tokens they have, and references to stored items in them."""

from __future__ import annotations

from typing import Any

import pytest
from trio.testing import MockClock

from tests.server.responses.websocket_client import connected
from tests.server.routes.harness import MODEL, Scene, serving
from triolet.config.server import GatewayConfig
from triolet.protocol.responses import store

RESPONSES = "/v1/responses"
COUNT = f"{RESPONSES}/input_tokens"
ASK: dict[str, Any] = {"model": MODEL, "max_output_tokens": 4, "seed": 1}
KEYS = GatewayConfig(api_keys=("one", "two"))
ONE, TWO = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))


def reference(item_id: str) -> dict[str, str]:
    return {"type": "item_reference", "id": item_id}


async def made(scene: Scene, text: Any = "HELLO", **more: Any) -> dict[str, Any]:
    """Return a response to a text."""
    headers = more.pop("headers", None)
    answer = await scene.post(RESPONSES, {**ASK, "input": text, **more}, headers=headers)
    response: dict[str, Any] = answer.json
    assert answer.status == 200, response
    return response


@pytest.mark.parametrize(
    "fields",
    [
        {"input": "HELLO"},
        {"input": [{"role": "user", "content": "HELLO"}, {"role": "assistant", "content": "A"}]},
        {"input": "HELLO", "instructions": "AB"},
        {"input": "HELLO", "model": None},
    ],
    ids=str,
)
async def test_the_tokens_of_an_input_are_counted_as_the_response_counts_them(
    fields: dict[str, Any], autojump_clock: MockClock
) -> None:
    async with serving() as scene:
        counted = await scene.post(COUNT, fields)
        response = (await scene.post(RESPONSES, {**ASK, **fields})).json
        assert scene.engine.statistics().num_requests_live == 0
    assert counted.json == {
        "object": "response.input_tokens",
        "input_tokens": response["usage"]["input_tokens"],
    }


async def test_the_tokens_of_earlier_turns_and_of_referenced_items_are_counted(
    autojump_clock: MockClock,
) -> None:
    async with serving() as scene:
        first = await made(scene)  # five tokens, and four of the answer
        wish = {"previous_response_id": first["id"], "input": "AB"}
        assert (await scene.post(COUNT, wish)).json["input_tokens"] == 11
        assert (await scene.post(COUNT, {"previous_response_id": first["id"]})).json["input_tokens"] == 9
        referring = [reference(first["output"][0]["id"]), {"role": "user", "content": "A"}]
        assert (await scene.post(COUNT, {"input": referring})).json["input_tokens"] == 5


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({}, (400, "invalid_value", "input")),
        ({"input": 3}, (400, "invalid_value", "input")),
        ({"input": "A", "model": "x"}, (404, "model_not_found", "model")),
        (
            {"input": "A", "previous_response_id": "x"},
            (400, "previous_response_not_found", "previous_response_id"),
        ),
        ({"input": [reference("msg_x")]}, (404, "item_not_found", "input")),
        ({"input": "A", "temperature": "hot"}, (400, "invalid_value", "temperature")),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": ""}]},
            (400, "invalid_value", "input"),
        ),
    ],
    ids=str,
)
async def test_an_input_that_no_response_could_have_is_not_counted(
    fields: dict[str, Any], error: Any, autojump_clock: MockClock
) -> None:
    async with serving() as scene:
        assert (await scene.post(COUNT, fields)).error == error
        assert (await scene.get(COUNT)).error[:2] == (404, "response_not_found")


@pytest.mark.parametrize("kind", [{"type": "item_reference"}, {"type": None}, {}], ids=str)
async def test_a_reference_is_the_stored_item_in_its_place(kind: Any, autojump_clock: MockClock) -> None:
    async with serving() as scene:
        first = await made(scene)
        [answer] = first["output"]
        [question] = (await scene.get(f"{RESPONSES}/{first['id']}/input_items")).json["data"]
        text = answer["content"][0]["text"]
        whole = [
            {"role": "user", "content": "HELLO"},
            {"role": "assistant", "content": text},
            {"role": "user", "content": "AND"},
        ]
        referring = [{**kind, "id": question["id"]}, {**kind, "id": answer["id"]}, whole[2]]
        expected, found = await made(scene, whole), await made(scene, referring)
        assert found["output"][0]["content"] == expected["output"][0]["content"]
        assert found["usage"]["input_tokens"] == expected["usage"]["input_tokens"] == 5 + len(text) + 3
        # What it was asked in is whole, too, and can be continued.
        listed = (await scene.get(f"{RESPONSES}/{found['id']}/input_items?order=asc")).json["data"]
        assert [item["content"][0]["text"] for item in listed] == ["HELLO", text, "AND"]
        assert (await made(scene, "X", previous_response_id=found["id"]))["usage"]["input_tokens"] == 8 + len(
            text
        ) + 5


async def test_an_item_is_found_with_the_key_of_its_response_and_as_long_as_that_is_stored(
    autojump_clock: MockClock,
) -> None:
    async with serving(config=KEYS) as scene:
        first = await made(scene, headers=ONE)
        items = (await scene.get(f"{RESPONSES}/{first['id']}/input_items", headers=ONE)).json["data"]
        for item_id in (first["output"][0]["id"], items[0]["id"]):
            body = {**ASK, "input": [reference(item_id), {"role": "user", "content": "A"}]}
            assert (await scene.post(RESPONSES, body, headers=ONE)).status == 200
            refused = await scene.post(RESPONSES, body, headers=TWO)
            assert refused.error == (404, "item_not_found", "input")
            assert f"Item with id '{item_id}' not found." in refused.json["error"]["message"]
        await scene.call("DELETE", f"{RESPONSES}/{first['id']}", headers=ONE).run()
        for item_id in (first["output"][0]["id"], items[0]["id"]):
            gone = await scene.post(RESPONSES, {**ASK, "input": [reference(item_id)]}, headers=ONE)
            assert gone.error == (404, "item_not_found", "input")


async def test_a_websocket_finds_the_items_of_responses_that_it_alone_has(autojump_clock: MockClock) -> None:
    async with serving() as scene:
        assert scene.gateway is not None
        async with connected(scene.gateway) as client, connected(scene.gateway) as other:
            await client.create(store=False)
            item = (await client.until_ended())[-1]["response"]["output"][0]
            for one, ending in ((client, "response.incomplete"), (other, "error")):
                await one.create(input=[reference(item["id"])])
                assert (event := (await one.until_ended())[-1])["type"] == ending
            assert event["error"]["code"] == "item_not_found"
            # A successor of steering has items of its user alone.
            await client.create(input="Hi", max_output_tokens=100)
            begun = await client.next_events()
            response_id = begun[0]["response"]["id"]
            steer = {
                "type": "response.steer",
                "previous_response_id": response_id,
                "input": [reference(item["id"])],
            }
            await client.send(steer)
            failed = [
                event for event in await client.until_ended() if event["type"] == "response.steer.failed"
            ]
            assert failed[0]["error"]["code"] == "invalid_input"


async def test_an_item_is_referred_to_once_in_an_input(autojump_clock: MockClock) -> None:
    async with serving() as scene:
        item_id = (await made(scene))["output"][0]["id"]
        refused = await scene.post(RESPONSES, {**ASK, "input": [reference(item_id)] * 2})
    assert refused.error == (400, "invalid_value", "input")
    assert f"Duplicate item found with id {item_id}" in refused.json["error"]["message"]


async def test_references_and_what_they_stand_for_are_bounded(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with serving() as scene:
        many = [reference(f"msg_{number}") for number in range(store.MAX_REFERENCES + 1)]
        refused = await scene.post(RESPONSES, {**ASK, "input": many})
        assert refused.error == (400, "invalid_value", "input")
        item_id = (await made(scene))["output"][0]["id"]
        monkeypatch.setattr(store, "MAX_REFERENCED_BYTES", 100)
        refused = await scene.post(RESPONSES, {**ASK, "input": [reference(item_id)]})
        assert refused.error == (400, "invalid_value", "input")


@pytest.mark.parametrize("item_id", [3, None, ""])
async def test_an_id_of_a_reference_is_a_text_that_belongs_to_an_item(
    item_id: Any, autojump_clock: MockClock
) -> None:
    async with serving() as scene:
        refused = await scene.post(RESPONSES, {**ASK, "input": [{"type": "item_reference", "id": item_id}]})
    assert refused.status in (400, 404) and refused.json["error"]["param"].startswith("input")
