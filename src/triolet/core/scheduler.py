"""Which tokens the next step computes, and what its result means.

Theory of operation
-------------------
There is no prefill phase and no decode phase. Every request has tokens that are known (prompt and answer) and
tokens that are computed (their KV is present); each step spends one token budget on letting the second catch
up with the first. A request whose tokens all get computed in a step has a new one sampled at its end. Chunked
prefill is what happens when the budget is smaller than a prompt; a decode is a request that is one token
behind.

Running requests go first, then waiting ones in order of policy, each after a look into the prefix cache. A
running request that needs a block when there is none takes it from the worst running one, possibly itself,
which loses everything it computed and waits again at its old place (recompute; the prefix cache often makes
that cheap). A step that preempted so admits nobody. What is left of a budget goes into guesses (`core.drafting`).

What the policy is, is the waiting line's to say (`core.waiting`, `core.fairness`): its order, and whether one who
waits may take the row of one who runs. Who may is let in before the others are served.

Three verbs, in turns: `plan_step()` when no step is in flight, `apply()` when its result is there, and
between any two of them `add()`, `abort()`, `expire()`. Blocks of a request that ends while a step works on
them are quarantined until that step ends. The answer itself lives in the journal; `take_progress()` names the
requests whose entries have moved.

Steps that go wrong make the scheduler cautious (`core.caution`): while a request that crashes the runner is looked for,
all but a few wait, and while memory is short, steps are smaller.
"""

from __future__ import annotations

from bisect import insort

from triolet.core.caution import Caution
from triolet.core.deadlines import Deadlines, is_overdue
from triolet.core.drafting import Drafting
from triolet.core.ending import commit_tokens, ending_of
from triolet.core.fairness import FairLine
from triolet.core.guidance import Guidance
from triolet.core.journal import Journal, JournalEntry
from triolet.core.outputs import FinishReason
from triolet.core.pacing import Pace
from triolet.core.plan import RowStart, StepPlan, StepResult
from triolet.core.prefix_cache import PrefixCache
from triolet.core.reuse import find_computed, has_room, publish_computed
from triolet.core.scheduler_check import check_lanes, check_rows
from triolet.core.scheduler_config import SchedulerConfig, SchedulerCounters
from triolet.core.sequence import Sequence, largest_first
from triolet.core.waiting import WaitingLine, by_order

__all__ = ["Scheduler", "SchedulerConfig", "SchedulerCounters"]


