"""What may be asked of an answer's form, and what is refused before anything is compiled."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest

from triolet import SamplingParams
from triolet.core.request.structured_outputs import MAX_CHOICES, MAX_NESTING, StructuredOutputsParams
from triolet.errors import InvalidParams


def nested(levels: int) -> dict[str, Any]:
    """A schema of so many levels of mappings."""
    schema: dict[str, Any] = {}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


def refusal(**fields: Any) -> InvalidParams:
    with pytest.raises(InvalidParams) as caught:
        StructuredOutputsParams(**fields)
    return caught.value


def test_a_schema_is_kept_as_text_whether_it_came_as_data_or_as_text() -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}}
    assert json.loads(StructuredOutputsParams(json=schema).json or "") == schema
    assert StructuredOutputsParams(json=schema) == StructuredOutputsParams(json=json.dumps(schema))
    assert hash(StructuredOutputsParams(json=schema)) == hash(StructuredOutputsParams(json=dict(schema)))


@pytest.mark.parametrize(
    "fields",
    [{"json": {}}, {"regex": "a"}, {"choice": ["a"]}, {"grammar": "start: A"}, {"json_object": True}],
)
def test_one_kind_is_taken(fields: dict[str, Any]) -> None:
    assert StructuredOutputsParams(**fields).kind == next(iter(fields))


def test_exactly_one_kind_must_be_given() -> None:
    assert "none are specified" in str(refusal())
    assert "multiple are specified: ['json', 'regex']" in str(refusal(json={}, regex="a"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"json": "{"}, "structured_outputs.json must be JSON: "),
        ({"json": 5}, "structured_outputs.json must be a JSON schema: a mapping, or its text, got 5."),
        ({"json": {"a": float("nan")}}, "structured_outputs.json must be a JSON schema: "),
        ({"json": {"a": {1, 2}}}, "structured_outputs.json must be a JSON schema: "),
        ({"json": ""}, "structured_outputs.json cannot be empty"),
        ({"json": "[" * 100_000}, "structured_outputs.json must be nested no deeper than 64 levels"),
        ({"json_object": False}, "structured_outputs.json_object must be True, or left out, got False."),
        ({"regex": ""}, "structured_outputs.regex cannot be empty, got ''."),
        ({"regex": "a\0"}, "structured_outputs.regex must hold no NUL character"),
        ({"regex": 5}, "structured_outputs.regex must be a string, got 5."),
        ({"regex": "a" * (2**20 + 1)}, "structured_outputs.regex must have at most 1048576 characters"),
        ({"regex": "\ud800"}, "structured_outputs.regex must be Unicode text"),
        ({"grammar": ""}, "structured_outputs.grammar cannot be empty"),
        ({"choice": []}, "structured_outputs.choice cannot be empty, got []."),
        ({"choice": "abc"}, "structured_outputs.choice must be a list of strings, got 'abc'."),
        ({"choice": ["a", 5]}, "structured_outputs.choice must hold only strings"),
        ({"choice": ["a", ""]}, "structured_outputs.choice must hold only strings, none of them empty"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, "structured_outputs.choice must have at most 4096 entries"),
        ({"choice": ["a\0"]}, "structured_outputs.choice must hold no NUL character"),
        ({"structural_tag": "{}"}, "structural_tag must have lists of structures and triggers"),
        ({"structural_tag": True}, "structural_tag must have lists of structures and triggers"),
        ({"structural_tag": {"structures": [{}], "triggers": ["<"]}}, "structures of begin, schema and end"),
        (
            {"tool_calls": {"format": "hermes", "tools": [], "parallel": True, "form": True}},
            "tool_calls must have a form that is a JSON schema, got True",
        ),
        (
            {"structural_tag": {"structures": [{"begin": "f", "schema": {}, "end": ""}], "triggers": ["<"]}},
            "structures that begin with one of its triggers, got 'f'",
        ),
        ({"tool_calls": {}}, "tool_calls must have a format of hermes, llama3_json, mistral, got None"),
        ({"tool_calls": {"format": []}}, "tool_calls must have a format of"),
        ({"tool_calls": {"format": "hermes", "tools": []}}, "tool_calls must have parallel, true or false"),
        (
            {"tool_calls": {"format": "hermes", "tools": [], "parallel": True}},
            "tool_calls must have a list of tools, not empty",
        ),
        (
            {"tool_calls": {"format": "hermes", "tools": [{"name": "f"}], "parallel": True}},
            "tool_calls must have tools of name and parameters",
        ),
        (
            {"regex": "a", "whitespace_pattern": " "},
            "whitespace_pattern is about json, json_object, structural_tag, tool_calls only",
        ),
        ({"regex": "a", "disable_any_whitespace": True}, "disable_any_whitespace is about json"),
        ({"json_object": True, "disable_additional_properties": True}, "properties is about json only"),
        (
            {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True},
            "whitespace_pattern contradicts disable_any_whitespace",
        ),
        ({"json": {}, "disable_any_whitespace": 1}, "disable_any_whitespace must be True or False, got 1."),
    ],
)
def test_what_can_not_be_meant_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    error = refusal(**fields)
    assert message in str(error)
    assert error.field is not None
    assert error.field.startswith("structured_outputs")


def test_a_schema_is_nested_no_deeper_than_64_levels() -> None:
    assert StructuredOutputsParams(json=nested(MAX_NESTING)).json is not None
    assert "no deeper than 64 levels" in str(refusal(json=nested(MAX_NESTING + 1)))
    endless: dict[str, Any] = {}
    endless["items"] = endless
    assert "no deeper than 64 levels" in str(refusal(json=endless))
    wide: dict[str, Any] = {}
    for _ in range(40):
        wide = {"a": wide, "b": wide}
    assert "at most 1048576 values" in str(refusal(json=wide))


def test_the_size_is_held_against_the_limit_of_the_engine() -> None:
    params = StructuredOutputsParams(choice=["é" * 10, "b" * 10])
    assert params.num_bytes == 30
    params.check_size(30)
    with pytest.raises(
        InvalidParams, match=r"choice must have at most 29 bytes \(max_grammar_bytes\), got 30"
    ):
        params.check_size(29)


def test_sampling_params_take_it_as_an_object_or_as_a_mapping() -> None:
    params = StructuredOutputsParams(regex="a")
    assert SamplingParams(structured_outputs=params).structured_outputs is params
    assert SamplingParams(structured_outputs={"regex": "a"}).structured_outputs == params
    for wrong in ("regex", 5, ["a"]):
        with pytest.raises(InvalidParams, match="structured_outputs must be a StructuredOutputsParams"):
            SamplingParams(structured_outputs=wrong)
    with pytest.raises(InvalidParams, match="structured_outputs has no field 'guided_regex'"):
        SamplingParams(structured_outputs={"guided_regex": "a"})


def test_every_field_is_documented() -> None:
    assert StructuredOutputsParams.__doc__ is not None
    assert all(
        f"{field.name}:" in StructuredOutputsParams.__doc__ for field in attrs.fields(StructuredOutputsParams)
    )
