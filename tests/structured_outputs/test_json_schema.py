"""Changes of JSON schemas: closed objects, formats that are no constraint, and what llguidance reads otherwise."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.structured_outputs.vocabularies import follows
from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.structured_outputs.compiler import InvalidGrammar
from triolet.structured_outputs.json_schema import forbid_additional_properties, known_to_llguidance

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


@pytest.mark.parametrize("place", ["components", "x-shared"])
def test_a_schema_is_prepared_wherever_a_reference_finds_it(place: str) -> None:
    pet = {
        "type": "object",
        "properties": {"key": {"type": "string", "format": "password"}},
        "required": ["key"],
    }
    form = StructuredOutputsParams(json={place: {"schemas": {"Pet": pet}}, "$ref": f"#/{place}/schemas/Pet"})
    assert follows(form, '{"key":"x"}')
    assert not follows(form, '{"key":1}')


def test_what_is_data_stays_as_it_is() -> None:
    data = {"format": "password", "pattern": '[^"]', "oneOf": [{"$ref": "#"}], "maximum": 1e30}
    for schema in ({"const": data}, {"enum": [data]}):
        assert known_to_llguidance(schema) == schema
    by_name = {"properties": {"const": {"type": "string", "format": "password"}}}
    assert known_to_llguidance(by_name) == {"properties": {"const": {"type": "string"}}}


@pytest.mark.parametrize("kind", ["number", "integer"])
@pytest.mark.parametrize(
    "bounds",
    [
        {"minimum": -(2**63), "maximum": 2**63 - 1},
        {"minimum": -9.223372036854776e18, "maximum": 9.223372036854776e18},
        {"minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38},
        {"exclusiveMinimum": -1.7976931348623157e308, "exclusiveMaximum": 1.7976931348623157e308},
    ],
    ids=["int64", "floats of int64", "float32", "float64"],
)
def test_bounds_of_64_bits_and_more_are_held_to(kind: str, bounds: dict[str, float]) -> None:
    form = StructuredOutputsParams(json={"type": kind, **bounds})
    for right in ("0", "-1000000000000", str(2**62)):
        assert follows(form, right)
    assert follows(form, "0.5") == (kind == "number")
    assert not follows(form, f"{max(bounds.values()):.0f}0")


def test_an_upper_bound_of_whole_numbers_is_exact_up_to_64_bits() -> None:
    form = StructuredOutputsParams(json={"type": "integer", "minimum": 0, "maximum": 2**63 - 1})
    assert follows(form, str(2**63 - 1))
    assert not follows(form, str(2**63))


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        ('^[^"]+$', "ab", ['a"b', '"']),
        (r"^[^\\]+$", "ab", ["a\\b"]),
        (r'^[^\\/:*?"<>|]+$', "notes.txt", ['a"b', "a\\b", "a/b", ""]),
        (r'^[^"\n]+$', "ab", ['a"', "a\nb"]),
        (r"^[\x00-\x21\x23-\x7f]+$", "ab", ['a"b', "é"]),
        (r'^([^"]|ab)+$', "ab", ['"']),
        (r"^[^[\]]+$", "ab", ["a[", "]"]),
        (r"^[&~\w[]+$", "a&~[", ["-", "]"]),
        (r"^[[:alpha:]]+$", "ab", ["1"]),
    ],
)
def test_a_class_of_a_pattern_leaves_out_what_it_says_between_quotes_too(
    pattern: str, right: str, wrong: list[str]
) -> None:
    form = StructuredOutputsParams(json={"type": "string", "pattern": pattern})
    assert follows(form, json.dumps(right))
    for text in wrong:
        assert not follows(form, json.dumps(text))


NAMES = ("", "ab", "a\\b", 'a"b', '"', "12", "-", "a\nb")


@pytest.mark.parametrize(
    "pattern", ['^[^"]+$', r"^[^\\]+$", r'^[^"\n]*$', r"^\d+$", r"^\w+$", r"^[\x00-\x21\x23-\x7f]+$"]
)
@pytest.mark.parametrize("others", [False, {"type": "boolean"}])
@pytest.mark.parametrize("value", ["1", "true"])
def test_a_pattern_of_names_is_read_as_that_of_a_string_is(pattern: str, others: Any, value: str) -> None:
    schema = {
        "type": "object",
        "patternProperties": {pattern: {"type": "integer"}},
        "additionalProperties": others,
    }
    agrees(schema, [f"{{{json.dumps(name)}:{value}}}" for name in NAMES])


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"a": {"pattern": "a(?!b)"}}}, "properties.a.pattern"),
        ({"type": "object", "patternProperties": {"a(?!b)": {}}}, "patternProperties"),
    ],
)
def test_a_pattern_that_looks_around_is_refused_by_its_place(schema: Any, place: str) -> None:
    with pytest.raises(
        InvalidGrammar, match=rf"^{place} must not look around or refer back, got 'a\(\?!b\)'"
    ):
        follows(StructuredOutputsParams(json=schema), "{}")


def tagged(tag: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"type": {"const": tag}}, "required": ["type"]}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (
            {"oneOf": [{"type": "null"}, {"$ref": "#/$defs/a"}]},
            ["null", '{"type":"a"}'],
            ["1", '{"type":"b"}'],
        ),
        (
            {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]},
            ['{"type":"a"}', '{"type":"b"}'],
            ['{"type":"c"}', "null"],
        ),
        (
            {
                "anyOf": [{"type": "null"}, {"type": "object"}],
                "oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}],
            },
            ['{"type":"a"}', "null"],
            ['{"type":"b"}'],
        ),
        (
            {"type": "array", "items": {"oneOf": [{"$ref": "#/$defs/b"}, {"type": "string"}]}},
            ['[{"type":"b"},"x"]'],
            ["[1]"],
        ),
    ],
)
def test_one_of_schemas_behind_references_that_exclude_each_other_is_taken(
    schema: Any, right: list[str], wrong: list[str]
) -> None:
    form = StructuredOutputsParams(json={**schema, "$defs": {"a": tagged("a"), "b": tagged("b")}})
    assert all(follows(form, text) for text in right)
    assert not any(follows(form, text) for text in wrong)


def test_one_of_schemas_that_may_both_hold_is_refused() -> None:
    both = {"oneOf": [{"$ref": "#/$defs/a"}, {"type": "object"}], "$defs": {"a": tagged("a")}}
    with pytest.raises(InvalidGrammar, match="exclude each other"):
        follows(StructuredOutputsParams(json=both), "{}")


def test_a_reference_through_one_of_still_finds_its_place() -> None:
    schema = {
        "oneOf": [
            {"type": "string"},
            {"type": "object", "properties": {"a": {"$ref": "#/oneOf/0"}}, "required": ["a"]},
        ]
    }
    form = StructuredOutputsParams(json=schema)
    assert follows(form, '{"a":"x"}')
    assert not follows(form, '{"a":1}')


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("end", ["inclusive", "exclusive"])
@pytest.mark.parametrize("bound", [0.05, 0.5, 1, 20])
def test_zero_is_left_out_where_a_bound_excludes_it(sign: int, end: str, bound: float) -> None:
    kinds = ("Minimum", "Maximum") if sign > 0 else ("Maximum", "Minimum")
    other = f"exclusive{kinds[1]}" if end == "exclusive" else kinds[1].lower()
    schema = {"type": "number", f"exclusive{kinds[0]}": 0, other: sign * bound}
    form = StructuredOutputsParams(json=schema)
    for text in ("0", "-0", "0.0", "-0.0"):
        assert not follows(form, text)
    for number in (0.001, 0.049):
        assert follows(form, str(sign * number))
    assert follows(form, str(sign * bound)) == (end == "inclusive")
    assert not follows(form, str(-sign * 0.001))


def agrees(schema: Any, texts: Iterable[str]) -> None:
    """Assert that a grammar takes exactly those texts that a validator of JSON Schema takes."""
    validator, form = Draft202012Validator(schema), StructuredOutputsParams(json=schema)
    taken = [text for text in texts if follows(form, text)]
    assert taken == [text for text in texts if validator.is_valid(json.loads(text))]


NUMBERS = ("0", "-0", "0.0", "-0.0", "0.3", "-0.3", "0.7", "-0.7", "1", "-1", "2", "-2")
SPLIT: dict[str, Any] = {
    "two parts": {"allOf": [{"type": "number", "EXCLUDED": 0}, {"BOUND": 0.5}]},
    "beside the part with the bound": {"type": "number", "EXCLUDED": 0, "allOf": [{"BOUND": 0.5}]},
    "beside the part that excludes": {"type": "number", "BOUND": 0.5, "allOf": [{"EXCLUDED": 0}]},
    "an exclusive bound": {"type": "number", "EXCLUDED": 0, "allOf": [{"EXCLUSIVE": 0.5}]},
    "a reference": {"$ref": "#/$defs/a", "BOUND": 0.5, "$defs": {"a": {"type": "number", "EXCLUDED": 0}}},
    "a choice": {"type": "number", "EXCLUDED": 0, "anyOf": [{"BOUND": 0.5}, {"BOUND": 0.25}]},
    "whole numbers": {"allOf": [{"type": "integer"}, {"EXCLUDED": 0}, {"BOUND": 1.5}, {"BOUND": 20}]},
    "bounds of others": {
        "type": "array",
        "prefixItems": [{"type": "integer", "EXCLUDED": 0}],
        "items": {"type": "number", "BOUND": 0.5},
    },
}


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("schema", SPLIT.values(), ids=SPLIT.keys())
def test_an_excluded_zero_is_left_out_where_the_bound_stands_in_another_part(schema: Any, sign: int) -> None:
    kinds = ("Minimum", "Maximum") if sign > 0 else ("Maximum", "Minimum")
    text = json.dumps(schema).replace("EXCLUDED", f"exclusive{kinds[0]}")
    text = text.replace("EXCLUSIVE", f"exclusive{kinds[1]}").replace("BOUND", kinds[1].lower())
    if sign < 0:
        for bound in ("0.5", "0.25", "1.5", "20"):
            text = text.replace(f": {bound}", f": -{bound}")
    numbers = [f"[{number},{number}]" for number in NUMBERS] if "array" in text else NUMBERS
    agrees(json.loads(text), numbers)


def test_a_lower_bound_beside_an_excluded_zero_is_held_to() -> None:
    form = StructuredOutputsParams(json={"minimum": 0.25, "exclusiveMinimum": 0, "maximum": 0.5})
    assert follows(form, "0.3")
    assert not follows(form, "0.2")


@pytest.mark.parametrize(
    "number", [2**53 + 1, -(2**53) - 1, 1234567890123456789, -(2**63), -9.223372036854775808e18]
)
@pytest.mark.parametrize(
    "form", ['{"const": %s}', '{"enum": [1, %s]}', '{"const": {"a": [%s]}}', '{"items": {"enum": [[%s]]}}']
)
def test_a_constant_that_would_become_another_number_is_refused(form: str, number: float) -> None:
    with pytest.raises(InvalidGrammar, match=r"must hold whole numbers of at most 2\*\*53, got "):
        follows(StructuredOutputsParams(json=form % number), "1")


@pytest.mark.parametrize("number", [2**53, -(2**53), 0.1, -1e19])
def test_a_constant_that_stays_the_same_number_is_taken(number: float) -> None:
    form = StructuredOutputsParams(json={"enum": [number]})
    assert follows(form, f"{number:.0f}" if abs(number) > 1 else str(number))
    assert not follows(form, "1")
