"""What may be asked of an answer's form, and what is refused before anything is compiled."""

from __future__ import annotations

import json
from collections import UserDict
from typing import Any

import attrs
import pytest

from triolet import SamplingParams
from triolet.core import json_text
from triolet.core.request import structured_outputs as rules
from triolet.core.request.structured_outputs import (
    MAX_CHOICES,
    MAX_NESTING,
    StructuredOutputsParams,
    structured_outputs,
)
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
        (
            {"tool_calls": {}},
            "tool_calls must have a format of hermes, llama3_json, mistral, gpt_oss, got None",
        ),
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


# ------------------------------------------------------------------------------ sizes of data


def test_a_text_has_a_longest_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MAX_TEXT_CHARS", 10)
    assert StructuredOutputsParams(regex="a" * 10).regex == "a" * 10
    error = refusal(regex="a" * 11)
    assert "structured_outputs.regex must have at most 10 characters, got 11" in str(error)


def test_choices_have_a_longest_length_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MAX_TEXT_CHARS", 10)
    assert StructuredOutputsParams(choice=["a" * 5, "b" * 5]).choice == ("aaaaa", "bbbbb")
    error = refusal(choice=["a" * 5, "b" * 6])
    assert "structured_outputs.choice must have at most 10 characters, got 11" in str(error)


def test_a_level_of_a_schema_has_no_more_values_than_a_text_has_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rules, "MAX_TEXT_CHARS", 5)
    assert "structured_outputs.json must have at most 5 values, got 6" in str(refusal(json={"a": [1] * 6}))
    assert "at most 5 characters" in str(refusal(json={"a": [1] * 5}))  # the text of them is longer


