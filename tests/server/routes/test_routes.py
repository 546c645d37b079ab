"""The other routes: models, tokens, embeddings, responses, health, metrics and the page."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from starlette.applications import Starlette
from starlette.routing import Mount
from trio.testing import MockClock

from tests.actors.harness import STEP_S, FakeExecutor, fake_engine
from tests.server.routes.harness import HELLO, MODEL, ChatTokenizer, Scene, serving
from tests.source_tree import ROOT, SRC
from triolet import SamplingParams
from triolet.config.server import GatewayConfig
from triolet.core.request import structured_outputs
from triolet.core.request.param_validation import ApiFamily
from triolet.core.request.params import SAMPLING_PARAMETERS
from triolet.core.request.prompt import ChatPrompt
from triolet.core.request.tokenizer_interface import Tokenize, Tokenized
from triolet.core.worker_call import WorkerCall, WorkerOutcome
from triolet.engine import weights
from triolet.errors import ConfigError, ModelFileError
from triolet.server import create_app
from triolet.server.routes import page, tokenize
from triolet.server.routes.page import FILES
from triolet.server.routes.tokenize import TokenizeRequest

RESPONSES = "/v1/responses"
ASK: dict[str, Any] = {"model": MODEL, "input": "HELLO", "max_output_tokens": 4, "seed": 1}


async def test_the_model_is_listed_with_its_longest_sequence() -> None:
    async with serving() as scene:
        (card,) = (await scene.get("/v1/models")).json["data"]
        assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", 256)
        assert card["thinking_switch"] is None
        assert (await scene.get(f"/v1/models/{MODEL}")).json == card
        assert (await scene.get("/v1/models/a/b")).error == (404, "model_not_found", "model")


FIRST_REQUESTS = """
import trio
from tests.server.routes.harness import HELLO, MODEL, serving
from triolet.protocol.json import structuring

def generate(kind, *_, **fields):
    raise AssertionError(f"{kind} was not prepared")

async def main():
    async with serving() as scene:
        structuring.make_dict_structure_fn = generate
        for path, payload in (
            ("/v1/chat/completions", {**HELLO, "max_tokens": 2}),
            ("/v1/completions", {"model": MODEL, "prompt": "HELLO", "max_tokens": 2}),
            ("/v1/responses", {"model": MODEL, "input": "HELLO", "max_output_tokens": 2}),
        ):
            print((await scene.post(path, payload)).status)

