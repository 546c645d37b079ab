"""The channels between the actors, each with its capacity and the reason why that is enough.

    model runner --StepDone--> scheduler --StepPlan--> model runner
    engine ------Wake--------> scheduler --Progressed--> detokenizer --> feeds of the streams
    engine ------Tokenize and a reply channel--> tokenizer

The wiring outlives the actors: it holds both ends of every channel, so that a crash loses no more than the message in
the actor's hands, and what a message told can be found again in the journal. Everything here belongs to the one Trio
thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import attrs
import trio

from triolet.actors.grammar_requests import GrammarRequests
from triolet.actors.wait_cell import WaitCell
from triolet.core.journal import Journal
from triolet.core.messages import Progressed, SchedulerMessage, StepDone, Wake
from triolet.core.output.output_processor import OutputProcessor
from triolet.core.recovery.poison_bisection import RecoveryState
from triolet.core.request.model_info import ModelInfo
from triolet.core.request.request import Request
from triolet.core.request.status import FinishReason
from triolet.core.request.tokenizer_interface import Tokenize, Tokenized, TokenizerInterface
from triolet.core.scheduling.admission import Admission
from triolet.core.scheduling.scheduler import Scheduler, SchedulerConfig, SchedulerCounters
from triolet.core.step_plan import MAX_SCHEDULER_STEPS, StepPlan, StepResult
from triolet.errors import RequestFailed

# At most one Wake is unread (`_is_woken`). Of StepDone there is one for each step of the plan in flight, and there may
# be as many late ones of a plan that an earlier scheduler had made.
SCHEDULER_CAPACITY = 1 + 2 * MAX_SCHEDULER_STEPS
# The scheduler plans no step while one is in flight, and takes back the plan that a crashed one left here.
RUNNER_CAPACITY = 1
# The detokenizer waits for nobody, so the scheduler never waits long for it; one step's progress is under way.
DETOKENIZER_CAPACITY = 1
# Whoever asks waits for the answer, so this only decides where the askers wait.
TOKENIZER_CAPACITY = 16

TokenizeReply = Tokenized | BaseException
TokenizeRequest = tuple[Tokenize, "trio.MemorySendChannel[TokenizeReply]"]


@attrs.define(eq=False)
class Stream:
    """A stream's place in the wiring: the feed that the detokenizer fills, and where its one reader waits.

    Args:
        feed: what there is to read.
        error: what the reader gets instead of a next output.
    """

    processor: OutputProcessor
    error: BaseException | None = None
    reader: WaitCell = attrs.field(factory=WaitCell)

    def fail(self, error: BaseException) -> None:
        """Nothing more will come; the first error stays."""
        if self.error is None:
            self.error = error
        self.reader.ring()


@attrs.define(eq=False)
class ActorProgress:
    """What `health` goes by.

    Args:
        is_runner_ready: the model is loaded, and computes what it is given.
        progressed_s: when the last step finished, or work began after there had been none.
        asked_s: since when each question to the tokenizer waits, oldest first.
        strikes: of those, how often the tokenizer has died of one.
        num_tokenizing: threads that work on one.
        num_read: messages that an actor has read.
    """

    is_runner_ready: bool = False
    progressed_s: float = 0.0
    asked_s: dict[object, float] = attrs.field(factory=dict)
    num_crashes: Counter[object] = attrs.field(factory=Counter)
    num_tokenizing: int = 0
    num_read: Counter[str] = attrs.field(factory=Counter)

    def count_crash(self, question: object) -> None:
        """The tokenizer dies of a question, if that still waits for its answer."""
        if question in self.asked_s:
            self.num_crashes[question] += 1


class Wiring:
    """What the actors of one engine share.

    Args:
        admission: who is let in; brings the journal.
    """

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.journal: Journal = admission.journal
        self.counters = SchedulerCounters()
        self.recovery = RecoveryState()
        self.streams: dict[int, Stream] = {}
        self.model_info: ModelInfo | None = None
        self.tokenizer: TokenizerInterface | None = None
        self.scheduler: Scheduler | None = None
        self.is_scheduling = False
        self.guidance = GrammarRequests(self.journal)
        self.idle = trio.lowlevel.ParkingLot()
        self.stepped = trio.lowlevel.ParkingLot()  # whoever looks again after every step
        self.pulse = ActorProgress()
        self.lives: dict[str, trio.CancelScope] = {}  # of the actors that the watchdog can end
        self.num_crashes: Counter[int] = Counter()  # of streams that the detokenizer has died of
        self.report: Callable[[float], None] = lambda now_s: None
        # Ends the run that is being computed, after the step that it is at.
        self.halt: Callable[[], None] = lambda: None
        self._is_woken = False
        self._num_uncounted = 0
        self.has_runner_failed = False
        self.to_scheduler, self.scheduler_inbox = trio.open_memory_channel[SchedulerMessage](
            SCHEDULER_CAPACITY
        )
        self.to_runner, self.runner_inbox = trio.open_memory_channel[StepPlan](RUNNER_CAPACITY)
        self.to_detokenizer, self.detokenizer_inbox = trio.open_memory_channel[Progressed](
            DETOKENIZER_CAPACITY
        )
        self.to_tokenizer, self.tokenizer_inbox = trio.open_memory_channel[TokenizeRequest](
            TOKENIZER_CAPACITY
        )

    def open_stream(self, serial: int, stream: Stream) -> None:
        """A request of the journal gets its stream, and the scheduler hears of it."""
        if not self.streams:
            self.pulse.progressed_s = trio.current_time()
        self.streams[serial] = stream
        self.journal.stats.accepted()
        self.wake_scheduler()

    def wake_scheduler(self) -> None:
        """Have it look into the journal. Never waits."""
        if not self._is_woken:
            self._is_woken = True
            self.to_scheduler.send_nowait(Wake())

    def scheduler_woke(self) -> None:
        """The one unread Wake has been read."""
        self._is_woken = False

    def step_done(self, result: StepResult) -> None:
        """Hand a result to the scheduler. Never waits."""
        self.pulse.progressed_s = trio.current_time()
        self.to_scheduler.send_nowait(StepDone(result))

    def step_failed(self, plan: StepPlan, error: BaseException) -> None:
        """The runner dies of a step: whoever makes it die each time fails alone, with that as the cause."""
        self.has_runner_failed = True
        if self.scheduler is None or not self.scheduler.is_in_flight(plan):
            return
        self._take_in_what_came_before(self.scheduler)
        outcome = self.recovery.poison_bisection.step_failed(self.scheduler.marks(), num_rows=len(plan.rows))
        self._num_uncounted += outcome.num_uncounted
        culprit = None if outcome.culprit is None else self.journal.get(outcome.culprit)
        if culprit is None:
            return
        failure = _crashes_the_runner(culprit.request, error)
        culprit.failure = failure.reason
        if (stream := self.streams.get(culprit.serial)) is not None:
            stream.fail(failure)
        self.finish(culprit.serial, FinishReason.ERROR)

    def _take_in_what_came_before(self, scheduler: Scheduler) -> None:
        """A run may have given tokens that nobody has read yet: they count, and it crashed behind them."""
        with suppress(trio.WouldBlock):
            while True:
                match self.scheduler_inbox.receive_nowait():
                    case StepDone(result=result):
                        scheduler.apply(result, trio.current_time())
                    case Wake():  # whoever takes over looks into the journal
                        self.scheduler_woke()

    def take_uncounted_restarts(self) -> int:
        """How many of the latest crashes have been explained since the last call; see
        `core.recovery.poison_bisection`.
        """
        num_pardons, self._num_uncounted = self._num_uncounted, 0
        return num_pardons

    def void_plans(self) -> None:
        """A runner that begins a new life knows none of the rows that its last one's plans speak of."""
        _empty(self.runner_inbox)

    def new_scheduler(self, config: SchedulerConfig) -> Scheduler:
        """A scheduler for a new life: all that is live in the journal is queued again, its old messages are void."""
        self.halt()  # of what an earlier one had planned, nothing will count
        _empty(self.scheduler_inbox)
        self.void_plans()
        self._is_woken = False
        self.journal.take_arrivals()
        self.scheduler = Scheduler(config, self.journal, self.counters, self.recovery)
        for entry in tuple(self.journal):
            if not self.journal.is_held(entry):
                self.scheduler.add(entry)
        return self.scheduler

    @contextmanager
    def scheduling(self) -> Iterator[None]:
        """Around the life of a scheduler, which the endings of requests are told to; to no other one."""
        self.is_scheduling = True
        try:
            yield
        finally:
            self.is_scheduling = False

    def finish(self, serial: int, reason: FinishReason) -> None:
        """End a request: the one way out, for whatever reason. Synchronous, idempotent, no checkpoint.

        Its blocks are free when this returns, or, if the step in flight works on them, when that step ends.
        """
        if (entry := self.journal.get(serial)) is None:
            return
        if self.is_scheduling and self.scheduler is not None:
            self.scheduler.abort(serial, reason)
            self.wake_scheduler()
            return
        # The last scheduler may have died in the middle of anything, and the next one will take what lives from the
        # journal: nobody else holds anything.
        entry.finish(reason)
        ended = self.journal.close(entry)
        for one in ended:
            self.recovery.poison_bisection.ended(one)
        with suppress(trio.WouldBlock):  # the next scheduler tells of all streams
            self.to_detokenizer.send_nowait(Progressed(tuple(ended)))

    def close_stream(self, serial: int, reason: FinishReason) -> Stream | None:
        """Its reader gets nothing new any more, and the ending is counted. None if that has happened before."""
        self.stepped.unpark_all()
        stream = self.streams.pop(serial, None)
        self.num_crashes.pop(serial, None)
        if stream is not None:
            self.journal.stats.ended(stream.processor.finished_request(reason, trio.current_time()))
        return stream

    def advance(self, serial: int) -> None:
        """Deliver what is new of a request to its stream, if it still has one."""
        stream = self.streams.get(serial)
        if stream is None:
            return
        collector = stream.processor.collector
        if stream.processor.advance():
            self.finish(serial, FinishReason.STOP)
        if collector.finish_reason is not None:
            self.close_stream(serial, collector.finish_reason)
        if collector.has_output():
            stream.reader.ring()


def _crashes_the_runner(request: Request, cause: BaseException) -> RequestFailed:
    failure = RequestFailed(
        request.parent_id or request.request_id,
        f"it crashes the model runner, also when computed alone: {cause}",
    )
    failure.__cause__ = cause
    return failure


def _empty(inbox: trio.MemoryReceiveChannel[Any]) -> None:
    with suppress(trio.WouldBlock):
        while True:
            inbox.receive_nowait()
