"""Channels between the actors, each with its capacity and the reason why that is enough.

    model runner --StepDone--> scheduler --StepPlan, Unload--> model runner
    engine ------WorkerCall--> model runner, with a `None` in its inbox that says so
    engine ------Wake--------> scheduler --Progressed--> detokenizer --> outputs of the requests
    engine ------Tokenize and a reply channel--> tokenizer

The channels outlive the actors: both ends of each are kept here, so that a crash loses no more than the message that
the actor was handling, and everything that a message tells can be found again in the journal. All of it belongs to the
Trio thread of the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import trio

from triolet.actors.worker_calls import ReplicatedWorkerCalls, WorkerCalls
from triolet.core.messages import Progressed, RunnerMessage, SchedulerMessage, StepDone, Wake
from triolet.core.request.tokenizer_interface import Tokenize, Tokenized
from triolet.core.scheduling.scheduler import MAX_STEPS_IN_FLIGHT
from triolet.core.step_plan import MAX_SCHEDULER_STEPS, StepPlan, StepResult

# At most one Wake is unread (`_is_woken`). There is one StepDone for each step of a plan in flight, and there may be
# as many late ones, of a plan that an earlier scheduler made. Two plans in flight have one step each.
SCHEDULER_CAPACITY = 1 + 2 * MAX_SCHEDULER_STEPS
# No more plans are in flight, and those that a crashed scheduler left here are taken back. At most one None is unread
# (`_is_runner_woken`). There is no Unload beside a plan.
RUNNER_CAPACITY = MAX_STEPS_IN_FLIGHT + 1
# The detokenizer never waits for a reader, so the scheduler never waits long here, for the progress of one step.
DETOKENIZER_CAPACITY = 1
# The sender waits for the answer anyway: the capacity only decides where it waits.
TOKENIZER_CAPACITY = 16

TokenizeReply = Tokenized | BaseException
TokenizeRequest = tuple[Tokenize, "trio.MemorySendChannel[TokenizeReply]"]


class Channels:
    """Both ends of the channels of one engine, or of one of its replicas.

    Args:
        shared: channels of the engine whose detokenizer and tokenizer a replica shares.
    """

    replicas: tuple[Channels, ...] = ()
    """Channels of the replicas; empty if the engine has only one."""

    def __init__(self, shared: Channels | None = None) -> None:
        self.to_scheduler, self.scheduler_inbox = trio.open_memory_channel[SchedulerMessage](
            SCHEDULER_CAPACITY
        )
        self.to_runner, self.runner_inbox = trio.open_memory_channel[RunnerMessage | None](RUNNER_CAPACITY)
        self._is_woken = self._is_runner_woken = False
        self.num_unread_plans = 0  # in the runner's inbox
        self.worker_calls = WorkerCalls(self._wake_runner)
        if shared is not None:
            self._postponed: dict[int, None] = shared._postponed
            self.to_detokenizer: trio.MemorySendChannel[Progressed] = shared.to_detokenizer
            self.detokenizer_inbox: trio.MemoryReceiveChannel[Progressed] = shared.detokenizer_inbox
            self.to_tokenizer: trio.MemorySendChannel[TokenizeRequest] = shared.to_tokenizer
            self.tokenizer_inbox: trio.MemoryReceiveChannel[TokenizeRequest] = shared.tokenizer_inbox
            return
        self._postponed = {}  # of `report_finished`
        self.to_detokenizer, self.detokenizer_inbox = trio.open_memory_channel[Progressed](
            DETOKENIZER_CAPACITY
        )
        self.to_tokenizer, self.tokenizer_inbox = trio.open_memory_channel[TokenizeRequest](
            TOKENIZER_CAPACITY
        )

    def _wake_runner(self) -> None:
        if not self._is_runner_woken:
            self._is_runner_woken = True
            self.to_runner.send_nowait(None)

    def send_plan(self, plan: StepPlan) -> None:
        """Put a plan into the runner's inbox. Never waits."""
        self.num_unread_plans += 1
        self.to_runner.send_nowait(plan)

    def plan_read(self) -> None:
        """Note that the runner has taken a plan out of its inbox."""
        self.num_unread_plans -= 1

    def runner_woke(self) -> None:
        """Allow the next None in the runner's inbox: the unread one has been read."""
        self._is_runner_woken = False

    def wake_scheduler(self) -> None:
        """Have the scheduler look into the journal. Never waits."""
        if not self._is_woken:
            self._is_woken = True
            self.to_scheduler.send_nowait(Wake())

    def scheduler_woke(self) -> None:
        """Allow the next Wake: the unread one has been read."""
        self._is_woken = False

    def report_finished(self, serials: tuple[int, ...]) -> None:
        """Pass on that requests have ended outside of a step; `on_finish` of `EngineCore`. Never waits."""
        if not serials:
            self.wake_scheduler()
            return
        try:
            self.to_detokenizer.send_nowait(Progressed(serials))
        except trio.WouldBlock:
            self._postponed.update(dict.fromkeys(serials))

    def take_postponed(self) -> tuple[int, ...]:
        """Return the serials that there was no room for in the detokenizer's inbox, after one of its messages."""
        serials = tuple(self._postponed)
        self._postponed.clear()
        return serials

    def send_result(self, result: StepResult) -> None:
        """Hand a result to the scheduler. Never waits."""
        self.to_scheduler.send_nowait(StepDone(result))

    def take_results(self) -> Iterator[StepResult]:
        """Empty the scheduler's inbox; yield the results that were in it."""
        with suppress(trio.WouldBlock):
            while True:
                match self.scheduler_inbox.receive_nowait():
                    case StepDone(result=result):
                        yield result
                    case Wake():
                        self.scheduler_woke()

    def discard_plans(self) -> None:
        """Empty the runner's inbox: a model that was loaded just now knows none of the rows of earlier plans."""
        with suppress(trio.WouldBlock):
            while True:
                self.runner_inbox.receive_nowait()
        self.num_unread_plans = 0
        # The scheduler may do this while the runner waits for its inbox: a call must not be forgotten with the plans.
        self._is_runner_woken = False
        if self.worker_calls.waiting:
            self._wake_runner()

    def discard_scheduler_messages(self) -> None:
        """Empty the inbox of a scheduler that starts over; its predecessor has taken its plans back."""
        for _ in self.take_results():
            pass
        self._is_woken = False


