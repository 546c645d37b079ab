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

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager

import attrs

from triolet.core.journal import Journal, JournalEntry
from triolet.core.metrics.iteration_stats import EngineStatistics
from triolet.core.output.detokenizer import HoldBack
from triolet.core.output.output_processor import OutputProcessor
from triolet.core.recovery.recovery_state import CrashOutcome, RecoveryState, crashes_the_runner
from triolet.core.request.grammar_state import Thinking, TokenMask, all_but, only, with_token
from triolet.core.request.model_info import LoadedModel, ModelInfo
from triolet.core.request.request import FinishReason, Request
from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.core.scheduling.admission import Admission, overdue_of
from triolet.core.scheduling.budget import CostModel
from triolet.core.scheduling.scheduler import Scheduler, SchedulerConfig, SchedulerCounters
from triolet.core.sleep import SLEEP, WEIGHTS, RunnerPhase, SleepState
from triolet.core.step_plan import StepPlan, StepResult
from triolet.core.weights import WeightsState
from triolet.errors import RequestFailed

# Grammar masks: requests that need a mask, questions to the grammars, and their answers.
#
#     scheduler   ask()  --->  take_questions(), sort()   driver of the grammars
#                 take_answers()  <---  answer(), set_mask()
#
# A step computes no token for a request while its mask is older than its last token. The scheduler's side
# never waits: it asks, goes on with other requests, and takes the answers when they are there. The driver
# decides in which process the grammars run.
#
# This state can be lost: `ask_again` finds the missing masks in the journal, and `Thinking` is a function of
# the tokens.
MAX_WAIT_S = 0.002
"""Longest time that a step waits for masks, seconds; a request with a slower one misses the step."""

GrammarQuestions = dict[StructuredOutputsParams, dict[int, tuple[int, ...]]]
"""Answers bound to each grammar, by serial: all tokens since the grammar began."""


