"""Parsers of answers that a grammar forces to be calls (`tool_choice` required, or a function's name): plain JSON."""

from __future__ import annotations

from triolet.core.tools.calls import CallWriter, ObjectCall
from triolet.core.tools.events import AnswerEvent
from triolet.core.tools.scanning import WHITESPACE


class ArgumentsFormat:
    """Format of an answer that consists of the arguments of one known function."""

    def __init__(self, name: str) -> None:
        self._writer = CallWriter(0, name)
        self._has_begun = False

    def feed(self, text: str) -> list[AnswerEvent]:
        if not self._has_begun and not (text := text.lstrip(WHITESPACE)):
            return []
        begin = [] if self._has_begun else self._writer.begin()
        self._has_begun = True
        return [*begin, *self._writer.arguments(text)]

    def finish(self) -> list[AnswerEvent]:
        return self._writer.end() if self._has_begun else []


class CallListFormat:
    """Format of an answer that is a JSON list of calls, `[{"name": ..., "parameters": {...}}, ...]`."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._call: ObjectCall | None = None
        self._held = ""

    def feed(self, text: str) -> list[AnswerEvent]:
        self._held += text
        events: list[AnswerEvent] = []
        while self._held:
            if self._call is None:
                self._held = self._held.lstrip(WHITESPACE + "[,]")
                if not self._held:
                    break
                self._call = ObjectCall(self._num_calls, "")
            num_used, found = self._call.take(self._held)
            if not num_used and self._call.is_broken:
                num_used = 1  # no call begins with this character
            self._held = self._held[num_used:]
            events += found
            if self._call.is_whole or self._call.is_broken:
                events += self._end_call()
        return events

    def _end_call(self) -> list[AnswerEvent]:
        call, self._call = self._call, None
        if call is None or not call.has_begun:
            return []
        self._num_calls += 1
        return call.end()

    def finish(self) -> list[AnswerEvent]:
        return self._end_call()
