"""What steps are expected to take, and how long they may be."""

from __future__ import annotations

import math

import pytest

from tests.core.stage import Stage, make_config
from triolet.core.scheduling.budget import MEMORY_STEPS, MIN_CHUNK, CostModel, TokenBudget, _Point
from triolet.core.scheduling.policies.fair import LINGER_S, MANY, ActiveClients


def taught(fixed_s: float = 2.0, row_s: float = 0.25, token_s: float = 0.125) -> CostModel:
    costs = CostModel()
    for num_rows, num_further in ((1, 0), (8, 0), (100, 0), (1, 50), (4, 200)):
        elapsed_s = fixed_s + num_rows * row_s + num_further * token_s
        costs.observe(num_rows, num_rows + num_further, elapsed_s)
    return costs


def test_the_three_parts_of_a_cost_are_found() -> None:
    costs = taught()
    assert (costs.fixed_s, costs.row_s, costs.token_s) == pytest.approx((2.0, 0.25, 0.125))


def test_one_step_that_took_long_for_another_reason_changes_little() -> None:
    costs = taught()
    for _ in range(8):
        costs.observe(100, 100, 27.0)
    costs.observe(100, 100, 27_000.0)
    assert costs.fixed_s + 100 * costs.row_s < 1.2 * 27


def test_what_was_not_seen_for_long_is_forgotten() -> None:
    costs = CostModel()
    costs.observe(1, 33, 900.0)  # a first time
    for _ in range(MEMORY_STEPS + 8):
        costs.observe(1, 1, 1.0)
    assert costs.token_s == 0


def test_a_step_of_unknown_length_teaches_nothing() -> None:
    costs = CostModel()
    costs.observe(4, 40, 0.0)
    assert costs == CostModel()


def test_a_point_goes_half_way_down_and_a_tenth_of_the_way_up_with_all_that_it_holds() -> None:
    point = _Point(4, 40, 10.0, 1)
    point.move(8, 60, 8.0, 2)
    assert point == _Point(6, 50, 9.0, 2)
    point.move(16, 150, 14.0, 3)
    assert point == _Point(7, 60, 9.5, 3)


def test_without_decodes_all_of_the_time_is_for_the_further_tokens() -> None:
    costs = CostModel()
    costs.observe(1, 33, 8.0)
    assert (costs.fixed_s, costs.row_s, costs.token_s) == (0.0, 0.0, 0.25)


def test_a_fixed_cost_below_one_second_is_found() -> None:
    assert taught(fixed_s=0.5).fixed_s == pytest.approx(0.5)


def test_where_more_rows_took_less_time_rows_cost_nothing() -> None:
    costs = CostModel()
    costs.observe(1, 1, 2.0)
    costs.observe(8, 8, 1.0)
    # Relative errors: the weights of 2 s and 1 s are 1/4 and 1, so the mean is (2/4 + 1) / (1/4 + 1).
    assert (costs.fixed_s, costs.row_s) == pytest.approx((1.2, 0.0))


# --------------------------------------------------------------------------------------- prompts


def pace(**config: object) -> TokenBudget:
    return TokenBudget(make_config(**config), taught())


def long_steps(**config: object) -> dict[str, object]:
    return {"max_num_batched_tokens": 400, "num_sure_tokens": 16, "max_prefill_delay_s": 5.0} | config


def test_a_step_has_more_tokens_than_are_sure_as_far_as_is_known_what_they_take() -> None:
    assert TokenBudget(make_config(**long_steps())).max_tokens == 16
    assert pace(**long_steps()).max_tokens == 40  # of 0.125 seconds each
    assert pace(**long_steps(max_prefill_delay_s=1.0)).max_tokens == 16
    assert pace(**long_steps(max_prefill_delay_s=math.inf)).max_tokens == 400


def test_a_policy_may_allow_no_step_that_is_longer_than_is_sure() -> None:
    budget = TokenBudget(make_config(**long_steps()), taught(), allows_long_steps=False)
    assert budget.max_tokens == 16