class GrammarMasks:
    """Questions and answers about the masks of one engine's requests.

    Args:
        journal: holds the requests.
        model: gives the size of the vocabulary.
    """

    def __init__(self, journal: Journal, model: LoadedModel) -> None:
        self._journal, self._model = journal, model
        self._asked: dict[int, None] = {}
        self._answers: dict[int, TokenMask] = {}
        self._asked_s: dict[int, float] = {}  # since when, oldest first, until answered
        self._latest: set[int] = set()  # asked for the next step, and not answered
        self._wait_until_s = 0.0
        self._thinking: dict[int, Thinking] = {}

    # -------------------------------------------------------------------------------- the scheduler's side

    def ask(self, serials: Iterable[int], now_s: float) -> None:
        """Note that these requests need masks."""
        if serials := dict.fromkeys(serials):
            self._asked.update(serials)
            for serial in serials:
                self._asked_s.pop(serial, None)  # to the end
                self._asked_s[serial] = now_s
            self._wait_for(serials, now_s)

    def _wait_for(self, serials: Iterable[int], now_s: float) -> None:
        """Have the next step wait for these masks, which are asked for now."""
        self._latest, self._wait_until_s = set(serials), now_s + MAX_WAIT_S

    def take_answers(self, among: Container[int] | None = None) -> dict[int, TokenMask]:
        """Return the masks that have come since the last call, by serial.

        Args:
            among: serials of the requests that are asked about; by default all.
        """
        answers, self._answers = self._answers, {}
        if among is not None:
            others = {serial: mask for serial, mask in answers.items() if serial not in among}
            self._answers = {serial: mask for serial, mask in others.items() if serial in self._journal}
            answers = {serial: mask for serial, mask in answers.items() if serial in among}
        return answers

    def step_waits(self, now_s: float) -> bool:
        """Return True if the next step should wait for a mask."""
        self._latest = {serial for serial in self._latest if serial in self._journal}
        if now_s >= self._wait_until_s:
            self._latest.clear()
        return bool(self._latest)

    @property
    def waits_until_s(self) -> float:
        """Time at which a step that waits goes ahead without the masks; infinity if none waits."""
        return self._wait_until_s if self._latest else float("inf")

    # ------------------------------------------------------------------------------------ the driver's side

    @property
    def has_questions(self) -> bool:
        """True if masks are asked for."""
        return bool(self._asked)

    @property
    def has_answers(self) -> bool:
        """True if there are masks that the scheduler has not taken."""
        return bool(self._answers)

    def take_questions(self) -> tuple[int, ...]:
        """Return the serials of the requests that need masks."""
        asked = tuple(self._asked)
        self._asked.clear()
        return asked

    def ask_again(self) -> None:
        """Ask for all masks that are missing: questions that were taken may have been lost."""
        self._asked.update((entry.serial, None) for entry in self._journal if entry.awaits_mask)

    def put_back(self, serials: Iterable[int]) -> None:
        """Have questions asked once more that could not be answered now."""
        self._asked.update((serial, None) for serial in serials if self._awaits(serial))

    def unanswered(self) -> tuple[tuple[int, float], ...]:
        """Return the requests that wait for a mask, by serial, and since when, monotonic seconds; oldest first."""
        self._asked_s = {serial: at_s for serial, at_s in self._asked_s.items() if self._awaits(serial)}
        return tuple(self._asked_s.items())

    def _awaits(self, serial: int) -> bool:
        return (entry := self._journal.get(serial)) is not None and entry.awaits_mask

    def needs_grammars(self, serials: Iterable[int]) -> bool:
        """Return True if any of these requests is bound to a grammar."""
        constraints = [entry.request.constraint for entry in map(self._journal.get, serials) if entry]
        return any(constraint is not None and constraint.grammar is not None for constraint in constraints)

    def sort(self, serials: Iterable[int]) -> GrammarQuestions:
        """Answer the requests that need no grammar now; return the questions to the grammars."""
        self._thinking = {
            serial: thinking for serial, thinking in self._thinking.items() if serial in self._journal
        }
        self._asked_s = {serial: at_s for serial, at_s in self._asked_s.items() if serial in self._journal}
        questions: GrammarQuestions = defaultdict(dict)
        for entry in filter(None, map(self._journal.get, serials)):
            if entry.awaits_mask and (question := self._question(entry)) is not None:
                params, token_ids = question
                questions[params][entry.serial] = token_ids
        return questions

    def _question(self, entry: JournalEntry) -> tuple[StructuredOutputsParams, tuple[int, ...]] | None:
        """Return the grammar in force and the tokens that it must read; without a grammar, answer and return None."""
        constraint, output = entry.request.constraint, entry.output_token_ids
        assert constraint is not None
        is_bound = constraint.grammar is not None
        thinking = self._thinking.setdefault(entry.serial, Thinking(constraint.thinking, is_bound=is_bound))
        thinking.follow(output)
        is_in_form = thinking.ended is not None or thinking.optional_token_id is not None
        if constraint.grammar is not None and is_in_form:
            return constraint.grammar, tuple(output[thinking.ended or 0 :])
        forced = thinking.forced_token_id(output)
        assert self._model.info is not None, "the model is loaded before requests are admitted"
        vocab_size, mask = self._model.info.vocab_size, None
        if forced is not None:
            mask = only(forced, vocab_size)
        elif is_bound and (eos := entry.request.eos_token_ids):
            mask = all_but(eos, vocab_size)  # an answer with a form ends where the form may
        self.answer(entry.serial, TokenMask(len(output), mask))
        return None

    def set_mask(self, serial: int, mask: TokenMask) -> bool:
        """Take the answer of a grammar; its position counts from the token at which the grammar began.

        Returns:
            True if the request waits for this mask.
        """
        if not self.is_current(serial, mask.position):
            return False
        thinking, bits = self._thinking.get(serial), mask.mask
        position = self._position(serial, mask.position)
        if thinking is not None and thinking.optional_token_id is not None and bits is not None:
            bits = with_token(bits, thinking.optional_token_id)
        self.answer(serial, TokenMask(position, bits, mask.is_over, mask.problem))
        return True

    def is_current(self, serial: int, position: int) -> bool:
        """Return True if an answer of a grammar at this position is about the request as it is now."""
        # Otherwise it was asked in an earlier stay of the request, which has grown since.
        entry = self._journal.get(serial)
        return entry is not None and self._position(serial, position) == len(entry.output_token_ids)

    def _position(self, serial: int, position: int) -> int:
        thinking = self._thinking.get(serial)
        return position + (0 if thinking is None else thinking.ended or 0)

    def answer(self, serial: int, mask: TokenMask) -> None:
        """Set the mask of a request; the next `plan_step` takes it."""
        self._answers[serial] = mask
        self._asked_s.pop(serial, None)
        self._latest.discard(serial)


