"""Changes of JSON schemas: closed objects, and formats that are no constraint."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.structured_outputs.vocabularies import follows
from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.structured_outputs.json_schema import forbid_additional_properties

FORMS: dict[str, Any] = {
    "itself": ({"type": "string"}, "{}"),
    "a property named format": (
        {
            "type": "object",
            "properties": {"format": {"type": "string"}},
            "required": ["format"],
            "additionalProperties": False,
        },
        '{{"format":{}}}',
    ),
    "an item": ({"type": "array", "items": {"type": "string"}}, "[{}]"),
    "a choice": ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "{}"),
    "a definition": ({"$defs": {"a": {"type": "string"}}, "$ref": "#/$defs/a"}, "{}"),
}


def with_format(schema: Any, name: str) -> Any:
    text = json.dumps(schema)
    return json.loads(text.replace('{"type": "string"}', f'{{"type": "string", "format": "{name}"}}'))


@pytest.mark.parametrize("name", ["password", "binary", "idn-email", "file-path"])
@pytest.mark.parametrize(("schema", "answer"), FORMS.values(), ids=FORMS.keys())
def test_a_format_that_is_not_known_is_an_annotation(schema: Any, answer: str, name: str) -> None:
    form = StructuredOutputsParams(json=with_format(schema, name))
    assert follows(form, answer.format('"x"'))
    assert not follows(form, answer.format("true"))


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("date-time", "2024-02-29T10:20:30Z"),
        ("time", "10:20:30Z"),
        ("date", "2024-02-29"),
        ("duration", "P1D"),
        ("email", "a@b.org"),
        ("hostname", "b.org"),
        ("ipv4", "127.0.0.1"),
        ("ipv6", "::1"),
        ("uri", "http://b.org/x"),
        ("uuid", "123e4567-e89b-12d3-a456-426614174000"),
    ],
)
def test_a_format_that_is_known_is_held_to(name: str, right: str) -> None:
    for schema, answer in FORMS.values():
        form = StructuredOutputsParams(json=with_format(schema, name))
        assert follows(form, answer.format(json.dumps(right)))
        assert not follows(form, answer.format('"?!"'))


def test_an_unknown_format_of_a_structure_is_an_annotation_too() -> None:
    structure = {"begin": "<a>", "schema": {"type": "string", "format": "password"}, "end": "</a>"}
    tag = {"structures": [structure], "triggers": ["<a>"]}
    assert follows(StructuredOutputsParams(structural_tag=tag), '<a>"x"</a>')


def test_any_schema_object_is_closed_and_nothing_else() -> None:
    schema = {
        "type": "object",
        "properties": {"properties": {"type": "string"}, "inner": {"type": "object"}},
        "$defs": {"open": {"type": "object", "additionalProperties": True}},
        "anyOf": [{"properties": {"a": {}}}, {"type": "string"}],
    }
    shut = forbid_additional_properties(schema)
    assert shut["additionalProperties"] is False
    assert shut["properties"] == {
        "properties": {"type": "string"},
        "inner": {"type": "object", "additionalProperties": False},
    }
    assert shut["$defs"]["open"]["additionalProperties"] is True
    assert shut["anyOf"] == [{"properties": {"a": {}}, "additionalProperties": False}, {"type": "string"}]
    assert "additionalProperties" not in schema
