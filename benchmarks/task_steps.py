"""Instrument that measures the task steps of an engine's event loop, by the wall clock and in processor time."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import attrs
import trio

from triolet.observability.loop_monitor import LONG_STEP_S, LoopMonitor


@attrs.define(eq=False)
class TaskSteps(LoopMonitor):
    """Loop monitor that also measures the processor time of steps, since wall time is longer on a busy machine."""

    longest_task: str = ""  # name of the task whose step was the longest by the wall clock
    longest_work_s: float = 0.0  # processor time of the step with most of it, seconds
    longest_work_task: str = ""  # name of the task of that step
    # Steps with more than LONG_STEP_S of it, by the names of their tasks.
    long_work: Counter[str] = attrs.field(factory=Counter)
    _last_work_s: float = attrs.field(factory=time.thread_time, init=False)

    def after_io_wait(self, timeout: float) -> None:
        super().after_io_wait(timeout)
        self._last_work_s = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        before_s = self.longest_s
        super().after_task_step(task)
        if self.longest_s > before_s:
            self.longest_task = task.name
        now_s = time.thread_time()
        work_s, self._last_work_s = now_s - self._last_work_s, now_s
        self.observe_work(work_s, task)

    def observe_work(self, work_s: float, task: trio.lowlevel.Task) -> None:
        """Count the processor time of a step."""
        if work_s > LONG_STEP_S:
            self.long_work[_short(task.name)] += 1
        if work_s > self.longest_work_s:
            self.longest_work_s, self.longest_work_task = work_s, task.name

    def take(self) -> dict[str, Any]:
        """Return what was measured since the last call, milliseconds."""
        found = {
            "over_10_ms": self.num_long,
            "longest_ms": round(1e3 * self.longest_s, 1),
            "longest_task": _short(self.longest_task),
            "over_10_ms_of_work": self.long_work.total(),
            "longest_work_ms": round(1e3 * self.longest_work_s, 1),
            "longest_work_task": _short(self.longest_work_task),
            "long_work_tasks": dict(self.long_work.most_common(5)),
        }
        self.longest_s = self.longest_work_s = 0.0
        self.num_long = 0
        self.long_work.clear()
        self.longest_task = self.longest_work_task = ""
        return found


def _short(name: str) -> str:
    """Return the last part of a task's name, that of its function."""
    return name.rpartition(".")[2]
