"""Keeping Python's garbage collector from what is there to stay.

A full collection looks at every object. The libraries that a model is loaded with are hundreds of thousands; looking
through them takes 40 ms and more, in the middle of streams, again and again, and finds nothing. So what there is once
an engine has been opened is set aside (`gc.freeze`), and full collections are short from then on.

What is set aside and then dropped in a circle is not found either: a program that opens one engine after the other
would grow. So an engine that opens has the remains of earlier ones collected, and when the last one closes nothing is
set aside any more. A program that sets objects aside itself is left alone: nothing can tell its objects from ours.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERPRETERS_OWN = 1_000
"""Objects; Python 3.12 sets 375 aside by itself, and has thousands when a program's first line runs."""


class _Settlement:
    """What the engines of this process have set aside, from whatever threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_engines = 0
        self._num_objects = INTERPRETERS_OWN  # that were set aside, when we last did so

    def began(self) -> None:
        """One more engine is there."""
        with self._lock:
            self._num_engines += 1
            if self._is_ours():
                gc.unfreeze()
                self._set_aside()

    def went_on(self) -> None:
        """There is more now that is to stay."""
        with self._lock:
            if self._is_ours():
                self._set_aside()

    def ended(self) -> None:
        """One less."""
        with self._lock:
            self._num_engines -= 1
            if not self._num_engines and self._is_ours():
                gc.unfreeze()
                self._num_objects = INTERPRETERS_OWN

    def _is_ours(self) -> bool:
        """Whether nobody else has set anything aside. Of what we did, objects that die by themselves are gone."""
        return gc.get_freeze_count() <= self._num_objects

    def _set_aside(self) -> None:
        gc.collect()
        gc.freeze()
        self._num_objects = gc.get_freeze_count()


_settlement = _Settlement()


@contextmanager
def frozen_gc() -> Iterator[None]:
    """Around the life of an engine that has loaded its model."""
    _settlement.began()
    try:
        yield
    finally:
        _settlement.ended()


def freeze_gc() -> None:
    """Set aside what has come since, too: for programs that have started and will run for long."""
    _settlement.went_on()
