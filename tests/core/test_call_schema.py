"""Schemas of tool calls: what a grammar can hold of them, patterns that it cannot, and references that were moved."""

from __future__ import annotations

import json
from typing import Any

import pytest

from triolet.core.request.structured_outputs import MAX_NESTING
from triolet.core.tools.call_schema import advisory, call_schema, embedded, pattern_that_looks_around

AHEAD = "(?=a)"


def nested(schema: dict[str, Any], depth: int, *, in_lists: bool = False) -> dict[str, Any]:
    """A schema with another one this many levels below it; a list is a level, too."""
    for _ in range(depth // 2 if in_lists else depth):
        schema = {"allOf": [schema]} if in_lists else {"items": schema}
    return schema


def endless(keyword: str, *, in_list: bool = False) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    schema[keyword] = [schema] if in_list else schema
    return schema


# ---------------------------------------------------------------------------------- patterns that look around


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"pattern": AHEAD}, "pattern"),
        ({"items": {"pattern": AHEAD}}, "items.pattern"),
        ({"allOf": [{}, {"not": {"pattern": AHEAD}}]}, "allOf[1].not.pattern"),
        ({"$defs": {"a": {"pattern": AHEAD}}}, "$defs.a.pattern"),
        ({"properties": {"pattern": {"pattern": AHEAD}}}, "properties.pattern.pattern"),
        ({"properties": {"properties": {"pattern": AHEAD}}}, "properties.properties.pattern"),
        ({"patternProperties": {"^a": {}, AHEAD: {}}}, "patternProperties"),
        ({"properties": {"a": {"patternProperties": {AHEAD: {}}}}}, "properties.a.patternProperties"),
        ({"patternProperties": {"^a": {"pattern": AHEAD}}}, "patternProperties.^a.pattern"),
        ({"properties": {"const": {"pattern": AHEAD}}}, "properties.const.pattern"),
        (nested({"pattern": AHEAD}, MAX_NESTING), "items." * MAX_NESTING + "pattern"),
        (
            nested({"pattern": AHEAD}, MAX_NESTING, in_lists=True),
            "allOf[0]." * (MAX_NESTING // 2) + "pattern",
        ),
    ],
)
def test_a_pattern_that_looks_around_is_found_wherever_a_schema_stands(schema: Any, place: str) -> None:
    assert pattern_that_looks_around(schema) == (place, AHEAD)


@pytest.mark.parametrize(
    "schema",
    [
        {"pattern": "^a$", "items": {"patternProperties": {"^a": {}}}},
        {"const": {"pattern": AHEAD}, "enum": [{"pattern": AHEAD}]},
        {"default": {"pattern": AHEAD}, "examples": [{"pattern": AHEAD}], "x-note": {"pattern": AHEAD}},
        {"properties": {"pattern": AHEAD}},  # a name, of what is no schema
        {"properties": {"patternProperties": {AHEAD: {}}}},  # a name, and what is no keyword
        {"pattern": 5, "patternProperties": True},
        {"patternProperties": [AHEAD]},
        {"properties": {AHEAD: {}}, "$defs": {AHEAD: {}}},
        True,
    ],
)
def test_what_is_no_pattern_of_a_schema_does_not_look_around(schema: Any) -> None:
    assert pattern_that_looks_around(schema) is None


@pytest.mark.parametrize("in_lists", [False, True])
def test_what_is_nested_too_deeply_is_left_to_the_check_of_the_whole(in_lists: bool) -> None:
    deep = {"items": nested({"pattern": AHEAD, "not": {}, "$ref": "#"}, MAX_NESTING, in_lists=in_lists)}
    assert pattern_that_looks_around(deep) is None
    assert advisory(deep) == deep
    assert embedded("f", deep) == (deep, {})


@pytest.mark.parametrize(
    "schema",
    [endless("items"), endless("properties"), endless("anyOf", in_list=True), endless("prefixItems", in_list=True)],
    ids=["items", "properties", "anyOf", "prefixItems"],
)  # fmt: skip
def test_a_schema_that_contains_itself_is_looked_at_down_to_the_limit(schema: dict[str, Any]) -> None:
    assert pattern_that_looks_around(schema) is None
    for result in (advisory(schema), embedded("f", schema)[0]):
        with pytest.raises(ValueError, match="Circular"):
            json.dumps(result)


# ------------------------------------------------------------------------------------- schemas that only advise


