"""Admission to the engine, lookup of computed prefixes, and the queues of waiting and running requests."""

from __future__ import annotations

import heapq
from bisect import insort
from collections import Counter, deque
from collections.abc import Collection, Iterable
from typing import Protocol

import attrs

from triolet.core.journal import Journal, JournalEntry
from triolet.core.kv_cache.block_pool import BlockPool
from triolet.core.kv_cache.cache_groups import HOLE
from triolet.core.kv_cache.prefix_cache import PrefixCache
from triolet.core.request.param_validation import refuse
from triolet.core.scheduling.budget import SchedulerConfig, SchedulerCounters
from triolet.core.scheduling.policies.base import WaitingQueue, by_order, check_order
from triolet.core.scheduling.policies.registry import POLICIES
from triolet.core.scheduling.sequence import Sequence
from triolet.core.step_plan import BlockLoad
from triolet.errors import InvariantViolated, Overloaded

# Admission control: the queue is bounded by requests and by waiting tokens.
#
# Under `fair` no client can fill the queue alone. The last eighth of the places, and of the tokens that may
# wait, is reserved for clients below their share: the total, divided by the number of active clients and one
# more, for a client that may arrive. A single client gets seven eighths; with many, each is sure of its share
# until the very last place is taken. A request that was admitted is never removed for another one.
RECENT_ENDINGS = 64
KEPT = 8  # one part in so many is for clients below their share
MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 0.1, 60.0


class AdmissionLimits(Protocol):
    """Fields of an `EngineConfig` that bound the queue; see `Admission`."""

    @property
    def max_num_seqs(self) -> int: ...

    @property
    def max_queued_requests(self) -> int: ...

    @property
    def max_queued_tokens(self) -> int: ...

    @property
    def policy(self) -> str: ...


