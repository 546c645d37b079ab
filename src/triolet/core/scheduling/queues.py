"""Request queues: every live request waits, or runs with a row of the runner's table and blocks of its own.

All moves are made here, so that place, row and blocks change together:

    enter -> waiting -> admit -> running -> leave
                ^------ preempt ----'

A request leaves from either queue. Each time that it is queued it begins a residency with a new epoch: the results of
an earlier residency are ignored.
"""

from __future__ import annotations

from bisect import insort

from triolet.core.journal import Journal, JournalEntry
from triolet.core.kv_cache.block_pool import BlockPool
from triolet.core.scheduling.config import SchedulerConfig, SchedulerCounters
from triolet.core.scheduling.policies.base import WaitingQueue, by_order, check_order
from triolet.core.scheduling.sequence import Sequence
from triolet.errors import InvariantViolated


class RequestQueues:
    """Waiting and running requests. The lists are to be read: only the methods change them.

    Args:
        config: limits.
        journal: numbers the residencies.
        counters: count the preemptions.
        pool: takes back the blocks.
        waiting: the waiting queue, still empty, in the order of the policy.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        journal: Journal,
        counters: SchedulerCounters,
        pool: BlockPool,
        waiting: WaitingQueue,
    ) -> None:
        self.waiting = waiting
        self.running: list[Sequence] = []  # in order: the last is the first to lose its row
        self.live: dict[int, Sequence] = {}  # by serial
        self.by_epoch: dict[int, Sequence] = {}
        self._config, self._journal, self._counters, self._pool = config, journal, counters, pool
        self._free_rows = list(range(config.max_num_seqs))
        # A runner that outlived the last scheduler may still hold its rows.
        self._ended_rows = list(range(config.max_num_seqs))

    def enter(self, entry: JournalEntry) -> Sequence:
        """Queue a live request of the journal."""
        self._journal.begin_stay(entry)
        sequence = Sequence(entry, self.waiting.order(entry))
        self.live[entry.serial] = sequence
        self.by_epoch[entry.epoch] = sequence
        self.waiting.add(sequence)
        return sequence

    def admit(self, sequence: Sequence, block_ids: list[int], hashes: list[bytes]) -> None:
        """Give a waiting request a row.

        Args:
            sequence: the request.
            block_ids: full blocks with its beginning, which it shares from now on.
            hashes: of these blocks.
        """
        self.waiting.remove(sequence)
        self._pool.share(block_ids)
        num_cached_tokens = len(block_ids) * self._config.block_size
        sequence.begin(self._free_rows.pop(), block_ids, hashes, num_cached_tokens)
        insort(self.running, sequence, key=by_order)
        self.waiting.started(sequence)

    def preempt(self, victim: Sequence) -> None:
        """Move a running request that no step works on back to the waiting queue, at its old place."""
        assert victim.num_scheduled_tokens == 0
        self.running.remove(victim)
        self._take_back(victim, step_id=None)
        del self.by_epoch[victim.entry.epoch]
        self.by_epoch[self._journal.begin_stay(victim.entry)] = victim
        self.waiting.add(victim)
        victim.entry.num_preemptions += 1
        self._counters.num_preemptions += 1

    def leave(self, sequence: Sequence, step_id: int | None) -> None:
        """Remove a request that has ended.

        Args:
            sequence: the request.
            step_id: the step in flight; the blocks of a running request are free when this step ends.
        """
        del self.live[sequence.entry.serial]
        del self.by_epoch[sequence.entry.epoch]
        if sequence.row_id is None:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._take_back(sequence, step_id)

    def _take_back(self, sequence: Sequence, step_id: int | None) -> None:
        """Free the row and the blocks."""
        assert sequence.row_id is not None
        self._pool.release(sequence.block_table, step_id=step_id)
        self._free_rows.append(sequence.row_id)
        self._ended_rows.append(sequence.row_id)
        self.waiting.stopped(sequence)
        sequence.forget_computed()

    def take_ended_rows(self) -> tuple[int, ...]:
        """Return the rows freed since the last call, for the runner to forget."""
        rows = tuple(self._ended_rows)
        self._ended_rows.clear()
        return rows

    def check(self) -> None:
        """Check that every live request is in one queue, in order, and that rows and blocks belong to running ones.

        Raises:
            InvariantViolated: one of these is not so.
        """
        self._check_everybody()
        for sequence in self.waiting:
            if sequence.block_table or sequence.row_id is not None or sequence.num_scheduled_tokens:
                raise InvariantViolated(f"waiting request {sequence.entry.serial} holds blocks or a row")
        check_order(self.running)
        self.waiting.check()
        self._check_rows()

    def _check_everybody(self) -> None:
        running, waiting, live = self.running, tuple(self.waiting), self.live
        everybody = {sequence.entry.serial for sequence in (*running, *waiting)}
        if everybody != live.keys() or len(everybody) != len(running) + len(waiting):
            raise InvariantViolated(f"running {len(running)} + waiting {len(waiting)} != {len(live)}")
        if {sequence.entry.epoch: sequence for sequence in live.values()} != self.by_epoch:
            raise InvariantViolated("epochs do not name the live sequences")
        if len(running) > (num_tokens := self._config.max_num_batched_tokens):
            raise InvariantViolated(f"{len(running)} running requests share {num_tokens} tokens")

    def _check_rows(self) -> None:
        rows = sorted([*self._free_rows, *(one.row_id for one in self.running if one.row_id is not None)])
        if rows != list(range(self._config.max_num_seqs)):
            raise InvariantViolated(f"free rows and running requests must be each row once; got {rows}")
