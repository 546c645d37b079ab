"""What steps are expected to take, and how long they may be."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import attrs
import pytest

from tests.core.stage import Stage, make_config
from triolet.core.request.lora import AdapterSupport
from triolet.core.request.model_info import ModelInfo
from triolet.core.scheduling.budget import (
    MEMORY_STEPS,
    CostModel,
    SchedulerConfig,
    SchedulerCounters,
    TokenBudget,
    _Point,
)
from triolet.core.step_plan import StepPlan


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


def test_a_step_is_forgotten_after_1024_others() -> None:
    costs = CostModel()
    for _ in range(7):
        costs.observe(1, 1, 1.0)
    costs.observe(1, 33, 900.0)
    for _ in range(1023):
        costs.observe(1, 1, 1.0)
    assert costs.token_s > 0
    costs.observe(1, 1, 1.0)
    assert costs.token_s == 0


@pytest.mark.parametrize(("num_rows", "elapsed_s"), [(4, 0.0), (4, -1.0), (0, 1.0)])
def test_a_step_of_unknown_length_or_without_rows_teaches_nothing(num_rows: int, elapsed_s: float) -> None:
    costs = CostModel()
    costs.observe(num_rows, 10 * num_rows, elapsed_s)
    assert costs == CostModel()
    assert (costs.fixed_s, costs.row_s, costs.token_s) == (0, 0, 0)


def test_steps_of_one_kind_move_what_is_known_of_it() -> None:
    costs = CostModel()
    for elapsed_s in (2.0, *[1.0] * 7):
        costs.observe(1, 1, elapsed_s)
    assert costs.row_s == 1 + 1 / 2**7  # half of the way seven times, and fitted at the eighth step


def test_a_measurement_counts_as_at_most_twice_what_was_known() -> None:
    point = _Point(1, 0, 10.0, 1)
    point.move(1, 0, 100.0, 2)
    assert point.elapsed_s == pytest.approx(10 + 0.1 * (2 * 10 - 10))


def test_a_time_that_is_as_before_moves_rows_and_tokens_a_tenth_of_the_way() -> None:
    point = _Point(10, 20, 1.0, 1)
    point.move(20, 30, 1.0, 2)
    assert point == _Point(11, 21, 1.0, 2)


def test_decodes_of_one_size_cost_by_the_row_however_their_numbers_round() -> None:
    for milliseconds in range(1, 40):
        costs = CostModel()
        costs.observe(3, 3, 0.001 * milliseconds)
        assert costs.fixed_s == 0
        assert costs.row_s == pytest.approx(0.001 * milliseconds / 3)


def test_where_a_line_would_begin_below_zero_all_of_the_time_is_for_the_rows() -> None:
    costs = CostModel()
    costs.observe(1, 1, 1.0)
    costs.observe(8, 8, 16.0)
    # Least squares of relative errors through the origin: (1/1 + 8/16) / (1/1 + 64/256).
    assert costs.fixed_s == 0
    assert costs.row_s == pytest.approx(1.2)


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


def test_more_decodes_than_were_seen_are_taken_for_as_long_as_those_but_for_half_of_the_line_at_least() -> (
    None
):
    assert taught().decodes_s(50) == pytest.approx(7.25)  # half of 14.5, where 8 rows took 4
    assert taught().decodes_s(8) == pytest.approx(4.0)
    costs = CostModel()
    costs.observe(8, 8, 1.0)
    assert [costs.decodes_s(number) for number in (4, 8, 12, 16, 32)] == pytest.approx([0.5, 1, 1, 1, 2])


def test_where_more_rows_took_less_time_rows_cost_nothing() -> None:
    costs = CostModel()
    costs.observe(1, 1, 2.0)
    costs.observe(8, 8, 1.0)
    # Relative errors: the weights of 2 s and 1 s are 1/4 and 1, so the mean is (2/4 + 1) / (1/4 + 1).
    assert (costs.fixed_s, costs.row_s) == pytest.approx((1.2, 0.0))


# --------------------------------------------------------------------------------------- prompts


def pace(**config: object) -> TokenBudget:
    return TokenBudget(make_config(**config), taught())


def taken(budget: TokenBudget, num_tokens: int) -> int:
    """Give a row as many of its tokens as fit."""
    fitting = budget.chunk(num_tokens)
    budget.take(fitting)
    return fitting


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
    assert [taken(limited, number) for number in (1, 30, 30, 30, 1)] == [1, 30, 10, 0, 1]
    assert not limited.has_room


@pytest.mark.parametrize("delay_s", [0.0, 0.001])
def test_a_prompt_goes_on_by_16_tokens_in_every_step_however_small_the_bound_is(delay_s: float) -> None:
    limited = pace(max_prefill_delay_s=delay_s)
    for _ in range(2):
        limited.begin_step(has_decodes=True)
        assert [taken(limited, 100), taken(limited, 100)] == [16, 0]


def test_two_tokens_of_a_prompt_take_time_and_one_is_as_a_decode() -> None:
    limited = pace(max_prefill_delay_s=0.25)
    limited.begin_step(has_decodes=True)
    assert [taken(limited, 1), taken(limited, 2), taken(limited, 2)] == [1, 2, 0]


def test_tokens_that_fit_and_are_not_taken_are_left_for_other_prompts() -> None:
    limited = pace(max_prefill_delay_s=5.0)
    limited.begin_step(has_decodes=True)
    limited.take(0)
    assert limited.chunk(100) == 40
    limited.take(10)
    assert limited.chunk(100) == 30


def moved(budget: TokenBudget, num_tokens: int, num_decodes: int = 8) -> int:
    """Give a row that another replica computed as many of its tokens as fit."""
    fitting = budget.moved_chunk(num_tokens, lambda: num_decodes)
    budget.take(fitting, is_moved=True)
    return fitting


def test_what_another_replica_computed_lengthens_a_step_by_two_fifths_of_what_all_decodes_will_take() -> None:
    limited = TokenBudget(make_config(max_prefill_delay_s=100.0), taught(row_s=0.2575))
    for _ in range(2):
        limited.begin_step(has_decodes=True)
        # 100 decodes take 2 + 100 * 0.2575 seconds, and two fifths of that somewhat longer than 88 tokens
        assert [moved(limited, number, num_decodes=100) for number in (50, 50, 50)] == [50, 38, 0]
        assert taken(limited, 100) == 100, "that is no bound for other prompts"


def test_time_for_a_single_token_goes_to_nothing_that_another_replica_computed() -> None:
    limited = TokenBudget(make_config(max_prefill_delay_s=100.0), taught(row_s=0.2575))
    limited.begin_step(has_decodes=True)
    # 11.1 seconds are 88 tokens. One token alone counts as a decode, so that any number of rows could have one.
    assert [moved(limited, number, num_decodes=100) for number in (50, 37, 50, 50)] == [50, 37, 0, 0]
    limited.begin_step(has_decodes=True)
    assert [moved(limited, number, num_decodes=100) for number in (50, 36, 50)] == [50, 36, 2]


def test_what_another_replica_computed_has_no_more_of_a_step_than_other_prompts() -> None:
    limited = pace(max_prefill_delay_s=2.5)
    limited.begin_step(has_decodes=True)
    assert [taken(limited, 15), moved(limited, 100), moved(limited, 100)] == [15, 5, 0]


def test_what_another_replica_computed_goes_on_by_16_tokens_in_every_step_and_by_all_beside_no_decode() -> (
    None
):
    limited = TokenBudget(make_config(max_prefill_delay_s=9.0), taught(fixed_s=0.001, row_s=0.001))
    limited.begin_step(has_decodes=True)
    assert [moved(limited, 100), moved(limited, 100)] == [16, 0]
    limited.begin_step(has_decodes=False)
    assert [moved(limited, 100, num_decodes=0), moved(limited, 100, num_decodes=0)] == [100, 100]


def test_other_prompts_take_nothing_of_the_time_for_what_another_replica_computed() -> None:
    limited = TokenBudget(make_config(max_prefill_delay_s=100.0), taught(row_s=0.2575))
    limited.begin_step(has_decodes=True)
    assert [moved(limited, 50, num_decodes=100), taken(limited, 30)] == [50, 30]
    assert moved(limited, 50, num_decodes=100) == 38


def test_pooled_rows_have_a_part_of_what_decodes_take_once_a_bound_and_the_costs_are_known() -> None:
    assert pace(fair_ttft_factor=3.0).many_pooled_s(8, 0.5) == pytest.approx(0.5 * (2.0 + 8 * 0.25))
    assert pace().many_pooled_s(8, 0.5) == math.inf
    assert TokenBudget(make_config(fair_ttft_factor=3.0)).many_pooled_s(8, 0.5) == math.inf


def test_prompts_that_delay_no_answer_are_not_cut() -> None:
    limited = pace(max_prefill_delay_s=0.001)
    limited.begin_step(has_decodes=False)
    assert [taken(limited, 100), taken(limited, 100)] == [100, 100]


def test_before_anything_is_known_nothing_is_cut() -> None:
    limited = TokenBudget(make_config(max_prefill_delay_s=0.0, fair_ttft_factor=2.0))
    limited.begin_step(has_decodes=True)
    assert [taken(limited, 100), taken(limited, 100)] == [100, 100]
    assert limited.has_room
    assert limited.many_s == math.inf


def test_two_pending_tokens_are_a_prompt_and_find_no_room_after_the_bound() -> None:
    limited = pace(max_prefill_delay_s=0.001)
    limited.begin_step(has_decodes=True)
    assert [taken(limited, 100), taken(limited, 2), taken(limited, 1)] == [16, 0, 1]


def test_time_left_for_less_than_a_token_is_used_for_one() -> None:
    limited = pace(max_prefill_delay_s=5.0625)  # 40 tokens of 0.125 seconds and a half
    limited.begin_step(has_decodes=True)
    assert [taken(limited, 40), taken(limited, 5), taken(limited, 2)] == [
        40,
        1,
        1,
    ]  # one token is as a decode


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
    budget.step_done(first_step, 9.0)
    assert budget.many_s == pytest.approx((3 - 1) * 5.0 - budget.costs.fixed_s)  # the shortest counts


def first_step(num_tokens: int = 1) -> StepPlan:
    stage = Stage()
    stage.add("a", num_tokens)
    return stage.in_flight()


def test_the_shortest_of_the_last_8_first_steps_counts_and_no_step_with_a_decode() -> None:
    budget = TokenBudget(make_config(fair_ttft_factor=2.0))
    budget.step_done(first_step(), 0.25)
    budget.step_done(attrs.evolve(first_step(), starts=()), 0.125)
    for _ in range(7):
        budget.step_done(first_step(), 0.5)
    budget.costs = CostModel(fixed_s=2.0, row_s=1.0)
    assert budget.many_s == 2.0  # and never less than the fixed cost of a step
    budget.costs.fixed_s = 0.0
    assert budget.many_s == 0.25
    budget.step_done(first_step(), 0.5)
    budget.costs = CostModel(row_s=1.0)
    assert budget.many_s == 0.5


def test_without_a_factor_or_while_the_cost_of_a_row_is_unknown_there_is_no_bound() -> None:
    for config, num_tokens in ((make_config(), 1), (make_config(fair_ttft_factor=2.0), 8)):
        budget = TokenBudget(config)
        budget.step_done(first_step(num_tokens), 1.0)
        assert budget.many_s == math.inf


def test_the_time_of_a_step_teaches_its_cost() -> None:
    budget = TokenBudget(make_config())
    budget.step_done(first_step(), 0.75)
    assert (budget.costs.row_s, budget.costs.token_s) == (0.75, 0)


# ---------------------------------------------------------------------------------------- limits


def engine_limits(**fields: Any) -> SimpleNamespace:
    defaults: dict[str, Any] = {
        "max_num_seqs": 5, "max_num_batched_tokens": None, "policy": "fair", "priority_aging": 1.5,
        "fair_ttft_factor": 2.5, "max_prefill_delay": 3.5, "enable_prefix_caching": False, "num_scheduler_steps": 6,
        "async_scheduling": None, "speculative": "ngram", "num_speculative_tokens": 7, "prompt_lookup_min": 8,
        "max_loras": 2, "kv_store": None, "kv_pool_bytes": 1,
        "tensor_parallel_size": 1,
    }  # fmt: skip
    return SimpleNamespace(**(defaults | fields))


def limits_of(
    device: str = "cuda:1",
    adapters: AdapterSupport | None = None,
    pooling: object = None,
    **fields: Any,
) -> SchedulerConfig:
    info = SimpleNamespace(
        device=device,
        num_kv_blocks=100,
        block_size=16,
        max_model_len=1000,
        cache_windows=(None,),
        pooling=pooling,
        adapters=adapters,
    )
    return SchedulerConfig.of(engine_limits(**fields), cast(ModelInfo, info), b"key", weight_version=3)


def test_the_limits_of_a_step_are_those_of_the_engine_and_of_the_loaded_model() -> None:
    assert attrs.asdict(limits_of()) == {
        "num_blocks": 100, "block_size": 16, "max_num_seqs": 5, "max_num_batched_tokens": 2048, "max_model_len": 1000,
        "num_sure_tokens": 2048, "policy": "fair", "priority_aging_s": 1.5, "fair_ttft_factor": 2.5,
        "max_prefill_delay_s": 3.5, "enable_prefix_caching": False, "cache_key": b"key", "num_scheduler_steps": 6,
        "async_scheduling": False, "num_speculative_tokens": 7, "prompt_lookup_min": 8, "whole_prompts": False,
        "max_adapters": 0, "weight_version": 3, "stores_blocks": True, "num_places": 1000,
        "groups": {"windows": (None,), "count": 1, "num_full": 1, "window": None},
    }  # fmt: skip
    assert limits_of(speculative="none").num_speculative_tokens == 0
    assert limits_of(adapters=AdapterSupport((), "", 8)).max_adapters == 2
    unbounded = limits_of(priority_aging=None, fair_ttft_factor=None, max_prefill_delay=None)
    bounds = (unbounded.priority_aging_s, unbounded.fair_ttft_factor, unbounded.max_prefill_delay_s)
    assert bounds == (math.inf, math.inf, math.inf)


def test_a_model_that_takes_whole_prompts_keeps_no_block_of_one() -> None:
    whole = limits_of(pooling=SimpleNamespace(needs_whole_prompts=True), enable_prefix_caching=True)
    in_chunks = limits_of(pooling=SimpleNamespace(needs_whole_prompts=False), enable_prefix_caching=True)
    for limits, is_whole in ((whole, True), (in_chunks, False)):
        assert (limits.whole_prompts, limits.enable_prefix_caching, limits.stores_blocks) == (
            is_whole,
            not is_whole,
            not is_whole,
        )


@pytest.mark.parametrize(
    ("kv_store", "kv_pool_bytes", "is_stored"),
    [(None, 0, False), ("/store", 0, True), (None, 1, True), ("/store", 1, True)],
)
def test_blocks_are_stored_where_there_is_a_store_or_a_pool(
    kv_store: str | None, kv_pool_bytes: int, is_stored: bool
) -> None:
    assert limits_of(kv_store=kv_store, kv_pool_bytes=kv_pool_bytes).stores_blocks is is_stored


@pytest.mark.parametrize(
    ("device", "num_ranks", "asked", "speculative", "is_async"),
    [
        ("cuda:1", 1, None, "none", True), ("cuda:1", 1, None, "ngram", False), ("cuda", 2, None, "none", False),
        ("cuda", 2, True, "none", True), ("cpu", 1, None, "none", False), ("cpu", 1, True, "none", True),
        ("cuda", 1, False, "none", False),
    ],
)  # fmt: skip
def test_steps_are_planned_ahead_on_one_gpu_without_drafts_unless_the_engine_is_told(
    device: str, num_ranks: int, asked: bool | None, speculative: str, is_async: bool
) -> None:
    limits = limits_of(
        device, tensor_parallel_size=num_ranks, async_scheduling=asked, speculative=speculative
    )
    assert (limits.async_scheduling, limits.num_scheduler_steps) == (is_async, 1 if is_async else 6)


@pytest.mark.parametrize(
    ("device", "asked", "batched", "sure"),
    [("cpu", None, 2048, 512), ("cuda:0", 64, 64, 64), ("cpu", 4096, 4096, 4096)],
)
def test_a_step_of_a_cpu_is_sure_to_have_512_tokens_unless_the_engine_is_told_a_number(
    device: str, asked: int | None, batched: int, sure: int
) -> None:
    limits = limits_of(device, max_num_batched_tokens=asked)
    assert (limits.max_num_batched_tokens, limits.num_sure_tokens) == (batched, sure)


def test_limits_that_nothing_sets_leave_plain_steps_with_a_prefix_cache() -> None:
    plain = make_config()
    assert (plain.enable_prefix_caching, plain.num_scheduler_steps, plain.num_speculative_tokens) == (
        True,
        1,
        0,
    )
    assert (plain.policy, plain.prompt_lookup_min) == ("fcfs", 3)
    assert not any(attrs.asdict(SchedulerCounters()).values())
