"""Who is let in next, who is served first, and whose row somebody else may have: the policies `fcfs` and `priority`.

Both are one fixed order of all requests, the waiting and the running ones. Under `fcfs` it is that of their arrival.
Under `priority` it is

    priority + arrival / aging

so that of two requests the one with the lower priority goes first, unless the other one came so much earlier that its
waiting makes up for the difference: every `aging` seconds count as much as one step of priority. All that wait age at
the same pace, so the order of two requests never changes, and nobody starves: a request waits for better ones only
if they came less than (difference * aging) seconds after it.

Running requests are not interrupted for their equals. A waiting one takes the row and the blocks of a running one
whose priority is worse, and which stands behind it in that order; whoever loses its row waits at its old place, and
the prefix cache often remembers what it had computed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from collections.abc import Sequence as List
from itertools import pairwise

from triolet.core.journal import JournalEntry
from triolet.core.scheduling.config import SchedulerConfig
from triolet.core.scheduling.sequence import Order, Sequence
from triolet.errors import InvariantViolated

MayRun = Callable[[Sequence], bool]
Overtaking = tuple[Sequence, Sequence]  # a waiting one, and a running one


class WaitingQueue:
    """The waiting requests, first the one that goes first.

    Args:
        config: names the policy.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._has_priorities = config.policy == "priority"
        self._aging_s = config.priority_aging_s
        self._line: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._line)

    def order(self, entry: JournalEntry) -> Order:
        """A request's place among all others, for as long as it lives; the smaller goes first."""
        if not self._has_priorities:
            return (0.0, entry.serial)
        return (entry.request.priority + entry.request.arrival_s / self._aging_s, entry.serial)

    def add(self, sequence: Sequence) -> None:
        """It waits, for the first time or again."""
        insort(self._line, sequence, key=by_order)

    def remove(self, sequence: Sequence) -> None:
        """It waits no more: it is let in, or has ended."""
        del self._line[self.position(sequence)]

    def position(self, sequence: Sequence) -> int:
        """How many of the waiting go before it, as far as that is known now."""
        return bisect_left(self._line, sequence.order, key=by_order)

    def next(self, may_run: MayRun) -> Sequence | None:
        """Who is let in next.

        Args:
            may_run: whether this one may be let in now.
        """
        return next(filter(may_run, self._line), None)

    def service_order(self, running: list[Sequence]) -> list[Sequence]:
        """The running ones, first the one that is served first; the last is the first to lose its blocks."""
        return running

    def taking_part(self, running: list[Sequence]) -> list[Sequence]:
        """Who of the running ones is served in a step; those that have overtaken others are part of it already."""
        return running

    def portion(self, sequence: Sequence, num_tokens: int) -> int:
        """How many of so many tokens a request may have in the step that is being planned; 0 for none.

        Args:
            sequence: a running one that takes part, or a waiting one that is about to be let in.
            num_tokens: that it has to compute.
        """
        return num_tokens

    def overtaking(self, running: list[Sequence], may_run: MayRun) -> Overtaking | None:
        """Who is let in before those that run are served, and who has to make way for it if there is no room.

        Args:
            running: all that run; those that are part of the coming step already keep their place in it.
            may_run: whether a waiting one may be let in now.
        """
        if not self._has_priorities or (first := self.next(may_run)) is None:
            return None
        worst = next((other for other in reversed(running) if other.is_unserved), None)
        if worst is None or worst.order < first.order:
            return None
        return (first, worst) if first.entry.request.priority < worst.entry.request.priority else None

    # What a policy that keeps accounts needs to know; these two keep none.

    def begin_step(self, now_s: float) -> None:
        """A step is being planned; monotonic seconds."""

    def started(self, sequence: Sequence) -> None:
        """It has got a row."""

    def stopped(self, sequence: Sequence) -> None:
        """It has lost its row."""

    def ended(self, sequence: Sequence) -> None:
        """It will come no more."""

    def charge(self, sequence: Sequence, end: int) -> None:
        """It gets all tokens before position `end` computed."""

    def check(self) -> None:
        """The line is in order.

        Raises:
            InvariantViolated: it is not.
        """
        check_order(self._line)


def by_order(sequence: Sequence) -> Order:
    """For sorting."""
    return sequence.order


def check_order(line: List[Sequence]) -> None:
    """Hold a list of requests to their order.

    Raises:
        InvariantViolated: two of them have changed places.
    """
    if any(a.order >= b.order for a, b in pairwise(line)):
        raise InvariantViolated("requests are out of order")
