"""The parser of an answer: text in, as it is generated; text, reasoning and calls of tools out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from triolet.core.tools.events import AnswerEvent, TextPiece, ToolCallBegin, ToolCallEnd
from triolet.core.tools.formats import ToolFormat
from triolet.core.tools.scanning import WHITESPACE


class Splitter(Protocol):
    """What takes text in pieces and gives events."""

    def feed(self, text: str) -> list[AnswerEvent]:
        """Take the next piece of text."""
        ...

    def finish(self) -> list[AnswerEvent]:
        """The text is over."""
        ...


class AnswerParser:
    """Turns the text of one answer into events. However the text is cut into pieces, it finds the same: the same calls,
    and between them pieces of the same whole text.

    Whitespace between a call and its neighbours is nobody's: it is left out.

    Args:
        reasoning: splits the reasoning off, if the model gives any.
        tools: finds the calls, if there can be any.
    """

    def __init__(self, reasoning: Splitter | None = None, tools: ToolFormat | None = None) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._spacing = ""
        self._follows_call = False

    def feed(self, text: str) -> tuple[AnswerEvent, ...]:
        """Take the next piece of text; return what is known with it, often nothing."""
        events = self._reasoning.feed(text) if self._reasoning else [TextPiece(text)]
        return tuple(self._spaced(self._with_calls(events)))

    def finish(self) -> tuple[AnswerEvent, ...]:
        """The answer is over, for whatever reason: what was held back. Calls that are open end."""
        events = list(self._with_calls(self._reasoning.finish() if self._reasoning else []))
        events += self._tools.finish() if self._tools else []
        found = list(self._spaced(events))
        if self._spacing and not self._follows_call:
            found.append(TextPiece(self._spacing))
        self._spacing = ""
        return tuple(found)

    def _with_calls(self, events: Iterable[AnswerEvent]) -> Iterator[AnswerEvent]:
        """Text may hold calls; reasoning does not, whatever it looks like."""
        for event in events:
            if isinstance(event, TextPiece) and self._tools is not None:
                yield from self._tools.feed(event.text)
            else:
                yield event

    def _spaced(self, events: Iterable[AnswerEvent]) -> Iterator[AnswerEvent]:
        """Hold whitespace back until it is known whether a call follows it."""
        if self._tools is None:
            yield from (event for event in events if event != TextPiece(""))
            return
        for event in events:
            match event:
                case TextPiece(text=text):
                    text = self._spacing + text
                    said = text.rstrip(WHITESPACE)
                    self._spacing = text[len(said) :]
                    if said:
                        self._follows_call = False
                        yield TextPiece(said)
                case ToolCallBegin():
                    self._spacing = ""
                    yield event
                case ToolCallEnd():
                    self._follows_call = True
                    yield event
                case _:
                    yield event
