"""The messages of a chat as the items that they were, page by page."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from triolet.protocol.errors import WireError
from triolet.protocol.json.structuring import CONVERTER
from triolet.protocol.responses import input_items_page
from triolet.protocol.responses.input_items_page import InputItems, page_of
from triolet.protocol.responses.response_items import Input

CHAT: list[dict[str, Any]] = [
    {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "Be brief."}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "1 + 2?"}]},
    {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}],
    },
    {"type": "function_call", "call_id": "a", "name": "add", "arguments": "{}"},
    {"type": "function_call", "call_id": "b", "name": "sub", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": "3"},
    {"type": "function_call_output", "call_id": "b", "output": "-1"},
]


def items_of_chat() -> InputItems:
    return InputItems("resp_7", CONVERTER.structure(CHAT, Input).messages())


def all_of(items: InputItems) -> list[dict[str, Any]]:
    return [items[place] for place in range(len(items))]


def test_the_items_of_a_chat_are_those_that_it_was_made_of() -> None:
    items = all_of(items_of_chat())
    for item in items:
        TypeAdapter(ResponseItem).validate_python(item)
    assert [item["id"] for item in items] == [
        "msg_7_0", "msg_7_1", "msg_7_2", "fc_7_3", "fc_7_4", "fco_7_5", "fco_7_6",
    ]  # fmt: skip
    assert {item["status"] for item in items} == {"completed"}
    assert [{k: v for k, v in item.items() if k not in ("id", "status")} for item in items] == CHAT


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_the_pages_of_a_list_are_the_list(order: str) -> None:
    items, read, query = items_of_chat(), [], {"order": order, "limit": "3"}
    while True:
        page = page_of(items, query)
        read += page["data"]
        assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
        if not page["has_more"]:
            break
        query["after"] = page["last_id"]
    assert read == (all_of(items) if order == "asc" else all_of(items)[::-1])


def test_an_item_is_found_by_its_own_id_alone() -> None:
    items = items_of_chat()
    assert [items.place_of(item["id"]) for item in all_of(items)] == list(range(7))
    for other in (
        "msg_7_3",
        "msg_8_0",
        "msg_7_00",
        "msg_7_7",
        "msg_7_-1",
        "msg_7_\u0660",
        "msg_7_" + "9" * 5000,
        "",
        "0",
    ):
        assert items.place_of(other) is None


def test_a_page_of_a_long_chat_is_made_of_its_own_items_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    one = input_items_page._item

    def counted(message: dict[str, Any], number: int) -> dict[str, Any]:
        made.append(number)
        return one(message, number)

    monkeypatch.setattr(input_items_page, "_item", counted)
    calls = [{"id": str(place), "function": {"name": "f", "arguments": "{}"}} for place in range(2000)]
    chat = [{"role": "user", "content": "a"}] * 10_000 + [
        {"role": "assistant", "content": "", "tool_calls": calls}
    ]
    page = page_of(InputItems("resp_7", chat), {"after": "fc_7_10000", "order": "asc", "limit": "2"})
    assert [item["call_id"] for item in page["data"]] == ["1", "2"] and page["has_more"]
    assert len(made) < 10


def test_the_newest_items_come_first_and_twenty_of_them() -> None:
    page = page_of(InputItems("resp_7", [{"role": "user", "content": "a"}] * 30), {})
    assert [item["id"] for item in page["data"]] == [f"msg_7_{number}" for number in range(29, 9, -1)]
    assert page_of(InputItems("resp_7", []), {}) == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"order": "up"}, "order"),
        ({"limit": "101"}, "limit"),
        ({"limit": "0"}, "limit"),
        ({"limit": "9" * 5000}, "limit"),
        ({"limit": "x"}, "limit"),
        ({"after": "msg_8_0"}, "after"),
    ],
)
def test_a_wrong_page_is_refused_by_name(query: dict[str, str], param: str) -> None:
    with pytest.raises(WireError) as error:
        page_of(items_of_chat(), query)
    assert (error.value.status, error.value.param) == (400, param)
