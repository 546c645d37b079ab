"""Form that a caller may require of an answer: `StructuredOutputsParams`, with vLLM's names and messages.

Only types, sizes and combinations of fields are checked here. Whether a grammar is valid is found by its compiler
(`triolet.grammar`), which does not run on the event loop and has limits of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from json import JSONEncoder
from types import NoneType
from typing import Any

import attrs

from triolet.core import json_text
from triolet.errors import InvalidParams, shown

MAX_NESTING = 64
"""Deepest nesting of a schema; those in use have up to about 20 levels."""

MAX_CHOICES = 4_096
MAX_TEXT_CHARS = 2**20
"""Longest text of any kind that is read; the engine's own limit is `max_grammar_bytes`."""

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag", "tool_calls")
JSON_KINDS = ("json", "json_object", "structural_tag", "tool_calls")
WHOLE_ANSWER_FORMAT = "gpt_oss"
_ENCODER = JSONEncoder(default=dict, ensure_ascii=False, allow_nan=False)
CALL_FORMATS = ("hermes", "llama3_json", "mistral", WHOLE_ANSWER_FORMAT)


def _wrong(field: str, sentence: str, got: object) -> InvalidParams:
    name = f"structured_outputs.{field}"
    return InvalidParams(f"{name} {sentence}, got {shown(got)}.", field=name, got=got)


def _text(value: Any, field: attrs.Attribute[Any]) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise _wrong(field.name, "must be a string", value)
    if not value:
        raise _wrong(field.name, "cannot be empty", value)
    if len(value) > MAX_TEXT_CHARS:
        raise _wrong(field.name, f"must have at most {MAX_TEXT_CHARS} characters", len(value))
    if "\0" in value:
        raise _wrong(field.name, "must hold no NUL character", value)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _wrong(field.name, "must be Unicode text", value) from None
    return str.__str__(value)


def _json(
    value: Any, field: attrs.Attribute[Any], rule: str, check: Callable[[Any], None] | None = None
) -> str | None:
    """Return JSON as text, from text or data."""
    name = f"structured_outputs.{field.name}"
    if isinstance(value, str):
        _text(value, field)
        try:
            value = json_text.loads(value)
        except RecursionError:
            raise _too_deep(name) from None
        except ValueError as error:
            raise InvalidParams(f"{name} must be JSON: {error}", field=name, got=value) from None
        if value is None:
            raise _wrong(field.name, f"must be {rule}: a mapping, or its text", "null")
    if value is None:
        return None
    if not isinstance(value, Mapping | bool):
        raise _wrong(field.name, f"must be {rule}: a mapping, or its text", value)
    _check_nesting(value, field.name)
    if json_text.is_longer(value, MAX_TEXT_CHARS):
        rule = f"must have at most {MAX_TEXT_CHARS} characters"
        raise InvalidParams(f"{name} {rule}, got more.", field=name, got=shown(value))
    try:
        text = json_text.encode(_ENCODER, value)
    except (TypeError, ValueError) as error:
        raise InvalidParams(f"{name} must be {rule}: {error}", field=name, got=shown(value)) from None
    if check is not None:
        check(json_text.loads(text))  # not `value`, whose mappings and lists may be of any class
    return _text(text, field)


def _schema(value: Any) -> str | None:
    return _json(value, attrs.fields(StructuredOutputsParams).json, "a JSON schema")


def _structural_tag(value: Any) -> str | None:
    field = attrs.fields(StructuredOutputsParams).structural_tag
    return _json(value, field, "a structural tag", _check_structural_tag)


def _check_structural_tag(tag: Any) -> None:
    fields: dict[str, Any] = tag if isinstance(tag, dict) else {}
    structures, triggers = fields.get("structures", []), fields.get("triggers", [])
    if not _is_list_of(structures, dict) or not _is_list_of(triggers, str) or not all(triggers):
        raise _wrong("structural_tag", "must have lists of structures and triggers, none of them empty", tag)
    for structure in structures:
        begin, end, schema = (structure.get(name) for name in ("begin", "end", "schema"))
        if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(schema, dict):
            raise _wrong("structural_tag", "must have structures of begin, schema and end", structure)
        if not any(begin.startswith(trigger) for trigger in triggers):
            raise _wrong("structural_tag", "must have structures that begin with one of its triggers", begin)


def _tool_calls(value: Any) -> str | None:
    field = attrs.fields(StructuredOutputsParams).tool_calls
    return _json(value, field, "calls of tools", _check_tool_calls)


