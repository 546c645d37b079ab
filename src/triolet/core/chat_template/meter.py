"""Work budget of one rendering, counted without a clock, so that the same template always costs the same.

One unit is a fraction of a microsecond: a step of a loop, a call, an item looked at, or `CHARS_PER_UNIT` characters. An
operation whose cost depends on its operands is charged *before* it runs, so the same number bounds memory, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

CHARS_PER_UNIT = 64
"""Characters that are copied, compared or searched in about the time of one unit."""

MAX_INT_BITS = 1024
"""Longest integer that may be computed; longer ones multiply slowly, and no prompt holds one."""

MAX_NESTING = 100
"""Deepest nesting of values that are compared or turned into text."""

_EMPTY: dict[str, object] = {}
_VIEWS = (type(_EMPTY.keys()), type(_EMPTY.values()), type(_EMPTY.items()))
_COLLECTIONS = (list, tuple, set, frozenset, *_VIEWS)


class LimitReached(Exception):
    """Error: a template exceeded one of its limits; the message says which."""


class Meter:
    """Counter of the work of one rendering.

    Args:
        max_work: units it may cost.
    """

    def __init__(self, max_work: int) -> None:
        self._max_work = max_work
        self._work = 0

    @property
    def work(self) -> int:
        """Units charged so far."""
        return self._work

    def charge(self, units: int) -> None:
        """Add `units` of work; a negative number counts as 0.

        Raises:
            LimitReached: that was too much, and everything after it is.
        """
        self._work += max(0, units)
        if self._work > self._max_work:
            raise LimitReached(f"its work passed the limit of {self._max_work} units")

    def charge_text(self, num_chars: int) -> None:
        """Charge for making or reading a text of this length."""
        self.charge(1 + num_chars // CHARS_PER_UNIT)

    def weigh(self, *values: object) -> int:
        """Charge for reading values completely, every item of every list as often as it occurs.

        That is what it costs to compare them or to turn them into text. A value that holds another many times,
        on many levels, may be small in memory and endless as text.

        Returns:
            The units charged.
        """
        before = self._work
        waiting: list[tuple[Iterable[Any], int]] = [(values, 0)]
        while waiting:
            items, nesting = waiting.pop()
            if nesting > MAX_NESTING:
                raise LimitReached(f"its values were nested deeper than the limit of {MAX_NESTING} levels")
            units = 0
            for item in items:
                units += 1
                if isinstance(item, str):
                    units += len(item) // CHARS_PER_UNIT
                elif isinstance(item, dict):
                    units += 1
                    waiting += [(item.keys(), nesting + 1), (item.values(), nesting + 1)]
                elif isinstance(item, _COLLECTIONS):
                    units += 1
                    waiting.append((item, nesting + 1))
                elif isinstance(item, range):
                    units += len(item)
            self.charge(units)
        return self._work - before

    def check_bits(self, num_bits: int) -> None:
        """Refuse integers that are too long to compute with."""
        if num_bits > MAX_INT_BITS:
            raise LimitReached(f"an integer passed the limit of {MAX_INT_BITS} bits")

    def passed(self, value: Any) -> Any:
        """Charge for a value just computed, and return it."""
        if isinstance(value, str):
            self.charge_text(len(value))
        elif isinstance(value, (*_COLLECTIONS, dict)):
            self.charge(len(value))
        elif isinstance(value, int):
            self.check_bits(value.bit_length())
        return value

    def each(self, items: Iterable[Any], units: int) -> Iterator[Any]:
        """Yield the items one by one, charging `units` for each."""
        for item in items:
            self.charge(units)
            yield item
