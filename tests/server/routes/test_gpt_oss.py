"""Chats with a model that writes messages in channels, as gpt-oss does, over both of OpenAI's APIs."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import trio

import triolet
from tests.model.tiny import change_json
from tests.server.routes.harness import Scene
from triolet.core.tools.harmony import HarmonyFormat
from triolet.server import create_app
from triolet.server.responses.service import open_gateway
from triolet.testing import ScriptedModel, open_fake_engine

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
# What the template of gpt-oss reads, and what it refuses.
TEMPLATE = """\
{%- if reasoning_effort is not defined %}{% set reasoning_effort = "medium" %}{% endif -%}
<|start|>system<|message|>Reasoning: {{ reasoning_effort }}<|end|>
{%- if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif -%}
{%- set last = namespace(name=none) -%}
{%- for message in messages -%}
  {%- if message.role == "assistant" and message.tool_calls -%}
    {%- if message.content and message.thinking -%}
      {{- raise_exception("content or thinking, not both") -}}
    {%- endif -%}
    {%- if message.content or message.thinking -%}
      <|start|>assistant<|channel|>analysis<|message|>{{ message.content or message.thinking }}<|end|>
    {%- endif -%}
    {%- set function = message.tool_calls[0].function -%}
    {%- set last.name = function.name -%}
    <|start|>assistant to=functions.{{ function.name }}<|channel|>commentary json<|message|>
    {{- function.arguments | tojson -}}<|call|>
  {%- elif message.role == "assistant" -%}
    <|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
  {%- elif message.role == "tool" -%}
    {%- if last.name is none -%}{{- raise_exception("no call") -}}{%- endif -%}
    <|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>{{ message.content | tojson }}<|end|>
  {%- else -%}
    <|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""
ANALYSIS = "<|channel|>analysis<|message|>The user says hi.<|end|><|start|>assistant"
HELLO = f"{ANALYSIS}<|channel|>final<|message|>Hello!"
CALL = f'{ANALYSIS}<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>{{"word": "a"}}'
PARAMETERS = {
    "type": "object",
    "properties": {"word": {"enum": ["a", "b"]}},
    "required": ["word"],
    "additionalProperties": False,
}
FUNCTION = {"name": "look_up", "parameters": PARAMETERS, "strict": True}


def tool(path: str) -> dict[str, Any]:
    return {"type": "function", "function": FUNCTION} if path == CHAT else {"type": "function", **FUNCTION}


def asked(path: str, **fields: Any) -> dict[str, Any]:
    hi: Any = [{"role": "user", "content": "Hi"}]
    return {"model": "gpt-oss", ("messages" if path == CHAT else "input"): hi, **fields}


def answered(path: str, answer: Any) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, text and calls of an answer of either API."""
    if path == CHAT:
        message = answer["choices"][0]["message"]
        functions = [call["function"] for call in message.get("tool_calls", [])]
        calls = [(function["name"], function["arguments"]) for function in functions]
        return message.get("reasoning_content", ""), message["content"] or "", calls
    items = answer["output"]
    reasoning, text = (
        "".join(part["text"] for item in items if item["type"] == kind for part in item["content"])
        for kind in ("reasoning", "message")
    )
    return reasoning, text, [(i["name"], i["arguments"]) for i in items if i["type"] == "function_call"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer whose special tokens are the marks."""
    for file in Path(triolet.__file__).with_name("nano").glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    change_json(tmp_path / "tokenizer_config.json", chat_template=TEMPLATE, eos_token="<|return|>")
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_special_tokens([tokenizers.AddedToken(mark, special=True) for mark in HarmonyFormat.MARKS])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ends = [tokenizer.token_to_id(mark) for mark in ("<|return|>", "<|call|>")]
    change_json(tmp_path / "generation_config.json", eos_token_id=ends)
    return tmp_path


