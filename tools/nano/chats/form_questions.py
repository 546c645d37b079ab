"""Ordinary little questions whose answer is a form."""

from collections.abc import Callable
from random import Random
from typing import Any

import attrs
import words as w
from chats import form_values as some
from chats.form_cases import Case
from chats.form_keys import Node, Schema
from exchange import Chat, Skill
from phrasing import a, phrase
from skills import fact as facts
from skills import number, talk, text

# fmt: off
_TEXT: Schema = {"type": "string"}
_WHOLE: Schema = {"type": "integer"}
_YES_NO: Schema = {"type": "boolean"}
_TEXTS: Schema = {"type": "array", "items": _TEXT}
_WHOLES: Schema = {"type": "array", "items": _WHOLE}
_STEPS: Schema = {"type": "array", "items": {"type": "object", "properties": {"explanation": _TEXT, "output": _TEXT}, "required": ["explanation", "output"]}}

_PLUS = ["what is {a} plus {b}", "{a} + {b}", "what is {a} + {b}", "how much is {a} plus {b}", "add {a} and {b}", "what is the sum of {a} and {b}", "{a} plus {b}", "calculate {a} + {b}"]
_MINUS = ["what is {a} minus {b}", "{a} - {b}", "how much is {a} - {b}", "subtract {b} from {a}", "{a} minus {b}"]
_CAPITAL = ["what is the capital of {c}", "capital of {c}", "which city is the capital of {c}", "name the capital of {c}"]
_ODD = ["is {a} odd", "is {a} an odd number", "odd: {a}"]
_EVEN = ["is {a} even", "is {a} an even number", "is the number {a} even"]
_OPPOSITE = ["what is the opposite of {a}", "opposite of {a}", "give me the opposite of {a}"]
_COUNT = ["count from {a} to {b}", "list the numbers from {a} to {b}", "numbers from {a} to {b}"]
_SPELL = ["spell {a}", "what are the letters of {a}", "split {a} into letters"]
_COLOUR = ["what colour is the {a}", "what color is the {a}", "which colour has the {a}"]
_COMPARE = ["which is {w}, {a} or {b}", "which number is {w}: {a} or {b}"]
_STORY = ["{n} has {a} {x} and gets {b} more. how many {x} does {n} have"]
_LISTS = [("days", "what are the days of the week", w.DAYS), ("seasons", "name the seasons", w.SEASONS), ("planets", "list the planets", w.PLANETS), ("colors", "name the colours of the rainbow", w.RAINBOW)]
_SHORT_ANSWERS: list[Skill] = [number.in_words, facts.opposite, facts.fact, facts.thing_fact, facts.calendar, talk.identity, talk.small_talk, number.neighbour]
# fmt: on


@attrs.frozen
class _Drawn:
    """What a question may be about: two numbers and a name, with the key of the answer."""

    key: str
    x: int
    y: int
    name: str


def _kept(value: dict[str, Any], schemas: dict[str, Schema], title: str, ask: str) -> Case:
    """Return a case whose form has one example: its value."""
    form = Node({"type": "object", "properties": schemas, "required": list(schemas)}, lambda _: value)
    return Case(ask=ask, value=value, form=form, title=title)


def _computed(rng: Random, drawn: _Drawn) -> tuple[int, int, bool, int, str]:
    """Return two numbers, whether they are subtracted, the result, and the ask."""
    x, y = drawn.x, drawn.y
    x, y = (max(x, y), min(x, y)) if rng.random() < 0.3 else (x, y)
    less = x >= y and rng.random() < 0.35
    return x, y, less, x - y if less else x + y, phrase(rng, _MINUS if less else _PLUS, {"a": x, "b": y})


def _sum(rng: Random, drawn: _Drawn) -> Case:
    key = drawn.key
    x, y, less, total, ask = _computed(rng, drawn)
    if rng.random() < 0.2:
        return _kept({"a": x, "b": y, key: total}, dict.fromkeys(("a", "b", key), _WHOLE), "calculation", ask)
    if rng.random() < 0.15:
        return _kept({key: str(total)}, {key: _TEXT}, "answer", ask)
    key = rng.choice([key, key, "sum"]) if not less else key
    kind = rng.choice(["integer", "integer", "number"])
    return _kept({key: total}, {key: {"type": kind}}, "answer", ask)


def _steps(rng: Random, drawn: _Drawn) -> Case:
    """Ask for a sum whose answer has its steps before it."""
    x, y, less, total, ask = _computed(rng, drawn)
    sign, word = ("-", "minus") if less else ("+", "plus")
    said = f"{x} {word} {y} is {total}."
    in_three = [f"Start with {x}.", f"{'Take away' if less else 'Add'} {y}.", f"This gives {total}."]
    steps = rng.choice([[said], in_three, [f"{x} {sign} {y} = {total}"]])
    last = rng.choice(["final answer", "answer", "result"])
    first = rng.choice(["steps", "reasoning", "explanation", "thought"])
    if first != "steps":
        return _kept({first: said, last: total}, {first: _TEXT, last: _WHOLE}, "solution", ask)
    if rng.random() < 0.3:
        explanation = "Compute the difference." if less else "Compute the sum."
        objects = [{"explanation": explanation, "output": f"{x} {sign} {y} = {total}"}]
        return _kept(
            {"steps": objects, last: str(total)}, {"steps": _STEPS, last: _TEXT}, "math reasoning", ask
        )
    as_text = rng.random() < 0.5
    value = {"steps": steps, last: str(total) if as_text else total}
    return _kept(value, {"steps": _TEXTS, last: _TEXT if as_text else _WHOLE}, "solution", ask)


