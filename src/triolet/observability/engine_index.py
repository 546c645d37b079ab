"""Numbers of the engines that are open in this process: the metrics' label `engine`."""

from __future__ import annotations

import gc
import threading


class EngineIndices:
    """Gives every open engine the smallest number that no other one has. Engines may be in different threads."""

    def __init__(self) -> None:
        # Reentrant: a garbage collection within it may end an engine, whose number is given back then.
        self._lock = threading.RLock()
        self._taken: set[int] = set()

    def take(self) -> int:
        """Return a number, and keep it from others until it is given back."""
        if self._taken:
            gc.collect()  # an `LLMEngine` has no end but this one: it may lie about, dropped in a reference cycle
        with self._lock:
            index = next(number for number in range(len(self._taken) + 1) if number not in self._taken)
            self._taken.add(index)
            return index

    def give_back(self, index: int) -> None:
        """Free the number of an engine that has closed."""
        with self._lock:
            self._taken.discard(index)


ENGINE_INDICES = EngineIndices()
