"""Answers in the format of gpt-oss: reasoning, text and calls are told apart however the text is cut, or cut short."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

import attrs
import pytest

from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.core.tools import (
    AnswerEvent,
    AnswerParser,
    ReasoningPiece,
    TextPiece,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
    plan_tools,
)
from triolet.core.tools.answer import reasoning_parser_of, tool_parser_of
from triolet.core.tools.harmony import MAX_HEADER_CHARS, HarmonyFormat, opens_final
from triolet.core.tools.reasoning import REASONING_FORMATS, ReasoningState

PROMPT = "<|start|>user<|message|>What is <|channel|>?<|end|><|start|>assistant"
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
OTHER = {"type": "function", "name": "g-2", "parameters": {"type": "object"}}
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
COMMENTARY = "<|channel|>commentary<|message|>"
NEXT = "<|end|><|start|>assistant"
CALL_F = "<|channel|>commentary to=functions.f<|message|>"


def parser(prompt: str = PROMPT, **fields: Any) -> AnswerParser:
    settings: dict[str, Any] = {"tool_parser": "gpt_oss", "reasoning_parser": "gpt_oss"}
    return plan_tools([TOOL, OTHER], **settings | fields).parser(prompt)


def joined(events: Iterable[AnswerEvent]) -> list[AnswerEvent]:
    """Events with neighbouring pieces of the same thing put together."""
    pieces = (TextPiece, ReasoningPiece, ToolCallArguments)
    whole: list[AnswerEvent] = []
    for event in events:
        last = whole[-1] if whole else None
        if isinstance(event, pieces) and isinstance(last, pieces) and type(last) is type(event):
            whole[-1] = attrs.evolve(last, text=last.text + event.text)
        else:
            whole.append(event)
    return whole


def read(parser: AnswerParser | HarmonyFormat, text: str, cuts: Iterable[int] = ()) -> list[AnswerEvent]:
    edges = [0, *cuts, len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
    events = [event for piece in pieces for event in parser.feed(piece)]
    return joined([*events, *parser.finish()])


def call(index: int, name: str, arguments: str, *, is_valid: bool = True) -> list[AnswerEvent]:
    pieces: list[AnswerEvent] = [ToolCallArguments(index, arguments)] if arguments else []
    return [ToolCallBegin(index, name), *pieces, ToolCallEnd(index, name, arguments, is_valid)]


ANSWERS: list[tuple[str, list[AnswerEvent]]] = [
    (f"{FINAL}Hello!<|return|>", [TextPiece("Hello!")]),
    (f"{ANALYSIS}The user says hi.{NEXT}{FINAL}Hello!", [ReasoningPiece("The user says hi."), TextPiece("Hello!")]),
    (f"{ANALYSIS}One.{NEXT}{ANALYSIS}Two.{NEXT}{FINAL}Hello!", [ReasoningPiece("One.\nTwo."), TextPiece("Hello!")]),
    (
        f'{ANALYSIS}Call it.{NEXT}<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{"a": 1}}<|call|>',
        [ReasoningPiece("Call it."), *call(0, "f", '{"a": 1}')],
    ),
    (
        f'{ANALYSIS}Call it.{NEXT} to=functions.g-2<|channel|>commentary json<|message|>{{"a": [1, "b"]}}<|call|>',
        [ReasoningPiece("Call it."), *call(0, "g-2", '{"a": [1, "b"]}')],
    ),
    (" to=functions.f<|channel|>commentary<|message|>{}", call(0, "f", "{}")),
    ("<|channel|>commentary to=functions.f<|message|>{}<|call|>", call(0, "f", "{}")),
    ("<|channel|>analysis to=functions.f code<|message|>{}<|call|>", call(0, "f", "{}")),
    (
        f"{COMMENTARY}Let me look.{NEXT}<|channel|>commentary to=functions.f<|message|>{{}}",
        [TextPiece("Let me look."), *call(0, "f", "{}")],
    ),
    (
        f"{COMMENTARY}First.{NEXT}{ANALYSIS}Hm.{NEXT}{FINAL}Second.",
        [TextPiece("First."), ReasoningPiece("Hm."), TextPiece("\nSecond.")],
    ),
    (
        f'{CALL_F}{{"a": 1}}{NEXT} to=functions.f<|channel|>commentary<|message|>{{}}{NEXT}{FINAL}Done.',
        [*call(0, "f", '{"a": 1}'), *call(1, "f", "{}"), TextPiece("Done.")],
    ),
    ('<|channel|>final <|constrain|>json<|message|>{"a": 1}', [TextPiece('{"a": 1}')]),
    # Models leave marks out now and then.
    (f"{ANALYSIS}Hm.<|start|>assistant{FINAL}Yes.", [ReasoningPiece("Hm."), TextPiece("Yes.")]),
    (f"{ANALYSIS}Hm.{FINAL}Yes.", [ReasoningPiece("Hm."), TextPiece("Yes.")]),
    (f"{ANALYSIS}Hm.<|end|>\n<|start|>assistant{FINAL}Yes.", [ReasoningPiece("Hm."), TextPiece("Yes.")]),
    (f"{ANALYSIS}Hm.{NEXT}<|message|>Yes.", [ReasoningPiece("Hm."), TextPiece("Yes.")]),
    (f"{ANALYSIS}Hm.{NEXT}<|channel|>analysis{NEXT}{FINAL}Yes.", [ReasoningPiece("Hm."), TextPiece("Yes.")]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "events"), ANSWERS)
def test_reasoning_text_and_calls_of_an_answer_are_told_apart(text: str, events: list[AnswerEvent]) -> None:
    assert read(parser(), text) == events
    assert read(parser(), text, range(1, len(text))) == events


FRAGMENTS = [
    *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>", "assistant"),
    *("analysis", "commentary", "final", " to=functions.f", " to=python", "json", " ", "\n", "{", "}", '"'),
    *("a: <", "|>", ANALYSIS, FINAL, COMMENTARY, NEXT, CALL_F, '{"a": "<|end|>"}', "x" * 90),
]  # fmt: skip


@pytest.mark.parametrize("fields", [{}, {"reasoning_parser": None}, {"tool_choice": "none"}], ids=repr)
def test_how_an_answer_is_cut_makes_no_difference(fields: dict[str, Any]) -> None:
    rng = Random(repr(fields))
    for _ in range(400):
        text = "".join(rng.choice(FRAGMENTS) for _ in range(rng.randint(1, 14)))
        some = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randint(0, 5))))
        whole, cut, characters = (
            read(parser(**fields), text, cuts) for cuts in ([], some, range(1, len(text)))
        )
        assert whole == cut == characters, text


def test_every_call_that_begins_ends_once_with_all_of_its_pieces() -> None:
    rng = Random(7)
    for _ in range(400):
        events = read(parser(), "".join(rng.choice(FRAGMENTS) for _ in range(rng.randint(1, 20))))
        begun = [event.index for event in events if isinstance(event, ToolCallBegin)]
        ended = [event for event in events if isinstance(event, ToolCallEnd)]
        assert begun == [event.index for event in ended] == list(range(len(begun)))
        pieces = {event.index: event.text for event in events if isinstance(event, ToolCallArguments)}
        assert all(event.arguments == pieces.get(event.index, "") for event in ended)


def said(events: Sequence[AnswerEvent], kind: type[TextPiece | ReasoningPiece | ToolCallArguments]) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


@pytest.mark.parametrize(("text", "events"), ANSWERS)
def test_an_answer_that_is_cut_short_shows_a_beginning_of_the_whole_one_and_no_mark(
    text: str, events: list[AnswerEvent]
) -> None:
    tokens = re.findall(r"<\|\w+\|>|.|\n", text)  # a mark is one token
    for num_tokens in range(len(tokens)):
        short = read(parser(), "".join(tokens[:num_tokens]))
        for kind in (TextPiece, ReasoningPiece, ToolCallArguments):
            assert said(events, kind).startswith(said(short, kind))
        begun = [event for event in short if isinstance(event, ToolCallBegin)]
        assert begun == [event for event in events if isinstance(event, ToolCallBegin)][: len(begun)]
        assert len([event for event in short if isinstance(event, ToolCallEnd)]) == len(begun)


def test_pieces_are_passed_on_as_they_come() -> None:
    reading = parser()
    pieces = [
        ANALYSIS, "H", "m", "<|end|>", "<|start|>", "assistant", "<|channel|>", "commentary", " to=", "functions.f",
        "<|message|>", '{"a', '": 1}', "<|call|>",
    ]  # fmt: skip
    assert [reading.feed(piece) for piece in pieces] == [
        (), (ReasoningPiece("H"),), (ReasoningPiece("m"),), *[()] * 7,
        (ToolCallBegin(0, "f"),), (ToolCallArguments(0, '{"a'),), (ToolCallArguments(0, '": 1}'),),
        (ToolCallEnd(0, "f", '{"a": 1}', True),),
    ]  # fmt: skip
    assert reading.finish() == ()


@pytest.mark.parametrize(
    "text",
    [
        "Hello, without any mark.",
        " <b>Hello</b>",
        "a <|channel|> is no header, nor is <|start|>user",
        "`<|end|>` ends a message, `<|return|>` an answer, and `<|call|>` a call",
        "<|channel|>secret<|message|>x",
        "<|channel|>final" + "x" * 300 + "<|message|>",
        "<|channel|>final two words<|message|>x",
        "ends like a mark <|cha",
    ],
)
@pytest.mark.parametrize("header", ["", FINAL])
def test_marks_that_make_no_header_are_text(header: str, text: str) -> None:
    for cuts in (range(0), range(1, len(header + text))):
        assert read(parser(), header + text, cuts) == [TextPiece(text)]


def test_strings_of_arguments_may_hold_marks() -> None:
    arguments = '{"code": "<|end|><|start|>assistant<|channel|>final<|message|>"}'
    text = f"{CALL_F}{arguments}<|call|>"
    for cuts in (range(0), range(1, len(text))):
        assert read(parser(), text, cuts) == call(0, "f", arguments)


@pytest.mark.parametrize("arguments", ['{"a": ', '{"a": "b', "{]", "", "sorry", "[1]"])
def test_arguments_that_are_no_object_end_a_call_that_is_not_valid(arguments: str) -> None:
    text = f"{CALL_F}{arguments}"
    assert read(parser(), text) == call(0, "f", arguments, is_valid=False)


@pytest.mark.parametrize("arguments", ['{"a": ', "{]", "[1]", "sorry"])
def test_a_call_that_is_not_valid_ends_with_its_message(arguments: str) -> None:
    text = f"{CALL_F}{arguments}{NEXT}{FINAL}No."
    for cuts in (range(0), range(1, len(text))):
        assert read(parser(), text, cuts) == [*call(0, "f", arguments, is_valid=False), TextPiece("No.")]


@pytest.mark.parametrize(
    "written", ["<|channel|>commentary to=NAME <|constrain|>json<|message|>{}", " to=NAME<|channel|>final<|message|>{}"]
)  # fmt: skip
@pytest.mark.parametrize("name", ["functions.g-2", "python", "functions."])
def test_a_call_of_what_may_not_be_called_is_text_with_its_header(written: str, name: str) -> None:
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
    text = written.replace("NAME", name)
    for cuts in (range(0), range(1, len(text))):
        assert read(parser(tool_choice=allowed), f"{text}<|call|>", cuts) == [TextPiece(text)]


def test_without_tools_calls_are_text_and_without_a_format_of_reasoning_all_is() -> None:
    text = CALL_F + "{}"
    assert read(parser(tool_choice="none"), text) == [TextPiece(text)]
    answer = f"{ANALYSIS}Hm.{NEXT}<|channel|>commentary to=functions.f<|message|>{{}}"
    assert read(parser(reasoning_parser=None), answer) == [TextPiece("Hm."), *call(0, "f", "{}")]
    assert read(parser(reasoning_parser=None, tool_choice="none"), answer) == [TextPiece(answer)]


def test_where_there_are_no_tools_no_calls_are_searched_for() -> None:
    plan = plan_tools([], "auto", tool_parser="gpt_oss", reasoning_parser="gpt_oss")
    assert (plan.tool_parser, plan.is_forced) == (None, False)
    assert read(plan.parser(PROMPT), CALL_F + "{}") == [TextPiece(CALL_F + "{}")]


def test_at_most_one_call_is_delivered_if_calls_may_not_be_parallel() -> None:
    written = CALL_F + "{}"
    text = f"{written}{NEXT}{written}{NEXT}{FINAL}Done."
    assert read(parser(parallel_tool_calls=False), text) == [*call(0, "f", "{}"), TextPiece("Done.")]


def test_what_is_said_before_an_answer_of_a_form_is_reasoning() -> None:
    text = f'{COMMENTARY}Well.{NEXT}<|channel|>final <|constrain|>json<|message|>{{"a": 1}}'
    form = StructuredOutputsParams(json_object=True)
    assert read(parser(tool_choice="none", form=form), text) == [
        ReasoningPiece("Well."),
        TextPiece('{"a": 1}'),
    ]


@pytest.mark.parametrize(
    ("prompt", "text", "events"),
    [
        ("", f"{ANALYSIS}Hm.{NEXT}{FINAL}Yes.", [ReasoningPiece("Hm."), TextPiece("Yes.")]),
        ("no mark", f"{FINAL}Yes.", [TextPiece("Yes.")]),
        (f"{PROMPT}{FINAL}So ", "it is.", [TextPiece("it is.")]),
        (f"{PROMPT}{ANALYSIS}So ", f"it is.{NEXT}{FINAL}Yes.", [ReasoningPiece("it is."), TextPiece("Yes.")]),
        (f"{PROMPT}<|channel|>final", "<|message|>Yes.", [TextPiece("Yes.")]),
        ("<|start|>user<|message|>Hi<|end|>", f"<|start|>assistant{FINAL}Yes.", [TextPiece("Yes.")]),
        (f"{PROMPT}{FINAL}No.<|return|>", f"<|start|>assistant{ANALYSIS}Hm.", [ReasoningPiece("Hm.")]),
        (f"{PROMPT}{ANALYSIS}Hm.<|end|>", "Yes.", [TextPiece("Yes.")]),
    ],
)  # fmt: skip
def test_an_answer_goes_on_where_the_prompt_ends(prompt: str, text: str, events: list[AnswerEvent]) -> None:
    for cuts in (range(0), range(1, len(text))):
        assert read(parser(prompt), text, cuts) == events


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        (PROMPT, False),
        ("", False),
        (f"{PROMPT}{FINAL}", True),
        (f"{PROMPT}<|channel|>final <|constrain|>json<|message|>a", True),
        (f"{PROMPT}{ANALYSIS}a", False),
        (f"{PROMPT}{FINAL}a<|return|>", False),
        (f"<|start|>user<|message|>{FINAL}", False),
    ],
)
def test_reasoning_lies_behind_a_prompt_that_ends_within_the_final_message(
    prompt: str, is_open: bool
) -> None:
    assert opens_final(prompt) is is_open
    state = REASONING_FORMATS["gpt_oss"].state_after(prompt)
    assert state is (ReasoningState.BEHIND if is_open else ReasoningState.INSIDE)


def test_the_chat_template_tells_the_format() -> None:
    template = "{{ tools }}<|start|>assistant<|channel|>analysis<|message|>"
    assert (tool_parser_of(template), reasoning_parser_of(template)) == ("gpt_oss", "gpt_oss")
    assert tool_parser_of("<|channel|>final<|message|>") == "none"


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "name": "f"}])
def test_forced_calls_are_written_and_read_like_others(choice: object) -> None:
    text = f'{ANALYSIS}Hm.{NEXT}<|channel|>commentary to=functions.f<|message|>{{"a": 1}}<|call|>'
    assert read(parser(tool_choice=choice), text) == [ReasoningPiece("Hm."), *call(0, "f", '{"a": 1}')]
    preamble = f"{COMMENTARY}Let me look.{NEXT}{CALL_F}{{}}"
    assert read(parser(tool_choice=choice), preamble) == [TextPiece("Let me look."), *call(0, "f", "{}")]


@pytest.mark.parametrize(
    "piece",
    ["<|start|>", "<|channel|>analysis", NEXT, " ", "<|end|> ", ANALYSIS, "<|channel|>final" + " " * 99],
)
def test_a_long_answer_of_marks_and_spaces_is_held_back_no_longer_than_a_header(piece: str) -> None:
    reading, num_pieces = HarmonyFormat(), 2_000
    for _ in range(num_pieces):
        reading.feed(piece)
        assert len(reading._held) <= MAX_HEADER_CHARS + len(piece)


def test_what_may_be_a_header_is_held_back_while_it_has_fewer_than_256_characters() -> None:
    reading = HarmonyFormat()
    assert reading.feed(f"{FINAL}Hi<|end|>") == [TextPiece("Hi")]
    header = f"{'<|channel|>final':<255}"
    assert reading.feed(header) == []
    assert joined(reading.feed(" ")) == [TextPiece(f"<|end|>{header} ")]
    assert reading.finish() == []
