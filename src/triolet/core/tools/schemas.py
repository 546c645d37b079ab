"""JSON schemas that constrain tool calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.core.tools.functions import FunctionTool, wrong


def object_schema(tool: FunctionTool) -> dict[str, Any]:
    """Return the schema of a function's arguments: an object, with or without properties."""
    return dict(tool.parameters) if tool.parameters else {"type": "object", "properties": {}}


def bound_calls(
    tools: Sequence[FunctionTool], tool_parser: str | None, may_be_several: bool
) -> dict[str, Any]:
    """Return the value of `StructuredOutputsParams.tool_calls`; a tool that is not strict takes any object."""
    listed = [
        {"name": tool.name, "parameters": object_schema(tool) if tool.strict else {"type": "object"}}
        for tool in tools
    ]
    return {"format": tool_parser, "tools": listed, "parallel": may_be_several}


def leaves_room_for_calls(form: StructuredOutputsParams) -> bool:
    """Return True if an answer may be of this form or else calls."""
    return form.kind in ("json", "json_object") and not form.disable_additional_properties


def schema_of(form: StructuredOutputsParams) -> dict[str, Any]:
    """Return the schema of a form that is JSON."""
    schema = json.loads(form.json) if form.json is not None else {"type": "object"}
    return schema if isinstance(schema, dict) else {"anyOf": [schema]}


def calls_schema(tools: Sequence[FunctionTool], may_be_several: bool) -> dict[str, Any]:
    """Return the schema of a list of calls; `#/$defs/...` that parameters refer to move to the top level."""
    calls: list[dict[str, Any]] = []
    definitions: dict[tuple[str, str], Any] = {}
    for tool in tools:
        schema = object_schema(tool)
        for keyword in ("$defs", "definitions"):
            own = schema.pop(keyword, None)
            for name, definition in own.items() if isinstance(own, Mapping) else ():
                if definitions.setdefault((keyword, name), definition) != definition:
                    raise wrong(
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
