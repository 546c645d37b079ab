"""From a request's tools and its wish about them to what the engine is asked, and to how its answer is read.

    auto      the model decides; the format's marks are looked for
    none      the tools are not even shown
    required  at least one call: the answer is a JSON list of them, by a grammar made from the tools
    a name    that function is called: the answer is its arguments, by a grammar made from its parameters

Schema and messages are vLLM's, as far as it has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from triolet.core.structured_outputs import StructuredOutputsParams
from triolet.core.tools.answer import AnswerParser
from triolet.core.tools.detection import NO_TOOLS
from triolet.core.tools.forced import ArgumentsFormat, CallListFormat
from triolet.core.tools.formats import MAX_NAME_CHARS, SPECIAL_MARKS, TOOL_FORMATS, ToolFormat
from triolet.core.tools.reasoning import REASONING_FORMATS, ReasoningSplitter
from triolet.errors import InvalidRequest, UnsupportedFeature, shown

MAX_TOOLS = 128


@attrs.frozen(kw_only=True)
class FunctionTool:
    """A function that the model may call.

    Args:
        name: letters, digits, `_`, `-` and `.`.
        description: what it is for.
        parameters: JSON schema of its arguments.
        strict: the arguments must follow the schema.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = attrs.field(factory=dict)
    strict: bool | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        function: dict[str, Any] = {"name": self.name, "parameters": dict(self.parameters)}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function}


def parse_tools(tools: object) -> tuple[FunctionTool, ...]:
    """Tools as they stand in a request, in the form of Chat Completions or of Responses.

    Args:
        tools: a list of `{"type": "function", "function": {"name": ...}}` or `{"type": "function", "name": ...}`.
    Raises:
        InvalidRequest: names the place and the rule.
        UnsupportedFeature: a tool that is no function.
    """
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise _wrong("tools", "must be a list", tools)
    if len(tools) > MAX_TOOLS:
        raise _wrong("tools", f"must have at most {MAX_TOOLS} entries", len(tools))
    parsed = tuple(_parse_tool(tool, f"tools[{place}]") for place, tool in enumerate(tools))
    names = [tool.name for tool in parsed]
    for name in names:
        if names.count(name) > 1:
            raise _wrong("tools", "must have names of their own", name)
    return parsed


def _parse_tool(tool: object, field: str) -> FunctionTool:
    if isinstance(tool, FunctionTool):
        return tool
    if not isinstance(tool, Mapping):
        raise _wrong(field, "must be a mapping", tool)
    if (kind := tool.get("type", "function")) != "function":
        raise UnsupportedFeature(
            f"{field}.type must be 'function', got {shown(kind)}", field=f"{field}.type", got=kind
        )
    function = tool.get("function", tool)
    if not isinstance(function, Mapping):
        raise _wrong(f"{field}.function", "must be a mapping", function)
    name, description = function.get("name"), function.get("description")
    parameters, strict = function.get("parameters"), function.get("strict")
    if not isinstance(name, str) or not name or len(name) > MAX_NAME_CHARS or not _is_plain(name):
        raise _wrong(
            f"{field}.name", f"must have 1 to {MAX_NAME_CHARS} letters, digits, '_', '-' or '.'", name
        )
    if description is not None and not isinstance(description, str):
        raise _wrong(f"{field}.description", "must be a string", description)
    if parameters is not None and not isinstance(parameters, Mapping):
        raise _wrong(f"{field}.parameters", "must be a JSON schema", parameters)
    if strict is not None and not isinstance(strict, bool):
        raise _wrong(f"{field}.strict", "must be true or false", strict)
    return FunctionTool(name=name, description=description, parameters=parameters or {}, strict=strict)


def _is_plain(name: str) -> bool:
    return all((char.isalnum() and char.isascii()) or char in "_-." for char in name)


def _parse_choice(choice: object, tools: Sequence[FunctionTool]) -> str | FunctionTool:
    """`none`, `auto`, `required`, or the function that is named."""
    if choice is None:
        return "auto" if tools else "none"
    if choice in ("none", "auto", "required"):
        if choice == "required" and not tools:
            raise _wrong("tool_choice", "must be none or auto where there are no tools", choice)
        return str(choice)
    if not isinstance(choice, Mapping):
        raise _wrong("tool_choice", "must be none, auto, required or a function's name", choice)
    if (kind := choice.get("type")) != "function":
        raise UnsupportedFeature(
            f"tool_choice.type must be 'function', got {shown(kind)}", field="tool_choice", got=kind
        )
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, Mapping) else None
    for tool in tools:
        if tool.name == name:
            return tool
    raise _wrong("tool_choice", "must name one of the tools", name)


