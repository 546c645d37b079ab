from __future__ import annotations

import json
from typing import Any

import pytest

from triolet.protocol.errors import WireError
from triolet.protocol.json import EncodedList, encode, parse_object


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


def test_lists_that_know_their_json_can_be_added() -> None:
    whole = EncodedList([1])
    whole.add(EncodedList([{"a": 2}]))
    assert whole == [1, {"a": 2}] and whole.texts == ["1", '{"a":2}']


def test_what_is_encoded_is_not_encoded_again() -> None:
    items = EncodedList([{"token": "x"}])
    items[0]["token"] = "y"  # nobody changes it; if somebody does, it is not looked at
    assert encode({"a": items}) == '{"a":[{"token":"x"}]}'


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_json_number_is_never_written(value: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        encode({"a": value})


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