@pytest.mark.parametrize("kind", ["json", "structural_tag", "tool_calls"])
@pytest.mark.parametrize("value", [{"a": "xxxx"}, {"xxxx": 1}, {"a": [1] * 4}])
def test_data_that_is_too_long_is_refused_before_any_of_it_is_written(
    kind: str, value: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def written(*_: object) -> str:
        raise AssertionError("it is written")

    monkeypatch.setattr(json_text, "encode", written)
    monkeypatch.setattr(rules, "MAX_TEXT_CHARS", 10)
    assert f"structured_outputs.{kind} must have at most 10 characters, got more" in str(
        refusal(**{kind: value})
    )


@pytest.mark.parametrize("is_text", [False, True])
def test_a_long_form_is_read_and_written_piece_by_piece(
    is_text: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = {"enum": [[number] for number in range(json_text.SHORT_CHARS)]}
    text = json.dumps(schema)
    # What is written in C, and what reads in C: without them nothing is done in one call.
    monkeypatch.setattr("json.encoder.c_make_encoder", lambda *_: pytest.fail("all is written in one call"))
    monkeypatch.setattr("json._default_decoder", None)
    assert StructuredOutputsParams(json=text if is_text else schema).json == text


@pytest.mark.parametrize("inner", [{"type": "string"}, {"enum": 5, "type": "string"}])
def test_a_value_may_stand_at_the_deepest_level(inner: dict[str, Any]) -> None:
    schema: dict[str, Any] = inner
    for _ in range(MAX_NESTING - 1):
        schema = {"items": schema}
    assert json.loads(StructuredOutputsParams(json=schema).json or "") == schema


@pytest.mark.parametrize("inner", [{}, [], ()])
@pytest.mark.parametrize("is_text", [False, True])
def test_no_mapping_or_list_stands_below_the_deepest_level(inner: object, is_text: bool) -> None:
    schema: Any = {"enum": inner, "type": "string"}
    for number in range(MAX_NESTING - 1):
        schema = [schema, 5] if number % 2 else {"items": schema}
    schema = schema if isinstance(schema, dict) else {"items": schema}
    error = refusal(json=json.dumps(schema) if is_text else schema)
    assert str(error) == "structured_outputs.json must be nested no deeper than 64 levels"


def test_a_schema_keeps_its_letters() -> None:
    assert StructuredOutputsParams(json={"title": "é"}).json == '{"title": "é"}'


def test_a_schema_may_be_of_any_kind_of_mapping_and_may_be_true_or_false() -> None:
    schema = UserDict({"items": UserDict({"type": "string"})})
    assert StructuredOutputsParams(json=schema).json == '{"items": {"type": "string"}}'
    assert StructuredOutputsParams(json=True).json == "true"
    assert StructuredOutputsParams(json="false").json == "false"


def test_the_text_null_is_no_schema() -> None:
    sentence = "structured_outputs.json must be a JSON schema: a mapping, or its text, got 'null'."
    assert str(refusal(json="null")) == sentence


# ------------------------------------------------------------------------ structures and calls

STRUCTURE = {"begin": "<f>", "schema": {}, "end": "</f>"}
TOOL = {"name": "f", "parameters": {}}


@pytest.mark.parametrize(
    "tag",
    [
        {"structures": [STRUCTURE], "triggers": ["<"]},
        {"structures": [STRUCTURE], "triggers": ["[", "<f>"]},
        {"structures": [STRUCTURE, {"begin": "<g>", "schema": {}, "end": ""}], "triggers": ["<g", "<f"]},
    ],
)
@pytest.mark.parametrize("is_text", [False, True])
def test_structures_begin_with_one_of_their_triggers(tag: dict[str, Any], is_text: bool) -> None:
    params = StructuredOutputsParams(structural_tag=json.dumps(tag) if is_text else tag)
    assert (json.loads(params.structural_tag or ""), params.kind) == (tag, "structural_tag")


@pytest.mark.parametrize(
    "fields",
    [
        *({"structures": wrong} for wrong in ([], [5], [STRUCTURE, 5], STRUCTURE, "<f>", None)),
        *({"triggers": wrong} for wrong in ([], [5], ["<", 5], "<", [""], ["<", ""], {"<": 1}, None)),
    ],
    ids=repr,
)
def test_structures_and_triggers_are_lists_and_not_empty(fields: dict[str, Any]) -> None:
    error = refusal(structural_tag={"structures": [STRUCTURE], "triggers": ["<"], **fields})
    assert "must have lists of structures and triggers, none of them empty" in str(error)


@pytest.mark.parametrize("field", ["begin", "schema", "end"])
@pytest.mark.parametrize("wrong", [None, 5, True, []])
def test_each_structure_has_a_begin_a_schema_and_an_end(field: str, wrong: object) -> None:
    structures = [STRUCTURE, STRUCTURE | {field: wrong}]
    error = refusal(structural_tag={"structures": structures, "triggers": ["<"]})
    assert "must have structures of begin, schema and end" in str(error)
    assert error.got == structures[1]


def test_each_structure_begins_with_a_trigger() -> None:
    structures = [STRUCTURE, STRUCTURE | {"begin": "[f]"}]
    error = refusal(structural_tag={"structures": structures, "triggers": ["<", "{"]})
    assert "must have structures that begin with one of its triggers, got '[f]'" in str(error)


@pytest.mark.parametrize(
    "fields",
    [
        *({"format": name} for name in ("hermes", "llama3_json", "mistral", "gpt_oss")),
        *({"format": "gpt_oss", "required": required} for required in (False, True)),
        {"parallel": False},
        {"form": {}},
        {"tools": [TOOL, TOOL | {"name": "g"}]},
    ],
    ids=repr,
)
def test_calls_of_tools_have_a_format_and_tools(fields: dict[str, Any]) -> None:
    calls = {"format": "hermes", "tools": [TOOL], "parallel": True, **fields}
    params = StructuredOutputsParams(tool_calls=calls)
    assert (json.loads(params.tool_calls or ""), params.kind) == (calls, "tool_calls")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": "xml"}, "must have a format of hermes, llama3_json, mistral, gpt_oss, got 'xml'"),
        (
            {"format": ["hermes"]},
            "must have a format of hermes, llama3_json, mistral, gpt_oss, got ['hermes']",
        ),
        ({"parallel": 1}, "must have parallel, true or false, got 1"),
        ({"required": True}, "must have required, true or false, in the format gpt_oss only, got True"),
        (
            {"format": "gpt_oss", "required": 1},
            "must have required, true or false, in the format gpt_oss only",
        ),
        ({"form": None}, "must have a form that is a JSON schema, got None"),
        ({"tools": [5]}, "must have a list of tools, not empty, got [5]"),
        ({"tools": [TOOL, 5]}, "must have a list of tools, not empty"),
        ({"tools": TOOL}, "must have a list of tools, not empty"),
        ({"tools": None}, "must have a list of tools, not empty, got None"),
        ({"tools": [TOOL, TOOL | {"name": 5}]}, "must have tools of name and parameters"),
        ({"tools": [TOOL | {"name": ""}]}, "must have tools of name and parameters"),
        ({"tools": [TOOL | {"parameters": []}]}, "must have tools of name and parameters"),
        ({"tools": [TOOL | {"parameters": True}]}, "must have tools of name and parameters"),
    ],
)
def test_other_calls_of_tools_are_refused(fields: dict[str, Any], message: str) -> None:
    error = refusal(tool_calls={"format": "hermes", "tools": [TOOL], "parallel": True, **fields})
    assert message in str(error)
    assert error.field == "structured_outputs.tool_calls"


@pytest.mark.parametrize("value", [True, False])
def test_calls_of_tools_and_structures_are_mappings(value: bool) -> None:
    assert "must have a format of" in str(refusal(tool_calls=value))
    assert "must have lists of structures and triggers" in str(refusal(structural_tag=value))


