"""What the program of a peer speaks with the benchmark that started it: a line of JSON each way.

The first argument of the program are its options. When its model is loaded it says so; then it is given requests, and
answers with how long they took, until its input ends. Whatever the engine prints itself goes to the error stream.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[[list[list[Any]]], dict[str, Any]]
Start = Callable[[dict[str, Any]], tuple[dict[str, Any], Run]]


def serve(start: Start) -> None:
    """Load the engine, then run what comes in.

    Args:
        start: from options to what is said of the engine, and what runs requests: pairs of prompt ids and the number of
            tokens wanted, in; `elapsed_s`, `ttft_s`, `itl_s` and `token_ids` out.
    """
    _end_with_parent()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    facts, run = start(json.loads(sys.argv[1]))
    _say(out, facts)
    for line in sys.stdin:
        _say(out, run(json.loads(line)))


def _end_with_parent() -> None:
    """A benchmark that is killed leaves nobody behind: peers are stopped when it isn't their turn."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _say(out: Any, facts: dict[str, Any]) -> None:
    print(json.dumps({**facts, "peak_mib": _peak_mib()}), file=out, flush=True)


def _peak_mib() -> float:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


class Timer:
    """Notes when each request's tokens came.

    Args:
        count: of requests.
        now: a clock, seconds; it starts now.
    """

    def __init__(self, count: int, now: Callable[[], float]) -> None:
        self._now = now
        self._begin = now()
        self._last: list[float | None] = [None] * count
        self._ttft_s: list[float] = []
        self._itl_s: list[float] = []
        self.token_ids: list[list[int]] = [[] for _ in range(count)]

    def note(self, row: int, token_ids: list[int]) -> None:
        """Some tokens of a request have come."""
        now, last = self._now(), self._last[row]
        if last is None:
            self._ttft_s.append(now - self._begin)
        else:
            self._itl_s.append(now - last)
        self._last[row] = now
        self.token_ids[row] += token_ids

    def figures(self) -> dict[str, Any]:
        """What the benchmark is told at the end."""
        elapsed_s = self._now() - self._begin
        times = {"ttft_s": self._ttft_s, "itl_s": self._itl_s}
        return {"elapsed_s": elapsed_s, **times, "token_ids": self.token_ids}
