"""Grammars of answers that may call tools: text as the model likes, and calls that follow their schemas.

Each format is the one of `triolet.core.tools.formats` that reads the answer afterwards. What is a call there must be
one here: so a mark opens a call whether it is one token or spelled from several, and where a call needs no mark, no
text may look like the beginning of one.

    hermes       text <tool_call> call </tool_call> text ...
    llama3_json  an answer that begins with { is a call, and so is what follows <|python_tag|>
    mistral      text [TOOL_CALLS] and a list of calls, or a name, perhaps [CALL_ID] or [ARGS], and arguments; text ...
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

SpecialToken = Callable[[str], int | None]

TEXT = r"TEXT: /(.|\n)*/"
SPACE = r"SPACE: /[ \t\r\n]{1,16}/"


def tool_calls_source(
    calls: Mapping[str, Any], json_rule: Callable[[Any], str], special_token: SpecialToken
) -> str:
    """The grammar, in llguidance's dialect of Lark.

    Args:
        calls: see `StructuredOutputsParams.tool_calls`.
        json_rule: what stands for a schema in such a grammar.
        special_token: the id of a text that is one special token, or None.
    """
    writer = _Writer(calls["tools"], calls["parallel"], json_rule, special_token)
    lines = {"hermes": writer.hermes, "llama3_json": writer.llama3_json, "mistral": writer.mistral}
    return "\n".join(["%llguidance {}", *lines[calls["format"]]()])


@attrs.frozen
class _Writer:
    tools: list[Any]
    parallel: bool
    json_rule: Callable[[Any], str]
    special_token: SpecialToken

    def hermes(self) -> list[str]:
        return [
            "start: tool_call* TEXT" if self.parallel else "start: tool_call | TEXT",
            f"tool_call: opening SPACE? call SPACE? {self._mark('</tool_call>')}",
            self._call("arguments"),
            *self._opening("<tool_call>"),
            TEXT,
            SPACE,
        ]

    def llama3_json(self) -> list[str]:
        several = "start: BETWEEN? calls? TEXT (opening BETWEEN? calls TEXT)*"
        return [
            several if self.parallel else "start: BETWEEN? (TEXT | call | opening BETWEEN? call)",
            "calls: call (BETWEEN call)* BETWEEN?",
            self._call("parameters"),
            *self._opening("<|python_tag|>"),
            r"TEXT: /([^{; \t\r\n](.|\n)*)?/",
            r"BETWEEN: /[; \t\r\n]{1,16}/",
        ]

    def mistral(self) -> list[str]:
        marks = f"({self._mark('[CALL_ID]')} CALL_ID)? ({self._mark('[ARGS]')} SPACE?)?"
        named = (
            f"{json.dumps(tool['name'])} {marks} {self.json_rule(tool['parameters'])}" for tool in self.tools
        )
        more, tail = ('(SPACE? "," SPACE? call)*', "(opening SPACE? named)*") if self.parallel else ("", "")
        # What follows a list is read as more of it, so nothing does.
        return [
            f"start: {tail} (TEXT | opening SPACE? {'list' if self.parallel else '(list | named)'})",
            f'list: "[" SPACE? call {more} SPACE? "]"',
            "named: " + " | ".join(named),
            self._call("arguments"),
            *self._opening("[TOOL_CALLS]"),
            "CALL_ID: /[a-zA-Z0-9]{1,64}/",
            TEXT,
            SPACE,
        ]

    def _call(self, arguments: str) -> str:
        return "call: " + " | ".join(self.json_rule(_call_schema(tool, arguments)) for tool in self.tools)

    def _opening(self, mark: str) -> Iterable[str]:
        """Text up to a mark that opens a call."""
        token_id = self.special_token(mark)
        yield f"spelled[lazy]: TEXT {json.dumps(mark)}"
        yield "opening: spelled" if token_id is None else f"opening: spelled | TEXT <[{token_id}]>"

    def _mark(self, mark: str) -> str:
        token_id = self.special_token(mark)
        return json.dumps(mark) if token_id is None else f"({json.dumps(mark)} | <[{token_id}]>)"


def _call_schema(tool: Mapping[str, Any], arguments: str) -> dict[str, Any]:
    """A call as an object; definitions that the parameters refer to as `#/$defs/...` move to its top."""
    parameters = dict(tool["parameters"])
    definitions = {name: parameters.pop(name) for name in ("$defs", "definitions") if name in parameters}
    return {
        **definitions,
        "type": "object",
        "properties": {"name": {"const": tool["name"]}, arguments: parameters},
        "required": ["name", arguments],
        "additionalProperties": False,
    }
