"""A shortage of threads fails what needed one, by name, and the engine goes on."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

import triolet
from tests.e2e.test_prompt_adapters import make_prompt_adapter
from tests.model.tiny import make_model
from tests.model.tiny_adapters import ATTENTION, every_layer, make_adapter
from tests.server.routes.harness import Scene
from triolet import Engine, LoRARequest, PromptAdapterRequest, SamplingParams
from triolet.errors import ResourceShortage
from triolet.server import create_app

PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
FIELDS: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 64, "log_stats": False}

Use = Callable[[Engine], Awaitable[object]]


@contextmanager
def no_new_threads() -> Iterator[None]:
    """Let no thread start, with the interpreter's words for it; those that run go on."""

    async def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trio.to_thread, "run_sync", refuse)
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen3", tmp_path_factory.mktemp("models") / "tiny", with_tokenizer=True)


@pytest.fixture(params=["adapter", "prompt adapter", "weights"])
def use(request: pytest.FixtureRequest, base: Path, tmp_path: Path) -> tuple[str, Use]:
    """What the thread is for, and a use of the engine that needs one."""
    match request.param:
        case "adapter":
            lora = LoRARequest(
                "a", 1, str(make_adapter(base, tmp_path / "lora", every_layer(ATTENTION), rank=2))
            )
            return "reading an adapter", lambda engine: engine.complete([1, 2, 3], PARAMS, lora=lora)
        case "prompt adapter":
            folder = make_prompt_adapter(base, tmp_path / "soft", "PROMPT_TUNING", 3)
            soft = PromptAdapterRequest("s", 1, str(folder))
            return "reading a prompt adapter", lambda engine: engine.complete(
                [1, 2, 3], PARAMS, prompt_adapter=soft
            )
        case _:
            return "reading weights", lambda engine: engine.reload_weights(str(base))


async def test_what_finds_no_thread_fails_alone_by_name_and_works_afterwards(
    use: tuple[str, Use], base: Path
) -> None:
    purpose, run = use
    fields: dict[str, Any] = {"enable_lora": True, "runner": "thread"} | FIELDS
    async with triolet.open_engine(str(base), **fields) as engine:
        expected = await engine.complete([1, 2, 3], PARAMS)
        with no_new_threads(), pytest.raises(ResourceShortage, match=f"threads for {purpose}"):
            await run(engine)
        assert await run(engine) is not None
        again = await engine.complete([1, 2, 3], PARAMS)
        assert again.outputs[0].token_ids == expected.outputs[0].token_ids
        assert engine.statistics().num_restarts == 0


@pytest.mark.parametrize(
    ("path", "fields", "num_spaces", "purpose"),
    [
        ("/tokenize", {"prompt": "A few words."}, 0, "tokenizing a text"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}, 100_000, "parsing a request"),
    ],
)
async def test_a_route_that_finds_no_thread_answers_503_and_works_afterwards(
    path: str, fields: dict[str, Any], num_spaces: int, purpose: str, base: Path
) -> None:
    body = json.dumps({"model": "tiny", **fields}).encode() + b" " * num_spaces
    async with triolet.open_engine(str(base), runner="thread", **FIELDS) as engine:
        scene = Scene(engine, create_app(engine), None)
        with no_new_threads():
            refused = await scene.call("POST", path, body=body).run()
        assert refused.status == 503
        assert f"threads for {purpose}" in refused.json["error"]["message"]
        assert (await scene.call("POST", path, body=body).run()).status == 200
