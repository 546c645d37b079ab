"""Answers that may call tools: free text, and calls that follow their schemas, whatever the tokens are."""

from __future__ import annotations

import functools
import json
from random import Random
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from tests.structured_outputs.vocabularies import EOS, bits, small_tokenizer, tokens
from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.core.tools import TextPiece, ToolCallEnd, plan_tools
from triolet.errors import InvalidRequest
from triolet.ipc.grammar import MaskQuestion
from triolet.structured_outputs.compiler import Grammar, InvalidGrammar

MARKS = [
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<tool_call>", "</tool_call>"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>"),
]
NUMBER = {
    "type": "object",
    "properties": {"x": {"$ref": "#/$defs/digit"}},
    "required": ["x"],
    "additionalProperties": False,
    "$defs": {"digit": {"enum": [1, 2]}},
}
TOOLS = [
    {"type": "function", "name": "f", "parameters": NUMBER, "strict": True},
    {"type": "function", "name": "ff", "parameters": {"type": "object"}},
]
CALL = '{"name": "f", "arguments": {"x": 1}}'
OTHER = '{"name": "ff", "arguments": {"any": [null]}}'
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
CALL_F, CALL_FF = (f"<|channel|>commentary to=functions.{name}" for name in ("f", "ff"))
LLAMA, LLAMA_OTHER = (text.replace("arguments", "parameters") for text in (CALL, OTHER))
MUST_GO_ON, MAY_END, OVER = "must go on", "may end", "over"


@functools.cache
def vocabulary(kind: str) -> Tokenizer:
    """In which the marks are spelled (text), are tokens of their own (added), or tokens that no text can spell."""
    tokenizer = small_tokenizer([("a", "b"), ("<", "t")])
    if kind != "text":
        tokenizer.add_tokens([AddedToken(mark, special=kind == "special") for mark in MARKS])
    return tokenizer


known_tokens = functools.cache(tokens)


def grammar(
    tokenizer: Tokenizer,
    tool_parser: str,
    *,
    parallel: bool = True,
    tools: Any = TOOLS,
    form: StructuredOutputsParams | None = None,
    choice: Any = "auto",
) -> Grammar:
    plan = plan_tools(tools, choice, tool_parser=tool_parser, parallel_tool_calls=parallel, form=form)
    assert plan.structured_outputs is not None
    return Grammar(known_tokens(tokenizer), plan.structured_outputs)


def followed(tokenizer: Tokenizer, bound: Grammar, text: str, *, spelled: bool = False) -> str:
    """What becomes of a text: where it is stopped, or whether it may end."""
    # The marks are the last tokens that there are, so the ids of a vocabulary without them mean the same in each.
    token_ids = (vocabulary("text") if spelled else tokenizer).encode(text).ids
    eos = tokenizer.token_to_id(EOS)
    for end in range(len(token_ids) + 1):
        guided = bound.next_mask(MaskQuestion(0, 0, tuple(token_ids[:end])))
        assert guided.problem == ""
        allowed = bits(guided.mask)
        if end == len(token_ids):
            break
        if token_ids[end] not in allowed:
            return "stopped before " + tokenizer.decode(token_ids[end:], skip_special_tokens=False)
    return OVER if guided.is_over or allowed == {eos} else MAY_END if eos in allowed else MUST_GO_ON


