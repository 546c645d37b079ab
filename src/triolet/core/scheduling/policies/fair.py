"""The policy `fair`: clients get equal numbers of tokens, however many requests they send.

Theory of operation
-------------------
Deficit round robin over clients (Shreedhar and Varghese, 1996), with tokens for bytes. The length of an answer is not
known beforehand, so a client does not save up for its next packet but pays for each token when it is computed; the
deficit of a client is what it has been served less than the others. This is the virtual token counter of Sheng et al.
(2024, arXiv 2401.00588): `served[client]`, and the client with the least is admitted next.

Every token that is computed for the first time counts, of prompts and of answers alike. Tokens found in the prefix
cache are free, and so are tokens computed again after a preemption: the engine chose to preempt.

No credit is saved up. A client that begins to wait, new or back from a pause, starts at the `floor`: what the least
served of the waiting clients has had. What it was served beyond that it still owes. So a newcomer is admitted next and
has no more than its share from then on, and leaving and coming back gains nothing. While no request waits, all accounts
are closed.

Requests of one client are served by priority, then its names take turns (`name_turns`), then in order of arrival.
Requests without a client are one client.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Iterator

import attrs

from triolet.core.journal import JournalEntry
from triolet.core.scheduling.budget import SchedulerConfig, TokenBudget
from triolet.core.scheduling.policies.base import MayRun, Overtaking, WaitingQueue, check_order
from triolet.core.scheduling.policies.name_turns import NameTurns
from triolet.core.scheduling.sequence import Order, Sequence
from triolet.errors import InvariantViolated

# While a client with few requests is active, the rows that clients with many requests have in a step are
# limited, so that the step is short (`core.scheduling.budget`): a new request waits for the end of the step
# in flight. Their rows take turns, the one that has waited longest first; none of them loses its row or its
# blocks. A client that is behind in tokens by more than `SLACK` is not throttled. Alone, or among clients of
# its size, a client has whole steps.
#
# A pooled prompt has no reader who waits for the next token, and there may be thousands of them. While a client that
# is not throttled decodes, those of throttled clients lengthen a step by at most `POOLED_PART`: its tokens shall come
# within 1.5 times of what they take alone, and costs are estimates.
MANY = 4
POOLED_PART = 0.3
LINGER_S = 5.0  # a reader of a short answer who goes on is back by then
MAX_LINGERING = 64

# Rows are lent, not owned. A waiting client takes a row (and blocks, if it needs them) of one that runs at
# least two requests more, unless it is ahead of that one by more than `SLACK` tokens. So a client that fills
# all rows makes way within a step for the few requests of another, and two clients with the same number of
# rows leave each other alone. The client that makes way also sits out that step: its many rows would make the
# step long and the other's first token late, and it loses little, since the step without it is short. Where
# there are more clients than rows, a gap of `QUANTUM` tokens lets the one behind take the row, so that a long
# answer does not keep others waiting to its end.

# Tokens that a client may be ahead before it loses its last row: a preemption may cost a whole prompt's computation,
# so it must not come often; 1024 tokens are the length of an answer that is long, but not endless.
QUANTUM = 1024
# A handful of short requests that arrive together are admitted together, although the first is charged by then.
SLACK = 256
MAX_ACCOUNTS = 1024  # beyond it the oldest debts of clients with nothing to compute are forgiven

Client = str | None


@attrs.define
class ActiveClients:
    """Clients that have requests or had some until lately, and which of them have many beside one with few.

    A client is active while it has a request and `LINGER_S` longer: one that asks, reads and asks again is active all
    the time. It has *few* requests beside a client that has at least `MANY` times as many as it ever had together
    since it last had none, no matter how many of them run.
    """

    _present: dict[Client, int] = attrs.field(factory=dict, init=False)
    _most: dict[Client, int] = attrs.field(factory=dict, init=False)
    _left: OrderedDict[Client, tuple[float, int]] = attrs.field(factory=OrderedDict, init=False)
    _now_s: float = attrs.field(default=0.0, init=False)

    def advance_clock(self, now_s: float) -> None:
        """Set the clock and forget clients that left more than `LINGER_S` ago; monotonic seconds."""
        self._now_s = now_s
        while self._left and next(iter(self._left.values()))[0] + LINGER_S <= now_s:
            self._left.popitem(last=False)

    def set_num_requests(self, client: Client, num_requests: int, *, moves: bool = False) -> None:
        """Set how many requests a client has; with none it has left.

        Args:
            moves: a request of it changed its queue, so that the client may seem to have left in between.
        """
        if num_requests:
            _, most = self._left.pop(client, (0.0, 0))
            # What it had before it left says nothing about what it wants now.
            self._most[client] = max(self._most.get(client, most if moves else 0), num_requests)
            self._present[client] = num_requests
        elif client in self._present:
            del self._present[client]
            self._left[client] = (self._now_s, self._most.pop(client))
            if len(self._left) > MAX_LINGERING:
                self._left.popitem(last=False)

    def with_few(self, beside: Client) -> list[Client]:
        """Return the clients that have requests, and few beside this client's."""
        num_requests = self._present[beside]
        return [client for client, most in self._most.items() if MANY * most <= num_requests]

    def with_many(self) -> list[Client]:
        """Return the clients that have many requests beside those of some active client."""
        lingering = (most for _, most in self._left.values())
        fewest = min((*self._most.values(), *lingering), default=0)
        return [client for client, number in self._present.items() if number >= MANY * fewest]

    @property
    def has_lingering(self) -> bool:
        """Return whether a client without requests is still active."""
        return bool(self._left)


