"""The messages of a chat as the items that they were, page by page."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from triolet.protocol.errors import WireError
from triolet.protocol.json.structuring import CONVERTER
from triolet.protocol.responses.input_items_page import input_items, page_of
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


def items_of_chat() -> list[dict[str, Any]]:
    return input_items("resp_7", CONVERTER.structure(CHAT, Input).messages())


def test_the_items_of_a_chat_are_those_that_it_was_made_of() -> None:
    items = items_of_chat()
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
    assert read == (items if order == "asc" else items[::-1])


def test_the_newest_items_come_first_and_twenty_of_them() -> None:
    page = page_of([{"id": str(number)} for number in range(30)], {})
    assert [item["id"] for item in page["data"]] == [str(number) for number in range(29, 9, -1)]
    assert page_of([], {}) == {
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