CASES = [
    ("hermes", True, "any text, é {", MAY_END),
    ("hermes", True, f"a <tool_call>\n{CALL}\n</tool_call>", MAY_END),
    ("hermes", True, f"<tool_call>{OTHER}</tool_call>\n<tool_call>{CALL} </tool_call> ab", MAY_END),
    ("hermes", True, "<tool_call>ab", "stopped before ab"),
    ("hermes", True, '<tool_call>{"name": "f", "arguments": {"x": 3', "stopped before 3"),
    ("hermes", True, f"<tool_call>{CALL}</tool_call> ab<tool_call>ab", "stopped before ab"),
    ("hermes", False, "ab", MAY_END),
    ("hermes", False, f"a <tool_call>\n{CALL}\n</tool_call>", OVER),
    ("llama3_json", True, " ab {", MAY_END),
    ("llama3_json", True, f" {LLAMA}; {LLAMA_OTHER}; ab", MAY_END),
    ("llama3_json", True, f"ab<|python_tag|>{LLAMA};{LLAMA}<|python_tag|>{LLAMA}ab", MAY_END),
    ("llama3_json", True, '{"ab', "stopped before ab"),
    ("llama3_json", True, f'{LLAMA};{{"ab', "stopped before ab"),
    ("llama3_json", True, "ab <|python_tag|>ab", "stopped before ab"),
    ("llama3_json", True, '{"name": "f", "parameters": {"x": 3', "stopped before 3"),
    ("llama3_json", False, LLAMA, OVER),
    ("llama3_json", False, f"ab <|python_tag|>{LLAMA}", OVER),
    ("llama3_json", False, "ab", MAY_END),
    ("mistral", True, "ab", MAY_END),
    ("mistral", True, f"ab [TOOL_CALLS] [{CALL}, {OTHER}]", OVER),
    ("mistral", True, 'ab[TOOL_CALLS]ff[ARGS]{"x": 3}[TOOL_CALLS]f[CALL_ID]a1[ARGS]{"x": 1} ab', MAY_END),
    ("mistral", True, '[TOOL_CALLS]f{"x": 2}', MAY_END),
    ("mistral", True, '[TOOL_CALLS]f[ARGS]{"x": 3', "stopped before 3"),
    ("mistral", True, "[TOOL_CALLS]ab", "stopped before ab"),
    ("mistral", False, f"[TOOL_CALLS][{CALL}", MUST_GO_ON),
    ("mistral", False, f"[TOOL_CALLS][{CALL}]", OVER),
    ("mistral", False, f"[TOOL_CALLS][{CALL},", "stopped before ,"),
    ("mistral", False, 'ab[TOOL_CALLS]f[ARGS]{"x": 1}', OVER),
    ("gpt_oss", True, f"{FINAL}any text, é {{ <|", MAY_END),
    ("gpt_oss", True, f"{ANALYSIS}ab <|x|>{NEXT}{ANALYSIS}b{NEXT}{FINAL}a", MAY_END),
    ("gpt_oss", True, f"{ANALYSIS}ab", MUST_GO_ON),
    ("gpt_oss", True, f"{ANALYSIS}ab{NEXT}", MUST_GO_ON),
    ("gpt_oss", True, f'{ANALYSIS}ab{NEXT}{CALL_F} <|constrain|>json<|message|>{{"x": 1}}', OVER),
    ("gpt_oss", True, f'<|channel|>commentary<|message|>ab{NEXT}{CALL_F}<|message|>{{"x": 2}}', OVER),
    ("gpt_oss", False, ' to=functions.f<|channel|>commentary json<|message|>{"x": 1}', OVER),
    ("gpt_oss", True, f'{CALL_FF}<|message|>{{"x": 3}}', OVER),
    ("gpt_oss", True, f'{CALL_F}<|message|>{{"x": 3', "stopped before 3"),
    ("gpt_oss", True, "ab", "stopped before ab"),
]


@pytest.mark.parametrize("kind", ["text", "added", "special"])
@pytest.mark.parametrize(("tool_parser", "parallel", "text", "end"), CASES)
def test_text_is_free_and_calls_follow_their_schema(
    kind: str, tool_parser: str, parallel: bool, text: str, end: str
) -> None:
    tokenizer = vocabulary(kind)
    bound = grammar(tokenizer, tool_parser, parallel=parallel)
    assert followed(tokenizer, bound, text) == end
    # A mark that is one token can be spelled, too, and what reads the answer sees no difference.
    assert followed(tokenizer, bound, text, spelled=True) == end