OnFinish = Callable[[tuple[int, ...]], None]


@attrs.define(eq=False)
class OpenOutput:
    """Output side of a live request."""

    processor: OutputProcessor  # turns its tokens into text and collects them for the reader
    notify: Callable[[], None] = lambda: None  # wakes the reader; called when there is something to read
    error: BaseException | None = None  # raised to the reader instead of a next output
    num_crashes: int = 0  # times that the detokenizer has died of it

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
        self._costs = CostModel()
        self.recovery = RecoveryState()
        self.sleep = SleepState()
        self.weights = WeightsState()
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
        """Enter the requests of one prompt; the next `add_arrivals` queues them. If this raises, none is entered.

        Args:
            requests: one for each of the n answers.
            arrival_time: wall clock, seconds since the epoch.
            hold_back: how text is held back for stop strings; see `StopMatcher`.
            notify: wakes the one reader of all the answers.
            others_wait: whether the second and later answers wait for the first token of the first.
        """
        entries: list[JournalEntry] = []
        try:
            for request in requests:
                entry = self.journal.open(request, after=entries[0] if entries and others_wait else None)
                entries.append(entry)
                processor = OutputProcessor.open(
                    entry, self.model.tokenizer, arrival_time=arrival_time, hold_back=hold_back
                )
                self.outputs[entry.serial] = OpenOutput(processor, notify)
        except BaseException:
            for entry in entries:
                self.outputs.pop(entry.serial, None)
                self.finish(entry.serial, FinishReason.ABORT)
            raise
        for _ in entries:
            self.journal.stats.accepted()
        return tuple(self.outputs[entry.serial] for entry in entries)

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
            if one in self.recovery.poison_bisection.crashed:
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

    def num_steps_done(self) -> int:
        """Return the number of steps with a result, by all schedulers."""
        return self.counters.num_steps_done

    def new_scheduler(self, config: SchedulerConfig) -> Scheduler:
        """Build a new scheduler, and queue all live requests of the journal in it."""
        self.journal.take_arrivals()
        self.scheduler = Scheduler(config, self.journal, self.counters, self.recovery, self._costs)
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
            # What this scheduler has ended and not reported: the next one may be far away.
            ended = (
                serial for serial, output in self.outputs.items() if output.entry.finish_reason is not None
            )
            if serials := tuple(ended):
                self.on_finish(serials)

    def unscheduled(self) -> Iterable[JournalEntry]:
        """Return the live requests that no scheduler has."""
        return () if self.is_scheduling else self.journal

    def expire_unscheduled(self, now_s: float) -> float:
        """End the requests past their deadlines that no scheduler has; return the next deadline of such a request."""
        overdue, next_s = overdue_of(self.unscheduled(), now_s)
        for entry in overdue:
            self.finish(entry.serial, FinishReason.DEADLINE)
        return next_s

    def add_arrivals(self) -> None:
        """Queue what was added since the last call."""
        self._scheduler.add_arrivals()

    def plan_step(self, now_s: float) -> StepPlan | None:
        """Decide the next step; None if the steps in flight must be waited for, or nothing can be computed now.

        Requests past their deadline are ended first. A step may also wait, up to `MAX_WAIT_S`, for the
        masks of the requests that were in the last one.
        """
        scheduler = self._scheduler
        scheduler.expire(now_s)
        if self.sleep.follows_load:
            self.sleep.note_load(len(self.journal), now_s)
        for serial, mask in self.masks.take_answers().items():
            scheduler.guide(serial, mask)
        self.masks.ask(self.journal.take_unmasked(), now_s)
        # Called also while a step is in flight: it forgets a wait that is over.
        waits = self.masks.step_waits(now_s)
        if waits or not scheduler.may_plan or self.is_frozen:
            return None
        scheduler.last_serial = self.sleep.limit
        return scheduler.plan_step(now_s)

    @property
    def may_plan(self) -> bool:
        """True if another step may be planned beside those in flight."""
        return self._scheduler.may_plan

    def next_look_s(self) -> float:
        """Return the time of the next deadline, of the end of a wait for masks, or of sleep; infinity for none."""
        look_s = min(self._scheduler.next_deadline(), self.masks.waits_until_s)
        return min(look_s, self.sleep.due_s) if self.sleep.follows_load else look_s

    @property
    def must_halt(self) -> bool:
        """True if the multi-step plan in flight should end after its present step."""
        return self._scheduler.must_halt or self.is_frozen

    @property
    def is_frozen(self) -> bool:
        """True if no request may be computed now: a hold applies to all that are live, or the model is away."""
        sleep = self.sleep
        return sleep.is_held and (sleep.phase is not RunnerPhase.SERVING or not self.has_live(sleep.limit))

    def has_live(self, limit: float) -> bool:
        """Return True if a request is live whose serial is at most `limit`."""
        oldest = next(iter(self.journal), None)
        return oldest is not None and oldest.serial <= limit

    @property
    def has_settled(self) -> bool:
        """True if nothing is computed any more, since a hold applies to all that is live."""
        return self.is_frozen and not self._scheduler.is_step_in_flight

    @property
    def must_unload(self) -> bool:
        """True if the runner should give up the model, and load none until it is woken."""
        return self.sleep.wants_unloading and not self.has_live(self.sleep.limit_of(SLEEP))

    @property
    def may_exchange(self) -> bool:
        """True if other weights are requested, and no request is to be finished with the old ones."""
        return self.weights.requested is not None and not self.has_live(self.sleep.limit_of(WEIGHTS))

    def follow_runner(self, config: Callable[[], SchedulerConfig]) -> bool:
        """Start over if the runner has loaded a model again; return True if it must be told to give up the model."""
        sleep = self.sleep
        if sleep.phase is RunnerPhase.LOADED:
            self.new_scheduler(config())
            sleep.enter(RunnerPhase.SERVING)
        is_wanted = self.may_exchange or self.must_unload
        if sleep.phase is RunnerPhase.SERVING and is_wanted and self.has_settled:
            # All requests wait from now on: their blocks are lost, and the statistics say so.
            self.new_scheduler(config())
            sleep.enter(RunnerPhase.LEAVING)
            return True
        return False

    def begin_load(self) -> str | None:
        """Return the folder that a runner that starts now loads; None for the configuration's model."""
        weights = self.weights
        weights.loading = weights.requested if self.may_exchange else None
        return weights.loading or weights.folder

    def note_loaded(self, info: ModelInfo) -> None:
        """Take the facts about a model that the runner has loaded: the requested weights are those in use now."""
        if self.model.info is not None:
            # New weights come with the tokenizer and the defaults that the engine was opened with.
            info = attrs.evolve(info, folder=self.model.info.folder, generation=self.model.info.generation)
        self.model.info = info
        if self.weights.loading is not None:
            self.weights.accept()
        self.journal.weight_version = self.weights.version
        if self.weights.requested is None and self.sleep.is_held:
            self.sleep.release(WEIGHTS)
        if self.sleep.phase is not RunnerPhase.SERVING:
            self.sleep.enter(RunnerPhase.LOADED)

    def apply(self, result: StepResult, now_s: float) -> None:
        """Apply the result of a step; a late result changes nothing."""
        self._scheduler.apply(result, now_s)

    def take_progress(self) -> tuple[int, ...]:
        """Return the serials to `advance`: requests that have new tokens or have ended since the last call."""
        return self._scheduler.take_progress()

    def is_in_flight(self, plan: StepPlan) -> bool:
        """Return True if the result of this plan is waited for: not if the scheduler that planned it has crashed."""
        # Another replica may compute its requests by now, and they may be in a crash only once.
        return self.is_scheduling and self.scheduler is not None and self.scheduler.is_in_flight(plan)

    def fail_step(self, plan: StepPlan, error: BaseException) -> CrashOutcome | None:
        """Record a crash of the runner for the search for its cause; see `core.recovery.recovery_state`.

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
        # The runner may have begun the plan after it, too.
        scheduler = self._scheduler
        outcome = self.recovery.step_failed(
            scheduler.marks(), num_rows=scheduler.num_rows_in_flight, error=error
        )
        culprit = None if outcome.culprit is None else self.journal.get(outcome.culprit)
        if culprit is not None:
            failure = crashes_the_runner(culprit.request, error)
            culprit.failure = failure.reason if isinstance(failure, RequestFailed) else str(failure)
            if (output := self.outputs.get(culprit.serial)) is not None:
                output.fail(failure)
            self.finish(culprit.serial, FinishReason.ERROR)
        return outcome

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget all cached KV that is not in use; see `Scheduler.reset_prefix_cache`."""
        return self._scheduler.reset_prefix_cache(reset_running_requests=reset_running_requests)

    def whereabouts(self, serial: int) -> tuple[int, int, int]:
        """Return the position in the queue, computed tokens and blocks of a request; see `Scheduler.whereabouts`."""
        return self.scheduler.whereabouts(serial) if self.scheduler is not None else (0, 0, 0)

    def abandon_step(self) -> None:
        """Drop the step in flight, if there is one: its runner has ended."""
        if self.scheduler is not None:
            self.scheduler.abandon_step()

    @property
    def is_step_in_flight(self) -> bool:
        """True if the result of a step is waited for."""
        return self.scheduler is not None and self.scheduler.is_step_in_flight

    def take_uncounted_restarts(self) -> int:
        """Return the number of crashes that were explained since the last call, and need not count as restarts."""
        number, self.recovery.num_uncounted = self.recovery.num_uncounted, 0
        return number

    # --------------------------------------------------------------------------------------------- facts

    def statistics(self) -> EngineStatistics:
        """Return the present counts; the fields that only the driver knows have their defaults."""
        scheduler, counters, journal = self._scheduler, self.counters, self.journal
        pool = scheduler.pool
        num_running = scheduler.num_running if self.is_scheduling else 0
        return EngineStatistics(
            num_requests_running=num_running,
            num_requests_waiting=len(journal) - num_running,
            num_requests_live=len(journal),
            num_requests_deferred=min(scheduler.num_deferred, len(journal) - num_running),
            kv_blocks_total=pool.num_blocks,
            kv_blocks_free=pool.num_free,
            kv_blocks_cached=pool.num_cached,
            kv_blocks_in_use=pool.num_in_use,
            kv_blocks_quarantined=pool.num_quarantined,
            num_preemptions=counters.num_preemptions,
            prefix_cache_queries=counters.prefix_cache_queries,
            prefix_cache_hits=counters.prefix_cache_hits,
            external_prefix_cache_queries=counters.external_prefix_cache_queries,
            external_prefix_cache_hits=counters.external_prefix_cache_hits,
            num_failed_kv_saves=counters.num_failed_kv_saves,
            steps=counters.num_steps_done,
            num_requests_received=journal.stats.num_received,
            num_requests_ended=journal.stats.endings,
            spec_decode_num_drafts=counters.num_drafts,
            spec_decode_num_draft_tokens=counters.num_draft_tokens,
            spec_decode_num_accepted_tokens=sum(counters.num_accepted_tokens_per_pos),
            spec_decode_num_accepted_tokens_per_pos=tuple(counters.num_accepted_tokens_per_pos),
            sleep_level=self.sleep.level,
            is_paused=self.sleep.is_paused,
        )

    @property
    def _scheduler(self) -> Scheduler:
        assert self.scheduler is not None, "new_scheduler() comes first"
        return self.scheduler
