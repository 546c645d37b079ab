"""A step for which there is no memory is made smaller, at once and by halves, and larger again by and by."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.scheduling.test_scheduler_walk import Walk, make_config
from tests.core.stage import Stage
from triolet.core.recovery.recovery_state import CALM_STEPS, OomBackoff
from triolet.core.request.request import FinishReason
from triolet.core.step_plan import StepResult


def test_without_trouble_there_is_no_limit() -> None:
    limit = OomBackoff()
    limit.step_done(8, 64)
    assert (limit.max_rows(8), limit.max_tokens(64)) == (8, 64)


def test_the_largest_rows_leave_and_more_of_them_each_time() -> None:
    limit = OomBackoff()
    assert limit.step_did_not_fit([30, 5, 1, 1, 1, 1, 1, 1]) == 1
    assert (limit.max_rows(100), limit.max_tokens(100)) == (7, 11)
    assert limit.step_did_not_fit([5, 1, 1, 1, 1, 1, 1]) == 2
    assert limit.step_did_not_fit([1, 1, 1, 1, 1]) == 4
    assert (limit.max_rows(100), limit.max_tokens(100)) == (1, 1)


def test_a_row_that_is_alone_is_cut_in_halves() -> None:
    limit = OomBackoff()
    assert limit.step_did_not_fit([9]) == 0
    assert (limit.max_rows(100), limit.max_tokens(100)) == (1, 4)


def test_one_token_alone_is_as_small_as_a_step_can_be_and_afterwards_all_is_as_before() -> None:
    limit = OomBackoff()
    limit.step_did_not_fit([2])
    assert limit.step_did_not_fit([1]) is None
    assert (limit.max_rows(8), limit.max_tokens(64)) == (8, 64)


def test_after_calm_steps_the_limits_grow_and_at_last_are_gone() -> None:
    limit = OomBackoff()
    limit.step_did_not_fit([40, 2, 2])
    sizes = []
    for _ in range(10 * CALM_STEPS):
        limit.step_done(8, 64)
        sizes.append((limit.max_rows(8), limit.max_tokens(64)))
    assert sizes[0] == (2, 4)
    assert sizes == sorted(sizes)
    assert sizes[-1] == (8, 64)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 200))
def test_whatever_fits_at_all_is_reached_in_few_tries(rows: list[int], capacity: int) -> None:
    limit, num_tries = OomBackoff(), 0
    rows = sorted(rows, reverse=True)
    while sum(rows) > capacity:
        num_leaving = limit.step_did_not_fit(rows)
        assert num_leaving is not None, "one token always fits here"
        rows = rows[num_leaving:]
        if len(rows) == 1:
            rows = [limit.max_tokens(rows[0])]
        num_tries += 1
    assert sum(rows) >= 1
    assert num_tries <= 12


# -------------------------------------------------------------------------------- in the scheduler


def misfit(stage: Stage) -> StepResult:
    [step] = stage.scheduler._in_flight
    return StepResult(step.step_id, (), out_of_memory="planted")


def test_the_largest_is_preempted_and_the_others_try_again() -> None:
    stage = Stage(max_num_batched_tokens=16)
    small, large = stage.add("small", 3), stage.add("large", 9)
    assert stage.scheduler.plan_step(0.0) is not None
    stage.scheduler.apply(misfit(stage), 0.0)
    stage.scheduler.check()
    assert (small.num_preemptions, large.num_preemptions) == (0, 1)
    plan = stage.scheduler.plan_step(0.0)
    assert plan is not None
    assert [row.num_tokens for row in plan.rows] == [3]
    assert not plan.starts  # the runner knows it already


def test_what_can_never_fit_fails_with_what_was_said() -> None:
    stage = Stage()
    entry = stage.add("only", 8)
    sizes = []
    while (plan := stage.scheduler.plan_step(0.0)) is not None:
        sizes.append(plan.num_tokens)
        stage.scheduler.apply(misfit(stage), 0.0)
        stage.scheduler.check()
    assert sizes == [8, 4, 2, 1]
    assert entry.finish_reason is FinishReason.ERROR
    assert entry.failure == "there is no memory for even one token of it alone: planted"


def test_a_small_one_is_not_blamed_for_a_large_one_that_has_left_since() -> None:
    stage = Stage(max_num_batched_tokens=16)
    small, large = stage.add("small", 1), stage.add("large", 9)
    stage.scheduler.plan_step(0.0)
    result = misfit(stage)
    stage.scheduler.abort(large.serial)
    stage.scheduler.apply(result, 0.0)
    stage.scheduler.check()
    assert small.finish_reason is None
    assert stage.scheduler.plan_step(0.0) is not None


def test_a_step_with_requests_that_have_all_left_teaches_nothing() -> None:
    stage = Stage()
    entry = stage.add("only", 8)
    stage.scheduler.plan_step(0.0)
    result = misfit(stage)
    stage.scheduler.abort(entry.serial)
    stage.scheduler.apply(result, 0.0)
    stage.scheduler.check()
    assert stage.scheduler.recovery.memory.max_tokens(8) == 8


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_smaller_step_computes_the_same(num_rows: int) -> None:
    walk = Walk(make_config(num_blocks=40, max_num_batched_tokens=32))
    for number in range(num_rows):
        walk.add(tuple(range(number, number + 12)), 8)
    walk.model.most_tokens = 5
    while walk.begin():
        walk.end()
        walk.check()
    assert all(entry.finish_reason is FinishReason.LENGTH for entry in walk.entries)


def calm(limit: OomBackoff, num_steps: int, most_rows: int = 8, most_tokens: int = 64) -> tuple[int, int]:
    for _ in range(num_steps):
        limit.step_done(most_rows, most_tokens)
    return limit.max_rows(100), limit.max_tokens(100)


def test_limits_are_doubled_after_64_steps_that_fit_until_rows_and_tokens_are_both_unlimited() -> None:
    limit = OomBackoff()
    limit.step_did_not_fit([40, 2, 2])
    assert [calm(limit, number) for number in (63, 1, 63, 1)] == [(2, 4), (4, 8), (4, 8), (8, 16)]
    assert [calm(limit, 64), calm(limit, 64)] == [(16, 32), (100, 100)]  # rows alone lift nothing
    limit = OomBackoff()
    limit.step_did_not_fit([40, 30, 30])
    assert [calm(limit, 64), calm(limit, 64)] == [(4, 100), (100, 100)]  # nor do tokens
    limit = OomBackoff()
    limit.step_did_not_fit([20, 20])
    assert calm(limit, 64, most_rows=2, most_tokens=40) == (100, 100)


def test_each_misfit_after_a_step_that_fitted_doubles_the_number_of_steps_up_to_4096() -> None:
    limit = OomBackoff()
    limit.step_did_not_fit([2, 2])
    calm(limit, 63)
    limit.step_did_not_fit([2, 2])
    assert [calm(limit, 127), calm(limit, 1)] == [(1, 2), (2, 4)]
    for _ in range(20):
        limit.step_did_not_fit([2, 2])
        limit.step_done(8, 64)
    limit.step_did_not_fit([2, 2])
    assert [calm(limit, 4095), calm(limit, 1)] == [(1, 2), (2, 4)]


def test_the_tries_of_one_search_for_what_fits_double_the_number_of_steps_once() -> None:
    limit = OomBackoff()
    for num_tokens in (64, 32, 16, 8, 4):
        limit.step_did_not_fit([num_tokens])
    assert [calm(limit, 63), calm(limit, 1)] == [(1, 2), (2, 4)]


def test_limits_that_were_lifted_leave_nothing_behind() -> None:
    limit = OomBackoff()
    limit.step_did_not_fit([2, 2])
    assert calm(limit, 64, most_rows=2, most_tokens=4) == (100, 100)
    limit.step_did_not_fit([2, 2])
    assert [calm(limit, 63), calm(limit, 1)] == [(1, 2), (2, 4)]


def test_after_a_step_that_fitted_one_row_leaves_again() -> None:
    limit = OomBackoff()
    assert [limit.step_did_not_fit([1] * 9), limit.step_did_not_fit([1] * 8)] == [1, 2]
    limit.step_done(9, 9)
    assert limit.step_did_not_fit([1] * 6) == 1