FORM = {
    "type": "object",
    "properties": {"a": {"anyOf": [{"const": 1}, {"type": "string"}]}},
    "required": ["a"],
    "additionalProperties": False,
}
EITHER_CASES = [
    ("hermes", True, '{"a": 1}', OVER),
    ("hermes", True, ' \n{"a": "<tool_call>[TOOL_CALLS]"}', OVER),
    ("hermes", True, '{"a": 2', "stopped before 2"),
    ("hermes", True, "ab", "stopped before ab"),
    ("hermes", True, f"\n<tool_call>\n{CALL}\n</tool_call>", MAY_END),
    ("hermes", True, f"<tool_call>{OTHER}</tool_call>\n<tool_call>{CALL}</tool_call>\n", MAY_END),
    ("hermes", True, f"<tool_call>{CALL}</tool_call> ab", "stopped before ab"),
    ("hermes", True, '<tool_call>{"name": "f", "arguments": {"x": 3', "stopped before 3"),
    ("hermes", True, '<tool_call>{"a', "stopped before a"),
    ("hermes", False, f"<tool_call>{OTHER}</tool_call>", OVER),
    ("hermes", False, '{"a": 1}', OVER),
    ("llama3_json", True, '{"a": 1}', OVER),
    ("llama3_json", True, f"\n{LLAMA}; {LLAMA_OTHER}", MAY_END),
    ("llama3_json", True, f"<|python_tag|>{LLAMA};{LLAMA}<|python_tag|>{LLAMA}", MAY_END),
    ("llama3_json", True, f'{LLAMA};{{"a', "stopped before a"),
    ("llama3_json", True, '{"name": "f", "parameters": {"x": 3', "stopped before 3"),
    ("llama3_json", True, "ab", "stopped before ab"),
    ("llama3_json", False, f"<|python_tag|> {LLAMA}", OVER),
    ("llama3_json", False, '{"a": 1}', OVER),
    ("mistral", True, '{"a": 1}', OVER),
    ("mistral", True, f" [TOOL_CALLS] [{CALL}, {OTHER}]", OVER),
    ("mistral", True, '[TOOL_CALLS]ff[ARGS]{"x": 3}[TOOL_CALLS]f[CALL_ID]a1[ARGS]{"x": 1} ', MAY_END),
    ("mistral", True, f"[TOOL_CALLS]ff[ARGS]{{}}[TOOL_CALLS][{CALL}]", OVER),
    ("mistral", True, '[TOOL_CALLS]f{"x": 1}ab', "stopped before ab"),
    ("mistral", True, "[1", "stopped before 1"),
    ("mistral", False, f"[TOOL_CALLS][{CALL}]", OVER),
    ("mistral", False, '[TOOL_CALLS]f{"x": 1}', OVER),
    ("mistral", False, '{"a": 1}', OVER),
    ("gpt_oss", True, f'{ANALYSIS}ab{NEXT}{FINAL}{{"a": 1}}', OVER),
    ("gpt_oss", True, '<|channel|>final <|constrain|>json<|message|>{"a": 2', "stopped before 2"),
    ("gpt_oss", True, f'{CALL_F}<|message|>{{"x": 1}}', OVER),
    ("gpt_oss", True, f"{FINAL}ab", "stopped before ab"),
    ("gpt_oss", True, f'{CALL_F}<|message|>{{"x": 3', "stopped before 3"),
]


@pytest.mark.parametrize("kind", ["text", "added", "special"])
@pytest.mark.parametrize(("tool_parser", "parallel", "text", "end"), EITHER_CASES)
def test_an_answer_is_nothing_but_calls_or_of_the_form(
    kind: str, tool_parser: str, parallel: bool, text: str, end: str
) -> None:
    tokenizer = vocabulary(kind)
    bound = grammar(tokenizer, tool_parser, parallel=parallel, form=StructuredOutputsParams(json=FORM))
    spelled = followed(tokenizer, bound, text, spelled=True)
    assert spelled == end
    if kind == "text" or "<tool_call>[" not in text:  # a special token is no part of a JSON string
        assert followed(tokenizer, bound, text) == end


FORCED_CASES = [
    ("required", f'{ANALYSIS}ab{NEXT}{CALL_F}<|message|>{{"x": 1}}', OVER),
    ("required", f'<|channel|>commentary<|message|>ab{NEXT}{CALL_FF}<|message|>{{"x": 3}}', OVER),
    ("required", "<|channel|>final", "stopped before final"),
    ({"type": "function", "name": "f"}, f'{CALL_F} <|constrain|>json<|message|>{{"x": 2}}', OVER),
    ({"type": "function", "name": "f"}, f'{CALL_F}<|message|>{{"x": 3', "stopped before 3"),
    ({"type": "function", "name": "f"}, CALL_FF, "stopped before f"),
]


