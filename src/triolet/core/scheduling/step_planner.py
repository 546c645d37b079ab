"""Step planner: spends the token budget of a step on tokens that are known and not computed.

There is no prefill phase and no decode phase. Every request has tokens that are known (prompt and answer) and tokens
that are computed (their KV is present). A request whose tokens all get computed in a step has a new one sampled at its
end. Chunked prefill is what happens when the budget is smaller than a prompt; a decode is a request that is one token
behind.

Running requests go first, then waiting ones in order of policy, each after a look into the prefix cache. A
running request that needs a block when there is none takes it from the worst running one, possibly itself,
which loses everything it computed and waits again at its old place (recompute; the prefix cache often makes
that cheap). If windows free blocks as a sequence goes on (`core.kv_cache.cache_groups`), a chunk is first cut to the
blocks that there are. A step that preempted admits no request. Nor does it admit a request that should wait for a
prefix that the step computes for another one (`PrefixesInStep`). The rest of a budget goes into draft tokens. Where
nothing is left to decide, a plan is for several steps.

A step may be planned while the one before it is in flight (look-ahead, `core.scheduling.scheduler`). Such a plan
preempts no request: where it would have to, none is made before the result is there. An answer whose last token is on
its way has no share in it.

An encoder's prompts are computed whole, in one step each: their tokens attend in both directions.

The waiting queue implements the policy (`core.scheduling.policies.base`, `core.scheduling.policies.fair`): its order,
and whether a waiting request may take the row of a running one. Such requests are admitted before the others run.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

import attrs

from triolet.core.journal import Journal, JournalEntry
from triolet.core.kv_cache.block_pool import BlockPool
from triolet.core.kv_cache.cache_groups import UNLIMITED
from triolet.core.kv_cache.prefix_cache import PrefixCache
from triolet.core.recovery.recovery_state import RecoveryState
from triolet.core.scheduling.adapter_slots import AdapterSlots, adapter_of
from triolet.core.scheduling.admission import (
    Found,
    PrefixesInStep,
    RequestQueues,
    find_computed,
    has_room,
    held_blocks,
    stored_blocks,
)
from triolet.core.scheduling.budget import SchedulerConfig, SchedulerCounters, TokenBudget
from triolet.core.scheduling.ngram_proposer import NgramIndex
from triolet.core.scheduling.sequence import Sequence
from triolet.core.step_plan import BlockLoad, RowStart, StepPlan

# Looking at a token takes some 1.5 microseconds; a step's share of a long prompt must not hold up the loop.
MAX_FOLLOWED_TOKENS = 1024


@attrs.define
class _Drafter:
    """Draft state of one row."""

    index: NgramIndex  # n-grams of prompt and answer
    limit: int  # longest draft to make

    def follow(self, entry: JournalEntry, most: int) -> int:
        """Index up to `most` tokens that are new, and return how many it were."""
        seen = self.index.num_tokens
        new = entry.tokens(seen, min(entry.num_tokens, seen + most))
        self.index.extend(new)
        return len(new)


# Drafts by n-gram lookup are verified together with a row's next token. A decode reads every weight to make
# one token. A row may bring a *draft*: tokens that are guessed to come next
# (`core.scheduling.ngram_proposer`); their KV is computed along with that of its last known token. The runner
# then has logits after each of them, samples from the first as always, and goes on to the next as long as the
# sampled token equals the draft token. So a step gives one token more than were accepted.
#
# The answer is the same as without a draft. A token is a function of the logits and of (seed, position), and
# both are the same as without one; a draft decides only how many tokens one step gives.
#
# Drafts use what is left: of the token budget, after all known tokens are scheduled, and of the blocks, of
# which one remains for each row's next step, since no request is to be preempted for a draft. They are
# charged to no client before they are accepted. A request that was in a step which crashed the runner gets
# none any more: a crash must say which known token it was about. The KV of a rejected token is overwritten by
# the tokens that follow, in a block that no other request shares: blocks are published as far as the journal
# has their tokens, and no further.
#
# A row's next draft is at most twice as long, and one token, as what was accepted of its last one: where
# drafts are rejected they soon cost next to nothing.
class SpeculativeDecoding:
    """Maker of the drafts of a step.

    Args:
        config: length of drafts and of the n-grams.
        counters: count drafted and accepted tokens.
        recovery: names the requests that get no drafts.
    """

    def __init__(self, config: SchedulerConfig, counters: SchedulerCounters, recovery: RecoveryState) -> None:
        self._config, self._counters, self._recovery = config, counters, recovery
        per_position = counters.num_accepted_tokens_per_pos
        per_position += [0] * (config.num_speculative_tokens - len(per_position))
        self._drafters: dict[int, _Drafter] = {}  # by epoch: of the rows of the last step

    def add_drafts(self, scheduled: Collection[Sequence], budget: int, pool: BlockPool) -> None:
        """Add drafts to the decodes of the step that is being planned.

        Args:
            scheduled: the rows of the step.
            budget: tokens that are left of its budget.
            pool: gives the blocks.
        """
        if not self._config.num_speculative_tokens:
            return
        rows = [sequence for sequence in scheduled if self._may_draft(sequence)]
        self._drafters = {row.entry.epoch: self._drafter(row.entry.epoch) for row in rows}
        num_followed, num_blocks = 0, pool.num_available - len(scheduled) * self._config.groups.count
        for row in rows:
            drafter = self._drafters[row.entry.epoch]
            num_followed += drafter.follow(row.entry, MAX_FOLLOWED_TOKENS - num_followed)
            if drafter.index.num_tokens == row.entry.num_tokens:
                missing = self._draft(row, drafter, budget, num_blocks)
                row.block_table += pool.allocate(missing)
                num_blocks -= missing
                budget -= len(row.draft_token_ids)

    def _drafter(self, epoch: int) -> _Drafter:
        config = self._config
        return self._drafters.get(epoch) or _Drafter(
            NgramIndex(config.prompt_lookup_min), config.num_speculative_tokens
        )

    def _may_draft(self, row: Sequence) -> bool:
        """Return True if the row decodes, follows no grammar, and was in no step that crashed."""
        entry = row.entry
        return (
            row.num_pending_tokens == 1
            and entry.request.constraint is None  # its mask is known for one token at a time
            and entry.request.pooling is None
            and entry.serial not in self._recovery.poison_bisection.crashed
        )

    def _draft(self, row: Sequence, drafter: _Drafter, budget: int, num_blocks: int) -> int:
        """Give a row its draft, and return how many blocks are missing for it."""
        size, entry = self._config.block_size, row.entry
        num_groups = self._config.groups.count
        num_blocks = (len(row.block_table) + max(0, num_blocks)) // num_groups
        num_places = num_blocks * size - row.num_computed_tokens - 1
        num_wanted = entry.request.max_tokens - len(entry.output_token_ids) - 1
        limit = min(drafter.limit, budget, num_places, num_wanted)
        row.draft_token_ids = drafter.index.guess(limit) if limit > 0 else ()
        row.num_scheduled_tokens += len(row.draft_token_ids)
        return max(0, row.num_missing_blocks(row.num_scheduled_tokens, size, num_groups))

    def end_step(self, row: Sequence) -> None:
        """Count the accepted draft tokens of a finished step; its tokens are in the journal."""
        num_tried, num_right = row.end_step()
        if not num_tried:
            return
        if (drafter := self._drafters.get(row.entry.epoch)) is not None:
            drafter.limit = min(2 * num_right + 1, self._config.num_speculative_tokens)
        counters = self._counters
        counters.num_drafts += 1
        counters.num_draft_tokens += num_tried
        for position in range(num_right):
            counters.num_accepted_tokens_per_pos[position] += 1


# Between the result of a step and the plan of the next one the runner waits. Where all requests decode and
# none waits, all plans are alike: each row gets its next token, and if need be a block. So one plan is made
# for several such steps, a run, and results are taken in, and streams fed, while the runner goes on.
#
# A run decides nothing that would otherwise be decided differently. It ends where the first of its answers
# reaches its length, and a request that arrives, leaves or ends makes it end after the step that is being
# computed: exactly when the next plan would have been made. Tokens of that step for an answer that ended in
# the step before are dropped.
def length_of_run(scheduled: Collection[Sequence], config: SchedulerConfig, recovery: RecoveryState) -> int:
    """Return how many steps these rows may run for, if no other request runs or waits, and blocks suffice.

    Args:
        scheduled: the rows of the step that is being planned, at least one.
        recovery: names requests of crashed steps; these run step by step, so that the next crash names the token.
    """
    if config.num_scheduler_steps == 1 or config.num_speculative_tokens:
        return 1
    if not all(_can_go_on(sequence) for sequence in scheduled):
        return 1
    if any(sequence.entry.serial in recovery.poison_bisection.crashed for sequence in scheduled):
        return 1
    num_left = min(one.entry.request.max_tokens - len(one.entry.output_token_ids) for one in scheduled)
    return max(1, min(config.num_scheduler_steps, num_left))


def _can_go_on(sequence: Sequence) -> bool:
    """Return True if it decodes, and its next token needs nothing from the engine."""
    request = sequence.entry.request
    return sequence.num_pending_tokens == 1 and request.constraint is None and request.pooling is None


def add_blocks_of_run(
    scheduled: Collection[Sequence], num_steps: int, pool: BlockPool, block_size: int, num_groups: int = 1
) -> int:
    """Give the rows the blocks of a run; of a shorter one, where there are not enough.

    Returns:
        How many steps the blocks are for: at least the one that they have blocks for already.
    """
    missing = _missing(scheduled, num_steps, block_size, num_groups)
    while sum(missing) > pool.num_available:
        num_steps //= 2
        missing = _missing(scheduled, num_steps, block_size, num_groups)
    for sequence, count in zip(scheduled, missing, strict=True):
        if count > 0:
            sequence.block_table += pool.allocate(count)
    return num_steps


def _missing(scheduled: Collection[Sequence], num_steps: int, block_size: int, num_groups: int) -> list[int]:
    return [max(0, sequence.num_missing_blocks(num_steps, block_size, num_groups)) for sequence in scheduled]


def _digest_of(sequence: Sequence) -> str | None:
    """Return the digest of a request's adapter; None without one."""
    adapter = adapter_of(sequence)
    return None if adapter is None else adapter.digest