@attrs.frozen(kw_only=True)
class ToolPlan:
    """What follows from a request's tools.

    Args:
        template_tools: for the chat prompt, `{"messages": ..., "tools": plan.template_tools}`; None for none, also
            where the model can not be told of them.
        structured_outputs: for `SamplingParams`; None where nothing is forced.
        skip_special_tokens: for `SamplingParams`; False where the marks of calls are special tokens.
        tool_parser: name of the format that calls are looked for in; None where none are, or where they are forced.
    """

    template_tools: tuple[dict[str, Any], ...] | None
    structured_outputs: StructuredOutputsParams | None
    skip_special_tokens: bool
    tool_parser: str | None
    _names: tuple[str, ...] = ()
    _named: str | None = None
    _reasoning: str | None = None

    def parser(self, prompt: str | None = None) -> AnswerParser:
        """A parser for one answer; each of several answers needs its own.

        Args:
            prompt: its text (`RequestOutput.prompt`), where it is known: it may end amid reasoning.
        """
        splitter = None
        if self._reasoning is not None:
            marks = REASONING_FORMATS[self._reasoning]
            splitter = ReasoningSplitter(marks, is_open=marks.is_open_after(prompt or ""))
        return AnswerParser(splitter, self._format())

    def _format(self) -> ToolFormat | None:
        if self._named is not None:
            return ArgumentsFormat(self._named)
        if self.structured_outputs is not None:
            return CallListFormat()
        return TOOL_FORMATS[self.tool_parser](self._names) if self.tool_parser else None


def plan_tools(
    tools: object = None,
    tool_choice: object = None,
    *,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    parallel_tool_calls: bool = True,
) -> ToolPlan:
    """Decide how tools are offered, and how the answer is read.

    Args:
        tools: see `parse_tools`; None or an empty list for none.
        tool_choice: `none`, `auto`, `required` or `{"type": "function", "function": {"name": ...}}` (or with the name
            beside the type); by default `auto` where there are tools.
        tool_parser: the model's format of calls (`Engine.tool_parser`); `none` for a model that can not be told of
            tools, whose calls can only be forced; None if the format is not known.
        reasoning_parser: the model's marks of reasoning (`Engine.reasoning_parser`).
        parallel_tool_calls: False: `required` asks for exactly one call. Otherwise the model decides.
    Raises:
        InvalidRequest: a wrong tool or choice.
        UnsupportedFeature: a tool that is no function; `auto` and a model whose format of calls is not known.
    """
    for field, name, known in (
        ("tool_parser", tool_parser, (*TOOL_FORMATS, NO_TOOLS)),
        ("reasoning_parser", reasoning_parser, tuple(REASONING_FORMATS)),
    ):
        if name is not None and name not in known:
            raise _wrong(field, f"must be one of {', '.join(known)}", name)
    functions = parse_tools(tools)
    choice = _parse_choice(tool_choice, functions)
    if choice == "none":
        return ToolPlan(
            template_tools=None,
            structured_outputs=None,
            skip_special_tokens=True,
            tool_parser=None,
            reasoning=reasoning_parser,
        )
    forced = None
    if isinstance(choice, FunctionTool):
        forced = StructuredOutputsParams(json=_object_schema(choice))
    elif choice == "required":
        forced = StructuredOutputsParams(json=_calls_schema(functions, parallel_tool_calls))
    elif functions and tool_parser in (None, NO_TOOLS):
        problem = (
            "its chat template has no place for tools" if tool_parser else "how it writes calls is not known"
        )
        raise UnsupportedFeature(
            "tool_choice must be none, required or a function's name: the model can not choose, since "
            f"{problem} (tool_parser)",
            field="tool_choice",
            got=tool_choice,
        )
    is_auto = forced is None and bool(functions)
    return ToolPlan(
        template_tools=None
        if tool_parser == NO_TOOLS
        else tuple(map(FunctionTool.for_template, functions)) or None,
        structured_outputs=forced,
        skip_special_tokens=not (is_auto and tool_parser in SPECIAL_MARKS),
        tool_parser=tool_parser if is_auto else None,
        names=tuple(tool.name for tool in functions),
        named=choice.name if isinstance(choice, FunctionTool) else None,
        reasoning=reasoning_parser,
    )


# ------------------------------------------------------------------------------------------- schemas


def _object_schema(tool: FunctionTool) -> dict[str, Any]:
    """The schema of a function's arguments: an object, with or without properties."""
    return dict(tool.parameters) if tool.parameters else {"type": "object", "properties": {}}


def _calls_schema(tools: Sequence[FunctionTool], may_be_several: bool) -> dict[str, Any]:
    """A list of calls. Definitions that parameters refer to as `#/$defs/...` move to the top, where they are found."""
    calls: list[dict[str, Any]] = []
    definitions: dict[tuple[str, str], Any] = {}
    for tool in tools:
        schema = _object_schema(tool)
        for keyword in ("$defs", "definitions"):
            own = schema.pop(keyword, None)
            for name, definition in own.items() if isinstance(own, Mapping) else ():
                if definitions.setdefault((keyword, name), definition) != definition:
                    raise _wrong(
                        "tools",
                        f"must agree on the {keyword} that they share by name",
                        f"{tool.name}: {name}",
                    )
        calls.append(_call_schema(tool.name, schema))
    whole: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not may_be_several:
        whole["maxItems"] = 1
    for (keyword, name), definition in definitions.items():
        whole.setdefault(keyword, {})[name] = definition
    return whole


def _call_schema(name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _wrong(field: str, sentence: str, got: object) -> InvalidRequest:
    return InvalidRequest(f"{field} {sentence}, got {shown(got)}", field=field, got=got)
