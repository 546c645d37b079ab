"""What a long request is made of is freed piece by piece, as soon as nothing refers to it."""

from __future__ import annotations

import contextvars
import gc
import itertools
import json
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from triolet.core.json_text import PIECE_ITEMS, between_windows, release
from triolet.errors import InvalidRequest
from triolet.protocol.errors import WireError
from triolet.protocol.json import parsing
from triolet.protocol.json.parsing import LONG_TEXT, parse_object, structured_object

NUM_LISTS = 50 * PIECE_ITEMS


def lists() -> list[Any]:
    return [[[number] for number in range(PIECE_ITEMS)] for _ in range(NUM_LISTS // PIECE_ITEMS)]


def most_freed_at_once(work: Callable[[], object]) -> int:
    """Return the largest decrease of the number of lists and dicts between two pauses of `work`."""
    counts: list[int] = []

    def pause() -> None:
        counts.append(sum(type(one) in (list, dict) for one in gc.get_objects()))

    def run() -> None:
        between_windows.set(pause)
        pause()
        work()
        pause()

    gc.collect()
    gc.disable()
    try:
        contextvars.copy_context().run(run)
    finally:
        gc.enable()
    return max(before - after for before, after in itertools.pairwise(counts))


def test_a_value_of_many_lists_is_freed_few_at_a_time() -> None:
    owned = [{"a": lists()}]
    assert most_freed_at_once(lambda: release(owned)) <= 2 * PIECE_ITEMS
    assert owned == []


def test_what_something_else_refers_to_is_left_as_it_is_and_told() -> None:
    inner, key = [1, [2]], {"b": [3]}
    owned = [{"a": [inner, "x"], "k": key, "n": [4, [5]]}]
    assert sorted(map(id, release(owned))) == sorted(map(id, (inner, key)))
    assert (inner, key) == ([1, [2]], {"b": [3]})


def test_a_structured_object_keeps_what_its_result_refers_to() -> None:
    kept: list[Any] = []
    found = structured_object([{"a": [1, [2]], "b": [[3]]}], lambda value: (value["a"],), kept)
    assert found == ([1, [2]],)
    assert kept == [[1, [2]]]
    assert kept[0] is found[0]


class Part(list[Any]):
    """List that can be watched."""


def test_an_error_of_an_object_refers_to_nothing_of_it() -> None:
    part = Part()
    watched = weakref.ref(part)
    owned: list[dict[str, Any]] = [{"a": part}]
    del part

    def refuse(value: dict[str, Any]) -> None:
        found = value["a"]
        try:
            raise ValueError(f"{len(found)} items")
        except ValueError as error:
            raise InvalidRequest("a is wrong", field="a") from error

    with pytest.raises(InvalidRequest, match="a is wrong") as raised:
        structured_object(owned, refuse)
    assert watched() is None
    assert raised.value.field == "a"


@pytest.mark.parametrize("end", [",}", "} x", ""])
def test_what_was_made_of_a_text_that_is_wrong_is_freed_few_at_a_time(end: str) -> None:
    text = json.dumps({"a": lists(), "b": "x" * LONG_TEXT})[:-1] + end
    errors: list[WireError] = []

    def parse() -> None:
        try:
            parse_object(text)
        except WireError as error:
            errors.append(error)

    # All that a list of the text has, and what the parser itself takes.
    assert most_freed_at_once(parse) <= 3 * PIECE_ITEMS
    assert [error.code for error in errors] == ["invalid_json"]


def test_a_text_of_too_many_members_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[parsing._LongText]] = []
    parse = parsing._LongText.parse

    def noted(parser: parsing._LongText) -> Any:
        made.append(weakref.ref(parser))
        return parse(parser)

    monkeypatch.setattr(parsing._LongText, "parse", noted)
    text = json.dumps({"a": [{}] * 3000, "b": "x" * LONG_TEXT})
    with pytest.raises(WireError) as raised:
        parse_object(text)
    assert raised.value.code == "json_too_large"
    [parser] = made
    assert parser() is None or parser()._made == []  # type: ignore[union-attr]