@attrs.define(kw_only=True, eq=False)
class StepPlanner:
    """Planner of the steps of one scheduler."""

    config: SchedulerConfig  # limits
    journal: Journal  # records the requests that are scheduled for the first time
    counters: SchedulerCounters  # totals; also numbers the steps
    queues: RequestQueues  # waiting and running requests; changed at once by an admission or a preemption
    cache: PrefixCache  # prefix cache of the blocks
    budget: TokenBudget  # token budget of a step
    recovery: RecoveryState  # limits after failed steps
    speculative: SpeculativeDecoding  # adds draft tokens
    last_serial: float = math.inf  # requests after this one wait, because the engine is paused
    # Sequences of the step that was planned last, in the order of its rows.
    scheduled: list[Sequence] = attrs.field(factory=list, init=False)
    _starts: list[RowStart] = attrs.field(factory=list, init=False)
    _loads: list[BlockLoad] = attrs.field(factory=list, init=False)
    _underway: PrefixesInStep = attrs.field(init=False)
    adapters: AdapterSlots | None = attrs.field(
        init=False
    )  # slots of LoRA adapters; None for a model without them

    def __attrs_post_init__(self) -> None:
        self._underway = PrefixesInStep(self.cache)
        self.adapters = AdapterSlots(self.config.max_adapters) if self.config.max_adapters else None

    def plan(self, now_s: float) -> StepPlan | None:
        """Decide the next step; None when nothing can be computed."""
        self._hold_back()
        if self.adapters is not None:
            self._clear_slot(self.adapters, now_s)
        self._begin_step(now_s)
        budget = self._admit_for_slot(self._budget(), now_s)
        budget = self._admit_overtaking(budget, now_s)
        budget, preempted = self._schedule_running(budget)
        if not preempted:
            budget = self._admit(budget, now_s)
            self.speculative.add_drafts(self.scheduled, budget, self.cache.pool)
        if not self.scheduled:
            # The request to serve was preempted, so plan again for the rest. It ends: each time fewer run.
            return self.plan(now_s) if preempted else self._plan_of_saves()
        return self._end_planning(self._num_steps())

    def plan_ahead(self, now_s: float) -> StepPlan | None:
        """Decide the step after the one in flight, which is assumed to succeed; None if that must be waited for."""
        # Whatever would preempt a request waits: the step in flight works on its blocks.
        running, may_run = self.queues.running, self.recovery.poison_bisection.may_run
        if len(running) > self._max_rows or not all(may_run(sequence.entry.serial) for sequence in running):
            return None
        if self.adapters is not None:
            waiting = self._waiting_for_slots
            victim = self.adapters.begin_step(running, waiting, now_s, may_preempt=False)
            if victim is not None or self._first_for_slot is not None:
                return None  # what is admitted first must not find the step's time taken
        self._begin_step(now_s, is_ahead=True)
        if self.budget.has_room:
            pair = self.queues.waiting.overtaking(running, self.may_be_admitted)
            if pair is not None and self._would_have_room(pair[0]):
                return None
        budget, lacks_blocks = self._schedule_running(self._budget(), is_ahead=True)
        if lacks_blocks:  # those that were allocated are kept for the next plan
            for sequence in self.scheduled:
                sequence.num_scheduled_tokens = 0
            return None
        self._admit(budget, now_s)
        return self._end_planning(1, is_ahead=True) if self.scheduled else None

    def _begin_step(self, now_s: float, *, is_ahead: bool = False) -> None:
        self.scheduled, self._starts, self._loads = [], [], []
        self.queues.waiting.begin_step(now_s)
        self._underway.begin_step(is_ahead=is_ahead)
        self.budget.begin_step(has_decodes=any(one.num_pending_tokens == 1 for one in self.queues.running))

    def _end_planning(self, num_steps: int, *, is_ahead: bool = False) -> StepPlan:
        self._underway.end_planning()
        self.counters.steps += 1
        return StepPlan(
            self.counters.steps,
            self.queues.take_ended_rows(),
            tuple(self._starts),
            tuple([sequence.take_row() for sequence in self.scheduled]),
            num_steps,
            () if self.adapters is None else self.adapters.take_starts(),
            self.cache.take_saves(),
            tuple(self._loads),
            is_ahead,
        )

    def _plan_of_saves(self) -> StepPlan | None:
        """Return a plan without rows for the blocks that wait to be saved: there may be no other for a long time."""
        if not (saves := self.cache.take_saves()):
            return None
        self.counters.steps += 1
        return StepPlan(self.counters.steps, (), (), (), saves=saves)

    def _num_steps(self) -> int:
        """Return the number of steps the plan is for; see `length_of_run`."""
        if self._starts or self.queues.waiting or len(self.scheduled) < len(self.queues.running):
            return 1
        num_steps = length_of_run(self.scheduled, self.config, self.recovery)
        return add_blocks_of_run(
            self.scheduled, num_steps, self.cache.pool, self.config.block_size, self.config.groups.count
        )

    def go_on(self, now_s: float) -> None:
        """Schedule the rows that still run for the next step of a run."""
        self.queues.waiting.begin_step(now_s)
        self.scheduled = [sequence for sequence in self.scheduled if sequence.row_id is not None]
        for sequence in self.scheduled:
            sequence.schedule(1, self.counters.steps)
            self.queues.waiting.charge(sequence, sequence.num_computed_tokens + 1)

    def _budget(self) -> int:
        """Return the token budget of the step being planned; at least one token for each running request."""
        num_tokens = max(self.budget.max_tokens, len(self.queues.running))
        return min(num_tokens, self.recovery.memory.max_tokens(self.config.max_num_batched_tokens))

    def _hold_back(self) -> None:
        """Preempt the requests that may not take part in the next step."""
        running, may_run = self.queues.running, self.recovery.poison_bisection.may_run
        for sequence in [sequence for sequence in running if not may_run(sequence.entry.serial)]:
            self.queues.preempt(sequence)
        while len(running) > self._max_rows:
            self.queues.preempt(running[-1])

    @property
    def _waiting_for_slots(self) -> Iterator[Sequence]:
        # Not those that could not take a slot: no other request would be computed while it is kept for them.
        return filter(self._may_run, self.queues.waiting)

    def _clear_slot(self, adapters: AdapterSlots, now_s: float) -> None:
        """Preempt the requests of an adapter whose slot another one has waited for too long."""
        digest = adapters.begin_step(self.queues.running, self._waiting_for_slots, now_s)
        if digest is None:
            return
        for sequence in tuple(self.queues.running):
            if _digest_of(sequence) == digest:
                self.queues.preempt(sequence)

    @property
    def _first_for_slot(self) -> Sequence | None:
        """The first waiting request with the adapter for which a slot is kept; None if there is none."""
        digest = None if self.adapters is None else self.adapters.reserved
        if digest is None:
            return None
        wanted = (one for one in self.queues.waiting if _digest_of(one) == digest)
        return next(filter(self.may_be_admitted, wanted), None)

    def _admit_for_slot(self, budget: int, now_s: float) -> int:
        """Admit the request for which a slot is kept, although the policy may let others go first.

        Returns:
            The rest of the budget.
        """
        if (sequence := self._first_for_slot) is None:
            return budget
        spare = budget - sum(other.is_unserved for other in self.queues.running)
        return budget - self._admit_waiting(sequence, spare, now_s)

    @property
    def _max_rows(self) -> int:
        # Each row has a token in every step: a row left out of one step needs it in a later one.
        most = min(self.config.max_num_seqs, self.config.max_num_batched_tokens)
        return self.recovery.memory.max_rows(most)

    def may_be_admitted(self, sequence: Sequence) -> bool:
        """Return False if a rule defers a request: an awaited mask, prefix or adapter slot, a pause, or a bisection."""
        if not self._may_run(sequence) or sequence.entry.serial in self._underway.held:
            return False
        adapter = None if self.adapters is None else adapter_of(sequence)
        return adapter is None or self.adapters is None or self.adapters.may_start(adapter)

    def _may_run(self, sequence: Sequence) -> bool:
        """Return False for a request that an awaited mask, a pause or a bisection keeps from every step now."""
        entry = sequence.entry
        if entry.awaits_mask or entry.serial > self.last_serial:
            return False
        return self.recovery.poison_bisection.may_run(entry.serial)

    def _admit_overtaking(self, budget: int, now_s: float) -> int:
        """Admit the requests that may take the row of a running one.

        Returns:
            The rest of the budget, with at least a token for each of the other running requests.
        """
        waiting, running = self.queues.waiting, self.queues.running
        while (
            self.budget.has_room and (pair := waiting.overtaking(running, self.may_be_admitted)) is not None
        ):
            sequence, victim = pair
            spare = budget - sum(other.is_unserved for other in running)
            if num_tokens := self._admit_waiting(sequence, spare, now_s):
                budget -= num_tokens
            elif not self._underway.holds(sequence, self._find_computed(sequence)):
                # All of them would lose what they computed, and wait behind it.
                if not self._would_have_room(sequence):
                    break
                self.queues.preempt(victim)
        return budget

    def _would_have_room(self, sequence: Sequence) -> bool:
        """Return False if a waiting request has too few blocks even when all that make way for it are preempted."""
        found, _ = self._find_computed(sequence)
        left, num_freed = list(self.queues.running), 0
        # Of a block that several share: how many of them do not make way. One that is found stays in use.
        holders, ref_counts = dict.fromkeys(found, math.inf), self.cache.pool.ref_counts
        while not has_room(self.cache, sequence.entry, found, num_freed):
            pair = self.queues.waiting.overtaking(left, self.may_be_admitted)
            if pair is None or pair[0] is not sequence:
                return False
            left.remove(pair[1])
            for block_id in held_blocks(pair[1]):
                holders[block_id] = holders.get(block_id, ref_counts[block_id]) - 1
                num_freed += not holders[block_id]
        return True

    def _schedule_running(self, budget: int, *, is_ahead: bool = False) -> tuple[int, bool]:
        """Give every running request its tokens, as far as blocks suffice; decodes first.

        Returns:
            The rest of the budget, and True if a request was preempted, or, in a plan ahead, would have to be.
        """
        preempted = False
        # Decodes come first: a client reads their tokens. They never starve, since a request is admitted only where
        # budget is left, so that no more run than the budget has tokens. Prefills may have to wait for each other.
        order = self.queues.waiting.service_order(list(self.queues.running))
        for sequence in sorted(
            self.queues.waiting.taking_part(order), key=lambda s: s.num_pending_tokens > 1
        ):
            if not (sequence.is_unserved and budget) or sequence.entry.awaits_mask:
                continue  # it was preempted, has its tokens, or cannot use any
            if is_ahead and not self._goes_on(sequence):
                continue
            spare = min(budget, self._num_fitting(sequence, self.cache.pool.num_available))
            if not (num_tokens := self._portion(sequence, sequence.num_pending_tokens, spare)):
                continue  # the step is long enough
            missing = self._num_missing(sequence, num_tokens)
            while missing > self.cache.pool.num_available and sequence.row_id is not None:
                if is_ahead:
                    return budget, True
                preempted = True
                self.queues.preempt(next(other for other in reversed(order) if other.is_unserved))
            if sequence.row_id is not None:
                self._schedule(sequence, num_tokens, missing)
                budget -= num_tokens
        return budget, preempted

    def _goes_on(self, sequence: Sequence) -> bool:
        """Return False if nothing is left to compute after the step in flight, as far as is known before its result."""
        entry, config = sequence.entry, self.config
        return (
            sequence.num_pending_tokens > 0
            and len(entry.output_token_ids) + sequence.num_unknown_tokens < entry.request.max_tokens
            and entry.num_needed_places + sequence.num_unknown_tokens <= config.num_places
        )

    def _admit(self, budget: int, now_s: float) -> int:
        """Admit waiting requests in order, while rows, budget and blocks last; return the rest of the budget."""
        may_run, waiting, underway = self.may_be_admitted, self.queues.waiting, self._underway
        while not underway.is_full and (sequence := waiting.next(may_run)) is not None:
            if num_tokens := self._admit_waiting(sequence, budget, now_s):
                budget -= num_tokens
            elif sequence.entry.serial not in underway.held:
                break
        return budget

    def _admit_waiting(self, sequence: Sequence, budget: int, now_s: float) -> int:
        """Give a waiting request a row, and the blocks that its known tokens need.

        Returns:
            How many tokens of the budget it gets; 0 if it cannot be admitted.
        """
        if budget <= 0 or len(self.queues.running) >= self._max_rows:
            return 0
        entry = sequence.entry
        found = block_ids, hashes = self._find_computed(sequence)
        if self._underway.holds(sequence, found) or not has_room(self.cache, entry, block_ids):
            return 0
        num_cached = len(block_ids) // self.config.groups.count * self.config.block_size
        revived = sum(map(self.cache.pool.is_cached, block_ids)) if self.config.groups.window else 0
        num_free = len(block_ids) + self.cache.pool.num_available - revived
        budget = min(budget, self._fitting(num_cached, num_free))
        if not (num_tokens := self._portion(sequence, entry.num_tokens - num_cached, budget)):
            return 0
        self.queues.admit(sequence, block_ids, hashes)
        # All blocks at once: with only some of them it would soon preempt others for the rest.
        missing = self._num_missing(sequence, max(num_tokens, self._num_reserved(sequence)))
        self._schedule(sequence, num_tokens, missing)
        if self.config.enable_prefix_caching:
            self.counters.prefix_cache_queries += entry.num_tokens
            self.counters.prefix_cache_hits += num_cached
        self.journal.scheduled(entry, now_s, num_cached)
        if self.adapters is not None:
            adapter = adapter_of(sequence)
            sequence.adapter_slot = None if adapter is None else self.adapters.take(adapter)
        self._starts.append(sequence.row_start())
        return num_tokens

    def _num_reserved(self, sequence: Sequence) -> int:
        """Return how many tokens an admitted request gets blocks for: all, or as many as its window keeps."""
        groups, size = self.config.groups, self.config.block_size
        if groups.window is None:
            return sequence.num_pending_tokens
        most = (sequence.num_passed_blocks + groups.num_kept(size)) * size
        return min(sequence.num_pending_tokens, most - sequence.num_expected_tokens)

    def _num_missing(self, sequence: Sequence, num_tokens: int) -> int:
        return sequence.num_missing_blocks(num_tokens, self.config.block_size, self.config.groups.count)

    def _num_fitting(self, sequence: Sequence, num_available: int) -> int:
        """Return the longest chunk of a running request that takes no blocks from others."""
        return self._fitting(sequence.num_expected_tokens, len(sequence.block_table) + num_available)

    def _fitting(self, begin: int, num_blocks: int) -> int:
        """Return how many tokens from index `begin` on so many blocks of a table are for; those of a block if none."""
        groups = self.config.groups
        if groups.window is None:
            return UNLIMITED
        num_tokens = num_blocks // groups.count * self.config.block_size - begin
        return num_tokens if num_tokens > 0 else self.config.block_size

    def _find_computed(self, sequence: Sequence) -> Found:
        return find_computed(self.cache, sequence, self.queues.live.get(sequence.entry.leader_serial))

    def _portion(self, sequence: Sequence, num_pending: int, budget: int) -> int:
        """Return how many of its pending tokens a request gets in the step being planned."""
        if self.config.whole_prompts:
            # The first one of a step may exceed a budget that is smaller after a step that did not fit into memory.
            fits = num_pending <= budget or not self.scheduled
            return num_pending if fits and self.queues.waiting.portion(sequence, num_pending) else 0
        entry, num_tokens = sequence.entry, min(num_pending, budget)
        is_moved = num_tokens > 1 and entry.num_tokens - num_pending < entry.num_moved_tokens
        if is_moved:
            num_tokens = self.budget.moved_chunk(num_tokens, self._num_decodes_to_come)
        else:
            num_tokens = self.budget.chunk(num_tokens)
        if not num_tokens:
            return 0  # before the policy takes the time of a row that the step does not have
        num_tokens = self.queues.waiting.portion(sequence, num_tokens)
        if self.config.stores_blocks and num_tokens < num_pending:
            # To the end of a block, from which the next step can read on.
            end = entry.num_tokens - num_pending + num_tokens
            past = end % self.config.block_size
            num_tokens -= past if past < num_tokens else 0
        self.budget.take(num_tokens, is_moved=is_moved)
        return num_tokens

    def _num_decodes_to_come(self) -> int:
        """Return how many requests will decode when those that wait for a row do, too; 0 if none does now."""
        queues = self.queues
        if not any(one.num_pending_tokens == 1 for one in queues.running):
            return 0
        return min(self.config.max_num_seqs, len(queues.running) + len(queues.waiting))

    def _schedule(self, sequence: Sequence, num_tokens: int, num_missing_blocks: int) -> None:
        if num_missing_blocks > 0:
            sequence.block_table += self.cache.pool.allocate(num_missing_blocks)
        self._underway.add(sequence, num_tokens)
        if self.config.stores_blocks:
            self._loads += stored_blocks(self.cache, sequence, num_tokens)
        sequence.schedule(num_tokens, self.counters.steps + 1)
        self.scheduled.append(sequence)
        self.queues.waiting.charge(sequence, sequence.num_expected_tokens + num_tokens)