def test_without_a_number_of_sure_tokens_all_are() -> None:
    assert TokenBudget(make_config(max_num_batched_tokens=400)).max_tokens == 400


def test_prompts_beside_decodes_are_cut_to_the_bound_together() -> None:
    limited = pace(max_prefill_delay_s=5.0)
    limited.begin_step(has_decodes=True)
    assert [limited.chunk(number) for number in (1, 30, 30, 30, 1)] == [1, 30, 10, 0, 1]
    assert not limited.has_room


def test_a_prompt_goes_on_however_small_the_bound_is() -> None:
    limited = pace(max_prefill_delay_s=0.001)
    limited.begin_step(has_decodes=True)
    assert [limited.chunk(100), limited.chunk(100)] == [MIN_CHUNK, 0]


def test_prompts_that_delay_nobody_are_not_cut() -> None:
    limited = pace(max_prefill_delay_s=0.001)
    limited.begin_step(has_decodes=False)
    assert limited.chunk(100) == 100


def test_before_anything_is_known_nothing_is_cut() -> None:
    limited = TokenBudget(make_config(max_prefill_delay_s=0.001, fair_ttft_factor=2.0))
    limited.begin_step(has_decodes=True)
    assert limited.chunk(100) == 100
    assert limited.many_s == math.inf


def test_two_pending_tokens_are_a_prompt_and_find_no_room_after_the_bound() -> None:
    limited = pace(max_prefill_delay_s=0.001)
    limited.begin_step(has_decodes=True)
    assert [limited.chunk(100), limited.chunk(2), limited.chunk(1)] == [MIN_CHUNK, 0, 1]


def test_time_left_for_less_than_a_token_is_used_for_one() -> None:
    limited = pace(max_prefill_delay_s=5.0625)  # 40 tokens of 0.125 seconds and a half
    limited.begin_step(has_decodes=True)
    assert [limited.chunk(40), limited.chunk(5), limited.chunk(5)] == [40, 1, 0]


def test_rows_of_clients_with_many_requests_have_the_time_that_the_factor_leaves_beside_a_first_step() -> (
    None
):
    stage = Stage()
    stage.add("a", 1)
    first_step = stage.in_flight()
    budget = pace(fair_ttft_factor=3.0)
    budget.step_done(first_step, 0.0)
    assert budget.many_s == math.inf  # a step of unknown length is no measurement
    budget.step_done(first_step, 5.0)
    assert budget.many_s == pytest.approx((3 - 1) * 5.0 - 2.0)


# --------------------------------------------------------------------------------------- company


def company(**requests: int) -> ActiveClients:
    there = ActiveClients()
    for client, number in requests.items():
        there.set_num_requests(client, number)
    return there


def test_a_client_has_many_requests_only_beside_one_with_few() -> None:
    assert company(a=100).with_many() == []
    assert company(a=100, b=100 // MANY + 1).with_many() == []
    assert company(a=100, b=1, c=2 * MANY).with_many() == ["a", "c"]


def test_who_had_many_requests_together_is_not_light_with_its_last_one() -> None:
    there = company(a=100, b=80)
    there.set_num_requests("b", 1)
    assert there.with_many() == []


def test_who_had_many_requests_and_comes_back_with_one_is_light() -> None:
    there = company(a=100, b=80)
    there.set_num_requests("b", 0)
    assert there.with_many() == []
    there.set_num_requests("b", 1)
    assert there.with_many() == ["a"]


def test_who_has_left_counts_for_a_while() -> None:
    there = company(a=100, b=1)
    there.advance_clock(10.0)
    there.set_num_requests("b", 0)
    there.advance_clock(10.0 + LINGER_S - 0.1)
    assert (there.with_many(), there.has_lingering) == (["a"], True)
    there.advance_clock(10.0 + LINGER_S)
    assert (there.with_many(), there.has_lingering) == ([], False)
