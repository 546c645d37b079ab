"""What a scheduler does with requests between two steps: they end, expire, are given up, and lose what is cached."""

from __future__ import annotations

import math

import attrs
import pytest

from tests.core.make import make_request
from tests.core.stage import Stage
from triolet.core.request.grammar_state import TokenMask
from triolet.core.request.request import FinishReason
from triolet.core.step_plan import StepResult
from triolet.errors import InvariantViolated

# ----------------------------------------------------------------------------------------- endings


def test_a_request_ends_once_and_is_reported_once() -> None:
    stage = Stage()
    entry = stage.add("a", 3)
    stage.scheduler.abort(entry.serial)
    assert entry.finish_reason is FinishReason.ABORT
    assert stage.scheduler.take_progress() == (entry.serial,)
    stage.scheduler.abort(entry.serial, FinishReason.DEADLINE)
    assert entry.finish_reason is FinishReason.ABORT
    assert stage.scheduler.take_progress() == ()


def test_a_request_that_is_not_queued_yet_can_be_ended() -> None:
    stage = Stage()
    entry = stage.journal.open(make_request(request_id="a"))
    stage.scheduler.abort(entry.serial, FinishReason.DEADLINE)
    assert entry.finish_reason is FinishReason.DEADLINE
    assert stage.scheduler.take_progress() == (entry.serial,)
    stage.scheduler.add_arrivals()
    assert (stage.scheduler.num_waiting, stage.scheduler.num_running) == (0, 0)


def test_a_request_that_is_unknown_cannot_be_ended() -> None:
    stage = Stage()
    stage.scheduler.abort(99)
    assert stage.scheduler.take_progress() == ()


def test_requests_are_counted_where_they_are() -> None:
    stage = Stage(max_num_seqs=1)
    first, second = stage.add("a", 3), stage.add("b", 3)
    assert (stage.scheduler.num_running, stage.scheduler.num_waiting) == (0, 2)
    stage.step()
    assert (stage.scheduler.num_running, stage.scheduler.num_waiting) == (1, 1)
    assert stage.scheduler.whereabouts(first.serial) == (0, 3, 1)
    assert stage.scheduler.whereabouts(second.serial) == (0, 0, 0)
    third = stage.add("c", 3)
    assert stage.scheduler.whereabouts(third.serial) == (1, 0, 0)


def test_a_request_past_its_deadline_ends_with_what_it_has() -> None:
    stage = Stage()
    assert stage.scheduler.next_deadline() == math.inf
    entry = stage.add("a", 3, deadline_s=5.0)
    later = stage.add("b", 3, deadline_s=7.0)
    stage.step()
    assert stage.scheduler.next_deadline() == 5.0
    stage.scheduler.expire(4.9)
    assert entry.finish_reason is None
    stage.scheduler.expire(5.0)
    assert str(entry.finish_reason) == str(FinishReason.DEADLINE)
    assert entry.output_token_ids == [9]
    assert (later.finish_reason, stage.scheduler.next_deadline()) == (None, 7.0)


def test_a_request_that_was_scheduled_in_time_has_its_other_deadline_left() -> None:
    stage = Stage(max_num_seqs=1)
    runs = stage.add("a", 3, queue_deadline_s=2.0, deadline_s=9.0)
    waits = stage.add("b", 3, queue_deadline_s=3.0, deadline_s=9.0)
    stage.step()
    stage.scheduler.expire(3.0)
    assert (runs.finish_reason, waits.finish_reason) == (None, FinishReason.DEADLINE)
    assert stage.scheduler.next_deadline() == 9.0
    stage.scheduler.expire(9.0)
    assert runs.finish_reason is FinishReason.DEADLINE


def test_waiting_requests_are_given_up_unless_a_crash_is_being_searched_with_them() -> None:
    stage = Stage(max_num_seqs=1)
    runs, waits, suspected = (stage.add(name, 3) for name in "abc")
    stage.step()
    stage.scheduler.recovery.poison_bisection.crashed.add(suspected.serial)
    assert stage.scheduler.release_waiting() == (waits,)
    assert (waits.finish_reason, stage.waiting(), stage.scheduler.num_running) == (None, ["c"], 1)
    assert runs.finish_reason is None
    stage.scheduler.check()


