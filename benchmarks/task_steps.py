"""Instrument that measures the task steps of an engine's event loop, by three clocks.

The wall clock says how long other tasks waited. Where more threads want to run than there are processors, a step also
waits for one; less that wait, it is the wall clock of a quiet machine (`quiet`), which still has every wait for
Python's lock. Processor time (`work`) has no wait at all.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections import Counter
from typing import Any

import attrs
import trio

from triolet.observability.loop_monitor import LONG_STEP_S, LoopMonitor


class CpuWait:
    """Time that one thread has waited for a processor; 0 where the system does not tell."""

    def __init__(self) -> None:
        # `os.pread` lets go of Python's lock, and may wait for it: the loop would be held by what measures it.
        self._read = ctypes.PyDLL(None).pread
        self._read.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int64)
        self._read.restype = ctypes.c_ssize_t
        self._text = ctypes.create_string_buffer(100)
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            self._file = -1

    def seconds(self) -> float:
        """Return the wait so far of the thread that made this, seconds."""
        if self._file < 0:
            return 0.0
        self._read(self._file, self._text, len(self._text) - 1, 0)
        return int(self._text.value.split()[1]) / 1e9

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)


@attrs.define(eq=False)
class TaskSteps(LoopMonitor):
    """Loop monitor that also measures steps without their waits; made in the thread of the loop."""

    longest_task: str = ""  # name of the task whose step was the longest by the wall clock
    num_long_quiet: int = 0  # steps longer than LONG_STEP_S without what they waited for a processor
    longest_quiet_s: float = 0.0  # the longest of all steps so, seconds
    longest_quiet_task: str = ""  # name of the task of that step
    longest_work_s: float = 0.0  # processor time of the step with most of it, seconds
    longest_work_task: str = ""  # name of the task of that step
    # Steps with more than LONG_STEP_S of it, by the names of their tasks.
    long_work: Counter[str] = attrs.field(factory=Counter)
    _last_work_s: float = attrs.field(factory=time.thread_time, init=False)
    _cpu_wait: CpuWait = attrs.field(factory=CpuWait, init=False)
    _last_wait_s: float = attrs.field(init=False)

    @_last_wait_s.default
    def _(self) -> float:
        return self._cpu_wait.seconds()

    def after_io_wait(self, timeout: float) -> None:
        super().after_io_wait(timeout)
        self._last_wait_s = self._cpu_wait.seconds()
        self._last_work_s = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        before_s, began_s = self.longest_s, self._last_s
        super().after_task_step(task)
        if self.longest_s > before_s:
            self.longest_task = task.name
        wait_s = self._cpu_wait.seconds()
        quiet_s = self._last_s - began_s - (wait_s - self._last_wait_s)
        self._last_wait_s = wait_s
        self.observe_quiet(quiet_s, task)
        now_s = time.thread_time()
        work_s, self._last_work_s = now_s - self._last_work_s, now_s
        self.observe_work(work_s, task)

    def observe_quiet(self, quiet_s: float, task: trio.lowlevel.Task) -> None:
        """Count the time of a step without its wait for a processor."""
        if quiet_s > LONG_STEP_S:
            self.num_long_quiet += 1
        if quiet_s > self.longest_quiet_s:
            self.longest_quiet_s, self.longest_quiet_task = quiet_s, task.name

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
            "over_10_ms_quiet": self.num_long_quiet,
            "longest_quiet_ms": round(1e3 * self.longest_quiet_s, 1),
            "longest_quiet_task": _short(self.longest_quiet_task),
            "over_10_ms_of_work": self.long_work.total(),
            "longest_work_ms": round(1e3 * self.longest_work_s, 1),
            "longest_work_task": _short(self.longest_work_task),
            "long_work_tasks": dict(self.long_work.most_common(5)),
        }
        self.longest_s = self.longest_quiet_s = self.longest_work_s = 0.0
        self.num_long = self.num_long_quiet = 0
        self.long_work.clear()
        self.longest_task = self.longest_quiet_task = self.longest_work_task = ""
        return found


def _short(name: str) -> str:
    """Return the last part of a task's name, that of its function."""
    return name.rpartition(".")[2]
