"""While a culprit is looked for, only those on trial are computed; all others make way."""

from __future__ import annotations

from tests.core.stage import Stage
from triolet.core.step_plan import StepPlan


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


def test_who_comes_during_a_trial_waits_for_its_end() -> None:
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