def test_a_request_of_a_crash_that_ends_is_no_longer_searched_for() -> None:
    stage = Stage()
    crashed, other = stage.add("a", 3), stage.add("b", 3)
    search = stage.scheduler.recovery.poison_bisection
    search.step_failed({crashed.serial: 3}, num_rows=2)
    stage.scheduler.abort(other.serial)
    assert search.suspects == {crashed.serial}
    stage.scheduler.abort(crashed.serial)
    assert (search.suspects, search.crashed) == (frozenset(), set())


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (TokenMask(0, problem="broken"), FinishReason.ERROR),
        (TokenMask(0, is_over=True), FinishReason.STOP),
        (TokenMask(0), None),
        (TokenMask(1, problem="broken"), None),
    ],
)
def test_a_mask_for_the_next_token_may_end_an_answer(mask: TokenMask, reason: FinishReason | None) -> None:
    stage = Stage()
    entry = stage.add("a", 3)
    stage.scheduler.guide(entry.serial, mask)
    assert entry.finish_reason is reason
    assert (entry.guidance is mask) == (mask.position == 0)


# ------------------------------------------------------------------------------------ prefix cache


def test_the_cache_is_emptied_at_once_where_no_block_is_in_use() -> None:
    stage = Stage()
    entry = stage.add("a", range(9))
    stage.step()
    assert stage.scheduler.reset_prefix_cache() is False
    stage.scheduler.abort(entry.serial)
    assert stage.pool.num_cached > 0
    assert stage.scheduler.reset_prefix_cache() is True
    assert stage.pool.num_cached == 0
    assert stage.scheduler.must_halt is False


def test_the_cache_is_emptied_before_the_next_step_if_running_requests_may_be_preempted() -> None:
    stage = Stage(max_num_batched_tokens=32)
    entry = stage.add("a", range(9))
    stage.step()
    assert stage.scheduler.reset_prefix_cache(reset_running_requests=True) is True
    assert stage.step() == [("a", 0, 10)]
    assert entry.num_preemptions == 1
    assert stage.step() == [("a", 10, 1)]


# ------------------------------------------------------------------------------------------- steps


def test_a_step_in_flight_is_known_by_its_plan_and_its_rows() -> None:
    stage = Stage()
    first, second = stage.add("a", 3), stage.add("b", 2)
    scheduler = stage.scheduler
    assert (scheduler.is_step_in_flight, scheduler.may_plan, scheduler.num_rows_in_flight) == (False, True, 0)
    plan = stage.in_flight()
    assert (scheduler.is_step_in_flight, scheduler.may_plan, scheduler.num_rows_in_flight) == (True, False, 2)
    assert scheduler.is_in_flight(plan)
    assert not scheduler.is_in_flight(attrs.evolve(plan))
    assert scheduler.marks() == {first.serial: 3, second.serial: 2}
    scheduler.abort(second.serial)
    assert (scheduler.marks(), scheduler.num_rows_in_flight) == ({first.serial: 3}, 2)
    stage.end(plan)
    assert (scheduler.is_step_in_flight, scheduler.marks(), scheduler.is_in_flight(plan)) == (
        False,
        {},
        False,
    )


def test_of_two_steps_in_flight_each_request_is_counted_once() -> None:
    stage = Stage(async_scheduling=True)
    first = stage.add("a", 3)
    stage.in_flight()
    second = stage.add("b", 2)
    stage.in_flight()
    assert stage.scheduler.num_rows_in_flight == 2
    # Of the first request, the token of the first step is not known yet, and so is no mark.
    assert stage.scheduler.marks() == {first.serial: 4, second.serial: 2}
    assert not stage.scheduler.may_plan


