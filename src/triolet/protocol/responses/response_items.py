"""Output items of a response as they grow: deltas of the model in, item events out.

At most one item is open, the last one. Text, reasoning and calls follow each other as the model produces them: content
of another kind closes the open item.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from triolet.core.tools import (
    AnswerEvent,
    AnswerParser,
    ReasoningPiece,
    TextPiece,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
    ToolPlan,
)
from triolet.protocol.responses.input_items import Message
from triolet.protocol.responses.output_items import (
    CallOutput,
    Event,
    Logprobs,
    MessageOutput,
    OutputItem,
    ReasoningOutput,
    messages_of,
)
from triolet.protocol.responses.replay import ResponseDelta

NewId = Callable[[str], str]
"""Makes an id with a prefix, such as `msg`."""


@attrs.define(eq=False)
class ResponseItems:
    """Output items of one response; see the module.

    Args:
        new_id: makes item ids.
        plan: how the answer is parsed.
        num_reasoning_tokens: tokens of the deltas that contain reasoning.
    """

    _new_id: NewId
    _plan: ToolPlan
    num_reasoning_tokens: int = attrs.field(default=0, init=False)
    _items: list[OutputItem] = attrs.field(factory=list, init=False)
    _statuses: list[str] = attrs.field(factory=list, init=False)  # of those that are closed
    _open: OutputItem | None = attrs.field(default=None, init=False)
    _parser: AnswerParser | None = attrs.field(default=None, init=False)
    _late_logprobs: Logprobs = attrs.field(factory=Logprobs, init=False)

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the items, in the order in which they were made."""
        return tuple(item_id for item in self._items for item_id in item.ids)

    def snapshot(self) -> list[dict[str, Any]]:
        """Return the items of the response object."""
        statuses = [*self._statuses, "in_progress"]
        return [item.item(status) for item, status in zip(self._items, statuses, strict=False)]

    def messages(self) -> list[Message]:
        """Return the items as chat messages."""
        return messages_of(self._items)

    def add(self, new: ResponseDelta, prompt: str | None, *, is_last: bool) -> list[Event]:
        """Add a delta; return its events.

        Args:
            new: the delta.
            prompt: the prompt; reasoning may begin there.
            is_last: whether nothing follows.
        """
        if self._parser is None:
            self._parser = self._plan.parser(prompt)
        self._late_logprobs.add(new.logprobs)
        events: list[Event] = []
        pieces = [*self._parser.feed(new.text), *(self._parser.finish() if is_last else ())]
        if any(isinstance(piece, ReasoningPiece) for piece in pieces):
            self.num_reasoning_tokens += new.num_tokens
        for piece in pieces:
            events += self._piece(piece)
        if is_last and self._late_logprobs:
            events += self._text("")  # of tokens without a text of their own, such as the one that ended it
        return events

    def end(self, status: str, *, is_whole: bool) -> list[Event]:
        """Close the open item; return its events.

        Args:
            status: of the open item: `completed` or `incomplete`.
            is_whole: whether the model has finished: then an empty answer gets an empty message.
        """
        events = self._text("") if is_whole and not self._items else []
        return events + self._closed(status)

    def _piece(self, piece: AnswerEvent) -> list[Event]:
        match piece:
            case TextPiece(text=text):
                return self._text(text)
            case ReasoningPiece(text=text):
                events: list[Event] = []
                if not isinstance(self._open, ReasoningOutput):
                    events += self._opened(ReasoningOutput(self._new_id("rs"), len(self._items)))
                assert isinstance(self._open, ReasoningOutput)
                return events + self._open.add(text)
            case ToolCallBegin(name=name):
                call_id = self._new_id("call")
                return self._opened(CallOutput(self._new_id("fc"), len(self._items), call_id, name))
            case ToolCallArguments(text=text):
                assert isinstance(self._open, CallOutput), "arguments come between a call's begin and its end"
                return self._open.add(text)
            case ToolCallEnd(is_valid=is_valid):
                return self._closed("completed" if is_valid else "incomplete")

    def _text(self, text: str) -> list[Event]:
        events: list[Event] = []
        if not isinstance(self._open, MessageOutput):
            events += self._opened(MessageOutput(self._new_id("msg"), len(self._items)))
        assert isinstance(self._open, MessageOutput)
        logprobs, self._late_logprobs = self._late_logprobs, Logprobs()
        return events + self._open.add(text, logprobs)

    def _opened(self, item: OutputItem) -> list[Event]:
        events = self._closed("completed")
        self._items.append(item)
        self._open = item
        return events + item.begin()

    def _closed(self, status: str) -> list[Event]:
        if self._open is None:
            return []
        item, self._open = self._open, None
        self._statuses.append(status)
        return item.end(status)