@attrs.define
class Admission:
    """Counter of the requests between the caller and the journal, and of those in the journal."""

    journal: Journal  # the requests that were taken
    max_num_seqs: int  # requests that run together
    max_queued_requests: int  # requests that may wait besides
    max_queued_tokens: int  # a request that finds this many prompt tokens waiting is refused
    is_fair: bool = False  # whether clients above their share leave a part of both to others
    _num_reserved: int = attrs.field(default=0, init=False)
    _reserved: Counter[str | None] = attrs.field(factory=Counter, init=False)  # by client; none is 0
    _endings: deque[float] = attrs.field(factory=lambda: deque(maxlen=RECENT_ENDINGS), init=False)

    @classmethod
    def of(cls, limits: AdmissionLimits, journal: Journal) -> Admission:
        """Return the admission control of an engine with these limits."""
        return cls(
            journal,
            limits.max_num_seqs,
            limits.max_queued_requests,
            limits.max_queued_tokens,
            is_fair=POLICIES[limits.policy].keeps_accounts,
        )

    @property
    def max_live_requests(self) -> int:
        """Requests that can be in the engine at one time; every channel's capacity follows from this."""
        return self.max_num_seqs + self.max_queued_requests

    def reserve(
        self, now_s: float, num_places: int = 1, *, client: str | None = None, was_admitted: bool = False
    ) -> None:
        """Take places for a request whose prompt is not known in tokens yet: one for each of its answers, or none.

        Args:
            num_places: answers.
            client: account of the request.
            was_admitted: by another engine before, so that its waiting tokens are not checked again.
        Raises:
            Overloaded: too few places are free, or the free ones are reserved for other clients.
            InvalidParams: the engine never has so many places.
        """
        self.check_answers(num_places)
        num_left = self.max_live_requests - self._num_reserved - len(self.journal) - num_places
        if num_left < 0:
            raise Overloaded("max_queued_requests", self.max_queued_requests, self.retry_after_s(now_s))
        is_kept = self.is_fair and num_left < self.max_live_requests // KEPT
        if is_kept and not was_admitted and self._places(client) + num_places > self.share(client):
            raise Overloaded(
                "max_queued_requests", self.max_queued_requests, self.retry_after_s(now_s), is_for_others=True
            )
        if not was_admitted:
            self.check_tokens(now_s, client)
        self._num_reserved += num_places
        self._reserved[client] += num_places

    def check_answers(self, num_answers: int) -> None:
        """Check that an idle engine has a place for each answer.

        Raises:
            InvalidParams: it has fewer.
        """
        if num_answers > self.max_live_requests:
            raise refuse(
                "n",
                f"must be at most {self.max_live_requests} (max_num_seqs + max_queued_requests)",
                num_answers,
            )

    def check_tokens(self, now_s: float, client: str | None = None) -> None:
        """Check the limit of waiting tokens; again once the prompt is tokenised, since others came meanwhile.

        Raises:
            Overloaded: the limit is reached, in all or for this client.
        """
        most, num_queued = self.max_queued_tokens, self.journal.num_queued_tokens
        if num_queued >= most:
            raise Overloaded("max_queued_tokens", most, self.retry_after_s(now_s))
        is_kept = self.is_fair and num_queued >= most - most // KEPT
        if is_kept and self._queued_tokens(client) >= self._divided(most, client):
            raise Overloaded("max_queued_tokens", most, self.retry_after_s(now_s), is_for_others=True)

    def share(self, client: str | None) -> int:
        """Return how many places this client may have when few are left."""
        return self._divided(self.max_live_requests, client)

    def _divided(self, number: int, client: str | None) -> int:
        clients = {entry.request.account for entry in self.journal} | self._reserved.keys() | {client}
        return number // (len(clients) + 1)

    def _places(self, client: str | None) -> int:
        num_live = sum(entry.request.account == client for entry in self.journal)
        return num_live + self._reserved[client]

    def _queued_tokens(self, client: str | None) -> int:
        waiting = (entry.request for entry in self.journal if entry.scheduled_s is None)
        return sum(len(request.prompt_token_ids) for request in waiting if request.account == client)

    def give_back(self, num_places: int = 1, client: str | None = None) -> None:
        """Return reserved places: the request is in the journal now, or was refused."""
        assert self._reserved[client] >= num_places, "a place was given back twice"
        self._num_reserved -= num_places
        self._reserved[client] -= num_places
        if not self._reserved[client]:
            del self._reserved[client]

    def ended(self, now_s: float) -> None:
        """Record the end of a request, from which `retry_after_s` is estimated."""
        self._endings.append(now_s)

    def retry_after_s(self, now_s: float) -> float:
        """Return the estimated wait for a free place, seconds: the mean time between recent endings."""
        if len(self._endings) < 2:
            return 1.0
        mean_s = (now_s - self._endings[0]) / len(self._endings)
        return min(max(mean_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)


NEVER = float("inf")
MAX_ENDED = 64
"""Times of ended requests that `Deadlines` keeps beside as many as there are live ones."""


@attrs.define
class Deadlines:
    """Heap of times, monotonic seconds, at which requests must be checked; ended requests are removed lazily.

    It is never much longer than twice the number of live requests.
    """

    _heap: list[tuple[float, int]] = attrs.field(factory=list, init=False)

    def add(self, serial: int, deadline_s: float) -> None:
        """Add the time at which to check a request."""
        if deadline_s != NEVER:
            heapq.heappush(self._heap, (deadline_s, serial))

    def next_s(self, live: Collection[int]) -> float:
        """Return the earliest time of a live request; infinity if there is none."""
        if len(self._heap) > 2 * len(live) + MAX_ENDED:
            # The earliest of each: another one is added when it has passed.
            earliest = {serial: at_s for at_s, serial in sorted(self._heap, reverse=True) if serial in live}
            self._heap = [(at_s, serial) for serial, at_s in earliest.items()]
            heapq.heapify(self._heap)
        while self._heap and self._heap[0][1] not in live:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else NEVER

    def pop(self) -> int:
        """Remove the earliest time, and return the serial of its request."""
        return heapq.heappop(self._heap)[1]


def due_s(entry: JournalEntry) -> float:
    """Return the time at which a request must end, monotonic seconds; infinity for never."""
    request = entry.request
    # Its queue deadline counts until it is first scheduled.
    return (
        request.deadline_s
        if entry.scheduled_s is not None
        else min(request.deadline_s, request.queue_deadline_s)
    )


def is_overdue(entry: JournalEntry, now_s: float) -> bool:
    """Return True if a request must end."""
    return due_s(entry) <= now_s


def overdue_of(entries: Iterable[JournalEntry], now_s: float) -> tuple[list[JournalEntry], float]:
    """Return the requests that must end now, and the next time at which another must; infinity if none has one."""
    overdue, later = list[JournalEntry](), NEVER
    for entry in entries:
        if (at_s := due_s(entry)) <= now_s:
            overdue.append(entry)
        else:
            later = min(later, at_s)
    return overdue, later


# Prefix lookup: a waiting request starts with the blocks that were computed already, for an equal prefix or a
# sibling. The answers to one prompt (n > 1) are computed from the same blocks. With prefix caching they find
# them like any other request. Where the cache is off, or must not be read, they take them from the block
# table of the first one, as long as it runs. Only full blocks are shared, and the last token of the prompt is
# always computed: the rest of a block is less work than copying it.
#
# Requests with the same beginning often arrive together. The first one computes it, and the others are
# deferred to the next step and find it there (`PrefixesInStep`), where that saves them at least half of their
# work.
MAX_HELD = 256
"""Most requests deferred to the end of the same step: finding the next one takes a look at each."""

Found = tuple[list[int], list[bytes]]
"""Block table, and the hashes of the blocks that have one. No reference is taken."""


def find_computed(cache: PrefixCache, sequence: Sequence, leader: Sequence | None) -> Found:
    """Find full blocks with the beginning of a request that has none; at least one token is left to compute.

    Args:
        leader: first of the sequences that answer the same prompt, if it is still live.
    """
    entry = sequence.entry
    if cache.enabled and entry.reads_prefix_cache:
        tokens = entry.tokens(0, entry.num_tokens)
        return cache.find(tokens, prefix_root(cache, sequence), sequence.known_hashes)
    if leader is None or leader.row_id is None:
        return [], []
    num_shared = min(leader.num_computed_tokens, len(entry.request.prompt_token_ids), entry.num_tokens - 1)
    num_blocks, groups = num_shared // cache.block_size, cache.groups
    table = leader.block_table[: num_blocks * groups.count]
    if groups.window is None:
        return table, leader.block_hashes[:num_blocks]
    num_passed = groups.num_behind(num_blocks * cache.block_size, cache.block_size)
    if num_passed < leader.num_passed_blocks:
        return [], []  # a window of the leader has gone on
    for index in range(leader.num_passed_blocks, num_passed):
        table[index * groups.count + groups.num_full : (index + 1) * groups.count] = [HOLE] * (
            groups.count - groups.num_full
        )
    return table, leader.block_hashes[:num_blocks]


def prefix_root(cache: PrefixCache, sequence: Sequence) -> bytes:
    """Return the parent hash of a request's first block; its namespace is hashed once."""
    if not sequence.prefix_root:
        sequence.prefix_root = cache.root(sequence.entry.request.cache_namespace)
    return sequence.prefix_root


def has_room(cache: PrefixCache, entry: JournalEntry, found: list[int], num_freed: int = 0) -> bool:
    """Check whether all known tokens of a request fit now, beside the cached blocks that it would revive.

    Args:
        found: ids of the blocks that need not be computed.
        num_freed: blocks that would be free besides.
    """
    groups, size = cache.groups, cache.block_size
    if groups.window is None:
        needed = -(-entry.num_tokens // size) * groups.count
    else:
        needed = groups.num_needed(entry.num_tokens, size) + found.count(HOLE)
    revived = sum(map(cache.pool.is_cached, found))
    return needed - len(found) + revived <= cache.pool.num_available + num_freed


def publish_computed(cache: PrefixCache, sequence: Sequence) -> None:
    """Publish the blocks that have been filled."""
    if not cache.enabled:
        return
    size, entry = cache.block_size, sequence.entry
    for index in range(len(sequence.block_hashes), sequence.num_computed_tokens // size):
        count = cache.groups.count
        parent = sequence.block_hashes[-1] if index else prefix_root(cache, sequence)
        content = entry.tokens(index * size, (index + 1) * size)
        block_ids = sequence.block_table[index * count : (index + 1) * count]
        block_hash = cache.publish(block_ids, parent, content, entry.request.owner)
        sequence.block_hashes.append(block_hash)
    num_published = min(len(sequence.block_hashes), len(entry.request.prompt_token_ids) // size) * size
    if (num_created := num_published - entry.num_cached_tokens) > entry.num_cache_creation_tokens:
        entry.num_cache_creation_tokens = num_created


def held_blocks(sequence: Sequence) -> list[int]:
    """Return the blocks of a sequence, without the holes of its table."""
    if not sequence.num_passed_blocks:
        return sequence.block_table
    return [block_id for block_id in sequence.block_table if block_id != HOLE]


def release_passed(cache: PrefixCache, sequence: Sequence, step_id: int | None) -> None:
    """Give back the blocks of a running request that its window has passed.

    Args:
        step_id: last step in flight, which may still name them.
    """
    groups, first = cache.groups, sequence.num_passed_blocks
    end = groups.num_behind(sequence.num_computed_tokens, cache.block_size)
    if end <= first:
        return
    released: list[int] = []
    holes = [HOLE] * (groups.count - groups.num_full)
    for index in range(first, end):
        places = slice(index * groups.count + groups.num_full, (index + 1) * groups.count)
        released += sequence.block_table[places]
        sequence.block_table[places] = holes
    sequence.num_passed_blocks = end
    cache.pool.release(released, step_id=step_id)


def stored_blocks(cache: PrefixCache, sequence: Sequence, num_tokens: int) -> list[BlockLoad]:
    """Return the full blocks of a running request's next tokens that the prefix store may have.

    Args:
        num_tokens: tokens that the step has of it. The last token of all is computed: something is sampled after it.
    """
    size, entry, begin = cache.block_size, sequence.entry, sequence.num_expected_tokens
    last = min(begin + num_tokens, entry.num_tokens - 1) // size
    may_read = cache.enabled and entry.reads_prefix_cache and begin % size == 0
    if sequence.row_id is None or not may_read:
        return []
    known = sequence.known_hashes
    for index in range(len(known), last):
        parent = known[-1] if known else prefix_root(cache, sequence)
        known.append(cache.chain(parent, entry.tokens(index * size, (index + 1) * size)))
    table, count = sequence.block_table, cache.groups.count
    return [
        BlockLoad(sequence.row_id, tuple(table[index * count : (index + 1) * count]), known[index])
        for index in range(begin // size, last)
    ]


@attrs.define
class PrefixesInStep:
    """Prefixes that the step being planned computes, or the one in flight, and the requests deferred until it has."""

    cache: PrefixCache
    # Serials of the requests deferred to the end of this step.
    held: set[int] = attrs.field(factory=set, init=False)
    _by_next_hash: dict[bytes, tuple[Sequence, int]] = attrs.field(factory=dict, init=False)
    _in_flight: dict[bytes, tuple[Sequence, int]] = attrs.field(factory=dict, init=False)

    def begin_step(self, *, is_ahead: bool = False) -> None:
        """Forget the last step, unless it is in flight."""
        self.held.clear()
        self._by_next_hash = {}
        if not is_ahead:
            self._in_flight = {}

    def end_planning(self) -> None:
        """Note that the step being planned is in flight from now on; what was in flight is done when it begins."""
        self._by_next_hash, self._in_flight = {}, self._by_next_hash

    @property
    def is_full(self) -> bool:
        """Return whether the limit of deferred requests is reached: no other is looked at in this step."""
        return len(self.held) >= MAX_HELD

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        """Note how many tokens of a request the step computes."""
        size, entry, index = self.cache.block_size, sequence.entry, len(sequence.block_hashes)
        if self.cache.enabled and num_tokens >= size:
            end = min(sequence.num_expected_tokens + num_tokens, entry.num_tokens) // size
            parent = sequence.block_hashes[-1] if index else prefix_root(self.cache, sequence)
            next_hash = self.cache.chain(parent, entry.tokens(index * size, (index + 1) * size))
            self._by_next_hash.setdefault(next_hash, (sequence, end * size))

    def holds(self, sequence: Sequence, found: Found) -> bool:
        """Decide whether to defer a waiting request: at least half of its work is computed by this step.

        Args:
            sequence: a waiting request.
            found: blocks of it that are cached now.
        """
        entry, index = sequence.entry, len(found[0]) // self.cache.groups.count
        begin = index * self.cache.block_size
        if not (entry.reads_prefix_cache and index < len(sequence.known_hashes)):
            return False
        next_hash = sequence.known_hashes[index]
        if (underway := self._in_flight.get(next_hash) or self._by_next_hash.get(next_hash)) is None:
            return False
        other, end = underway
        end = min(end, (entry.num_tokens - 1) // self.cache.block_size * self.cache.block_size)
        pairs = zip(other.entry.tokens(begin, end), entry.tokens(begin, end), strict=True)
        num_same = next((i for i, (a, b) in enumerate(pairs) if a != b), end - begin)
        num_saved = num_same // self.cache.block_size * self.cache.block_size
        if 2 * num_saved < entry.num_tokens - begin:
            return False
        self.held.add(entry.serial)
        return True


# Queues: every live request waits, or runs with a row of the runner's table and blocks of its own.
#
# All moves are made here, so that place, row and blocks change together:
#
#     enter -> waiting -> admit -> running -> leave
#                 ^------ preempt ----'
#
# A request leaves from either queue. Each time that it is queued it begins a residency with a new epoch: the
# results of an earlier residency are ignored.


class RequestQueues:
    """Waiting and running requests. The lists are to be read: only the methods change them.

    Args:
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
            block_ids: full blocks with its beginning, which it shares from now on.
            hashes: of these blocks.
        """
        config, groups = self._config, self._config.groups
        self.waiting.remove(sequence)
        num_cached_tokens = len(block_ids) // groups.count * config.block_size
        num_passed = 0
        if groups.window is not None:
            num_passed = groups.num_behind(num_cached_tokens, config.block_size)
        sequence.begin(self._free_rows.pop(), block_ids, hashes, num_cached_tokens, num_passed)
        self._pool.share(held_blocks(sequence))
        insort(self.running, sequence, key=by_order)
        self.waiting.started(sequence)

    def preempt(self, victim: Sequence, step_id: int | None = None) -> None:
        """Move a running request that no step works on back to the waiting queue, at its old place.

        Args:
            step_id: a void step in flight that names its blocks; they are free when it ends.
        """
        assert victim.num_scheduled_tokens == victim.num_assumed_tokens == 0
        self.running.remove(victim)
        self._take_back(victim, step_id)
        del self.by_epoch[victim.entry.epoch]
        self.by_epoch[self._journal.begin_stay(victim.entry)] = victim
        self.waiting.add(victim)
        victim.entry.num_preemptions += 1
        self._counters.num_preemptions += 1

    def leave(self, sequence: Sequence, step_id: int | None) -> None:
        """Remove a request that has ended.

        Args:
            step_id: the last step in flight; the blocks of a running request are free when this step ends.
        """
        del self.live[sequence.entry.serial]
        del self.by_epoch[sequence.entry.epoch]
        if sequence.row_id is None:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._take_back(sequence, step_id)

    def _take_back(self, sequence: Sequence, step_id: int | None) -> None:
        """Free the row and the blocks; everything must be computed again."""
        assert sequence.row_id is not None
        self._pool.release(held_blocks(sequence), step_id=step_id)
        self._free_rows.append(sequence.row_id)
        self._ended_rows.append(sequence.row_id)
        if self.waiting.keeps_accounts:
            self.waiting.stopped(sequence)
        # A plan may still hold the sequence; without a row and scheduled tokens it is skipped there.
        sequence.row_id = None
        sequence.num_computed_tokens = sequence.num_scheduled_tokens = sequence.num_planned_blocks = 0
        sequence.num_assumed_tokens = sequence.num_unknown_tokens = 0
        sequence.block_table, sequence.block_hashes, sequence.num_passed_blocks = [], [], 0

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
        self._check_each_request()
        for sequence in self.waiting:
            if sequence.block_table or sequence.row_id is not None or sequence.num_scheduled_tokens:
                raise InvariantViolated(f"waiting request {sequence.entry.serial} holds blocks or a row")
        check_order(self.running)
        self.waiting.check()
        self._check_rows()

    def _check_each_request(self) -> None:
        running, waiting, live = self.running, tuple(self.waiting), self.live
        serials = {sequence.entry.serial for sequence in (*running, *waiting)}
        if serials != live.keys() or len(serials) != len(running) + len(waiting):
            raise InvariantViolated(f"running {len(running)} + waiting {len(waiting)} != {len(live)}")
        if {sequence.entry.epoch: sequence for sequence in live.values()} != self.by_epoch:
            raise InvariantViolated("epochs do not name the live sequences")
        if len(running) > (num_tokens := self._config.max_num_batched_tokens):
            raise InvariantViolated(f"{len(running)} running requests share {num_tokens} tokens")

    def _check_rows(self) -> None:
        rows = sorted([*self._free_rows, *(one.row_id for one in self.running if one.row_id is not None)])
        if rows != list(range(self._config.max_num_seqs)):
            raise InvariantViolated(f"free rows and running requests must be each row once; got {rows}")