class Scheduler:
    """See the module's text.

    Args:
        config: limits.
        journal: requests and answers; whatever is live in it when the scheduler is built must be added again.
        counters: totals to go on with; also numbers the steps, so that no step id is ever used twice.
        caution: what earlier steps have taught.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        journal: Journal,
        counters: SchedulerCounters | None = None,
        caution: Caution | None = None,
    ) -> None:
        self.config = config
        self.journal = journal
        self.counters = counters or SchedulerCounters()
        self.caution = caution or Caution()
        self.cache = PrefixCache(
            config.num_blocks, config.block_size, key=config.cache_key, enabled=config.enable_prefix_caching
        )
        self.pool = self.cache.pool
        self._sequences: dict[int, Sequence] = {}
        self._running: list[Sequence] = []
        self._pace = Pace(config)
        self._waiting = FairLine(config, self._pace) if config.policy == "fair" else WaitingLine(config)
        self._drafting = Drafting(config, self.counters, self.caution)
        self._must_reset = False
        self._by_epoch: dict[int, Sequence] = {}
        self._free_rows = list(range(config.max_num_seqs))
        # A runner that outlived the last scheduler may still hold its rows.
        self._ended_rows: list[int] = list(range(config.max_num_seqs))
        self._deadlines = Deadlines()
        self._in_flight: StepPlan | None = None
        self._scheduled: list[Sequence] = []
        self._starts: list[RowStart] = []
        self._progress: dict[int, None] = {}

    # ------------------------------------------------------------------------------------- requests

    @property
    def num_running(self) -> int:
        """Requests with a row."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests without one."""
        return len(self._waiting)

    @property
    def is_step_in_flight(self) -> bool:
        """Whether a plan was made and its result is not there yet."""
        return self._in_flight is not None

    def add(self, entry: JournalEntry) -> None:
        """Queue a live request of the journal, for a stay of its own.

        A scheduler may crash between a token and what follows from it. Then the next one, here, ends the request.
        """
        self.journal.begin_stay(entry)
        sequence = Sequence(entry, self._waiting.order(entry))
        self._sequences[entry.serial] = sequence
        self._by_epoch[entry.epoch] = sequence
        self._waiting.add(sequence)
        self._deadlines.add(entry.serial, min(entry.request.deadline_s, entry.request.queue_deadline_s))
        if entry.output_token_ids and (ending := ending_of(entry)) is not None:
            self._finish(sequence, *ending)

    def add_arrivals(self) -> None:
        """Queue what has come into the journal since the last call."""
        for entry in self.journal.take_arrivals():
            if entry.serial not in self._sequences:
                self.add(entry)

    def abort(self, serial: int, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request whatever it is doing, or before it was queued. Ended ones are left alone."""
        if (sequence := self._sequences.get(serial)) is not None:
            self._finish(sequence, reason)
        elif (entry := self.journal.get(serial)) is not None:
            entry.finish(reason)
            self._close(entry)

    def _finish(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        entry = sequence.entry
        entry.finish(reason, stop_reason)
        self._close(entry)
        del self._sequences[entry.serial]
        del self._by_epoch[entry.epoch]
        if sequence.row_id is None:
            self._waiting.remove(sequence)
        else:
            self._running.remove(sequence)
            self._take_back(sequence)

    def _close(self, entry: JournalEntry) -> None:
        for serial in self.journal.close(entry):
            self.caution.suspects.ended(serial)
            self._progress[serial] = None

    def _take_back(self, sequence: Sequence) -> None:
        """Free the row and the blocks; while a step is in flight, which all that run take part in, when it ends."""
        assert sequence.row_id is not None
        step_id = self._in_flight.step_id if self._in_flight else None
        self.pool.release(sequence.block_table, step_id=step_id)
        self._free_rows.append(sequence.row_id)
        self._ended_rows.append(sequence.row_id)
        self._waiting.stopped(sequence)
        sequence.forget_computed()

    def next_deadline(self) -> float:
        """When `expire` has something to do, monotonic seconds; infinity for never."""
        return self._deadlines.next_s(self._sequences)

    def expire(self, now_s: float) -> None:
        """End the requests whose time is up; what they have so far stays theirs."""
        while self.next_deadline() <= now_s:
            entry = self._sequences[self._deadlines.pop()].entry
            if is_overdue(entry, now_s):
                self._finish(self._sequences[entry.serial], FinishReason.DEADLINE)
            else:  # it is no longer queued
                self._deadlines.add(entry.serial, entry.request.deadline_s)

    def take_progress(self) -> tuple[int, ...]:
        """Serials of the requests whose journal entries have moved since the last call."""
        serials = tuple(self._progress)
        self._progress.clear()
        return serials

    def guide(self, serial: int, guidance: Guidance) -> None:
        """Take in what may come next in an answer; whether anything may."""
        sequence = self._sequences.get(serial)
        if sequence is None or len(sequence.entry.output_token_ids) != guidance.position:
            return
        sequence.entry.guidance = guidance
        if guidance.problem is not None:
            sequence.entry.failure = guidance.problem
            self._finish(sequence, FinishReason.ERROR)
        elif guidance.is_over:
            self._finish(sequence, FinishReason.STOP)

    def whereabouts(self, serial: int) -> tuple[int, int, int]:
        """How many go before this request while it waits, as far as is known, its computed tokens, and its blocks."""
        if (sequence := self._sequences.get(serial)) is None:
            return len(self._waiting), 0, 0  # it is about to be queued
        position = 0 if sequence.row_id is not None else self._waiting.position(sequence)
        return position, sequence.num_computed_tokens, len(sequence.block_table)

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget what was computed, if no block is in use; else, on demand, once all that run were sent to wait.

        Returns:
            Whether nobody who is let in from now on finds any of it.
        """
        self._must_reset |= reset_running_requests and not self.cache.reset()
        return reset_running_requests or self.cache.reset()

    # ----------------------------------------------------------------------------------------- plan

    def plan_step(self, now_s: float) -> StepPlan | None:
        """Decide the next step; None when nothing can be computed.

        Args:
            now_s: monotonic seconds.
        """
        assert self._in_flight is None, "a step is in flight"
        self._scheduled, self._starts = [], []
        self._hold_back()
        self._waiting.begin_step(now_s)
        self._pace.begin_step(has_decodes=any(other.num_pending_tokens == 1 for other in self._running))
        budget = self.caution.memory.max_tokens(self.config.max_num_batched_tokens)
        budget = self._let_overtake(budget, now_s)
        budget, preempted = self._schedule_running(budget)
        if not preempted:
            budget = self._admit(budget, now_s)
            self._drafting.add_drafts(self._scheduled, budget, self.pool)
        if not self._scheduled:
            return None
        self.counters.steps += 1
        plan = StepPlan(
            self.counters.steps,
            tuple(self._ended_rows),
            tuple(self._starts),
            tuple(sequence.take_row() for sequence in self._scheduled),
        )
        self._ended_rows.clear()
        self._in_flight = plan
        return plan

    def _hold_back(self) -> None:
        """Send those back to wait that may not take part in the next step."""
        if self._must_reset:
            for sequence in tuple(self._running):
                self._preempt(sequence)
            self._must_reset = not self.cache.reset()
        may_run = self.caution.suspects.may_run
        for sequence in [sequence for sequence in self._running if not may_run(sequence.entry.serial)]:
            self._preempt(sequence)
        while len(self._running) > self._max_rows:
            self._preempt(self._running[-1])

    @property
    def _max_rows(self) -> int:
        return self.caution.memory.max_rows(self.config.max_num_seqs)

    def _may_be_let_in(self, sequence: Sequence) -> bool:
        return not sequence.entry.awaits_guidance and self.caution.suspects.may_run(sequence.entry.serial)

    def _let_overtake(self, budget: int, now_s: float) -> int:
        """Let those in that may take the place of a running one. What is returned of the budget has a token for each of
        the others.
        """
        may_run = self._may_be_let_in
        while self._pace.has_room and (pair := self._waiting.overtaking(self._running, may_run)) is not None:
            sequence, victim = pair
            spare = budget - sum(other.is_unserved for other in self._running)
            if num_tokens := self._let_in(sequence, spare, now_s):
                budget -= num_tokens
            else:
                self._preempt(victim)
        return budget

    def _schedule_running(self, budget: int) -> tuple[int, bool]:
        """Give every running request its tokens, as far as blocks go; decodes first, somebody reads along.

        Nobody who decodes starves: a request is let in only where budget is left over, so no more run than the
        budget has tokens. Of those that are still at their prompts, the last may have to wait for the others.

        Returns:
            What is left of the budget, and whether anybody was preempted.
        """
        preempted = False
        order = self._waiting.service_order(list(self._running))
        for sequence in sorted(self._waiting.taking_part(order), key=lambda s: s.num_pending_tokens > 1):
            if not (sequence.is_unserved and budget) or sequence.entry.awaits_guidance:
                continue  # it has lost its blocks to one before it, has its tokens, or can not use any
            if not (num_tokens := self._portion(sequence, sequence.num_pending_tokens, budget)):
                continue  # the step is long enough
            missing = sequence.num_missing_blocks(num_tokens, self.config.block_size)
            while missing > self.pool.num_available and sequence.row_id is not None:
                preempted = True
                self._preempt(next(other for other in reversed(order) if other.is_unserved))
            if sequence.row_id is not None:
                self._schedule(sequence, num_tokens, missing)
                budget -= num_tokens
        return budget, preempted

    def _preempt(self, victim: Sequence) -> None:
        """Send a running request back to wait, at its old place."""
        assert victim.num_scheduled_tokens == 0
        self._running.remove(victim)
        self._take_back(victim)
        del self._by_epoch[victim.entry.epoch]
        self._by_epoch[self.journal.begin_stay(victim.entry)] = victim
        self._waiting.add(victim)
        victim.entry.num_preemptions += 1
        self.counters.num_preemptions += 1

    def _admit(self, budget: int, now_s: float) -> int:
        """Let waiting requests in, in order, as long as rows, budget and blocks last; what is left of the budget."""
        while (sequence := self._waiting.next(self._may_be_let_in)) is not None:
            if not (num_tokens := self._let_in(sequence, budget, now_s)):
                break
            budget -= num_tokens
        return budget

    def _let_in(self, sequence: Sequence, budget: int, now_s: float) -> int:
        """Give a waiting request a row, and all the blocks that its known tokens need: let in half, it would soon
        fight its neighbours for the rest.

        Returns:
            How many tokens of the budget it gets; 0 if it can not be let in.
        """
        if budget <= 0 or len(self._running) >= self._max_rows:
            return 0
        entry = sequence.entry
        block_ids, hashes = find_computed(self.cache, sequence, self._sequences.get(entry.leader_serial))
        if not has_room(self.cache, entry, block_ids):
            return 0
        num_cached = len(block_ids) * self.config.block_size
        if not (num_tokens := self._portion(sequence, entry.num_tokens - num_cached, budget)):
            return 0
        self._waiting.remove(sequence)
        self.pool.share(block_ids)
        sequence.begin(self._free_rows.pop(), block_ids, hashes, num_cached)
        insort(self._running, sequence, key=by_order)
        self._waiting.started(sequence)
        missing = sequence.num_missing_blocks(sequence.num_pending_tokens, self.config.block_size)
        self._schedule(sequence, num_tokens, missing)
        if self.config.enable_prefix_caching:
            self.counters.prefix_cache_queries += entry.num_tokens
            self.counters.prefix_cache_hits += num_cached
        self.journal.scheduled(entry, now_s, num_cached)
        self._starts.append(sequence.row_start())
        return num_tokens

    def _portion(self, sequence: Sequence, num_pending: int, budget: int) -> int:
        """How many of its pending tokens a request gets in the step that is being planned."""
        return self._waiting.portion(sequence, self._pace.chunk(min(num_pending, budget)))

    def _schedule(self, sequence: Sequence, num_tokens: int, num_missing_blocks: int) -> None:
        if num_missing_blocks > 0:
            sequence.block_table += self.pool.allocate(num_missing_blocks)
        sequence.schedule(num_tokens, self.counters.steps + 1)
        self._scheduled.append(sequence)
        self._waiting.charge(sequence, sequence.num_computed_tokens + num_tokens)

    # ---------------------------------------------------------------------------------------- apply

    def apply(self, result: StepResult, now_s: float) -> None:
        """Take in what a step gave; a result of any other step than the one in flight changes nothing.

        Args:
            result: from the runner.
            now_s: monotonic seconds.
        """
        if self._in_flight is None or result.step_id != self._in_flight.step_id:
            return
        plan, self._in_flight = self._in_flight, None
        self.pool.end_quarantine(result.step_id)
        if result.out_of_memory is not None:
            self._make_smaller(plan, result.out_of_memory)
            return
        self.counters.num_steps_done += 1
        self._pace.step_done(plan, result.elapsed_s)
        self.journal.tally.step(sum(sequence.num_scheduled_tokens for sequence in self._scheduled))
        self.caution.memory.step_done(self.config.max_num_seqs, self.config.max_num_batched_tokens)
        self.caution.suspects.step_done(self.marks())
        failed_epochs = {failure.epoch for failure in result.failures}
        grown = commit_tokens(self.journal, result.tokens, self._by_epoch, now_s)
        for sequence in self._scheduled:
            if sequence.num_scheduled_tokens:  # still running: not ended meanwhile
                self._drafting.end_step(sequence)
                if sequence.entry.epoch not in failed_epochs:  # whose KV may be no numbers either
                    publish_computed(self.cache, sequence)
        self._scheduled = []
        for share in result.prompt_logprobs:
            if (prompted := self._by_epoch.get(share.epoch)) is not None:
                prompted.entry.add_prompt_logprobs(share)
        for epoch, ending in grown.items():
            self._progress[self._by_epoch[epoch].entry.serial] = None
            if ending is not None:
                self._finish(self._by_epoch[epoch], *ending)
        for failure in result.failures:
            if (failed := self._by_epoch.get(failure.epoch)) is not None:
                failed.entry.failure = failure.reason
                self._finish(failed, FinishReason.ERROR)
        self.add_arrivals()  # those that waited for a first token

    def _make_smaller(self, plan: StepPlan, problem: str) -> None:
        """There was no memory for the step: its largest rows leave, and the others try again."""
        rows = largest_first(self._scheduled)
        num_tokens = [sequence.num_scheduled_tokens for sequence in rows]
        # Without those that have ended since, it is a smaller step already.
        is_whole = sum(num_tokens) == plan.num_tokens
        num_leaving = self.caution.memory.step_did_not_fit(num_tokens) if is_whole else 0
        for sequence in rows:
            sequence.num_scheduled_tokens = 0
        self._scheduled = []
        for sequence in rows[: 1 if num_leaving is None else num_leaving]:
            if num_leaving is None:
                sequence.entry.failure = f"there is no memory for even one token of it alone: {problem}"
                self._finish(sequence, FinishReason.ERROR)
            else:
                self._preempt(sequence)

    def is_in_flight(self, plan: StepPlan) -> bool:
        """Whether this is the step whose result is waited for."""
        return self._in_flight is plan

    def marks(self) -> dict[int, int]:
        """Of the requests in the step in flight, how many of their known tokens are computed when it succeeds."""
        return {row.entry.serial: row.end for row in self._scheduled if row.num_scheduled_tokens}

    def abandon_step(self) -> None:
        """Nobody computes the step in flight any more: what it worked on is free, and nothing of it counts."""
        if self._in_flight is not None:
            self.pool.end_quarantine(self._in_flight.step_id)
            for sequence in self._scheduled:
                sequence.num_scheduled_tokens = 0
            self._in_flight, self._scheduled = None, []

    # ---------------------------------------------------------------------------------------- check

    def check(self) -> None:
        """Hold every count against every other.

        Raises:
            InvariantViolated: with what differs.
        """
        self.pool.check(sequence.block_table for sequence in self._running)
        self.cache.check()
        self.journal.check()
        check_lanes(self.config, self._sequences, self._by_epoch, self._running, tuple(self._waiting))
        self._waiting.check()
        check_rows(self.config, self._free_rows, self._running)