@pytest.mark.parametrize("kind", ["text", "added", "special"])
@pytest.mark.parametrize(("choice", "text", "end"), FORCED_CASES)
def test_a_forced_call_of_gpt_oss_comes_behind_its_reasoning(
    kind: str, choice: Any, text: str, end: str
) -> None:
    tokenizer = vocabulary(kind)
    bound = grammar(tokenizer, "gpt_oss", choice=choice)
    assert followed(tokenizer, bound, text) == end
    assert followed(tokenizer, bound, text, spelled=True) == end


@pytest.mark.parametrize("mark", ["<|start|>", "<|channel|>", "<|return|>", "<|call|>"])
def test_no_text_of_gpt_oss_holds_a_mark_that_could_begin_a_call(mark: str) -> None:
    tokenizer = vocabulary("special")
    bound = grammar(tokenizer, "gpt_oss")
    for beginning in (ANALYSIS, FINAL):
        stopped = followed(tokenizer, bound, beginning + mark)
        assert stopped == f"stopped before {mark}"
        assert followed(tokenizer, bound, beginning + mark, spelled=True) == "stopped before >"


@pytest.mark.parametrize("kind", ["text", "special"])
def test_where_calls_have_no_mark_no_form_looks_like_one(kind: str) -> None:
    tokenizer = vocabulary(kind)
    any_object = StructuredOutputsParams(json_object=True)
    bound = grammar(tokenizer, "llama3_json", form=any_object)
    assert followed(tokenizer, bound, '{"name": "ab", "age": [1]}') == OVER
    assert followed(tokenizer, bound, '{"name": "f", "parameters": {"x": 3') == "stopped before 3"
    assert followed(tokenizer, bound, '{"name": "f", "arguments":') == 'stopped before ":'
    assert followed(tokenizer, grammar(tokenizer, "hermes", form=any_object), '{"parameters": 1}') == OVER
    named = {"type": "object", "properties": {"parameters": {"const": 3}}, "required": ["parameters"]}
    bound = grammar(tokenizer, "llama3_json", form=StructuredOutputsParams(json=named))
    assert followed(tokenizer, bound, '{"parameters": 3}') == OVER


@pytest.mark.parametrize("tool_parser", ["hermes", "llama3_json", "mistral", "gpt_oss"])
def test_random_tokens_behind_an_opening_become_a_call_that_the_parser_reads(tool_parser: str) -> None:
    openings = {
        "hermes": "ab <tool_call>",
        "llama3_json": " {",
        "mistral": "ab[TOOL_CALLS]",
        "gpt_oss": CALL_F,
    }
    opening = openings[tool_parser]
    tokenizer = vocabulary("added")
    plan = plan_tools(TOOLS[:1], tool_parser=tool_parser, parallel_tool_calls=False)
    assert plan.structured_outputs is not None
    bound = Grammar(known_tokens(tokenizer), plan.structured_outputs)
    for seed in range(5):
        answer, rng = tokenizer.encode(opening).ids, Random(seed)
        while not (guided := bound.next_mask(MaskQuestion(0, 0, tuple(answer)))).is_over:
            assert guided.problem == ""
            answer.append(rng.choice(sorted(bits(guided.mask) - {tokenizer.token_to_id(EOS)})))
        parser = plan.parser()
        text = tokenizer.decode(answer, skip_special_tokens=False)
        events = [*parser.feed(text), *parser.finish()]
        [end] = [event for event in events if isinstance(event, ToolCallEnd)]
        assert (end.name, end.is_valid) == ("f", True)
        assert json.loads(end.arguments) in ({"x": 1}, {"x": 2})
        assert "".join(event.text for event in events if isinstance(event, TextPiece)) in ("", "ab")


