"""JSON whose length a client chooses."""

from __future__ import annotations

import contextvars
import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from triolet.core import json_text
from triolet.core.chat_template import ChatTemplate
from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.core.tools import parse_tools

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


def pauses(work: Callable[[], object]) -> int:
    """Return how often `work` gave way."""
    count = 0

    def pause() -> None:
        nonlocal count
        count += 1

    def run() -> None:
        json_text.between_windows.set(pause)
        work()

    contextvars.copy_context().run(run)
    return count


SCHEMA = {"type": "object", "properties": {"a": {"enum": [[number] for number in range(10_000)]}}}
NUMBERS = {"type": "object", "properties": {"a": {"enum": list(range(20_000))}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
CALL = {"type": "function", "function": {"name": "f", "arguments": PLAIN.encode({"a": list(range(20_000))})}}
HELLO = {"role": "user", "content": "Hello!"}


@pytest.mark.parametrize(
    "work",
    [
        lambda: json_text.is_longer(SCHEMA, 10**9),
        lambda: json_text.is_longer(NUMBERS, 10**9),
        lambda: json_text.encode(PLAIN, SCHEMA),
        lambda: json_text.encode(PLAIN, NUMBERS),
        lambda: json_text.loads(PLAIN.encode(SCHEMA)),
        lambda: json_text.loads(PLAIN.encode(NUMBERS)),
        lambda: parse_tools([TOOL]),
        lambda: StructuredOutputsParams(json=SCHEMA),
        lambda: ChatTemplate("{{ tools | tojson }}").render([HELLO], tools=[TOOL]),
        lambda: ChatTemplate("{{ tools[0] }}").render([HELLO], tools=[{"numbers": list(range(20_000))}]),
        lambda: ChatTemplate("{{ messages[1].tool_calls[0].function.arguments | tojson }}").render(
            [HELLO, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
        ),
        lambda: ChatTemplate("{% for n in x %}{{ n }}{% endfor %}").render([HELLO], x=list(range(20_000))),
    ],
    ids=[
        *("length", "length of numbers", "writing", "writing numbers", "reading", "reading numbers"),
        *("tools", "schema", "tools in a prompt", "numbers in a prompt", "arguments in a prompt", "loop"),
    ],
)
def test_work_on_a_long_value_gives_way_after_each_short_piece(work: Callable[[], object]) -> None:
    # Each of these has at least 10,000 values to look at.
    assert pauses(work) >= 10_000 // json_text.PIECE_ITEMS


def test_work_on_a_short_value_gives_way_but_a_few_times() -> None:
    assert pauses(lambda: json_text.encode(PLAIN, {"a": [1, 2, 3]})) <= 3


def test_a_thread_gives_way_before_a_long_value_and_after_each_piece_of_it() -> None:
    size = json_text.PIECE_ITEMS
    places: list[int] = []
    num_seen = 0

    def look() -> None:
        nonlocal num_seen
        json_text.between_windows.set(lambda: places.append(num_seen))
        for item in json_text.giving_way(range(3 * size + 1)):
            assert item == num_seen
            num_seen += 1

    contextvars.copy_context().run(look)
    assert places == [0, size, 2 * size, 3 * size]
    assert num_seen == 3 * size + 1


def test_the_copies_that_a_chat_template_saw_are_freed_in_short_pieces() -> None:
    tools: list[dict[str, list[list[int]]]] = [{"lists": [[] for _ in range(10_000)]}]
    # Each list is looked at once where it is copied, and once more where the copy is freed.
    assert pauses(lambda: ChatTemplate("Hello!").render([HELLO], tools=tools)) >= 2 * 10_000
