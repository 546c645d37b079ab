"""Scanners of marked and JSON text that arrives in pieces; no text is read twice or held back longer than needed.

Both scanners are automata over characters. The result does not depend on how the text is cut into pieces, and no input
makes them slow: there is no backtracking, and the only stack is that of open brackets.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import Enum, auto
from typing import NoReturn

import attrs

WHITESPACE = " \t\r\n"
_CLOSING = {"{": "}", "[": "]"}


def split_at_marker(text: str, markers: Sequence[str]) -> tuple[str, str | None, str]:
    """Split the text at the first of some markers.

    Args:
        text: what has come and was not passed on.
        markers: none of them empty, none the beginning of another.
    Returns:
        The text before the marker, the marker and the text behind it; or, without one, the text that can be passed on,
        None, and the tail that may be the beginning of a marker.
    """
    # The first one in the text, not the first one of the list.
    found = [(place, marker) for marker in markers if (place := text.find(marker)) >= 0]
    if found:
        place, marker = min(found)
        return text[:place], marker, text[place + len(marker) :]
    held = max((_num_begun(text, marker) for marker in markers), default=0)
    return text[: len(text) - held], None, text[len(text) - held :]


def _num_begun(text: str, marker: str) -> int:
    """Return how many characters at the end of the text are a beginning of the marker."""
    longest = min(len(text), len(marker) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(marker[:length])), 0)


@attrs.define
class ValueScanner:
    """Scanner that finds the end of one JSON value. It looks at brackets and strings only; `json` checks the rest."""

    is_over: bool = False
    is_broken: bool = False
    _open: list[str] = attrs.field(factory=list)
    _in_string: bool = False
    _is_escaped: bool = False
    _is_scalar: bool = False

    def take(self, text: str, start: int) -> int:
        """Read on; return the place behind the last character that belongs to the value."""
        for place in range(start, len(text)):
            char = text[place]
            # No JSON has it outside of strings, and most marks begin with it.
            if char == "<" and not self._in_string:
                self.is_broken = True
                return place
            # A number, true, false or null has no last character of its own.
            if self._is_scalar and (char in ",]}" or char in WHITESPACE):
                self.is_over = True
                return place
            self._step(char)
            if self.is_over or self.is_broken:
                return place + 1
        return len(text)

    def _step(self, char: str) -> None:
        if self._in_string:
            self._step_in_string(char)
        elif char == '"':
            self._in_string = True
        elif char in _CLOSING:
            self._open.append(_CLOSING[char])
        elif char in "]}":
            self.is_broken = not self._open or self._open.pop() != char
            self.is_over = not self._open and not self.is_broken
        elif not self._open:
            self._is_scalar = True

    def _step_in_string(self, char: str) -> None:
        # One character only: what follows is read as ever.
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._in_string = False
            self.is_over = not self._open


class _Place(Enum):
    """Position of a `CallScanner` in its object."""

    BEFORE_OBJECT = auto()
    BEFORE_KEY = auto()
    IN_KEY = auto()
    BEFORE_COLON = auto()
    BEFORE_VALUE = auto()
    IN_VALUE = auto()
    BEHIND_VALUE = auto()
    BEHIND_OBJECT = auto()


class CallScanner:
    """Scanner of `{"name": ..., "arguments": ...}`, in either order, or with `parameters` for `arguments`.

    Attributes:
        name: of the function, once it has been read.
        has_arguments: whether they have begun.
        is_broken: this is no such object.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.has_arguments = False
        self.is_broken = False
        self._place = _Place.BEFORE_OBJECT
        self._value = ValueScanner()
        self._key = ""
        self._part: list[str] = []
        self._fresh: list[str] = []
        self._is_quoted = False

    @property
    def is_over(self) -> bool:
        """True once the object's last bracket has been read."""
        return self._place is _Place.BEHIND_OBJECT

    def take_arguments(self) -> str:
        """Return the text of the arguments that has come since the last call."""
        fresh = "".join(self._fresh)
        self._fresh.clear()
        return fresh

    def take(self, text: str) -> int:
        """Read on until more is known: the name, the beginning of the arguments, the end of the object or an error.

        Returns:
            How many characters were used up.
        """
        place, known = 0, self._known
        while place < len(text) and self._known == known:
            if self._place in (_Place.IN_KEY, _Place.IN_VALUE):
                place = self._take_part(text, place)
            else:
                place += self._step(text[place])
        return place

    @property
    def _known(self) -> tuple[bool, ...]:
        return self.name is not None, self.has_arguments, self.is_over, self.is_broken

    def _step(self, char: str) -> int:
        """Read one character between the parts; return how many were used.

        The first one of a part is left to it, and the one that breaks the object to what may begin with it.
        """
        if char in WHITESPACE:
            return 1
        match self._place, char:
            case _Place.BEFORE_OBJECT, "{":
                self._place = _Place.BEFORE_KEY
            case _Place.BEFORE_KEY, '"':
                return self._begin(_Place.IN_KEY)
            case _Place.BEFORE_COLON, ":":
                self._place = _Place.BEFORE_VALUE
            case _Place.BEFORE_VALUE, _:
                return self._begin_value(char)
            case _Place.BEHIND_VALUE, ",":
                self._place = _Place.BEFORE_KEY
            case ((_Place.BEHIND_VALUE | _Place.BEFORE_KEY), "}"):
                self._place = _Place.BEHIND_OBJECT
            case _:
                self.is_broken = True
                return 0
        return 1

    def _begin(self, place: _Place) -> int:
        self._place, self._value, self._part = place, ValueScanner(), []
        return 0

    def _begin_value(self, char: str) -> int:
        if self._is_arguments:
            self.is_broken = self.has_arguments  # twice
            self.has_arguments = True
            # Some models write the arguments as a string that holds JSON. It can be read when all of it is there.
            self._is_quoted = char == '"'
        return self._begin(_Place.IN_VALUE)

    @property
    def _is_arguments(self) -> bool:
        return self._key in ("arguments", "parameters")

    def _take_part(self, text: str, start: int) -> int:
        end = self._value.take(text, start)
        piece = text[start:end]
        if self._place is _Place.IN_VALUE and self._is_arguments and not self._is_quoted:
            self._fresh.append(piece)
        else:
            self._part.append(piece)
        self.is_broken = self._value.is_broken
        if self._value.is_over:
            self._end_part("".join(self._part))
        return end

    def _end_part(self, part: str) -> None:
        if self._place is _Place.IN_KEY:
            self._key, self._place = as_string(part) or "", _Place.BEFORE_COLON
            return
        self._place = _Place.BEHIND_VALUE
        if self._key == "name":
            self.is_broken = self.name is not None or not as_string(part)
            self.name = self.name or as_string(part)
        elif self._is_arguments and self._is_quoted:
            self._fresh.append(as_string(part) or part)


def as_string(text: str) -> str | None:
    """Return the string that a JSON text holds; None if it holds something else."""
    value = parsed(text)
    return value if isinstance(value, str) else None


def parsed(text: str) -> object:
    """Return the value of a JSON text; None if it is not valid."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):  # nested deeper than the interpreter's stack
        return None


def _refuse(constant: str) -> NoReturn:
    """Refuse NaN and Infinity, which Python reads, and clients do not."""
    raise ValueError(f"{constant} is no JSON")
