"""JSON schemas that exclude each other, held against values that follow one of them."""

from __future__ import annotations

from itertools import combinations
from random import Random
from typing import Any

import jsonschema
import pytest

from triolet.structured_outputs.exclusive import Exclusion


def record(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": sorted(properties)}


TAG_A, TAG_B = record(t={"const": "a"}), record(t={"const": "b"})
ROOT: dict[str, Any] = {
    "$defs": {
        "a": TAG_A,
        "b": TAG_B,
        "text": {"type": "string"},
        "a/b": {"$ref": "#/$defs/a"},
        "loop": {"$ref": "#/$defs/loop"},
        "either": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "string"}]},
    }
}


@pytest.mark.parametrize(
    "schemas",
    [
        [{"type": "string"}, {"type": ["integer", "null"]}],
        [{"const": 1}, {"const": 2}],
        [{"enum": ["a", "b"]}, {"enum": ["c"]}],
        [{"enum": ["a"]}, {"type": "integer"}],
        [{"const": True}, {"const": 1}],
        [{"type": "integer", "maximum": 5}, {"type": "number", "minimum": 5.5}],
        [TAG_A, TAG_B],
        [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
        [{"$ref": "#/$defs/a~1b"}, TAG_B],
        [{"$ref": "#/$defs/text"}, {"type": "null"}, {"$ref": "#/$defs/a"}],
        [{"allOf": [{"$ref": "#/$defs/a"}, record(x={})]}, TAG_B],
        [{"$ref": "#/$defs/either"}, TAG_B],
        [{"anyOf": [TAG_A, {"type": "null"}]}, {"oneOf": [TAG_B, {"type": "string"}]}],
        [{**record(x={}), "additionalProperties": False}, record(y={})],
        [record(inner=TAG_A), record(inner=TAG_B)],
        [False, {"type": "string"}],
    ],
)
def test_schemas_exclude_each_other_by_what_is_known_of_their_values(schemas: list[Any]) -> None:
    assert Exclusion(ROOT).holds(schemas)
    assert Exclusion(ROOT).holds(schemas[::-1])


@pytest.mark.parametrize(
    "schemas",
    [
        [{"type": "integer"}, {"type": "number"}],
        [{"const": 1}, {"const": 1.0}],
        [{"enum": ["a", "b"]}, {"enum": ["b"]}],
        [{"maximum": 5}, {"minimum": 6}],  # any text follows both
        [{"type": "integer", "maximum": 5}, {"type": "number", "minimum": 5}],
        [TAG_A, {**TAG_B, "required": []}],
        [{**TAG_A, "type": ["object", "string"]}, {**TAG_B, "type": ["object", "string"]}],
        [{"properties": TAG_A["properties"]}, {"properties": TAG_B["properties"]}],
        [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}],
        [{"$ref": "#/$defs/either"}, {"type": "string"}],
        [{"$ref": "#/$defs/loop"}, {"type": "null"}],
        [{"$ref": "#/$defs/none"}, {"type": "null"}],
        [{"$ref": "other.json"}, {"type": "null"}],
        [{**record(x={}), "additionalProperties": False, "patternProperties": {"y": {}}}, record(y={})],
        [True, {"type": "string"}],
        [{"type": "null"}, {"type": "string"}, {}],
    ],
)
def test_what_is_not_proved_is_not_said(schemas: list[Any]) -> None:
    assert not Exclusion(ROOT).holds(schemas)
    assert not Exclusion(ROOT).holds(schemas[::-1])


def random_schema(rng: Random, depth: int = 2) -> Any:
    scalars: list[Any] = [
        {"type": rng.choice(["string", "integer", "number", "null", "boolean"])},
        {"const": rng.choice(["a", 1, 1.0, None, True])},
        {"enum": rng.sample(["a", "b", 1, 2, None, False], 2)},
        {"type": "integer", rng.choice(["minimum", "maximum"]): rng.randrange(4)},
        {"$ref": "#/$defs/" + rng.choice(sorted(ROOT["$defs"].keys() - {"loop", "a/b"}))},
    ]
    if depth == 0 or rng.random() < 0.4:
        return rng.choice(scalars)
    inner = [random_schema(rng, depth - 1) for _ in range(2)]
    names = rng.sample(["t", "x", "y"], 2)
    obj = {
        "type": "object",
        "properties": dict(zip(names, inner, strict=True)),
        "required": rng.sample(names, rng.randrange(3)),
        "additionalProperties": rng.choice([True, False]),
    }
    return rng.choice(
        [obj, obj, {"anyOf": inner}, {"oneOf": inner}, {"allOf": [inner[0], {"$ref": "#/$defs/either"}]}]
    )


def values() -> list[Any]:
    scalars: list[Any] = ["a", "b", "c", 0, 1, 2, 3, 1.5, None, True, False]
    flat = [{}, *({name: value} for name in "txy" for value in ("a", "b", 1, None))]
    return [
        *scalars,
        *flat,
        *({"t": a, "x": b} for a in ("a", "b", 1) for b in ("a", 1, None)),
        {"x": {"t": "a"}},
    ]


def test_no_value_follows_two_schemas_that_were_proved_to_exclude_each_other() -> None:
    rng, num_proved = Random(1), 0
    for _ in range(300):
        schemas = [random_schema(rng) for _ in range(2)]
        if not Exclusion(ROOT).holds(schemas):
            continue
        num_proved += 1
        validators = [jsonschema.Draft202012Validator({**ROOT, "allOf": [one]}) for one in schemas]
        for value in values():
            for one, other in combinations(validators, 2):
                assert not (one.is_valid(value) and other.is_valid(value)), (schemas, value)
    assert num_proved > 100


def test_a_proof_of_many_schemas_ends() -> None:
    many = [record(**{f"p{i}": {"type": "string"} for i in range(30)}) for _ in range(60)]
    exclusion = Exclusion({})
    assert not exclusion.holds([*many, *many])
