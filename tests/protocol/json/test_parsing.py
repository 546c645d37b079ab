from __future__ import annotations

import json
import random
import sys
from types import FrameType
from typing import Any

import pytest

from triolet.protocol.errors import WireError
from triolet.protocol.json.parsing import LONG_TEXT, JsonLimits, parse_object


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ("", "Expecting value"),
        ("[1]", "it must be an object, got list"),
        ('{"a": Infinity}', "Infinity is not a JSON number"),
        ('{"a":' * 100_000, "nested too deep"),
        ('{"a": "\\uDFFF"}', "not Unicode"),
        (b'{"a": "\xff"}', "not Unicode"),
        ('{"a": ' + "1" * 5000 + "}", "digits"),
    ],
)
def test_what_is_not_json_is_refused_with_the_reason(raw: str | bytes, reason: str) -> None:
    with pytest.raises(WireError, match=reason) as raised:
        parse_object(raw)
    assert raised.value.code == "invalid_json"


def test_pairs_of_surrogates_are_characters() -> None:
    assert parse_object('{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}


@pytest.mark.parametrize("filler", ["", "x" * LONG_TEXT], ids=["short", "long"])
@pytest.mark.parametrize(
    ("value", "is_allowed"),
    [
        ([""] * 5, True),
        ([""] * 6, False),
        ([[]] * 6, False),
        ({"a": [None] * 6}, False),
        ([[""] * 6], False),
        ([1] * 100, True),
        ([[1.5] * 100], True),
        ({"a": [-1] * 100}, True),
        ([1, 2, ""] * 2, True),
        ([[[1] * 100]], False),
        ({"a": {"b": [1] * 6}}, False),
        ({"a": {"b": [1] * 5}}, True),
    ],
)
def test_a_list_has_few_items_beside_token_ids_however_long_its_text_is(
    value: Any, is_allowed: bool, filler: str
) -> None:
    raw, limits = json.dumps({"filler": filler, "a": value}), JsonLimits(max_members=5)
    if is_allowed:
        assert parse_object(raw, limits)["a"] == value
        return
    with pytest.raises(WireError, match="at most 5 keys in an object and items in a list") as raised:
        parse_object(raw, limits)
    assert raised.value.code == "json_too_large"


def long_text(value: Any, **form: Any) -> str:
    return json.dumps({"value": value, "filler": "x" * LONG_TEXT}, **form)


@pytest.mark.parametrize("is_ascii", [True, False])
def test_a_long_text_means_the_same_as_to_the_parser_of_python(
    is_ascii: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triolet.protocol.json.parsing.WINDOW", 96)  # every boundary of a window is met
    generator = random.Random(20)
    letters = ["a", '"', "\\", "\n", "ä", "😀", "\u2028", "{", "[", ",", ":", "x" * 50]
    for _ in range(60):
        text = "".join(generator.choices(letters, k=80))
        numbers = [generator.choice([generator.randrange(10**6), -generator.random()]) for _ in range(90)]
        value = [text, numbers, {text: [{}, [], True, None, 1e300]}]
        raw = long_text(value, ensure_ascii=is_ascii, indent=generator.choice([None, 2]))
        assert parse_object(raw)["value"] == value


@pytest.mark.parametrize(
    "wrong",
    [
        '{"a" 1}',
        '{"a":1,}',
        "[1,]",
        "[1 2]",
        "[1,2,,3]",
        '"\\x"',
        '"\x01"',
        '"\\ud83d"',
        "01",
        "1e999",
        "nul",
        "1}",
    ],
)
def test_a_long_text_that_is_not_json_is_refused(wrong: str) -> None:
    with pytest.raises(WireError) as raised:
        parse_object(long_text(0).replace("0", wrong, 1))
    assert raised.value.code == "invalid_json"


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        ('{"a": [' + "1," * 100_000 + "1]}", None),
        ("{" + ",".join(f'"{key}": 1' for key in range(200_000)) + "}", "json_too_large"),
        ('{"logit_bias": {' + ",".join(f'"{key}": 1' for key in range(3000)) + "}}", "json_too_large"),
        ('{"a": {' + ",".join(f'"{key}": 1' for key in range(20_000)) + "}}", "json_too_large"),
        ('{"messages": [' + ",".join(["{}"] * 30_000) + "]}", "json_too_large"),
        ('{"stop": [' + ",".join(['"a text"'] * 30_000) + "]}", "json_too_large"),
        ('{"stop": [' + ",".join(["null"] * 30_000) + "]}", "json_too_large"),
        ('{"a": "' + "{[,:" * 100_000 + '"}', None),
        ('{"a": ' + "[" * 200 + "]" * 200 + "}", "invalid_json"),
    ],
)
def test_the_shape_of_a_text_is_bounded_whatever_stands_in_its_strings(raw: str, code: str | None) -> None:
    try:
        parse_object(raw)
        said = None
    except WireError as error:
        said = error.code
    assert said == code


def test_what_is_too_large_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triolet.protocol.json.parsing._LongText.parse", None)
    for raw in ("{" + '"a":1,' * 10**6, '{"a":' + "[" * 10**6, '{"a":[' + "{}," * 10**6):
        with pytest.raises(WireError):
            parse_object(raw)


def test_objects_of_a_long_text_share_their_keys() -> None:
    """Two thousand messages with keys of their own would take twice the memory."""
    first, *others = parse_object('{"a": [' + ",".join(['{"a key": "a text of some length"}'] * 2048) + "]}")[
        "a"
    ]
    [key] = first
    assert all(next(iter(other)) is key for other in others)


@pytest.mark.parametrize("letter", ["x", "\\n", "😀", "{", " "])
def test_no_call_of_the_parser_handles_more_than_a_window_of_a_long_text(letter: str) -> None:
    raw = '{"a": "' + letter * 2**18 + '"}' if letter != " " else '{"a": ' + " " * 2**18 + "1}"
    num_calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event == "c_call" and getattr(argument, "__name__", "") in ("match", "split")

    sys.setprofile(count)
    try:
        parse_object(raw)
    finally:
        sys.setprofile(None)
    # One to look for what is outside of strings and one to read, of each window; a megabyte takes hundreds.
    assert num_calls > 2 * len(raw) // 2**12