def _check_tool_calls(calls: Any) -> None:
    fields: dict[str, Any] = calls if isinstance(calls, dict) else {}
    tools, call_format = fields.get("tools"), fields.get("format")
    if call_format not in CALL_FORMATS:
        raise _wrong("tool_calls", "must have a format of " + ", ".join(CALL_FORMATS), call_format)
    if not isinstance(fields.get("parallel"), bool):
        raise _wrong("tool_calls", "must have parallel, true or false", fields.get("parallel"))
    if not isinstance(fields.get("form", {}), dict):
        raise _wrong("tool_calls", "must have a form that is a JSON schema", fields["form"])
    is_required = fields.get("required", False)
    if not isinstance(is_required, bool) or (is_required and call_format != WHOLE_ANSWER_FORMAT):
        raise _wrong(
            "tool_calls",
            f"must have required, true or false, in the format {WHOLE_ANSWER_FORMAT} only",
            is_required,
        )
    if not _is_list_of(tools, dict):
        raise _wrong("tool_calls", "must have a list of tools, not empty", tools)
    for tool in tools or ():
        name, parameters = tool.get("name"), tool.get("parameters")
        if not isinstance(name, str) or not name or not isinstance(parameters, dict):
            raise _wrong("tool_calls", "must have tools of name and parameters", tool)


def _is_list_of(value: object, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, kind) for item in value)


_LEAVES = (str, int, float, NoneType)  # values that hold no others


def _check_nesting(value: object, field: str) -> None:
    # Level by level without recursion, since a schema may be deeper than the stack; one that contains itself is
    # endless.
    level: list[object] = [value]
    for _ in range(MAX_NESTING):
        level = [
            inner
            for outer in json_text.giving_way(level)
            # What is most of a schema first: whether a class is a Mapping takes five times as long to find out.
            if not isinstance(outer, _LEAVES) and isinstance(outer, Mapping | list | tuple)
            for inner in (outer.values() if isinstance(outer, Mapping) else outer)
        ]
        if not level:
            return
        if len(level) > MAX_TEXT_CHARS:
            raise _wrong(field, f"must have at most {MAX_TEXT_CHARS} values", len(level))
    if any(isinstance(inner, Mapping | list | tuple) for inner in json_text.giving_way(level)):
        raise _too_deep(f"structured_outputs.{field}")


def _too_deep(name: str) -> InvalidParams:
    return InvalidParams(f"{name} must be nested no deeper than {MAX_NESTING} levels", field=name)


def _choices(value: Sequence[str] | None) -> tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        raise _wrong("choice", "must be a list of strings", value)
    if not value:
        raise _wrong("choice", "cannot be empty", value)
    if len(value) > MAX_CHOICES:
        raise _wrong("choice", f"must have at most {MAX_CHOICES} entries", len(value))
    texts: tuple[object, ...] = tuple(value)
    if not all(isinstance(choice, str) and choice for choice in texts):
        raise _wrong("choice", "must hold only strings, none of them empty", value)
    field = attrs.fields(StructuredOutputsParams).choice
    if sum(map(len, value)) > MAX_TEXT_CHARS:
        raise _wrong("choice", f"must have at most {MAX_TEXT_CHARS} characters", sum(map(len, value)))
    for choice in value:
        _text(choice, field)
    return tuple(dict.fromkeys(value))


def _flag(value: Any, field: attrs.Attribute[Any]) -> bool:
    if not isinstance(value, bool):
        raise _wrong(field.name, "must be True or False", value)
    return value


def _strict_plain_fields(_cls: type, fields: list[attrs.Attribute[Any]]) -> list[attrs.Attribute[Any]]:
    """Give every text and flag the strict converter of its type, which names the field in its message."""
    converters = {"str | None": _text, "bool": _flag}
    return [
        field.evolve(converter=attrs.Converter(converters[str(field.type)], takes_field=True))
        if field.converter is None and str(field.type) in converters
        else field
        for field in fields
    ]


