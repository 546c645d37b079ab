"""Policy `fcfs`, and base class of the others: the queue of waiting requests, and the decisions that a policy makes.

A policy decides which waiting request is admitted next, in which order running requests are served, and which of them
loses its row or its blocks to another. The base class keeps one list of waiting requests in the fixed order that
`order` gives: here that of arrival. A policy that is nothing but an order overrides `order` alone; one that counts what
each client was served (`keeps_accounts`) overrides what it needs of the rest.

A request that loses its row waits at its old place, and the prefix cache often still has what it had computed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from collections.abc import Sequence as List
from itertools import pairwise
from typing import Any, ClassVar

from triolet.core.journal import JournalEntry
from triolet.core.scheduling.budget import SchedulerConfig, TokenBudget
from triolet.core.scheduling.sequence import Order, Sequence
from triolet.errors import InvariantViolated

MayRun = Callable[[Sequence], bool]
Overtaking = tuple[Sequence, Sequence]  # a waiting request, and the running one that makes way for it


class WaitingQueue:
    """Waiting requests in the order of a policy, here that of arrival; none takes the row of a running one.

    Args:
        budget: of tokens, with the measured cost of steps.
    """

    summary: ClassVar[str] = "first come, first served"
    """Order of requests in a few words, for the help text of `policy`."""

    keeps_accounts: ClassVar[bool] = False
    """Whether tokens are counted by client. Admission then keeps a part of the queue for clients below their share."""

    allows_long_steps: ClassVar[bool] = True
    """Whether a step may exceed `num_sure_tokens` where it is known to stay within `max_prefill_delay_s`."""

    def __init__(self, config: SchedulerConfig, budget: TokenBudget) -> None:
        self._config, self._budget = config, budget
        self._line: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._line)

    def order(self, entry: JournalEntry) -> Order:
        """Return the sort key of a request among all others, fixed for its life; the smaller goes first."""
        return (0.0, entry.serial)

    def add(self, sequence: Sequence) -> None:
        """Queue a request, for the first time or again."""
        # Its old place, where it was preempted: the order is fixed for its life.
        insort(self._line, sequence, key=by_order)

    def remove(self, sequence: Sequence) -> None:
        """Take a request out: it was admitted, or has ended."""
        del self._line[self.position(sequence)]

    def position(self, sequence: Sequence) -> int:
        """Return how many waiting requests go before this one, as far as is known now."""
        return bisect_left(self._line, sequence.order, key=by_order)

    def next(self, may_run: MayRun) -> Sequence | None:
        """Return the request to admit next.

        Args:
            may_run: whether a request may be admitted now.
        """
        return next(filter(may_run, self._line), None)

    def service_order(self, running: list[Sequence]) -> list[Sequence]:
        """Sort running requests, the first to be served first; the last is the first to lose its blocks."""
        return running

    def taking_part(self, running: list[Sequence]) -> list[Sequence]:
        """Return the running requests to serve in this step; those that overtook are part of it already."""
        return running

    def portion(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many of its tokens a request may compute in the step being planned; 0 for none.

        Args:
            sequence: a running request that takes part, or a waiting one about to be admitted.
            num_tokens: tokens that it has to compute.
        """
        return num_tokens

    def overtaking(self, running: list[Sequence], may_run: MayRun) -> Overtaking | None:
        """Return a request to admit before running ones are served, and the one to preempt if there is no room.

        Args:
            running: all running requests, or those that would be left; those already part of the coming step keep their
                place in it.
            may_run: whether a waiting request may be admitted now.
        """
        return None

    # Events for policies that keep accounts; the others ignore them.

    def begin_step(self, now_s: float) -> None:
        """Prepare to plan a step; monotonic seconds."""

    def started(self, sequence: Sequence) -> None:
        """Note that a request got a row."""

    def stopped(self, sequence: Sequence) -> None:
        """Note that a request lost its row."""

    def charge(self, sequence: Sequence, end: int) -> None:
        """Charge a request for all its tokens before position `end`."""

    def check(self) -> None:
        """Check that the queue is in order.

        Raises:
            InvariantViolated: it is not.
        """
        check_order(self._line)


def by_order(sequence: Sequence) -> Order:
    """Return the sort key of a request."""
    return sequence.order


def check_order(line: List[Sequence], key: Callable[[Sequence], Any] = by_order) -> None:
    """Check that a list of requests is sorted by a key.

    Raises:
        InvariantViolated: two of them have changed places.
    """
    if any(a >= b for a, b in pairwise(map(key, line))):
        raise InvariantViolated("requests are out of order")
