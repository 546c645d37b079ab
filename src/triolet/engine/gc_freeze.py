"""Exclusion of long-lived objects from Python's garbage collection while an engine is open.

Theory of operation
-------------------
A full collection visits every object. The libraries that load a model have hundreds of thousands of them; a visit takes
40 ms and more, in the middle of streams, again and again, and finds nothing. So the objects that exist once an engine
has been opened are frozen (`gc.freeze`), and full collections are short from then on.

A frozen object that becomes garbage in a reference cycle is not found either, so a program that opens one engine after
the other would grow. Therefore an engine that opens first collects the remains of earlier ones, and when the last
engine closes everything is unfrozen. In a program that freezes objects itself nothing is done: its objects could not be
told from ours.

A server adds objects of its own after that, 60 for each connection: with two thousand of them a full collection takes
130 ms again, and Python starts one whenever their number has grown by a quarter. Therefore a server decides itself when
(`FullCollections`): rarely while they find little, soon where they find much, and while nothing happens; and not while
there are far more objects than usual, as of a body of four megabytes that is being read: they make the visit long, and
soon leave without it.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NoReturn

import attrs
import trio

INTERPRETERS_OWN = 1_000
"""Objects that the interpreter may have frozen itself: Python 3.12 freezes 375. A program has thousands from its start,
so a larger count means that it has frozen its own."""


CHECK_INTERVAL_S: Final = 1.0
# Of a young collection, which is due after 700 new objects, and of a middle one, after so many young ones: 3,500
# objects take 5 ms. The last is never reached.
THRESHOLDS: Final = (700, 5, 10**9)


class _Settlement:
    """Number of open engines, and of the objects frozen for them. Engines may be in different threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_engines = 0
        self._num_objects = INTERPRETERS_OWN  # frozen after our last change

    def began(self) -> None:
        """Count an engine that has opened, and freeze its objects."""
        with self._lock:
            self._num_engines += 1
            if self._is_ours():
                gc.unfreeze()
                self._set_aside()

    def went_on(self) -> None:
        """Freeze the objects that have been added since."""
        with self._lock:
            if self._is_ours():
                self._set_aside()

    def forgot(self) -> None:
        """Collect the frozen objects that have become garbage."""
        with self._lock:
            if self._num_engines and self._is_ours():
                gc.unfreeze()
                self._set_aside()

    def ended(self) -> None:
        """Count an engine that closes; unfreeze everything after the last one."""
        with self._lock:
            self._num_engines -= 1
            if not self._num_engines and self._is_ours():
                gc.unfreeze()
                self._num_objects = INTERPRETERS_OWN

    def _is_ours(self) -> bool:
        """Return True if the program has frozen no objects itself."""
        # Not an equality: frozen objects that are freed by their reference count are no longer counted.
        return gc.get_freeze_count() <= self._num_objects

    def _set_aside(self) -> None:
        gc.collect()
        gc.freeze()
        self._num_objects = gc.get_freeze_count()


_settlement = _Settlement()


@contextmanager
def frozen_gc() -> Iterator[None]:
    """Freeze existing objects for the life of an engine that has loaded its model."""
    _settlement.began()
    try:
        yield
    finally:
        _settlement.ended()


def collect_frozen() -> None:
    """Free what was frozen for an engine that has given up its model: circles keep its tensors alive otherwise."""
    _settlement.forgot()


def freeze_gc() -> None:
    """Freeze the objects that were added since an engine was opened; for long-running programs that have started."""
    _settlement.went_on()


@attrs.define
class FullCollections:
    """Decision when a full collection is due, by what the ones before have found.

    Args:
        max_garbage: objects that may wait to be found; an object has some 100 bytes.
        min_middle: middle collections between two full ones, at least.
        max_middle: likewise, at most.
        max_growth: growth of memory, by which a collection that is due is put off: times what the last one has left.
        max_put_off: times in a row that it is put off; what has grown may be the garbage itself.
        max_put_off_quiet: likewise, while nothing happens: no body is being read, and what has grown is garbage.
        num_blocks: allocated blocks of memory at the start, later those after the last collection.
    """

    max_garbage: int = 100_000
    min_middle: int = 10
    max_middle: int = 2000
    max_growth: float = 1.25
    max_put_off: int = 60
    max_put_off_quiet: int = 5
    _num_blocks: float = float("inf")
    # Until one has told how much they find. Requests leave nothing, so the first one is no hurry.
    _limit: float = attrs.field(default=500.0, init=False)
    _num_middle: int = attrs.field(default=0, init=False)  # at the last check
    _num_put_off: int = attrs.field(default=0, init=False)
    _num_quiet: int = attrs.field(default=0, init=False)  # checks in a row

    def is_due(self, num_middle: int, num_blocks: int) -> bool:
        """Return whether to collect now.

        Args:
            num_middle: middle collections since the last full one; asked for again and again.
            num_blocks: allocated blocks of memory, a measure of the number of objects.
        """
        is_quiet = num_middle == self._num_middle
        self._num_middle = num_middle
        self._num_quiet = self._num_quiet + 1 if is_quiet else 0
        if num_middle < (self.min_middle if is_quiet else self._limit):
            return False
        self._num_put_off += 1
        if self._num_quiet > self.max_put_off_quiet or self._num_put_off > self.max_put_off:
            return True
        return num_blocks <= self.max_growth * self._num_blocks

    def note_result(self, num_middle: int, num_found: int, num_blocks: int) -> None:
        """Learn from a full collection.

        Args:
            num_middle: middle collections before it.
            num_found: objects that it freed.
            num_blocks: allocated blocks of memory that it left.
        """
        self._num_middle = self._num_put_off = 0
        self._num_blocks = num_blocks
        until_full = num_middle * self.max_garbage / max(num_found, 1)
        self._limit = min(max(until_full, self.min_middle), self.max_middle)


async def collect_rarely() -> NoReturn:
    """Replace Python's rule for full collections until cancelled; for the process of a server, which is its own."""
    thresholds = gc.get_threshold()
    gc.set_threshold(*THRESHOLDS)
    collections = FullCollections(num_blocks=sys.getallocatedblocks())
    try:
        while True:
            await trio.sleep(CHECK_INTERVAL_S)
            num_middle = gc.get_count()[2]
            if collections.is_due(num_middle, sys.getallocatedblocks()):
                collections.note_result(num_middle, gc.collect(), sys.getallocatedblocks())
    finally:
        gc.set_threshold(*thresholds)
