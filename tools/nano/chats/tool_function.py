"""A function that is listed in the system turn: how it is written there, what is asked of it, and its calls."""

import json
import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import attrs
from chats.tool_table import Known, Values
from phrasing import capital, listed, phrase


@attrs.frozen
class Wish:
    """One thing that a user wants of a tool: the question, the calls, their results, and the answer."""

    ask: str
    calls: list[tuple[str, Values]]
    results: list[str]
    answer: str


@attrs.frozen
class Tool:
    """A function that is listed in the system turn.

    Attributes:
        does: what it does, under one name for all functions that do it; functions of one group may do the same.
        wish: makes a question; "more" makes one that leans on an earlier question, "pair" one for two calls.
        missing: question that lacks a value, and what is asked back; None where there is none.
    """

    function: dict[str, Any]
    group: str
    does: str
    wish: Callable[[Random, str], Wish | None]
    missing: Callable[[Random], tuple[str, str] | None]

    @property
    def name(self) -> str:
        """The name of the function."""
        return str(self.function["name"])


def _slots(template: str) -> set[str]:
    return set(re.findall(r"\{(\w+)\}", template))


def shown(value: Any) -> str:
    """Write a value as it stands in a question or an answer."""
    if isinstance(value, list):
        return listed([str(each) for each in value])
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _filled(shape: Any, values: Values) -> Any:
    if isinstance(shape, dict):
        return {key: _filled(value, values) for key, value in shape.items()}
    if isinstance(shape, list):
        return [_filled(value, values) for value in shape]
    if isinstance(shape, str):
        if match := re.fullmatch(r"\{(\w+)\}", shape):
            return values[match[1]]
        return shape.format(**{key: shown(value) for key, value in values.items()})
    return shape


def rendered(rng: Random, result: Any) -> str:
    """Return what a tool turn says of a result."""
    if isinstance(result, str):
        return result
    if rng.random() < 0.12:
        return json.dumps(result, ensure_ascii=False, separators=(",", ":"))
    return json.dumps(result, ensure_ascii=False)


_TOLD = ("i want", "i need", "i would", "let me")


def _asked(rng: Random, template: str, values: Values) -> str:
    said = {key: shown(value) for key, value in values.items()}
    asked = phrase(rng, [template.removeprefix("!")], said, command=template.startswith("!"))
    return f"{asked.rstrip('?')}." if asked.endswith("?") and template.startswith(_TOLD) else asked


def schema_of(rng: Random, parameters: Sequence[tuple[str, dict[str, Any], bool]]) -> dict[str, Any]:
    """Return the JSON schema of parameters, each a name, its schema, and whether it is required."""
    return {
        "type": "object",
        "properties": {
            name: {"anyOf": [schema, {"type": "null"}]} if not required and rng.random() < 0.12 else schema
            for name, schema, required in parameters
        },
        "required": [name for name, _, required in parameters if required],
    }


def sentence_of(rng: Random, answer: str) -> Any:
    """Return a result that is a sentence already."""
    return answer if rng.random() < 0.7 else {rng.choice(["output", "result", "text", "message"]): answer}


_SAYS_MORE = [" Returns JSON.", " Use it when the user asks for it.", " Returns a text.", " Call it once.", " Use this tool if you are asked to.", " It is fast."]  # fmt: skip


def known_tool(rng: Random, known: Known) -> Tool:
    """Choose the names of a known function and of its parameters."""
    at = rng.randrange(100)
    parameters, called = [], {}
    for parameter in known.parameters:
        if parameter.is_optional and rng.random() < 0.3:
            continue
        names = parameter.names
        called[parameter.key] = names[at % len(names)] if known.is_paired else rng.choice(names)
        schema = dict(parameter.schema)
        if "enum" in schema and rng.random() < 0.2:
            del schema["enum"]
        if schema["type"] == "number" and rng.random() < 0.3:
            schema["type"] = "integer" if known.group == "math" else "number"
        parameters.append((called[parameter.key], schema, not parameter.is_optional))
    function: dict[str, Any] = {"name": rng.choice(known.names.split())}
    if rng.random() < 0.88:
        function["description"] = rng.choice(known.says.split(";"))
        if rng.random() < 0.06:
            function["description"] += rng.choice(_SAYS_MORE)
    function["parameters"] = schema_of(rng, parameters)
    makers = {parameter.key: parameter.make for parameter in known.parameters if parameter.key in called}

    def templates(listing: str) -> list[str]:
        keys = {*called, *(f"{key}2" for key in called)}
        return [each for each in listing.split(";") if each and _slots(each) <= keys]

    def one(rng: Random, values: Values) -> tuple[Values, str, str] | None:
        """Return the arguments, the result and the answer of a call with these values; None if no answer fits."""
        found = {**values, **known.facts(rng, values)}
        for key in known.parameters:
            found.setdefault(key.key, None)
        shape = rng.choice(known.shapes)
        while any(found[slot] is None for slot in _slots(str(shape))):
            shape = rng.choice(known.shapes)
        result = _filled(shape, found)
        seen = {*values, *_slots(str(shape))}
        fits = [each for each in known.answers.split(";") if _slots(each) <= seen]
        if not fits:
            return None
        most = max(len(_slots(each) - set(values)) for each in fits)
        fits = [each for each in fits if len(_slots(each) - set(values)) == most]
        answer = capital(rng.choice(fits).format(**{key: shown(value) for key, value in found.items()}))
        if rng.random() < 0.15:
            result = sentence_of(rng, answer)
        arguments = {name: values[key] for key, name in called.items() if key in values}
        return arguments, rendered(rng, result), answer

    def wish(rng: Random, kind: str) -> Wish | None:
        options = templates({"one": known.asks, "more": known.more or known.asks, "pair": known.pairs}[kind])
        if not options:
            return None
        template = rng.choice(options)
        slots = _slots(template)
        first = {key: make(rng) for key, make in makers.items() if key in slots}
        if kind != "pair":
            if (done := one(rng, first)) is None:
                return None
            arguments, result, answer = done
            return Wish(_asked(rng, template, first), [(str(function["name"]), arguments)], [result], answer)
        second = {key: make(rng) for key, make in makers.items() if f"{key}2" in slots}
        if first == second:
            return None
        ask = _asked(rng, template, {**first, **{f"{key}2": value for key, value in second.items()}})
        both = [done for values in (first, second) if (done := one(rng, values))]
        if len(both) < 2:
            return None
        return Wish(
            ask,
            [(str(function["name"]), arguments) for arguments, _, _ in both],
            [result for _, result, _ in both],
            " ".join(answer for _, _, answer in both),
        )

    def missing(rng: Random) -> tuple[str, str] | None:
        if not known.missing:
            return None
        asks, back = known.missing.split(">")
        template = rng.choice(asks.split(";"))
        values = {key: make(rng) for key, make in makers.items() if key in _slots(template)}
        return _asked(rng, template, values), rng.choice(back.split(";"))

    return Tool(function, known.group, known.does, wish, missing)
