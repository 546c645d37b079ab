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
130 ms again, and Python starts one whenever their number has grown by a quarter. Therefore a server has a rule of its
own (`collect_in_short_steps`). Once a second the youngest objects are collected, at most some thousands, and all that
are left are frozen: no later collection visits them. What becomes garbage later, in a cycle, is frozen by then, and
shows in the memory that is in use: when that has grown, everything is unfrozen and collected, while nothing happens
(`FullCollections`).
"""

from __future__ import annotations

import gc
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NoReturn

import attrs
import trio

INTERPRETERS_OWN = 1_000
"""Objects that the interpreter may have frozen itself: Python 3.12 freezes 375. A program has thousands from its start,
so a larger count means that it has frozen its own."""


STEP_INTERVAL_S: Final = 1.0
MIDDLE_GENERATION: Final = 1
# Of a young collection, which is due after 700 new objects, and of a middle one, after so many young ones: 2,100
# objects take 3 ms. The last is never reached.
THRESHOLDS: Final = (700, 3, 10**9)

UNCOUNTED: Final = sys.maxsize
"""Instead of the number of frozen objects: counting them takes longer than a step shall, since it visits them all."""


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

    def took_step(self) -> None:
        """Collect the youngest objects, and freeze all that have been added since."""
        gc.collect(MIDDLE_GENERATION)
        with self._lock:
            if self._num_objects == UNCOUNTED or self._is_ours():
                gc.freeze()
                self._num_objects = UNCOUNTED

    def forgot(self) -> None:
        """Collect the frozen objects that have become garbage, too."""
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
    """Decision when everything is unfrozen and collected, by the memory that has come since the last time.

    Args:
        quiet_growth: of the memory in use after which it is due once nothing happens, times what the last one has left.
        num_quiet: steps in a row in which nothing has happened.
        busy_growth: likewise, though something happens, and of the least memory in `min_busy_steps` steps: requests
            come and go, and what stays may still be connections and no garbage.
        min_busy_steps: steps since the last one, where something happens in each.
        num_blocks: allocated blocks of memory, a measure of the number of objects; at the start, later after the last.
    """

    quiet_growth: float = 1.1
    num_quiet: int = 5
    busy_growth: float = 2.0
    min_busy_steps: int = 600
    num_blocks: int = attrs.field(kw_only=True)
    _num_quiet: int = attrs.field(default=0, init=False)
    _num_steps: int = attrs.field(default=0, init=False)  # in which `_least_blocks` was looked for
    _least_blocks: float = attrs.field(default=math.inf, init=False)  # allocated blocks in any of these steps

    def is_due(self, num_blocks: int, *, is_quiet: bool) -> bool:
        """Return whether to collect everything now; asked for in each step.

        Args:
            num_blocks: allocated blocks now.
            is_quiet: whether few objects have been made since the last step.
        """
        self._num_steps += 1
        self._num_quiet = self._num_quiet + 1 if is_quiet else 0
        if self._num_quiet >= self.num_quiet:
            return num_blocks >= self.quiet_growth * self.num_blocks
        self._least_blocks = min(self._least_blocks, num_blocks)
        if self._num_steps < self.min_busy_steps:
            return False
        is_due = self._least_blocks >= self.busy_growth * self.num_blocks
        self._num_steps, self._least_blocks = 0, math.inf
        return is_due

    def note_done(self, num_blocks: int) -> None:
        """Note that everything has been collected.

        Args:
            num_blocks: allocated blocks that are left.
        """
        self._num_quiet = self._num_steps = 0
        self._least_blocks = math.inf
        self.num_blocks = num_blocks


async def collect_in_short_steps(is_idle: Callable[[], bool]) -> NoReturn:
    """Replace Python's rule for full collections until cancelled; for the process of a server, which is its own.

    Args:
        is_idle: returns whether no request would be held up now.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(*THRESHOLDS)
    collections = FullCollections(num_blocks=sys.getallocatedblocks())
    # The next step after a full collection counts what is frozen, which takes 8 ms: here, and not amid streams.
    _settlement.took_step()
    try:
        while True:
            await trio.sleep(STEP_INTERVAL_S)
            is_quiet = gc.get_count()[2] == 0  # middle collections since the last step
            if not is_quiet:
                _settlement.took_step()
            if collections.is_due(sys.getallocatedblocks(), is_quiet=is_quiet and is_idle()):
                _settlement.forgot()
                _settlement.took_step()
                collections.note_done(sys.getallocatedblocks())
    finally:
        gc.set_threshold(*thresholds)
