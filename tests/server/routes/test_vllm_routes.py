"""Routes that programs for vLLM call beside those of OpenAI: health, load, caches, and calls into the workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.actors.harness import FakeExecutor
from tests.server.routes.harness import HELLO, serving
from tests.source_tree import ROOT
from triolet.config.server import GatewayConfig
from triolet.core.worker_call import WorkerCall, WorkerOutcome

PLAIN, OPERATOR = ({"authorization": f"Bearer {key}"} for key in ("plain", "first"))
KEYS = GatewayConfig(api_keys=("plain",), priority_keys=("first",))
RPC = "/collective_rpc"


class CalledExecutor(FakeExecutor):
    async def call(self, call: WorkerCall, limit_s: float | None) -> WorkerOutcome:
        await trio.lowlevel.checkpoint()
        results: dict[str, Any] = {
            "number": 3,
            "nothing": None,
            "said": [call.args, dict(call.kwargs), limit_s],
            "odd": [b"bytes"],
            "not_a_number": {"x": float("nan")},
        }
        if call.name in results:
            return WorkerOutcome(results[call.name])
        return WorkerOutcome(error=KeyError("planted"))


async def test_ping_is_health_and_needs_no_key(autojump_clock: MockClock) -> None:
    async with serving(config=KEYS) as scene:
        assert (await scene.get("/ping")).json == (await scene.get("/health")).json == {"status": "ok"}
        assert (await scene.post("/ping")).status == 200
        assert (await scene.get("/load")).status == 401


async def test_load_counts_the_requests_in_the_engine(autojump_clock: MockClock) -> None:
    async with serving() as scene, trio.open_nursery() as nursery:
        assert (await scene.get("/load")).json == {"server_load": 0}
        nursery.start_soon(scene.post, "/v1/chat/completions", {**HELLO, "max_tokens": 20})
        await trio.sleep(0.05)
        assert (await scene.get("/load")).json == {"server_load": 1}


async def test_caches_are_reset_by_operators_only(autojump_clock: MockClock) -> None:
    async with serving(config=KEYS) as scene, trio.open_nursery() as nursery:
        for path in ("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"):
            assert (await scene.post(path, headers=PLAIN)).error == (403, "operator_key_needed", None)
            assert (await scene.post(path, headers=OPERATOR)).status == 200
        asked = {**HELLO, "max_tokens": 100}
        nursery.start_soon(lambda: scene.post("/v1/chat/completions", asked, headers=PLAIN))
        await trio.sleep(0.05)
        path = "/reset_prefix_cache"
        assert (await scene.post(path, headers=OPERATOR)).json == {"success": False}
        forced = await scene.post(f"{path}?reset_running_requests=true", headers=OPERATOR)
        assert forced.json == {"success": True}
        for query in ("reset_external=true", "reset_external=x", "other=1"):
            assert (await scene.post(f"{path}?{query}", headers=OPERATOR)).error[0] == 400


async def test_operators_call_methods_of_the_workers(autojump_clock: MockClock) -> None:
    async with serving(CalledExecutor(64, 4), config=KEYS) as scene:

        async def call(body: Any, headers: Any = OPERATOR) -> Any:
            return await scene.post(RPC, body, headers=headers)

        assert (await call({"method": "number"}, PLAIN)).error == (403, "operator_key_needed", None)
        assert (await call({"method": "number"})).json == {"results": ["3"]}  # as vLLM: no number, a text
        assert (await call({"method": "nothing"})).json == {"results": [None]}
        said = await call({"method": "said", "args": ["a"], "kwargs": {"b": "c"}, "timeout": 2.5})
        assert said.json == {"results": [[["a"], {"b": "c"}, 2.5]]}
        assert (await call({"method": "odd"})).json == {"results": ["[b'bytes']"]}
        assert (await call({"method": "not_a_number"})).json == {"results": ["{'x': nan}"]}
        failed = await call({"method": "other"})
        assert failed.error[:2] == (500, "worker_call_failed")
        assert "KeyError" in failed.json["error"]["message"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "method"),
        ({"method": 3}, "method"),
        ({"method": "m", "args": "a"}, "args"),
        ({"method": "m", "kwargs": []}, "kwargs"),
        ({"method": "m", "timeout": "1"}, "timeout"),
        ({"method": "m", "timeout": -1}, "timeout"),
        ({"method": "m", "other": 1}, "other"),
    ],
)
async def test_a_wrong_call_is_refused_by_its_field(body: Any, field: str, autojump_clock: MockClock) -> None:
    async with serving(CalledExecutor(64, 4)) as scene:
        assert (await scene.post(RPC, body)).error[::2] == (400, field)


async def test_a_call_without_a_worker_names_the_method(autojump_clock: MockClock) -> None:
    async with serving() as scene:
        assert (await scene.post(RPC, {"method": "m"})).error[0] == 400


ROUTES = """
GET /ping /load /health /metrics /version /v1/models /is_sleeping /is_paused /weight_info
POST /ping /sleep /wake_up /pause /resume /reset_prefix_cache /reset_mm_cache /reset_encoder_cache /collective_rpc
POST /score /v1/score /rerank /v1/rerank /v2/rerank /classify /pooling /v1/embeddings /tokenize /detokenize
POST /start_profile /stop_profile /v1/load_lora_adapter /v1/unload_lora_adapter /update_weights_from_disk
POST /v1/chat/completions /v1/completions /v1/responses /v1/responses/input_tokens
"""


async def test_every_route_that_programs_for_vllm_call_is_there(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    config = GatewayConfig(lora_dir=str(tmp_path))
    async with serving(config=config, profile_dir=str(tmp_path), enable_lora=True) as scene:
        assert (await scene.post("/no/such/route")).status == 404
        for line in ROUTES.split("\n"):
            method, *paths = line.split() or [""]
            for path in paths:
                answer = await scene.call(method, path, None if method == "GET" else {}).run()
                # without a body most are 400: that they answer is what is held here
                assert answer.status not in (404, 405, 500), (method, path)


NOT_THERE = """
POST /v1/messages /invocations /inference/v1/generate /v1/chat/completions/render /v1/audio/transcriptions
POST /abort_requests
GET /tokenizer_info /server_info /docs
"""


async def test_routes_of_vllm_that_are_said_to_be_missing_are_not_found(autojump_clock: MockClock) -> None:
    said = (ROOT / "docs" / "coming-from-vllm.md").read_text(encoding="utf-8")
    async with serving() as scene:
        for line in NOT_THERE.strip().split("\n"):
            method, *paths = line.split()
            for path in paths:
                assert f"`{path}`" in said
                assert (await scene.call(method, path, {}).run()).error[:2] == (404, "not_found")
