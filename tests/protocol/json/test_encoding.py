from __future__ import annotations

import json
from typing import Any

import pytest

from triolet.protocol.json.encoding import EncodedItems, EncodedList, EncodedText, encode, encode_long


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


def test_items_and_texts_that_are_encoded_already_come_out_as_if_they_were_not() -> None:
    items: list[Any] = [{"b": 1, "c": ["é\n"]}, "x", None]
    plain = {"tools": items, "said": 'a "b"\u2028', "none": [], "inner": {"said": "ö"}}
    known = {
        "tools": EncodedItems.of(items),
        "said": EncodedText('a "b"\u2028'),
        "none": EncodedItems.of([]),
        "inner": {"said": EncodedText("ö")},
    }
    assert encode(known) == json.dumps(plain, ensure_ascii=False, separators=(",", ":"))


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
