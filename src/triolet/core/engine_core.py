"""The state and the decisions of one engine, without I/O: the actors and `compat.LLMEngine` both drive an `EngineCore`.

Theory of operation
-------------------
A request enters with `add`: one journal entry and one output per answer. Each step is `plan_step`, the computation by
the runner, and `apply` with its result. `take_progress` then names the requests that have new tokens or have ended, and
`advance` turns the new tokens of one of them into text for its reader. `finish` ends a request, for any reason.

Two parts can be lost and rebuilt. `new_scheduler` builds a scheduler from what is live in the journal, because block
tables describe the KV of one life of the runner only. `fail_step` decides what a crash of the runner means for the
requests of the step that it was computing.

Times are monotonic seconds, given as numbers. Nothing here waits. Where another task must hear of a change, a callback
that the driver has handed in is called: `on_finish` of the core, `notify` of an output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import attrs

from triolet.core.engine_statistics import EngineStatistics, statistics_of
from triolet.core.grammar_masks import GrammarMasks
from triolet.core.journal import JournalEntry
from triolet.core.output.output_processor import OutputProcessor
from triolet.core.output.stop_strings import HoldBack
from triolet.core.recovery.poison_bisection import CrashOutcome, RecoveryState
from triolet.core.request.model_info import LoadedModel
from triolet.core.request.request import Request, RequestTask
from triolet.core.request.status import FinishReason
from triolet.core.scheduling.admission import Admission
from triolet.core.scheduling.scheduler import Scheduler, SchedulerConfig, SchedulerCounters
from triolet.core.step_plan import StepPlan, StepResult
from triolet.errors import RequestFailed, UnsupportedFeature

OnFinish = Callable[[tuple[int, ...]], None]


@attrs.define(eq=False)
class OpenOutput:
    """Output side of a live request.

    Args:
        processor: turns its tokens into text and collects them for the reader.
        notify: wakes the reader; called when there is something to read.
        error: raised to the reader instead of a next output.
        num_crashes: times that the detokenizer has died of it.
    """

    processor: OutputProcessor
    notify: Callable[[], None] = lambda: None
    error: BaseException | None = None
    num_crashes: int = 0

    @property
    def entry(self) -> JournalEntry:
        """The request in the journal."""
        return self.processor.entry

    def fail(self, error: BaseException) -> None:
        """Set the error that the reader gets; the first one stays."""
        if self.error is None:
            self.error = error
        self.notify()


class EngineCore:
    """Requests, schedule and outputs of one engine.

    Args:
        admission: limits of the engine; brings the journal.
        on_finish: called after `finish` has ended a request, with the serials that no scheduler is going to report:
            none while there is a scheduler, which reports them with its next progress.
    """

    def __init__(self, admission: Admission, on_finish: OnFinish = lambda serials: None) -> None:
        self.admission = admission
        self.journal = admission.journal
        self.model = LoadedModel()
        self.masks = GrammarMasks(self.journal, self.model)
        # These outlive the schedulers.
        self.counters = SchedulerCounters()
        self.recovery = RecoveryState()
        self.outputs: dict[int, OpenOutput] = {}  # by serial
        self.scheduler: Scheduler | None = None
        self.is_scheduling = False
        self.on_finish = on_finish

    # ------------------------------------------------------------------------------------------ requests

    def add(
        self,
        requests: Sequence[Request],
        *,
        arrival_time: float,
        hold_back: HoldBack = "exact",
        notify: Callable[[], None] = lambda: None,
        others_wait: bool = True,
    ) -> tuple[OpenOutput, ...]:
        """Enter the requests of one prompt; the next `add_arrivals` queues them.

        Args:
            requests: one for each of the n answers.
            arrival_time: wall clock, seconds since the epoch.
            hold_back: how text is held back for stop strings; see `StopMatcher`.
            notify: wakes the one reader of all the answers.
            others_wait: whether the second and later answers wait for the first token of the first.
        Raises:
            UnsupportedFeature: a request is for another task than to generate; none is entered.
        """
        for request in requests:
            if request.task is not RequestTask.GENERATE:
                raise UnsupportedFeature(
                    f"task must be 'generate'; got {str(request.task)!r}", field="task", got=request.task
                )
        opened: list[OpenOutput] = []
        for request in requests:
            entry = self.journal.open(request, after=opened[0].entry if opened and others_wait else None)
            processor = OutputProcessor.open(
                entry, self.model.tokenizer, arrival_time=arrival_time, hold_back=hold_back
            )
            self.outputs[entry.serial] = OpenOutput(processor, notify)
            opened.append(self.outputs[entry.serial])
            self.journal.stats.accepted()
        return tuple(opened)

    def finish(self, serial: int, reason: FinishReason) -> None:
        """End a request; idempotent, and harmless for a serial that is not live.

        Its blocks are free when this returns, or, if the step in flight works on them, when that step ends.
        """
        if (entry := self.journal.get(serial)) is None:
            return
        if self.is_scheduling and self.scheduler is not None:
            self.scheduler.abort(serial, reason)
            self.on_finish(())
            return
        # A scheduler that has crashed may be half-way through a change, so it is left alone. The next one is built from
        # the journal, and nothing else holds the request.
        entry.finish(reason)
        ended = self.journal.close(entry)
        for one in ended:
            self.recovery.poison_bisection.ended(one)
        self.on_finish(tuple(ended))

    def advance(self, serial: int, now_s: float) -> bool:
        """Move new tokens of a request, as text, to its output.

        Returns:
            Whether its answer is complete: nothing more will be put.
        """
        if (output := self.outputs.get(serial)) is None:
            return False
        collector = output.processor.collector
        if output.processor.advance():
            self.finish(serial, FinishReason.STOP)
        if collector.finish_reason is not None:
            self.close_output(serial, collector.finish_reason, now_s)
        if collector.has_output():
            output.notify()
        return collector.finish_reason is not None

    def close_output(self, serial: int, reason: FinishReason, now_s: float) -> OpenOutput | None:
        """Put nothing more into an output, and count its ending; None if that has happened before."""
        output = self.outputs.pop(serial, None)
        if output is not None:
            self.journal.stats.ended(output.processor.finished_request(reason, now_s))
        return output

    def fail(self, serial: int, error: BaseException, now_s: float) -> None:
        """End a request with an error, which its reader gets instead of further output."""
        if (output := self.close_output(serial, FinishReason.ERROR, now_s)) is not None:
            output.fail(error)
            self.finish(serial, FinishReason.ERROR)

    # --------------------------------------------------------------------------------------------- steps

    def new_scheduler(self, config: SchedulerConfig) -> Scheduler:
        """Build a new scheduler, and queue all live requests of the journal in it."""
        self.journal.take_arrivals()
        self.scheduler = Scheduler(config, self.journal, self.counters, self.recovery)
        for entry in tuple(self.journal):
            if not self.journal.is_held(entry):
                self.scheduler.add(entry)
        self.scheduler.report(self.outputs)  # the last one may not have reported all progress
        return self.scheduler

    @contextmanager
    def scheduling(self) -> Iterator[None]:
        """Scope in which the scheduler is consistent, and `finish` ends requests through it."""
        self.is_scheduling = True
        try:
            yield
        finally:
            self.is_scheduling = False

    def add_arrivals(self) -> None:
        """Queue what was added since the last call."""
        self._scheduler.add_arrivals()

    def plan_step(self, now_s: float) -> StepPlan | None:
        """Decide the next step; None while one is in flight, or if nothing can be computed now.

        Requests past their deadline are ended first. A step may also wait, up to `grammar_masks.MAX_WAIT_S`, for the
        masks of the requests that were in the last one.
        """
        scheduler = self._scheduler
        scheduler.expire(now_s)
        for serial, mask in self.masks.take_answers().items():
            scheduler.guide(serial, mask)
        self.masks.ask(self.journal.take_unmasked(), now_s)
        # Called also while a step is in flight: it forgets a wait that is over.
        waits = self.masks.step_waits(now_s)
        if waits or scheduler.is_step_in_flight:
            return None
        return scheduler.plan_step(now_s)

    def next_look_s(self) -> float:
        """Return the time of the next deadline or of the end of a wait for masks; infinity for none."""
        return min(self._scheduler.next_deadline(), self.masks.waits_until_s)

    @property
    def must_halt(self) -> bool:
        """True if the multi-step plan in flight should end after its present step."""
        return self._scheduler.must_halt

    def apply(self, result: StepResult, now_s: float) -> None:
        """Apply the result of a step; a late result changes nothing."""
        self._scheduler.apply(result, now_s)

    def take_progress(self) -> tuple[int, ...]:
        """Return the serials to `advance`: requests that have new tokens or have ended since the last call."""
        return self._scheduler.take_progress()

    def is_in_flight(self, plan: StepPlan) -> bool:
        """Return True if the result of this plan is waited for."""
        return self.scheduler is not None and self.scheduler.is_in_flight(plan)

    def fail_step(self, plan: StepPlan, error: BaseException) -> CrashOutcome | None:
        """Record a crash of the runner for the search for its cause; see `core.recovery.poison_bisection`.

        A request that makes the runner crash also when it is computed alone fails, with `error` as the cause.

        Args:
            plan: the step; results of a multi-step plan that came before the crash have been applied.
            error: error of the runner.
        Returns:
            The outcome of the attempt; None for a plan that is not in flight.
        """
        self.recovery.has_runner_failed = True
        if not self.is_in_flight(plan):
            return None
        outcome = self.recovery.poison_bisection.step_failed(self._scheduler.marks(), num_rows=len(plan.rows))
        self.recovery.num_uncounted += outcome.num_uncounted
        culprit = None if outcome.culprit is None else self.journal.get(outcome.culprit)
        if culprit is not None:
            failure = _crashes_the_runner(culprit.request, error)
            culprit.failure = failure.reason
            if (output := self.outputs.get(culprit.serial)) is not None:
                output.fail(failure)
            self.finish(culprit.serial, FinishReason.ERROR)
        return outcome

    def take_uncounted_restarts(self) -> int:
        """Return the number of crashes that were explained since the last call, and need not count as restarts."""
        number, self.recovery.num_uncounted = self.recovery.num_uncounted, 0
        return number

    # --------------------------------------------------------------------------------------------- facts

    def statistics(
        self,
        *,
        engine_index: int = 0,
        num_restarts: int = 0,
        longest_task_step_s: float = 0.0,
        num_long_task_steps: int = 0,
    ) -> EngineStatistics:
        """Return the present counts; the arguments are fields of `EngineStatistics` that only the driver knows."""
        return statistics_of(
            self._scheduler,
            self.counters,
            num_running=self._scheduler.num_running if self.is_scheduling else 0,
            engine_index=engine_index,
            num_restarts=num_restarts,
            longest_task_step_s=longest_task_step_s,
            num_long_task_steps=num_long_task_steps,
        )

    @property
    def _scheduler(self) -> Scheduler:
        assert self.scheduler is not None, "new_scheduler() comes first"
        return self.scheduler


def _crashes_the_runner(request: Request, cause: BaseException) -> RequestFailed:
    failure = RequestFailed(
        request.parent_id or request.request_id,
        f"it crashes the model runner, also when computed alone: {cause}",
    )
    failure.__cause__ = cause
    return failure