def test_an_abandoned_step_is_computed_again_and_frees_what_it_held() -> None:
    stage = Stage()
    entry, gone = stage.add("a", 3), stage.add("b", 3)
    plan = stage.in_flight()
    stage.scheduler.abort(gone.serial)
    assert stage.pool.num_quarantined == 1
    stage.scheduler.abandon_step()
    assert (stage.pool.num_quarantined, stage.scheduler.is_step_in_flight) == (0, False)
    stage.scheduler.apply(stage.result(plan), 0.0)
    assert entry.output_token_ids == []
    assert stage.step() == [("a", 0, 3)]


def test_a_step_without_memory_counts_for_nothing_and_one_token_alone_fails_its_request() -> None:
    stage = Stage()
    entry = stage.add("a", 1)
    plan = stage.in_flight()
    stage.scheduler.apply(StepResult(plan.step_id, (), out_of_memory="planted", num_failed_saves=2), 0.0)
    assert (entry.finish_reason, stage.scheduler.counters.num_steps_done) == (FinishReason.ERROR, 0)
    assert entry.failure == "there is no memory for even one token of it alone: planted"
    assert stage.scheduler.counters.num_failed_kv_saves == 2
    stage.scheduler.check()


def test_a_prompt_that_cannot_be_divided_fails_alone() -> None:
    stage = Stage(whole_prompts=True, enable_prefix_caching=False)
    entry = stage.add("a", 5)
    plan = stage.in_flight()
    stage.scheduler.apply(StepResult(plan.step_id, (), out_of_memory="planted"), 0.0)
    assert entry.failure == "there is no memory for it alone: planted"


def test_what_was_read_from_a_store_is_counted_and_says_nothing_of_the_cost_of_steps() -> None:
    stage = Stage()
    stage.add("a", 3)
    plan = stage.in_flight()
    result = attrs.evolve(stage.result(plan), elapsed_s=0.5, num_loaded_tokens=2)
    stage.scheduler.apply(result, 0.0)
    counters = stage.scheduler.counters
    assert (counters.external_prefix_cache_hits, counters.external_prefix_cache_queries) == (2, 0)
    assert stage.scheduler._token_budget.costs.token_s == 0.0
    assert counters.num_steps_done == 1


def test_a_row_that_fails_publishes_nothing_and_the_others_go_on() -> None:
    stage = Stage(max_num_batched_tokens=32)
    failing, other = stage.add("a", 5), stage.add("b", 5)
    plan = stage.in_flight()
    stage.end(plan, failing=["a"])
    assert (failing.finish_reason, failing.failure) == (FinishReason.ERROR, "planted")
    assert (other.finish_reason, other.output_token_ids) == (None, [9])
    assert len(stage.pool.kept_block_ids) == 1
    assert set(stage.scheduler.take_progress()) == {failing.serial, other.serial}


def test_arrivals_during_a_step_are_queued_with_its_result() -> None:
    stage = Stage()
    stage.add("a", 3)
    plan = stage.in_flight()
    stage.journal.open(make_request(request_id="b"))
    assert stage.scheduler.num_waiting == 0
    stage.end(plan)
    assert stage.waiting() == ["b"]


def test_a_paused_scheduler_computes_only_what_came_before_the_pause() -> None:
    stage = Stage()
    first, second = stage.add("a", 3), stage.add("b", 3)
    stage.scheduler.last_serial = first.serial
    assert stage.step() == [("a", 0, 3)]
    assert (stage.waiting(), stage.scheduler.num_deferred) == (["b"], 1)
    stage.scheduler.last_serial = math.inf
    assert stage.step() == [("a", 3, 1), ("b", 0, 3)]
    assert second.output_token_ids == [9]


@pytest.mark.parametrize("place", [0, 1])
def test_a_hole_in_a_table_without_a_window_is_found(place: int) -> None:
    stage = Stage()
    stage.add("a", 8)
    stage.step()
    [sequence] = stage.scheduler._queues.running
    stage.scheduler.pool.release([sequence.block_table[place]])
    sequence.block_table[place] = -1
    with pytest.raises(InvariantViolated, match=rf"holes of 1 must be at \[\]; got \[{place}\]"):
        stage.scheduler._check_tables()
