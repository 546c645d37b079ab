"""Parsers of a single tool call: from characters to events."""

from __future__ import annotations

from collections.abc import Callable

from triolet.core.tools.events import AnswerEvent, ToolCallArguments, ToolCallBegin, ToolCallEnd
from triolet.core.tools.scanning import CallScanner, parsed


class CallWriter:
    """Builder of the events of one call."""

    def __init__(self, index: int, name: str) -> None:
        self._index, self._name = index, name
        self._arguments: list[str] = []

    def begin(self) -> list[AnswerEvent]:
        """Begin the call."""
        return [ToolCallBegin(self._index, self._name)]

    def arguments(self, text: str) -> list[AnswerEvent]:
        """Append text to the arguments; an empty text gives no event."""
        self._arguments.append(text)
        return [ToolCallArguments(self._index, text)] if text else []

    def end(self) -> list[AnswerEvent]:
        """End the call."""
        arguments = "".join(self._arguments)
        is_valid = isinstance(parsed(arguments), dict)
        return [ToolCallEnd(self._index, self._name, arguments, is_valid)]


class ObjectCall:
    """Tool call that is written as one JSON object.

    It begins once its name is known and its arguments have begun. Text read before that is kept, so that it can be
    returned if it turns out to be no call.

    Args:
        lead: text that announced it, such as a marker.
        is_name: tell whether a name can be that of a function.
        needs_arguments: an object without arguments is no call.
    """

    def __init__(
        self, index: int, lead: str, *, is_name: Callable[[str], bool] = bool, needs_arguments: bool = False
    ) -> None:
        self._index = index
        self._scanner = CallScanner()
        self._writer: CallWriter | None = None
        self._is_name = is_name
        self._needs_arguments = needs_arguments
        self._raw = [lead]

    @property
    def has_begun(self) -> bool:
        """True once the begin event was returned."""
        return self._writer is not None

    @property
    def is_whole(self) -> bool:
        """True once its last bracket was read, if it is a call."""
        return self._scanner.is_over and self.has_begun

    @property
    def is_broken(self) -> bool:
        """True if it is not a call, or not a valid one any more."""
        scanner = self._scanner
        if scanner.is_broken or self.has_begun:
            return scanner.is_broken
        return scanner.is_over or (scanner.name is not None and not self._is_name(scanner.name))

    @property
    def raw(self) -> str:
        """Text that was read before it had begun."""
        return "".join(self._raw)

    def take(self, text: str) -> tuple[int, list[AnswerEvent]]:
        """Read on; return how many characters were used, and the new events."""
        end = self._scanner.take(text)
        events: list[AnswerEvent] = []
        if self._writer is None:
            self._raw.append(text[:end])
            events += self._try_to_begin()
        if self._writer is not None:
            events += self._writer.arguments(self._scanner.take_arguments())
        return end, events

    def _try_to_begin(self) -> list[AnswerEvent]:
        scanner = self._scanner
        # Not before its name: until then it may still be text.
        if scanner.name is None or scanner.is_broken or not self._is_name(scanner.name):
            return []
        # A function without parameters may be called without arguments, which clients get as `{}`.
        takes_none = scanner.is_over and not scanner.has_arguments and not self._needs_arguments
        if not scanner.has_arguments and not takes_none:
            return []
        self._writer = CallWriter(self._index, scanner.name)
        return [*self._writer.begin(), *(self._writer.arguments("{}") if takes_none else [])]

    def end(self) -> list[AnswerEvent]:
        """End the call: no more of it will come."""
        return self._writer.end() if self._writer is not None else []
