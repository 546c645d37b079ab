"""Output items of a response, and the events of each: added, deltas, done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import attrs

from triolet.protocol.json.encoding import EncodedList

Event = dict[str, Any]
"""A server event, less its sequence number until `ResponseBuilder` has given it one."""

Logprobs = EncodedList  # of positions: the longest thing that a response says, and it is said four times


class OutputItem(Protocol):
    """Output item of a response."""

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids in the order in which they were made."""
        ...

    def begin(self) -> list[Event]:
        """Return the events that add the item."""
        ...

    def end(self, status: str) -> list[Event]:
        """Return the events that finish the item; `status` is `completed` or `incomplete`."""
        ...

    def item(self, status: str) -> dict[str, Any]:
        """Return the item object with its content so far."""
        ...


@attrs.define(eq=False)
class MessageOutput:
    """Message item: text for the user."""

    id: str
    output_index: int
    _pieces: list[str] = attrs.field(factory=list, init=False)
    _logprobs: Logprobs = attrs.field(factory=Logprobs, init=False)

    @property
    def ids(self) -> tuple[str, ...]:
        return (self.id,)

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def begin(self) -> list[Event]:
        item = {"id": self.id, "type": "message", "role": "assistant", "status": "in_progress", "content": []}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return [
            {"type": "response.output_item.added", "output_index": self.output_index, "item": item},
            {"type": "response.content_part.added", **self._place(), "part": part},
        ]

    def add(self, text: str, logprobs: Logprobs) -> list[Event]:
        """Append text; return its events."""
        self._pieces.append(text)
        self._logprobs.add(logprobs)
        return [{"type": "response.output_text.delta", **self._place(), "delta": text, "logprobs": logprobs}]

    def end(self, status: str) -> list[Event]:
        item = self.item(status)
        return [
            {
                "type": "response.output_text.done",
                **self._place(),
                "text": self.text,
                "logprobs": self._logprobs,
            },
            {"type": "response.content_part.done", **self._place(), "part": item["content"][0]},
            {"type": "response.output_item.done", "output_index": self.output_index, "item": item},
        ]

    def item(self, status: str) -> dict[str, Any]:
        part = {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self._logprobs}
        return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": [part]}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self.output_index, "content_index": 0}


@attrs.define(eq=False)
class ReasoningOutput:
    """Reasoning item."""

    id: str
    output_index: int
    _pieces: list[str] = attrs.field(factory=list, init=False)

    @property
    def ids(self) -> tuple[str, ...]:
        return (self.id,)

    def begin(self) -> list[Event]:
        item = {**self.item("in_progress"), "content": []}
        return [{"type": "response.output_item.added", "output_index": self.output_index, "item": item}]

    def add(self, text: str) -> list[Event]:
        """Append text; return its events."""
        self._pieces.append(text)
        return [{"type": "response.reasoning_text.delta", **self._place(), "delta": text}]

    def end(self, status: str) -> list[Event]:
        return [
            {"type": "response.reasoning_text.done", **self._place(), "text": "".join(self._pieces)},
            {
                "type": "response.output_item.done",
                "output_index": self.output_index,
                "item": self.item(status),
            },
        ]

    def item(self, status: str) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": "".join(self._pieces)}]
        return {"id": self.id, "type": "reasoning", "summary": [], "content": content, "status": status}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self.output_index, "content_index": 0}


@attrs.define(eq=False)
class CallOutput:
    """Function call item."""

    id: str
    output_index: int
    call_id: str
    name: str
    _pieces: list[str] = attrs.field(factory=list, init=False)

    @property
    def ids(self) -> tuple[str, ...]:
        # In the order in which `new_id` made them, which a replay repeats.
        return self.call_id, self.id

    def begin(self) -> list[Event]:
        item = self.item("in_progress")
        return [{"type": "response.output_item.added", "output_index": self.output_index, "item": item}]

    def add(self, text: str) -> list[Event]:
        """Append a piece of the arguments; return its events."""
        self._pieces.append(text)
        return [{"type": "response.function_call_arguments.delta", **self._place(), "delta": text}]

    def end(self, status: str) -> list[Event]:
        item = self.item(status)
        return [
            {
                "type": "response.function_call_arguments.done",
                **self._place(),
                "name": self.name,
                "arguments": item["arguments"],
            },
            {"type": "response.output_item.done", "output_index": self.output_index, "item": item},
        ]

    def item(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function_call",
            "call_id": self.call_id,
            "name": self.name,
            "arguments": "".join(self._pieces),
            "status": status,
        }

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self.output_index}


def messages_of(items: Sequence[OutputItem]) -> list[dict[str, Any]]:
    """Return the assistant's chat message for the next turn; none if the response is empty."""
    texts = [item.text for item in items if isinstance(item, MessageOutput)]
    calls = [
        {
            "id": item.call_id,
            "type": "function",
            "function": {"name": item.name, "arguments": item.item("completed")["arguments"]},
        }
        for item in items
        if isinstance(item, CallOutput)
    ]
    if not texts and not calls:
        return []
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    # Reasoning is left out: models are trained on histories without it.
    return [{**message, "tool_calls": calls}] if calls else [message]