@asynccontextmanager
async def serving(folder: Path, *answers: str, **fields: Any) -> AsyncGenerator[tuple[Scene, ScriptedModel]]:
    model = ScriptedModel(answers)
    settings: dict[str, Any] = {"tokenizer": str(folder), "served_model_name": "gpt-oss", **fields}
    async with open_fake_engine(model, **settings) as engine, open_gateway(engine) as gateway:
        yield Scene(engine, create_app(engine, gateway=gateway), gateway), model


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_the_channels_of_an_answer_are_told_apart(
    folder: Path, path: str, autojump_clock: trio.testing.MockClock
) -> None:
    async with serving(folder, HELLO, CALL) as (scene, _):
        assert (scene.engine.tool_parser, scene.engine.reasoning_parser) == ("gpt_oss", "gpt_oss")
        hello = await scene.post(path, asked(path))
        called = await scene.post(path, asked(path, tools=[tool(path)]))
    assert answered(path, hello.json) == ("The user says hi.", "Hello!", [])
    assert answered(path, called.json) == ("The user says hi.", "", [("look_up", '{"word": "a"}')])
    if path == CHAT:
        assert called.json["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_stream_of_channels_says_the_same(
    folder: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with serving(folder, HELLO, CALL) as (scene, _):
        hello = await scene.post(CHAT, asked(CHAT, stream=True))
        called = await scene.post(CHAT, asked(CHAT, stream=True, tools=[tool(CHAT)]))
    deltas = [chunk["choices"][0]["delta"] for chunk in hello.events]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "The user says hi."
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello!"
    calls = [call for chunk in called.events for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert calls[0]["function"]["name"] == "look_up"
    assert "".join(call["function"]["arguments"] for call in calls) == '{"word": "a"}'


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize(
    ("effort", "said"), [(None, "medium"), ("low", "low"), ("high", "high"), ("minimal", "low"), ("max", "high")]
)  # fmt: skip
async def test_the_effort_is_said_in_the_prompt(
    folder: Path, path: str, effort: str | None, said: str, autojump_clock: trio.testing.MockClock
) -> None:
    wish: dict[str, Any] = {"reasoning_effort": effort} if path == CHAT else {"reasoning": {"effort": effort}}
    async with serving(folder, HELLO) as (scene, model):
        answer = await scene.post(path, asked(path, **wish))
    assert answer.status == 200
    assert f"Reasoning: {said}<|end|>" in model.prompts[0]


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize("choice", ["required", "named"])
async def test_a_forced_call_is_written_in_its_channel(
    folder: Path, path: str, choice: str, autojump_clock: trio.testing.MockClock
) -> None:
    named = {"name": "look_up"} if path == RESPONSES else {"function": {"name": "look_up"}}
    wish = asked(
        path, tools=[tool(path)], tool_choice={"type": "function", **named} if choice == "named" else choice
    )
    async with serving(folder, CALL, HELLO) as (scene, _):
        called = await scene.post(path, wish)
        refused = await scene.post(path, wish)
    assert answered(path, called.json) == ("The user says hi.", "", [("look_up", '{"word": "a"}')])
    # The script has the model say what the form does not allow.
    assert refused.status >= 500 or refused.json["status"] == "failed"


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_a_form_begins_with_the_final_message(
    folder: Path, path: str, autojump_clock: trio.testing.MockClock
) -> None:
    form: dict[str, Any] = {"response_format": {"type": "json_object"}}
    if path == RESPONSES:
        form = {"text": {"format": {"type": "json_object"}}}
    said = f'{ANALYSIS}<|channel|>final<|message|>{{"a": 1}}'
    called = asked(path, tools=[tool(path)], **form)
    async with serving(folder, said, said, CALL) as (scene, _):
        answers = [await scene.post(path, wish) for wish in (asked(path, **form), called, called)]
    assert [answered(path, answer.json)[1:] for answer in answers] == [
        ('{"a": 1}', []),
        ('{"a": 1}', []),
        ("", [("look_up", '{"word": "a"}')]),
    ]


@pytest.mark.parametrize("preamble", ["", "Let me look."])
async def test_the_template_gets_earlier_calls_with_their_reasoning(
    folder: Path, preamble: str, autojump_clock: trio.testing.MockClock
) -> None:
    before = f"<|channel|>commentary<|message|>{preamble}<|end|><|start|>assistant" if preamble else ""
    async with serving(folder, CALL.replace(ANALYSIS, ANALYSIS + before), HELLO) as (scene, model):
        wish = asked(CHAT, tools=[tool(CHAT)])
        said = (await scene.post(CHAT, wish)).json["choices"][0]["message"]
        assert (said["content"] or "") == preamble
        result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "first letter"}
        answer = await scene.post(CHAT, {**wish, "messages": [*wish["messages"], said, result]})
    assert answered(CHAT, answer.json)[1] == "Hello!"
    thought = f"The user says hi.\n{preamble}" if preamble else "The user says hi."
    assert model.prompts[1].endswith(
        f"<|start|>assistant<|channel|>analysis<|message|>{thought}<|end|>"
        '<|start|>assistant to=functions.look_up<|channel|>commentary json<|message|>{"word": "a"}<|call|>'
        '<|start|>functions.look_up to=assistant<|channel|>commentary<|message|>"first letter"<|end|>'
        "<|start|>assistant"
    )


async def test_an_answer_that_is_cut_short_shows_no_mark(
    folder: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with serving(folder, *[HELLO] * 60) as (scene, _):
        for max_tokens in range(1, 60, 3):
            answer = await scene.post(CHAT, asked(CHAT, max_tokens=max_tokens))
            reasoning, text, _ = answered(CHAT, answer.json)
            assert "The user says hi.".startswith(reasoning)
            assert "Hello!".startswith(text)
    assert json.loads(answer.body)["choices"][0]["finish_reason"] in ("length", "stop")
