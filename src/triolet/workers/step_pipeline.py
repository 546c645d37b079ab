"""Steps that a runner was handed and whose results were not read yet: the device computes, and requests are read.

    request, step n+1 ──▶ submit ──▶ [n, n+1] ── n is done ──▶ result of n
                                       │ wait                    ▲
                                       └────── a thread ─────────┘ wakes the one that reads requests

Only the wait for the device is the thread's. All else happens where requests are read, so a runner needs no locks.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress

import attrs

from triolet.core.step_plan import StepPlan, StepResult, SubmittedStep, SubmittingRunner


@attrs.define(eq=False)
class _OpenStep:
    step: SubmittedStep
    is_done: bool


@attrs.frozen
class _FailedStep:
    """Step that could not be submitted: those before it have results."""

    error: Exception
    is_done: bool = True

    def wait(self) -> None:
        pass

    def result(self) -> StepResult:
        raise self.error


class StepPipeline:
    """Open steps of one runner, in their order.

    Args:
        runner: computes them.
        wake: called in another thread when a step is done: then `finished` has results.
    """

    def __init__(self, runner: SubmittingRunner, wake: Callable[[], None]) -> None:
        self._runner, self._wake = runner, wake
        self._open: deque[_OpenStep] = deque()
        self._unfinished: queue.SimpleQueue[_OpenStep] = queue.SimpleQueue()
        self._waiter: threading.Thread | None = None

    def submit(self, plan: StepPlan) -> None:
        """Hand a plan of one step to the runner. What that raises is raised by its result."""
        step: SubmittedStep
        try:
            step = self._runner.submit(plan)
        except Exception as error:
            step = _FailedStep(error)
        opened = _OpenStep(step, step.is_done)
        self._open.append(opened)
        if not opened.is_done:
            if self._has_waiter():
                self._unfinished.put(opened)
            else:
                _await_end(opened)

    def finished(self) -> Iterator[StepResult]:
        """Give the results that are there, up to the first step that is being computed."""
        while self._open and self._open[0].is_done:
            yield self._open.popleft().step.result()

    def drain(self) -> Iterator[StepResult]:
        """Give the results of all steps."""
        while self._open:
            yield self._open.popleft().step.result()

    def _has_waiter(self) -> bool:
        """Start the thread that waits, unless there is one; False if none can be started now."""
        if self._waiter is None:
            waiter = threading.Thread(target=self._watch, name="triolet-steps", daemon=True)
            try:
                waiter.start()
            except (RuntimeError, MemoryError):
                return False
            self._waiter = waiter
        return True

    def _watch(self) -> None:
        while True:
            _await_end(self._unfinished.get())
            self._wake()


def _await_end(opened: _OpenStep) -> None:
    with suppress(Exception):  # its result raises it again
        opened.step.wait()
    opened.is_done = True
