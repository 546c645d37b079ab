"""Changes of JSON schemas before llguidance reads them: what it does not know, or reads otherwise than JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from triolet.structured_outputs.ascii_regex import string_pattern
from triolet.structured_outputs.exclusive import Exclusion, is_number

_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DATA = ("const", "enum", "default", "examples")

ENFORCED_FORMATS: Final = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"]
)
"""Formats of strings that llguidance knows; it refuses others."""

# llguidance has bounds as numbers of 64 bits. Floats that are read from JSON lie up to 1,024 beside them.
_LARGEST = 2**63 - 1024
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")

# It reads all numbers as floats, and dies of the smallest whole one of 64 bits.
_MOST_EXACT = 2**53

# Between 0, which is excluded, and a bound nearer than 1 it takes 0, too; so the range begins a little behind it.
_SMALLEST = 1e-9


def forbid_additional_properties(schema: Any) -> Any:
    """Return the schema with `additionalProperties: false` on each object that does not say otherwise."""
    return _mapped(schema, _closed)


def known_to_llguidance(schema: Any) -> Any:
    """Return a schema that llguidance reads as JSON Schema means it; no answer to it breaks the one given.

    Formats that are not enforced are left out: to JSON Schema they are annotations. Bounds of 64 bits and more become
    narrower. `oneOf` becomes `anyOf` where its schemas exclude each other.

    Raises:
        ValueError: a constant is a number that llguidance would change.
    """
    changed = _mapped(schema, _without_unknown_format)
    changed = _mapped(changed, partial(_with_plain_values, _near_sides(changed)))
    # A reference may lead through the keyword itself.
    if "/oneOf/" in json.dumps(schema):
        return changed
    return _mapped(changed, partial(_with_any_of, Exclusion(changed)))


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type") == "object" or isinstance(schema.get("properties"), dict):
        return {"additionalProperties": False, **schema}
    return schema


def _without_unknown_format(schema: dict[str, Any]) -> dict[str, Any]:
    known = schema.get("format")
    if not isinstance(known, str) or known in ENFORCED_FORMATS:
        return schema
    return {keyword: value for keyword, value in schema.items() if keyword != "format"}


def _near_sides(schema: Any) -> frozenset[int]:
    """Return the sides of 0, 1 and -1, on which some bound of the schema lies nearer than 1.

    Not only of the schema that excludes 0: `allOf`, `$ref` and the keywords beside them put bounds together.
    """
    sides = set[int]()

    def look_at(part: dict[str, Any]) -> dict[str, Any]:
        bounds = (part.get(keyword) for keyword in _BOUNDS)
        sides.update((bound > 0) - (bound < 0) for bound in bounds if is_number(bound) and abs(bound) < 1)
        return part

    _mapped(schema, look_at)
    return frozenset(sides)


def _with_plain_values(near_sides: frozenset[int], schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with bounds and patterns that llguidance reads rightly.

    Args:
        near_sides: of the whole schema.
    """
    changed = dict(schema)
    for keyword in ("const", "enum"):
        _check_numbers(schema.get(keyword), keyword)
    for keyword in _BOUNDS:
        bound = schema.get(keyword)
        # Of whole numbers llguidance cuts an upper bound itself, and exactly.
        is_cut = schema.get("type") == "integer" and keyword in ("maximum", "exclusiveMaximum")
        if isinstance(bound, int | float) and abs(bound) >= _LARGEST and not is_cut:
            changed[keyword] = _LARGEST if bound > 0 else -_LARGEST
    for kind, sign, furthest in (("Minimum", 1, max), ("Maximum", -1, min)):
        excluded = schema.get(f"exclusive{kind}")
        if sign in near_sides and is_number(excluded) and excluded == 0:
            del changed[f"exclusive{kind}"]
            changed[kind.lower()] = furthest(sign * _SMALLEST, schema.get(kind.lower(), sign * _SMALLEST))
    if isinstance(pattern := schema.get("pattern"), str):
        changed["pattern"] = string_pattern(pattern)
    if isinstance(by_pattern := schema.get("patternProperties"), dict):
        changed["patternProperties"] = {string_pattern(name): inner for name, inner in by_pattern.items()}
    return changed


def _check_numbers(value: Any, keyword: str) -> None:
    """Refuse a whole number that is not exact as a float: the answer would have another one."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            _check_numbers(inner, keyword)
    elif (isinstance(value, int) and abs(value) > _MOST_EXACT) or value == -(2.0**63):
        raise ValueError(f"{keyword} must hold whole numbers of at most 2**53, got {value}")


def _with_any_of(exclusion: Exclusion, schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without a `oneOf` that means the same as `anyOf`."""
    one_of = schema.get("oneOf")
    if not isinstance(one_of, list) or not exclusion.holds(one_of):
        return schema
    others = {keyword: value for keyword, value in schema.items() if keyword != "oneOf"}
    if "anyOf" not in others:
        return {**others, "anyOf": one_of}
    return {**others, "allOf": [*others.get("allOf", ()), {"anyOf": one_of}]}


def _mapped(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]], *, by_name: bool = False) -> Any:
    """Return the schema with a change made to it and to all schemas in it.

    Args:
        by_name: the keys of the value are names, and no keywords.
    """
    # Everywhere but in data: a reference may lead to any place, such as `#/components/schemas/Pet`.
    if isinstance(schema, list):
        return [_mapped(inner, change) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {
        keyword: _mapped(value, change, by_name=not by_name and keyword in _SCHEMAS_BY_NAME)
        if by_name or keyword not in _DATA
        else value
        for keyword, value in schema.items()
    }
    return changed if by_name else change(changed)
