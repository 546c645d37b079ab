"""JSON whose length a client chooses."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from triolet.core import json_text

PLAIN = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
NUM_VALUES = json_text.SHORT_CHARS
VALUES: list[Any] = [
    None,
    True,
    -1.5e300,
    'a "quoted" text\n\\ with 😀',
    {"a": [1, 2.5, None, {"b": []}], "": {}, "ü": False},
    [],
]


def interruptions(work: Callable[[], object]) -> int:
    """Return how often Python code or a C function was called: after each the interpreter can let go of the GIL."""
    count = 0

    def note(frame: object, event: str, _: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_a_long_json_text_is_read_and_written_with_a_place_to_stop_after_each_value() -> None:
    value = [[number] for number in range(NUM_VALUES)]
    text = PLAIN.encode(value)
    assert interruptions(lambda: json_text.encode(PLAIN, value)) >= NUM_VALUES
    assert interruptions(lambda: json_text.loads(text)) >= NUM_VALUES


def test_a_short_json_text_is_read_and_written_in_few_calls() -> None:
    value = [[number] for number in range(NUM_VALUES // 20)]
    text = PLAIN.encode(value)
    assert len(text) <= json_text.SHORT_CHARS
    assert interruptions(lambda: json_text.loads(text)) < 100


@pytest.mark.parametrize("short_chars", [1, json_text.SHORT_CHARS])
@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_json_is_the_same_however_long_it_is(
    value: Any, short_chars: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_text, "SHORT_CHARS", short_chars)
    for encoder in (
        PLAIN,
        json.JSONEncoder(indent=2, sort_keys=True),
        json.JSONEncoder(separators=(",", ":")),
    ):
        text = json_text.encode(encoder, value)
        assert text == encoder.encode(value)
        assert json_text.loads(text) == value


@pytest.mark.parametrize("short_chars", [1, json_text.SHORT_CHARS])
def test_what_is_no_json_is_refused_however_long_it_is(
    short_chars: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_text, "SHORT_CHARS", short_chars)
    for text in ("[1,", '{"a" 1}', "[1] 2", "nul", '["a]'):
        with pytest.raises(ValueError):
            json_text.loads(text)
    for value in ([float("nan"), 1, 2], [1, {2}], {"a": object(), "b": 1}):
        with pytest.raises((ValueError, TypeError)):
            json_text.encode(PLAIN, value)
    endless: list[Any] = [1, 2]
    endless.append(endless)
    with pytest.raises(ValueError, match="Circular"):
        json_text.encode(PLAIN, endless)
