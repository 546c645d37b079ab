"""Grammars of answers that may call tools: free text, and calls that follow their schemas.

Each format is one that `triolet.core.tools.formats` parses afterwards. Whatever it parses as a call must be one here: a
delimiter opens a call whether it is one token or spelled from several, and where calls need no delimiter, no text may
look like the beginning of one. With a schema for other output there is no free text: either calls, or that schema.

    hermes       text <tool_call> call </tool_call> text ...
    llama3_json  an answer that begins with { is a call, and so is what follows <|python_tag|>
    mistral      text [TOOL_CALLS] and a list of calls, or a name, perhaps [CALL_ID] or [ARGS], and arguments; text ...
    gpt_oss      messages of reasoning, and of text before a call; then the message to the user, or one call
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from triolet.core.tools.call_schema import call_schema, embedded
from triolet.core.tools.harmony import CHANNEL, CONSTRAIN, ENDINGS, FUNCTIONS, MESSAGE, START
from triolet.structured_outputs.special_tokens import TEXT, SpecialToken, delimiter_rule, text_until_delimiter

SPACE = r"SPACE: /[ \t\r\n]{1,16}/"
BETWEEN = r"BETWEEN: /[; \t\r\n]{1,16}/"


def tool_calls_source(
    calls: Mapping[str, Any], json_rule: Callable[[Any], str], special_token: SpecialToken
) -> str:
    """Return the grammar in llguidance's dialect of Lark.

    Args:
        json_rule: returns the rule of a schema.
        special_token: the id of a text that is one special token, or None.
    """
    writer = _Writer(
        calls["tools"],
        calls["parallel"],
        calls.get("form"),
        json_rule,
        special_token,
        is_required=calls.get("required", False),
    )
    lines = {
        "hermes": writer.hermes,
        "llama3_json": writer.llama3_json,
        "mistral": writer.mistral,
        "gpt_oss": writer.gpt_oss,
    }
    return "\n".join(["%llguidance {}", *lines[calls["format"]](), SPACE])


@attrs.frozen
class _Writer:
    tools: list[Any]
    parallel: bool
    form: dict[str, Any] | None
    json_rule: Callable[[Any], str]
    special_token: SpecialToken
    is_required: bool = False  # True if the answer must call

    def hermes(self) -> list[str]:
        more = "tool_call* TEXT" if self.parallel else "tool_call | TEXT"
        only = "(tool_call SPACE?)+" if self.parallel else "tool_call"
        return [
            *self._start(more, only),
            f"tool_call: opening SPACE? call SPACE? {self._mark('</tool_call>')}",
            self._call("arguments"),
            *self._opening("<tool_call>"),
        ]

    def llama3_json(self) -> list[str]:
        more = "BETWEEN? calls? TEXT (opening BETWEEN? calls TEXT)*"
        only = "(opening BETWEEN?)? calls (opening BETWEEN? calls)*"
        if not self.parallel:
            more, only = "BETWEEN? (TEXT | call | opening BETWEEN? call)", "(opening BETWEEN?)? call"
        return [
            *self._start(more, only, self.form and _unlike_calls(self.form)),
            "calls: call (BETWEEN call)* BETWEEN?",
            self._call("parameters"),
            *self._opening("<|python_tag|>", r"TEXT: /([^{; \t\r\n](.|\n)*)?/"),
            BETWEEN,
        ]

    def mistral(self) -> list[str]:
        marks = f"({self._mark('[CALL_ID]')} CALL_ID)? ({self._mark('[ARGS]')} SPACE?)?"
        named = (
            f"{json.dumps(tool['name'])} {marks} {self.json_rule(tool['parameters'])}" for tool in self.tools
        )
        more, tail = ('(SPACE? "," SPACE? call)*', "(opening SPACE? named)*") if self.parallel else ("", "")
        last = f"opening SPACE? {'list' if self.parallel else '(list | named)'}"
        ahead = "(opening SPACE? named SPACE?)"
        # What follows a list is read as more of it, so nothing does.
        return [
            *self._start(f"{tail} (TEXT | {last})", f"{ahead}+ | {ahead}* {last}" if self.parallel else last),
            f'list: "[" SPACE? call {more} SPACE? "]"',
            "named: " + " | ".join(named),
            self._call("arguments"),
            *self._opening("[TOOL_CALLS]"),
            "CALL_ID: /[a-zA-Z0-9]{1,64}/",
        ]

    def gpt_oss(self) -> list[str]:
        end, channel, message = ENDINGS[0], self._mark(CHANNEL), self._mark(MESSAGE)
        # Text before a call has no place beside a form, which all text of the answer has.
        said = '"analysis"' if self.form is not None else '("analysis" | "commentary")'
        last = "call" if self.is_required else "call | final"
        marks = "|".join(map(re.escape, (START, CHANNEL, *ENDINGS)))
        named = (
            f'{channel} "commentary" {to} kind? {message} {arguments}'
            f' | {to} {channel} "commentary" kind? {message} {arguments}'
            for tool in self.tools
            for to in [json.dumps(f" to={FUNCTIONS}{tool['name']}")]
            for arguments in [self.json_rule(tool["parameters"])]
        )
        return [
            f"start: said* ({last})",
            f'said: {channel} {said} {message} ended {self._mark(START)} "assistant"',
            *text_until_delimiter("ended", end, self.special_token),
            f'final: {channel} "final" kind? {message} {"TEXT" if self.form is None else "form"}',
            *([] if self.form is None else [f"form: {self.json_rule(self.form)}"]),
            "call: " + " | ".join(named),
            f'kind: " "? {self._mark(CONSTRAIN)} "json" | " json"',
            # No other mark: to the parser it would begin a message, whether or not it is one token.
            rf"TEXT: /(.|\n)*/ & ~/(.|\n)*({marks})(.|\n)*/",
        ]

    def _start(self, more: str, only: str, form: dict[str, Any] | None = None) -> Iterable[str]:
        """Return the start rule: calls within text, or, with a form, only calls or the form."""
        if self.form is None:
            yield f"start: {more}"
        else:
            yield f"start: SPACE? (form | {only})"
            yield f"form: {self.json_rule(form or self.form)}"

    def _call(self, arguments: str) -> str:
        return "call: " + " | ".join(self.json_rule(_call_schema(tool, arguments)) for tool in self.tools)

    def _opening(self, mark: str, text: str = TEXT) -> Iterable[str]:
        """Return the rules for text up to the delimiter of a call; with a form there is no text."""
        # An answer with a form is nothing but calls or the form: there is no text around them.
        if self.form is not None:
            yield f"opening: {self._mark(mark)}"
        else:
            yield from text_until_delimiter("opening", mark, self.special_token)
            yield text

    def _mark(self, mark: str) -> str:
        return delimiter_rule(mark, self.special_token)


def _unlike_calls(form: Mapping[str, Any]) -> dict[str, Any]:
    """Return the form without objects that would be parsed as calls, unless it names their keys itself."""
    named = {*form.get("properties", ()), *form.get("required", ())}
    # `false` as a property's schema forbids the property.
    free = {key: False for key in ("arguments", "parameters") if key not in named}
    if not free:
        return dict(form)
    schema, definitions = embedded("form", form)
    whole = {**schema, "allOf": [*schema.get("allOf", ()), {"properties": free}]}
    return {**whole, "$defs": definitions} if definitions else whole


def _call_schema(tool: Mapping[str, Any], arguments: str) -> dict[str, Any]:
    call, definitions = call_schema(tool["name"], tool["parameters"], arguments)
    return {**call, "$defs": definitions} if definitions else call
