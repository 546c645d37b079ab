"""Plans made before the result of the one before them, and what the runner computes of them when that one fails."""

from __future__ import annotations

import attrs

from tests.model.backends.fake_causal_model import FakeCausalModel
from tests.model.memory.test_out_of_memory import NarrowModel
from tests.model.test_runner import expected_answer, make_runner, start
from triolet.core.step_plan import PlanRow, RowStart, StepPlan, StepResult


def plan(step_id: int, *rows: PlanRow, starts: tuple[RowStart, ...] = (), is_ahead: bool = False) -> StepPlan:
    return StepPlan(step_id, (), starts, rows, is_ahead=is_ahead)


def tokens(result: StepResult) -> dict[str, int]:
    return {token.request_id: token.token_id for token in result.tokens}


def test_the_input_of_a_row_that_is_planned_ahead_is_the_token_that_it_sampled() -> None:
    runner = make_runner()
    first = runner.execute(plan(1, PlanRow(0, 0, 2, (5,), True), starts=(start(0, [1, 2]),)))
    second = runner.execute(plan(2, PlanRow(0, 2, 1, (), True), is_ahead=True))
    assert [*tokens(first).values(), *tokens(second).values()] == expected_answer([1, 2], 2)


def test_a_row_that_failed_has_no_part_in_the_plan_that_was_made_before_that_was_known() -> None:
    runner = make_runner(FakeCausalModel(poison=13))
    starts = (start(0, [1, 2]), start(1, [13, 2], epoch=7))
    runner.execute(plan(1, PlanRow(0, 0, 2, (5,), True), PlanRow(1, 0, 2, (6,), True), starts=starts))
    ahead = runner.execute(plan(2, PlanRow(0, 2, 1, (), True), PlanRow(1, 2, 1, (), True), is_ahead=True))
    assert ahead.failures == ()
    assert list(tokens(ahead).values()) == expected_answer([1, 2], 2)[1:]


def test_where_all_rows_have_failed_the_plan_after_it_computes_nothing_and_its_new_rows_go_on() -> None:
    model = FakeCausalModel(poison=13)
    runner = make_runner(model)
    runner.execute(plan(1, PlanRow(0, 0, 1, (5,), True), starts=(start(0, [13]),)))
    num_steps = len(model.num_tokens_of_steps)
    assert runner.execute(plan(2, PlanRow(0, 1, 1, (), True), is_ahead=True)) == StepResult(2, ())
    assert len(model.num_tokens_of_steps) == num_steps
    last = attrs.evolve(plan(3, PlanRow(0, 0, 1, (5,), True), starts=(start(0, [4]),)), ended=(0,))
    assert list(tokens(runner.execute(last)).values()) == expected_answer([4], 1)


def test_after_a_step_without_memory_the_plan_that_was_made_ahead_is_void_and_its_rows_and_blocks_are_known() -> (
    None
):
    model = NarrowModel(3, MemoryError("no more"))
    runner = make_runner(model)
    begin = plan(1, PlanRow(0, 0, 5, (5, 6), True), starts=(start(0, [1, 2, 3, 4, 7]),))
    assert runner.execute(begin).out_of_memory == "MemoryError: no more"
    num_steps = len(model.num_tokens_of_steps)
    # A new row, and one that goes on as if the step before had succeeded, into a block of its own.
    rows = (PlanRow(0, 5, 1, (7,), True), PlanRow(1, 0, 2, (8,), True))
    void = runner.execute(plan(2, *rows, starts=(start(1, [3, 4]),), is_ahead=True))
    assert void == StepResult(2, (), out_of_memory="the step before found no memory")
    assert len(model.num_tokens_of_steps) == num_steps
    # The next plan knows of the failure: the same tokens in smaller steps, without a new block.
    runner.execute(plan(3, PlanRow(0, 0, 3, (), False)))
    ahead = runner.execute(plan(4, PlanRow(0, 3, 2, (), True), is_ahead=True))
    assert list(tokens(ahead).values()) == expected_answer([1, 2, 3, 4, 7], 1)
    new = runner.execute(plan(5, PlanRow(1, 0, 2, (), True)))
    assert list(tokens(new).values()) == expected_answer([3, 4], 1)
