"""Adapters over HTTP and WebSocket: their names stand where a model's do, and operators load and unload them."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import attrs
import pytest

import triolet
from tests.e2e.test_prompt_adapters import make_prompt_adapter
from tests.model.tiny import make_model
from tests.model.tiny_adapters import LINEAR, every_layer, make_adapter
from tests.server.responses.websocket_client import connected, text_of
from tests.server.routes.harness import Answer, Scene
from triolet import LoRARequest, PromptAdapterRequest, SamplingParams
from triolet.config.engine import EngineConfig
from triolet.config.server import GatewayConfig
from triolet.server import create_app
from triolet.server.models.host import FurtherModel
from triolet.server.responses.service import open_gateway

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
WISH: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
QUESTION = [{"role": "user", "content": "Which one are you?"}]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen3", tmp_path_factory.mktemp("models") / "tiny", with_tokenizer=True)


@pytest.fixture(scope="module")
def folder(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two LoRA adapters, a soft prompt, a broken adapter, and a link that leads out of it."""
    root = tmp_path_factory.mktemp("adapters")
    (root / "loras").mkdir()
    for seed, name in enumerate(("first", "second"), start=1):
        make_adapter(base, root / "loras" / name, every_layer(LINEAR), seed=seed)
    make_prompt_adapter(base, root / "loras" / "soft", "PROMPT_TUNING", 3)
    broken = make_adapter(base, root / "loras" / "broken", every_layer(LINEAR))
    (broken / "adapter_config.json").write_text("{}")
    make_adapter(base, root / "outside", every_layer(LINEAR))
    (root / "loras" / "link").symlink_to(root / "outside")
    return root / "loras"


def open_engine(base: Path, **fields: Any) -> Any:
    settings: dict[str, Any] = {"runner": "inline", "enable_lora": True, "max_loras": 2, "num_kv_blocks": 64}
    return triolet.open_engine(model=str(base), dtype="float32", log_stats=False, **settings, **fields)


async def test_an_adapters_name_is_a_model_on_every_route_that_generates(base: Path, folder: Path) -> None:
    loras, soft = (f"first={folder / 'first'}",), (f"soft={folder / 'soft'}",)
    expected = {}
    params = SamplingParams(**WISH, max_tokens=8)
    async with (
        open_engine(base, lora_modules=loras, prompt_adapters=soft) as engine,
        open_gateway(engine) as gateway,
    ):
        scene = Scene(engine, create_app(engine, gateway=gateway), gateway)
        adapters: dict[str, dict[str, Any]] = {
            engine.model_name: {},
            "first": {"lora": LoRARequest("first", 1, str(folder / "first"))},
            "soft": {"prompt_adapter": PromptAdapterRequest("soft", 1, str(folder / "soft"))},
        }
        for name, argument in adapters.items():
            expected[name] = (await engine.complete(QUESTION, params, **argument)).outputs[0].text
            chat = await scene.post(
                "/v1/chat/completions", {**WISH, "model": name, "messages": QUESTION, "max_tokens": 8}
            )
            assert chat.json["choices"][0]["message"]["content"] == expected[name]
            wish = {**WISH, "model": name, "input": QUESTION, "max_output_tokens": 8}
            response = (await scene.post("/v1/responses", wish)).json
            assert response["output"][0]["content"][0]["text"] == expected[name]
            async with connected(gateway) as client:
                await client.create(**wish)
                events = await client.until_ended()
            assert text_of(events) == expected[name]
            told = (chat.json["model"], response["model"], events[-1]["response"]["model"])
            assert told == (name, name, name)
            assert (await scene.get(f"/v1/models/{name}")).json["id"] == name
        assert len(set(expected.values())) == 3
        async with connected(gateway) as client:
            await client.create(model="second")
            assert (await client.until_ended())[-1]["error"]["code"] == "model_not_found"


