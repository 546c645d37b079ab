"""Tools in a conversation, forced calls of them, and reasoning that a budget ends, with a model of random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import triolet
from tests.model.tiny import change_json, make_model
from triolet import FinishReason, SamplingParams, StructuredOutputsParams
from triolet.core.tools import (
    ReasoningPiece,
    TextPiece,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
    plan_tools,
)
from triolet.core.tools.answer import thinking_switch_of
from triolet.errors import ChatTemplateError, InvalidPrompt, UnsupportedFeature

TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>"
    "Answer with <tool_call>.{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>{% endif %}"
)
MESSAGES = [{"role": "user", "content": "Weather in Rome?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"enum": [1, 3, 7]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {
    "type": "function",
    "name": "get_time",
    "parameters": {"type": "object", "additionalProperties": False},
}
QUIET = {"chat_template_kwargs": {"enable_thinking": False}}
DIGITS = StructuredOutputsParams(regex="[0-9]{3}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    make_model("llama-plain", path, with_tokenizer=True, max_position_embeddings=1024)
    change_json(path / "tokenizer_config.json", chat_template=TEMPLATE)
    return path


def opened(folder: Path, **fields: Any) -> Any:
    settings: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 256, "runner": "inline"}
    return triolet.open_engine(model=str(folder), **(settings | fields))


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 1.0, "seed": 1, "max_tokens": 200} | fields))


async def test_the_engine_tells_the_formats_from_the_template(folder: Path) -> None:
    async with opened(folder) as engine:
        assert (engine.tool_parser, engine.reasoning_parser) == ("hermes", "qwen3")
        assert thinking_switch_of(engine.tokenizer) == "enable_thinking"
    async with opened(folder, tool_parser="mistral", reasoning_parser="none") as engine:
        assert (engine.tool_parser, engine.reasoning_parser) == ("mistral", None)


async def test_tools_are_told_to_the_model_by_its_template(folder: Path) -> None:
    async with opened(folder) as engine:
        plan = plan_tools([WEATHER, CLOCK], tool_parser=engine.tool_parser)
        prompt = {"messages": MESSAGES, "tools": plan.template_tools}
        output = await engine.complete(prompt, params(max_tokens=1))
        assert '<tools>{"type": "function", "function": {"name": "get_weather"' in output.prompt
        assert "Weather in Rome?" in output.prompt
        output = await engine.complete({"messages": MESSAGES}, params(max_tokens=1))
        assert "<tools>" not in output.prompt


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        (
            {"messages": MESSAGES, "tols": []},
            InvalidPrompt,
            "no fields but messages, tools, chat_template, ",
        ),
        ({"messages": MESSAGES, "tools": "all"}, InvalidPrompt, "tools must be a list of mappings"),
        ({"messages": "hello"}, InvalidPrompt, "messages must be a list"),
        (
            {"messages": MESSAGES, "chat_template_kwargs": {"colour": 1}},
            ChatTemplateError,
            "no value named 'colour'",
        ),
        (
            {"messages": MESSAGES, "chat_template_kwargs": {"tools": 1}},
            InvalidPrompt,
            "must not hold 'tools'",
        ),
        ({"messages": MESSAGES, "chat_template_kwargs": [1]}, InvalidPrompt, "must be a mapping"),
    ],
)
async def test_a_wrong_conversation_is_refused(folder: Path, prompt: Any, error: Any, message: str) -> None:
    async with opened(folder) as engine:
        with pytest.raises(error, match=message):
            await engine.complete(prompt, params())


async def test_tools_are_refused_where_the_template_has_no_place_for_them(tmp_path: Path) -> None:
    make_model("llama-plain", tmp_path, with_tokenizer=True)
    async with opened(tmp_path) as engine:
        assert engine.tool_parser == "none"
        with pytest.raises(UnsupportedFeature, match="chat template has no place for them"):
            await engine.complete({"messages": MESSAGES, "tools": [WEATHER]}, params())
        plan = plan_tools([CLOCK], "required", tool_parser=engine.tool_parser, parallel_tool_calls=False)
        forced = params(structured_outputs=plan.structured_outputs)
        output = await engine.complete({"messages": MESSAGES, "tools": plan.template_tools}, forced)
        *_, end = plan.parser().feed(output.text)
        assert isinstance(end, ToolCallEnd)
        assert (end.name, end.is_valid) == ("get_time", True)


@pytest.mark.parametrize("seed", range(3))
async def test_a_named_function_is_called_with_arguments_that_follow_its_schema(
    folder: Path, seed: int
) -> None:
    async with opened(folder) as engine:
        plan = plan_tools([WEATHER, CLOCK], {"type": "function", "name": "get_weather"})
        prompt = {"messages": MESSAGES, "tools": plan.template_tools, **QUIET}
        output = await engine.complete(prompt, params(structured_outputs=plan.structured_outputs, seed=seed))
        parser = plan.parser(output.prompt)
        *_, end = [*parser.feed(output.text), *parser.finish()]
        assert isinstance(end, ToolCallEnd)
        assert (end.name, end.is_valid) == ("get_weather", True)
        arguments = json.loads(end.arguments)
        assert len(arguments["city"]) <= 6
        assert arguments["days"] in (1, 3, 7)


@pytest.mark.parametrize("seed", range(3))
async def test_required_gives_calls_of_functions_that_there_are(folder: Path, seed: int) -> None:
    async with opened(folder) as engine:
        plan = plan_tools(
            [WEATHER, CLOCK],
            "required",
            reasoning_parser=engine.reasoning_parser,
            parallel_tool_calls=False,
        )
        prompt = {"messages": MESSAGES, "tools": plan.template_tools}
        bound = params(
            structured_outputs=plan.structured_outputs, thinking_token_budget=4, seed=seed, max_tokens=300
        )
        output = await engine.complete(prompt, bound)
        assert output.finish_reason is FinishReason.STOP
        parser = plan.parser(output.prompt)
        events = [*parser.feed(output.text), *parser.finish()]
        assert any(isinstance(event, ReasoningPiece) for event in events)
        [begin] = [event for event in events if isinstance(event, ToolCallBegin)]
        [end] = [event for event in events if isinstance(event, ToolCallEnd)]
        assert begin.name == end.name
        assert end.name in ("get_weather", "get_time")
        assert end.is_valid
        pieces = [event.text for event in events if isinstance(event, ToolCallArguments)]
        assert "".join(pieces) == end.arguments


@pytest.mark.parametrize("is_strict", [True, False])
async def test_a_call_that_the_model_begins_follows_the_schema_of_a_strict_tool(
    folder: Path, is_strict: bool
) -> None:
    tool = {"type": "function", "strict": is_strict, **WEATHER["function"]}  # type: ignore[dict-item]
    async with opened(folder, tool_parser="llama3_json", reasoning_parser="none") as engine:
        plan = plan_tools([tool, CLOCK], tool_parser=engine.tool_parser, parallel_tool_calls=False)
        # Random weights would begin none: they are made to like the bracket that does, in this format.
        likes_brackets = params(
            structured_outputs=plan.structured_outputs, logit_bias={ord("{") - ord("!"): 100.0}
        )
        output = await engine.complete({"messages": MESSAGES, **QUIET}, likes_brackets)
        parser = plan.parser(output.prompt)
        ends = [
            event for event in (*parser.feed(output.text), *parser.finish()) if isinstance(event, ToolCallEnd)
        ]
        if not is_strict:
            assert (ends, output.text) == ([], "{" * 200)
            return
        [end] = ends
        assert (end.is_valid, output.finish_reason) == (True, FinishReason.STOP)
        if end.name == "get_weather":
            assert json.loads(end.arguments)["days"] in (1, 3, 7)


@pytest.mark.parametrize("likes", ["<", "{"])
async def test_an_answer_with_tools_and_a_form_is_a_call_or_of_the_form(folder: Path, likes: str) -> None:
    async with opened(folder, tool_parser="hermes") as engine:
        digit = {"type": "object", "properties": {"digit": {"enum": [1, 2]}}, "required": ["digit"]}
        form = StructuredOutputsParams(json={**digit, "additionalProperties": False})
        plan = plan_tools(
            [WEATHER], tool_parser="hermes", reasoning_parser=engine.reasoning_parser, form=form
        )
        assert plan.structured_outputs is not None
        bound = params(
            structured_outputs=plan.structured_outputs,
            logit_bias={ord(likes) - ord("!"): 100.0, ord("<" if likes == "{" else "{") - ord("!"): -100.0},
            thinking_token_budget=4,
            max_tokens=80,
        )
        output = await engine.complete({"messages": MESSAGES, "tools": plan.template_tools}, bound)
        parser = plan.parser(output.prompt)
        events = [*parser.feed(output.text), *parser.finish()]
        said = "".join(event.text for event in events if isinstance(event, TextPiece))
        begun = [event.name for event in events if isinstance(event, ToolCallBegin)]
        if likes == "{":
            assert begun == []
            assert json.loads(said) in ({"digit": 1}, {"digit": 2})
        else:
            assert set(begun) == {"get_weather"}
            assert said.strip() in ("", *("<tool_call>"[:length] for length in range(1, 12)))


# ------------------------------------------------------------------------------------------- thinking


@pytest.mark.parametrize("budget", [0, 1, 5])
async def test_a_budget_ends_the_thinking_and_the_form_begins_behind_it(folder: Path, budget: int) -> None:
    async with opened(folder) as engine:
        bound = params(structured_outputs=DIGITS, thinking_token_budget=budget)
        output = await engine.complete({"messages": MESSAGES}, bound)
        thought, mark, answer = output.text.partition("</think>")
        assert mark == "</think>"
        assert DIGITS.regex is not None
        assert len(answer) == 3
        assert answer.isdigit()
        assert len(output.outputs[0].token_ids) == budget + len("</think>") + 3
        assert len(thought) <= budget


async def test_a_model_that_was_told_not_to_think_begins_with_the_form(folder: Path) -> None:
    async with opened(folder) as engine:
        output = await engine.complete({"messages": MESSAGES, **QUIET}, params(structured_outputs=DIGITS))
        assert len(output.text) == 3
        assert output.text.isdigit()


async def test_a_prompt_that_does_not_end_amid_a_thought_gets_the_form_or_a_thought_before_it(
    folder: Path,
) -> None:
    mark_begins = ord("<") - ord("!")  # as the tokenizer's alphabet does
    thoughts = []
    async with opened(folder) as engine:
        for bias in (-100.0, 100.0):
            bound = params(structured_outputs=DIGITS, logit_bias={mark_begins: bias}, thinking_token_budget=4)
            output = await engine.complete("12 plus 30 is", bound)
            thought, mark, answer = output.text.rpartition("</think>")
            thoughts.append(thought + mark)
            assert len(answer) == 3
            assert answer.isdigit()
    assert thoughts[0] == ""
    assert thoughts[1].startswith("<think>")
    assert thoughts[1].endswith("</think>")


async def test_a_budget_works_without_a_form(folder: Path) -> None:
    async with opened(folder) as engine:
        output = await engine.complete({"messages": MESSAGES}, params(thinking_token_budget=3, max_tokens=20))
        splitter = plan_tools(reasoning_parser=engine.reasoning_parser).parser(output.prompt)
        events = [*splitter.feed(output.text), *splitter.finish()]
        assert isinstance(events[0], ReasoningPiece)
        assert any(isinstance(event, TextPiece) for event in events)
        free = await engine.complete({"messages": MESSAGES}, params(thinking_token_budget=-1, max_tokens=20))
        assert "</think>" not in free.text


async def test_a_budget_is_refused_where_thinking_is_not_known(tmp_path: Path) -> None:
    make_model("llama-plain", tmp_path, with_tokenizer=True)
    async with opened(tmp_path) as engine:
        with pytest.raises(
            UnsupportedFeature, match=r"thinking_token_budget must be None: .*reasoning_parser"
        ):
            await engine.complete([1, 2], params(thinking_token_budget=3))
        assert (await engine.complete([1, 2], params(thinking_token_budget=-1, max_tokens=2))).finished


OPENS_ITSELF = (
    "{{ messages[0].content.split('</think>')[-1] }}<|assistant|>{% if thinking %}<think>{% endif %}"
)
LEAVES_IT_TO_THE_MODEL = (
    "{{ messages[0].content }}{% if enable_thinking %}Think, <think> and </think>.{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "kwargs", "beginning"),
    [
        (OPENS_ITSELF, {}, "form"),
        (OPENS_ITSELF, {"thinking": False}, "form"),
        (OPENS_ITSELF, {"thinking": True}, "reasoning"),
        (LEAVES_IT_TO_THE_MODEL, {}, "<think>"),
    ],
)
async def test_a_form_begins_the_answer_where_a_template_that_opens_reasoning_has_not(
    tmp_path: Path, template: str, kwargs: dict[str, bool], beginning: str
) -> None:
    make_model("llama-plain", tmp_path, with_tokenizer=True, max_position_embeddings=1024)
    change_json(tmp_path / "tokenizer_config.json", chat_template=template)
    async with opened(tmp_path) as engine:
        assert engine.reasoning_parser == "qwen3"
        eager = engine.tokenizer.encode("<think>", add_special_tokens=False)[
            0
        ]  # the model wants to begin with it
        prompt = {"messages": MESSAGES, "chat_template_kwargs": kwargs}
        output = await engine.complete(
            prompt, params(structured_outputs=DIGITS, logit_bias={eager: 100.0}, max_tokens=40)
        )
    text = output.outputs[0].text
    match beginning:
        case "form":
            assert text.isdigit() and len(text) == 3
        case "<think>":
            assert text.startswith("<think>")
        case _:  # until the limit: it never writes the closing mark
            assert output.prompt.endswith("<think>") and not text.isdigit()


@pytest.mark.parametrize("is_text", [True, False])
async def test_an_answer_that_continues_long_reasoning_is_the_same_when_another_engine_finishes_it(
    folder: Path, is_text: bool
) -> None:
    text = "<|user|>Weather in Rome?<|assistant|><think>" + "It may rain there. " * 20
    asked = params(structured_outputs=DIGITS, thinking_token_budget=20, max_tokens=40)
    async with opened(folder) as engine:
        prompt = text if is_text else engine.tokenizer.encode(text, add_special_tokens=False)
        whole = await engine.complete(prompt, asked)
        async with engine.generate(prompt, asked, request_id="r") as stream:
            await anext(stream)
            saved = triolet.Snapshot.from_bytes(engine.snapshot().to_bytes())
    reasoning, closed, answer = whole.text.partition("</think>")
    assert (bool(reasoning), closed) == (True, "</think>")
    assert answer.isdigit() and len(answer) == 3
    async with opened(folder) as engine, engine.resume(saved)["r"] as stream:
        async for output in stream:
            last = output
    assert last.outputs[0].token_ids == whole.outputs[0].token_ids
    assert last.text == whole.text
