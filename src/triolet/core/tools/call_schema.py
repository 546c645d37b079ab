"""JSON schemas of tool calls, with the parameters of the functions inside them.

A reference such as `#` or `#/$defs/Node` counts from the top of the whole schema. So parameters with references to
places of their own become a definition of the whole, under the function's name, and the references lead there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from triolet.core.json_text import giving_way
from triolet.core.request.structured_outputs import MAX_NESTING

_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# Keywords whose value is a schema, or a list of them.
_SCHEMAS = frozenset(
    "items prefixItems additionalItems unevaluatedItems contains additionalProperties unevaluatedProperties "
    "propertyNames anyOf allOf oneOf not if then else".split()
)
_DATA = ("const", "enum", "default", "examples")

# What the compiler of grammars refuses.
_NOT_ENFORCED = frozenset(
    [
        *(
            "uniqueItems",
            "contains",
            "minContains",
            "maxContains",
            "propertyNames",
            "not",
            "if",
            "then",
            "else",
        ),
        *(
            "dependentRequired",
            "dependentSchemas",
            "dependencies",
            "unevaluatedProperties",
            "unevaluatedItems",
        ),
    ]
)
_FOR_NAMES = ("patternProperties", "additionalProperties")
_LOOKS_AROUND = re.compile(r"\(\?<?[=!]|\\[bB1-9k]")
# An escaped character or a class: what looks like one of these in it is none. A class that is not closed ends with the
# pattern, so that no character is read twice.
_MEMBERS = re.compile(r"\\[^bB1-9k]|\[\^?+\]?+(?:\\.|[^\]\\])*+\]?+", re.DOTALL)


def advisory(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a function that is not strict, as far as a grammar can hold its arguments to it.

    Such a schema advises the model, which sees the whole of it. So keywords that no grammar enforces are left out, and
    patterns that look around are; `oneOf` is `anyOf`.
    """
    loosened: dict[str, Any] = _loosened(schema)
    return loosened


def looks_around(pattern: str) -> bool:
    r"""Return True for a pattern of which no grammar can be made: `(?=a)`, `(?<!a)`, `\b`, `\1`."""
    return _LOOKS_AROUND.search(_MEMBERS.sub("x", pattern)) is not None


def pattern_that_looks_around(schema: Any) -> tuple[str, str] | None:
    """Return the place of the first pattern that looks around, such as `properties.a.pattern`, and the pattern."""
    return next((found for found in _patterns(schema) if looks_around(found[1])), None)


def _patterns(
    schema: Any, place: str = "", *, by_name: bool = False, depth: int = 0
) -> Iterator[tuple[str, str]]:
    """Yield the place of each pattern, and the pattern.

    Args:
        place: of the schema.
        by_name: the keys of the value are names, and no keywords.
    """
    if depth > MAX_NESTING:  # refused where the whole is checked
        return
    if isinstance(schema, list | tuple):
        for number, inner in enumerate(giving_way(schema)):
            yield from _patterns(inner, f"{place}[{number}]", depth=depth + 1)
    if not isinstance(schema, Mapping):
        return
    for key, inner in giving_way(schema.items()):
        inside = f"{place}.{key}" if place else str(key)
        if not by_name and key == "pattern" and isinstance(inner, str):
            yield inside, inner
        if not by_name and key == "patternProperties" and isinstance(inner, Mapping):
            yield from ((inside, str(name)) for name in inner)
        if by_name or key in _SCHEMAS_BY_NAME or key in _SCHEMAS:
            is_names = not by_name and key in _SCHEMAS_BY_NAME
            yield from _patterns(inner, inside, by_name=is_names, depth=depth + 1)


def _loosened(value: Any, *, by_name: bool = False, depth: int = 0) -> Any:
    if depth > MAX_NESTING:  # refused where the whole is checked
        return value
    if isinstance(value, list | tuple):
        return [_loosened(inner, depth=depth + 1) for inner in giving_way(value)]
    if not isinstance(value, Mapping):
        return value
    kept = dict(value)
    for key, inner in giving_way(value.items()):
        if not by_name and (key in _NOT_ENFORCED or (key == "pattern" and looks_around(str(inner)))):
            del kept[key]
        elif by_name or key not in _DATA:
            is_names = not by_name and key in _SCHEMAS_BY_NAME
            kept[key] = _loosened(inner, by_name=is_names, depth=depth + 1)
    if (
        not by_name
        and isinstance(named := value.get("patternProperties"), Mapping)
        and any(looks_around(str(name)) for name in named)
    ):
        # Without the one the other would forbid what it allows.
        kept = {key: inner for key, inner in kept.items() if key not in _FOR_NAMES}
    if not by_name and "oneOf" in kept:
        one_of = kept.pop("oneOf")
        if "anyOf" not in kept:
            kept["anyOf"] = one_of
        elif isinstance(others := kept.get("allOf", []), list):
            # Anything else is refused where the schema is compiled.
            kept["allOf"] = [*others, {"anyOf": one_of}]
    return kept


def call_schema(
    name: str, parameters: Mapping[str, Any], field: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the schema of a call of a function, and the `$defs` that it needs at the top of the whole schema.

    Args:
        field: of the call, that holds the arguments.
    """
    schema, definitions = embedded(name, parameters)
    call = {
        "type": "object",
        "properties": {"name": {"const": name}, field: schema},
        "required": ["name", field],
        "additionalProperties": False,
    }
    return call, definitions


def embedded(name: str, schema: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a schema as it can stand within another one, and its `$defs` there.

    Args:
        name: of its definition; letters, digits, `_`, `-` and `.`.
    """
    place = f"#/$defs/{name}"
    moved = _moved(schema, place, schema.get("$id"))
    if moved == schema:
        return dict(schema), {}
    # Below an `$id` references would count from there.
    moved.pop("$id", None)
    return {"$ref": place}, {name: moved}


def _moved(value: Any, place: str, own_id: object, *, by_name: bool = False, depth: int = 0) -> Any:
    """Return a part of a schema whose references to the schema itself lead to its new place.

    Args:
        by_name: the keys of the value are names, and no keywords.
    """
    if depth > MAX_NESTING:  # refused where the whole is checked
        return value
    if isinstance(value, list | tuple):
        return [_moved(inner, place, own_id, depth=depth + 1) for inner in value]
    if not isinstance(value, Mapping):
        return value
    moved = dict(value)
    for key, inner in value.items():
        if by_name or key not in _DATA:
            is_names = not by_name and key in _SCHEMAS_BY_NAME
            moved[key] = _moved(inner, place, own_id, by_name=is_names, depth=depth + 1)
    if not by_name and isinstance(reference := value.get("$ref"), str):
        local = reference.removeprefix(own_id.rstrip("#")) if isinstance(own_id, str) else reference
        # `#name` is that of an `$anchor`, which is found anywhere.
        if local in ("", "#") or local.startswith("#/"):
            moved["$ref"] = place + local.removeprefix("#")
    return moved
