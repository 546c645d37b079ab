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
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERPRETERS_OWN = 1_000
"""Objects that the interpreter may have frozen itself: Python 3.12 freezes 375. A program has thousands from its start,
so a larger count means that it has frozen its own."""


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


def freeze_gc() -> None:
    """Freeze the objects that were added since an engine was opened; for long-running programs that have started."""
    _settlement.went_on()
