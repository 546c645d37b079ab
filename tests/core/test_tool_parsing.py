"""Answers are told apart as early as they can be: text that is no call, calls, forced calls, reasoning and spaces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest

from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.core.tools import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    AnswerEvent,
    AnswerParser,
    FunctionTool,
    ReasoningPiece,
    TextPiece,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
    ToolPlan,
    parse_tools,
    plan_tools,
)
from triolet.core.tools.answer import (
    effort_values,
    reasoning_parser_named,
    template_efforts_of,
    thinking_switch_of,
    thinks_at,
    tool_parser_named,
    tool_parser_of,
)
from triolet.core.tools.calls import ObjectCall
from triolet.core.tools.either import CallsOrForm
from triolet.core.tools.forced import ArgumentsFormat, CallListFormat
from triolet.core.tools.formats import HermesFormat, MistralFormat, ToolFormat
from triolet.core.tools.reasoning import ReasoningSplitter, ReasoningState
from triolet.core.tools.scanning import CallScanner, ValueScanner, as_string, parsed, split_at_marker
from triolet.errors import InvalidRequest


def call(index: int, name: str, arguments: str, *, is_valid: bool = True) -> list[AnswerEvent]:
    """The events of a call that came in one piece."""
    pieces: list[AnswerEvent] = [ToolCallArguments(index, arguments)] if arguments else []
    return [ToolCallBegin(index, name), *pieces, ToolCallEnd(index, name, arguments, is_valid)]


def fed(parser: ToolFormat, *pieces: str) -> list[AnswerEvent]:
    """The events of pieces of text, without those of the end."""
    return [event for piece in pieces for event in parser.feed(piece)]


# -------------------------------------------------------------------------------- text and no call


@pytest.mark.parametrize(
    ("name", "text", "passed_on"),
    [
        ("hermes", "hello", "hello"),
        ("hermes", "hello <tool", "hello "),
        ("hermes", "<tool_call>sorry", "<tool_call>sorry"),
        ("hermes", "<tool_call>{}", "<tool_call>{}"),
        ("hermes", '<tool_call>{"a": 1}', '<tool_call>{"a": 1}'),
        ("hermes", '<tool_call>{"name": ""', '<tool_call>{"name": ""'),
        ("llama3_json", "hello", "hello"),
        ("llama3_json", ' {"name": "unknown"', ' {"name": "unknown"'),
        ("llama3_json", '{"name": "f"}', '{"name": "f"}'),
        ("llama3_json", "<|python_tag|>print", "<|python_tag|>print"),
        ("llama3_json", "<|python", ""),
        ("mistral", "[TOOL_CALLS] [1", "[TOOL_CALLS] [1"),
        ("mistral", "[TOOL_CALLS]a b", "[TOOL_CALLS]a b"),
        ("mistral", "[TOOL_CALLS]f[CALL_ID]a b", "[TOOL_CALLS]f[CALL_ID]a b"),
        ("mistral", "[TOOL_CALLS]" + "f" * 64, ""),
        ("mistral", "[TOOL_CALLS]" + "f" * 65, "[TOOL_CALLS]" + "f" * 65),
        ("mistral", "[TOOL_CALLS]f_-.9", ""),
    ],
)
def test_text_is_passed_on_as_soon_as_it_can_be_no_call(name: str, text: str, passed_on: str) -> None:
    events = TOOL_FORMATS[name](["f"]).feed(text)
    assert "".join(event.text for event in events if isinstance(event, TextPiece)) == passed_on


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>{"name": "f"'),
        ("llama3_json", ' {"name": "f"'),
        ("llama3_json", " <|python_tag|"),
        ("mistral", "[TOOL_CALLS] "),
        ("mistral", "[TOOL_CALLS] [ "),
        ("mistral", "[TOOL_CALLS]f[CALL_ID]x"),
    ],
)
def test_what_may_become_a_call_is_held_back_and_is_text_where_the_answer_ends(name: str, text: str) -> None:
    parser = TOOL_FORMATS[name](["f"])
    assert parser.feed(text) == []
    assert parser.finish() == [TextPiece(text)]
    assert TOOL_FORMATS[name](["f"]).finish() == []


# ------------------------------------------------------------------------------------------- calls


BRACES = [ToolCallArguments(0, "{"), ToolCallArguments(0, "}")]


@pytest.mark.parametrize(
    ("name", "pieces", "events"),
    [
        ("hermes", ['<tool_call>{"name": "f", "arguments": {', "}"], BRACES),
        ("llama3_json", ['{"name": "f", "parameters": {', "}"], BRACES),
        ("mistral", ["[TOOL_CALLS]f[ARGS] {", "}"], BRACES),
        ("mistral", ["[TOOL_CALLS]f{", "}"], BRACES),
    ],
)  # fmt: skip
def test_arguments_are_passed_on_as_they_come(
    name: str, pieces: list[str], events: list[AnswerEvent]
) -> None:
    found = fed(TOOL_FORMATS[name](["f"]), *pieces)
    assert found[0] == ToolCallBegin(0, "f")
    assert [event for event in found[1:] if isinstance(event, ToolCallArguments)] == events


@pytest.mark.parametrize(
    ("name", "text", "events"),
    [
        ("hermes", '<tool_call>{"name": "f"} </tool_call>x', [*call(0, "f", "{}"), TextPiece("x")]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call', call(0, "f", "{}")),
        ("hermes", '<tool_call>{"name": "f"}</tool', call(0, "f", "{}")),
        ("hermes", '<tool_call>{"name": "f"}rest', [*call(0, "f", "{}"), TextPiece("rest")]),
        (
            "hermes", '<tool_call>{"name": "f", "arguments": {]x<tool_call>{"name": "g"}',
            [*call(0, "f", "{]", is_valid=False), *call(1, "g", "{}")],
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": {]x</tool', call(0, "f", "{]", is_valid=False)),
        (
            "hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>b<tool_call>{"name": "g"}',
            [*call(0, "f", '{"a": 1}'), TextPiece("b"), *call(1, "g", "{}")],
        ),
        (
            "hermes", '<tool_call>{"name": "f", "arguments": {"a": 1\n</tool_call>b',
            [*call(0, "f", '{"a": 1\n', is_valid=False), TextPiece("b")],
        ),
        (
            "hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}<tool_call>{"name": "g"}</tool_call>',
            [*call(0, "f", '{"a": 1}'), *call(1, "g", "{}")],
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}', call(0, "f", "[1]", is_valid=False)),
        ("hermes", '<tool_call>{"name": "f", "arguments": ""}', call(0, "f", '""', is_valid=False)),
        (
            "llama3_json", '{"name": "f", "parameters": {}};{"name": "f", "arguments": {}}',
            [*call(0, "f", "{}"), *call(1, "f", "{}")],
        ),
        ("llama3_json", '{"name": "f", "parameters": {}} and', [*call(0, "f", "{}"), TextPiece("and")]),
        ("llama3_json", 'a<|python_tag|> {"name": "f", "parameters": {}}', [TextPiece("a"), *call(0, "f", "{}")]),
        (
            "llama3_json", '{"name": "f", "parameters": {]}; {"name": "f", "parameters": {}}',
            call(0, "f", "{]", is_valid=False),
        ),
        (
            "llama3_json", '{"name": "f", "parameters": {"a": 1}<|python_tag|>{"name": "f", "parameters": {}}',
            [*call(0, "f", '{"a": 1}'), *call(1, "f", "{}")],
        ),
        ("mistral", '[TOOL_CALLS]{"name": "f"}', call(0, "f", "{}")),
        (
            "mistral", '[TOOL_CALLS]{"name": "f"}, {"name": "g"}]x',
            [*call(0, "f", "{}"), *call(1, "g", "{}"), TextPiece("x")],
        ),
        ("mistral", "[TOOL_CALLS]f{}x", [*call(0, "f", "{}"), TextPiece("x")]),
        ("mistral", "[TOOL_CALLS]f[CALL_ID]id9{}", call(0, "f", "{}")),
        ("mistral", "[TOOL_CALLS]f[ARGS]{]x", call(0, "f", "{]", is_valid=False)),
        (
            "mistral", "[TOOL_CALLS]f[ARGS]{]x[TOOL_CALLS]g[ARGS]{}",
            [*call(0, "f", "{]", is_valid=False), *call(1, "g", "{}")],
        ),
        ("mistral", "[TOOL_CALLS]f[ARGS]{]x[TOOL", call(0, "f", "{]", is_valid=False)),
        ("mistral", "[TOOL_CALLS]f[ARGS]", call(0, "f", "", is_valid=False)),
        ("mistral", '[TOOL_CALLS][{"name": "f"}', call(0, "f", "{}")),
    ],
)  # fmt: skip
def test_calls_and_the_text_around_them_are_told_apart(
    name: str, text: str, events: list[AnswerEvent]
) -> None:
    parser = TOOL_FORMATS[name](["f"])
    found = [*parser.feed(text), *parser.finish()]
    assert [event for event in found if not is_within(event)] == [
        event for event in events if not is_within(event)
    ]


def is_within(event: AnswerEvent) -> bool:
    """Whether the event is a piece of arguments, of which there may be any number."""
    return isinstance(event, ToolCallArguments)


def test_without_the_names_of_functions_every_name_is_one() -> None:
    text = '{"name": "anything", "parameters": {}}'
    parser = TOOL_FORMATS["llama3_json"]([])
    assert parser.feed(text)[0] == ToolCallBegin(0, "anything")
    assert TOOL_FORMATS["llama3_json"]([]).feed('{"name": "", "parameters": {}}')[0] == TextPiece(
        '{"name": ""'
    )


# ------------------------------------------------------------------------------------ forced calls


def test_forced_arguments_begin_with_the_first_character_that_is_no_space() -> None:
    parser = ArgumentsFormat("f")
    assert parser.feed(" \n") == []
    assert parser.feed(' {"a"') == [ToolCallBegin(0, "f"), ToolCallArguments(0, '{"a"')]
    assert parser.feed(" : 1}") == [ToolCallArguments(0, " : 1}")]
    assert parser.finish() == [ToolCallEnd(0, "f", '{"a" : 1}', True)]
    assert ArgumentsFormat("f").finish() == []


def test_a_forced_list_of_calls_goes_on_behind_what_is_no_call() -> None:
    parser = CallListFormat()
    events = [*parser.feed('[ {"name": "f", "parameters": {}} , {"x": 1}, {"name": "g"} ]'), *parser.finish()]
    assert [event for event in events if isinstance(event, ToolCallBegin)] == [
        ToolCallBegin(0, "f"),
        ToolCallBegin(1, "g"),
    ]
    assert [event for event in events if isinstance(event, ToolCallEnd)] == [
        ToolCallEnd(0, "f", "{}", True),
        ToolCallEnd(1, "g", "{}", True),
    ]


def test_a_forced_list_that_is_cut_short_ends_its_last_call_as_invalid() -> None:
    parser = CallListFormat()
    parser.feed('[{"name": "f", "parameters": {"a": ')
    assert parser.finish() == [ToolCallEnd(0, "f", '{"a": ', False)]
    assert parser.finish() == []
    assert CallListFormat().feed(" [ ") == []


# ------------------------------------------------------------------------------- calls or a form


@pytest.mark.parametrize(
    ("pieces", "events"),
    [
        (["[", "<tool_call>{"], [TextPiece("["), TextPiece("<tool_call>{")]),
        ([" ", "[1]"], [TextPiece(" [1]")]),
        (["<tool", "x"], [TextPiece("<toolx")]),
        (["<tool ", " _call>"], [TextPiece("<tool "), TextPiece(" _call>")]),
        ([" <tool_call>", '{"name": "f"}'], call(0, "f", "{}")),
        (['<tool_call>{"name": "f"}', "</tool_call>", "x"], [*call(0, "f", "{}"), TextPiece("x")]),
    ],
)
def test_the_beginning_decides_between_calls_and_a_form(
    pieces: Sequence[str], events: list[AnswerEvent]
) -> None:
    assert fed(CallsOrForm(HermesFormat()), *pieces) == events


@pytest.mark.parametrize(
    ("text", "events"),
    [
        ("", []),
        ("[1]", []),
        (" ", [TextPiece(" ")]),
        ("  <tool", [TextPiece("  <tool")]),
        ('<tool_call>{"name": "f", "arguments": {', [ToolCallEnd(0, "f", "{", False)]),
    ],
)
def test_an_answer_that_ended_early_loses_nothing(text: str, events: list[AnswerEvent]) -> None:
    parser = CallsOrForm(HermesFormat())
    parser.feed(text)
    assert [event for event in parser.finish() if event != TextPiece("")] == events


# ---------------------------------------------------------------------------------- whole answers


def test_spaces_at_the_end_of_a_text_are_kept_and_behind_a_call_dropped() -> None:
    parser = AnswerParser(None, HermesFormat())
    assert parser.feed("a \n") == (TextPiece("a"),)
    assert parser.finish() == (TextPiece(" \n"),)
    assert parser.finish() == ()
    spaces_alone = AnswerParser(None, HermesFormat())
    assert (spaces_alone.feed(" \n"), spaces_alone.finish()) == ((), (TextPiece(" \n"),))
    behind_call = AnswerParser(None, HermesFormat())
    assert behind_call.feed('a <tool_call>{"name": "f"}</tool_call> \n') == (
        TextPiece("a"),
        *call(0, "f", "{}"),
    )
    assert behind_call.finish() == ()
    text_again = AnswerParser(None, HermesFormat())
    text_again.feed('<tool_call>{"name": "f"}</tool_call>b ')
    assert text_again.finish() == (TextPiece(" "),)


def test_without_tools_text_goes_through_at_once() -> None:
    parser = AnswerParser()
    assert (parser.feed("a "), parser.feed(""), parser.finish()) == ((TextPiece("a "),), (), ())


def test_by_default_every_call_is_delivered() -> None:
    text = '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call>'
    assert AnswerParser(None, HermesFormat()).feed(text) == (*call(0, "f", "{}"), *call(1, "g", "{}"))
    assert AnswerParser(None, HermesFormat(), one_call=True).feed(text) == tuple(call(0, "f", "{}"))


def test_text_behind_a_call_that_is_dropped_is_delivered() -> None:
    text = '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call>b'
    parser = AnswerParser(None, HermesFormat(), one_call=True)
    assert parser.feed(text) == (*call(0, "f", "{}"), TextPiece("b"))


def test_text_behind_a_list_of_calls_is_delivered_as_it_comes() -> None:
    parser = MistralFormat()
    assert parser.feed('[TOOL_CALLS][{"name": "f", "arguments": {}}] and') == [
        *call(0, "f", "{}"),
        TextPiece("and"),
    ]
    assert parser.feed(" more") == [TextPiece(" more")]


def test_each_call_of_a_list_is_delivered_as_it_ends() -> None:
    parser = CallListFormat()
    assert parser.feed('[{"name": "f", "parameters": {}}') == call(0, "f", "{}")
    assert parser.feed(', {"name": "g", "parameters": {}}]') == call(1, "g", "{}")
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("text", "is_whole", "is_broken"),
    [
        ('{"name": "f", "arguments": {}}', True, False),
        ('{"name": "f"}', True, False),
        ('{"name": "f", "arg', False, False),
        ('{"arguments": {}}', False, True),
        ('{"name": "f"]', False, True),
    ],
)
def test_a_call_is_whole_or_broken_or_waits_for_more(text: str, is_whole: bool, is_broken: bool) -> None:
    call = ObjectCall(0, "")
    while text and not (call.is_whole or call.is_broken):
        text = text[call.take(text)[0] :]
    assert (call.is_whole, call.is_broken) == (is_whole, is_broken)


def test_reasoning_is_passed_on_as_it_comes() -> None:
    splitter = ReasoningSplitter(REASONING_FORMATS["qwen3"])
    assert splitter.feed(" <thi") == []
    assert splitter.feed("nk>a") == [ReasoningPiece("a")]
    assert splitter.feed("b</th") == [ReasoningPiece("b")]
    assert splitter.feed("ink>") == []
    assert splitter.feed("c") == [TextPiece("c")]
    assert splitter.finish() == []


def test_text_that_does_not_begin_with_the_mark_is_text_at_once_and_for_good() -> None:
    splitter = ReasoningSplitter(REASONING_FORMATS["qwen3"])
    assert splitter.feed("Y") == [TextPiece("Y")]
    assert splitter.feed("<think>b</think>") == [TextPiece("<think>b</think>")]


def test_the_opening_mark_alone_is_reasoning_that_has_begun() -> None:
    splitter = ReasoningSplitter(REASONING_FORMATS["qwen3"])
    assert splitter.feed("<think>") == []
    assert splitter.finish() == []
    assert splitter.feed("a<think>") == [ReasoningPiece("a<think>")]


@pytest.mark.parametrize(("text", "held"), [("<think", "<think"), (" ", " "), ("", "")])
def test_what_may_begin_reasoning_is_text_where_the_answer_ends(text: str, held: str) -> None:
    splitter = ReasoningSplitter(REASONING_FORMATS["qwen3"])
    assert splitter.feed(text) == []
    assert splitter.finish() == ([TextPiece(held)] if held else [])
    assert splitter.finish() == []


@pytest.mark.parametrize(
    ("prompt", "state"),
    [
        ("", "BEFORE"),
        ("<think>", "INSIDE"),
        ("<think></think>", "BEHIND"),
        ("</think><think>", "INSIDE"),
        ("<think>a</think>\n\n", "BEHIND"),
        ("<think>a</think>b", "BEFORE"),  # which may be the beginning of another turn
        ("<|im_start|>assistant\n<think>\nOne,", "INSIDE"),
        ("<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n", "BEFORE"),
        ("<｜User｜>What is <think>?<｜Assistant｜>", "BEFORE"),
        ("<｜User｜>What is </think>?<｜Assistant｜>", "BEFORE"),
        ("<start_of_turn>user\nWhat is <think>?<end_of_turn>\n", "BEFORE"),
        ("[INST] What is <think>? [/INST]", "BEFORE"),
    ],
)
def test_a_prompt_may_open_or_end_reasoning_behind_its_last_turn(prompt: str, state: str) -> None:
    assert REASONING_FORMATS["qwen3"].state_after(prompt) is ReasoningState[state]


@pytest.mark.parametrize(
    ("prompt", "state"),
    [
        ("", "INSIDE"),
        ("<｜Assistant｜>", "INSIDE"),
        ("<｜Assistant｜><think>\n", "INSIDE"),
        ("<｜Assistant｜></think>", "BEHIND"),
        ("<｜Assistant｜><think>a</think>The answer", "BEHIND"),
        ("<｜Assistant｜></think>Hi<｜end▁of▁sentence｜><｜User｜>Why?<｜Assistant｜>", "INSIDE"),
        ("<｜User｜>What is </think>?<｜Assistant｜>", "INSIDE"),
    ],
)
def test_reasoning_that_is_implied_has_begun_unless_the_last_turn_ends_it(prompt: str, state: str) -> None:
    assert REASONING_FORMATS["deepseek_r1"].state_after(prompt) is ReasoningState[state]


@pytest.mark.parametrize(
    ("name", "end", "is_decided"),
    [
        ("qwen3", "<think>", True),
        ("qwen3", "a</think>b", True),
        ("qwen3", "<|im_start|>a", True),
        ("qwen3", "hink>a</think", False),
        ("qwen3", "", False),
        ("gpt_oss", "user<|start|>assistant", True),
        ("gpt_oss", "<|channel|>final<|message|>a<|end|>", False),
    ],
)
def test_the_end_of_a_prompt_decides_where_its_last_mark_or_turn_begins_in_it(
    name: str, end: str, is_decided: bool
) -> None:
    assert REASONING_FORMATS[name].is_decided_by(end) is is_decided


# ----------------------------------------------------------------------------------- what a model has


@attrs.frozen
class Owner:
    """A tokenizer with a chat template."""

    template_source: str
    template_variables: frozenset[str] = frozenset()
    thinking_prompt: str = ""
    tool_template_source: str = ""


HERMES = Owner("{{ tools }}<tool_call></think>", frozenset({"thinking"}))


def test_auto_detects_the_formats_and_a_name_is_taken_as_it_is() -> None:
    assert tool_parser_named("auto", HERMES) == "hermes"
    assert tool_parser_named("mistral", HERMES) == "mistral"
    assert tool_parser_named("auto", object()) is None
    with_another = attrs.evolve(HERMES, tool_template_source="{{ tools }}[TOOL_CALLS]")
    assert tool_parser_named("auto", with_another) == "mistral"
    assert reasoning_parser_named("auto", HERMES) == "qwen3"
    assert reasoning_parser_named("mistral", HERMES) == "mistral"
    assert reasoning_parser_named("none", HERMES) is None
    assert reasoning_parser_named("auto", object()) is None
    assert (thinking_switch_of(HERMES), thinking_switch_of(object())) == ("thinking", None)


@pytest.mark.parametrize("mark", ["<arg_key>", "<function="])
def test_a_template_with_calls_that_are_no_json_has_no_known_format(mark: str) -> None:
    assert tool_parser_of(f"tools <tool_call>{mark}") is None
    assert tool_parser_of("tools <|python_tag|>") == "llama3_json"


@pytest.mark.parametrize(
    ("effort", "thinks"),
    [
        ("none", False),
        ("minimal", False),
        ("low", True),
        ("medium", True),
        ("high", True),
        ("xhigh", True),
        ("max", True),
        (None, None),
        ("odd", None),
    ],
)
def test_an_effort_asks_for_reasoning_or_against_it(effort: str | None, thinks: bool | None) -> None:
    assert thinks_at(effort) is thinks


LOW_TO_HIGH = {"low": "low", "medium": "medium", "high": "high"}


@pytest.mark.parametrize(
    ("template", "efforts"),
    [
        (
            "{{ reasoning_effort }}",
            {"none": "low", "minimal": "low", **LOW_TO_HIGH, "xhigh": "high", "max": "high"},
        ),
        (
            "{{ 'no' if reasoning_effort == 'none' else reasoning_effort }}",
            {"none": "none", "minimal": "low", **LOW_TO_HIGH, "xhigh": "high", "max": "high"},
        ),
        (
            '{{ reasoning_effort in ["minimal", "xhigh"] }}',
            {"none": "low", "minimal": "minimal", **LOW_TO_HIGH, "xhigh": "xhigh", "max": "high"},
        ),
    ],
)
def test_a_template_that_reads_an_effort_gets_the_nearest_that_it_takes(
    template: str, efforts: dict[str, str]
) -> None:
    owner = Owner(template, frozenset({"reasoning_effort"}))
    assert template_efforts_of(owner) == efforts
    assert template_efforts_of(attrs.evolve(owner, template_variables=frozenset())) == {}
    assert template_efforts_of(object()) == {}
    assert effort_values("xhigh", None, efforts) == {"reasoning_effort": efforts["xhigh"]}
    both = {"enable_thinking": False, "reasoning_effort": efforts["none"]}
    assert effort_values("none", "enable_thinking", efforts) == both
    assert effort_values(None, "enable_thinking", efforts) == {}
    assert effort_values("low", "enable_thinking", {}) == {"enable_thinking": True}


# -------------------------------------------------------------------------------------- what is asked


@pytest.mark.parametrize(
    "tools", [[{"name": ""}], [{"function": []}], [{"name": "é"}], [{"name": "a/b"}], b"f"]
)
def test_a_tool_needs_a_plain_name(tools: Any) -> None:
    with pytest.raises(InvalidRequest, match="tools"):
        parse_tools(tools)


def test_as_many_tools_and_as_long_a_name_as_the_limits_say_are_taken() -> None:
    names = ["a" * 64, *(f"f-{number}_x.y" for number in range(127))]
    assert [tool.name for tool in parse_tools([{"name": name} for name in names])] == names
    assert parse_tools(None) == ()


def test_a_tool_keeps_what_it_was_given() -> None:
    tool = FunctionTool(name="f", description="d", parameters={"type": "object"}, strict=True)
    assert parse_tools((tool,)) == (tool,)
    asked = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    assert parse_tools([asked]) == (tool,)
    assert tool.for_template() == {
        "type": "function",
        "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
    }


def test_a_function_without_parameters_takes_an_object_of_any_kind() -> None:
    plan = plan_tools([{"name": "f"}], {"type": "function", "name": "f"})
    assert plan.structured_outputs == StructuredOutputsParams(json={"type": "object", "properties": {}})
    assert (plan.is_forced, plan.tool_parser, plan.skip_special_tokens) == (True, None, True)


def test_without_tools_nothing_is_planned() -> None:
    plan = plan_tools(tool_parser="mistral")
    assert (plan.template_tools, plan.structured_outputs, plan.tool_parser) == (None, None, None)
    assert (plan.is_forced, plan.skip_special_tokens) == (False, True)
    auto = plan_tools([], "auto")
    assert (auto.template_tools, auto.structured_outputs, auto.is_forced) == (None, None, False)


def test_required_calls_may_be_several_by_default_and_follow_their_schemas() -> None:
    plan = plan_tools([{"name": "f", "parameters": {"type": "object"}}], "required", tool_parser="hermes")
    item = {
        "type": "object",
        "properties": {"name": {"const": "f"}, "parameters": {"type": "object"}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
    assert plan.structured_outputs == StructuredOutputsParams(
        json={"type": "array", "minItems": 1, "items": {"anyOf": [item]}}
    )
    assert plan.template_tools is not None and plan.tool_parser is None


def test_a_plan_is_for_an_answer_that_may_go_on_in_words_and_with_more_calls() -> None:
    plan = ToolPlan(
        template_tools=None, structured_outputs=None, skip_special_tokens=True, tool_parser="hermes"
    )
    calls = '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call>'
    assert not plan.is_forced
    assert plan.parser().feed("well") == (TextPiece("well"),)
    assert plan.parser().feed(f"well{calls}") == (TextPiece("well"), *call(0, "f", "{}"), *call(1, "g", "{}"))


def test_a_model_without_a_place_for_tools_is_told_of_none_of_them() -> None:
    assert plan_tools([{"name": "f"}], "none", tool_parser="none").template_tools is None
    with pytest.raises(InvalidRequest, match="reasoning_parser must be one of qwen3"):
        plan_tools(reasoning_parser="esperanto")


# ----------------------------------------------------------------------------------------- scanners


@pytest.mark.parametrize(
    ("text", "markers", "split"),
    [
        ("a<b>c", ["<b>"], ("a", "<b>", "c")),
        ("<b>", ["<b>"], ("", "<b>", "")),
        ("x[y]<b>", ["<b>", "[y]"], ("x", "[y]", "<b>")),
        ("a<", ["<b>"], ("a", None, "<")),
        ("a<b", ["<b>"], ("a", None, "<b")),
        ("<b", ["<b>"], ("", None, "<b")),
        ("a<b", ["<c>", "<b>"], ("a", None, "<b")),
        ("abc", ["<b>"], ("abc", None, "")),
        ("", ["<b>"], ("", None, "")),
        ("abc", [], ("abc", None, "")),
        ("aab", ["aac", "b>"], ("aa", None, "b")),
    ],
)
def test_text_is_split_at_the_first_marker_or_before_what_may_begin_one(
    text: str, markers: list[str], split: tuple[str, str | None, str]
) -> None:
    assert split_at_marker(text, markers) == split


@pytest.mark.parametrize(
    ("text", "end", "is_over", "is_broken"),
    [
        ('{"a": [1]} x', 10, True, False),
        ('"a\\"b" x', 6, True, False),
        ('"a\\\\" x', 5, True, False),
        ("12, 3", 2, True, False),
        ("12]", 2, True, False),
        ("12}", 2, True, False),
        ("true x", 4, True, False),
        ("12", 2, False, False),
        ("[1}", 3, False, True),
        ("[1<", 2, False, True),
        ('["<"]', 5, True, False),
        ("]", 1, False, True),
        ("{", 1, False, False),
        ('["]"', 4, False, False),
    ],
)
def test_the_end_of_a_value_is_that_of_its_brackets_or_its_text(
    text: str, end: int, is_over: bool, is_broken: bool
) -> None:
    scanner = ValueScanner()
    assert (scanner.take(text, 0), scanner.is_over, scanner.is_broken) == (end, is_over, is_broken)


@pytest.mark.parametrize(
    "text",
    [
        "x",
        '{"name": 5,',
        '{"name": "f", "name": "g"',
        '{"name" 1',
        '{"name": "f" "a"',
        '{"name": "f"} x',
        '{"arguments": {}, "parameters": {',
        '{"name": "f", "x": ]',
        "{1",
    ],
)
def test_what_is_no_object_with_one_name_and_one_value_of_arguments_is_broken(text: str) -> None:
    scanner, place = CallScanner(), 0
    while place < len(text) and not scanner.is_broken:
        place += scanner.take(text[place:])
    assert scanner.is_broken


@pytest.mark.parametrize(
    ("text", "value", "string"),
    [
        ('"a"', "a", "a"),
        ("1", 1, None),
        ("{", None, None),
        ("[" * 100_000, None, None),
        ('{"a": NaN}', None, None),
        ("[-Infinity]", None, None),
    ],
)
def test_json_that_is_not_valid_is_none(text: str, value: object, string: str | None) -> None:
    assert (parsed(text), as_string(text)) == (value, string)


@pytest.mark.parametrize("rest", ['"id": "x"', '"id": 5, "x": "{}"'])
def test_what_follows_arguments_written_as_a_string_is_no_part_of_them(rest: str) -> None:
    text = '{"name": "f", "arguments": "{\\"a\\": 1}", ' + rest + "}"
    scanner, place, arguments = CallScanner(), 0, ""
    while place < len(text):
        place += scanner.take(text[place:])
        arguments += scanner.take_arguments()
    assert (scanner.name, arguments, scanner.is_over) == ("f", '{"a": 1}', True)
