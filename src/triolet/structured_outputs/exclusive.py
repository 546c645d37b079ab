"""Proof that JSON schemas exclude each other, so that a value that follows any of them follows exactly one.

llguidance looks for the same proof before it takes `oneOf`, and does not find it behind a `$ref`, where it mostly is.

Source: JSON Schema 2020-12, Validation; RFC 6901 for the places that references name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any, TypeGuard
from urllib.parse import unquote

import attrs

MAX_DEPTH = 8  # of a proof: nested choices and properties within properties
MAX_STEPS = 100_000  # pairs of schemas that are compared, some microseconds each
_ALL_TYPES = frozenset(["null", "boolean", "object", "array", "number", "string"])
_JSON_TYPES = {
    bool: "boolean",
    int: "number",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}
_NO_SCHEMA: dict[str, Any] = {}


@attrs.define
class _Facts:
    """What a value of a schema is known to be. Each fact may be weaker than the schema, none is stronger."""

    types: frozenset[str] = _ALL_TYPES
    values: frozenset[str] | None = None  # as JSON, if they are listed
    least: float = float("-inf")  # of a number
    most: float = float("inf")
    required: set[str] = attrs.field(factory=set)
    properties: dict[str, list[Any]] = attrs.field(factory=dict)  # schemas that each of them follows
    names: frozenset[str] | None = None  # of the properties that there can be; None for any
    choices: list[list[Any]] = attrs.field(factory=list)  # it follows one schema of each

    def add(self, schema: dict[str, Any]) -> None:
        """Add what one schema says, without those that it refers to."""
        listed = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(listed, list):
            values = frozenset(json.dumps(_plain(value), sort_keys=True) for value in listed)
            self.values = values if self.values is None else self.values & values
            self.types &= frozenset(_JSON_TYPES[type(value)] for value in listed)
        if isinstance(kinds := schema.get("type"), str | list):
            named = [kinds] if isinstance(kinds, str) else kinds
            self.types &= frozenset("number" if kind == "integer" else kind for kind in named)
        if is_number(least := schema.get("minimum")):
            self.least = max(self.least, least)
        if is_number(most := schema.get("maximum")):
            self.most = min(self.most, most)
        if isinstance(required := schema.get("required"), list):
            self.required.update(name for name in required if isinstance(name, str))
        properties = schema.get("properties", _NO_SCHEMA)
        if isinstance(properties, dict):
            for name, inner in properties.items():
                self.properties.setdefault(name, []).append(inner)
            if schema.get("additionalProperties") is False and not schema.get("patternProperties"):
                names = frozenset(properties)
                self.names = names if self.names is None else self.names & names
        for keyword in ("anyOf", "oneOf"):
            if isinstance(choice := schema.get(keyword), list):
                self.choices.append(choice)

    def differ_from(self, other: _Facts) -> bool:
        """Return True if no value is both, as far as the value itself tells."""
        if self.types.isdisjoint(other.types):
            return True
        if self.values is not None and other.values is not None and self.values.isdisjoint(other.values):
            return True
        common = self.types & other.types
        if common == {"number"} and (self.most < other.least or other.most < self.least):
            return True
        return common == {"object"} and (self._lacks(other) or other._lacks(self))

    def _lacks(self, other: _Facts) -> bool:
        """Return True if the other one needs a property that there cannot be here."""
        return self.names is not None and not other.required <= self.names


def _plain(value: Any) -> Any:
    """Return a value in which 1.0 is written as 1: the two are equal in JSON Schema."""
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def is_number(value: object) -> TypeGuard[float]:
    """Return True for a number of JSON; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


class Exclusion:
    """Search for proofs within one schema.

    Args:
        root: the whole schema, from whose top references count.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._num_steps = 0
        self._known: dict[int, _Facts] = {}  # by the id of a schema that is looked at now

    def holds(self, schemas: Sequence[Any]) -> bool:
        """Return True if no value follows two of the schemas; False also where that was not proved."""
        self._known.clear()
        return all(self._exclude(one, other, MAX_DEPTH) for one, other in combinations(schemas, 2))

    def _exclude(self, one: Any, other: Any, depth: int) -> bool:
        self._num_steps += 1
        if depth == 0 or self._num_steps > MAX_STEPS:
            return False
        if one is False or other is False:
            return True
        first, second = self._facts(one), self._facts(other)
        if first.differ_from(second):
            return True
        if first.types & second.types == {"object"} and any(
            self._exclude(a, b, depth - 1)
            for name in sorted(first.required & second.required)
            for a in first.properties.get(name, ())
            for b in second.properties.get(name, ())
        ):
            return True
        return any(
            all(self._exclude(choice, another, depth - 1) for choice in choices)
            for facts, another in ((first, other), (second, one))
            for choices in facts.choices
        )

    def _facts(self, schema: Any) -> _Facts:
        if (facts := self._known.get(id(schema))) is None:
            facts = self._known[id(schema)] = _Facts()
            for part in self._parts(schema, MAX_DEPTH):
                facts.add(part)
        return facts

    def _parts(self, schema: Any, depth: int) -> Iterator[dict[str, Any]]:
        """Yield the schema and those that every value of it follows as well."""
        if not isinstance(schema, dict) or depth == 0:
            return
        yield schema
        for inner in schema.get("allOf", ()):
            yield from self._parts(inner, depth - 1)
        if isinstance(reference := schema.get("$ref"), str):
            yield from self._parts(self._target(reference), depth - 1)

    def _target(self, reference: str) -> Any:
        """Return what a reference to the schema itself leads to; None for any other."""
        if reference != "#" and not reference.startswith("#/"):
            return None
        place = self._root
        for step in reference.split("/")[1:]:
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(place, dict) and name in place:
                place = place[name]
            elif isinstance(place, list) and name.isdecimal() and int(name) < len(place):
                place = place[int(name)]
            else:
                return None
        return place
