"""Contents of the request queues: queue, row and blocks of a request change together."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.core.make import make_request
from tests.core.stage import BLOCK_SIZE, crowded_stage, make_config
from triolet.core.journal import Journal
from triolet.core.kv_cache.block_pool import BlockPool
from triolet.core.scheduling.admission import RequestQueues
from triolet.core.scheduling.budget import SchedulerCounters, TokenBudget
from triolet.core.scheduling.policies.base import WaitingQueue
from triolet.core.scheduling.scheduler import Scheduler
from triolet.core.scheduling.sequence import Sequence
from triolet.errors import InvariantViolated

NUM_ROWS = 2


class Hall:
    """Request queues with everything that they need, without a planner."""

    def __init__(self) -> None:
        config = make_config(max_num_seqs=NUM_ROWS)
        self.journal, self.counters, self.pool = Journal(), SchedulerCounters(), BlockPool(config.num_blocks)
        self.queues = RequestQueues(
            config, self.journal, self.counters, self.pool, WaitingQueue(config, TokenBudget(config))
        )

    def enter(self) -> Sequence:
        return self.queues.enter(self.journal.open(make_request()))

    def admit(self, sequence: Sequence, num_blocks: int = 1) -> None:
        self.queues.admit(sequence, [], [])
        sequence.block_table += self.pool.allocate(num_blocks)

    def check(self) -> None:
        self.queues.check()
        self.pool.check(sequence.block_table for sequence in self.queues.running)


def test_a_request_that_is_let_in_has_a_row_and_one_that_waits_has_none() -> None:
    hall = Hall()
    first, second = hall.enter(), hall.enter()
    hall.admit(second)
    assert (list(hall.queues.waiting), hall.queues.running) == ([first], [second])
    assert (first.row_id, second.row_id) == (None, NUM_ROWS - 1)
    hall.check()


def test_those_that_run_are_in_order_whichever_was_let_in_first() -> None:
    hall = Hall()
    first, second = hall.enter(), hall.enter()
    hall.admit(second)
    hall.admit(first)
    assert hall.queues.running == [first, second]
    hall.check()


def test_a_request_that_is_let_in_shares_the_blocks_that_were_found_for_it() -> None:
    hall = Hall()
    owner, other = hall.enter(), hall.enter()
    hall.admit(owner, num_blocks=2)
    hall.queues.admit(other, owner.block_table[:1], [b"hash"])
    assert (other.num_computed_tokens, other.block_hashes) == (BLOCK_SIZE, [b"hash"])
    hall.check()
    hall.queues.leave(owner, step_id=None)
    assert hall.pool.num_in_use == 1
    hall.check()


def test_the_preempted_one_gives_everything_back_and_begins_another_stay() -> None:
    hall = Hall()
    victim = hall.enter()
    hall.admit(victim)
    epoch = victim.entry.epoch
    hall.queues.preempt(victim)
    assert victim.entry.epoch != epoch
    assert hall.queues.by_epoch == {victim.entry.epoch: victim}
    assert (victim.row_id, victim.block_table, hall.pool.num_in_use) == (None, [], 0)
    assert (victim.entry.num_preemptions, hall.counters.num_preemptions) == (1, 1)
    hall.check()


def test_one_that_a_step_works_on_is_not_preempted() -> None:
    hall = Hall()
    victim = hall.enter()
    hall.admit(victim)
    victim.schedule(1, step_id=1)
    with pytest.raises(AssertionError):
        hall.queues.preempt(victim)


def test_what_leaves_amid_a_step_keeps_its_blocks_from_others_until_that_ends() -> None:
    hall = Hall()
    leaver = hall.enter()
    hall.admit(leaver)
    num_available = hall.pool.num_available
    hall.queues.leave(leaver, step_id=7)
    assert hall.pool.num_available == num_available
    hall.pool.end_quarantine(7)
    assert hall.pool.num_available == num_available + 1
    assert (hall.queues.live, hall.queues.by_epoch) == ({}, {})
    hall.check()


def test_a_request_that_leaves_while_it_waits_frees_no_row() -> None:
    hall = Hall()
    hall.queues.take_ended_rows()
    hall.queues.leave(hall.enter(), step_id=None)
    assert (len(hall.queues.waiting), hall.queues.take_ended_rows()) == (0, ())
    hall.check()


def test_every_row_has_ended_before_any_request_has_begun_and_each_is_told_once() -> None:
    hall = Hall()
    assert [hall.queues.take_ended_rows(), hall.queues.take_ended_rows()] == [(0, 1), ()]
    runner = hall.enter()
    hall.admit(runner)
    row_id = runner.row_id
    hall.queues.preempt(runner)
    assert [hall.queues.take_ended_rows(), hall.queues.take_ended_rows()] == [(row_id,), ()]


# -------------------------------------------------------------------------------- our own mistakes


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda s: s._queues.waiting._line.pop(), r"running 2 \+ waiting 0 != 3"),
        (lambda s: s._queues.live.pop(1), r"running 2 \+ waiting 1 != 2"),
        (lambda s: s._queues.by_epoch.popitem(), "epochs do not name the live sequences"),
        (
            lambda s: setattr(s._queues, "_config", make_config(max_num_batched_tokens=1)),
            "2 running requests share 1 tokens",
        ),
        (lambda s: s._queues._free_rows.append(1), "must be each row once"),
        (lambda s: s._queues._free_rows.pop(), "must be each row once"),
        (
            lambda s: setattr(s._queues.waiting._line[0], "num_scheduled_tokens", 1),
            "waiting request 3 holds blocks or a row",
        ),
        (
            lambda s: setattr(s._queues.waiting._line[0], "block_table", [15]),
            "waiting request 3 holds blocks or a row",
        ),
        (
            lambda s: setattr(s._queues.waiting._line[0], "row_id", 1),
            "waiting request 3 holds blocks or a row",
        ),
        (lambda s: s._queues.waiting._line.append(s._queues.running[0]), r"running 2 \+ waiting 2 != 3"),
        (lambda s: s._queues.running.reverse(), "requests are out of order"),
    ],
)
def test_a_place_that_is_wrong_is_found(corrupt: Callable[[Scheduler], object], message: str) -> None:
    stage = crowded_stage()
    corrupt(stage.scheduler)
    with pytest.raises(InvariantViolated, match=message):
        stage.scheduler.check()


def test_a_waiting_queue_out_of_order_is_found() -> None:
    hall = Hall()
    hall.enter()
    hall.enter()
    hall.check()
    hall.queues.waiting._line.reverse()
    with pytest.raises(InvariantViolated, match="requests are out of order"):
        hall.check()


def test_a_request_that_enters_begins_a_stay_so_that_results_of_an_earlier_scheduler_are_late() -> None:
    hall = Hall()
    entry = hall.journal.open(make_request())
    epoch = entry.epoch
    hall.queues.enter(entry)
    assert entry.epoch != epoch
