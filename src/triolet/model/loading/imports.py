"""Import of the modules that compute, which takes most of the time of a start."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

NEVER: Final = 10**9


class _FullCollections:
    """Python's rule for full garbage collections, which several threads may suspend at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_scopes = 0
        self._threshold = 0  # of the program

    def suspend(self) -> None:
        with self._lock:
            if not self._num_scopes:
                young, middle, self._threshold = gc.get_threshold()
                gc.set_threshold(young, middle, NEVER)
            self._num_scopes += 1

    def resume(self) -> None:
        with self._lock:
            self._num_scopes -= 1
            young, middle, threshold = gc.get_threshold()
            if not self._num_scopes and threshold == NEVER:  # nothing else has set it meanwhile
                gc.set_threshold(young, middle, self._threshold)


_full_collections = _FullCollections()


@contextmanager
def no_full_collections() -> Iterator[None]:
    """Let no full garbage collection begin by itself in this scope, in any thread.

    While torch is imported, Python would start four of them, each of which visits some hundred thousand objects that
    are there to stay: an eighth of the time. Young objects are collected as ever.
    """
    _full_collections.suspend()
    try:
        yield
    finally:
        _full_collections.resume()
