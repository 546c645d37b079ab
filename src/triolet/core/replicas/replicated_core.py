"""Requests of one engine that several replicas compute: an `EngineCore` for each, and one for what they share.

Journal, outputs and masks are one; each replica has a scheduler, counters and recovery state of its own, and sees the
part of the journal that the table gives it. The actors drive a `ReplicaCore` as they drive the core of an engine that
has only one.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import attrs

from triolet.core.engine_core import EngineCore, GrammarMasks, OnFinish
from triolet.core.journal import JournalEntry
from triolet.core.metrics.iteration_stats import EngineStatistics, ReplicaStatistics
from triolet.core.recovery.recovery_state import RecoveryState
from triolet.core.replicas.autoscale import ReplicaLoad
from triolet.core.replicas.replica_table import JournalShare, ReplicaTable
from triolet.core.request.grammar_state import TokenMask
from triolet.core.request.model_info import LoadedModel, ModelInfo
from triolet.core.request.request import FinishReason
from triolet.core.scheduling.admission import Admission
from triolet.core.scheduling.scheduler import Scheduler, SchedulerConfig

ABSENCE_S: Final = 30.0  # that the suspects of a replica wait for it: its machine may be gone for good


class MaskShare(GrammarMasks):
    """Masks of the requests of one replica; its driver, and what is known of grammars, is the engine's.

    Args:
        whole: masks of the engine.
        share: requests of the replica.
        model: of the engine.
    """

    def __init__(self, whole: GrammarMasks, share: JournalShare, model: LoadedModel) -> None:
        super().__init__(share, model)
        self._whole, self._share = whole, share

    def ask(self, serials: Iterable[int], now_s: float) -> None:
        """Note that these requests need masks."""
        if serials := dict.fromkeys(serials):
            self._wait_for(serials, now_s)
            self._whole.ask(serials, now_s)

    def take_answers(self, among: Container[int] | None = None) -> dict[int, TokenMask]:
        """Return the masks of this replica's requests that have come since the last call, by serial."""
        for serial, mask in self._whole.take_answers(self._share.own).items():
            self.answer(serial, mask)
        return super().take_answers(among)

    @property
    def has_questions(self) -> bool:
        """True if masks are asked for."""
        return self._whole.has_questions