@pytest.mark.parametrize(
    ("schema", "kept"),
    [
        ({"not": {}, "if": {}, "then": {}, "else": {}, "uniqueItems": True, "type": "string"}, {"type": "string"}),
        ({"items": {"contains": {}, "minContains": 1, "type": "array"}}, {"items": {"type": "array"}}),
        ({"anyOf": [{"not": {}}, {"type": "null"}]}, {"anyOf": [{}, {"type": "null"}]}),
        ({"pattern": AHEAD, "minLength": 1}, {"minLength": 1}),
        ({"pattern": "^a"}, {"pattern": "^a"}),
        # Names are no keywords, and what is below them is a schema again.
        ({"properties": {"not": {"not": {}}}}, {"properties": {"not": {}}}),
        ({"properties": {"const": {"not": {}}}}, {"properties": {"const": {}}}),
        ({"properties": {"properties": {"not": {}}}}, {"properties": {"properties": {}}}),
        ({"properties": {"pattern": AHEAD}}, {"properties": {"pattern": AHEAD}}),
        ({"properties": {"oneOf": {"type": "null"}}}, {"properties": {"oneOf": {"type": "null"}}}),
        (
            {"properties": {"patternProperties": {AHEAD: {}}, "additionalProperties": {}}},
            {"properties": {"patternProperties": {AHEAD: {}}, "additionalProperties": {}}},
        ),
        # Data are left as they are.
        (
            {"const": {"not": 1}, "enum": [{"not": 1}], "default": {"oneOf": 1}, "examples": [{"if": 1}]},
            {"const": {"not": 1}, "enum": [{"not": 1}], "default": {"oneOf": 1}, "examples": [{"if": 1}]},
        ),
        (
            {"patternProperties": {"^a": {}, AHEAD: {}}, "additionalProperties": False, "minProperties": 1},
            {"minProperties": 1},
        ),
        (
            {"patternProperties": {"^a": {"not": {}}}, "additionalProperties": False},
            {"patternProperties": {"^a": {}}, "additionalProperties": False},
        ),
        (
            {"patternProperties": True, "additionalProperties": False},
            {"patternProperties": True, "additionalProperties": False},
        ),
        (nested({"not": {}}, MAX_NESTING), nested({}, MAX_NESTING)),
        (nested({"not": {}}, MAX_NESTING, in_lists=True), nested({}, MAX_NESTING, in_lists=True)),
    ],
)  # fmt: skip
def test_a_schema_that_advises_keeps_what_a_grammar_enforces(schema: Any, kept: Any) -> None:
    assert advisory(schema) == kept


@pytest.mark.parametrize(
    ("schema", "kept"),
    [
        ({"oneOf": [{"not": {}}, {"type": "null"}]}, {"anyOf": [{}, {"type": "null"}]}),
        ({"oneOf": [True], "anyOf": [False]}, {"anyOf": [False], "allOf": [{"anyOf": [True]}]}),
        (
            {"oneOf": [True], "anyOf": [False], "allOf": [{"not": {}}]},
            {"anyOf": [False], "allOf": [{}, {"anyOf": [True]}]},
        ),
        ({"oneOf": [True], "anyOf": [False], "allOf": 5}, {"anyOf": [False], "allOf": 5}),
    ],
)
def test_one_of_several_schemas_is_any_of_them_beside_another_choice_too(schema: Any, kept: Any) -> None:
    assert advisory(schema) == kept


def test_the_schema_of_the_caller_is_not_changed() -> None:
    schema: dict[str, Any] = {"oneOf": [{"not": {}}], "items": {"not": {}}}
    advisory(schema)
    assert schema == {"oneOf": [{"not": {}}], "items": {"not": {}}}


# ---------------------------------------------------------------------------------------- calls and references


def test_a_call_has_a_name_and_arguments_and_nothing_else() -> None:
    assert call_schema("f", {"type": "object"}, "arguments") == (
        {
            "type": "object",
            "properties": {"name": {"const": "f"}, "arguments": {"type": "object"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        },
        {},
    )
    call, definitions = call_schema("f", {"items": {"$ref": "#"}}, "parameters")
    assert call["properties"]["parameters"] == {"$ref": "#/$defs/f"}
    assert definitions == {"f": {"items": {"$ref": "#/$defs/f"}}}


@pytest.mark.parametrize(
    ("schema", "moved"),
    [
        ({"items": {"$ref": ""}}, {"items": {"$ref": "#/$defs/f"}}),
        ({"items": [{"$ref": "#/items"}]}, {"items": [{"$ref": "#/$defs/f/items"}]}),
        (
            {"$id": "https://e.com/f#", "items": {"$ref": "https://e.com/f#/a"}},
            {"items": {"$ref": "#/$defs/f/a"}},
        ),
        ({"$id": 5, "items": {"$ref": "#"}}, {"items": {"$ref": "#/$defs/f"}}),
        ({"properties": {"$ref": {"$ref": "#"}}}, {"properties": {"$ref": {"$ref": "#/$defs/f"}}}),
        (
            {"properties": {"properties": {"$ref": "#"}}},
            {"properties": {"properties": {"$ref": "#/$defs/f"}}},
        ),
        (
            {"items": {"$ref": "#"}, "properties": {"$ref": "#"}},  # a name, of what is no schema
            {"items": {"$ref": "#/$defs/f"}, "properties": {"$ref": "#"}},
        ),
        (nested({"$ref": "#"}, MAX_NESTING), nested({"$ref": "#/$defs/f"}, MAX_NESTING)),
        (
            nested({"$ref": "#"}, MAX_NESTING, in_lists=True),
            nested({"$ref": "#/$defs/f"}, MAX_NESTING, in_lists=True),
        ),
    ],
)
def test_a_schema_with_references_to_itself_becomes_a_definition(schema: Any, moved: Any) -> None:
    assert embedded("f", schema) == ({"$ref": "#/$defs/f"}, {"f": moved})


@pytest.mark.parametrize(
    "schema",
    [
        {"$id": "https://e.com/f", "type": "object"},
        {"items": {"$ref": "#name"}},
        {"items": {"$ref": "https://e.com/g"}},
        {"items": {"$ref": 5}},
        {"const": {"$ref": "#"}},
        {"properties": {"$ref": "#"}},
    ],
)
def test_a_schema_without_references_to_itself_stays_as_it_is(schema: Any) -> None:
    assert embedded("f", schema) == (schema, {})
