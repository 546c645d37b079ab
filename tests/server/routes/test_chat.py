"""Chat completions and completions, as a client sees them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import trio

import triolet
from tests.actors.harness import STEP_S, FakeExecutor, assert_all_blocks_back
from tests.model.tiny import change_json
from tests.server.routes.harness import HELLO, MODEL, Scene, serving, texts
from triolet.nano import PATH as NANO
from triolet.server import create_app
from triolet.server.responses.service import open_gateway
from triolet.testing import open_fake_engine

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PROMPT = {"model": MODEL, "prompt": "HELLO"}


async def test_a_chat_is_answered_whole(autojump_clock: trio.testing.MockClock) -> None:
    async with serving() as scene:
        answer = await scene.post(CHAT, {**HELLO, "max_tokens": 6, "seed": 1})
    body = answer.json
    assert answer.status == 200
    assert (body["object"], body["model"]) == ("chat.completion", MODEL)
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert len(choice["message"]["content"]) == 6
    assert choice["finish_reason"] == "length"
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 6,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def test_a_stream_says_the_same_as_the_whole(autojump_clock: trio.testing.MockClock) -> None:
    async with serving() as scene:
        whole = await scene.post(CHAT, {**HELLO, "max_tokens": 6, "seed": 1})
        streamed = await scene.post(
            CHAT,
            {**HELLO, "max_tokens": 6, "seed": 1, "stream": True, "stream_options": {"include_usage": True}},
        )
    first, *chunks, ending, usage = streamed.events
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.headers["x-accel-buffering"] == "no"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert texts(chunks) == whole.json["choices"][0]["message"]["content"]
    assert (ending["choices"][0]["delta"], ending["choices"][0]["finish_reason"]) == ({}, "length")
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 6
    assert {chunk["id"] for chunk in streamed.events} == {first["id"]}


@pytest.mark.parametrize(("path", "wish"), [(CHAT, HELLO), (TEXT, PROMPT)])
async def test_every_chunk_has_the_counts_so_far_if_they_are_asked_for(
    path: str, wish: dict[str, Any], autojump_clock: trio.testing.MockClock
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with serving() as scene:
        streamed = await scene.post(
            path, {**wish, "max_tokens": 3, "stream": True, "stream_options": options}
        )
        without = await scene.post(path, {**wish, "max_tokens": 3, "stream": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in streamed.events]
    assert {chunk["usage"]["prompt_tokens"] for chunk in streamed.events} == {5}
    assert counts == sorted(counts)
    assert counts[-1] == 3
    assert not any("usage" in chunk for chunk in without.events)


@pytest.mark.parametrize("value", [False, True, None])
async def test_special_tokens_may_be_added_to_those_of_the_template(
    value: bool | None, autojump_clock: trio.testing.MockClock
) -> None:
    async with serving() as scene:
        answer = await scene.post(CHAT, {**HELLO, "max_tokens": 1, "add_special_tokens": value})
    assert answer.status == 200


@pytest.mark.parametrize("n", [1, 2])
async def test_the_ids_of_the_tokens_come_with_a_chat_where_they_are_asked_for(
    n: int, autojump_clock: trio.testing.MockClock
) -> None:
    wish = {**HELLO, "max_tokens": 5, "seed": 3, "n": n, "return_token_ids": True}
    async with serving() as scene:
        whole = (await scene.post(CHAT, wish)).json
        first, *others = (await scene.post(CHAT, {**wish, "stream": True})).events
        without = (await scene.post(CHAT, {**wish, "return_token_ids": False})).json
    assert whole["prompt_token_ids"] == first["prompt_token_ids"] == [7, 4, 11, 11, 14]
    assert not any("prompt_token_ids" in chunk for chunk in others)
    for choice in whole["choices"]:
        assert choice["message"]["content"] == letters(choice["token_ids"])
        pieces = [
            piece for chunk in others for piece in chunk["choices"] if piece["index"] == choice["index"]
        ]
        assert [one for piece in pieces for one in piece.get("token_ids", ())] == choice["token_ids"]
    assert "prompt_token_ids" not in without and "token_ids" not in without["choices"][0]


async def test_the_ids_of_the_tokens_come_with_completions_where_they_are_asked_for(
    autojump_clock: trio.testing.MockClock,
) -> None:
    wish = {"prompt": [[7, 8], [2, 3, 4]], "max_tokens": 5, "seed": 3, "return_token_ids": True}
    async with serving() as scene:
        whole = (await scene.post(TEXT, wish)).json["choices"]
        chunks = (await scene.post(TEXT, {**wish, "stream": True})).events
        echo = (await scene.post(TEXT, {**wish, "prompt": "HI", "echo": True, "max_tokens": 0})).json[
            "choices"
        ][0]
    assert [choice["prompt_token_ids"] for choice in whole] == [[7, 8], [2, 3, 4]]
    for choice in whole:
        assert choice["text"] == letters(choice["token_ids"])
        pieces = [one for chunk in chunks for one in chunk["choices"] if one["index"] == choice["index"]]
        assert [one for piece in pieces for one in piece["token_ids"]] == choice["token_ids"]
        assert [piece["prompt_token_ids"] for piece in pieces if "prompt_token_ids" in piece] == [
            choice["prompt_token_ids"]
        ]
    assert (echo["prompt_token_ids"], echo["token_ids"]) == ([7, 8], [])


def letters(token_ids: list[int]) -> str:
    return "".join(chr(65 + token_id) for token_id in token_ids)


async def test_several_answers_are_told_apart_by_their_index(autojump_clock: trio.testing.MockClock) -> None:
    wish = {**HELLO, "max_tokens": 5, "seed": 3, "n": 3}
    async with serving() as scene:
        whole = await scene.post(CHAT, wish)
        streamed = await scene.post(CHAT, {**wish, "stream": True})
    said = [choice["message"]["content"] for choice in whole.json["choices"]]
    heard = ["", "", ""]
    for chunk in streamed.events:
        for choice in chunk["choices"]:
            heard[choice["index"]] += choice["delta"].get("content") or ""
    assert heard == said
    assert len(set(said)) == 3
    assert whole.json["usage"]["completion_tokens"] == 15
    assert whole.json["usage"]["prompt_tokens"] == 5


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_are_continued_together(
    stream: bool, autojump_clock: trio.testing.MockClock
) -> None:
    prompts = ["HELLO", "OTHER"]
    wish = {"model": MODEL, "prompt": prompts, "max_tokens": 4, "seed": 2, "stream": stream}
    async with serving() as scene:
        alone = [(await scene.post(TEXT, {**wish, "prompt": one, "stream": False})).json for one in prompts]
        answer = await scene.post(TEXT, wish)
        assert_all_blocks_back(scene.engine)
    heard = ["", ""]
    for body in answer.events if stream else [answer.json]:
        for choice in body["choices"]:
            heard[choice["index"]] += choice["text"]
    assert heard == [body["choices"][0]["text"] for body in alone]


async def test_an_echo_begins_with_the_prompt(autojump_clock: trio.testing.MockClock) -> None:
    async with serving() as scene:
        as_text = await scene.post(TEXT, {**PROMPT, "echo": True, "max_tokens": 2, "seed": 1})
        as_ids = await scene.post(
            TEXT, {**PROMPT, "prompt": [7, 4, 11, 11, 14], "echo": True, "max_tokens": 2, "seed": 1}
        )
    assert as_text.json["choices"][0]["text"].startswith("HELLO")
    assert as_ids.json["choices"][0]["text"] == as_text.json["choices"][0]["text"]


@pytest.mark.parametrize(
    ("path", "payload", "error"),
    [
        (CHAT, {**HELLO, "model": "other"}, (404, "model_not_found", "model")),
        (CHAT, {**HELLO, "temperature": "hot"}, (400, "invalid_value", "temperature")),
        (CHAT, {"model": MODEL}, (400, "missing_required_parameter", "messages")),
        (TEXT, {"model": MODEL}, (400, "missing_required_parameter", "prompt")),
        (TEXT, {**PROMPT, "prompt": ""}, (400, "invalid_value", "prompt")),
        (TEXT, {**PROMPT, "prompt": [1, 99]}, (400, "invalid_value", "prompt")),
        (TEXT, {**PROMPT, "prompt": "A" * 300}, (400, "context_length_exceeded", "prompt")),
        (
            CHAT,
            {**HELLO, "messages": [{"role": "user", "content": "A" * 300}]},
            (400, "context_length_exceeded", "messages"),
        ),
        (CHAT, {**HELLO, "stop_token_ids": [1000]}, (400, "invalid_value", "stop_token_ids")),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_answer_is_an_http_error(
    path: str, payload: dict[str, Any], error: Any, stream: bool, autojump_clock: trio.testing.MockClock
) -> None:
    async with serving() as scene:
        answer = await scene.post(path, {**payload, "stream": stream})
        assert_all_blocks_back(scene.engine)
    assert answer.error == error


@pytest.mark.parametrize(
    ("path", "payload"),
    [
        (CHAT, {**HELLO, "stream": True}),
        (CHAT, HELLO),
        (TEXT, {**PROMPT, "max_tokens": 200, "stream": True}),
        (TEXT, {**PROMPT, "prompt": ["HELLO", "OTHER"], "max_tokens": 200, "stream": True}),
        (TEXT, {**PROMPT, "max_tokens": 200}),
        ("/v1/responses", {"model": MODEL, "input": "HELLO", "stream": True}),
        ("/v1/responses", {"model": MODEL, "input": "HELLO"}),
    ],
)
async def test_a_client_that_goes_frees_its_blocks_within_a_step(
    path: str, payload: dict[str, Any], autojump_clock: trio.testing.MockClock
) -> None:
    async with serving() as scene, trio.open_nursery() as nursery:
        call = scene.call("POST", path, payload)
        nursery.start_soon(call.run)
        await trio.sleep(5.5 * STEP_S)
        assert scene.engine.statistics().num_requests_live > 0
        call.leave()
        await trio.sleep(STEP_S)
        assert_all_blocks_back(scene.engine)
        await trio.testing.wait_all_tasks_blocked()
        assert not call.is_over


async def test_a_full_engine_says_when_to_come_back(autojump_clock: trio.testing.MockClock) -> None:
    async with serving(max_num_seqs=1, max_queued_requests=1) as scene, trio.open_nursery() as nursery:
        calls = [scene.call("POST", CHAT, HELLO) for _ in range(2)]
        for call in calls:
            nursery.start_soon(call.run)
        await trio.sleep(3.5 * STEP_S)
        answer = await scene.post(CHAT, HELLO)
        assert answer.error[:2] == (429, "rate_limit_exceeded")
        assert int(answer.headers["retry-after"]) >= 1
        for call in calls:
            call.leave()


async def test_a_deadline_ends_the_answer_with_what_there_is(autojump_clock: trio.testing.MockClock) -> None:
    async with serving() as scene:
        by_header = await scene.post(CHAT, HELLO, headers={"X-Request-Timeout": "0.105"})
        by_body = await scene.post(CHAT, {**HELLO, "timeout": 0.105})
        wrong = await scene.post(CHAT, HELLO, headers={"X-Request-Timeout": "soon"})
        past = await scene.post(CHAT, HELLO, headers={"X-Request-Timeout": "nan"})
    for answer in (by_header, by_body):
        (choice,) = answer.json["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "deadline")
        assert 0 < len(choice["message"]["content"]) < 15
    assert wrong.error == (400, "invalid_value", "x-request-timeout")
    assert past.error[0] == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, HELLO),
        ("/v1/completions", {"model": MODEL, "prompt": ["HELLO", "HI"], "max_tokens": 100}),
    ],
    ids=["chat", "completions of several prompts"],
)
async def test_a_shutdown_in_the_middle_is_said_in_the_stream(
    path: str, body: Mapping[str, Any], autojump_clock: trio.testing.MockClock
) -> None:
    async with serving() as scene, trio.open_nursery() as nursery:
        call = scene.call("POST", path, {**body, "stream": True})
        nursery.start_soon(call.run)
        await trio.sleep(5.5 * STEP_S)
        await scene.engine.drain(trio.current_time() + STEP_S)
        await trio.testing.wait_all_tasks_blocked()
        assert b'"code":"service_unavailable"' in call.received
        assert call.received.endswith(b"data: [DONE]\n\n")
        refused = await scene.post(CHAT, HELLO)
        assert refused.error[:2] == (503, "service_unavailable")


WHOLE_BODIES = {
    CHAT: HELLO,
    "/v1/completions": {"model": MODEL, "prompt": "HELLO", "max_tokens": 100},
    "/v1/responses": {"model": MODEL, "input": "HELLO"},
}


@pytest.mark.parametrize("path", WHOLE_BODIES)
async def test_an_answer_that_is_not_streamed_ends_with_the_server_with_the_text_so_far(
    path: str, autojump_clock: trio.testing.MockClock
) -> None:
    async with serving() as scene, trio.open_nursery() as nursery:
        begun = scene.call("POST", path, WHOLE_BODIES[path])
        nursery.start_soon(begun.run)
        await trio.sleep(5.5 * STEP_S)
        await scene.engine.drain(trio.current_time() + STEP_S)
        await trio.testing.wait_all_tasks_blocked()
    answer = json.loads(begun.received)
    assert begun.status == 200
    if path == "/v1/responses":
        assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "shutdown"})
        assert (answer["error"], answer["finish_reason"]) == (None, "shutdown")
        (item,) = answer["output"]
        assert item["status"] == "incomplete"
        text, num_tokens = item["content"][0]["text"], answer["usage"]["output_tokens"]
    else:
        (choice,) = answer["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "shutdown")
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        num_tokens = answer["usage"]["completion_tokens"]
    assert len(text) == num_tokens > 0  # each token of this model is a letter


@pytest.mark.parametrize("path", WHOLE_BODIES)
async def test_an_answer_without_text_that_ends_with_the_server_is_refused_to_be_tried_again(
    path: str, autojump_clock: trio.testing.MockClock
) -> None:
    async with serving() as scene, trio.open_nursery() as nursery:
        waiting = scene.call("POST", path, WHOLE_BODIES[path])
        nursery.start_soon(waiting.run)
        while not scene.engine.statistics().num_requests_live:
            await trio.lowlevel.checkpoint()
        await scene.engine.drain(trio.current_time())
        await trio.testing.wait_all_tasks_blocked()
    assert (waiting.status, waiting.headers["retry-after"]) == (503, "5")
    assert json.loads(waiting.received)["error"]["code"] == "service_unavailable"


async def test_an_echo_of_the_prompt_that_the_end_of_the_server_cuts_is_an_error(
    autojump_clock: trio.testing.MockClock,
) -> None:
    echo = {"model": MODEL, "prompt": "HELLO", "echo": True, "logprobs": 1, "max_tokens": 0}
    async with serving() as scene, trio.open_nursery() as nursery:
        waiting = scene.call("POST", "/v1/completions", echo)
        nursery.start_soon(waiting.run)
        while not scene.engine.statistics().num_requests_live:
            await trio.lowlevel.checkpoint()
        await scene.engine.drain(trio.current_time())
        await trio.testing.wait_all_tasks_blocked()
    assert waiting.status == 503


async def test_a_step_that_fails_is_told_without_its_reasons(autojump_clock: trio.testing.MockClock) -> None:
    executor = FakeExecutor(num_blocks=64, block_size=4)

    def poison(plan: Any) -> None:
        raise RuntimeError("secret of the runner")

    async with serving(executor, max_num_seqs=1) as scene:
        executor.before_step = poison
        answer = await scene.post(CHAT, HELLO)
        assert b"secret" not in answer.body
        assert answer.error[:2] == (503, "service_unavailable")  # the engine has died of it
        executor.before_step = lambda plan: None


async def test_comments_keep_a_slow_stream_alive(autojump_clock: trio.testing.MockClock) -> None:
    class Slow(FakeExecutor):
        async def compute(self, plan: Any) -> Any:
            await trio.sleep(40)
            return await super().compute(plan)

    async with serving(Slow(num_blocks=64, block_size=4), step_timeout=1000.0) as scene:
        answer = await scene.post(CHAT, {**HELLO, "stream": True, "max_tokens": 2})
    assert answer.body.count(b": keep-alive\n\n") >= 4
    assert len(texts(answer.events)) == 2


async def test_tools_reach_the_template_and_unknown_formats_of_calls_are_refused(
    autojump_clock: trio.testing.MockClock,
) -> None:
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
    async with serving() as scene:
        refused = await scene.post(CHAT, {**HELLO, "tools": [tool]})
        unwanted = await scene.post(CHAT, {**HELLO, "tools": [tool], "tool_choice": "none", "max_tokens": 2})
    assert refused.error == (400, "unsupported_parameter", "tool_choice")
    assert unwanted.status == 200
    async with serving(tool_parser="hermes") as scene:
        answer = await scene.post(CHAT, {**HELLO, "tools": [tool], "max_tokens": 3, "seed": 1})
    assert len(answer.json["choices"][0]["message"]["content"]) == 3


# As the template of Mistral 7B v0.3 does.
NINE_CHARACTERS = """\
{% for m in messages %}{% for one in [m.tool_call_id] if one is defined %}
{% if one | length != 9 %}{{ raise_exception('Tool call IDs should have length 9!') }}{% endif %}
{% endfor %}{% for call in m.tool_calls or [] %}[TOOL_CALLS]
{% if call.id | length != 9 %}{{ raise_exception('Tool call IDs should have length 9!') }}{% endif %}
{{ call.function | tojson }}{% endfor %}{{ m.content }}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}
"""


async def test_the_ids_of_calls_are_those_that_the_templates_of_mistral_take(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    shutil.copytree(NANO, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(NINE_CHARACTERS)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    item = {"type": "function", **tool["function"]}  # type: ignore[dict-item]
    question: dict[str, Any] = {"role": "user", "content": "Hi"}
    async with (
        open_fake_engine('[TOOL_CALLS]f{"a":1}', tokenizer=str(tmp_path)) as engine,
        open_gateway(engine) as gateway,
    ):
        assert engine.tool_parser == "mistral"
        scene = Scene(engine, create_app(engine, gateway=gateway), gateway)
        model = engine.model_name
        body = {"model": model, "tools": [tool], "max_tokens": 40}
        said = (await scene.post(CHAT, {**body, "messages": [question]})).json["choices"][0]["message"]
        [call] = said["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "2"}
        answer = await scene.post(CHAT, {**body, "messages": [question, said, result]})
        first = await scene.post("/v1/responses", {"model": model, "tools": [item], "input": "Hi"})
        [called] = first.json["output"]
        output = {"type": "function_call_output", "call_id": called["call_id"], "output": "2"}
        wish = {"model": model, "tools": [item], "input": [output], "previous_response_id": first.json["id"]}
        second = await scene.post("/v1/responses", wish)
    assert (call["id"].isalnum(), len(call["id"])) == (True, 9)
    assert (answer.status, second.status) == (200, 200)
    assert called["id"].startswith("fc_")


@pytest.mark.parametrize(
    ("path", "asked"),
    [(CHAT, HELLO), ("/v1/responses", {"model": MODEL, "input": "HELLO"})],
)
async def test_reasoning_between_special_tokens_is_told_from_the_answer(
    tmp_path: Path, path: str, asked: dict[str, Any], autojump_clock: trio.testing.MockClock
) -> None:
    for file in Path(triolet.__file__).with_name("nano").glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    change_json(tmp_path / "tokenizer_config.json", chat_template="{{ messages[0].content }}{# [THINK] #}")
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(f"[{name}]", special=True) for name in ("THINK", "/THINK")]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    async with (
        open_fake_engine("[THINK]Hm.[/THINK]Hello.", tokenizer=str(tmp_path)) as engine,
        open_gateway(engine) as gateway,
    ):
        scene = Scene(engine, create_app(engine, gateway=gateway), gateway)
        answer = (await scene.post(path, asked)).json
    if path == CHAT:
        message = answer["choices"][0]["message"]
        assert message["reasoning"] == message["reasoning_content"] == "Hm."
        assert message["content"] == "Hello."
    else:
        reasoning, message = answer["output"]
        assert (reasoning["content"][0]["text"], message["content"][0]["text"]) == ("Hm.", "Hello.")