trio.run(main)
"""


def test_the_code_that_structures_requests_is_generated_before_the_first_of_them() -> None:
    """In a process of its own, since this one has generated it."""
    command = [sys.executable, "-c", FIRST_REQUESTS]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (SRC, ROOT)))}
    told = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    assert told.stdout.split() == ["200", "200", "200"]


async def test_tokens_of_a_prompt_and_back() -> None:
    async with serving() as scene:
        answer = await scene.post("/tokenize", {"prompt": "HELLO", "return_token_strs": True})
        assert answer.json == {
            "count": 5,
            "max_model_len": 256,
            "tokens": [7, 4, 11, 11, 14],
            "token_strs": list("HELLO"),
        }
        assert (await scene.post("/tokenize", {"messages": HELLO["messages"]})).json["count"] == 5
        assert (await scene.post("/detokenize", {"tokens": [7, 4]})).json == {"prompt": "HE"}


async def test_no_more_tokens_are_listed_or_counted_than_a_prompt_may_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenize, "MAX_LISTED_TOKENS", 100)  # the model's longest sequence has more
    chat = {"messages": [{"role": "user", "content": "A" * 257}]}
    async with serving() as scene:
        assert (await scene.post("/tokenize", {"prompt": "A" * 256})).json["count"] == 256
        counted = await scene.post("/v1/responses/input_tokens", {"input": "A" * 256})
        assert counted.json["input_tokens"] == 256
        for path, field, body in (
            ("/tokenize", "prompt", {"prompt": "A" * 257}),
            ("/tokenize", "messages", chat),
            ("/v1/responses/input_tokens", "input", {"input": "A" * 257}),
        ):
            answer = await scene.post(path, body)
            assert answer.error == (400, "invalid_value", field)
            assert answer.json["error"]["message"] == (f"{field} must have at most 256 tokens here, got 257")


class BeginningTokenizer(ChatTokenizer):
    """Puts Z before a text, and before a chat where that is asked for."""

    def tokenize(self, message: Tokenize) -> Tokenized:
        tokenized = super().tokenize(message)
        prompt = message.prompt
        adds = message.add_special_tokens if isinstance(prompt, str) else prompt.add_special_tokens  # type: ignore[union-attr]
        return attrs.evolve(tokenized, token_ids=(25, *tokenized.token_ids)) if adds else tokenized


@pytest.mark.parametrize(("value", "of_text", "of_chat"), [(None, 3, 2), (True, 3, 3), (False, 2, 2)])
async def test_special_tokens_are_added_to_a_text_unless_not_wanted_and_to_a_chat_if_wanted(
    value: bool | None, of_text: int, of_chat: int, autojump_clock: MockClock
) -> None:
    said = {"add_special_tokens": value, "max_tokens": 1}
    chat = {"messages": [{"role": "user", "content": "HI"}]}
    async with fake_engine(tokenizer=BeginningTokenizer()) as engine:
        scene = Scene(engine, create_app(engine), None)
        assert (await scene.post("/tokenize", {"prompt": "HI", **said})).json["count"] == of_text
        assert (await scene.post("/tokenize", {**chat, **said})).json["count"] == of_chat
        for path, prompt, num_tokens in (
            ("/v1/completions", {"prompt": "HI"}, of_text),
            ("/v1/completions", {"prompt": ["HI", "HI"]}, 2 * of_text),
            ("/v1/completions", {"prompt": [7, 8]}, 2),
            ("/v1/chat/completions", chat, of_chat),
        ):
            answer = await scene.post(path, {**prompt, **said})
            assert answer.json["usage"]["prompt_tokens"] == num_tokens


async def test_an_operation_of_openai_that_is_not_offered_is_no_id_of_a_response() -> None:
    path = f"{RESPONSES}/compact"
    async with serving() as scene:
        answer = await scene.post(path, {"model": MODEL, "input": "A"})
        assert answer.error[:2] == (404, "not_found")
        assert answer.json["error"]["message"] == f"{path} is not offered by this server."
        assert (await scene.get(path)).error[:2] == (404, "response_not_found")


async def test_tools_are_tokenized_as_chat_completions_shows_them_to_the_template() -> None:
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    for tool in ({"type": "function", "function": function}, {"type": "function", **function}):
        request = TokenizeRequest.of({"messages": HELLO["messages"], "tools": [tool]})
        content = request.content()
        assert isinstance(content, ChatPrompt) and content.tools is not None
        assert [one["function"]["name"] for one in content.tools] == ["f"]


@pytest.mark.parametrize(
    ("path", "payload", "error"),
    [
        ("/tokenize", {}, (400, "missing_required_parameter", "prompt or messages")),
        (
            "/tokenize",
            {"prompt": "A", "messages": HELLO["messages"]},
            (400, "missing_required_parameter", "prompt or messages"),
        ),
        ("/tokenize", {"prompt": "A", "add_special_tokens": 0}, (400, "invalid_value", "add_special_tokens")),
        (
            "/tokenize",
            {"messages": HELLO["messages"], "tools": [{"zz": [1]}]},
            (400, "invalid_value", "tools[0].name"),
        ),
        ("/tokenize", {"prompt": "A", "model": "x"}, (404, "model_not_found", "model")),
        ("/detokenize", {"tokens": [50]}, (400, "invalid_value", "tokens")),
        ("/detokenize", {"tokens": "A"}, (400, "invalid_value", "tokens")),
        ("/v1/embeddings", {"model": MODEL, "input": "A"}, (400, "unsupported_model", "model")),
        (
            "/v1/embeddings",
            {"model": MODEL, "input": ["A", "B"], "encoding_format": "base64"},
            (400, "unsupported_model", "model"),
        ),
        ("/v1/embeddings", {"model": "x", "input": "A"}, (404, "model_not_found", "model")),
        ("/v1/embeddings", {"model": MODEL, "input": {}}, (400, "invalid_value", "input")),
        (
            "/v1/embeddings",
            {"model": MODEL, "input": "A", "encoding_format": "int8"},
            (400, "invalid_value", "encoding_format"),
        ),
        (
            "/v1/embeddings",
            {"model": MODEL, "input": "A", "dimensions": 0},
            (400, "invalid_value", "dimensions"),
        ),
        (RESPONSES, {"model": MODEL}, (400, "missing_required_parameter", "input")),
        (RESPONSES, {**ASK, "model": "x"}, (404, "model_not_found", "model")),
        (RESPONSES, {**ASK, "background": True}, (400, "unsupported_parameter", "background")),
        (
            RESPONSES,
            {**ASK, "previous_response_id": "x"},
            (400, "previous_response_not_found", "previous_response_id"),
        ),
        (RESPONSES, {**ASK, "input": "A" * 300}, (400, "context_length_exceeded", "input")),
    ],
)
async def test_what_is_wrong_is_refused_by_name(path: str, payload: Any, error: Any) -> None:
    async with serving() as scene:
        assert (await scene.post(path, payload)).error == error


# ---------------------------------------------------------------------------------------- responses


async def test_a_response_is_made_remembered_continued_and_forgotten(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with serving() as scene:
        made = (await scene.post(RESPONSES, ASK)).json
        assert (made["object"], made["status"]) == ("response", "incomplete")
        path = f"{RESPONSES}/{made['id']}"
        assert (await scene.get(path)).json == made
        more = await scene.post(RESPONSES, {**ASK, "input": "AND", "previous_response_id": made["id"]})
        assert more.json["usage"]["input_tokens"] == 5 + 4 + 3
        forgotten = await scene.call("DELETE", path).run()
        assert forgotten.json == {"id": made["id"], "object": "response", "deleted": True}
        assert (await scene.get(path)).error[:2] == (404, "response_not_found")
        assert (await scene.call("DELETE", path).run()).error[:2] == (404, "response_not_found")


async def test_a_response_that_is_not_to_be_stored_is_not(autojump_clock: trio.testing.MockClock) -> None:
    async with serving() as scene:
        made = (await scene.post(RESPONSES, {**ASK, "store": False})).json
        assert (await scene.get(f"{RESPONSES}/{made['id']}")).status == 404


@pytest.mark.parametrize("with_gateway", [True, False])
async def test_events_are_numbered_and_add_up(
    with_gateway: bool, autojump_clock: trio.testing.MockClock
) -> None:
    async with serving(with_gateway=with_gateway) as scene:
        whole = (await scene.post(RESPONSES, ASK)).json
        streamed = await scene.post(RESPONSES, {**ASK, "stream": True})
    events = streamed.events
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["type"] == "response.created"
    assert events[-1]["type"] == "response.incomplete"
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert text == whole["output"][0]["content"][0]["text"]
    assert streamed.body.startswith(b"event: response.created\ndata: {")


async def test_a_lost_stream_is_read_on_by_another_request(autojump_clock: trio.testing.MockClock) -> None:
    async with serving() as scene, trio.open_nursery() as nursery:
        wish = {**ASK, "max_output_tokens": 30, "resumable": True, "stream": True}
        unbroken = (await scene.post(RESPONSES, wish)).events
        first = scene.call("POST", RESPONSES, wish)
        nursery.start_soon(first.run)
        await first.has_received(b"response.output_text.delta")
        await trio.sleep(5 * STEP_S)
        first.leave()
        await trio.sleep(1)
        heard = _events(bytes(first.received))
        path = f"{RESPONSES}/{heard[0]['response']['id']}"
        assert (await scene.get(path)).json["status"] == "in_progress"
        rest = await scene.get(f"{path}?stream=true&starting_after={heard[-1]['sequence_number']}")
        together = [*heard, *rest.events]
        assert [event["sequence_number"] for event in together] == list(range(len(together)))
        assert _text(together) == _text(unbroken)
        assert (await scene.get(f"{path}?stream=true&starting_after=x")).error[0] == 400
        assert (await scene.get(f"{RESPONSES}/x?stream=true")).error[:2] == (404, "response_not_found")


def _events(received: bytes) -> list[Any]:
    import json

    whole = received[: received.rindex(b"\n\n")].decode().split("\n\n")
    return [json.loads(event.partition("data: ")[2]) for event in whole if "data: {" in event]


def _text(events: list[Any]) -> str:
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


async def test_nothing_can_be_resumed_without_a_gateway() -> None:
    async with serving(with_gateway=False) as scene:
        answer = await scene.post(RESPONSES, {**ASK, "resumable": True})
    assert answer.error == (400, "unsupported_parameter", "resumable")


async def test_get_says_that_it_wants_to_become_a_websocket() -> None:
    async with serving() as scene:
        answer = await scene.get(RESPONSES)
    assert answer.error[:2] == (426, "upgrade_required")
    assert answer.headers["upgrade"] == "websocket"


# --------------------------------------------------------------------------------- operators, page


async def test_health_turns_red_when_work_is_pending_and_no_step_is_made(
    autojump_clock: trio.testing.MockClock,
) -> None:
    class Stuck(FakeExecutor):
        async def compute(self, plan: Any) -> Any:
            await trio.sleep(1000)

    async with serving(Stuck(num_blocks=64, block_size=4), step_timeout=5.0) as scene:
        assert (await scene.get("/health")).json == {"status": "ok"}
        async with trio.open_nursery() as nursery:
            call = scene.call("POST", "/v1/chat/completions", HELLO)
            nursery.start_soon(call.run)
            await trio.sleep(1)
            assert (await scene.get("/health")).status == 200
            await trio.sleep(4.5)
            answer = await scene.get("/health")
            assert answer.error[:2] == (503, "unhealthy")
            nursery.cancel_scope.cancel()


async def test_operators_pause_and_resume_and_health_says_so(
    autojump_clock: trio.testing.MockClock,
) -> None:
    config = GatewayConfig(api_keys=("plain",), priority_keys=("first",))
    plain, operator = ({"authorization": f"Bearer {key}"} for key in ("plain", "first"))
    async with serving(config=config) as scene, trio.open_nursery() as nursery:
        for method, path in (("POST", "/pause"), ("POST", "/resume"), ("GET", "/is_paused")):
            refused = await scene.call(method, path, headers=plain).run()
            assert refused.error == (403, "operator_key_needed", None)
        for query, field in (("mode=nap", "mode"), ("clear_cache=1", "clear_cache"), ("mod=keep", "mod")):
            assert (await scene.post(f"/pause?{query}", headers=operator)).error[::2] == (400, field)
        assert (await scene.post("/pause?mode=keep", headers=operator)).json == {"status": "paused"}
        assert (await scene.get("/is_paused", headers=operator)).json == {"is_paused": True}
        assert (await scene.get("/health")).json == {"status": "paused"}
        assert (await scene.get("/health/ready")).error[:2] == (503, "paused")
        waiting = scene.call("POST", "/v1/chat/completions", HELLO, headers=plain)
        nursery.start_soon(waiting.run)
        await trio.sleep(100)
        assert not waiting.is_over and (await scene.get("/health")).status == 200
        assert (await scene.post("/resume", headers=operator)).json == {"status": "resumed"}
        assert (await scene.get("/is_paused", headers=operator)).json == {"is_paused": False}
        await trio.sleep(10)
        assert waiting.status == 200


async def test_operators_put_the_engine_to_sleep_and_health_and_metrics_say_so(
    autojump_clock: trio.testing.MockClock,
) -> None:
    config = GatewayConfig(api_keys=("plain",), priority_keys=("first",))
    plain, operator = ({"authorization": f"Bearer {key}"} for key in ("plain", "first"))
    async with serving(config=config, sleep_after=100.0) as scene:
        for method, path in (("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping")):
            refused = await scene.call(method, path, headers=plain).run()
            assert refused.error == (403, "operator_key_needed", None)
        for path, field in (("sleep?level=3", "level"), ("sleep?mode=x", "mode"), ("wake_up?tags=x", "tags")):
            assert (await scene.post(f"/{path}", headers=operator)).error[::2] == (400, field)
        asleep = await scene.post("/sleep?level=2&mode=keep", headers=operator)
        assert asleep.json == {"status": "sleeping", "level": 2}
        assert (await scene.get("/is_sleeping", headers=operator)).json == {"is_sleeping": True}
        assert (await scene.get("/health")).json == {"status": "sleeping"}
        assert (await scene.get("/health/ready")).error[:2] == (503, "sleeping")
        metrics = (await scene.get("/metrics")).body.decode()
        assert re.search(r'engine_sleep_state\{[^}]*sleep_state="discard_all"[^}]*\} 1.0', metrics)
        part = await scene.post("/wake_up?tags=kv_cache", headers=operator)
        assert part.json == {"status": "sleeping", "tags": ["kv_cache"]}
        awake = await scene.post("/wake_up", headers=operator)
        assert awake.json == {"status": "awake", "tags": None}
        await trio.sleep(101)
        assert (await scene.get("/health")).json == {"status": "sleeping"}
        assert (await scene.get("/health/ready")).status == 200  # the next request wakes it


async def test_operators_exchange_weights_and_see_why_some_are_refused(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(current: Path, new: Path) -> None:
        if new.name == "bad":
            raise ModelFileError(new, "is truncated")

    monkeypatch.setattr(weights, "check_folder", check)
    config = GatewayConfig(api_keys=("plain",), priority_keys=("first",))
    plain, operator = ({"authorization": f"Bearer {key}"} for key in ("plain", "first"))
    path = "/update_weights_from_disk"
    async with serving(config=config) as scene:
        assert (await scene.post(path, {"model_path": "/new-1"}, headers=plain)).error[0] == 403
        assert (await scene.get("/weight_info", headers=plain)).error[0] == 403
        refused = await scene.post(path, {"model_path": "/bad"}, headers=operator)
        assert (
            refused.error == (400, "weights_refused", "model_path") and "truncated" in refused.body.decode()
        )
        for body, field in (({}, "path"), ({"model_path": "/x", "mode": 1}, "mode"), ({"model": 1}, "model")):
            assert (await scene.post(path, body, headers=operator)).error[::2] == (400, field)
        done = await scene.post(path, {"model_path": "/new-1"}, headers=operator)
        assert done.json == {"success": True, "message": "", "weight_version": 1}
        info = await scene.get("/weight_info", headers=operator)
        assert info.json == {"weight_version": 1, "model_path": "/new-1"}


async def test_operators_record_profiles_where_a_folder_is_configured(
    autojump_clock: trio.testing.MockClock,
) -> None:
    class Profiled(FakeExecutor):
        async def call(self, call: WorkerCall, limit_s: float | None) -> WorkerOutcome:
            await trio.lowlevel.checkpoint()
            return WorkerOutcome(value=True)

    config = GatewayConfig(api_keys=("plain",), priority_keys=("first",))
    plain, operator = ({"authorization": f"Bearer {key}"} for key in ("plain", "first"))
    async with serving(config=config) as scene:
        for path in ("/start_profile", "/stop_profile"):
            assert (await scene.post(path, headers=operator)).status == 404
    async with serving(Profiled(64, 4), config=config, profile_dir="traces") as scene:
        for path in ("/start_profile", "/stop_profile"):
            assert (await scene.post(path, headers=plain)).error == (403, "operator_key_needed", None)
        assert (await scene.post("/stop_profile", headers=operator)).error[:2] == (409, "conflict")
        assert (await scene.post("/start_profile?prefix=a/b", headers=operator)).error[::2] == (400, "prefix")
        assert (await scene.post("/start_profile?prefix=a", headers=operator)).json == {"status": "recording"}
        assert (await scene.post("/start_profile", headers=operator)).error[:2] == (409, "conflict")
        written = await scene.post("/stop_profile", headers=operator)
        assert written.json["status"] == "written"
        assert "/traces/a-" in written.json["path"]


async def test_health_names_what_restarts_and_readiness_turns_red_meanwhile(
    autojump_clock: trio.testing.MockClock,
) -> None:
    class CrashesOnce(FakeExecutor):
        async def start(self, on_progress: Any) -> Any:
            if self.num_lives:
                await trio.sleep(1)
            return await super().start(on_progress)

        async def compute(self, plan: Any) -> Any:
            if self.num_lives == 1:
                raise ValueError("planted")
            return await super().compute(plan)

    async with serving(CrashesOnce(num_blocks=64, block_size=4)) as scene, trio.open_nursery() as nursery:
        assert (await scene.get("/health/ready")).json == {"status": "ok"}
        nursery.start_soon(scene.call("POST", "/v1/chat/completions", {**HELLO, "max_tokens": 2}).run)
        await trio.sleep(0.5)
        answer = await scene.get("/health")
        expected = {"status": "restarting", "restarting": ["model_runner", "scheduler"]}
        assert (answer.status, answer.json) == (200, expected)
        red = await scene.get("/health/ready")
        assert red.error == (503, "restarting", None)
        assert red.headers["retry-after"] == "1"
        await trio.sleep(2)
        assert (await scene.get("/health")).json == {"status": "ok"}
        assert (await scene.get("/health/ready")).json == {"status": "ok"}
        await scene.engine.drain(trio.current_time())
        assert (await scene.get("/health/ready")).error[:2] == (503, "service_unavailable")


async def test_metrics_are_prometheus_text(autojump_clock: trio.testing.MockClock) -> None:
    async with serving() as scene:
        await scene.post("/v1/chat/completions", {**HELLO, "max_tokens": 3})
        answer = await scene.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    numbers = dict(re.findall(r"^(\S+) (\S+)$", answer.body.decode(), flags=re.MULTILINE))
    labels = f'engine="0",model_name="{MODEL}"'
    assert float(numbers[f"triolet:generation_tokens_total{{{labels}}}"]) == 3
    blocks = [float(value) for name, value in numbers.items() if name.startswith("triolet:kv_blocks{")]
    assert sum(blocks) == 64


async def test_dashboards_for_vllm_find_their_names() -> None:
    async with serving(config=GatewayConfig(metrics_prefix="vllm:")) as scene:
        assert b"vllm:num_requests_running{" in (await scene.get("/metrics")).body
    for prefix in ("", "1a:", "a-b"):
        with pytest.raises(ConfigError, match="metrics_prefix must be"):
            GatewayConfig(metrics_prefix=prefix)


async def test_the_page_and_its_files_are_there_and_may_do_little() -> None:
    async with serving() as scene:
        page = await scene.get("/")
        assert page.headers["content-type"].startswith("text/html")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        for name in re.findall(r'(?:href|src)="static/([^"]+)"', page.body.decode()):
            assert name in FILES
        for name, kind in FILES.items():
            file = await scene.get(f"/static/{name}")
            assert (file.status, file.headers["content-type"]) == (200, kind)
            assert file.body
            again = await scene.get(f"/static/{name}", headers={"if-none-match": file.headers["etag"]})
            assert (again.status, again.body) == (304, b"")
            other = await scene.get(f"/static/{name}", headers={"if-none-match": '"other"'})
            assert (other.status, other.body) == (200, file.body)
        assert (await scene.get("/static/../app.py")).status == 404
        assert (await scene.get("/static/app.py")).status == 404


async def test_a_file_of_the_page_is_read_from_the_disk_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as scene:
        first = await scene.get("/static/app.js")
        monkeypatch.setattr(page, "FOLDER", Path("/nowhere"))
        again = await scene.get("/static/app.js")
    assert first.body and (again.status, again.body) == (200, first.body)


async def test_the_page_has_the_controls_of_the_table_of_sampling_parameters() -> None:
    async with serving() as scene:
        module = await scene.get("/static/parameters.js")
        settings = (await scene.get("/static/settings.js")).body.decode()
    assert module.headers["content-type"] == FILES["settings.js"]
    controls = json.loads(module.body.decode().removeprefix("export const PARAMETERS = ").rstrip(";\n"))
    written = {one.wire_name(ApiFamily.RESPONSES) for one in SAMPLING_PARAMETERS if one.spec.control}
    assert {control["name"] for control in controls} == written
    assert {"temperature", "max_output_tokens", "stop", "min_p", "presence_penalty"} < written
    shown = {control["name"]: (control["kind"], control.get("default")) for control in controls}
    assert (shown["temperature"], shown["min_p"], shown["seed"]) == (
        ("range", 1.0),
        ("range", 0.0),
        ("number", None),
    )
    assert 'from "./parameters.js"' in settings


async def test_no_file_of_the_page_writes_text_as_markup() -> None:
    async with serving() as scene:
        for name in FILES:
            if name.startswith("vendor/"):  # what these libraries return is copied element by element
                continue
            body = (await scene.get(f"/static/{name}")).body.decode()
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|style=", body
            ), name


async def test_the_app_can_be_mounted_in_another(autojump_clock: trio.testing.MockClock) -> None:
    async with serving() as scene:
        outer = Scene(scene.engine, Starlette(routes=[Mount("/llm", scene.app)]), None)
        assert (await outer.get("/llm/health")).status == 200
        assert (await outer.get("/llm/")).status == 200
        answer = await outer.post("/llm/v1/chat/completions", {**HELLO, "max_tokens": 2})
        assert len(answer.json["choices"][0]["message"]["content"]) == 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (RESPONSES, ASK),
        ("/v1/chat/completions", HELLO),
        ("/v1/completions", {"model": MODEL, "prompt": "A"}),
    ],
)
async def test_the_form_of_a_long_body_is_not_read_in_the_event_loop(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = []
    check = structured_outputs._check_nesting

    def noted(value: object, field: str) -> None:
        readers.append(threading.get_ident())
        check(value, field)

    monkeypatch.setattr(structured_outputs, "_check_nesting", noted)
    schema = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(1000)}}
    async with serving() as scene:
        await scene.post(path, {**body, "structured_outputs": {"json": schema}})
    assert readers and threading.get_ident() not in readers


async def test_requests_that_wait_for_a_beginning_that_another_one_computes_are_counted_as_deferred(
    autojump_clock: MockClock,
) -> None:
    async with serving(max_num_batched_tokens=64) as scene, trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(scene.engine.complete, [1] * 200, SamplingParams(max_tokens=1))
        await trio.sleep(3.5 * STEP_S)  # the last part of the first prompt leaves room for others
        text = (await scene.get("/metrics")).body.decode()
    found = dict(re.findall(r'num_requests_waiting_by_reason{.*reason="(\w+)".*} (.+)', text))
    assert found == {"capacity": "0.0", "deferred": "2.0"}
