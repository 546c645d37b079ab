"""While a culprit is looked for, only those on trial are computed; all others make way."""

from __future__ import annotations

from tests.core.stage import Stage
from triolet.core.request.grammar_state import Constraint, TokenMask
from triolet.core.step_plan import StepPlan, StepResult


def names(stage: Stage, plan: StepPlan | None) -> set[str]:
    assert plan is not None
    for start in plan.starts:
        stage.rows[start.row_id] = start
    return {stage.rows[row.row_id].request_id for row in plan.rows}


def test_only_those_on_trial_run_and_those_that_are_cleared_make_way() -> None:
    stage = Stage(max_num_batched_tokens=16)
    entries = {name: stage.add(name, 3) for name in "abcd"}
    scheduler, poison_bisection = stage.scheduler, stage.scheduler.recovery.poison_bisection
    plan = scheduler.plan_step(0.0)
    assert names(stage, plan) == {*"abcd"}
    for _ in range(2):  # as if the runner had died twice of this step
        poison_bisection.step_failed(scheduler.marks(), num_rows=4)
    scheduler.abandon_step()
    assert names(stage, scheduler.plan_step(0.0)) == {"a", "b"}
    scheduler.check()
    assert [entries[name].num_preemptions for name in "abcd"] == [0, 0, 1, 1]
    poison_bisection.step_done(scheduler.marks())
    scheduler.abandon_step()
    assert names(stage, scheduler.plan_step(0.0)) == {"c"}
    scheduler.check()
    assert entries["a"].num_preemptions == 1


def test_a_request_that_comes_during_a_trial_waits_for_its_end() -> None:
    stage = Stage(max_num_batched_tokens=16)
    first = stage.add("first", 3)
    scheduler, poison_bisection = stage.scheduler, stage.scheduler.recovery.poison_bisection
    assert names(stage, scheduler.plan_step(0.0)) == {"first"}
    for _ in range(2):
        poison_bisection.step_failed(scheduler.marks(), num_rows=2)
    scheduler.abandon_step()
    stage.add("newcomer", 3)
    assert names(stage, scheduler.plan_step(0.0)) == {"first"}
    scheduler.abort(first.serial)
    scheduler.abandon_step()
    assert names(stage, scheduler.plan_step(0.0)) == {"newcomer"}


def test_the_result_of_a_step_ends_the_attempt_that_it_was() -> None:
    stage = Stage(max_num_batched_tokens=16)
    for name in "ab":
        stage.add(name, 3)
    scheduler = stage.scheduler
    assert names(stage, scheduler.plan_step(0.0)) == {*"ab"}
    for _ in range(2):
        scheduler.recovery.poison_bisection.step_failed(scheduler.marks(), num_rows=2)
    scheduler.abandon_step()
    plan = scheduler.plan_step(0.0)
    assert plan is not None
    assert names(stage, plan) == {"a"}
    stage.end(plan)
    assert names(stage, scheduler.plan_step(0.0)) == {"b"}


def test_after_a_step_that_fitted_one_row_leaves_a_step_that_does_not() -> None:
    stage = Stage(max_num_batched_tokens=16)
    for name in "abcd":
        stage.add(name, 3)
    for num_preemptions in (1, 2):
        plan = stage.in_flight()
        stage.scheduler.apply(StepResult(plan.step_id, (), out_of_memory="planted"), 0.0)
        assert stage.scheduler.counters.num_preemptions == num_preemptions
        assert len(stage.step()) == 4 - num_preemptions


def test_the_last_requests_make_way_where_more_run_than_the_next_step_may_have() -> None:
    stage = Stage(max_num_batched_tokens=16)
    for name, length in (("large", 5), ("b", 3), ("c", 3)):
        stage.add(name, length)
    masked = stage.add("masked", 3, constraint=Constraint())
    stage.scheduler.guide(masked.serial, TokenMask(0))
    stage.step()
    plan = stage.in_flight()  # without the last one, which awaits its next mask
    assert stage.shares(plan) == [("large", 5, 1), ("b", 3, 1), ("c", 3, 1)]
    stage.scheduler.apply(StepResult(plan.step_id, (), out_of_memory="planted"), 0.0)
    assert stage.waiting() == ["large"]
    assert stage.step() == [("b", 3, 1), ("c", 3, 1)]
    assert stage.waiting() == ["large", "masked"]


def test_a_step_that_did_not_fit_is_tried_with_the_rows_that_are_left() -> None:
    stage = Stage(max_num_batched_tokens=16)
    for name in "ab":
        stage.add(name, 3)
    plan = stage.in_flight()
    stage.scheduler.apply(StepResult(plan.step_id, (), out_of_memory="planted"), 0.0)
    assert stage.scheduler.marks() == {}
    assert len(stage.step()) == 1
