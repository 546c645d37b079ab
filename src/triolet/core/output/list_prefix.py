"""What a list had at one time, without a copy of it.

A CUMULATIVE stream of n tokens hands out n outputs, each with all tokens so far. Copies would make that n * n work, and
the list itself would change in the reader's hands. But a list that only grows keeps its beginning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TypeVar, overload

T = TypeVar("T")


class ListPrefix(Sequence[T]):
    """The first `length` items of a list to which items are only ever appended; equal to any sequence of the same.

    Args:
        items: the list; nobody may change what it has.
        length: how many of them, from now on and for ever.
    """

    __slots__ = ("_items", "_length")

    def __init__(self, items: list[T], length: int) -> None:
        self._items = items
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[T]:
        return islice(self._items, self._length)

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...

    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        if isinstance(index, slice):
            return tuple(self._items[place] for place in range(*index.indices(self._length)))
        if not -self._length <= index < self._length:
            raise IndexError(f"index must be in [-{self._length}, {self._length}); got {index}")
        return self._items[index if index >= 0 else index + self._length]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str | bytes) or not isinstance(other, Sequence):
            return NotImplemented
        return len(other) == self._length and all(a == b for a, b in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))
