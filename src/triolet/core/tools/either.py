"""Parser of answers that are either tool calls or JSON of a requested format."""

from __future__ import annotations

from triolet.core.tools.events import AnswerEvent, TextPiece
from triolet.core.tools.formats import ToolFormat
from triolet.core.tools.scanning import WHITESPACE


class CallsOrForm:
    """Parser that decides by the beginning of the answer: one that does not begin with a call contains none.

    Args:
        calls: finds them.
    """

    def __init__(self, calls: ToolFormat) -> None:
        self._calls = calls
        self._held: list[str] = []
        self._has_begun = False  # with more than whitespace
        self._is_calls = False
        self._is_form = False

    def feed(self, text: str) -> list[AnswerEvent]:
        if self._is_form:
            return [TextPiece(text)]
        if self._is_calls:
            return self._calls.feed(text)
        self._held.append(text)
        # Whitespace before the first brace decides nothing.
        bare = text if self._has_begun else text.lstrip(WHITESPACE)
        self._has_begun = self._has_begun or bool(bare)
        return self._decided(self._calls.feed(bare))

    def _decided(self, events: list[AnswerEvent]) -> list[AnswerEvent]:
        """Decide by the first events: text, or the beginning of a call."""
        if not events:
            return []
        self._is_form = isinstance(events[0], TextPiece)
        self._is_calls = not self._is_form
        return [TextPiece("".join(self._held))] if self._is_form else events

    def finish(self) -> list[AnswerEvent]:
        if self._is_form:
            return []
        # Without any event so far the answer is too short to be a call.
        events = self._calls.finish()
        return events if self._is_calls else self._decided(events or [TextPiece("".join(self._held))])