class ReplicatedChannels(Channels):
    """Channels of an engine with several replicas.

    Args:
        num_replicas: replicas.
    """

    def __init__(self, num_replicas: int) -> None:
        super().__init__()
        self.replicas = tuple(Channels(self) for _ in range(num_replicas))
        self.worker_calls = ReplicatedWorkerCalls([each.worker_calls for each in self.replicas])

    def wake_scheduler(self) -> None:
        """Have the schedulers look into the journal. Never waits."""
        for each in self.replicas:
            each.wake_scheduler()


class WaitCell:
    """`trio.lowlevel.ParkingLot` for a single task, at half of its cost: a reader waits here for each token.

    Only one task may wait at a time. A ring while no task waits is forgotten.
    """

    def __init__(self) -> None:
        self._waiting: trio.lowlevel.Task | None = None

    async def wait(self) -> None:
        """Wait until it rings. A checkpoint."""
        assert self._waiting is None, "a task waits here already"
        self._waiting = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._leave)

    def _leave(self, raise_cancel: object) -> trio.lowlevel.Abort:
        self._waiting = None
        return trio.lowlevel.Abort.SUCCEEDED

    def ring(self) -> None:
        """Wake the task that waits, if there is one. Never waits."""
        if (waiting := self._waiting) is not None:
            self._waiting = None
            trio.lowlevel.reschedule(waiting)
