"""Dispatcher: gives each arrival to the replica that is expected to answer first.

The cost of a replica is the expected time to the first token there, plus what the work means for those that come
after:

    wait + (1 + EXTERNALITY) * own
    wait = (queued prompt tokens, less what was computed of the first) * per_token_s
    own  = (prompt tokens of this request that the replica's prefix cache lacks) * per_token_s

`per_token_s` is learned for each replica (`FirstTokenCosts`), `queued` counts what was placed and has no first token
yet, and the cache is known by the prefix index. Replicas within `TIE` of the least cost are as good as each other by
what can be known; of them the one with the fewest tokens in its KV cache is taken, then the first.

A prefix that is held elsewhere is thus worth exactly the time that it saves: no threshold says when affinity ends.
Queues do not run away from each other, since a wait counts in the same unit. A replica whose first queued prompt is
overdue becomes dearer every second, long before its health says that it is stuck.

Compare NVIDIA Dynamo's router (prefill blocks plus decode blocks), llm-d's scorers (3 prefix, 2 queue, 2 KV use) and
the cache-aware policy of sglang-gateway; `benchmarks/dispatch.py` replays a trace against all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from triolet.core.dispatch.first_token_costs import FirstTokenCosts
from triolet.core.dispatch.prefix_index import DEFAULT_MAX_BLOCKS, PrefixIndex
from triolet.errors import InvariantViolated

FIRST_TOKEN_S = 1e-4
"""Seconds a prompt token, before anything was seen. Only ratios between replicas decide, and these are equal then."""

NUM_SURE = 8
"""First tokens after which a replica's own costs count; until then those of all replicas together do."""

EXTERNALITY = 1.0
"""Part of a prompt's own time that counts again: near saturation, about one later arrival waits behind it."""

TIE = 0.01
"""Relative difference of costs that says nothing: what was learned of two equal replicas differs by about this."""


@attrs.frozen
class Placement:
    """Decision about one request."""

    replica: int
    num_cached_tokens: int  # that the replica is expected to find in its prefix cache
    expected_s: float  # time to the first token


@attrs.define(eq=False)
class _Placed:
    replica: int
    num_new_tokens: int
    num_held_tokens: int
    is_waiting: bool = True


@attrs.define(eq=False)
class _Replica:
    costs: FirstTokenCosts
    token_s: float  # seconds that a token of a prompt takes there now
    waiting: dict[str, _Placed] = attrs.field(factory=dict)  # in order of placement
    running: dict[str, _Placed] = attrs.field(factory=dict)
    num_queued_tokens: int = 0
    num_held_tokens: int = 0
    front_since_s: float = 0.0  # when the first of `waiting` began to be computed
    num_front_tokens: int = 0  # of the first of `waiting`