async def test_the_model_of_a_long_body_is_found_as_that_of_a_short_one(base: Path, folder: Path) -> None:
    # A body of more than 16 KiB is parsed in a thread that knows nothing of the engine.
    question = [{"role": "user", "content": " ".join(["word"] * 4)}]
    async with open_engine(base, lora_modules=(f"first={folder / 'first'}",)) as engine:
        scene = Scene(engine, create_app(engine), None)
        for name, status in (("first", 200), ("nothing", 404)):
            prompts = {
                "/v1/chat/completions": {"messages": question, "max_tokens": 2},
                "/v1/completions": {"prompt": "word", "max_tokens": 2},
                "/v1/responses": {"input": question, "max_output_tokens": 2},
            }
            for path, prompt in prompts.items():
                call = scene.call("POST", path, {"model": name, **prompt})
                call.body += b" " * 20_000
                answer = await call.run()
                assert (path, answer.status) == (path, status)


async def test_a_lora_adapter_is_a_model_of_pooled_requests_and_a_prompt_adapter_is_not(
    base: Path, folder: Path
) -> None:
    loras, soft = (f"first={folder / 'first'}",), (f"soft={folder / 'soft'}",)
    async with open_engine(base, lora_modules=loras, prompt_adapters=soft, convert="embed") as engine:
        scene = Scene(engine, create_app(engine), None)
        wish = {"input": "a text"}
        for adapter in (None, LoRARequest("first", 1, str(folder / "first"))):
            name = engine.model_name if adapter is None else "first"
            answer = (await scene.post("/v1/embeddings", {**wish, "model": name})).json
            async with engine.encode("a text", lora=adapter) as stream:
                expected = (await stream.output()).outputs.data.tolist()
            assert (answer["model"], answer["data"][0]["embedding"]) == (name, expected)
        assert (await scene.post("/v1/embeddings", {**wish, "model": "soft"})).error[1:] == (
            "invalid_value",
            "model",
        )


async def test_metrics_name_the_adapters_of_running_and_of_waiting_requests(base: Path, folder: Path) -> None:
    params = SamplingParams(**WISH, max_tokens=64)
    async with open_engine(base, max_num_seqs=2) as engine, AsyncExitStack() as stack:
        scene = Scene(engine, create_app(engine), None)
        for number, name in enumerate(("first", "first", "second"), start=1):
            adapter = LoRARequest(name, 1 if name == "first" else 2, str(folder / name))
            stream = engine.generate([1, 2, number], params, lora=adapter)
            await stack.enter_async_context(stream)
            if number < 3:
                await anext(stream)
        lines = (await scene.get("/metrics")).body.decode().splitlines()
        [line] = [line for line in lines if line.startswith("triolet:lora_requests_info{")]
        labels = 'max_lora="2",running_lora_adapters="first",waiting_lora_adapters="second"'
        assert line.startswith(f"triolet:lora_requests_info{{{labels}}} ")


async def test_operators_load_and_unload_adapters_of_one_folder(base: Path, folder: Path) -> None:
    config = GatewayConfig(api_keys=("operator", "plain"), priority_keys=("operator",), lora_dir=str(folder))
    operator, plain = ({"authorization": f"Bearer {key}"} for key in ("operator", "plain"))
    async with open_engine(base) as engine:
        scene = Scene(engine, create_app(engine, config), None)

        async def complete(name: str) -> Answer:
            wish = {**WISH, "model": name, "prompt": "a text", "max_tokens": 8}
            return await scene.post("/v1/completions", wish, headers=plain)

        async def load(name: str, path: str, **more: Any) -> Answer:
            return await scene.post(LOAD, {"lora_name": name, "lora_path": path, **more}, headers=operator)

        alone = (await complete(engine.model_name)).json["choices"][0]["text"]
        refused = await scene.post(LOAD, {"lora_name": "x", "lora_path": "first"}, headers=plain)
        assert refused.error[:2] == (403, "operator_key_needed")
        assert (await complete("x")).error[1] == "model_not_found"
        loaded = await load("x", "first")
        assert (loaded.status, loaded.body) == (200, b"Success: LoRA adapter 'x' added successfully.")
        first = (await complete("x")).json["choices"][0]["text"]
        params = SamplingParams(**WISH, max_tokens=8)
        request = LoRARequest("y", 9, str(folder / "first"))
        assert first == (await engine.complete("a text", params, lora=request)).outputs[0].text != alone
        again = await load("x", "second")
        assert again.error == (400, "invalid_value", "lora_name")
        assert "'load_inplace' to True" in again.json["error"]["message"]
        assert (await load("x", str(folder / "second"), load_inplace=True)).status == 200
        second = (await complete("x")).json["choices"][0]["text"]
        assert second not in (first, alone)
        listed = (await scene.get("/v1/models", headers=plain)).json["data"]
        assert {card["id"] for card in listed if card["parent"]} == {"x", "y"}
        unloaded = await scene.post(UNLOAD, {"lora_name": "x"}, headers=operator)
        assert unloaded.body == b"Success: LoRA adapter 'x' removed successfully."
        assert (await complete("x")).error[1] == "model_not_found"
        assert (await scene.post(UNLOAD, {"lora_name": "x"}, headers=operator)).error == (
            404,
            "adapter_not_found",
            "lora_name",
        )


