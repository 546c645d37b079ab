from __future__ import annotations

import json
from typing import Any

import pytest

from triolet.core import json_text
from triolet.core.json_text import between_windows
from triolet.protocol.json import encoding
from triolet.protocol.json.encoding import (
    EncodedItems,
    EncodedList,
    EncodedObject,
    EncodedText,
    encode,
    encode_long,
)
from triolet.protocol.json.parsing import WINDOW


@pytest.mark.parametrize(
    "value",
    [
        {"a": EncodedList([{"b": 1}, {"b": "\u00e9\n"}])},
        {"a": {"b": [1, {"c": EncodedList()}], "d": None}, "e": [True, 0.5, "x"]},
        {"logprobs": EncodedList([1]), "part": {"logprobs": EncodedList([2, 3])}, "\u2028": {}},
        {"nothing": [], "of": {}, "it": "here"},
    ],
)
def test_what_is_encoded_already_comes_out_as_if_it_were_not(value: dict[str, Any]) -> None:
    plain = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    assert encode(value) == plain


def test_parts_that_are_encoded_already_come_out_as_if_they_were_not() -> None:
    items: list[Any] = [{"b": 1, "c": ["é\n"]}, "x", None]
    plain = {
        "tools": items,
        "said": 'a "b"\u2028',
        "none": [],
        "inner": {"said": "ö"},
        "form": {"of": {"é": []}},
    }
    known = {
        "tools": EncodedItems.of(items),
        "said": EncodedText('a "b"\u2028'),
        "none": EncodedItems.of([]),
        "inner": {"said": EncodedText("ö")},
        "form": EncodedObject.of({"of": {"é": []}}),
    }
    assert encode(known) == json.dumps(plain, ensure_ascii=False, separators=(",", ":"))


@pytest.mark.parametrize("text", ['a "b"\u2028😀\\' * WINDOW, "x" * WINDOW, "x" * (WINDOW + 1)])
def test_a_long_text_is_encoded_window_by_window(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    dumps = encoding._dumps

    def recorded(value: Any) -> str:
        lengths.append(len(value))
        return dumps(value)

    monkeypatch.setattr(encoding, "_dumps", recorded)
    num_pauses = 0

    def pause() -> None:
        nonlocal num_pauses
        num_pauses += 1

    between_windows.set(pause)
    assert EncodedText(text).json == json.dumps(text, ensure_ascii=False)
    assert max(lengths) <= WINDOW and num_pauses == len(lengths) == -(-len(text) // WINDOW)


def test_long_items_are_encoded_with_a_place_to_stop_after_each_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[object] = []
    encode_item = json_text.encode

    def recorded(encoder: json.JSONEncoder, value: object) -> str:
        written.append(value)
        return encode_item(encoder, value)

    monkeypatch.setattr(json_text, "encode", recorded)
    items = [{"a": [1] * json_text.SHORT_CHARS}, {"b": 2}]
    assert EncodedItems.of(items).texts == tuple(json.dumps(item, separators=(",", ":")) for item in items)
    assert written == items


def test_lists_that_know_their_json_can_be_added() -> None:
    whole = EncodedList([1])
    whole.add(EncodedList([{"a": 2}]))
    assert whole == [1, {"a": 2}] and whole.texts == ["1", '{"a":2}']


def test_what_is_encoded_is_not_encoded_again() -> None:
    items = EncodedList([{"token": "x"}])
    items[0]["token"] = "y"  # against the rule; a change is not looked at
    assert encode({"a": items}) == '{"a":[{"token":"x"}]}'


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_json_number_is_never_written(value: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        encode({"a": value})


def test_an_object_of_long_members_is_encoded_as_python_does() -> None:
    value = {
        "a": "é\n😀" * 5000,
        "b": list(range(10_000)),
        "c": ("x", 'y"') * 3000,
        "d": [],
        "e": None,
        "f": 1.5,
    }
    plain = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    assert encode_long(value) == plain.encode()
