"""Calls of tools and reasoning in an answer: what is found, and that how the text was cut makes no difference."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

import attrs
import pytest

from triolet.core.request.structured_outputs import CALL_FORMATS, StructuredOutputsParams
from triolet.core.request.tokenizer_interface import Tokenize, Tokenized
from triolet.core.tools import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    AnswerEvent,
    AnswerParser,
    ReasoningPiece,
    TextPiece,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
    parse_tools,
    plan_tools,
)
from triolet.core.tools.answer import reasoning_parser_of, thinking_switch_among, tool_parser_of
from triolet.core.tools.reasoning import ReasoningSplitter
from triolet.errors import InvalidRequest, UnsupportedFeature

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "name": "get_time", "parameters": {"type": "object", "properties": {}}}


PIECES = (TextPiece, ReasoningPiece, ToolCallArguments)


def joined(events: Iterable[AnswerEvent]) -> list[AnswerEvent]:
    """Events with neighbouring pieces of the same thing put together."""
    whole: list[AnswerEvent] = []
    for event in events:
        last = whole[-1] if whole else None
        if isinstance(event, PIECES) and isinstance(last, PIECES) and type(last) is type(event):
            whole[-1] = attrs.evolve(last, text=last.text + event.text)
        else:
            whole.append(event)
    return whole


def read(parser: AnswerParser, text: str, cuts: Sequence[int] = ()) -> list[AnswerEvent]:
    edges = [0, *cuts, len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
    events = [event for piece in pieces for event in parser.feed(piece)]
    return joined([*events, *parser.finish()])


def found(name: str, text: str, cuts: Sequence[int] = (), functions: Sequence[str] = ()) -> list[AnswerEvent]:
    return read(AnswerParser(None, TOOL_FORMATS[name](functions)), text, cuts)


def call(index: int, name: str, arguments: str, *, is_valid: bool = True) -> list[AnswerEvent]:
    pieces = [ToolCallArguments(index, arguments)] if arguments else []
    return [ToolCallBegin(index, name), *pieces, ToolCallEnd(index, name, arguments, is_valid)]


@pytest.mark.parametrize(
    ("text", "events"),
    [
        ("no call at all", [TextPiece("no call at all")]),
        ("ends like one <tool_", [TextPiece("ends like one <tool_")]),
        (
            'Let me look.\n<tool_call>\n{"name": "f", "arguments": {"a": "</tool_call>"}}\n</tool_call>',
            [TextPiece("Let me look."), *call(0, "f", '{"a": "</tool_call>"}')],
        ),
        (
            ('<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"arguments": {"b": [1]}, "name": "g"}'
            "</tool_call>\n and then"),
            [*call(0, "f", "{}"), *call(1, "g", '{"b": [1]}'), TextPiece("\n and then")],
        ),
        ('<tool_call>{"name": "f"}</tool_call>', call(0, "f", "{}")),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', call(0, "f", '{"a": 1}')),
        ('<tool_call>{"name": "f", "arguments": {"a": 1', call(0, "f", '{"a": 1', is_valid=False)),
        ('<tool_call>{"name": "f", "arguments": {"a"]} x</tool_call>!',
         [*call(0, "f", '{"a"]', is_valid=False), TextPiece("!")]),
        ("<tool_call>sorry</tool_call>", [TextPiece("<tool_call>sorry</tool_call>")]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>\nHere is the rest.',
         [*call(0, "f", '{"a": 1}'), TextPiece("\nHere is the rest.")]),
        ('<tool_call>{"name": 5}', [TextPiece('<tool_call>{"name": 5}')]),
        ('<tool_call><tool_call>{"name": "f"}', [TextPiece("<tool_call>"), *call(0, "f", "{}")]),
    ],
)  # fmt: skip
def test_hermes_calls_are_found(text: str, events: list[AnswerEvent]) -> None:
    assert found("hermes", text) == events


@pytest.mark.parametrize(
    ("text", "events"),
    [
        ('{"name": "f", "parameters": {"a": 1}}', call(0, "f", '{"a": 1}')),
        ('\n<|python_tag|>{"name": "f", "arguments": {}}; {"name": "g", "parameters": {}}',
         [*call(0, "f", "{}"), *call(1, "g", "{}")]),
        ('{"name": "Bob", "age": 3}', [TextPiece('{"name": "Bob", "age": 3}')]),
        ('{"name": "unknown", "parameters": {}}', [TextPiece('{"name": "unknown", "parameters": {}}')]),
        ('Here: {"name": "f", "parameters": {}}', [TextPiece('Here: {"name": "f", "parameters": {}}')]),
    ],
)  # fmt: skip
def test_llama_calls_are_found_where_they_name_a_function(text: str, events: list[AnswerEvent]) -> None:
    assert found("llama3_json", text, functions=["f", "g"]) == events


@pytest.mark.parametrize(
    ("text", "events"),
    [
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"a": [1]}}, {"name": "g", "arguments": {}}]',
         [*call(0, "f", '{"a": [1]}'), *call(1, "g", "{}")]),
        ('Well. [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]x9[ARGS]{}',
         [TextPiece("Well."), *call(0, "f", '{"a": 1}'), *call(1, "g", "{}")]),
        ('[TOOL_CALLS]f{"a": 1}', call(0, "f", '{"a": 1}')),
        ("[TOOL_CALLS] none, sorry", [TextPiece("[TOOL_CALLS] none, sorry")]),
        ("[TOOL_CALLS][1, 2]", [TextPiece("[TOOL_CALLS][1, 2]")]),
    ],
)  # fmt: skip
def test_mistral_calls_are_found(text: str, events: list[AnswerEvent]) -> None:
    assert found("mistral", text) == events


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<tool", "[TOOL"),
    *('{"name": "f", ', '"arguments": ', '"parameters": ', '{"a": 1}', '"name"', '"f"', '"g"', '"{}"', "f", "1"),
    *("{", "}", "[", "]", ",", ":", ";", '"', "\\", " ", "\n", "text", "<think>", "</think>", "[THINK]", "é😀"),
    *('{"name": "f", "arguments": {"x": "y"}}', '{"name": "f", "parameters": {"x": "y"}}'),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "num_texts"),
    [("hermes", 2_000), *(pytest.param(name, 4_000, marks=pytest.mark.slow) for name in TOOL_FORMATS)],
)
def test_how_the_text_is_cut_makes_no_difference(name: str, num_texts: int) -> None:
    rng = Random(name)
    for _ in range(num_texts):
        text = "".join(rng.choice(FRAGMENTS) for _ in range(rng.randint(1, 12)))
        reasoning = rng.choice([None, *REASONING_FORMATS])
        some = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randint(0, 5))))
        whole, cut, characters = (
            read(parser(name, reasoning), text, cuts) for cuts in ([], some, range(1, len(text)))
        )
        assert whole == cut == characters, text


def parser(name: str, reasoning: str | None) -> AnswerParser:
    splitter = ReasoningSplitter(REASONING_FORMATS[reasoning]) if reasoning else None
    return AnswerParser(splitter, TOOL_FORMATS[name](["f"]))


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_every_call_that_begins_ends_once_and_nothing_of_it_is_lost(name: str) -> None:
    rng = Random(f"{name} calls")
    for _ in range(2_000):
        events = found(name, "".join(rng.choice(FRAGMENTS) for _ in range(rng.randint(1, 15))))
        begun = [event.index for event in events if isinstance(event, ToolCallBegin)]
        ended = [event for event in events if isinstance(event, ToolCallEnd)]
        assert begun == [event.index for event in ended] == list(range(len(begun)))
        pieces = {event.index: event.text for event in events if isinstance(event, ToolCallArguments)}
        assert all(event.arguments == pieces.get(event.index, "") for event in ended)


def test_a_long_answer_of_brackets_and_quotes_takes_no_long_time() -> None:
    nested = '<tool_call>{"name": "f", "arguments": ' + '{"a": [' * 20_000
    [_, _, end] = found("hermes", nested, range(100, len(nested), 100))
    assert isinstance(end, ToolCallEnd)
    assert not end.is_valid
    assert len(found("hermes", "<tool_call>" * 20_000)) == 1


class Watched(str):
    """Text that counts the characters of it and of what is made of it that are looked at or copied."""

    __slots__ = ()
    num_chars = 0

    def _counted(self, text: str) -> Watched:
        Watched.num_chars += len(self)
        return Watched(text)

    def __add__(self, other: str) -> Watched:
        return self._counted(str(self) + other)

    def __radd__(self, other: str) -> Watched:
        Watched.num_chars += len(other)
        return self._counted(other + str(self))

    def __getitem__(self, place: Any) -> Watched:
        return self._counted(str(self)[place])

    def strip(self, chars: str | None = None, /) -> Watched:
        return self._counted(str(self).strip(chars))

    def lstrip(self, chars: str | None = None, /) -> Watched:
        return self._counted(str(self).lstrip(chars))

    def rstrip(self, chars: str | None = None, /) -> Watched:
        return self._counted(str(self).rstrip(chars))


@pytest.mark.parametrize(
    ("fields", "beginning"),
    [
        ({"tool_parser": "hermes"}, ""),
        ({"tool_parser": "hermes"}, "a"),
        ({"tool_parser": "hermes"}, "<tool_call>"),
        ({"tool_parser": "hermes"}, '<tool_call>{"name": "get_time"}'),
        ({"tool_parser": "llama3_json"}, ""),
        ({"tool_parser": "mistral"}, "[TOOL_CALLS]"),
        ({"tool_parser": "mistral"}, "[TOOL_CALLS]["),
        ({"tool_parser": "mistral"}, "[TOOL_CALLS]get_time[ARGS]"),
        ({"tool_parser": "hermes", "form": StructuredOutputsParams(json_object=True)}, ""),
        ({"tool_parser": "hermes", "form": StructuredOutputsParams(json_object=True)}, "<tool_call>"),
        ({"tool_choice": "required"}, ""),
        ({"tool_choice": "required"}, "["),
        ({"tool_parser": "hermes", "reasoning_parser": "qwen3"}, ""),
        ({"tool_parser": "hermes", "reasoning_parser": "deepseek_r1"}, ""),
        ({"tool_parser": "hermes", "reasoning_parser": "qwen3"}, "<think></think>"),
    ],
)
def test_each_character_of_a_long_run_of_spaces_is_looked_at_a_few_times(
    fields: dict[str, Any], beginning: str
) -> None:
    num_pieces, spaces = 1_000, " \n  "
    parser = plan_tools([CLOCK], **fields).parser()
    parser.feed(beginning)
    Watched.num_chars = 0
    for _ in range(num_pieces):
        assert parser.feed(Watched(spaces)) == ()
    assert 0 < Watched.num_chars <= 8 * num_pieces * len(spaces)


# ------------------------------------------------------------------------------------------ reasoning


@pytest.mark.parametrize(
    ("name", "prompt", "text", "events"),
    [
        ("qwen3", "", "<think>hm\n</think>\n\nYes", [ReasoningPiece("hm\n"), TextPiece("\n\nYes")]),
        ("qwen3", "", "Yes <think>no</think>", [TextPiece("Yes <think>no</think>")]),
        ("qwen3", "<think>", "hm</think>Yes", [ReasoningPiece("hm"), TextPiece("Yes")]),
        ("qwen3", "", "<think>cut sho", [ReasoningPiece("cut sho")]),
        ("qwen3", "", "<think>ends </th", [ReasoningPiece("ends </th")]),
        ("deepseek_r1", "", "hm</think>Yes", [ReasoningPiece("hm"), TextPiece("Yes")]),
        ("deepseek_r1", "", "<think>hm</think>Yes", [ReasoningPiece("hm"), TextPiece("Yes")]),
        ("deepseek_r1", "<｜Assistant｜></think>", "Yes", [TextPiece("Yes")]),
        ("mistral", "", "[THINK]hm[/THINK]Yes", [ReasoningPiece("hm"), TextPiece("Yes")]),
    ],
)
def test_reasoning_is_split_off(name: str, prompt: str, text: str, events: list[AnswerEvent]) -> None:
    splitter = ReasoningSplitter(REASONING_FORMATS[name], prompt)
    assert read(AnswerParser(splitter), text) == events


def test_reasoning_holds_no_calls() -> None:
    text = '<think>maybe <tool_call>{"name": "f"}</tool_call></think>\n\n<tool_call>{"name": "f"}</tool_call>'
    splitter = ReasoningSplitter(REASONING_FORMATS["qwen3"])
    assert read(AnswerParser(splitter, TOOL_FORMATS["hermes"](())), text) == [
        ReasoningPiece('maybe <tool_call>{"name": "f"}</tool_call>'),
        *call(0, "f", "{}"),
    ]


def test_a_prompt_that_ends_amid_reasoning_is_recognised() -> None:
    plan = plan_tools(reasoning_parser="qwen3")
    assert read(plan.parser("<user>Hi<assistant><think>\n"), "hm</think>Yes") == [
        ReasoningPiece("hm"),
        TextPiece("Yes"),
    ]
    assert read(plan.parser("<assistant><think>\n\n</think>\n\n"), "Yes") == [TextPiece("Yes")]


# -------------------------------------------------------------------------------------- what is asked


def test_both_forms_of_a_tool_are_read() -> None:
    weather, clock = parse_tools([WEATHER, CLOCK])
    assert (weather.name, weather.description) == ("get_weather", "Weather of a city.")
    assert clock.for_template() == {
        "type": "function",
        "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}},
    }


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("get_weather", "tools must be a list, got"),
        ([5], r"tools\[0\] must be a mapping, got 5"),
        ([{"type": "web_search"}], r"tools\[0\].type must be 'function', got 'web_search'"),
        ([{"type": "function"}], r"tools\[0\].name must have 1 to 64 letters.*got None"),
        ([{"name": "a b"}], r"tools\[0\].name must have"),
        ([{"name": "a" * 65}], r"tools\[0\].name must have"),
        ([{"name": "a", "parameters": []}], r"tools\[0\].parameters must be a JSON schema"),
        ([{"name": "a", "description": 1}], r"tools\[0\].description must be a string"),
        ([{"name": "a", "strict": "yes"}], r"tools\[0\].strict must be true or false"),
        ([CLOCK, CLOCK], "tools must have names of their own, got 'get_time'"),
        ([{"name": f"f{i}"} for i in range(129)], "tools must have at most 128 entries, got 129"),
        (
            [{"name": "a", "description": "x" * 2**19}],
            "at most 524288 characters of descriptions and schemas",
        ),
        (
            [{"name": f"f{i}", "parameters": {"enum": ["x" * 300_000]}} for i in range(2)],
            "at most 524288 characters of descriptions and schemas in all, got more",
        ),
        ([{"name": "a", "parameters": {"enum": [[0] * 2**17, [0] * 2**17]}}], "in all, got more"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_tool_is_refused_by_name(tools: object, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        plan_tools(tools, tool_parser="hermes")


@pytest.mark.parametrize(
    "pattern", ["(?=a)b", "a(?!b)", "(?<=a)b", "(?<!a)b", r"(a)\1", r"\bword", r"\\\B", r"[(]\b"]
)
@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "@"}}}, "properties.a.pattern"),
        ({"properties": {"pattern": {"anyOf": [{}, {"pattern": "@"}]}}}, "properties.pattern.anyOf[1].pattern"),
        ({"patternProperties": {"@": {}}}, "patternProperties"),
    ],
)  # fmt: skip
def test_a_strict_function_with_a_pattern_that_looks_around_is_refused_by_the_place_of_the_pattern(
    schema: Any, place: str, pattern: str
) -> None:
    parameters = json.loads(json.dumps(schema).replace('"@"', json.dumps(pattern)))
    tool: dict[str, Any] = {"name": "f", "parameters": parameters, "strict": True}
    with pytest.raises(InvalidRequest, match="must not look around") as refused:
        plan_tools([CLOCK, {"type": "function", "function": tool}], tool_parser="hermes")
    assert refused.value.field == f"tools[1].function.parameters.{place}"
    assert refused.value.got == pattern
    plan_tools([{**tool, "strict": False}], tool_parser="hermes")


@pytest.mark.parametrize(
    "pattern", [r"[(?=]", r"\\b", r"[\b]", r"\(?=", "(?:a)", "(?<name>a)", r"(\.?=a)", r"[^\]]\\1"]
)
def test_a_pattern_that_only_resembles_one_that_looks_around_is_taken_of_a_strict_function(
    pattern: str,
) -> None:
    schema = {
        "properties": {
            "pattern": {"pattern": pattern},
            "a": {"const": {"pattern": "(?=a)"}, "x-b": {"pattern": "\\b"}},
        }
    }
    assert plan_tools(
        [{"name": "f", "parameters": schema, "strict": True}], tool_parser="hermes"
    ).template_tools


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("sometimes", "tool_choice must be none, auto, required, allowed_tools or a function's name, got"),
        ({"type": "function", "function": {"name": "unknown"}}, "tool_choice must name one of the tools"),
        ({"type": "mcp"}, "tool_choice.type must be 'function'"),
        ({"type": "allowed_tools"}, "tool_choice.mode must be auto or required, got None"),
        ({"type": "allowed_tools", "allowed_tools": 3}, "tool_choice.mode must be auto or required"),
        ({"type": "allowed_tools", "mode": "none", "tools": [WEATHER]}, "tool_choice.mode must be auto"),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, "tool_choice.tools must be a list of tools"),
        ({"type": "allowed_tools", "mode": "auto", "tools": "all"}, "tool_choice.tools must be a list"),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [5]},
            r"tool_choice.tools\[0\] must be a mapping",
        ),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [WEATHER, {"type": "function", "name": "x"}]},
            r"tool_choice.tools\[1\] must name one of the tools, got 'x'",
        ),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]},
            r"tool_choice.tools\[0\].type must be 'function', got 'mcp'",
        ),
        ([], "tool_choice must be none"),
    ],
)
def test_a_wrong_choice_is_refused(choice: object, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        plan_tools([WEATHER], choice, tool_parser="hermes")


def test_required_without_tools_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="none or auto where there are no tools"):
        plan_tools([], "required")


def test_auto_needs_to_know_how_the_model_writes_calls() -> None:
    with pytest.raises(UnsupportedFeature, match="how it writes calls is not known"):
        plan_tools([WEATHER])
    assert plan_tools([WEATHER], "required").structured_outputs is not None
    with pytest.raises(UnsupportedFeature, match="its chat template has no place for tools"):
        plan_tools([WEATHER], tool_parser="none")
    with pytest.raises(InvalidRequest, match="tool_parser must be one of"):
        plan_tools([WEATHER], tool_parser="esperanto")


def test_auto_looks_for_calls_and_forces_nothing() -> None:
    plan = plan_tools([WEATHER, CLOCK], tool_parser="mistral")
    assert plan.structured_outputs is None
    assert not plan.skip_special_tokens
    assert plan_tools([WEATHER], "auto", tool_parser="hermes").skip_special_tokens
    assert plan.template_tools is not None
    assert [tool["function"]["name"] for tool in plan.template_tools] == ["get_weather", "get_time"]
    assert read(plan.parser(), "[TOOL_CALLS]get_time[ARGS]{}") == call(0, "get_time", "{}")


@attrs.frozen
class Specials:
    """A tokenizer with these special tokens; any other text is one token, too."""

    special: Sequence[str]
    texts: list[str] = attrs.field(factory=list)
    asked: list[tuple[str, ...]] = attrs.field(factory=list)

    def tokenize(self, message: Tokenize) -> Tokenized:
        assert message.prompt is None
        self.asked.append(message.marks)
        self.texts.extend(message.marks)
        return Tokenized(None, (), (), tuple((self.texts.index(mark),) for mark in message.marks))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        texts = (self.texts[token_id] for token_id in token_ids)
        return "".join(text for text in texts if not (skip_special_tokens and text in self.special))


@pytest.mark.parametrize(
    ("choice", "parsers", "special", "shows"),
    [
        (None, {"reasoning_parser": "mistral"}, ["[THINK]", "[/THINK]"], True),
        (None, {"reasoning_parser": "mistral"}, ["[TOOL_CALLS]"], False),
        (None, {"reasoning_parser": "qwen3"}, ["</think>"], True),
        ("none", {"reasoning_parser": "qwen3"}, ["</think>"], True),
        ("required", {"reasoning_parser": "qwen3"}, ["<think>"], True),
        ("required", {"tool_parser": "hermes"}, ["<tool_call>"], False),
        ("auto", {"tool_parser": "hermes"}, ["</tool_call>"], True),
        ("auto", {"tool_parser": "mistral"}, [], False),
        ("none", {"tool_parser": "mistral"}, ["[TOOL_CALLS]"], False),
    ],
)
def test_special_tokens_are_shown_where_one_of_them_is_a_mark_that_is_looked_for(
    choice: str | None, parsers: dict[str, str], special: list[str], shows: bool
) -> None:
    plan = plan_tools([CLOCK] if choice else (), choice, tokenizer=Specials(special), **parsers)  # type: ignore[arg-type]
    assert plan.skip_special_tokens is not shows


def test_a_tokenizer_is_asked_for_the_marks_that_are_looked_for_alone() -> None:
    tokenizer = Specials([])
    assert plan_tools([CLOCK], "required", tool_parser="hermes", tokenizer=tokenizer).skip_special_tokens
    assert tokenizer.asked == []
    plan_tools([CLOCK], tool_parser="hermes", tokenizer=tokenizer)
    assert tokenizer.asked == [("<tool_call>", "</tool_call>")]


def test_marks_of_a_tokenizer_that_is_not_known_are_special_where_the_family_has_them_so() -> None:
    assert not plan_tools(reasoning_parser="mistral").skip_special_tokens
    assert plan_tools(reasoning_parser="qwen3").skip_special_tokens


@pytest.mark.parametrize(
    "allowed",
    [
        {"mode": "auto", "tools": [{"type": "function", "name": "get_time"}]},
        {
            "allowed_tools": {
                "mode": "auto",
                "tools": [{"type": "function", "function": {"name": "get_time"}}],
            }
        },
    ],
)
def test_the_model_hears_of_allowed_tools_alone(allowed: dict[str, Any]) -> None:
    choice = {"type": "allowed_tools", **allowed}
    plan = plan_tools([WEATHER, CLOCK], choice, tool_parser="llama3_json")
    assert plan.template_tools is not None
    assert [tool["function"]["name"] for tool in plan.template_tools] == ["get_time"]
    assert plan.structured_outputs is None
    forbidden = '{"name": "get_weather", "parameters": {}}'
    assert read(plan.parser(), forbidden) == [TextPiece(forbidden)]
    assert read(plan.parser(), '{"name": "get_time", "parameters": {}}') == call(0, "get_time", "{}")


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("hermes", '<tool_call>{"name": "NAME", "arguments": {}}</tool_call>'),
        ("llama3_json", '<|python_tag|>{"name": "NAME", "parameters": {}}'),
        ("mistral", '[TOOL_CALLS][{"name": "NAME", "arguments": {}}]'),
        ("mistral", "[TOOL_CALLS]NAME[ARGS]{}"),
        ("mistral", "[TOOL_CALLS]NAME[CALL_ID]id9[ARGS]{}"),
    ],
)
def test_a_call_of_a_tool_that_is_not_allowed_is_text(name: str, written: str) -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_time"}]}
    plan = plan_tools([WEATHER, CLOCK], choice, tool_parser=name)
    barred, allowed = written.replace("NAME", "get_weather"), written.replace("NAME", "get_time")
    for cuts in (range(0), range(1, len(barred))):
        assert read(plan.parser(), barred, cuts) == [TextPiece(barred)]
    assert read(plan.parser(), allowed) == call(0, "get_time", "{}")
    assert read(plan_tools([WEATHER, CLOCK], tool_parser=name).parser(), barred) == call(
        0, "get_weather", "{}"
    )


def test_one_of_the_allowed_tools_can_be_required() -> None:
    choice = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "get_time"}],
    }
    plan = plan_tools([WEATHER, CLOCK], choice, tool_parser="none")
    assert plan.structured_outputs is not None
    schema = json.loads(plan.structured_outputs.json or "")
    assert [item["properties"]["name"] for item in schema["items"]["anyOf"]] == [{"const": "get_time"}]


def test_a_strict_tool_binds_calls_to_schemas_and_leaves_the_choice_to_the_model() -> None:
    strict = {"name": "f", "strict": True, "parameters": {"properties": {"x": {"type": "integer"}}}}
    plan = plan_tools([strict, CLOCK], tool_parser="hermes", parallel_tool_calls=False)
    assert plan.structured_outputs is not None
    assert json.loads(plan.structured_outputs.tool_calls or "") == {
        "format": "hermes",
        "tools": [
            {"name": "f", "parameters": strict["parameters"]},
            {"name": "get_time", "parameters": {"type": "object"}},
        ],
        "parallel": False,
    }
    assert not plan.is_forced
    assert read(plan.parser(), "No call.") == [TextPiece("No call.")]
    assert read(plan.parser(), '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>') == call(
        0, "f", '{"x": 1}'
    )
    assert plan_tools([{**strict, "strict": False}], tool_parser="hermes").structured_outputs is None
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_time"}]}
    assert plan_tools([strict, CLOCK], allowed, tool_parser="hermes").structured_outputs is None


CARD = '{"name": "Ann <tool_call> [TOOL_CALLS]f{x} <|python_tag|>{", "age": 7}'
WRITTEN_CALLS = {
    "hermes": '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>',
    "llama3_json": '{"name": "get_time", "parameters": {}}',
    "mistral": "[TOOL_CALLS]get_time[ARGS]{}",
}


@pytest.mark.parametrize("name", sorted(WRITTEN_CALLS))
def test_an_answer_is_calls_or_else_the_form_and_how_it_is_cut_makes_no_difference(name: str) -> None:
    plan = plan_tools([WEATHER, CLOCK], tool_parser=name, form=StructuredOutputsParams(json_object=True))
    assert (plan.is_forced, plan.tool_parser) == (False, name)
    texts = {
        CARD: [TextPiece(CARD)],
        f" \n{CARD}": [TextPiece(f" \n{CARD}")],
        '["a"]': [TextPiece('["a"]')],
        f"\n {WRITTEN_CALLS[name]}\n": call(0, "get_time", "{}"),
        "": [],
        "<tool": [TextPiece("<tool")],
        " [TOOL_CALLS]": [TextPiece(" [TOOL_CALLS]")],
    }
    for text, events in texts.items():
        for cuts in ([], range(1, len(text)), *([cut] for cut in range(1, len(text)))):
            assert read(plan.parser(), text, cuts) == events, text


def test_json_leaves_room_for_calls_and_any_other_form_is_that_of_the_whole_answer() -> None:
    for fields in ({"regex": "a"}, {"choice": ["a"]}, {"json": {}, "disable_additional_properties": True}):
        whole = StructuredOutputsParams(**fields)
        plan = plan_tools([CLOCK], tool_parser="hermes", form=whole)
        assert plan.structured_outputs == whole
        # Such a form may have a place for calls.
        text = f"a{WRITTEN_CALLS['hermes']}"
        assert read(plan.parser(), text) == [TextPiece("a"), *call(0, "get_time", "{}")]
    either = StructuredOutputsParams(json=True, disable_any_whitespace=True)
    plan = plan_tools([CLOCK], tool_parser="hermes", form=either)
    assert plan.structured_outputs is not None and plan.structured_outputs.disable_any_whitespace
    assert json.loads(plan.structured_outputs.tool_calls or "")["form"] == {"anyOf": [True]}
    for tools, choice in ((), "auto"), ([CLOCK], "none"):
        alone = plan_tools(tools, choice, form=either)
        assert (alone.structured_outputs, alone.is_forced, alone.tool_parser) == (either, False, None)
        assert read(alone.parser(), "[1]") == [TextPiece("[1]")]


def test_without_tools_no_calls_are_searched_for_in_the_answer() -> None:
    plan = plan_tools((), "auto", tool_parser="hermes")
    text = '<tool_call>{"name": "f"}</tool_call>'
    assert (plan.tool_parser, plan.is_forced) == (None, False)
    assert read(plan.parser(), text) == [TextPiece(text)]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_time"}])
def test_a_forced_call_leaves_no_room_for_a_form_of_the_whole_answer(choice: object) -> None:
    with pytest.raises(InvalidRequest, match="tool_choice must be auto or none where a form"):
        plan_tools([CLOCK], choice, form=StructuredOutputsParams(regex="a"))
    text_only = plan_tools([CLOCK], choice, form=StructuredOutputsParams(json_object=True))
    assert text_only == plan_tools([CLOCK], choice)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "g"}</tool_call>'),
        ("llama3_json", '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}'),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]'),
    ],
)
def test_at_most_one_call_is_delivered_if_calls_may_not_be_parallel(name: str, text: str) -> None:
    tools = [{"type": "function", "name": one, "parameters": {"type": "object"}} for one in ("f", "g")]
    one, all_of_them = (
        plan_tools(tools, tool_parser=name, parallel_tool_calls=parallel) for parallel in (False, True)
    )
    for cuts in (range(0), range(1, len(text))):
        assert read(one.parser(), text, cuts) == call(0, "f", "{}")
        assert read(all_of_them.parser(), text, cuts) == [*call(0, "f", "{}"), *call(1, "g", "{}")]


def test_every_format_of_calls_has_a_grammar() -> None:
    assert set(CALL_FORMATS) == set(TOOL_FORMATS)


def test_a_call_can_be_forced_of_a_model_that_can_not_be_told_of_tools() -> None:
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        plan = plan_tools([WEATHER], choice, tool_parser="none")
        assert plan.template_tools is None
        assert plan.structured_outputs is not None


def test_none_shows_no_tools_and_finds_none() -> None:
    plan = plan_tools([WEATHER], "none", tool_parser="hermes")
    assert (plan.template_tools, plan.structured_outputs) == (None, None)
    text = '<tool_call>{"name": "get_weather"}'
    assert read(plan.parser(), text) == [TextPiece(text)]


def test_a_named_function_gets_arguments_and_nothing_else() -> None:
    plan = plan_tools([WEATHER, CLOCK], {"type": "function", "function": {"name": "get_weather"}})
    assert plan.structured_outputs is not None
    assert json.loads(plan.structured_outputs.json or "") == WEATHER["function"]["parameters"]  # type: ignore[index]
    assert read(plan.parser(), ' {"city": "Rome"}', [3, 7]) == call(0, "get_weather", '{"city": "Rome"}')


def test_required_asks_for_a_list_of_calls() -> None:
    plan = plan_tools([WEATHER, CLOCK], "required", parallel_tool_calls=False)
    assert plan.structured_outputs is not None
    schema = json.loads(plan.structured_outputs.json or "")
    assert (schema["type"], schema["minItems"], schema["maxItems"]) == ("array", 1, 1)
    names = [item["properties"]["name"] for item in schema["items"]["anyOf"]]
    assert names == [{"const": "get_weather"}, {"const": "get_time"}]
    text = '[{"name": "get_weather", "parameters": {"city": "Rome"}}, {"name": "get_time", "parameters": {}}]'
    events = [*call(0, "get_weather", '{"city": "Rome"}'), *call(1, "get_time", "{}")]
    several = plan_tools([WEATHER, CLOCK], "required")
    for cuts in (range(0), range(1, len(text))):
        assert read(several.parser(), text, cuts) == events
        assert read(plan.parser(), text, cuts) == call(0, "get_weather", '{"city": "Rome"}')


ADVICE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "tags": {"type": "array", "items": {"type": "string", "pattern": r"^(?=.*a)"}, "uniqueItems": True},
        "not": {"type": "string", "pattern": r"^\\b[(]=", "not": {"const": "a"}},
        "size": {"oneOf": [{"type": "number"}, {"const": 1}], "default": {"not": 1}},
        "more": {"patternProperties": {r"^x(?!y)": {"type": "null"}}, "additionalProperties": False},
    },
    "if": {"required": ["tags"]},
    "then": {"required": ["size"]},
}
KEPT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "tags": {"type": "array", "items": {"type": "string"}},
        "not": {"type": "string", "pattern": r"^\\b[(]="},
        "size": {"anyOf": [{"type": "number"}, {"const": 1}], "default": {"not": 1}},
        "more": {},
    },
}


@pytest.mark.parametrize("strict", [None, False, True])
@pytest.mark.parametrize("tool_parser", [None, "gpt_oss"])
def test_a_forced_call_is_bound_to_what_a_grammar_can_hold_of_a_schema_unless_the_tool_is_strict(
    tool_parser: str | None, strict: bool | None
) -> None:
    # A strict tool is refused for a pattern that looks around.
    plain = json.loads(json.dumps(ADVICE).replace("(?=.*a)", "a").replace("(?!y)", "y"))
    advice = plain if strict else ADVICE
    tool = {"type": "function", "name": "f", "parameters": advice, "strict": strict}
    bound = advice if strict else KEPT
    for choice in ("required", {"type": "function", "name": "f"}):
        plan = plan_tools([tool], choice, tool_parser=tool_parser)
        assert plan.template_tools is not None
        assert plan.template_tools[0]["function"]["parameters"] == advice
        form = plan.structured_outputs
        assert form is not None
        schema = json.loads(form.json or form.tool_calls or "")
        if tool_parser is not None:
            assert schema["tools"] == [{"name": "f", "parameters": bound}]
        elif choice == "required":
            assert schema["items"]["anyOf"][0]["properties"]["parameters"] == bound
        else:
            assert schema == bound


@pytest.mark.parametrize(
    ("reference", "moved"),
    [
        ("#", "#/$defs/f"),
        ("#/$defs/City", "#/$defs/f/$defs/City"),
        ("#/properties/city/items", "#/$defs/f/properties/city/items"),
        ("https://example.com/f.json#/$defs/City", "#/$defs/f/$defs/City"),
        ("https://example.com/f.json", "#/$defs/f"),
        ("https://example.com/g.json#/$defs/City", "https://example.com/g.json#/$defs/City"),
        ("#city", "#city"),
    ],
)
def test_a_reference_within_parameters_leads_to_the_same_place_of_them(reference: str, moved: str) -> None:
    parameters = {
        "$id": "https://example.com/f.json",
        "$defs": {"City": {"type": "string"}, "Same": {"$ref": "#"}},
        "properties": {"city": {"anyOf": [{"$ref": reference}]}, "const": {"$ref": "#"}},
        "default": {"$ref": "#"},
    }
    tools = [{"name": "f", "parameters": parameters}, {"name": "g", "parameters": {"$defs": {"City": True}}}]
    schema = json.loads(
        (plan_tools(tools, "required").structured_outputs or StructuredOutputsParams()).json or ""
    )
    assert [item["properties"]["parameters"] for item in schema["items"]["anyOf"]] == [
        {"$ref": "#/$defs/f"},
        {"$defs": {"City": True}},
    ]
    assert schema["$defs"] == {
        "f": {
            "$defs": {"City": {"type": "string"}, "Same": {"$ref": "#/$defs/f"}},
            "properties": {"city": {"anyOf": [{"$ref": moved}]}, "const": {"$ref": "#/$defs/f"}},
            "default": {"$ref": "#"},
        }
    }


def test_a_schema_of_parameters_that_contains_itself_is_refused() -> None:
    endless: dict[str, Any] = {"type": "object"}
    endless["properties"] = {"more": endless}
    with pytest.raises(InvalidRequest, match="must be nested no deeper than 64 levels"):
        plan_tools([{"name": "f", "parameters": endless}], "required")


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{{ messages }}", "none", None),
        ("{{ messages }} {{ tools }}", None, None),
        ("<tool_call> {{ tools }} <think></think>", "hermes", "qwen3"),
        ("[AVAILABLE_TOOLS] {{ tools }} [TOOL_CALLS]", "mistral", None),
        ("{{ tools }}[TOOL_CALLS][THINK]", "mistral", "mistral"),
        ('<|start_header_id|>{{ tools }}{{ \'{"name": "\' }}{{ \'"parameters": \' }}', "llama3_json", None),
        ('<|start_header_id|>{{ tools }}{{ "{\\"name\\": ..., \\"parameters\\": " }}', "llama3_json", None),
        ("<|start_header_id|>{{ tools }}", None, None),
        ('<|start_header_id|>{{ tools }}<TOOLCALL>[{"name": ..., "parameters": ...}]</TOOLCALL>', None, None),
        ("<|python_tag|>{{ tools }}<function=x>", None, None),
        ("<|python_tag|>{{ tools }}<|tool_calls|>", None, None),
        ("<\uff5cAssistant\uff5c><think></think>", "none", "deepseek_r1"),
        ("<\uff5cAssistant\uff5c>{{ '<think>' if thinking else '</think>' }}", "none", "qwen3"),
        ("{{ tools }}<tool_call><function=x>", None, None),  # calls written as tags, not as JSON
        ("{{ tools }}{{ '\"parameters\": ' }}", None, None),
        ("{{ tools }}<|channel|>", None, None),
        ("{{ tools }}<|message|>", None, None),
        ("<\uff5cAssistant\uff5c></think>", "none", "qwen3"),
    ],
)
def test_a_chat_template_tells_the_formats(template: str, tools: Any, reasoning: Any) -> None:
    assert tool_parser_of(template) == tools
    assert reasoning_parser_of(template) == reasoning


def test_reasoning_is_switched_by_the_name_that_the_chat_template_reads() -> None:
    assert thinking_switch_among({"enable_thinking", "colour"}) == "enable_thinking"
    assert thinking_switch_among({"thinking"}) == "thinking"
    assert thinking_switch_among({"colour"}) is None
