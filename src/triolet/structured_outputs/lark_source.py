"""Translate `StructuredOutputsParams` to llguidance's grammar notation."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher

from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.structured_outputs.ascii_regex import ascii_classes
from triolet.structured_outputs.grammar_notation import lark_grammar
from triolet.structured_outputs.json_schema import forbid_additional_properties, known_to_llguidance
from triolet.structured_outputs.special_tokens import TEXT, SpecialToken, delimiter_rule, text_until_delimiter
from triolet.structured_outputs.tool_call_grammar import tool_calls_source

# Bounded: where any amount of white space is allowed, a model may generate it without end.
WHITESPACE_PATTERN = r"[ ]|\r?\n[ \t]{0,16}"

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions


def grammar_source(params: StructuredOutputsParams, special_token: SpecialToken) -> str:
    """Return the grammar in llguidance's notation.

    Args:
        params: schema, expression or grammar.
        special_token: the id of a text that is one special token, or None.
    Raises:
        ValueError: the grammar cannot be parsed.
    """
    match params.kind:
        case "json":
            assert params.json is not None
            schema = json.loads(params.json)
            if params.disable_additional_properties:
                schema = forbid_additional_properties(schema)
            return _json_source(schema, params)
        case "structural_tag":
            return _tagged_source(json.loads(params.structural_tag or ""), params, special_token)
        case "tool_calls":
            calls = json.loads(params.tool_calls or "")
            json_rule = partial(_json_rule, params=params)
            return LLMatcher.grammar_from_lark(tool_calls_source(calls, json_rule, special_token))
        case "json_object":
            return _json_source({"type": "object"}, params)
        case "regex":
            return LLMatcher.grammar_from_regex(ascii_classes(params.regex or ""))
        case "choice":
            # A JSON string is a Lark string of the same text.
            lines = " | ".join(json.dumps(choice) for choice in params.choice or ())
            return LLMatcher.grammar_from_lark(f"start: {lines}")
        case _:
            return LLMatcher.grammar_from_lark(lark_grammar(params.grammar or ""))


def _json_options(params: StructuredOutputsParams) -> JsonCompileOptions:
    if params.disable_any_whitespace:
        return {"whitespace_flexible": False}
    if params.whitespace_pattern is None:
        return {"whitespace_pattern": WHITESPACE_PATTERN}
    return {"whitespace_pattern": _checked_whitespace(params.whitespace_pattern)}


def _checked_whitespace(pattern: str) -> str:
    """Return the pattern with classes of ASCII; the error of a schema with it would not say what is wrong."""
    try:
        pattern = ascii_classes(pattern)
        problem = LLMatcher.validate_grammar(LLMatcher.grammar_from_regex(pattern))
    except ValueError as error:
        problem = str(error)
    if problem:
        raise ValueError(f"whitespace_pattern must be a regular expression: {problem}")
    return pattern


def _json_source(schema: Any, params: StructuredOutputsParams) -> str:
    if not isinstance(schema, dict):  # true and false are schemas, too; options cannot be written into them
        schema = {"anyOf": [schema]}
    text = json.dumps(known_to_llguidance(schema))
    return LLMatcher.grammar_from_json_schema(text, overrides=_json_options(params))


def _tagged_source(tag: Any, params: StructuredOutputsParams, special_token: SpecialToken) -> str:
    """Return a grammar of text in which each trigger is followed by its structure."""
    lines = ["%llguidance {}", "start: tagged* TEXT", TEXT]
    names = []
    for place, trigger in enumerate(tag["triggers"]):
        structures = [one for one in tag["structures"] if one["begin"].startswith(trigger)]
        # A trigger without a structure has nothing that could follow it.
        if not structures:
            continue
        names.append(f"tag_{place}")
        bodies = (_structure(one, one["begin"][len(trigger) :], params, special_token) for one in structures)
        lines += text_until_delimiter(f"trigger_{place}", trigger, special_token)
        ways = [f"trigger_{place} ({' | '.join(bodies)})"]
        for one in structures:
            if one["begin"] != trigger and (token_id := special_token(one["begin"])) is not None:
                ways.append(f"TEXT <[{token_id}]> {_structure(one, '', params, special_token)}")
        lines.append(f"tag_{place}: " + " | ".join(ways))
    lines.append("tagged: " + " | ".join(names))
    return LLMatcher.grammar_from_lark("\n".join(lines))


def _structure(
    structure: Any, begin: str, params: StructuredOutputsParams, special_token: SpecialToken
) -> str:
    """Return the rest of the begin tag, the JSON and the end tag."""
    marks = [delimiter_rule(mark, special_token) if mark else "" for mark in (begin, structure["end"])]
    return f"{marks[0]} {_json_rule(structure['schema'], params)} {marks[1]}"


def _json_rule(schema: Any, params: StructuredOutputsParams) -> str:
    return "%json " + json.dumps({**known_to_llguidance(schema), "x-guidance": _json_options(params)})
