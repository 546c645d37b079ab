"""Functions that a request offers as tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from triolet.core.tools.formats import MAX_NAME_CHARS
from triolet.errors import InvalidRequest, UnsupportedFeature, shown

MAX_TOOLS = 128


@attrs.frozen(kw_only=True)
class FunctionTool:
    """Function that the model may call.

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
        """Return the function in the form that chat templates expect."""
        function: dict[str, Any] = {"name": self.name, "parameters": dict(self.parameters)}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function}


def parse_tools(tools: object) -> tuple[FunctionTool, ...]:
    """Parse the tools of a request, in the form of Chat Completions or of Responses.

    Args:
        tools: a list of `{"type": "function", "function": {"name": ...}}` or `{"type": "function", "name": ...}`.
    Raises:
        InvalidRequest: names the place and the rule.
        UnsupportedFeature: a tool that is no function.
    """
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise wrong("tools", "must be a list", tools)
    if len(tools) > MAX_TOOLS:
        raise wrong("tools", f"must have at most {MAX_TOOLS} entries", len(tools))
    parsed = tuple(_parse_tool(tool, f"tools[{place}]") for place, tool in enumerate(tools))
    names = [tool.name for tool in parsed]
    for name in names:
        if names.count(name) > 1:
            raise wrong("tools", "must have names of their own", name)
    return parsed


def _parse_tool(tool: object, field: str) -> FunctionTool:
    if isinstance(tool, FunctionTool):
        return tool
    if not isinstance(tool, Mapping):
        raise wrong(field, "must be a mapping", tool)
    if (kind := tool.get("type", "function")) != "function":
        raise UnsupportedFeature(
            f"{field}.type must be 'function', got {shown(kind)}", field=f"{field}.type", got=kind
        )
    function = tool.get("function", tool)
    if not isinstance(function, Mapping):
        raise wrong(f"{field}.function", "must be a mapping", function)
    name, description = function.get("name"), function.get("description")
    parameters, strict = function.get("parameters"), function.get("strict")
    if not isinstance(name, str) or not name or len(name) > MAX_NAME_CHARS or not _is_plain(name):
        raise wrong(
            f"{field}.name", f"must have 1 to {MAX_NAME_CHARS} letters, digits, '_', '-' or '.'", name
        )
    if description is not None and not isinstance(description, str):
        raise wrong(f"{field}.description", "must be a string", description)
    if parameters is not None and not isinstance(parameters, Mapping):
        raise wrong(f"{field}.parameters", "must be a JSON schema", parameters)
    if strict is not None and not isinstance(strict, bool):
        raise wrong(f"{field}.strict", "must be true or false", strict)
    return FunctionTool(name=name, description=description, parameters=parameters or {}, strict=strict)


def _is_plain(name: str) -> bool:
    return all((char.isalnum() and char.isascii()) or char in "_-." for char in name)


def wrong(field: str, sentence: str, got: object) -> InvalidRequest:
    """Return the error for a wrong field of a request."""
    return InvalidRequest(f"{field} {sentence}, got {shown(got)}", field=field, got=got)