def _capital(rng: Random, _: _Drawn) -> Case:
    country = rng.choice(some.COUNTRIES)
    city = w.CAPITALS[country]
    ask = phrase(rng, _CAPITAL, {"c": country})
    both = {"country": country, "capital": city}
    swapped = {"capital": city, "country": country}
    value = rng.choice([{"capital": city}, {"answer": city}, both, swapped, {"city": city}])
    return _kept(value, dict.fromkeys(value, _TEXT), "capital", ask)


def _even(rng: Random, _: _Drawn) -> Case:
    n = rng.randint(0, 40)
    odd = rng.random() < 0.4
    ask = phrase(rng, _ODD if odd else _EVEN, {"a": n})
    key = rng.choice([("is odd" if odd else "is even"), "answer", "result"])
    right = bool(n % 2) == odd
    value = {"number": n, key: right} if rng.random() < 0.3 else {key: right}
    return _kept(value, {k: _YES_NO if k == key else _WHOLE for k in value}, "check", ask)


def _opposite(rng: Random, _: _Drawn) -> Case:
    first, second = rng.sample(rng.choice(w.OPPOSITES), 2)
    ask = phrase(rng, _OPPOSITE, {"a": first})
    value = rng.choice([{"opposite": second}, {"answer": second}, {"word": first, "opposite": second}])
    return _kept(value, dict.fromkeys(value, _TEXT), "opposite", ask)


def _count(rng: Random, drawn: _Drawn) -> Case:
    start, end = rng.choice([(1, rng.randint(3, 12)), (drawn.x, drawn.x + rng.randint(2, 6))])
    ask = phrase(rng, _COUNT, {"a": start, "b": end}, command=True)
    key = rng.choice(["numbers", "numbers", "list", "answer", "values"])
    return _kept({key: list(range(start, end + 1))}, {key: _WHOLES}, "numbers", ask)


def _list(rng: Random, _: _Drawn) -> Case:
    key, ask, items = rng.choice(_LISTS)
    return _kept({key: items}, {key: _TEXTS}, key, phrase(rng, [ask]))


def _spelling(rng: Random, _: _Drawn) -> Case:
    word = text.any_word(rng)[:7].lower()
    key = rng.choice(["letters", "spelling", "letters"])
    ask = phrase(rng, _SPELL, {"a": word}, command=True)
    if rng.random() < 0.6:
        return _kept({key: list(word)}, {key: _TEXTS}, "spelling", ask)
    value = {"word": word, "letters": list(word), "length": len(word)}
    return _kept(value, {"word": _TEXT, "letters": _TEXTS, "length": _WHOLE}, "spelling", ask)


def _colour(rng: Random, _: _Drawn) -> Case:
    thing, colour = rng.choice(sorted(w.COLOUR_OF.items()))
    ask = phrase(rng, _COLOUR, {"a": thing})
    value = rng.choice([{"color": colour}, {"answer": colour}, {"thing": thing, "color": colour}])
    return _kept(value, dict.fromkeys(value, _TEXT), "colour", ask)


def _legs(rng: Random, _: _Drawn) -> Case:
    animal, legs = rng.choice(sorted(w.LEGS.items()))
    ask = phrase(rng, ["how many legs does {a} have"], {"a": a(animal)})
    options: list[dict[str, Any]] = [
        {"legs": int(legs)},
        {"answer": int(legs)},
        {"animal": animal, "legs": int(legs)},
    ]
    value = rng.choice(options)
    return _kept(value, {k: _TEXT if k == "animal" else _WHOLE for k in value}, "legs", ask)


def _comparison(rng: Random, _: _Drawn) -> Case:
    x, y = rng.sample(range(60), 2)
    big = rng.random() < 0.6
    word = rng.choice(["bigger", "larger", "greater"]) if big else "smaller"
    ask = phrase(rng, _COMPARE, {"w": word, "a": x, "b": y})
    key = rng.choice(["answer", "bigger" if big else "smaller", "result", "max" if big else "min"])
    return _kept({key: max(x, y) if big else min(x, y)}, {key: _WHOLE}, "comparison", ask)


def _story(rng: Random, drawn: _Drawn) -> Case:
    noun = rng.choice("apples books balls coins eggs stones".split())
    ask = phrase(rng, _STORY, {"a": drawn.x, "b": drawn.y, "n": drawn.name, "x": noun})
    return _kept({drawn.key: drawn.x + drawn.y}, {drawn.key: _WHOLE}, "answer", ask)


def _skill(rng: Random, _: _Drawn) -> Case:
    """Ask what a skill asks; the form has the answer in one text."""
    exchange = rng.choice(_SHORT_ANSWERS)(rng, Chat())
    key = rng.choice(["answer", "response", "reply", "message", "text", "answer"])
    said = exchange.brief if exchange.brief and rng.random() < 0.5 else exchange.answer
    return _kept({key: said}, {key: _TEXT}, "answer", exchange.ask)


_QUESTIONS: dict[Callable[[Random, _Drawn], Case], float] = {
    _sum: 5, _steps: 4, _capital: 2, _even: 2, _opposite: 2, _count: 2, _list: 1, _spelling: 1, _colour: 1.5, _story: 1, _comparison: 1.5, _skill: 4, _legs: 1,
}  # fmt: skip


def question(rng: Random) -> Case:
    """Answer an ordinary little question in JSON."""
    write = rng.choices(list(_QUESTIONS), list(_QUESTIONS.values()))[0]
    key = rng.choice(["answer", "answer", "result", "answer", "value", "final answer"])
    x, y = rng.randint(0, 12), rng.randint(0, 9)
    return write(rng, _Drawn(key, x, y, rng.choice(w.NAMES)))
