"""Table of the requests of an engine by the replica that computes them; the journal stays one.

Theory of operation
-------------------
A live request is in one of three places: with one replica; held in the journal, until another answer to its prompt has
a token; or unplaced, because no replica takes requests now. The dispatcher decides when a request arrives, and again
when its replica dies: it then gets a new epoch, so that late results of the dead replica are refused, and is placed
anew, the oldest request first.

A *suspect*, a request that was in a step whose crash nothing outside explains, stays with its replica, and waits for
its next life. There the search for the request that crashes the runner goes on (`core.recovery.recovery_state`), and
the replica gets nothing else meanwhile. So a request that crashes each runner never takes down a second one. Only when
a replica cannot be started any more, or has been away for long, while others live, do its suspects go to another one,
with what is known of them.

When a replica begins to compute, what waits for a row at the others is placed anew: otherwise a queue that has grown
would stay with those that have it.

The prefix index of the dispatcher is exact: the prefix caches of the schedulers tell what they publish and forget.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from functools import partial

from triolet.core.dispatch.dispatcher import Dispatcher
from triolet.core.journal import Journal, JournalEntry
from triolet.core.kv_cache.prefix_cache import PrefixCache
from triolet.core.recovery.recovery_state import Candidate, PoisonBisection
from triolet.core.step_plan import PooledVectors, SampledToken
from triolet.errors import InvariantViolated


class ReplicaTable:
    """Replicas, and the requests that each of them has.

    Args:
        journal: of the engine.
        num_replicas: replicas; none of them lives yet.
        block_size: tokens in a block of the prefix caches.
        wake: called with the number of a replica that has a new request.
    """

    def __init__(
        self, journal: Journal, num_replicas: int, block_size: int, wake: Callable[[int], None]
    ) -> None:
        self.journal = journal
        self.shares = tuple(JournalShare(journal, self, replica) for replica in range(num_replicas))
        self.num_moved = 0  # times that a request was placed anew, since the start
        self.draining: set[int] = set()  # replicas that finish what they have, and get nothing more
        self._dispatcher = Dispatcher(block_size, learns_from_placements=False)
        self._wake = wake
        self._bisections = tuple(PoisonBisection() for _ in self.shares)
        self._cache: PrefixCache | None = None  # of any scheduler: the hashes of all are the same
        self._unplaced: dict[int, None] = {}
        self._moving: dict[
            int, Candidate | None
        ] = {}  # unplaced since the death of a replica; what is known of them
        self._now_s = 0.0

    def bisection(self, replica: int) -> PoisonBisection:
        """Return the search for a request that crashes the runner of a replica."""
        return self._bisections[replica]

    @property
    def living(self) -> tuple[int, ...]:
        """Replicas that compute."""
        return self._dispatcher.replicas

    @property
    def num_unplaced(self) -> int:
        """Number of requests that no replica takes now."""
        return sum(serial in self.journal for serial in self._unplaced)

    def advance_clock(self, now_s: float) -> None:
        """Set the time, monotonic seconds; a time before the last one is that."""
        self._now_s = max(self._now_s, now_s)

    # ---------------------------------------------------------------------------- lives of the replicas

    def follow_cache(self, replica: int, cache: PrefixCache) -> None:
        """Take the prefix cache of a replica's new scheduler, which is empty, into the index."""
        index = self._dispatcher.index
        index.forget(replica)
        index.resize(replica, cache.pool.num_blocks)
        cache.on_publish, cache.on_forget = partial(index.add, replica), partial(index.discard, replica)
        self._cache = cache

    def begin_life(self, replica: int) -> None:
        """Let a replica take requests, and note those that have waited for it."""
        if replica not in self.living:
            self._dispatcher.add_replica(replica)
            for entry in self.shares[replica]:
                self._dispatcher.assign(str(entry.serial), replica, entry.num_tokens, self._now_s)
        self.dispatch()

    def end_life(self, replica: int) -> None:
        """Place the requests of a replica whose runner has died anew; its suspects wait for it."""
        if replica in self.living:
            self._dispatcher.remove_replica(replica)
        suspects = self._bisections[replica].suspects
        self._take_back(replica, [entry for entry in self.shares[replica] if entry.serial not in suspects])
        self.dispatch()

    def give_up(self, replica: int) -> None:
        """Place also the suspects of a replica anew: it is dead, and may never live again."""
        if replica not in self.living and self.living:
            self._take_back(replica, list(self.shares[replica]))
            self.dispatch()

    def retire(self, replica: int) -> None:
        """Place all requests of a replica that has ended and is not waited for anew, also its suspects."""
        self.draining.discard(replica)
        self._take_back(replica, list(self.shares[replica]))
        self.dispatch()

    def place_again(self, replica: int, entries: Iterable[JournalEntry]) -> None:
        """Take requests back that a replica has not begun; `dispatch` places them anew, perhaps there.

        Args:
            entries: that its scheduler has given up; what it has not taken yet goes with them.
        """
        for entry in (*entries, *self.shares[replica].untaken):
            self.shares[replica].remove(entry)
            self.journal.begin_stay(entry)
            self._dispatcher.finish(str(entry.serial), self._now_s)
            self._unplaced[entry.serial] = None

    def _take_back(self, replica: int, entries: list[JournalEntry]) -> None:
        for entry in entries:
            self.shares[replica].remove(entry)
            self.journal.begin_stay(entry)  # what the replica says of it from now on is late
            if entry.scheduled_s is not None:
                entry.num_moved_tokens = entry.num_tokens
            self._unplaced[entry.serial] = None
            self._moving[entry.serial] = self._bisections[replica].release(entry.serial)

    # --------------------------------------------------------------------------------------- requests

    def dispatch(self) -> None:
        """Place what has arrived or is unplaced, the oldest request first."""
        entries = {entry.serial: entry for entry in self.journal.take_arrivals() if entry.replica is None}
        entries.update(
            (entry.serial, entry) for entry in map(self.journal.get, self._unplaced) if entry is not None
        )
        self._unplaced = {}
        self._rest_bisecting()
        for serial in sorted(entries):
            self._place(entries[serial])

    def _rest_bisecting(self) -> None:
        """Let replicas with suspects drain, and those that are to end; the others take requests again."""
        for replica in self.living:
            if replica in self.draining or self._bisections[replica].suspects:
                self._dispatcher.drain_replica(replica)
            elif self._dispatcher.is_draining(replica):
                self._dispatcher.add_replica(replica)

    def _place(self, entry: JournalEntry) -> None:
        self.advance_clock(entry.request.arrival_s)
        placement = self._dispatcher.place(
            str(entry.serial), self._indexed_hashes(entry), entry.num_tokens, self._now_s
        )
        if placement is None:
            self._unplaced[entry.serial] = None
            return
        if entry.serial in self._moving:
            self.num_moved += 1
            if (candidate := self._moving.pop(entry.serial)) is not None:
                self._bisections[placement.replica].adopt(entry.serial, candidate)
        self.shares[placement.replica].add(entry)
        self._wake(placement.replica)

    def _indexed_hashes(self, entry: JournalEntry) -> list[bytes]:
        """Return the hashes of the leading blocks that any replica has: the first that none has ends them."""
        cache, hashes = self._cache, list[bytes]()
        if cache is None or not cache.enabled or not entry.reads_prefix_cache:
            return hashes
        parent, size = cache.root(entry.request.cache_namespace), cache.block_size
        for start in range(0, entry.num_tokens - size, size):
            parent = cache.chain(parent, entry.tokens(start, start + size))
            if parent not in self._dispatcher.index:
                break
            hashes.append(parent)
        return hashes

    def note_token(self, entry: JournalEntry, now_s: float) -> None:
        """Note that a token of a request was committed."""
        self.advance_clock(now_s)
        self._dispatcher.token_came(str(entry.serial), now_s)

    def note_end(self, serials: list[int]) -> None:
        """Forget requests that have ended, wherever they were."""
        for serial in serials:
            self._dispatcher.finish(str(serial), self._now_s)
            self._unplaced.pop(serial, None)
            self._moving.pop(serial, None)
            for share, bisection in zip(self.shares, self._bisections, strict=True):
                share.forget(serial)
                if serial in bisection.crashed:
                    bisection.ended(serial)

    def check(self) -> None:
        """Check that each live request is in exactly one place.

        Raises:
            InvariantViolated: with the request and its places.
        """
        for share in self.shares:
            for entry in share:
                if entry.replica != share.replica or entry.serial not in self.journal:
                    raise InvariantViolated(
                        f"request {entry.serial} is with replica {entry.replica}; replica {share.replica} has it, too"
                    )
        arriving = {entry.serial for entry in self.journal.arrivals}
        for entry in self.journal:
            is_waiting = entry.serial in self._unplaced or entry.serial in arriving
            num_places = sum(entry.serial in share.own for share in self.shares) + is_waiting
            if num_places + self.journal.is_held(entry) != 1:
                raise InvariantViolated(f"request {entry.serial} must be in one place; it is in {num_places}")


