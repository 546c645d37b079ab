"""How long the event loop was kept from everybody else: the longest step of any task.

A task that computes between two checkpoints keeps all others waiting, and no profile of averages shows it. So every
step is measured. From the end of one step to the end of the next there is nothing but that step, and the loop's own
work; a step that waited for the operating system does not count what it waited.
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
    """Measures while it is installed.

    Args:
        longest_s: the longest step so far, seconds.
        longest_name: of its task.
        num_long: steps longer than LONG_STEP_S.
        num_steps: all of them.
    """

    longest_s: float = 0.0
    longest_name: str = ""
    num_long: int = 0
    num_steps: int = 0
    _last_s: float = attrs.field(factory=time.perf_counter, init=False)

    def after_io_wait(self, timeout: float) -> None:
        """Trio: the steps of the next tasks begin."""
        self._last_s = time.perf_counter()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """Trio: a task waits again, or has ended."""
        now_s = time.perf_counter()
        elapsed_s, self._last_s = now_s - self._last_s, now_s
        self.num_steps += 1
        if elapsed_s > LONG_STEP_S:
            self.num_long += 1
        if elapsed_s > self.longest_s:
            self.longest_s, self.longest_name = elapsed_s, task.name

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The scope in which it measures; from the Trio thread."""
        self._last_s = time.perf_counter()
        trio.lowlevel.add_instrument(self)
        try:
            yield
        finally:
            trio.lowlevel.remove_instrument(self)