@pytest.mark.parametrize("tool_parser", [None, "gpt_oss"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "f"}])
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": True, "contains": {"const": 1}, "minContains": 1},
        {"type": "object", "propertyNames": {"pattern": "^a"}, "dependentRequired": {"a": ["b"]}},
        {"type": "object", "unevaluatedProperties": False, "dependentSchemas": {"a": {}}, "dependencies": {}},
        {"not": {"type": "null"}, "if": {"type": "string"}, "then": {"minLength": 1}, "else": {}},
        {"oneOf": [{"type": "number"}, {"type": "integer"}]},
        {"oneOf": [{"type": "number"}, {"const": 1}], "anyOf": [{"type": "number"}, {"type": "string"}]},
        *({"type": "string", "pattern": one} for one in ("^(?!a)", "(?<=a)b", r"\bfoo\B", r"(a)\1")),
    ],
)
def test_a_forced_call_of_a_tool_that_is_not_strict_may_have_any_keyword_in_its_schema(
    tool_parser: str | None, choice: Any, schema: Any
) -> None:
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    tools = [{"type": "function", "name": "f", "parameters": parameters}]
    voc = known_tokens(vocabulary("text"))
    advised = plan_tools(tools, choice, tool_parser=tool_parser).structured_outputs
    assert advised is not None
    Grammar(voc, advised)
    # A pattern that looks around is refused before anything is compiled.

    def compile_strict() -> None:
        bound = plan_tools([{**tools[0], "strict": True}], choice, tool_parser=tool_parser).structured_outputs
        assert bound is not None
        Grammar(voc, bound)

    with pytest.raises((InvalidGrammar, InvalidRequest)):
        compile_strict()


def test_a_schema_that_can_not_be_compiled_is_refused() -> None:
    tools = [{"name": "f", "strict": True, "parameters": {"type": "object", "not": {"required": ["x"]}}}]
    with pytest.raises(InvalidGrammar, match="not"):
        grammar(vocabulary("text"), "hermes", tools=tools)


NODE = {
    "type": "object",
    "properties": {"v": {"enum": [1, 2]}, "more": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["v"],
    "additionalProperties": False,
}
SAME_NAME = {
    "type": "object",
    "properties": {"x": {"$ref": "#/$defs/digit"}},
    "additionalProperties": False,
    "$defs": {"digit": {"enum": [3]}},
}


@pytest.mark.parametrize("tool_choice", ["auto", "required"])
@pytest.mark.parametrize(
    ("name", "arguments", "end"),
    [
        ("tree", '{"v": 1, "more": [{"v": 2, "more": [{"v": 1}]}]}', ""),
        ("tree", '{"v": 1, "more": [{"v": 3', "stopped before 3"),
        ("tree", '{"v": 1, "more": [{"name', "stopped before n"),
        ("tree", '{"v": 1, "more": [[', "stopped before ["),
        ("f", '{"x": 1}', ""),
        ("f", '{"x": 3', "stopped before 3"),
        ("g", '{"x": 3}', ""),
        ("g", '{"x": 1', "stopped before 1"),
    ],
)
def test_a_reference_of_a_tool_means_the_parameters_of_that_tool(
    tool_choice: str, name: str, arguments: str, end: str
) -> None:
    schemas = {"tree": NODE, "f": NUMBER, "g": SAME_NAME}
    tools = [{"name": name, "parameters": schema, "strict": True} for name, schema in schemas.items()]
    tokenizer = vocabulary("text")
    plan = plan_tools(tools, tool_choice, tool_parser="hermes")
    assert plan.structured_outputs is not None
    bound = Grammar(known_tokens(tokenizer), plan.structured_outputs)
    opening, field = ("<tool_call>", "arguments") if tool_choice == "auto" else ("[", "parameters")
    text = f'{opening}{{"name": "{name}", "{field}": {arguments}'
    assert followed(tokenizer, bound, text)[: len("stopped before x")] == (end or MUST_GO_ON)


def test_a_reference_of_a_form_means_the_form_where_calls_are_json_as_well() -> None:
    form = StructuredOutputsParams(json={"type": "object", "properties": {"a": {"$ref": "#"}}})
    tokenizer = vocabulary("text")
    bound = grammar(tokenizer, "llama3_json", form=form)
    assert followed(tokenizer, bound, '{"a": {"parameters": 1}}') in (OVER, MAY_END)
    assert followed(tokenizer, bound, '{"parameters": 1}').startswith("stopped before")
