"""Calls into the workers, which the model runner makes between two steps.

A call waits here until the step that is being computed has ended; a run of several steps is ended early for it. What
it raises is its caller's, and the runner goes on. A call that kills the process of the runner, or takes too long in
it, is a crash of the runner: its caller gets an error, and the streams continue after the restart. It is not made
again, and does not count against the limit of restarts: the next one may be a call as well.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import trio

from triolet.core.worker_call import WorkerCall, WorkerOutcome
from triolet.errors import RunnerDied, WorkerCallError, WorkerCallTimeout


@attrs.define(eq=False)
class PendingCall:
    """A call that waits to be made, or for its end.

    Args:
        call: what to call.
        deadline_s: `trio.current_time()` at which its caller stops waiting; infinity for never.
        timeout_s: that its caller waits, and that the call may take from its own beginning, seconds; None for no limit.
        invalidates: whether it changes the weights, so that no KV computed before may be used after it.
    """

    call: WorkerCall
    deadline_s: float
    timeout_s: float | None
    invalidates: bool
    outcome: WorkerOutcome | None = None
    done: trio.Event = attrs.field(factory=trio.Event)

    def end(self, outcome: WorkerOutcome) -> None:
        """Set the outcome, unless there is one."""
        self.outcome = self.outcome or outcome
        self.done.set()


class WorkerCalls:
    """Calls that wait for the model runner.

    Args:
        wake: called when one has come.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self.waiting: deque[PendingCall] = (
            deque()
        )  # looked at after every step, so no method is called for it
        self.end_run: Callable[[], None] = lambda: None  # ends a run of steps after the present one
        # Calls that wait or run and change the weights: no step is planned meanwhile, since it would be computed after
        # the call from KV that was computed before it.
        self.num_invalidating = 0

    async def make(
        self, call: WorkerCall, timeout_s: float | None = None, *, invalidates: bool = False
    ) -> list[Any]:
        """Have a call made between two steps; return what each worker returns, raise what one raises.

        Raises:
            WorkerCallTimeout: it has not ended in time; a process that has been in it for as long is ended.
            RunnerDied: the process ended in it.
            EngineClosed: the engine ends before the call was made.
        """
        deadline_s = math.inf if timeout_s is None else trio.current_time() + timeout_s
        pending = PendingCall(call, deadline_s, timeout_s, invalidates)
        self.waiting.append(pending)
        self.num_invalidating += invalidates
        self.end_run()
        self._wake()
        try:
            with trio.move_on_at(deadline_s):
                await pending.done.wait()
        finally:
            if pending in self.waiting:  # left before it was made: it never is
                self.waiting.remove(pending)
                self.num_invalidating -= invalidates
                self._wake()  # the runner passes it on: the scheduler may plan again
        if pending.outcome is None:
            assert timeout_s is not None
            raise WorkerCallTimeout(call.name, timeout_s)
        if pending.outcome.error is not None:
            raise pending.outcome.error
        return [pending.outcome.value, *pending.outcome.others]

    def next(self) -> PendingCall | None:
        """Take the call that has waited for longest, among those that are still waited for."""
        now_s = trio.current_time()
        for pending in self.waiting:
            # The others are at their end: each caller removes its own call, in its next step.
            if pending.deadline_s > now_s:
                self.waiting.remove(pending)
                return pending
        return None

    def fail_all(self, error: Exception) -> None:
        """End the calls that wait: the engine makes no more."""
        while (pending := self.next()) is not None:
            self.num_invalidating -= pending.invalidates
            pending.end(WorkerOutcome(error=error))


class ReplicatedWorkerCalls(WorkerCalls):
    """Calls that are made by the model runners of all replicas.

    Args:
        parts: calls of each.
    """

    def __init__(self, parts: Sequence[WorkerCalls]) -> None:
        super().__init__(lambda: None)
        self._parts = parts
        self.parked: set[int] = set()  # replicas that are not needed now: they have no worker

    async def make(
        self, call: WorkerCall, timeout_s: float | None = None, *, invalidates: bool = False
    ) -> list[Any]:
        """Have a call made by each replica; return all results, those of the first replica first.

        Raises:
            Exception: the first error; see `WorkerCalls.make`.
        """
        results: dict[int, list[Any]] = {}
        errors: list[Exception] = []

        async def make_one(replica: int) -> None:
            try:
                results[replica] = await self._parts[replica].make(call, timeout_s, invalidates=invalidates)
            except Exception as error:
                errors.append(error)

        async with trio.open_nursery() as nursery:
            for replica in range(len(self._parts)):
                if replica not in self.parked:
                    nursery.start_soon(make_one, replica)
        if errors:
            raise errors[0]
        return [result for replica in sorted(results) for result in results[replica]]

    def fail_all(self, error: Exception) -> None:
        for part in self._parts:
            part.fail_all(error)

    def park(self, replica: int) -> None:
        """Make no further calls into a replica that has ended, and end those that wait for it."""
        self.parked.add(replica)
        self._parts[replica].fail_all(
            WorkerCallError(f"replica {replica} has ended before the call: it is not needed now")
        )


async def make_call(
    pending: PendingCall,
    perform: Callable[[WorkerCall, float | None], Any],
    step_timeout_s: float | None,
) -> None:
    """Make a call with an executor; `RunnerDied` and what else ends the runner is raised after the caller has it.

    Args:
        pending: the call.
        perform: `Executor.call`.
        step_timeout_s: after which a call without a time limit of its own counts as hung, seconds.
    """
    # From its own beginning: that it has waited for a step is no fault of the process, which would be killed for it.
    limit_s = step_timeout_s if pending.timeout_s is None else pending.timeout_s
    try:
        pending.end(await perform(pending.call, limit_s))
    except RunnerDied as death:
        error: Exception = death
        if death.is_hang and limit_s is not None:
            error = WorkerCallTimeout(pending.call.name, pending.timeout_s or limit_s)
            error.__cause__ = death
        pending.end(WorkerOutcome(error=error))
        raise
    except BaseException as error:
        # Cancelled, or an error of the executor; either ends this life of the runner.
        ended = WorkerCallError(f"the call of {pending.call.name} was broken off: the model runner ends")
        ended.__cause__ = error if isinstance(error, Exception) else None
        pending.end(WorkerOutcome(error=ended))
        raise
