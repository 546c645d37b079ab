"""The line of waiting requests by itself: places, defaults of a policy, and what may be preempted for a better one."""

from __future__ import annotations

import math

import pytest

from tests.core.make import make_request
from tests.core.stage import make_config
from triolet.core.journal import Journal
from triolet.core.scheduling.budget import CostModel, TokenBudget
from triolet.core.scheduling.policies.base import WaitingQueue, check_order
from triolet.core.scheduling.policies.priority import PriorityQueue
from triolet.core.scheduling.sequence import Sequence
from triolet.errors import InvariantViolated


class Line:
    """A queue of one policy, and the requests that it is asked about."""

    def __init__(self, policy: type[WaitingQueue] = WaitingQueue, aging_s: float = math.inf) -> None:
        config = make_config(priority_aging_s=aging_s)
        self.queue = policy(config, TokenBudget(config, CostModel(), allows_long_steps=True))
        self.journal = Journal()

    def make(self, *, priority: int = 0, arrival_s: float = 0.0) -> Sequence:
        """A request that arrives behind all others; it is not queued yet."""
        name = f"r{len(self.journal)}"
        entry = self.journal.open(make_request(request_id=name, priority=priority, arrival_s=arrival_s))
        return Sequence(entry, self.queue.order(entry))

    def running(self, *, priority: int = 0, arrival_s: float = 0.0, num_tokens: int = 0) -> Sequence:
        """A request with a row, and tokens in the step that is being planned."""
        sequence = self.make(priority=priority, arrival_s=arrival_s)
        sequence.row_id, sequence.num_scheduled_tokens = 0, num_tokens
        return sequence


def every_request(sequence: Sequence) -> bool:
    return True


def test_requests_stand_in_the_order_of_arrival_and_return_to_their_places() -> None:
    line = Line()
    first, second, third = (line.make() for _ in range(3))
    for sequence in (third, first, second):
        line.queue.add(sequence)
    assert list(line.queue) == [first, second, third]
    assert [line.queue.position(sequence) for sequence in (first, second, third)] == [0, 1, 2]
    line.queue.remove(second)
    assert (list(line.queue), len(line.queue)) == ([first, third], 2)
    line.queue.add(second)
    assert list(line.queue) == [first, second, third]
    line.queue.check()


def test_the_next_one_is_the_first_that_may_run() -> None:
    line = Line()
    first, second = line.make(), line.make()
    assert line.queue.next(every_request) is None
    line.queue.add(second)
    line.queue.add(first)
    assert line.queue.next(every_request) is first
    assert line.queue.next(lambda sequence: sequence is second) is second
    assert line.queue.next(lambda sequence: False) is None


def test_first_come_first_served_leaves_everything_else_as_it_is() -> None:
    line = Line()
    running = [line.running(priority=9), line.running(priority=8)]
    line.queue.add(line.make(priority=-5))
    assert line.queue.service_order(running) == running
    assert line.queue.taking_part(running) == running
    assert [line.queue.portion(running[0], number) for number in (0, 1, 77)] == [0, 1, 77]
    assert line.queue.overtaking(running, every_request) is None
    assert (line.queue.keeps_accounts, line.queue.allows_long_steps) == (False, True)


def test_arrival_alone_decides_without_priorities() -> None:
    line = Line()
    early, late = line.make(priority=5, arrival_s=9.0), line.make(priority=-5, arrival_s=1.0)
    assert early.order < late.order
    assert early.order[0] == late.order[0]


@pytest.mark.parametrize("orders", [[(0.0, 2), (0.0, 1)], [(1.0, 1), (0.0, 2)], [(0.0, 1), (0.0, 1)]])
def test_a_line_out_of_order_is_found(orders: list[tuple[float, int]]) -> None:
    line = Line()
    sequences = [Sequence(line.make().entry, order) for order in orders]
    with pytest.raises(InvariantViolated, match="out of order"):
        check_order(sequences)


def test_a_line_may_be_sorted_by_another_key() -> None:
    line = Line()
    sequences = [line.make(), line.make()]
    check_order(sequences)
    check_order([])
    with pytest.raises(InvariantViolated, match="out of order"):
        check_order(sequences, key=lambda sequence: -sequence.entry.serial)


# ------------------------------------------------------------------------------------------- priority


def test_a_lower_number_goes_first_and_of_equals_the_earlier() -> None:
    line = Line(PriorityQueue)
    low, better, equal = line.make(priority=2), line.make(priority=1), line.make(priority=1)
    for sequence in (low, equal, better):
        line.queue.add(sequence)
    assert list(line.queue) == [better, equal, low]


@pytest.mark.parametrize(("arrival_s", "goes_first"), [(19.0, True), (21.0, False)])
def test_ten_seconds_of_waiting_make_up_for_one_step_of_priority(arrival_s: float, goes_first: bool) -> None:
    line = Line(PriorityQueue, aging_s=10.0)
    old, new = line.make(priority=3), line.make(priority=1, arrival_s=arrival_s)
    assert (new.order < old.order) is goes_first


def test_a_better_request_takes_the_row_of_the_last_one_that_is_not_served_yet() -> None:
    line = Line(PriorityQueue)
    best, worse, served = (
        line.running(priority=0),
        line.running(priority=2),
        line.running(priority=3, num_tokens=4),
    )
    first, second = line.make(priority=1), line.make(priority=1)
    assert line.queue.overtaking([best, worse, served], every_request) is None
    line.queue.add(second)
    line.queue.add(first)
    assert line.queue.overtaking([best, worse, served], every_request) == (first, worse)
    assert line.queue.overtaking([best, worse], lambda sequence: sequence is second) == (second, worse)
    assert line.queue.overtaking([best, served], every_request) is None
    assert line.queue.overtaking([served], every_request) is None
    assert line.queue.overtaking([], every_request) is None
    assert line.queue.overtaking([worse], lambda sequence: False) is None


def test_an_equal_priority_that_is_older_interrupts_no_request() -> None:
    line = Line(PriorityQueue, aging_s=10.0)
    waiting, running = line.make(priority=1, arrival_s=0.0), line.running(priority=1, arrival_s=50.0)
    line.queue.add(waiting)
    assert waiting.order < running.order
    assert line.queue.overtaking([running], every_request) is None


def test_a_better_priority_interrupts_no_request_that_has_waited_its_difference() -> None:
    line = Line(PriorityQueue, aging_s=10.0)
    running, waiting = line.running(priority=2), line.make(priority=1, arrival_s=50.0)
    line.queue.add(waiting)
    assert line.queue.overtaking([running], every_request) is None
