"""Steps of an encoder: a prompt is computed whole, in one step."""

from __future__ import annotations

from typing import Any

from tests.core.stage import Share, Stage
from triolet.core.request.pooling_params import PoolingParams
from triolet.core.request.request import FinishReason
from triolet.core.scheduling.budget import CostModel
from triolet.core.step_plan import PooledVectors, StepPlan, StepResult

POOLING = PoolingParams(task="embed")


def encoder_stage(*lengths: int, **config: Any) -> Stage:
    defaults: dict[str, Any] = {"num_blocks": 4, "block_size": 64, "max_num_batched_tokens": 16}
    stage = Stage(**defaults | config, whole_prompts=True, enable_prefix_caching=False)
    for index, length in enumerate(lengths):
        stage.add("abcdefgh"[index], length, pooling=POOLING)
    return stage


def finish(stage: Stage, plan: StepPlan) -> list[Share]:
    shares = stage.shares(plan)
    rows = [PooledVectors(stage.rows[row.row_id].epoch, 0, 1, b"\0" * 4, True) for row in plan.rows]
    stage.scheduler.apply(StepResult(plan.step_id, tuple(rows)), 0.0)
    stage.scheduler.check()
    return shares


def test_a_prompt_that_does_not_fit_waits_for_the_next_step_and_is_not_divided() -> None:
    stage = encoder_stage(10, 5, 9, 16, 1)
    assert finish(stage, stage.in_flight()) == [("a", 0, 10), ("b", 0, 5)]
    assert finish(stage, stage.in_flight()) == [("c", 0, 9)]
    assert finish(stage, stage.in_flight()) == [("d", 0, 16)]
    assert finish(stage, stage.in_flight()) == [("e", 0, 1)]
    assert stage.begin() is None
    assert stage.pool.num_available == 4


def test_after_a_step_without_memory_prompts_are_smaller_in_number_and_never_in_length() -> None:
    stage = encoder_stage(8, 8)
    plan = stage.in_flight()
    stage.scheduler.apply(StepResult(plan.step_id, (), out_of_memory="planted"), 0.0)
    assert len(finish(stage, stage.in_flight())) == 1
    assert len(finish(stage, stage.in_flight())) == 1
    assert stage.begin() is None


def test_a_prompt_longer_than_a_step_may_be_after_one_without_memory_is_computed_alone() -> None:
    stage = encoder_stage(10, 5)
    plan = stage.in_flight()
    stage.scheduler.apply(StepResult(plan.step_id, (), out_of_memory="planted"), 0.0)
    assert finish(stage, stage.in_flight()) == [("b", 0, 5)]
    assert finish(stage, stage.in_flight()) == [("a", 0, 10)]


def test_whole_prompts_of_a_throttled_client_take_what_it_may_have_of_the_time_of_a_step() -> None:
    stage = encoder_stage(policy="fair", fair_ttft_factor=2.0, max_num_batched_tokens=64)
    stage.add("first", 1, pooling=POOLING)
    stage.scheduler._token_budget.step_done(stage.in_flight(), 2.0)  # what a first step takes
    stage.scheduler.abort(1)
    stage.scheduler.abandon_step()
    stage.scheduler._token_budget.costs = CostModel(row_s=1.0, token_s=0.5)
    for number in range(4):
        stage.add(f"hog {number}", 3, pooling=POOLING, client="hog")
    stage.add("light", 3, pooling=POOLING, client="light")
    # 2 seconds are a row and two further tokens.
    assert sorted(finish(stage, stage.in_flight())) == [("hog 0", 0, 3), ("light", 0, 3)]


def test_a_prompt_for_which_there_is_no_memory_alone_fails_alone() -> None:
    stage = encoder_stage(12, 3)
    entries = list(stage.journal)
    stage.scheduler.abort(entries[1].serial)
    plan = stage.in_flight()
    stage.scheduler.apply(StepResult(plan.step_id, (), out_of_memory="planted"), 0.0)
    assert entries[0].finish_reason is FinishReason.ERROR
    assert entries[0].failure == "there is no memory for it alone: planted"
    stage.add("z", 16, pooling=POOLING)
    assert finish(stage, stage.in_flight()) == [("z", 0, 16)]


def test_a_result_that_comes_twice_ends_its_request_once() -> None:
    stage = encoder_stage(3)
    plan = stage.in_flight()
    [start] = plan.starts
    result = PooledVectors(start.epoch, 0, 1, b"\0" * 4, True)
    stage.scheduler.apply(StepResult(plan.step_id, (result, result)), 0.0)
    stage.scheduler.check()
    assert len(stage.journal) == 0
