"""Plans for several steps: when they are made, what they give, and what ends them."""

from collections.abc import Callable
from typing import Any

import attrs
import pytest

from tests.core.stage import BLOCK_SIZE, Stage
from triolet.core.request.grammar_state import Constraint, TokenMask
from triolet.core.request.pooling_params import PoolingParams
from triolet.core.request.request import FinishReason
from triolet.core.scheduling.policies.fair import LINGER_S, FairQueue
from triolet.core.step_plan import PlanRow, RowFailure, StepPlan, StepResult, steps_of


class RunningStage(Stage):
    """One whose plans may be runs of up to 8 steps."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**{"num_scheduler_steps": 8} | config)

    def run(self) -> StepPlan:
        plan = self.begin()
        assert plan is not None
        return plan

    def go_on(self, plan: StepPlan, *, is_last: bool = False, **tokens: int) -> StepPlan:
        """A step of a run is done; what is left of it."""
        result = attrs.evolve(self.result(plan, tokens), is_last=is_last)
        self.scheduler.apply(result, self.now_s)
        self.scheduler.check()
        rest = plan.after(result)
        assert rest is not None or is_last
        return rest or plan


def stage_with(*names: str, prompt: int = 3, max_tokens: int = 32, **config: Any) -> RunningStage:
    """Requests that have their first token."""
    stage = RunningStage(**config)
    for name in names:
        stage.add(name, prompt, max_tokens=max_tokens)
    while stage.scheduler.num_waiting or any(not entry.output_token_ids for entry in stage.journal):
        stage.step()
    return stage


def test_where_all_requests_decode_and_none_waits_a_plan_is_for_many_steps() -> None:
    stage = stage_with("a", "b")
    plan = stage.run()
    assert plan.num_steps == 8
    assert stage.shares(plan) == [("a", 3, 1), ("b", 3, 1)]


def test_each_step_of_a_run_gives_tokens_at_once() -> None:
    stage = stage_with("a", "b")
    a, b = stage.journal
    plan = stage.run()
    for number in range(3):
        plan = stage.go_on(plan, a=number, b=10 + number)
        assert a.output_token_ids[1:] == list(range(number + 1))
        assert b.output_token_ids[1:] == list(range(10, 11 + number))
        assert stage.scheduler.is_step_in_flight
        assert set(stage.scheduler.take_progress()) == {a.serial, b.serial}


def test_after_the_last_result_the_next_plan_goes_on_behind_it() -> None:
    stage = stage_with("a")
    plan = stage.go_on(stage.run())
    stage.go_on(plan, is_last=True)
    assert not stage.scheduler.is_step_in_flight
    assert stage.shares(stage.begin()) == [("a", 5, 1)]


def test_a_run_has_the_blocks_of_all_its_steps() -> None:
    stage = stage_with("a")
    plan = stage.run()
    num_known, num_blocks = 3, 1  # the prompt's
    assert len(plan.rows[0].new_block_ids) == -(-(num_known + plan.num_steps) // BLOCK_SIZE) - num_blocks


def test_a_run_is_as_long_as_the_blocks_that_there_are() -> None:
    stage = stage_with("a", "b", "c", prompt=2, num_blocks=7, max_model_len=28)
    plan = stage.run()
    assert [len(row.new_block_ids) for row in plan.rows] == [1, 1, 1]  # and not two each, of four
    assert plan.num_steps == 4


def test_without_a_block_for_all_its_steps_a_run_is_a_single_step_and_no_request_is_preempted() -> None:
    stage = stage_with("a", "b", num_blocks=2, max_model_len=8)
    plan = stage.run()
    assert (plan.num_steps, len(plan.rows)) == (1, 2)
    assert stage.scheduler.counters.num_preemptions == 0


def test_a_run_ends_where_the_first_answer_reaches_its_length() -> None:
    stage = RunningStage()
    stage.add("short", 3, max_tokens=4)
    stage.add("long", 3, max_tokens=32)
    stage.step()
    assert stage.run().num_steps == 3


@pytest.mark.parametrize("num_scheduler_steps", [1, 2, 5])
def test_no_run_is_longer_than_the_configuration_says(num_scheduler_steps: int) -> None:
    stage = stage_with("a", num_scheduler_steps=num_scheduler_steps)
    assert stage.run().num_steps == num_scheduler_steps


def test_a_prompt_is_computed_in_single_steps() -> None:
    stage = RunningStage()
    stage.add("a", 20)
    for _ in range(3):
        plan = stage.run()
        assert plan.num_steps == 1
        stage.end(plan)
    assert stage.run().num_steps == 8


def test_a_decode_beside_the_rest_of_a_prompt_is_computed_in_a_single_step() -> None:
    stage = RunningStage()
    stage.add("decodes", 3)
    stage.add("prompt", 12)
    assert stage.step() == [("decodes", 0, 3), ("prompt", 0, 5)]
    plan = stage.run()
    assert (stage.shares(plan), plan.num_steps) == ([("decodes", 3, 1), ("prompt", 5, 7)], 1)


def test_an_answer_with_one_token_left_is_computed_in_a_single_step() -> None:
    assert stage_with("a", max_tokens=2).run().num_steps == 1


def test_a_row_bound_to_a_form_is_computed_in_single_steps() -> None:
    stage = RunningStage()
    entry = stage.add("a", 3, constraint=Constraint())
    for position in range(2):
        stage.scheduler.guide(entry.serial, TokenMask(position))
        plan = stage.run()
        assert plan.num_steps == 1
        stage.end(plan)
    assert len(entry.output_token_ids) == 2


def test_the_last_token_of_a_pooled_prompt_is_computed_in_a_single_step() -> None:
    stage = RunningStage()
    stage.add("a", 9, pooling=PoolingParams(task="embed"))
    assert stage.step() == [("a", 0, 8)]
    plan = stage.run()
    assert (stage.shares(plan), plan.num_steps) == ([("a", 8, 1)], 1)


def test_a_request_that_waits_is_let_in_before_the_next_step() -> None:
    stage = stage_with("a", "b", max_num_seqs=2)
    stage.add("c", 3)
    assert stage.run().num_steps == 1


def test_drafts_are_made_step_by_step() -> None:
    assert stage_with("a", num_speculative_tokens=2).run().num_steps == 1


def test_a_request_of_a_step_that_crashed_is_computed_step_by_step() -> None:
    stage = stage_with("a", "b")
    plan = stage.run()
    stage.scheduler.recovery.poison_bisection.step_failed(stage.scheduler.marks(), num_rows=2)
    stage.scheduler.abandon_step()
    assert plan.num_steps > 1
    assert stage.run().num_steps == 1


def test_a_request_beside_one_that_was_in_a_step_that_crashed_is_computed_step_by_step_as_well() -> None:
    stage = stage_with("a", "b")
    a, _ = stage.journal
    stage.scheduler.recovery.poison_bisection.step_failed({a.serial: 4}, num_rows=1)
    plan = stage.run()
    assert (len(plan.rows), plan.num_steps) == (2, 1)


def test_marks_follow_a_run() -> None:
    stage = stage_with("a")
    (a,) = stage.journal
    plan = stage.run()
    assert stage.scheduler.marks() == {a.serial: 4}
    stage.go_on(plan)
    assert stage.scheduler.marks() == {a.serial: 5}


def test_a_request_that_ends_in_a_run_has_no_mark_any_more() -> None:
    stage = RunningStage()
    stage.add("a", 3, params={"stop_token_ids": [7]})
    stage.add("b", 3)
    stage.step()
    b = list(stage.journal)[1]
    stage.go_on(stage.run(), a=7)
    assert stage.scheduler.marks() == {b.serial: 5}


def test_each_step_of_a_run_is_charged_to_its_client() -> None:
    stage = stage_with("a", policy="fair")
    line = stage.scheduler._queues.waiting
    assert isinstance(line, FairQueue)
    assert line.served(None) == 3
    plan = stage.run()
    for number in range(3):
        assert line.served(None) == 3 + 1 + number
        plan = stage.go_on(plan)


def test_a_client_that_leaves_in_a_run_has_left_at_the_last_step_of_it_and_not_at_its_beginning() -> None:
    stage = RunningStage(policy="fair")
    stage.add("a", 3, client="a")
    b = stage.add("b", 3, client="b", params={"stop_token_ids": [7]})
    stage.step()
    line = stage.scheduler._queues.waiting
    assert isinstance(line, FairQueue)
    plan = stage.run()
    stage.now_s = 100.0
    plan = stage.go_on(plan)
    stage.go_on(plan, is_last=True, b=7)
    assert b.finish_reason is FinishReason.STOP
    line.begin_step(100.0 + LINGER_S - 0.5)
    assert line._active.has_lingering
    line.begin_step(100.0 + LINGER_S)
    assert not line._active.has_lingering


# -------------------------------------------------------------------------------------- what ends it


@pytest.mark.parametrize(
    "happen",
    [
        lambda stage: stage.add("c", 3),
        lambda stage: stage.scheduler.abort(next(iter(stage.journal)).serial),
        lambda stage: stage.scheduler.reset_prefix_cache(reset_running_requests=True),
    ],
    ids=["come", "leave", "reset"],
)
def test_a_run_must_halt_when_a_request_comes_or_leaves_or_all_must(
    happen: Callable[[Stage], object],
) -> None:
    def must_halt() -> bool:
        return stage.scheduler.must_halt

    stage = stage_with("a", "b")
    plan = stage.go_on(stage.run())
    assert not must_halt()
    happen(stage)
    assert must_halt()
    stage.go_on(plan, is_last=True)
    assert not must_halt()


def test_what_a_run_computes_of_an_answer_that_has_ended_counts_for_nothing() -> None:
    stage = RunningStage()
    stage.add("a", 3, params={"stop_token_ids": [7]})
    stage.add("b", 3)
    stage.step()
    a, b = stage.journal
    plan = stage.go_on(stage.run(), a=7)
    assert (a.finish_reason, a.output_token_ids) == (FinishReason.STOP, [9, 7])
    assert stage.scheduler.must_halt
    stage.go_on(plan, is_last=True)
    assert a.output_token_ids == [9, 7]
    assert len(b.output_token_ids) == 3


def test_blocks_of_a_request_that_leaves_a_run_are_not_free_before_its_end() -> None:
    stage = stage_with("a", "b")
    plan = stage.run()
    num_before = stage.pool.num_available
    stage.scheduler.abort(next(iter(stage.journal)).serial)
    assert (stage.pool.num_available, stage.pool.num_quarantined > 0) == (num_before, True)
    plan = stage.go_on(plan)
    assert stage.pool.num_quarantined > 0
    stage.go_on(plan, is_last=True)
    assert stage.pool.num_quarantined == 0
    assert stage.pool.num_available > num_before


def test_a_row_that_fails_in_a_run_fails_alone() -> None:
    stage = stage_with("a", "b")
    a, b = stage.journal
    plan = stage.go_on(stage.run())
    result = stage.result(plan, failing=["a"])
    assert plan.after(result) is None
    stage.scheduler.apply(result, stage.now_s)
    stage.scheduler.check()
    assert (a.finish_reason, b.finish_reason) == (FinishReason.ERROR, None)
    assert len(b.output_token_ids) == 3


def test_results_of_a_run_that_was_abandoned_are_late() -> None:
    stage = stage_with("a")
    (a,) = stage.journal
    plan = stage.go_on(stage.run())
    stage.scheduler.abandon_step()
    known = list(a.output_token_ids)
    stage.scheduler.apply(attrs.evolve(stage.result(plan), is_last=False), 0.0)
    assert a.output_token_ids == known
    assert not stage.scheduler.is_step_in_flight


# ------------------------------------------------------------------------------------- as the runner


PLAN = StepPlan(7, (3,), (), (PlanRow(0, 10, 1, (5,), sample=True), PlanRow(2, 4, 1, (), sample=True)), 3)


def test_what_is_left_of_a_run_begins_one_token_further_and_brings_nothing_new() -> None:
    rest = PLAN.after(StepResult(7, ()))
    rows = (PlanRow(0, 11, 1, (), sample=True), PlanRow(2, 5, 1, (), sample=True))
    assert rest == StepPlan(7, (), (), rows, 2)


def test_nothing_is_left_of_a_run_after_its_last_step_a_failure_or_for_want_of_memory() -> None:
    assert attrs.evolve(PLAN, num_steps=1).after(StepResult(7, ())) is None
    assert PLAN.after(StepResult(7, (RowFailure("r", 1, "NaN"),))) is None
    assert PLAN.after(StepResult(7, (), out_of_memory="none")) is None


def test_a_plan_with_a_newcomer_or_without_a_running_request_is_for_one_step() -> None:
    stage = RunningStage()
    stage.add("a", 1)  # one pending token, as a decode has
    assert stage.run().num_steps == 1
    stage = stage_with("a")
    masked = stage.add("m", 3, constraint=Constraint())
    assert stage.step() == [("a", 3, 1)]  # a request without its mask is not admitted
    stage.scheduler.guide(masked.serial, TokenMask(0))
    assert stage.step() == [("a", 4, 1), ("m", 0, 3)]
    plan = stage.run()  # m awaits its next mask
    assert (stage.shares(plan), plan.num_steps) == ([("a", 5, 1)], 1)


def test_a_plan_for_one_step_is_not_halted_whatever_waits() -> None:
    stage = RunningStage(max_num_seqs=1)
    assert not stage.scheduler.must_halt
    stage.add("a", 3)
    stage.add("b", 3)
    assert stage.run().num_steps == 1
    assert not stage.scheduler.must_halt


@pytest.mark.parametrize("num_steps", [1, 3])
def test_whether_a_run_must_halt_is_asked_between_two_steps_and_not_after_the_last(num_steps: int) -> None:
    asked = []
    plan = StepPlan(1, (), (), (PlanRow(0, 3, 1, (), sample=True),), num_steps)

    def must_halt() -> bool:
        asked.append(True)
        return False

    results = list(steps_of(plan, lambda plan: StepResult(plan.step_id, ()), must_halt))
    assert [result.is_last for result in results] == [False] * (num_steps - 1) + [True]
    assert len(asked) == num_steps - 1
