"""Loop monitor: the longest time that one task step has held the event loop.

A task that computes between two checkpoints delays all others, and averages do not show it. So every step is measured,
from the end of the step before (or of the wait for I/O) to its own end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import trio

LONG_STEP_S = 0.01


@attrs.define(eq=False)
class LoopMonitor(trio.abc.Instrument):
    """Trio instrument that measures task steps while installed."""

    longest_s: float = 0.0  # the longest step so far, seconds
    num_long: int = 0  # steps longer than LONG_STEP_S
    _last_s: float = attrs.field(factory=time.perf_counter, init=False)

    def after_io_wait(self, timeout: float) -> None:
        """Start timing: the wait for I/O is over."""
        self._last_s = time.perf_counter()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """Measure the step that has ended."""
        now_s = time.perf_counter()
        elapsed_s, self._last_s = now_s - self._last_s, now_s
        if elapsed_s > LONG_STEP_S:
            self.num_long += 1
        if elapsed_s > self.longest_s:
            self.longest_s = elapsed_s

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Install the instrument for a scope; call it in the Trio thread."""
        self._last_s = time.perf_counter()
        trio.lowlevel.add_instrument(self)
        try:
            yield
        finally:
            trio.lowlevel.remove_instrument(self)
