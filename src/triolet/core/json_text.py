"""Read and write JSON whose length a client chooses, without holding the GIL for long.

Python's parser and encoder are one C call each, which no other thread can interrupt: a value of a hundred thousand
numbers stops the event loop for 10 ms, also where it is written in another thread. What is longer than `SHORT_CHARS`
is read and written by the pure Python code of the same library, which the interpreter can leave after each value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from json import scanner
from typing import Any, Final

# Length of a JSON text, characters, that is read or written in one C call: for less than 2 ms.
SHORT_CHARS: Final = 2**15


def is_longer(value: object, max_chars: int) -> bool:
    """Tell whether a value is longer as JSON; numbers count as their shortest, and what it holds twice counts once."""
    left, seen = [value], set[int]()
    while left and max_chars >= 0:
        item = left.pop()
        if isinstance(item, Mapping | list | tuple):
            if id(item) in seen:  # a value that contains itself is refused elsewhere
                continue
            seen.add(id(item))
        match item:
            case str(text):
                max_chars -= len(text) + 3  # its quotes, and a comma or a colon
            case Mapping() as members:
                left += members.keys()
                left += members.values()
                max_chars -= 3
            case list() | tuple() as items:
                left += items
                max_chars -= 3
            case _:
                max_chars -= 2
    return max_chars < 0


def encode(encoder: json.JSONEncoder, value: object) -> str:
    """Write a value as JSON; each text in a longer value is written in one C call.

    Raises:
        TypeError: `value` holds something that is no JSON.
        ValueError: it holds itself, or a number that the encoder does not allow.
    """
    if not is_longer(value, SHORT_CHARS):
        return encoder.encode(value)
    return "".join(encoder.iterencode(value))  # pure Python, other than `encode`


def loads(text: str) -> Any:
    """Read JSON.

    Raises:
        ValueError: it is no JSON.
        RecursionError: it is nested deeper than the stack is.
    """
    return json.loads(text, cls=None if len(text) <= SHORT_CHARS else _PureDecoder)


class _PureDecoder(json.JSONDecoder):
    """Decoder whose scanner is Python code; that of the parent class, in C, reads all values in one call."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.scan_once = scanner.py_make_scanner(self)  # type: ignore[attr-defined]  # absent from typeshed