# ---------------------------------------------------------------------------- choices and options


def test_a_choice_counts_once_and_keeps_its_place() -> None:
    assert StructuredOutputsParams(choice=["b", "a", "b"]).choice == ("b", "a")


def test_an_answer_is_one_of_4096_choices_at_most() -> None:
    choices = tuple(map(str, range(4096)))
    assert StructuredOutputsParams(choice=choices).choice == choices
    assert "must have at most 4096 entries, got 4097" in str(refusal(choice=["a"] * 4097))


@pytest.mark.parametrize(
    "value", [5, {"a"}, {"a": 1}, b"a", iter("a")], ids=lambda value: type(value).__name__
)
def test_choices_are_a_list(value: object) -> None:
    error = refusal(choice=value)
    assert "structured_outputs.choice must be a list of strings, got " in str(error)
    assert error.got is value


JSON_FORMS: list[dict[str, Any]] = [
    {"json": {}},
    {"json_object": True},
    {"structural_tag": {"structures": [STRUCTURE], "triggers": ["<"]}},
    {"tool_calls": {"format": "hermes", "tools": [TOOL], "parallel": True}},
]


@pytest.mark.parametrize("form", JSON_FORMS, ids=lambda form: next(iter(form)))
def test_the_whitespace_of_every_form_of_json_can_be_chosen(form: dict[str, Any]) -> None:
    assert StructuredOutputsParams(**form, disable_any_whitespace=True).disable_any_whitespace
    assert StructuredOutputsParams(**form, whitespace_pattern=" ").whitespace_pattern == " "


@pytest.mark.parametrize("form", [{"regex": "a"}, {"choice": ["a"]}, {"grammar": "a"}])
def test_a_form_without_json_has_no_whitespace_of_it(form: dict[str, Any]) -> None:
    assert "whitespace_pattern is about json" in str(refusal(**form, whitespace_pattern=" "))
    assert "disable_any_whitespace is about json" in str(refusal(**form, disable_any_whitespace=True))
    params = StructuredOutputsParams(**form)
    assert (params.disable_any_whitespace, params.disable_additional_properties) == (False, False)


def test_only_a_schema_names_properties() -> None:
    params = StructuredOutputsParams(json={}, disable_additional_properties=True)
    assert params.disable_additional_properties is True
    for form in JSON_FORMS[1:]:
        error = refusal(**form, disable_additional_properties=True)
        assert str(error).endswith("disable_additional_properties is about json only, got True.")


@pytest.mark.parametrize("value", [1, 0, "true", False])
def test_any_json_object_is_asked_for_with_true(value: Any) -> None:
    error = refusal(json_object=value)
    assert str(error) == f"structured_outputs.json_object must be True, or left out, got {value!r}."
    assert error.got is value


def test_a_form_with_far_too_many_characters_is_refused_without_being_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def encoded(self: StructuredOutputsParams) -> int:
        raise AssertionError("the text was encoded")

    monkeypatch.setattr(StructuredOutputsParams, "num_bytes", property(encoded))
    with pytest.raises(InvalidParams, match=r"at most 100 bytes .* got 101 characters"):
        StructuredOutputsParams(regex="é" * 101).check_size(100)


@pytest.mark.parametrize(
    ("fields", "num_bytes"),
    [
        ({"regex": "é"}, 2),
        ({"grammar": "aé"}, 3),
        ({"choice": ["a", "bc"]}, 3),
        ({"json": "{}"}, 2),
        ({"json": "{}", "whitespace_pattern": "é"}, 4),
        ({"json_object": True}, 0),
        (
            {
                "structural_tag": '{"structures": [{"begin": "a", "schema": {}, "end": ""}], "triggers": ["a"]}'
            },
            76,
        ),
        (
            {
                "tool_calls": '{"format": "hermes", "tools": [{"name": "f", "parameters": {}}], "parallel": true}'
            },
            82,
        ),
    ],
)
def test_the_size_is_that_of_the_texts_that_are_compiled(fields: dict[str, Any], num_bytes: int) -> None:
    params = StructuredOutputsParams(**fields)
    assert params.num_bytes == num_bytes
    params.check_size(num_bytes)
    with pytest.raises(InvalidParams, match=rf"{params.kind} must have at most {num_bytes - 1} bytes"):
        params.check_size(num_bytes - 1)


def test_another_value_is_refused_with_what_came() -> None:
    with pytest.raises(InvalidParams, match="got int") as caught:
        structured_outputs(5)
    assert (caught.value.field, caught.value.got) == ("structured_outputs", 5)
    with pytest.raises(InvalidParams, match="has no field 'first'") as caught:
        structured_outputs({"regex": "a", "first": 1, "second": 2})
    assert (caught.value.field, caught.value.got) == ("structured_outputs", "first")