@attrs.frozen(field_transformer=_strict_plain_fields)
class StructuredOutputsParams:
    """Form that an answer must have: exactly one of the `KINDS`.

    Args:
        json: a JSON schema, as data or as text; kept as text.
        regex: a regular expression that the whole answer matches. No look-around, no back-references; the classes
            of digits, word characters and spaces are those of ASCII.
        choice: texts, of which the answer is one.
        grammar: a context-free grammar, in Lark's notation or in GBNF.
        json_object: any JSON object.
        disable_any_whitespace: JSON without whitespace between its parts.
        disable_additional_properties: objects of a JSON schema hold no properties but those named.
        whitespace_pattern: regular expression of what may stand between the parts of JSON.
        structural_tag: text with structures in it, `{"structures": [{"begin": ..., "schema": ..., "end": ...}],
            "triggers": [...]}`, as data or as text: where a trigger appears in the text, one of the structures that
            begin with it follows.
        tool_calls: text in which every call of a tool follows a schema, `{"format": ..., "tools": [{"name": ...,
            "parameters": {...}}], "parallel": ...}`, as data or as text: calls are written in the format of that
            name, and are at most one unless `parallel`. With a `form`, a JSON schema, the answer is either calls or
            follows that schema. In the format gpt_oss, whose form is that of reasoning and answer together, `required`
            (true) has the answer call a tool. `triolet.core.tools.plan_tools` builds it from strict tools and forms.

    Raises:
        InvalidParams: names the field, the rule and the value.
    """

    json: str | None = attrs.field(default=None, converter=_schema)
    regex: str | None = None
    choice: tuple[str, ...] | None = attrs.field(default=None, converter=_choices)
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = attrs.field(default=None, converter=_structural_tag)
    tool_calls: str | None = attrs.field(default=None, converter=_tool_calls)

    def __attrs_post_init__(self) -> None:
        kinds = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(kinds) > 1:
            raise _wrong_kinds(
                f"You can only use one kind of structured outputs constraint but multiple are specified: {kinds}"
            )
        if not kinds:
            raise _wrong_kinds(
                f"You must use one kind of structured outputs constraint but none are specified; "
                f"the kinds are {', '.join(KINDS)}"
            )
        if self.json_object is not None and self.json_object is not True:
            raise _wrong("json_object", "must be True, or left out", self.json_object)
        self._check_options()

    def _check_options(self) -> None:
        if self.disable_additional_properties and self.json is None:
            raise _wrong("disable_additional_properties", "is about json only", True)
        for field in ("disable_any_whitespace", "whitespace_pattern"):
            if getattr(self, field) and self.kind not in JSON_KINDS:
                raise _wrong(field, f"is about {', '.join(JSON_KINDS)} only", getattr(self, field))
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise _wrong("whitespace_pattern", "contradicts disable_any_whitespace", self.whitespace_pattern)

    @property
    def kind(self) -> str:
        """Name of the field that is set, one of `KINDS`."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @property
    def covers_reasoning(self) -> bool:
        """True if the form begins where the answer begins, reasoning included."""
        return (
            self.tool_calls is not None and json_text.loads(self.tool_calls)["format"] == WHOLE_ANSWER_FORMAT
        )

    @property
    def texts(self) -> list[str]:
        """Texts to compile."""
        texts = (self.json, self.regex, self.grammar, self.structural_tag, self.tool_calls)
        return [text for text in (*texts, self.whitespace_pattern, *(self.choice or ())) if text]

    @property
    def num_bytes(self) -> int:
        """Size of the text to compile, bytes."""
        return sum(len(text) if text.isascii() else len(text.encode()) for text in self.texts)

    def check_size(self, max_bytes: int) -> None:
        """Check the size against the engine's limit.

        Raises:
            InvalidParams: the size is above it.
        """
        # A text that is far too long is not encoded for its size: a megabyte of characters takes 4 ms.
        size, unit = sum(map(len, self.texts)), "characters"
        if size <= max_bytes:
            size, unit = self.num_bytes, "bytes"
        if size > max_bytes:
            raise InvalidParams(
                f"structured_outputs.{self.kind} must have at most {max_bytes} bytes (max_grammar_bytes), "
                f"got {size} {unit}.",
                field=f"structured_outputs.{self.kind}",
                got=size,
            )


def _wrong_kinds(message: str) -> InvalidParams:
    return InvalidParams(message, field="structured_outputs")


def structured_outputs(value: object) -> StructuredOutputsParams:
    """Convert `SamplingParams.structured_outputs`: an object, or a mapping of its fields.

    Raises:
        InvalidParams: another type, an unknown field, or a value that breaks a rule.
    """
    if isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, Mapping):
        raise InvalidParams(
            f"structured_outputs must be a StructuredOutputsParams, got {type(value).__name__}.",
            field="structured_outputs",
            got=value,
        )
    known = {field.name for field in attrs.fields(StructuredOutputsParams)}
    if unknown := [key for key in value if key not in known]:
        raise InvalidParams(
            f"structured_outputs has no field {shown(unknown[0])}; its fields are {', '.join(sorted(known))}",
            field="structured_outputs",
            got=unknown[0],
        )
    return StructuredOutputsParams(**value)
