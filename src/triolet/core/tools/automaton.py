"""Base of the parsers that read an answer as a series of states."""

from __future__ import annotations

from collections.abc import Callable

from triolet.core.tools.events import AnswerEvent

State = Callable[[], list[AnswerEvent] | None]
"""Reader of the held text: uses up what it can, sets the next state and returns events; None to wait for more text."""


class Automaton:
    """Automaton over text that arrives in pieces.

    Args:
        beginning: its first state, a method.
    """

    def __init__(self, beginning: State) -> None:
        self._state = beginning
        self._held = ""

    def feed(self, text: str) -> list[AnswerEvent]:
        """Take the next piece of text."""
        self._held += text
        events: list[AnswerEvent] = []
        while self._held and (found := self._state()) is not None:
            events += found
        return events
