"""Scheduler: decides what the next step computes, and applies the result of it to the requests.

Theory of operation
-------------------
The caller alternates `plan_step()`, when no step is in flight, and `apply()`, when its result is there; between any two
of them it may call `add()`, `abort()`, `expire()`. A plan may be for several steps: then there are as many results, and
`must_halt` says when the run should end early. Blocks of a request that ends while a step works on them are quarantined
until that step ends, or, in a run, the last one. The answer itself lives in the journal; `take_progress()` names the
requests whose entries have moved.

Waiting and running requests are kept in `core.scheduling.admission`; which tokens a step computes is decided in
`core.scheduling.step_planner`.

Failed steps limit the next ones (`core.recovery.recovery_state`): during the search for
a request that crashes the runner all but a few wait, and after an out-of-memory error steps are smaller.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from triolet.core.journal import Journal, JournalEntry
from triolet.core.kv_cache.prefix_cache import PrefixCache
from triolet.core.recovery.recovery_state import RecoveryState
from triolet.core.request.grammar_state import TokenMask
from triolet.core.request.request import FinishReason
from triolet.core.scheduling.admission import Deadlines, RequestQueues, is_overdue, publish_computed
from triolet.core.scheduling.budget import SchedulerConfig, SchedulerCounters, TokenBudget
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

__all__ = ["Scheduler", "SchedulerConfig", "SchedulerCounters"]


class Scheduler:
    """Scheduler of one engine; all its state can be rebuilt from the journal.

    Args:
        journal: requests and answers; whatever is live in it when the scheduler is built must be added again.
        counters: totals to go on with; also numbers the steps, so that no step id is ever used twice.
        recovery: state learned from earlier failed steps.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        journal: Journal,
        counters: SchedulerCounters | None = None,
        recovery: RecoveryState | None = None,
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
        )
        self.pool = self.cache.pool
        policy = POLICIES[config.policy]
        self._token_budget = TokenBudget(config, allows_long_steps=policy.allows_long_steps)
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
        self._in_flight: StepPlan | None = None
        self._scheduled: list[Sequence] = []  # the sequences in it
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
        return self._in_flight is not None

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
        # Its blocks wait for the end of a step in flight, which still writes to them.
        self._queues.leave(sequence, self._in_flight.step_id if self._in_flight else None)

    def _fail_if_too_long(self, sequence: Sequence) -> None:
        """Fail a request that has no room for another token: it was admitted by a runner with a larger KV cache."""
        config, entry = self.config, sequence.entry
        num_places = min(config.max_model_len, config.num_blocks * config.block_size)
        if entry.num_needed_places > num_places:
            entry.failure = (
                f"it has {entry.num_tokens} tokens and no room for another: the model runner has now "
                f"{config.num_blocks} KV blocks, and max_model_len is {num_places}"
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
        return position, sequence.num_computed_tokens, len(sequence.block_table)

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
        """Decide the next step; None when nothing can be computed."""
        assert self._in_flight is None, "a step is in flight"
        if self._must_reset:
            for sequence in tuple(self._queues.running):
                self._queues.preempt(sequence)
            self._must_reset = not self.cache.reset()
        self._planner.last_serial = self.last_serial
        self._in_flight = self._planner.plan(now_s)
        self._scheduled = self._planner.scheduled
        return self._in_flight

    def apply(self, result: StepResult, now_s: float) -> None:
        """Apply the result of a step; a result of any other plan than the one in flight changes nothing."""
        # A late result of a step that was abandoned.
        if self._in_flight is None or result.step_id != self._in_flight.step_id:
            return
        plan = self._in_flight
        if result.is_last:
            self._in_flight = None
            self.pool.end_quarantine(result.step_id)
        self.counters.num_failed_kv_saves += result.num_failed_saves
        # Nothing was computed, so none of the counts below may change.
        if not plan.rows:
            return
        if result.out_of_memory is not None:
            self._make_smaller(plan, result.out_of_memory)
            return
        self.counters.num_steps_done += 1
        self.counters.external_prefix_cache_queries += (
            len(plan.loads) * self.config.block_size if result.is_last else 0
        )
        self.counters.external_prefix_cache_hits += result.num_loaded_tokens
        if not result.num_loaded_tokens:  # what is read says nothing about what computing costs
            self._token_budget.step_done(plan, result.elapsed_s)
        self.journal.stats.step(sum(sequence.num_scheduled_tokens for sequence in self._scheduled))
        self.recovery.memory.step_done(self.config.max_num_seqs, self.config.max_num_batched_tokens)
        self.recovery.poison_bisection.step_done(self.marks())
        tokens: list[SampledToken] = []
        failures: dict[int, RowFailure] = {}
        pooled: list[Sequence] = []
        for row in result.rows:
            match row:
                case SampledToken():
                    tokens.append(row)
                case PromptLogprobs():
                    if (prompted := self._queues.by_epoch.get(row.epoch)) is not None:
                        prompted.entry.add_prompt_logprobs(row)
                case RowFailure():
                    failures[row.epoch] = row
                case PooledVectors():
                    sequence = self._queues.by_epoch.get(row.epoch)
                    # one that comes twice ends its request once
                    if sequence is not None and self.journal.commit_pooled(sequence.entry, row):
                        pooled.append(sequence)
        grown = commit_tokens(self.journal, tokens, self._queues.by_epoch, now_s)
        for sequence in self._scheduled:
            # Also for a request that has ended meanwhile: the next one with its adapter must not fail for it.
            if sequence.entry.epoch in failures and self._planner.adapters is not None:
                self._planner.adapters.load_again(sequence)
            if sequence.num_scheduled_tokens:  # still running: not ended meanwhile
                self._speculative.end_step(sequence)
                if sequence.entry.epoch not in failures:  # the KV of a failed row may be NaN, too
                    publish_computed(self.cache, sequence)
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
        self._scheduled = []
        if not result.is_last:
            self._planner.go_on(now_s)
            self._scheduled = self._planner.scheduled
        self.add_arrivals()  # those that waited for a first token

    def _make_smaller(self, plan: StepPlan, problem: str) -> None:
        """Preempt the largest rows of a step that did not fit into memory, so that the others are tried again."""
        rows = largest_first(self._scheduled)
        num_tokens = [sequence.num_scheduled_tokens for sequence in rows]
        # Without those that have ended since, it is a smaller step already.
        is_whole = sum(num_tokens) == plan.num_tokens
        if self.config.whole_prompts and len(rows) == 1:
            num_tokens = [1]  # it cannot be divided
        num_leaving = self.recovery.memory.step_did_not_fit(num_tokens) if is_whole else 0
        for sequence in rows:
            sequence.num_scheduled_tokens = 0
        self._scheduled = []
        for sequence in rows[: 1 if num_leaving is None else num_leaving]:
            if num_leaving is None:
                sequence.entry.failure = (
                    f"there is no memory for {'it' if self.config.whole_prompts else 'even one token of it'} alone: "
                    f"{problem}"
                )
                self._finish(sequence, FinishReason.ERROR)
            else:
                self._queues.preempt(sequence)

    @property
    def must_halt(self) -> bool:
        """True if the run in flight must end after the current step, because there is something to decide."""
        plan = self._in_flight
        if plan is None or plan.num_steps == 1:
            return False
        has_left = len(self._queues.running) < len(plan.rows)
        return has_left or bool(self._queues.waiting) or self._must_reset

    def is_in_flight(self, plan: StepPlan) -> bool:
        """Return True if this plan is the one in flight."""
        return self._in_flight is plan

    def marks(self) -> dict[int, int]:
        """Return, by serial, how many known tokens each request of the step in flight has computed if it succeeds."""
        return {row.entry.serial: row.end for row in self._scheduled if row.num_scheduled_tokens}

    def abandon_step(self) -> None:
        """Drop the step in flight: free its quarantined blocks, and count nothing of it."""
        if self._in_flight is not None:
            self.pool.end_quarantine(self._in_flight.step_id)
            for sequence in self._scheduled:
                sequence.num_scheduled_tokens = 0
            self._in_flight, self._scheduled = None, []

    # ---------------------------------------------------------------------------------------- check

    def check(self) -> None:
        """Compare every count with every other.

        Raises:
            InvariantViolated: two of them differ.
        """
        self.pool.check(sequence.block_table for sequence in self._queues.running)
        self.cache.check()
        self.journal.check()
        self._queues.check()