async def test_an_adapter_that_has_a_name_over_http_answers_until_it_is_unloaded(
    base: Path, folder: Path
) -> None:
    modules = (f"first={folder / 'first'}",)
    async with open_engine(base, lora_modules=modules, max_cpu_loras=2) as engine:
        scene = Scene(engine, create_app(engine, GatewayConfig(lora_dir=str(folder))), None)

        async def text_from(name: str) -> str:
            wish = {**WISH, "model": name, "prompt": "a text", "max_tokens": 8}
            answer = await scene.post("/v1/completions", wish)
            assert answer.status == 200, answer.json
            text: str = answer.json["choices"][0]["text"]
            return text

        first = await text_from("first")
        for name in ("x", "y", "z"):  # there is room for the weights of two
            assert (await scene.post(LOAD, {"lora_name": name, "lora_path": "second"})).status == 200
        listed = {card["id"] for card in (await scene.get("/v1/models")).json["data"] if card["parent"]}
        assert listed == {"first", "x", "y", "z"}
        second = await text_from("x")
        assert second == await text_from("z") != first == await text_from("first")
        params = SamplingParams(**WISH, max_tokens=8)
        await engine.complete("a text", params, lora=LoRARequest("other", 9, str(folder / "second")))
        assert await text_from("first") == first
        assert (await scene.post(UNLOAD, {"lora_name": "first"})).status == 200
        assert "first" not in {card["id"] for card in (await scene.get("/v1/models")).json["data"]}


