"""Several models in one server, on fake engines: chosen by name, loaded on demand, unloaded when idle."""

from __future__ import annotations

import shutil
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from prometheus_client.parser import text_string_to_metric_families

import triolet
from tests.actors.harness import FakeExecutor, assert_all_blocks_back, fake_engine
from tests.server.responses.websocket_client import connected, text_of
from tests.server.routes.harness import HELLO, Answer, ChatTokenizer, Scene
from tests.server.routes.test_chat import NINE_CHARACTERS
from triolet.config.engine import EngineConfig
from triolet.config.server import GatewayConfig
from triolet.engine.engine import Engine
from triolet.errors import ModelNotFound
from triolet.nano import PATH as NANO
from triolet.server import create_app
from triolet.server.models.host import FurtherModel
from triolet.server.responses.service import ResponsesService, open_gateway
from triolet.testing import open_fake_engine

LOAD_S = 3.0
MODELS = {
    name: FurtherModel(config=EngineConfig(served_model_name=name)) for name in ("second", "third", "broken")
}


class Loads:
    """Engines that were opened, in order, and how many are open."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.open: list[str] = []

    @asynccontextmanager
    async def open_engine(self, config: EngineConfig) -> AsyncGenerator[Engine]:
        self.names.append(config.model_name)
        await trio.sleep(LOAD_S)
        if config.model_name == "broken":
            raise ModelNotFound("there is no folder '/secret'")
        executor = FakeExecutor(num_blocks=256, block_size=4)
        fields = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "served_model_name": config.model_name}
        async with fake_engine(executor, tokenizer=ChatTokenizer(), **fields) as engine:
            self.open.append(config.model_name)
            try:
                yield engine
            finally:
                assert_all_blocks_back(engine)
                self.open.remove(config.model_name)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Loads:
    loads = Loads()
    monkeypatch.setitem(vars(triolet), "open_engine", loads.open_engine)
    return loads


@asynccontextmanager
async def open_server(
    sleep_after: float | None = None, executor: FakeExecutor | None = None, **fields: Any
) -> AsyncGenerator[tuple[Scene, ResponsesService]]:
    config = GatewayConfig(**fields)
    executor = executor or FakeExecutor(num_blocks=256, block_size=4)
    engine_fields: dict[str, Any] = {"max_num_batched_tokens": 256, "sleep_after": sleep_after}
    async with (
        fake_engine(executor, tokenizer=ChatTokenizer(), **engine_fields) as engine,
        open_gateway(engine, config, MODELS) as gateway,
    ):
        yield Scene(engine, create_app(engine, config, gateway=gateway), gateway), gateway


async def chat(site: Scene, model: str) -> Answer:
    return await site.post("/v1/chat/completions", {**HELLO, "model": model, "max_tokens": 4})


async def test_the_model_of_a_body_chooses_the_engine_and_loads_it_once(
    loads: Loads, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_server() as (site, _):
        assert (await chat(site, "triolet-nano")).json["model"] == "triolet-nano"
        assert loads.names == []
        for _ in range(2):
            assert (await chat(site, "second")).json["model"] == "second"
        assert loads.names == ["second"]
        assert (await chat(site, "fourth")).error == (404, "model_not_found", "model")
        listed = {one["id"]: one.get("state") for one in (await site.get("/v1/models")).json["data"]}
    assert listed == {
        "triolet-nano": "loaded",
        "second": "loaded",
        "third": "unloaded",
        "broken": "unloaded",
    }
    assert loads.open == []


async def test_a_request_without_a_model_is_answered_by_the_first_of_several(
    loads: Loads, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_server() as (site, gateway), connected(gateway) as client:
        answer = await site.post("/v1/chat/completions", {"messages": HELLO["messages"], "max_tokens": 4})
        assert (answer.status, answer.json["model"]) == (200, "triolet-nano")
        assert (await site.post("/v1/responses", {"input": "HI"})).json["model"] == "triolet-nano"
        await client.create(model=None)
        assert (await client.until_ended())[-1]["response"]["model"] == "triolet-nano"
    assert loads.names == []


async def test_the_metrics_of_every_loaded_model_stand_under_its_name(
    loads: Loads, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_server(model_idle=60.0) as (site, _):
        alone = (await site.get("/metrics")).body.decode()
        await chat(site, "second")
        await chat(site, "triolet-nano")
        text = (await site.get("/metrics")).body.decode()
        await trio.sleep(100.0)
        later = (await site.get("/metrics")).body.decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    tokens = families["triolet:generation_tokens"].samples
    assert {one.labels["model_name"]: one.value for one in tokens if one.name.endswith("_total")} == {
        "triolet-nano": 4.0,
        "second": 4.0,
    }
    headings = [line for line in text.splitlines() if line.startswith("# TYPE ")]
    assert len(headings) == len(set(headings))
    series = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(series) == len(set(series))
    of_first = {line.rpartition(" ")[0] for line in alone.splitlines() if "triolet-nano" in line}
    assert of_first and of_first <= set(series)
    assert 'model_name="second"' not in alone + later


async def test_an_idle_model_is_unloaded_and_loaded_again_for_the_next_request(
    loads: Loads, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_server(model_idle=60.0) as (site, _):
        await chat(site, "second")
        await trio.sleep(59.0)
        assert loads.open == ["second"]
        await trio.sleep(3.0)
        assert loads.open == []
        assert (await chat(site, "second")).status == 200
    assert loads.names == ["second", "second"]


async def state_of_first(site: Scene) -> tuple[str, float | None]:
    first = (await site.get("/v1/operator/models")).json["data"][0]
    assert first["id"] == "triolet-nano"
    return first["state"], first["unloads_in_s"]


async def test_the_first_model_is_unloaded_when_idle_and_loaded_again_too(
    loads: Loads, autojump_clock: trio.testing.MockClock
) -> None:
    executor = FakeExecutor(num_blocks=256, block_size=4)
    async with open_server(60.0, executor, model_idle=60.0) as (site, _):
        await chat(site, "second")
        await trio.sleep(50.0)
        first = await chat(site, "triolet-nano")
        state, unloads_in_s = await state_of_first(site)
        assert state == "loaded" and unloads_in_s == pytest.approx(60.0, abs=1.0)
        await trio.sleep(55.0)
        assert (executor.num_unloads, loads.open) == (0, [])
        await trio.sleep(6.0)
        assert (executor.num_unloads, await state_of_first(site)) == (1, ("unloaded", None))
        again = await chat(site, "triolet-nano")
        assert (again.status, again.json["choices"]) == (200, first.json["choices"])
        assert (await state_of_first(site))[0] == "loaded"


async def test_the_first_model_is_stopped_when_its_requests_have_ended(
    loads: Loads, autojump_clock: trio.testing.MockClock
) -> None:
    executor = FakeExecutor(num_blocks=256, block_size=4)
    answers: list[Answer] = []

    async def ask(site: Scene) -> None:
        answers.append(await chat(site, "triolet-nano"))

    async with open_server(executor=executor) as (site, _):
        assert await state_of_first(site) == ("loaded", None)
        stop = {"model": "triolet-nano"}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, site)
            await trio.sleep(0.02)
            stopped = (await site.post("/v1/operator/models/stop", stop)).json
            assert (stopped["stopping"], stopped["num_requests"]) == (True, 1)
        assert answers[0].status == 200
        await trio.sleep(1.0)
        assert (executor.num_unloads, await state_of_first(site)) == (1, ("unloaded", None))
        assert (await site.post("/v1/operator/models/stop", stop)).json["stopping"] is False
        assert (await chat(site, "triolet-nano")).status == 200
        await trio.sleep(1000.0)  # stopped once: it sleeps no second time by itself
        assert await state_of_first(site) == ("loaded", None)


async def test_with_room_for_one_the_other_waits_until_its_requests_have_ended(
    loads: Loads, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_server(max_loaded_models=1) as (site, _), trio.open_nursery() as nursery:
        for model in ("second", "third", "second", "third"):
            nursery.start_soon(chat, site, model)
    assert sorted(loads.names) == ["second", "third"]


async def test_a_failed_load_fails_only_the_requests_that_asked_for_it(
    loads: Loads, autojump_clock: trio.testing.MockClock
) -> None:
    answers: dict[str, Answer] = {}

    async def ask(site: Scene, model: str) -> None:
        answers[model] = await chat(site, model)

    async with open_server() as (site, _):
        async with trio.open_nursery() as nursery:
            for model in ("broken", "second", "triolet-nano"):
                nursery.start_soon(ask, site, model)
        assert answers["broken"].error == (503, "model_load_failed", None)
        assert "/secret" not in answers["broken"].body.decode()
        assert (answers["second"].status, answers["triolet-nano"].status) == (200, 200)
        assert (await chat(site, "broken")).status == 503
    assert loads.names.count("broken") == 2


async def test_a_client_that_leaves_while_its_model_loads_holds_nothing(
    loads: Loads, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_server() as (site, gateway):
        call = site.call("POST", "/v1/chat/completions", {**HELLO, "model": "second"})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call.run)
            await trio.sleep(LOAD_S / 2)
            call.leave()
        assert gateway.models is not None
        assert gateway.models.registry.models["second"].num_holders == 0


async def test_one_websocket_asks_several_models_and_continues_a_response_of_another(
    loads: Loads, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_server() as (_, gateway), connected(gateway) as client:
        await client.create(model="second", input="Hello", seed=7)
        first = (await client.until_ended())[-1]["response"]
        assert (first["model"], first["status"]) == ("second", "incomplete")
        await client.create(input="Hello", seed=7)
        nano = await client.until_ended()
        assert nano[-1]["response"]["model"] == "triolet-nano" and text_of(nano)
        await client.create(model="broken", input="Hello")
        [error] = await client.until_ended()
        assert (error["type"], error["error"]["code"]) == ("error", "model_load_failed")
        await client.create(model="fourth", input="Hello")
        [error] = await client.until_ended()
        assert error["error"]["code"] == "model_not_found"
        await client.create(model="third", input="!", previous_response_id=first["id"])
        third = (await client.until_ended())[-1]["response"]
        assert third["model"] == "third"
        assert third["usage"]["input_tokens"] > first["usage"]["input_tokens"]


async def test_the_successor_of_a_steered_response_is_of_the_same_model(
    loads: Loads, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_server() as (_, gateway), connected(gateway) as client:
        await client.create(model="second", max_output_tokens=150)
        while not any(event["type"] == "response.output_text.delta" for event in client.events):
            await client.next_events()
        response_id = client.events[0]["response"]["id"]
        steer = {"type": "response.steer", "previous_response_id": response_id, "input": "!"}
        await client.send(steer)
        events = await client.until_ended(2)
    steered, successor = (event["response"] for event in events if event["type"].endswith("incomplete"))
    assert (steered["id"], steered["incomplete_details"]) == (response_id, {"reason": "steered"})
    assert (steered["model"], successor["model"]) == ("second", "second")
    assert successor["usage"]["input_tokens"] > steered["usage"]["input_tokens"]


@pytest.mark.parametrize("transport", ["HTTP", "WebSocket"])
async def test_the_ids_of_calls_are_those_that_the_template_of_a_further_model_takes(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    shutil.copytree(NANO, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(NINE_CHARACTERS)

    def open_mistral(config: EngineConfig) -> AbstractAsyncContextManager[Engine]:
        fields: dict[str, Any] = {"tokenizer": str(tmp_path), "served_model_name": config.model_name}
        return open_fake_engine('[TOOL_CALLS]f{"a":1}', **fields)

    monkeypatch.setitem(vars(triolet), "open_engine", open_mistral)
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    body: dict[str, Any] = {"model": "second", "tools": [tool], "max_output_tokens": 40}
    async with open_server() as (site, gateway), connected(gateway) as client:

        async def respond(**fields: Any) -> Any:
            if transport == "HTTP":
                return (await site.post("/v1/responses", {**body, **fields})).json
            await client.create(**body, **fields)
            return (await client.until_ended())[-1]["response"]

        first = await respond(input="Hi")
        [call] = first["output"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}
        second = await respond(input=[result], previous_response_id=first["id"])
    assert (call["call_id"].isalnum(), len(call["call_id"])) == (True, 9)
    assert second["status"] == "completed"


async def test_an_operator_sees_and_stops_models_and_other_keys_do_not(
    loads: Loads, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_server(api_keys=("k",), priority_keys=("op",)) as (site, _):
        operator, other = ({"authorization": f"Bearer {key}"} for key in ("op", "k"))
        path = "/v1/operator/models"
        assert (await site.get(path, headers=other)).error == (403, "operator_key_needed", None)
        stop = {"model": "second"}
        assert (await site.post(f"{path}/stop", stop, headers=other)).error[0] == 403
        await site.post("/v1/chat/completions", {**HELLO, "model": "second", "max_tokens": 4}, headers=other)
        listed = {one["id"]: one["state"] for one in (await site.get(path, headers=operator)).json["data"]}
        assert listed == {
            "triolet-nano": "loaded",
            "second": "loaded",
            "third": "unloaded",
            "broken": "unloaded",
        }
        assert (await site.post(f"{path}/stop", stop, headers=operator)).json["stopping"] is True
        await trio.sleep(1.0)
        assert loads.open == []
        assert (await site.post(f"{path}/stop", stop, headers=operator)).json["stopping"] is False
        assert (await site.post(f"{path}/stop", {"model": "x"}, headers=operator)).error[0] == 404
