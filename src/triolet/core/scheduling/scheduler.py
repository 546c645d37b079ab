"""Scheduler: decides what the next step computes, and applies the result of it to the requests.

Theory of operation
-------------------
The caller calls `plan_step()`, when `may_plan` is true, and `apply()`, when a result is there; between any two of them
it may call `add()`, `abort()`, `expire()`. A plan may be for several steps: then there are as many results, and
`must_halt` says when the run should end early. Blocks of a request that ends while steps are in flight are quarantined
until the last of these ends. The answer itself lives in the journal; `take_progress()` names the requests whose entries
have moved.

With `async_scheduling` a second step, B, is planned while one, A, is in flight (look-ahead), unless B depends on the
result of A. It is planned as if A had succeeded: the requests of A are *assumed* to be computed that far, and the next
input of a decode is "the token that A samples", which the runner remembers and the scheduler does not know.

    plan A            shares of A in `num_scheduled_tokens`
    assume A          ... move to `num_assumed_tokens`; a row that A samples from has one unknown token
    plan B            shares of B in `num_scheduled_tokens`
    result of A       what was assumed is counted as computed
    assume B, plan C  ...

A request that ends meanwhile has no shares any more: results of it are dropped. If A finds no memory, nothing of it was
computed, and B is void: the runner computes nothing of it either (`StepPlan.is_ahead`), and all shares are taken back.

Waiting and running requests are kept in `core.scheduling.admission`; which tokens a step computes is decided in
`core.scheduling.step_planner`.

Failed steps limit the next ones (`core.recovery.recovery_state`): during the search for
a request that crashes the runner all but a few wait, and after an out-of-memory error steps are smaller.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import attrs

from triolet.core.journal import Journal, JournalEntry
from triolet.core.kv_cache.cache_groups import HOLE
from triolet.core.kv_cache.prefix_cache import PrefixCache
from triolet.core.recovery.recovery_state import RecoveryState
from triolet.core.request.grammar_state import TokenMask
from triolet.core.request.request import FinishReason
from triolet.core.scheduling.admission import (
    Deadlines,
    RequestQueues,
    held_blocks,
    is_overdue,
    publish_computed,
    release_passed,
)
from triolet.core.scheduling.budget import CostModel, SchedulerConfig, SchedulerCounters, TokenBudget
from triolet.core.scheduling.policies.registry import POLICIES
from triolet.core.scheduling.sequence import Sequence, commit_tokens, ending_of, largest_first
from triolet.core.scheduling.step_planner import SpeculativeDecoding, StepPlanner
from triolet.core.step_plan import (
    PooledVectors,
    PromptLogprobs,
    RowFailure,
    SampledToken,
    StepPlan,
    StepResult,
)
from triolet.errors import InvariantViolated

__all__ = ["Scheduler", "SchedulerConfig", "SchedulerCounters"]

MAX_STEPS_IN_FLIGHT = 2
"""Plans that the runner may have: the one that it computes, and the one after it."""


@attrs.define(eq=False)
class StepInFlight:
    """One plan and the sequences in it, in the order of its rows."""

    plan: StepPlan
    scheduled: list[Sequence]  # also those that have ended since
    is_assumed: bool = attrs.field(
        default=False, init=False
    )  # whether the step after it was planned, or tried to be
    is_void: bool = attrs.field(default=False, init=False)  # whether the step before it found no memory

    @property
    def step_id(self) -> int:
        """Id of the plan."""
        return self.plan.step_id

    def num_tokens(self, sequence: Sequence) -> int:
        """Return the tokens of a sequence in this step; 0 if it has ended, or the step is void."""
        return sequence.num_assumed_tokens if self.is_assumed else sequence.num_scheduled_tokens

    @property
    def live(self) -> Iterator[Sequence]:
        """The sequences that still have a share in it."""
        return (sequence for sequence in self.scheduled if self.num_tokens(sequence))

    def marks(self) -> dict[int, int]:
        """Return, by serial, how many known tokens each live request has computed if the step succeeds."""
        return {
            sequence.entry.serial: sequence.num_expected_tokens if self.is_assumed else sequence.end
            for sequence in self.live
        }

    def assume(self) -> None:
        """Take the step for done, so that the one after it can be planned. Harmless when repeated."""
        if not self.is_assumed:
            for sequence in self.live:
                sequence.assume()
            self.is_assumed = True

    def recall(self) -> None:
        """Undo `assume`: the step was not computed."""
        if self.is_assumed:
            for sequence in self.live:
                sequence.recall()
            self.is_assumed = False

    def make_void(self) -> None:
        """Take back all shares: the runner computes nothing of the plan."""
        self.recall()
        for sequence in self.scheduled:
            sequence.num_scheduled_tokens = 0
        self.is_void = True


class Scheduler:
    """Scheduler of one engine; all its state can be rebuilt from the journal.

    Args:
        journal: requests and answers; whatever is live in it when the scheduler is built must be added again.
        counters: totals to go on with; also numbers the steps, so that no step id is ever used twice.
        recovery: state learned from earlier failed steps.
        costs: of a step, learned from earlier ones.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        journal: Journal,
        counters: SchedulerCounters | None = None,
        recovery: RecoveryState | None = None,
        costs: CostModel | None = None,
    ) -> None:
        self.config = config
        self.journal = journal
        self.counters = counters or SchedulerCounters()
        self.recovery = recovery or RecoveryState()
        self.cache = PrefixCache(
            config.num_blocks,
            config.block_size,
            key=config.cache_key,
            enabled=config.enable_prefix_caching,
            weight_version=config.weight_version,
            remembers_saves=config.stores_blocks,
            groups=config.groups,
        )
        self.pool = self.cache.pool
        policy = POLICIES[config.policy]
        self._token_budget = TokenBudget(
            config, costs or CostModel(), allows_long_steps=policy.allows_long_steps
        )
        waiting = policy(config, self._token_budget)
        self._queues = RequestQueues(config, journal, self.counters, self.pool, waiting)
        self._speculative = SpeculativeDecoding(config, self.counters, self.recovery)
        self._planner = StepPlanner(
            config=config,
            journal=journal,
            counters=self.counters,
            queues=self._queues,
            cache=self.cache,
            budget=self._token_budget,
            recovery=self.recovery,
            speculative=self._speculative,
        )
        self._in_flight: list[StepInFlight] = []  # in the order in which they were planned
        self._must_reset = False
        self.last_serial = math.inf  # requests after this one are not computed now
        self._deadlines = Deadlines()
        self._progress: dict[int, None] = {}

    # ------------------------------------------------------------------------------------- requests

    @property
    def num_running(self) -> int:
        """Number of requests with a row."""
        return len(self._queues.running)

    @property
    def num_waiting(self) -> int:
        """Number of requests without a row."""
        return len(self._queues.waiting)

    @property
    def num_deferred(self) -> int:
        """Number of waiting requests that a rule defers, whatever is free."""
        return sum(not self._planner.may_be_admitted(sequence) for sequence in self._queues.waiting)

    @property
    def is_step_in_flight(self) -> bool:
        """True if a plan was made and its result is not there yet."""
        return bool(self._in_flight)

    @property
    def may_plan(self) -> bool:
        """True if `plan_step` may be called: no step is in flight, or one whose result the next plan does not need."""
        if not self._in_flight:
            return True
        first = self._in_flight[0]
        return (
            self.config.async_scheduling
            and len(self._in_flight) < MAX_STEPS_IN_FLIGHT
            and bool(first.plan.rows)
            and not (first.is_void or self._must_reset)
            # Step by step, so that the next crash names the token.
            and not self.recovery.poison_bisection.crashed
            # The mask of a row's next token depends on the token before it.
            and all(one.entry.request.constraint is None for one in self._queues.running)
        )

    def add(self, entry: JournalEntry) -> None:
        """Queue a live request of the journal, and begin a residency of it."""
        sequence = self._queues.enter(entry)
        self._deadlines.add(entry.serial, min(entry.request.deadline_s, entry.request.queue_deadline_s))
        # The last scheduler may have crashed between the token that ends a request and its end.
        if entry.output_token_ids and (ending := ending_of(entry)) is not None:
            self._finish(sequence, *ending)
        elif entry.is_pooled:
            self._finish(sequence, FinishReason.STOP)
        else:
            self._fail_if_too_long(sequence)

    def add_arrivals(self) -> None:
        """Queue the requests added to the journal since the last call."""
        for entry in self.journal.take_arrivals():
            if entry.serial not in self._queues.live:
                self.add(entry)

    def release_waiting(self) -> tuple[JournalEntry, ...]:
        """Give up the requests that wait for a row, but those that crashes are being searched with; return them."""
        crashed = self.recovery.poison_bisection.crashed
        released = [one for one in self._queues.waiting if one.entry.serial not in crashed]
        for sequence in released:
            self._queues.leave(sequence, None)
        return tuple(sequence.entry for sequence in released)

    def abort(self, serial: int, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request, queued or running; a request that has ended is not changed."""
        if (sequence := self._queues.live.get(serial)) is not None:
            self._finish(sequence, reason)
        elif (entry := self.journal.get(serial)) is not None:
            entry.finish(reason)
            self._close(entry)

    def _finish(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        entry = sequence.entry
        entry.finish(reason, stop_reason)
        self._close(entry)
        # Its blocks wait for the end of the last step in flight, which may still write to them.
        self._queues.leave(sequence, self._last_step_id)

    def _fail_if_too_long(self, sequence: Sequence) -> None:
        """Fail a request that has no room for another token: it was admitted by a runner with a larger KV cache."""
        config, entry = self.config, sequence.entry
        if entry.num_needed_places > config.num_places:
            entry.failure = (
                f"it has {entry.num_tokens} tokens and no room for another: the model runner has now "
                f"{config.num_blocks} KV blocks, and max_model_len is {config.num_places}"
            )
            self._finish(sequence, FinishReason.ERROR)

    def _close(self, entry: JournalEntry) -> None:
        for serial in self.journal.close(entry):
            if serial in self.recovery.poison_bisection.crashed:
                self.recovery.poison_bisection.ended(serial)
            self._progress[serial] = None

    def next_deadline(self) -> float:
        """Return the time of the next call of `expire`, monotonic seconds; infinity for never."""
        return self._deadlines.next_s(self._queues.live)

    def expire(self, now_s: float) -> None:
        """End the requests past their deadlines; they keep the tokens generated so far."""
        while self.next_deadline() <= now_s:
            entry = self._queues.live[self._deadlines.pop()].entry
            if is_overdue(entry, now_s):
                self._finish(self._queues.live[entry.serial], FinishReason.DEADLINE)
            else:  # it is no longer queued
                self._deadlines.add(entry.serial, entry.request.deadline_s)

    def report(self, serials: Iterable[int]) -> None:
        """Include these requests in the next progress, changed or not."""
        self._progress.update(dict.fromkeys(serials))

    def take_progress(self) -> tuple[int, ...]:
        """Return the serials of requests with changed journal entries since the last call."""
        serials = tuple(self._progress)
        self._progress.clear()
        return serials

    def guide(self, serial: int, guidance: TokenMask) -> None:
        """Set the mask of the next token of an answer; end the request if no token may follow."""
        sequence = self._queues.live.get(serial)
        # A late answer: the request has ended, or another token has come meanwhile.
        if sequence is None or len(sequence.entry.output_token_ids) != guidance.position:
            return
        sequence.entry.guidance = guidance
        if guidance.problem is not None:
            sequence.entry.failure = guidance.problem
            self._finish(sequence, FinishReason.ERROR)
        elif guidance.is_over:
            self._finish(sequence, FinishReason.STOP)

    def whereabouts(self, serial: int) -> tuple[int, int, int]:
        """Return the number of requests before this one, as far as is known, its computed tokens, and its blocks."""
        if (sequence := self._queues.live.get(serial)) is None:
            return len(self._queues.waiting), 0, 0  # it is about to be queued
        position = 0 if sequence.row_id is not None else self._queues.waiting.position(sequence)
        return position, sequence.num_computed_tokens, len(held_blocks(sequence))

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Empty the prefix cache, if no block is in use or running requests may be preempted for it.

        Args:
            reset_running_requests: preempt running requests before the next step, and empty it then.
        Returns:
            Whether no request admitted from now on finds any of its blocks.
        """
        if self.cache.reset():
            return True
        if reset_running_requests:
            self._must_reset = True
        return reset_running_requests

    # ---------------------------------------------------------------------------------------- steps

    def plan_step(self, now_s: float) -> StepPlan | None:
        """Decide the next step; None when nothing can be computed, or not before the step in flight has ended."""
        assert self.may_plan, "a step is in flight"
        self._planner.last_serial = self.last_serial
        if self._in_flight:
            self._in_flight[0].assume()
            return self._began(self._planner.plan_ahead(now_s))
        if self._must_reset:
            for sequence in tuple(self._queues.running):
                self._queues.preempt(sequence)
            self._must_reset = not self.cache.reset()
        return self._began(self._planner.plan(now_s))

    def _began(self, plan: StepPlan | None) -> StepPlan | None:
        if plan is not None:
            self._in_flight.append(StepInFlight(plan, self._planner.scheduled))
        return plan

    def apply(self, result: StepResult, now_s: float) -> None:
        """Apply the result of a step; a result of any other plan than the oldest in flight changes nothing."""
        # A late result of a step that was abandoned.
        if not self._in_flight or result.step_id != self._in_flight[0].step_id:
            return
        step = self._in_flight[0]
        plan = step.plan
        if result.is_last:
            del self._in_flight[0]
            self.pool.end_quarantine(result.step_id)
        self.counters.num_failed_kv_saves += result.num_failed_saves
        # Nothing was computed, so none of the counts below may change.
        if not plan.rows or step.is_void:
            return
        if result.out_of_memory is not None:
            self._make_smaller(step, result.out_of_memory)
            return
        self.counters.num_steps_done += 1
        self.counters.external_prefix_cache_queries += (
            len(plan.loads) * self.config.block_size if result.is_last else 0
        )
        self.counters.external_prefix_cache_hits += result.num_loaded_tokens
        if not result.num_loaded_tokens:  # what is read says nothing about what computing costs
            self._token_budget.step_done(plan, result.elapsed_s)
        self.journal.stats.step(sum(map(step.num_tokens, step.scheduled)))
        self.recovery.memory.step_done(self.config.max_num_seqs, self.config.max_num_batched_tokens)
        if self.recovery.poison_bisection.has_candidates:
            self.recovery.poison_bisection.step_done(step.marks())
        tokens: list[SampledToken] = []
        failures: dict[int, RowFailure] = {}
        pooled: list[Sequence] = []
        for row in result.rows:
            match row:
                case SampledToken():
                    tokens.append(row)
                case PromptLogprobs():
                    if (prompted := self._queues.by_epoch.get(row.epoch)) is not None:
                        prompted.entry.add_prompt_logprobs(row, self.journal.weight_version)
                case RowFailure():
                    failures[row.epoch] = row
                case PooledVectors():
                    sequence = self._queues.by_epoch.get(row.epoch)
                    # one that comes twice ends its request once
                    if sequence is not None and self.journal.commit_pooled(sequence.entry, row):
                        pooled.append(sequence)
        grown = commit_tokens(self.journal, tokens, self._queues.by_epoch, now_s)
        for sequence in step.scheduled:
            # Also for a request that has ended meanwhile: the next one with its adapter must not fail for it.
            if sequence.entry.epoch in failures and self._planner.adapters is not None:
                self._planner.adapters.load_again(sequence)
            if step.num_tokens(sequence):  # still running: not ended meanwhile
                self._speculative.end_step(sequence)
                if sequence.entry.epoch not in failures:  # the KV of a failed row may be NaN, too
                    publish_computed(self.cache, sequence)
                if self.config.groups.window is not None:
                    release_passed(self.cache, sequence, self._last_step_id)
        for epoch, ending in grown.items():
            self._progress[self._queues.by_epoch[epoch].entry.serial] = None
            if ending is not None:
                self._finish(self._queues.by_epoch[epoch], *ending)
            else:
                self._fail_if_too_long(self._queues.by_epoch[epoch])
        for sequence in pooled:
            if sequence.entry.is_pooled:
                self._finish(sequence, FinishReason.STOP)
        for epoch, failure in failures.items():
            if (failed := self._queues.by_epoch.get(epoch)) is not None:
                failed.entry.failure = failure.reason
                self._finish(failed, FinishReason.ERROR)
        if not result.is_last:
            self._planner.go_on(now_s)
            step.scheduled = self._planner.scheduled
        self.add_arrivals()  # those that waited for a first token

    def _make_smaller(self, step: StepInFlight, problem: str) -> None:
        """Preempt the largest rows of a step that did not fit into memory, so that the others are tried again."""
        for later in self._in_flight:
            later.make_void()
        step.recall()
        rows = largest_first(step.scheduled)
        num_tokens = [sequence.num_scheduled_tokens for sequence in rows]
        # Without those that have ended since, it is a smaller step already.
        is_whole = sum(num_tokens) == step.plan.num_tokens
        if self.config.whole_prompts and len(rows) == 1:
            num_tokens = [1]  # it cannot be divided
        num_leaving = self.recovery.memory.step_did_not_fit(num_tokens) if is_whole else 0
        for sequence in rows:
            sequence.num_scheduled_tokens = 0
        for sequence in rows[: 1 if num_leaving is None else num_leaving]:
            if num_leaving is None:
                sequence.entry.failure = (
                    f"there is no memory for {'it' if self.config.whole_prompts else 'even one token of it'} alone: "
                    f"{problem}"
                )
                self._finish(sequence, FinishReason.ERROR)
            else:
                self._queues.preempt(sequence, self._last_step_id)

    @property
    def must_halt(self) -> bool:
        """True if the run in flight must end after the current step, because there is something to decide."""
        if not self._in_flight or self._in_flight[0].plan.num_steps == 1:
            return False
        plan = self._in_flight[0].plan
        has_left = len(self._queues.running) < len(plan.rows)
        return has_left or bool(self._queues.waiting) or self._must_reset

    def is_in_flight(self, plan: StepPlan) -> bool:
        """Return True if this plan is in flight."""
        return any(step.plan is plan for step in self._in_flight)

    def marks(self) -> dict[int, int]:
        """Return, by serial, how many known tokens each request of the steps in flight has computed if they succeed."""
        marks: dict[int, int] = {}
        for step in self._in_flight:
            marks |= step.marks()
        return marks

    @property
    def num_rows_in_flight(self) -> int:
        """Number of requests in the steps in flight, with those that have ended since."""
        if not self._in_flight:
            return 0
        first, *later = self._in_flight
        others = {id(one) for step in later for one in step.scheduled} - set(map(id, first.scheduled))
        return len(first.plan.rows) + len(others)

    @property
    def _last_step_id(self) -> int | None:
        return self._in_flight[-1].step_id if self._in_flight else None

    def abandon_step(self) -> None:
        """Drop the steps in flight: free their quarantined blocks, and count nothing of them."""
        for step in reversed(self._in_flight):
            self.pool.end_quarantine(step.step_id)
            step.make_void()
        self._in_flight.clear()

    # ---------------------------------------------------------------------------------------- check

    def check(self) -> None:
        """Compare every count with every other.

        Raises:
            InvariantViolated: two of them differ.
        """
        self.pool.check(held_blocks(sequence) for sequence in self._queues.running)
        self._check_tables()
        self.cache.check()
        self.journal.check()
        self._queues.check()

    def _check_tables(self) -> None:
        """Check that a table has holes where its window has passed, and blocks of every group elsewhere."""
        groups, size = self.config.groups, self.config.block_size
        for sequence in self._queues.running:
            table, num_passed = sequence.block_table, sequence.num_passed_blocks
            windowed = [index // groups.count for index, one in enumerate(table) if one == HOLE]
            expected = [i for i in range(num_passed) for _ in range(groups.count - groups.num_full)]
            if len(table) % groups.count or windowed != expected:
                raise InvariantViolated(
                    f"holes of {sequence.entry.serial} must be at {expected}; got {windowed}"
                )
            if num_passed > groups.num_behind(sequence.num_computed_tokens, size):
                raise InvariantViolated(f"{sequence.entry.serial} lost a block that its window reaches")