async def test_adapters_of_further_models_are_loaded_listed_and_asked_under_their_own_model(
    base: Path, folder: Path
) -> None:
    config = GatewayConfig(lora_dir=str(folder))
    common: dict[str, Any] = {"runner": "inline", "num_kv_blocks": 64, "log_stats": False, "dtype": "float32"}
    further = EngineConfig(
        model=str(base), served_model_name="other", enable_lora=True, max_loras=2, **common
    )
    models = {"other": FurtherModel(config=attrs.evolve(further, lora_modules=(f"own={folder / 'first'}",)))}
    async with (
        open_engine(base, lora_modules=(f"first={folder / 'first'}",)) as engine,
        open_gateway(engine, config, models) as gateway,
    ):
        scene = Scene(engine, create_app(engine, config, gateway=gateway), gateway)

        async def listed() -> dict[str, str]:
            cards = (await scene.get("/v1/models")).json["data"]
            return {card["id"]: card["parent"] for card in cards if card["parent"]}

        async def text_from(name: str) -> str:
            wish = {**WISH, "model": name, "input": QUESTION, "max_output_tokens": 8}
            answer = (await scene.post("/v1/responses", wish)).json
            assert answer["model"] == name
            async with connected(gateway) as client:
                await client.create(**wish)
                events = await client.until_ended()
            text: str = answer["output"][0]["content"][0]["text"]
            assert text_of(events) == text
            return text

        parents = {"first": engine.model_name, "own": "other"}
        assert await listed() == parents  # also while the further model is not loaded
        assert gateway.models is not None and gateway.models.engines == []
        first = await text_from("first")
        assert await text_from("own") == first != await text_from("other")
        [other] = gateway.models.engines
        body = {"lora_name": "x", "lora_path": "second"}
        assert (await scene.post(LOAD, {**body, "model": "other"})).status == 200
        assert await listed() == parents | {"x": "other"}
        assert (await scene.get("/v1/models/x")).json["parent"] == "other"
        assert {lora.lora_name for lora in other.loras()} == {"own", "x"}
        assert await text_from("x") not in (first, await text_from("other"))
        for name in ("x", "other"):  # taken, whatever the model
            taken = await scene.post(LOAD, {"lora_name": name, "lora_path": "second"})
            assert taken.error == (400, "invalid_value", "lora_name")
        assert (await scene.post(LOAD, {**body, "model": "none"})).error[1] == "model_not_found"
        named = {**body, "lora_name": "y", "model": engine.model_name}
        assert (await scene.post(LOAD, named)).status == 200
        assert (await listed())["y"] == engine.model_name
        assert (await scene.post(UNLOAD, {"lora_name": "x"})).error[1] == "adapter_not_found"
        assert (await scene.post(UNLOAD, {"lora_name": "x", "model": "other"})).status == 200
        assert await listed() == parents | {"y": engine.model_name}


REFUSED: list[tuple[dict[str, Any], tuple[int, str, str]]] = [
    ({"lora_path": "first"}, (400, "invalid_value", "lora_name")),
    ({"lora_name": "x"}, (400, "invalid_value", "lora_path")),
    ({"lora_name": 3, "lora_path": "first"}, (400, "invalid_value", "lora_name")),
    ({"lora_name": "tiny", "lora_path": "first"}, (400, "invalid_value", "lora_name")),
    ({"lora_name": "x", "lora_path": 3}, (400, "invalid_value", "lora_path")),
    ({"lora_name": "x", "lora_path": "../outside"}, (400, "invalid_value", "lora_path")),
    ({"lora_name": "x", "lora_path": "link"}, (400, "invalid_value", "lora_path")),
    ({"lora_name": "x", "lora_path": "/etc"}, (400, "invalid_value", "lora_path")),
    ({"lora_name": "x", "lora_path": "."}, (400, "invalid_value", "lora_path")),
    ({"lora_name": "x", "lora_path": "a\0b"}, (400, "invalid_value", "lora_path")),
    ({"lora_name": "x", "lora_path": "missing"}, (404, "adapter_not_found", "lora_path")),
    ({"lora_name": "x", "lora_path": "first", "load_inplace": 1}, (400, "invalid_value", "load_inplace")),
    ({"lora_name": "x", "lora_path": "first", "rank": 8}, (400, "invalid_value", "rank")),
    ({"lora_name": "x", "lora_path": "soft"}, (400, "invalid_value", "lora")),
    ({"lora_name": "x", "lora_path": "broken"}, (400, "invalid_value", "lora")),
]


async def test_what_cannot_be_loaded_is_refused_and_the_server_goes_on(base: Path, folder: Path) -> None:
    async with open_engine(base) as engine:
        scene = Scene(engine, create_app(engine, GatewayConfig(lora_dir=str(folder))), None)
        for body, error in REFUSED:
            assert (await scene.post(LOAD, body)).error == error, body
            assert engine.loras() == (), body
            good = {"lora_name": "x"}
            assert (await scene.post(LOAD, {**good, "lora_path": "first"})).status == 200, body
            assert (await scene.post(UNLOAD, good)).status == 200, body


async def test_without_a_folder_for_adapters_the_routes_are_not_there(base: Path) -> None:
    async with open_engine(base) as engine:
        scene = Scene(engine, create_app(engine), None)
        for route in (LOAD, UNLOAD):
            assert (await scene.post(route, {"lora_name": "x", "lora_path": "first"})).status == 404
