"""Replicas that come and go: each is supervised while it is wanted, and parked without a worker otherwise.

`core.replicas.autoscale` decides how many there should be. A parked replica is started when one more is wanted and a
worker waits for it. One too many gets nothing new, finishes what it has, and is parked: its worker is free again. One
that crashes too often, or cannot be started, is parked as well, its requests go to the others, and it is tried again
after a pause.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import attrs
import trio

from triolet.actors.executors.contract import WorkerSupply
from triolet.actors.supervisor import ChildStart, foreign_errors_kept, root_cause
from triolet.actors.worker_calls import ReplicatedWorkerCalls
from triolet.core.recovery.supervision import Backoff
from triolet.core.replicas.autoscale import AutoscalePolicy
from triolet.core.replicas.replicated_core import ReplicatedCore

logger = logging.getLogger("triolet.supervisor")

LOOK_S = 1.0  # between two looks at the load
MIN_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0  # until a replica that has failed is tried again


@attrs.define(eq=False)
class FurtherReplica:
    """Replica beyond those that an engine begins with.

    Args:
        number: of the replica.
        core: of the engine.
        supervise: runs its actors until it is cancelled.
        calls: into the workers of the engine.
        forget: called when it has ended, for what is being restarted of it.
    """

    number: int
    core: ReplicatedCore
    supervise: ChildStart
    calls: ReplicatedWorkerCalls
    forget: Callable[[], None]
    is_started: bool = attrs.field(default=False, init=False)
    not_before_s: float = attrs.field(default=0.0, init=False)
    _start: trio.Event = attrs.field(factory=trio.Event, init=False)
    _scope: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)
    _pauses: Backoff = attrs.field(factory=lambda: Backoff(MIN_PAUSE_S, MAX_PAUSE_S), init=False)

    @property
    def is_living(self) -> bool:
        """True while it computes."""
        return self.core.replicas[self.number].is_scheduling

    @property
    def is_draining(self) -> bool:
        """True while it finishes what it has."""
        return self.number in self.core.table.draining

    @property
    def num_requests(self) -> int:
        """Number of requests that it has."""
        return len(self.core.table.shares[self.number])

    def begin(self) -> None:
        """Have it take a worker."""
        logger.info("replica %d is started: requests wait, and a worker is there", self.number)
        self.is_started = True
        self.core.replicas[self.number].is_parked = False
        self.calls.parked.discard(self.number)
        self._start.set()

    def drain(self) -> None:
        """Give it nothing more; it ends when it has finished what it has."""
        self.core.table.draining.add(self.number)

    def keep(self) -> None:
        """Let one that drains take requests again."""
        self.core.table.draining.discard(self.number)

    def end(self) -> None:
        """Park it."""
        self._scope.cancel()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Supervise it while it is wanted, again and again."""
        self._park()
        task_status.started()
        while True:
            await self._start.wait()
            began_s = trio.current_time()
            errors: list[BaseException] = []
            try:
                with self._scope, foreign_errors_kept(errors.append):
                    await self.supervise(task_status=trio.TASK_STATUS_IGNORED)
            finally:
                self._park()
            if errors:
                now_s = trio.current_time()
                if now_s - began_s >= MAX_PAUSE_S:  # it has computed, or has taken long to fail
                    self._pauses.reset()
                pause_s = self._pauses.next_s()
                self.not_before_s = now_s + pause_s
                logger.warning(
                    "replica %d is given up for %g s: %s", self.number, pause_s, root_cause(errors[0])
                )
            else:
                self._pauses.reset()
                logger.info("replica %d has ended: it is not needed now", self.number)

    def _park(self) -> None:
        self.is_started = False
        self._start, self._scope = trio.Event(), trio.CancelScope()
        self.core.retire(self.number)
        self.calls.park(self.number)
        self.forget()


async def autoscaler_actor(
    core: ReplicatedCore,
    policy: AutoscalePolicy,
    supply: WorkerSupply,
    replicas: Sequence[FurtherReplica],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Start and park replicas by the load, until cancelled."""
    task_status.started()
    while True:
        now_s = trio.current_time()
        target = policy.decide(core.load(), now_s)
        supply.want(target)
        # One that cannot be started is made up for by one more.
        num_first = sum(each.is_scheduling for each in core.replicas[: policy.min_replicas])
        follow_target(replicas, target - num_first, supply.num_ready, now_s)
        await trio.sleep(LOOK_S)


def follow_target(
    replicas: Sequence[FurtherReplica], num_wanted: int, num_workers: int, now_s: float
) -> None:
    """Bring the number of further replicas towards what is wanted.

    Args:
        replicas: all of them.
        num_wanted: how many of them are to be started.
        num_workers: that wait to be taken.
        now_s: `trio.current_time()`.
    """
    started = [each for each in replicas if each.is_started]
    draining = [each for each in started if each.is_draining]
    num_more = num_wanted - (len(started) - len(draining))
    for each in draining[: max(0, num_more)]:
        each.keep()
    num_more -= len(draining)
    parked = [each for each in replicas if not each.is_started and each.not_before_s <= now_s]
    for each in parked[: max(0, min(num_more, num_workers))]:
        each.begin()
    # Those without a worker first, then those with the least to finish.
    staying = sorted(
        (each for each in started if not each.is_draining),
        key=lambda each: (each.is_living, each.num_requests),
    )
    for each in staying[: max(0, len(staying) - num_wanted)]:
        each.drain()
    for each in started:
        if each.is_draining and not each.num_requests:
            each.end()
