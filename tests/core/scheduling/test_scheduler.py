"""Steps, their results, and what is told of them: one small story per rule. How requests end is told in
test_scheduler_endings.py, what is in a step in test_planning.py.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest

from tests.core.make import make_request
from tests.core.stage import Stage, crowded_stage, make_config
from triolet.core.journal import Journal
from triolet.core.request.grammar_state import Constraint, TokenMask
from triolet.core.request.request import FinishReason
from triolet.core.scheduling.scheduler import Scheduler
from triolet.core.step_plan import PromptLogprobs, StepResult, TokenLogprobs
from triolet.errors import InvariantViolated

# -------------------------------------------------------------------------- rows, steps, progress


def test_one_step_is_planned_at_a_time() -> None:
    stage = Stage()
    stage.add("a", 5)
    plan = stage.in_flight()
    assert stage.scheduler.is_step_in_flight
    with pytest.raises(AssertionError, match="a step is in flight"):
        stage.scheduler.plan_step(0.0)
    stage.end(plan)
    assert not stage.scheduler.is_step_in_flight


def test_a_row_is_used_again_only_with_the_word_that_it_has_ended() -> None:
    stage = Stage(max_num_seqs=1)
    stage.add("a", 2, max_tokens=1)
    stage.add("b", 2)
    first = stage.in_flight()
    stage.end(first)
    plan = stage.in_flight()
    assert [start.request_id for start in plan.starts] == ["b"]
    assert plan.ended == (first.rows[0].row_id,) == (plan.starts[0].row_id,)


def test_an_ended_row_is_told_once_however_late_the_next_step_is() -> None:
    stage = Stage()
    stage.add("a", 2, max_tokens=1)
    first = stage.in_flight()
    stage.end(first)
    assert stage.begin() is None
    stage.add("b", 2)
    plans = []
    for _ in range(2):
        plans.append(stage.in_flight())
        stage.end(plans[-1])
    assert [plan.ended for plan in plans] == [(first.rows[0].row_id,), ()]


def test_a_new_scheduler_has_every_row_forgotten_that_an_old_one_may_have_filled() -> None:
    stage = Stage(max_num_seqs=3)
    stage.add("a", 2)
    assert set(stage.in_flight().ended) == {0, 1, 2}


def test_a_new_scheduler_goes_on_counting_and_computes_everything_again() -> None:
    stage = Stage()
    entry = stage.add("a", [1, 2, 3])
    stage.step(a=7)
    lost = stage.in_flight()
    successor = Scheduler(stage.scheduler.config, stage.journal, stage.scheduler.counters)
    successor.add(entry)
    successor.apply(stage.result(lost), 0.0)  # comes too late, by step and by epoch
    assert entry.output_token_ids == [7]
    plan = successor.plan_step(0.0)
    assert plan is not None
    assert plan.step_id == lost.step_id + 1
    assert (plan.starts[0].prompt_token_ids, plan.starts[0].output_token_ids) == ((1, 2, 3), (7,))
    assert [(row.start, row.num_tokens) for row in plan.rows] == [(0, 4)]
    successor.check()


def test_steps_are_numbered_from_one_and_counted_when_their_result_comes() -> None:
    stage = Stage()
    stage.add("a", 2)
    counters = stage.scheduler.counters
    plan = stage.in_flight()
    assert (plan.step_id, counters.steps, counters.num_steps_done) == (1, 1, 0)
    stage.end(plan)
    assert (stage.in_flight().step_id, counters.steps, counters.num_steps_done) == (2, 2, 1)


@pytest.mark.parametrize("step_id", [0, 2, 99])
def test_a_result_of_another_step_changes_nothing(step_id: int) -> None:
    stage = Stage()
    entry = stage.add("a", 2)
    plan = stage.in_flight()
    result = stage.result(plan, {"a": 7})
    stage.scheduler.apply(StepResult(step_id, result.tokens), 0.0)
    assert stage.scheduler.is_step_in_flight
    assert entry.output_token_ids == []
    stage.end(plan, {"a": 8})
    stage.scheduler.apply(result, 0.0)  # the right one, a second time
    assert entry.output_token_ids == [8]
    assert stage.scheduler.counters.num_steps_done == 1


def test_a_token_twice_in_one_result_is_committed_once() -> None:
    stage = Stage()
    entry = stage.add("a", 2)
    plan = stage.in_flight()
    result = stage.result(plan, {"a": 7})
    stage.scheduler.apply(StepResult(plan.step_id, result.tokens * 2), 0.0)
    assert entry.output_token_ids == [7]


def test_progress_names_those_that_moved_once() -> None:
    stage = Stage(max_num_batched_tokens=4)
    a, b, c = stage.add("a", 2), stage.add("b", 20), stage.add("c", 2)
    stage.step()
    assert stage.scheduler.take_progress() == (a.serial,)  # b's prompt is not done yet
    assert stage.scheduler.take_progress() == ()
    stage.scheduler.abort(c.serial)
    assert stage.scheduler.take_progress() == (c.serial,)
    assert b.output_token_ids == []


def test_the_time_of_the_first_step_is_when_it_was_planned() -> None:
    stage = Stage(max_num_seqs=1)
    a, b = stage.add("a", 2, max_tokens=1), stage.add("b", 2)
    stage.now_s = 3.0
    stage.step()
    stage.now_s = 5.0
    stage.step()
    assert (a.scheduled_s, b.scheduled_s) == (3.0, 5.0)
    assert (a.first_token_s, b.first_token_s) == (3.0, 5.0)


def test_arrivals_are_queued_once_each_for_a_stay_of_its_own() -> None:
    journal = Journal()
    scheduler = Scheduler(make_config(), journal)
    entries = [journal.open(make_request()) for _ in range(2)]
    scheduler.add_arrivals()
    scheduler.add_arrivals()
    assert scheduler.num_waiting == 2
    assert len({entry.epoch for entry in entries}) == 2
    scheduler.check()


# -------------------------------------------------------------------------------- our own mistakes


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda s: s.pool.allocate(1), "reference counts differ"),
        (lambda s: s._queues.running[0].block_table.pop(), "reference counts differ"),
        (lambda s: setattr(s.journal, "_num_queued_tokens", 1), "queued tokens must be 2; counted 1"),
        (lambda s: s.cache._by_hash.clear(), "published blocks must agree"),
    ],
)
def test_a_count_that_is_wrong_is_found(corrupt: Callable[[Scheduler], object], message: str) -> None:
    stage = crowded_stage()
    corrupt(stage.scheduler)
    with pytest.raises(InvariantViolated, match=message):
        stage.scheduler.check()


# ------------------------------------------------------------------------------- masks, whereabouts


def test_before_the_first_step_no_request_is_in_one() -> None:
    assert Stage().scheduler.marks() == {}


def test_a_mask_for_another_length_of_the_answer_changes_nothing() -> None:
    stage = Stage()
    entry = stage.add("a", 2)
    stage.scheduler.guide(entry.serial, TokenMask(1, is_over=True))
    assert entry.guidance is None and entry.finish_reason is None


def test_a_mask_for_a_request_that_has_ended_changes_nothing() -> None:
    stage = Stage()
    entry = stage.add("a", 2)
    stage.scheduler.abort(entry.serial)
    stage.scheduler.guide(entry.serial, TokenMask(0, problem="planted"))
    assert entry.finish_reason is FinishReason.ABORT and entry.failure is None


def test_an_answer_that_its_grammar_allows_no_further_token_stops() -> None:
    stage = Stage()
    entry = stage.add("a", 2)
    stage.scheduler.guide(entry.serial, TokenMask(0, is_over=True))
    assert entry.finish_reason is FinishReason.STOP


def test_a_request_that_is_not_queued_yet_stands_behind_all_that_wait() -> None:
    stage = Stage(max_num_seqs=1)
    for name in "abc":
        stage.add(name, 2)
    stage.step()
    unknown = stage.journal.open(make_request((1, 2), request_id="d"))
    assert stage.scheduler.whereabouts(unknown.serial) == (2, 0, 0)


def test_a_request_ends_where_the_smaller_of_kv_cache_and_max_model_len_has_no_room() -> None:
    stage = Stage(num_blocks=4, max_model_len=64)  # 16 places
    entry = stage.add("a", 14, max_tokens=40)
    for _ in range(3):
        stage.step()
    assert entry.finish_reason is FinishReason.ERROR
    assert entry.num_tokens == 16


def test_a_request_that_no_longer_fits_into_the_kv_cache_fails_in_words() -> None:
    stage = Stage(num_blocks=4, max_model_len=64)
    entry = stage.add("a", 16)
    assert entry.finish_reason is FinishReason.ERROR
    assert entry.failure == (
        "it has 16 tokens and no room for another: the model runner has now 4 KV blocks, and max_model_len is 16"
    )
    assert stage.add("b", 15).finish_reason is None


def test_an_answer_that_had_ended_when_the_scheduler_was_lost_is_not_computed() -> None:
    stage = Stage()
    entry = stage.journal.open(make_request(max_tokens=1))
    entry.output_token_ids.append(7)
    stage.scheduler.add_arrivals()
    assert (entry.finish_reason, stage.begin()) == (FinishReason.LENGTH, None)
    stage.scheduler.take_progress()
    stage.scheduler.report([5, 6])
    assert stage.scheduler.take_progress() == (5, 6)


def test_an_answer_that_its_grammar_cannot_go_on_with_fails_with_the_reason() -> None:
    stage = Stage()
    entry = stage.add("a", 3, constraint=Constraint())
    stage.scheduler.guide(entry.serial, TokenMask(0, problem="why"))
    assert (entry.finish_reason, entry.failure) == (FinishReason.ERROR, "why")


def test_a_finished_step_is_counted_and_teaches_what_steps_cost() -> None:
    stage = Stage()
    entry = stage.add("a", 3, params={"prompt_logprobs": 0})
    plan = stage.in_flight()
    assert [running.last_step for running in stage.scheduler._queues.running] == [plan.step_id]
    every = tuple(TokenLogprobs((place,), (-1.0,), 1) for place in (1, 2))
    result = attrs.evolve(stage.result(plan), elapsed_s=0.5)
    shares = (PromptLogprobs(entry.epoch, 1, every), PromptLogprobs(entry.epoch + 9, 1, every))
    stage.scheduler.apply(attrs.evolve(result, rows=(*result.rows, *shares)), 0.0)
    assert entry.prompt_logprobs == list(every)
    stats = stage.journal.stats.take()
    assert stats is not None
    assert stats.step_tokens == (3,)
    assert stage.scheduler._token_budget.costs.token_s > 0


def test_of_a_step_that_does_not_fit_as_many_rows_leave_as_the_backoff_says() -> None:
    stage = Stage(max_num_batched_tokens=32, max_num_seqs=8)
    entries = [stage.add(f"r{number}", 2) for number in range(6)]
    for num_preempted in (1, 3):
        plan = stage.in_flight()
        stage.scheduler.apply(StepResult(plan.step_id, (), out_of_memory="planted"), 0.0)
        assert sum(entry.num_preemptions for entry in entries) == num_preempted


def test_of_a_step_that_has_become_smaller_meanwhile_no_row_leaves() -> None:
    stage = Stage(max_num_batched_tokens=32)
    small, large = stage.add("small", 2), stage.add("large", 9)
    plan = stage.in_flight()
    stage.scheduler.abort(large.serial)
    stage.scheduler.apply(StepResult(plan.step_id, (), out_of_memory="planted"), 0.0)
    assert small.num_preemptions == 0
