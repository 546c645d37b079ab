"""Read and write JSON whose length a client chooses, without holding the GIL for long.

Python's parser and encoder are one C call each, which no other thread can interrupt: a value of a hundred thousand
numbers stops the event loop for 10 ms, also where it is written in another thread. What is longer than `SHORT_CHARS`
is read and written by the pure Python code of the same library, which the interpreter can leave after each value.

That alone is not enough: the event loop lets go of the GIL at each system call, and waits for it each time behind a
thread that never pauses. So what works on a long value calls `between_windows` after each short piece, and a thread
that was told how gives way there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from io import StringIO
from json import scanner
from sys import getrefcount
from typing import Any, Final, TypeVar

# Length of a JSON text, characters, that is read or written in one C call: for less than 2 ms.
SHORT_CHARS: Final = 2**15
PIECE_ITEMS: Final = 64  # looked at, copied or written between two pauses: for some tens of microseconds

_CONTAINERS = (dict, list)

T = TypeVar("T")

between_windows: ContextVar[Callable[[], None]] = ContextVar("between_windows", default=lambda: None)
"""What is called after each piece of the work on a long value, of less than half a millisecond."""


def giving_way(items: Collection[T]) -> Iterable[T]:
    """Return the items of a list or a mapping, to iterate over; the thread gives way now and after each few of them."""
    give_way = between_windows.get()
    give_way()
    return items if len(items) <= PIECE_ITEMS else _with_pauses(items, give_way)


def _with_pauses(items: Iterable[T], give_way: Callable[[], None]) -> Iterator[T]:
    for place, item in enumerate(items, 1):
        yield item
        if place % PIECE_ITEMS == 0:
            give_way()


def is_longer(value: object, max_chars: int) -> bool:
    """Tell whether a value is longer as JSON; numbers count as their shortest, and what it holds twice counts once."""
    left, seen = [value], set[int]()
    give_way, num_seen = between_windows.get(), 0
    while left and max_chars >= 0:
        item = left.pop()
        num_seen += 1
        if num_seen % PIECE_ITEMS == 0:
            give_way()
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
    # Not joined at the end: the pieces of a deep value are so many that freeing their list is a long call, too.
    text, pieces = StringIO(), encoder.iterencode(value)  # pure Python, other than `encode`
    for piece in _with_pauses(pieces, between_windows.get()):
        text.write(piece)
    return text.getvalue()


def release(owned: list[Any]) -> list[Any]:
    """Free the values in a list, piece by piece: lists and dicts that nothing else refers to, and those inside of them.

    Freed at once, a value of a hundred thousand lists takes one C call of 10 ms and more.

    Args:
        owned: values as a parser makes them; it is emptied.
    Returns:
        Lists and dicts that something else refers to, unchanged; to be released once nothing does.
    """
    shared = []
    while owned:
        value, num_references = _popped(owned)
        if type(value) not in _CONTAINERS:
            continue
        if num_references > _NUM_REFERENCES_ALONE:
            shared.append(value)
            continue
        owned += [
            item
            for item in giving_way(value.values() if isinstance(value, dict) else value)
            if type(item) in _CONTAINERS
        ]
        if isinstance(value, dict):
            value.clear()
        else:
            for _ in giving_way(range(0, len(value), PIECE_ITEMS)):
                del value[-PIECE_ITEMS:]
    return shared


def _popped(owned: list[Any]) -> tuple[Any, int]:
    value = owned.pop()
    return value, getrefcount(value)


# Of a value that nothing else refers to. Measured, as an interpreter may count a local variable and an argument once.
_NUM_REFERENCES_ALONE: Final = _popped([[]])[1]


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
        give_way = between_windows.get()
        for name in ("parse_object", "parse_array", "parse_string", "parse_int", "parse_float"):
            setattr(self, name, _after(give_way, getattr(self, name)))
        self.scan_once = scanner.py_make_scanner(self)  # type: ignore[attr-defined]  # absent from typeshed


def _after(give_way: Callable[[], None], parse: Callable[..., T]) -> Callable[..., T]:
    def run(*arguments: Any) -> T:
        give_way()
        return parse(*arguments)

    return run