class ReplicaCore(EngineCore):
    """State and decisions of one replica.

    Args:
        whole: the engine.
        replica: number of the replica.
        on_finish: called after `finish`; see `EngineCore`.
    """

    def __init__(self, whole: ReplicatedCore, replica: int, on_finish: OnFinish) -> None:
        share = whole.table.shares[replica]
        super().__init__(attrs.evolve(whole.admission, journal=share), on_finish)
        self.replica, self._whole, self._share = replica, whole, share
        self.outputs, self.masks = whole.outputs, MaskShare(whole.masks, share, whole.model)
        self.recovery = RecoveryState(whole.table.bisection(replica))
        self.is_runner_alive = False
        self.is_parked = False  # it has no worker, and needs none

    def new_scheduler(self, config: SchedulerConfig) -> Scheduler:
        """Build a new scheduler for the requests of this replica."""
        scheduler = super().new_scheduler(config)
        self._whole.table.follow_cache(self.replica, scheduler.cache)
        return scheduler

    @contextmanager
    def scheduling(self) -> Iterator[None]:
        """Scope in which the scheduler is consistent; the replica takes requests from its beginning on."""
        with super().scheduling():
            try:
                self._whole.table.begin_life(self.replica)
                self._whole.share_queues(self.replica)
                yield
            finally:
                self.is_scheduling = False
                self._settle()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Scope in which the runner has a model."""
        self.is_runner_alive = True
        try:
            yield
        finally:
            self.is_runner_alive = False
            self._settle()

    def _settle(self) -> None:
        # The scheduler alone is restarted where it is. Without the runner the requests leave as soon as no scheduler
        # could still change them.
        if not self.is_scheduling and not self.is_runner_alive:
            self._whole.end_life(self.replica)

    def note_loaded(self, info: ModelInfo) -> None:
        """Take the facts about the model that the runner of this replica has loaded."""
        super().note_loaded(info)
        self._whole.note_replica_loaded()

    def statistics(self) -> EngineStatistics:
        """Return the present counts; without a scheduler all blocks are free."""
        statistics = super().statistics()
        if self.is_scheduling:
            return statistics
        num_blocks = 0 if self.is_parked else statistics.kv_blocks_total
        return attrs.evolve(
            statistics,
            kv_blocks_total=num_blocks,
            kv_blocks_free=num_blocks,
            kv_blocks_cached=0,
            kv_blocks_in_use=0,
            kv_blocks_quarantined=0,
        )

    def statistics_of_replica(self) -> ReplicaStatistics:
        """Return the present counts of this replica."""
        scheduler = self.scheduler if self.is_scheduling else None
        num_running = 0 if scheduler is None else scheduler.num_running
        return ReplicaStatistics(
            replica=self.replica,
            is_living=self.is_scheduling,
            is_parked=self.is_parked,
            num_requests_running=num_running,
            num_requests_waiting=len(self._share) - num_running,
            kv_blocks_total=0 if scheduler is None else scheduler.pool.num_blocks,
            kv_blocks_in_use=0 if scheduler is None else scheduler.pool.num_in_use,
            steps=self.counters.num_steps_done,
            num_preemptions=self.counters.num_preemptions,
            prefix_cache_queries=self.counters.prefix_cache_queries,
            prefix_cache_hits=self.counters.prefix_cache_hits,
        )


class ReplicatedCore(EngineCore):
    """Requests and outputs of an engine with several replicas.

    Args:
        admission: limits of the engine; brings the journal.
        num_replicas: replicas.
        block_size: tokens in a KV block.
        on_finish: called by a replica's `finish`, with its number first.
        wake: called with the number of a replica that has a new request.
    """

    def __init__(
        self,
        admission: Admission,
        num_replicas: int,
        block_size: int,
        on_finish: Callable[[int, tuple[int, ...]], None],
        wake: Callable[[int], None],
    ) -> None:
        super().__init__(admission)
        self.table = ReplicaTable(self.journal, num_replicas, block_size, wake)

        def finished_by(replica: int) -> OnFinish:
            return lambda serials: on_finish(replica, serials)

        self.replicas = tuple(
            ReplicaCore(self, replica, finished_by(replica)) for replica in range(num_replicas)
        )
        self._absent_since_s: dict[int, float] = {}

    @property
    def _living(self) -> Iterator[ReplicaCore]:
        return (each for each in self.replicas if each.is_scheduling)

    def finish(self, serial: int, reason: FinishReason) -> None:
        """End a request; see `EngineCore.finish`."""
        if (entry := self.journal.get(serial)) is None:
            return
        owner = None if entry.replica is None else self.replicas[entry.replica]
        # Any scheduler reports the end of a request that none has.
        one = owner if owner is not None and owner.is_scheduling else next(self._living, None)
        if one is not None:
            one.finish(serial, reason)
            return
        entry.finish(reason)
        ended = self.journal.close(entry)
        self.table.note_end(ended)
        self.replicas[0].on_finish(tuple(ended))

    def unscheduled(self) -> Iterator[JournalEntry]:
        """Return the live requests that no scheduler has: unplaced, or with a replica that is away."""
        is_scheduling = [each.is_scheduling for each in self.replicas]
        return (one for one in self.journal if one.replica is None or not is_scheduling[one.replica])

    def end_life(self, replica: int) -> None:
        """Place the requests of a replica that computes no longer anew, and have another one report what it has not."""
        self.table.end_life(replica)
        one = next(self._living, None)
        if one is not None and one.scheduler is not None:
            one.scheduler.report(self.outputs)  # perhaps the last tokens of a request that has ended
            one.on_finish(())

    def give_up(self, replica: int) -> bool:
        """Expect a replica that cannot be started no longer: its suspects go to another one.

        Returns:
            True, and nothing was done, if no other replica lives.
        """
        if not any(each.replica != replica for each in self._living):
            return True
        if not self.replicas[replica].is_scheduling:  # also if its scheduler alone crashes too often
            self.end_life(replica)
        self.table.give_up(replica)
        return False

    def give_up_absent(self, now_s: float) -> None:
        """Give up the replicas that have not computed for `ABSENCE_S`; called again and again.

        Args:
            now_s: monotonic seconds.
        """
        for each in self.replicas:
            if each.is_scheduling:
                self._absent_since_s.pop(each.replica, None)
                continue
            absence_s = now_s - self._absent_since_s.setdefault(each.replica, now_s)
            if absence_s >= ABSENCE_S and self.table.shares[each.replica].own:
                self.give_up(each.replica)

    def share_queues(self, replica: int) -> None:
        """Place what waits for a row at the other replicas anew: this one computes now, too."""
        for each in self._living:
            if each.replica != replica and each.scheduler is not None:
                self.table.place_again(each.replica, each.scheduler.release_waiting())
        self.table.dispatch()

    def retire(self, replica: int) -> None:
        """Note that a replica has ended and is not waited for: its requests go to the others."""
        self.replicas[replica].is_parked = True
        self.end_life(replica)
        self.table.retire(replica)

    def load(self) -> ReplicaLoad:
        """Return what `AutoscalePolicy` decides by."""
        living = [each.statistics_of_replica() for each in self._living]
        num_running = sum(each.num_requests_running for each in living)
        return ReplicaLoad(len(self.journal), len(self.journal) - num_running, len(living))

    def note_replica_loaded(self) -> None:
        """Take the facts about the model that hold for all replicas: the least of them limits the requests."""
        infos = [each.model.info for each in self.replicas if each.model.info is not None]
        self.model.info = attrs.evolve(
            self.model.info or infos[0],
            num_kv_blocks=min(info.num_kv_blocks for info in infos),
            max_model_len=min(info.max_model_len for info in infos),
            process_id=None,
        )

    # ------------------------------------------------------------------------------- summed, or of one

    def num_steps_done(self) -> int:
        """Return the number of steps with a result, by all replicas."""
        return sum(each.counters.num_steps_done for each in self.replicas)

    def whereabouts(self, serial: int) -> tuple[int, int, int]:
        """Return the position of a request in the queue of its replica, its computed tokens and its blocks."""
        entry = self.journal.get(serial)
        if entry is None or entry.replica is None:
            return 0, 0, 0
        return self.replicas[entry.replica].whereabouts(serial)

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget all cached KV of all replicas that is not in use; True if all of them could."""
        done = [
            each.reset_prefix_cache(reset_running_requests=reset_running_requests) for each in self._living
        ]
        return all(done)

    def abandon_step(self) -> None:
        """Drop the steps in flight: their runners have ended."""
        for each in self.replicas:
            each.abandon_step()

    @property
    def is_step_in_flight(self) -> bool:
        """True if the result of any step is waited for."""
        return any(each.is_step_in_flight for each in self.replicas)

    def statistics(self) -> EngineStatistics:
        """Return the present counts: sums over the replicas, and those of each."""
        parts = [each.statistics() for each in self.replicas if each.scheduler is not None]
        summed = {name: sum(getattr(part, name) for part in parts) for name in SUMMED}
        positions = [part.spec_decode_num_accepted_tokens_per_pos for part in parts]
        num_positions = max(map(len, positions), default=0)
        return attrs.evolve(
            parts[0],
            **summed,
            num_requests_live=len(self.journal),
            num_requests_waiting=len(self.journal) - summed["num_requests_running"],
            spec_decode_num_accepted_tokens_per_pos=tuple(
                sum(each[index] for each in positions if index < len(each)) for index in range(num_positions)
            ),
            replicas=tuple(each.statistics_of_replica() for each in self.replicas),
            num_moved_requests=self.table.num_moved,
        )


SUMMED = (
    "num_requests_running",
    "num_requests_deferred",
    "kv_blocks_total",
    "kv_blocks_free",
    "kv_blocks_cached",
    "kv_blocks_in_use",
    "kv_blocks_quarantined",
    "num_preemptions",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "external_prefix_cache_queries",
    "external_prefix_cache_hits",
    "num_failed_kv_saves",
    "steps",
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
)
"""Fields of `EngineStatistics` that are sums over the replicas."""