class Dispatcher:
    """Replicas, what each has to do, and what each is known to hold.

    Times are monotonic seconds of one clock, given by the caller. Replicas are small numbers, requests are named.

    Args:
        block_tokens: tokens that one hash of a prompt stands for.
        max_blocks: hashes a replica in the prefix index, at most.
        learns_from_placements: whether a placement is noted in the index; False if the caches themselves feed it.
    """

    def __init__(
        self, block_tokens: int, *, max_blocks: int = DEFAULT_MAX_BLOCKS, learns_from_placements: bool = True
    ) -> None:
        self.index = PrefixIndex(max_blocks)
        self._block_tokens = block_tokens
        self._learns_from_placements = learns_from_placements
        self._replicas: dict[int, _Replica] = {}
        self._taking: dict[int, _Replica] = {}  # those that take requests
        self._unsure: dict[int, _Replica] = {}  # those that are taken to be as fast as all together
        self._requests: dict[str, _Placed] = {}
        self._all_costs = FirstTokenCosts(FIRST_TOKEN_S)

    @property
    def replicas(self) -> tuple[int, ...]:
        """Replicas that live, also those that drain."""
        return tuple(self._replicas)

    def add_replica(self, replica: int) -> None:
        """Let a replica take requests: a new one, one that was dead, or one that was draining.

        Raises:
            InvariantViolated: it takes them already.
        """
        known = self._replicas.get(replica)
        if known is None:
            state = _Replica(FirstTokenCosts(FIRST_TOKEN_S), self._all_costs.token_s)
            self._replicas[replica] = self._taking[replica] = self._unsure[replica] = state
        elif replica not in self._taking:
            self._taking[replica] = known
        else:
            raise InvariantViolated(f"a replica must be added once: {replica} is there")

    def drain_replica(self, replica: int) -> None:
        """Give a replica nothing more; what it has it keeps."""
        self._taking.pop(replica, None)

    def is_draining(self, replica: int) -> bool:
        """Return True if a replica gets nothing more."""
        return replica in self._replicas and replica not in self._taking

    def remove_replica(self, replica: int) -> tuple[str, ...]:
        """Forget a replica that is dead, and all that it held.

        Returns:
            Its requests, to be placed anew, in the order in which they were placed.
        """
        del self._replicas[replica]
        self._taking.pop(replica, None)
        self._unsure.pop(replica, None)
        self.index.forget(replica)
        orphans = tuple(name for name, placed in self._requests.items() if placed.replica == replica)
        for request_id in orphans:
            del self._requests[request_id]
        return orphans

    def place(
        self, request_id: str, hashes: Sequence[bytes], num_tokens: int, now_s: float
    ) -> Placement | None:
        """Choose the replica of a request, and note that it has it.

        Args:
            request_id: name of the request, new here.
            hashes: of the leading full blocks of its prompt, in order.
            num_tokens: length of the prompt, and of the answer so far if it is placed anew; at least 1.
            now_s: time.
        Returns:
            None if no replica takes requests; nothing is noted then.
        Raises:
            InvariantViolated: it is placed already.
        """
        if request_id in self._requests:
            raise InvariantViolated(f"a request must be placed once: {request_id!r} is placed")
        cached = self.index.leading(hashes)
        if not (costs := self._costs(num_tokens, cached, now_s)):
            return None
        bound = (1 + TIE) * min(costs)
        _, replica, cost = min(
            [
                (state.num_held_tokens, replica, cost)
                for cost, (replica, state) in zip(costs, self._taking.items(), strict=True)
                if cost <= bound
            ]
        )
        num_new = self._num_new(num_tokens, cached.get(replica, 0))
        expected_s = cost - EXTERNALITY * num_new * self._replicas[replica].token_s
        self._note(request_id, _Placed(replica, num_new, num_tokens), now_s)
        if self._learns_from_placements:
            self.index.touch(replica, hashes)
        return Placement(replica, num_tokens - num_new, expected_s)

    def assign(self, request_id: str, replica: int, num_tokens: int, now_s: float) -> None:
        """Note that a replica has a request that was not placed by this dispatcher.

        Args:
            num_tokens: of prompt and answer, none of which is computed.
        """
        self._note(request_id, _Placed(replica, max(1, num_tokens), num_tokens), now_s)

    def _num_new(self, num_tokens: int, num_blocks: int) -> int:
        return max(1, num_tokens - num_blocks * self._block_tokens)  # the last token is always computed

    def _costs(self, num_tokens: int, cached: Mapping[int, int], now_s: float) -> list[float]:
        """Return the cost of a request at each replica that takes any.

        Args:
            cached: blocks of the request that the replicas hold, where they hold some.
        """
        # One loop without calls: it is most of what a decision takes.
        costs: list[float] = []
        for replica, state in self._taking.items():
            token_s = state.token_s
            num_new = self._num_new(num_tokens, cached[replica]) if replica in cached else num_tokens
            own_s = wait_s = num_new * token_s
            if state.waiting:
                front = state.num_front_tokens
                # An overdue prompt is expected to take as long again as it is overdue.
                front_s = abs(front * token_s - (now_s - state.front_since_s))
                wait_s = (state.num_queued_tokens - front) * token_s + front_s + own_s
            costs.append(wait_s + EXTERNALITY * own_s)
        return costs

    def _note_speed(self, state: _Replica) -> None:
        costs = state.costs if state.costs.num_seen >= NUM_SURE else self._all_costs
        state.token_s = costs.per_token_s(len(state.running))

    def _note(self, request_id: str, placed: _Placed, now_s: float) -> None:
        state = self._replicas[placed.replica]
        if not state.waiting:
            state.front_since_s, state.num_front_tokens = now_s, placed.num_new_tokens
        state.waiting[request_id] = self._requests[request_id] = placed
        state.num_queued_tokens += placed.num_new_tokens
        state.num_held_tokens += placed.num_held_tokens

    def first_token(self, request_id: str, now_s: float) -> None:
        """Note that a request's first token came, and learn from the time that it took; later ones change nothing."""
        placed = self._requests.get(request_id)
        if placed is None or not placed.is_waiting:
            return
        state = self._replicas[placed.replica]
        seconds = max(0.0, now_s - state.front_since_s)
        for costs in (state.costs, self._all_costs):
            costs.observe(placed.num_new_tokens, len(state.running), seconds)
        self._leave_queue(request_id, placed, state)
        state.front_since_s = now_s  # whatever was done out of order: the next one begins now
        placed.is_waiting = False
        state.running[request_id] = placed
        self._note_speed(state)
        if state.costs.num_seen >= NUM_SURE:
            self._unsure.pop(placed.replica, None)
        for other in self._unsure.values():
            self._note_speed(other)

    def token_came(self, request_id: str, now_s: float) -> None:
        """Note one more token of a request's answer, perhaps the first."""
        placed = self._requests.get(request_id)
        if placed is None:
            return
        if placed.is_waiting:
            self.first_token(request_id, now_s)
        placed.num_held_tokens += 1
        self._replicas[placed.replica].num_held_tokens += 1

    def grow(self, request_id: str, num_tokens: int) -> None:
        """Note that a request holds more tokens, those of its answer."""
        placed = self._requests.get(request_id)
        if placed is not None:
            placed.num_held_tokens += num_tokens
            self._replicas[placed.replica].num_held_tokens += num_tokens

    def finish(self, request_id: str, now_s: float) -> None:
        """Note that a request is over, however it ended; one that is not placed is let pass."""
        placed = self._requests.pop(request_id, None)
        if placed is None:
            return
        state = self._replicas[placed.replica]
        state.num_held_tokens -= placed.num_held_tokens
        if not placed.is_waiting:
            del state.running[request_id]
            self._note_speed(state)
            return
        if next(iter(state.waiting)) == request_id:
            state.front_since_s = now_s
        self._leave_queue(request_id, placed, state)

    @staticmethod
    def _leave_queue(request_id: str, placed: _Placed, state: _Replica) -> None:
        del state.waiting[request_id]
        state.num_queued_tokens -= placed.num_new_tokens
        front = next(iter(state.waiting.values()), None)
        state.num_front_tokens = front.num_new_tokens if front is not None else 0

    def replica_of(self, request_id: str) -> int | None:
        """Return the replica of a request; None if it is not placed."""
        placed = self._requests.get(request_id)
        return None if placed is None else placed.replica

    def num_requests(self, replica: int) -> int:
        """Return how many requests a replica has, waiting and running."""
        state = self._replicas[replica]
        return len(state.waiting) + len(state.running)
