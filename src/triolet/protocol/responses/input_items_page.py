"""Pages of the input items of a response."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from triolet.protocol.errors import wrong
from triolet.protocol.responses.response_items import Message

DEFAULT_LIMIT = 20
MAX_LIMIT = 100


def input_items(response_id: str, chat: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the items of a chat, oldest first; their ids never change.

    Args:
        response_id: of the response that answers the chat.
    """
    items = [item for message in chat for item in _items(message)]
    suffix = response_id.removeprefix("resp_")
    prefixes = {"message": "msg", "function_call": "fc", "function_call_output": "fco"}
    return [
        {"id": f"{prefixes[item['type']]}_{suffix}_{place}", "status": "completed", **item}
        for place, item in enumerate(items)
    ]


def _items(message: Message) -> Iterator[dict[str, Any]]:
    role, text = message["role"], message.get("content")
    if role == "tool":
        yield {"type": "function_call_output", "call_id": message["tool_call_id"], "output": text}
        return
    if text or role != "assistant":
        part: dict[str, Any] = {"type": "input_text", "text": text}
        if role == "assistant":
            part = {"type": "output_text", "text": text, "annotations": []}
        yield {"type": "message", "role": role, "content": [part]}
    for call in message.get("tool_calls", ()):
        function = call["function"]
        yield {
            "type": "function_call",
            "call_id": call["id"],
            "name": function["name"],
            "arguments": function["arguments"],
        }


def page_of(items: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return one page of a list.

    Args:
        items: oldest first.
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
    ordered = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise wrong("after", "the id of one of the items", after)
        ordered = ordered[ids.index(after) + 1 :]
    data = ordered[: int(limit)]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(data) < len(ordered),
    }
