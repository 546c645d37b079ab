"""Pages of the input items of a response."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from triolet.protocol.errors import wrong
from triolet.protocol.responses.response_items import Message

DEFAULT_LIMIT = 20
MAX_LIMIT = 100
MAX_PLACE_DIGITS = 9  # of the place in an id


class InputItems:
    """Items of a chat, oldest first, with ids that never change; each is made when it is asked for.

    A chat may have many thousand, and a page shows a few.

    Args:
        response_id: of the response that answers the chat.
        chat: its messages.
    """

    def __init__(self, response_id: str, chat: Sequence[Message]) -> None:
        self._chat = chat
        self._suffix = response_id.removeprefix("resp_")
        # Number of items up to the end of each message.
        self._ends = list(accumulate(map(_num_items, chat)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, place: int) -> dict[str, Any]:
        if not 0 <= place < len(self):
            raise IndexError(place)
        at = bisect_right(self._ends, place)
        item = _item(self._chat[at], place - (self._ends[at - 1] if at else 0))
        return {"id": f"{_PREFIXES[item['type']]}_{self._suffix}_{place}", "status": "completed", **item}

    def place_of(self, item_id: str) -> int | None:
        """Return the place of the item of an id; None if there is none."""
        digits = item_id.rpartition("_")[2]
        if not (digits.isascii() and digits.isdigit() and len(digits) <= MAX_PLACE_DIGITS):
            return None
        place = int(digits)
        return place if place < len(self) and self[place]["id"] == item_id else None


_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco"}


def _has_text(message: Message) -> bool:
    return message["role"] != "assistant" or bool(message.get("content"))


def _num_items(message: Message) -> int:
    # Most messages have no calls.
    return 1 if message["role"] != "assistant" else _has_text(message) + len(message.get("tool_calls") or ())


def _item(message: Message, number: int) -> dict[str, Any]:
    """Return one of the items of a message: its text, then its calls."""
    role, text = message["role"], message.get("content")
    if role == "tool":
        return {"type": "function_call_output", "call_id": message["tool_call_id"], "output": text}
    if number == 0 and _has_text(message):
        part: dict[str, Any] = {"type": "input_text", "text": text}
        if role == "assistant":
            part = {"type": "output_text", "text": text, "annotations": []}
        return {"type": "message", "role": role, "content": [part]}
    call = message["tool_calls"][number - _has_text(message)]
    function = call["function"]
    return {
        "type": "function_call",
        "call_id": call["id"],
        "name": function["name"],
        "arguments": function["arguments"],
    }


def page_of(items: InputItems, query: Mapping[str, str]) -> dict[str, Any]:
    """Return one page of a list.

    Args:
        items: of a response.
        query: `order`, `desc` (the default) or `asc`; `after`, the id of the last item that was read; `limit`.
    Raises:
        WireError: an invalid value in the query.
    """
    order, after = query.get("order", "desc"), query.get("after")
    if order not in ("asc", "desc"):
        raise wrong("order", "asc or desc", order)
    limit = query.get("limit", str(DEFAULT_LIMIT))
    if limit not in map(str, range(1, MAX_LIMIT + 1)):
        raise wrong("limit", f"a whole number from 1 to {MAX_LIMIT}", limit)
    falls, start = order == "desc", 0
    if after is not None:
        if (place := items.place_of(after)) is None:
            raise wrong("after", "the id of one of the items", after)
        start = len(items) - place if falls else place + 1
    stop = min(start + int(limit), len(items))
    data = [items[len(items) - 1 - place if falls else place] for place in range(start, stop)]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": stop < len(items),
    }