class JournalShare(Journal):
    """Part of the journal that one replica computes: its scheduler sees no other request.

    Args:
        whole: journal of the engine, which does the work.
        table: told of tokens and endings.
        replica: number of the replica.
    """

    def __init__(self, whole: Journal, table: ReplicaTable, replica: int) -> None:
        super().__init__()
        self.stats, self.replica = whole.stats, replica
        self.own: dict[int, JournalEntry] = {}  # by serial
        self._whole, self._table = whole, table
        self._new: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self.own)

    def __iter__(self) -> Iterator[JournalEntry]:
        return iter(sorted(self.own.values(), key=lambda entry: entry.serial))

    def __contains__(self, serial: int) -> bool:
        return serial in self.own

    def add(self, entry: JournalEntry) -> None:
        """Take a request."""
        entry.replica = self.replica
        self.own[entry.serial] = entry
        self._new[entry.serial] = None

    def remove(self, entry: JournalEntry) -> None:
        """Give a request back."""
        entry.replica = None
        self.forget(entry.serial)

    def forget(self, serial: int) -> None:
        """Remove a request that has ended; harmless if it is not here."""
        self.own.pop(serial, None)
        self._new.pop(serial, None)

    @property
    def untaken(self) -> tuple[JournalEntry, ...]:
        """Requests that were placed here since the last `take_arrivals`."""
        return tuple(self.own[serial] for serial in sorted(self._new))

    @property
    def num_queued_tokens(self) -> int:
        return self._whole.num_queued_tokens

    @property
    def last_serial(self) -> int:
        return self._whole.last_serial

    def get(self, serial: int) -> JournalEntry | None:
        """Return the live entry of that serial, also that of another replica."""
        return self._whole.get(serial)

    def open(self, request: object, *, after: JournalEntry | None = None) -> JournalEntry:
        """Refuse: requests enter the journal of the engine."""
        raise InvariantViolated(
            "a request must be opened in the journal of the engine, not in a replica's share"
        )

    def is_held(self, entry: JournalEntry) -> bool:
        return self._whole.is_held(entry)

    def take_arrivals(self) -> list[JournalEntry]:
        """Return the requests that were placed here since the last call, after all that has arrived is placed."""
        self._table.dispatch()
        arrivals = [self.own[serial] for serial in sorted(self._new)]
        self._new.clear()
        return arrivals

    def begin_stay(self, entry: JournalEntry) -> int:
        return self._whole.begin_stay(entry)

    def take_unmasked(self, among: Container[int] | None = None) -> tuple[int, ...]:
        return self._whole.take_unmasked(self.own if among is None else among)

    def scheduled(self, entry: JournalEntry, now_s: float, num_cached_tokens: int = 0) -> None:
        self._whole.scheduled(entry, now_s, num_cached_tokens)

    def commit(self, entry: JournalEntry, token: SampledToken, now_s: float) -> bool:
        """Append a token; see `Journal.commit`."""
        is_new = self._whole.commit(entry, token, now_s)
        if is_new:
            self._table.note_token(entry, now_s)
        return is_new

    def commit_pooled(self, entry: JournalEntry, part: PooledVectors) -> bool:
        return self._whole.commit_pooled(entry, part)

    def close(self, entry: JournalEntry) -> list[int]:
        """Remove a request that has ended; see `Journal.close`."""
        ended = self._whole.close(entry)
        self._table.note_end(ended)
        return ended

    def check(self) -> None:
        self._whole.check()
        self._table.check()