class FairQueue(WaitingQueue):
    """Waiting requests of all clients, and the number of tokens that each client was served."""

    summary = "equal numbers of tokens for all clients"
    keeps_accounts = True
    allows_long_steps = False  # steps are kept short for requests that arrive meanwhile

    def __init__(self, config: SchedulerConfig, budget: TokenBudget) -> None:
        super().__init__(config, budget)
        self._active = ActiveClients()
        self._queues: dict[Client, list[Sequence]] = {}  # none is empty; each sorted `by_turn`
        self._turns: dict[Client, NameTurns] = {}  # of clients with requests
        self._num_rows: Counter[Client] = Counter()
        self._served: OrderedDict[Client, int] = OrderedDict()
        self._floor = 0
        # In the step that is being planned:
        self._resting: set[Client] = set()
        self._throttled: set[Client] = set()
        self._spare_s = float("inf")  # what is left of the step for throttled clients
        self._has_spare = True  # enough for a row, or none of them has one yet
        self._pooled_s = float("inf")  # the part of it for pooled rows
        self._has_pooled_spare = True  # as `_has_spare`, for pooled rows
        self._shares: dict[int, int] = {}  # tokens for their rows, by serial

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self._queues.values():
            yield from queue

    def order(self, entry: JournalEntry) -> Order:
        return (entry.request.priority, entry.serial)

    def served(self, client: Client) -> int:
        """Return the tokens that a client was served, counted from the floor it started at."""
        return self._served.get(client, self._floor)

    def add(self, sequence: Sequence) -> None:
        client = client_of(sequence)
        if not self._is_contended:
            self._close_accounts()
        if client not in self._queues:
            self._raise_floor()
            self._served[client] = max(self.served(client), self._floor)
            self._served.move_to_end(client)
            self._queues[client] = []
        if not sequence.turn:  # else it was preempted and keeps it
            name = sequence.entry.request.client
            sequence.turn = self._turns.setdefault(client, NameTurns()).next(name)
        insort(self._queues[client], sequence, key=by_turn)
        was_preempted = sequence.last_step > 0
        self._active.set_num_requests(client, self._num_requests(client), moves=was_preempted)

    def remove(self, sequence: Sequence) -> None:
        client = client_of(sequence)
        queue = self._queues[client]
        del queue[bisect_left(queue, by_turn(sequence), key=by_turn)]
        if not queue:
            self._raise_floor()
            del self._queues[client]
        self._active.set_num_requests(client, self._num_requests(client))
        if not queue:
            self._settle(client)

    def position(self, sequence: Sequence) -> int:
        # As if every waiting client got its turn once a round.
        own = client_of(sequence)
        index = bisect_left(self._queues[own], by_turn(sequence), key=by_turn)
        return index + sum(
            min(len(queue), index + (self._rank(client) < self._rank(own)))
            for client, queue in self._queues.items()
            if client != own
        )

    def next(self, may_run: MayRun) -> Sequence | None:
        shut = () if self._has_spare else self._throttled
        for client in sorted(self._queues.keys() - self._resting.union(shut), key=self._rank):
            sequence = next(filter(may_run, self._queues[client]), None)
            # Only the first one is looked at: behind a pooled request there may be thousands of others.
            if sequence is not None and (client not in self._throttled or self._has_spare_for(sequence)):
                return sequence
        return None

    def _rank(self, client: Client) -> tuple[int, int, Order]:
        """Sort key of clients: the least served first, then the one with fewer rows, then the one that came first."""
        return (self.served(client), self._num_rows[client], self._queues[client][0].order)

    def service_order(self, running: list[Sequence]) -> list[Sequence]:
        # Under pressure, the clients that were served the most lose their blocks first.
        return sorted(running, key=lambda sequence: (self.served(client_of(sequence)), sequence.order))

    def taking_part(self, running: list[Sequence]) -> list[Sequence]:
        # Clients that make way for an overtaking one sit this step out.
        overtakers = {client_of(other) for other in running if not other.is_unserved}
        clients = {client_of(other) for other in running} - overtakers
        rows = self._num_rows
        self._resting = {
            client for client in clients if any(self._makes_way(client, poor, rows) for poor in overtakers)
        }
        return self._in_turns([other for other in running if client_of(other) not in self._resting])

    def _in_turns(self, running: list[Sequence]) -> list[Sequence]:
        """Leave out the rows of throttled clients that do not fit into a step of the allowed length."""
        throttled: dict[Client, list[Sequence]] = {client: [] for client in self._throttled}
        num_decodes = sum(one.num_pending_tokens == 1 and client_of(one) not in throttled for one in running)
        if num_decodes:
            self._pooled_s = self._budget.many_pooled_s(num_decodes, POOLED_PART)
        for other in running:
            if client_of(other) in throttled and not other.entry.awaits_mask:
                throttled[client_of(other)].append(other)
        turns = []
        for client, rows in throttled.items():
            rows.sort(key=lambda row: row.last_step)
            turns += [(self.served(client) + index, row.order, row) for index, row in enumerate(rows)]
        for _, _, row in sorted(turns, key=lambda turn: turn[:2]):
            if self._has_spare_for(row):
                self._shares[row.entry.serial] = self._share(row, row.num_pending_tokens)
        return [
            other
            for other in running
            if client_of(other) not in throttled or other.entry.serial in self._shares
        ]

    def _has_spare_for(self, sequence: Sequence) -> bool:
        return self._has_spare and (self._has_pooled_spare or sequence.entry.request.pooling is None)

    def _share(self, sequence: Sequence, num_tokens: int) -> int:
        """Take the tokens of a throttled client's row out of what is left of the time."""
        costs, is_pooled = self._budget.costs, sequence.entry.request.pooling is not None
        left_s = min(self._spare_s, self._pooled_s) if is_pooled else self._spare_s
        num_tokens = min(num_tokens, 1 + self._budget.tokens_within(max(0.0, left_s - costs.row_s)))
        taken_s = costs.row_s + (num_tokens - 1) * costs.token_s
        self._spare_s -= taken_s
        self._has_spare = self._spare_s >= costs.row_s
        if is_pooled:
            self._pooled_s -= taken_s
            self._has_pooled_spare = self._pooled_s >= costs.row_s
        return num_tokens

    def portion(self, sequence: Sequence, num_tokens: int) -> int:
        if client_of(sequence) not in self._throttled:
            return num_tokens
        if sequence.row_id is None:  # about to be admitted
            return self._share(sequence, num_tokens) if self._has_spare_for(sequence) else 0
        return min(num_tokens, self._shares.get(sequence.entry.serial, num_tokens))

    def begin_step(self, now_s: float) -> None:
        self._active.advance_clock(now_s)
        self._resting, self._shares = set(), {}
        self._spare_s, self._has_spare = self._budget.many_s, True
        self._pooled_s, self._has_pooled_spare = float("inf"), True
        self._throttled = set(filter(self._is_throttled, self._active.with_many()))

    def _is_throttled(self, client: Client) -> bool:
        few = self._active.with_few(beside=client)
        if not few:
            return self._active.has_lingering
        return self.served(client) >= min(map(self.served, few)) - SLACK

    @property
    def _is_contended(self) -> bool:
        """Return whether service is owed to some client."""
        return bool(self._queues or self._throttled)

    def overtaking(self, running: list[Sequence], may_run: MayRun) -> Overtaking | None:
        # The last request of the client with the most rows makes way.
        unserved: dict[Client, Sequence] = {}
        # Not `_num_rows`: the planner also asks what would follow if some of them ran no more.
        rows = Counter[Client]()
        for other in running:  # in order, so that the last one stays
            rows[client_of(other)] += 1
            if other.is_unserved:
                unserved[client_of(other)] = other
        for poor in sorted(self._queues.keys() - self._throttled, key=self._rank):
            rich = [client for client in unserved if self._makes_way(client, poor, rows)]
            first = next(filter(may_run, self._queues[poor]), None)
            if rich and first is not None:
                richest = max(rich, key=lambda client: (rows[client], self.served(client)))
                return first, unserved[richest]
        return None

    def _makes_way(self, rich: Client, poor: Client, num_rows: Counter[Client]) -> bool:
        ahead = self.served(rich) - self.served(poor)
        return ahead >= QUANTUM or (ahead >= -SLACK and num_rows[rich] >= num_rows[poor] + 2)

    def started(self, sequence: Sequence) -> None:
        client = client_of(sequence)
        self._num_rows[client] += 1
        self._turns.setdefault(client, NameTurns()).started(sequence.turn)
        self._active.set_num_requests(client, self._num_requests(client), moves=True)
        # Tokens found in the prefix cache are free.
        sequence.num_charged_tokens = max(sequence.num_charged_tokens, sequence.num_computed_tokens)

    def stopped(self, sequence: Sequence) -> None:
        client = client_of(sequence)
        self._num_rows[client] -= 1
        if not self._num_rows[client]:
            del self._num_rows[client]
        self._active.set_num_requests(client, self._num_requests(client))
        if client not in self._num_rows:
            self._settle(client)

    def charge(self, sequence: Sequence, end: int) -> None:
        if end > sequence.num_charged_tokens:
            client = client_of(sequence)
            self._served[client] = self.served(client) + end - sequence.num_charged_tokens
            sequence.num_charged_tokens = end

    def _raise_floor(self) -> None:
        """Raise the floor to the least served of the waiting clients, or else of the running ones; it never falls."""
        if clients := self._queues or self._num_rows:
            self._floor = max(self._floor, min(map(self.served, clients)))

    def _settle(self, client: Client) -> None:
        """Close all accounts if no client is owed anything, or this one if it is idle and owes nothing."""
        if self._is_idle(client):
            self._turns.pop(client, None)
        if not self._is_contended:
            self._close_accounts()
        elif self._is_idle(client) and self.served(client) <= self._floor:
            self._served.pop(client, None)
        if len(self._served) > MAX_ACCOUNTS:
            debtor = next(filter(self._is_idle, self._served), None)
            if debtor is not None:
                del self._served[debtor]

    def _close_accounts(self) -> None:
        self._served.clear()
        self._floor = 0

    def _num_requests(self, client: Client) -> int:
        return self._num_rows[client] + len(self._queues.get(client, ()))

    def _is_idle(self, client: Client) -> bool:
        return client not in self._queues and client not in self._num_rows

    def check(self) -> None:
        for queue in self._queues.values():
            check_order(queue, by_turn)
        if not all(self._queues.values()):
            raise InvariantViolated("a client without waiting requests is in the queue")
        if min(self._num_rows.values(), default=1) < 1:
            raise InvariantViolated(f"clients run at least one request each; got {dict(self._num_rows)}")


def by_turn(sequence: Sequence) -> tuple[float, int, int]:
    """Return the sort key of a request among those of its client."""
    priority, serial = sequence.order
    return (priority, sequence.turn, serial)


def client_of(sequence: Sequence) -> Client:
    """Return the client that the tokens of a request are counted for."""
    return sequence.entry.request.account
