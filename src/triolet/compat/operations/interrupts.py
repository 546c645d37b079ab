"""Ctrl-C while an `LLMEngine` changes its state: held back until that is whole.

The handler of SIGINT raises KeyboardInterrupt between any two instructions of the main thread. In the middle of the
scheduler's work that would leave counts that do not agree, and no later call could use the engine.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], object]


class HeldInterrupts:
    """Interrupts that wait while one engine changes its state; in other threads than the main one there are none."""

    def __init__(self) -> None:
        self._handler: Handler | None = None  # of the program, while interrupts are held
        self._came: tuple[int, FrameType | None] | None = None  # arguments of the handler

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold interrupts in this scope; one that came is raised at its end."""
        handler: Any = signal.getsignal(signal.SIGINT)
        is_main = threading.current_thread() is threading.main_thread()
        if self._handler is not None or not callable(handler) or not is_main:
            yield
            return
        try:
            self._handler = handler
            signal.signal(signal.SIGINT, self._note)
            yield
        finally:
            signal.signal(signal.SIGINT, handler)
            self._handler = None
            self._raise(handler)

    @contextmanager
    def let_through(self) -> Iterator[None]:
        """Raise interrupts in this scope, within one of `held`."""
        if (handler := self._handler) is None:
            yield
            return
        try:
            signal.signal(signal.SIGINT, handler)
            self._raise(handler)
            yield
        finally:
            signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = number, frame

    def _raise(self, handler: Handler) -> None:
        came, self._came = self._came, None
        if came is not None:
            handler(*came)
