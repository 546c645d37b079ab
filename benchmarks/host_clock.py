"""What the machine itself delays everything by: the host of a virtual one, or the hardware."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.sharedctypes import Synchronized
from typing import Any

import attrs

QUIET_MS = 2.0  # as late may a thread that comes before all others be on a quiet machine
_SLEEP_S = 0.001
_PRIORITY = 50  # of a real-time thread, which comes before all that have none


@attrs.define(eq=False)
class HostClock:
    """Lateness of one sleeping process on each core that comes before all programs there."""

    _latest_s: list[Synchronized[float]]
    _processes: list[Any]

    def take(self) -> float:
        """Return the most that any was late since the last call, milliseconds.

        Raises:
            RuntimeError: a process has ended; this user may not give it a real-time priority (sched(7)).
        """
        if not all(process.is_alive() for process in self._processes):
            raise RuntimeError("the clock has ended: its processes need the right to a real-time priority")
        latest_s = 0.0
        for one in self._latest_s:
            with one.get_lock():
                latest_s = max(latest_s, one.value)
                one.value = 0.0
        return round(1e3 * latest_s, 1)


@contextmanager
def host_clock() -> Iterator[HostClock]:
    """Run the clock."""
    context = multiprocessing.get_context("fork")
    latest_s: list[Synchronized[float]] = []
    processes: list[Any] = []
    try:
        for core in sorted(os.sched_getaffinity(0)):
            latest_s.append(context.Value("d", 0.0))
            processes.append(context.Process(target=_sleep, args=(core, latest_s[-1]), daemon=True))
            processes[-1].start()
        yield HostClock(latest_s, processes)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _sleep(core: int, latest_s: Synchronized[float]) -> None:
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))
    while True:
        due_s = time.monotonic() + _SLEEP_S
        time.sleep(_SLEEP_S)
        late_s = time.monotonic() - due_s
        with latest_s.get_lock():
            latest_s.value = max(latest_s.value, late_s)
