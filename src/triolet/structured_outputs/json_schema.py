"""Changes of JSON schemas before llguidance reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SCHEMAS = ("items", "additionalItems", "additionalProperties", "if", "then", "else", "not")

ENFORCED_FORMATS: Final = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"]
)
"""Formats of strings that llguidance knows; it refuses others."""


def forbid_additional_properties(schema: Any) -> Any:
    """Return the schema with `additionalProperties: false` on each object that does not say otherwise."""
    return _mapped(schema, _closed)


def drop_unknown_formats(schema: Any) -> Any:
    """Return the schema without the formats that are not enforced: to JSON Schema they are annotations."""
    return _mapped(schema, _without_unknown_format)


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type") == "object" or isinstance(schema.get("properties"), dict):
        return {"additionalProperties": False, **schema}
    return schema


def _without_unknown_format(schema: dict[str, Any]) -> dict[str, Any]:
    known = schema.get("format")
    if not isinstance(known, str) or known in ENFORCED_FORMATS:
        return schema
    return {keyword: value for keyword, value in schema.items() if keyword != "format"}


def _mapped(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return the schema with a change made to it and to all schemas in it."""
    if not isinstance(schema, dict):
        return schema
    changed = dict(schema)
    for keyword, value in schema.items():
        if keyword in _SCHEMAS_BY_NAME and isinstance(value, dict):
            changed[keyword] = {name: _mapped(inner, change) for name, inner in value.items()}
        elif keyword in _LISTS_OF_SCHEMAS and isinstance(value, list):
            changed[keyword] = [_mapped(inner, change) for inner in value]
        elif keyword in _SCHEMAS:
            changed[keyword] = _mapped(value, change)
    return change(changed)
