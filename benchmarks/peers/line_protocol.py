"""Protocol between the worker of a peer and the benchmark that started it: a line of JSON each way.

The worker's first argument holds its options. When its model is loaded it reports that; then it gets requests, and
answers with their times, until its input ends. An error is reported in a line with `error`, and ends the worker. The
engine's own output goes to stderr.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Jobs = list[tuple[list[int], int, float]]
"""Requests: the prompt's ids, the tokens wanted, and when it comes, seconds from the beginning."""

Run = Callable[[Jobs], dict[str, Any]]
Start = Callable[[dict[str, Any]], tuple[dict[str, Any], Run]]


def serve(start: Start) -> None:
    """Load the engine, then run the rounds that arrive.

    Args:
        start: from options to what is said of the engine, and what runs requests: `Timer.figures` is what it returns.
    """
    _end_with_parent()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        facts, run = start(json.loads(sys.argv[1]))
        _say(out, facts)
        for line in sys.stdin:
            _say(out, run(json.loads(line)))
    except ModuleNotFoundError as error:
        _say(out, {"error": f"{error.name} is not installed there"})
        raise
    except Exception as error:
        _say(out, {"error": f"{type(error).__name__}: {error}"})
        raise


def _end_with_parent() -> None:
    """End this process with its parent: stopped peers of a killed benchmark would stay for ever."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _say(out: Any, facts: dict[str, Any]) -> None:
    print(json.dumps({**facts, "peak_mib": _peak_mib()}), file=out, flush=True)


def _peak_mib() -> float:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


class Timer:
    """Arrivals of the requests, and times of their tokens.

    Args:
        due_s: when each comes, seconds from the beginning, which is now; in any order.
        now: a clock, seconds.
        sleep: until so many seconds have passed by that clock.
    """

    def __init__(
        self,
        due_s: Sequence[float],
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._now, self._sleep = now, sleep
        self._begin = now()
        self._due_s = due_s
        self._coming = deque(sorted(range(len(due_s)), key=due_s.__getitem__))
        self._last: list[float | None] = [None] * len(due_s)
        self._ttft_s: list[float] = []
        self._itl_s: list[float] = []
        self.token_ids: list[list[int]] = [[] for _ in due_s]

    @property
    def awaits_more(self) -> bool:
        """Return True if there are requests that have not arrived."""
        return bool(self._coming)

    def arrivals(self, *, is_idle: bool) -> list[int]:
        """Return the requests that have arrived since the last call; when idle, wait for the next one."""
        if is_idle and self._coming:
            self._sleep(max(0.0, self._begin + self._due_s[self._coming[0]] - self._now()))
        elapsed_s = self._now() - self._begin
        come: list[int] = []
        while self._coming and (self._due_s[self._coming[0]] <= elapsed_s or (is_idle and not come)):
            come.append(self._coming.popleft())
        return come

    def note(self, row: int, token_ids: list[int]) -> None:
        """Note the time of some tokens of a request."""
        now, last = self._now(), self._last[row]
        if last is None:
            self._ttft_s.append(now - self._begin - self._due_s[row])
        else:
            self._itl_s.append(now - last)
        self._last[row] = now
        self.token_ids[row] += token_ids

    def figures(self) -> dict[str, Any]:
        """Return the times for the benchmark."""
        elapsed_s = self._now() - self._begin
        times = {"ttft_s": self._ttft_s, "itl_s": self._itl_s}
        return {"elapsed_s": elapsed_s, **times, "token_ids": self.token_ids}
