"""Two steps in flight: what is planned before a result is there, what waits for it, and what happens in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.core.make import make_request
from tests.core.stage import BLOCK_SIZE, Share, Stage, make_config
from triolet.core.engine_core import EngineCore
from triolet.core.journal import Journal
from triolet.core.request.grammar_state import Constraint, TokenMask
from triolet.core.request.params import SamplingParams
from triolet.core.request.request import FinishReason
from triolet.core.scheduling.admission import Admission
from triolet.core.step_plan import StepPlan, StepResult


class AheadStage(Stage):
    """One whose steps are planned ahead."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**{"async_scheduling": True} | config)

    def two(self) -> tuple[StepPlan, StepPlan]:
        """Begin two steps."""
        first, second = self.in_flight(), self.in_flight()
        assert (first.is_ahead, second.is_ahead) == (False, True)
        assert not self.may_plan()
        return first, second

    def may_plan(self) -> bool:
        return self.scheduler.may_plan

    def lack_memory(self, plan: StepPlan) -> None:
        self.scheduler.apply(StepResult(plan.step_id, (), out_of_memory="planted"), self.now_s)
        self.scheduler.check()


def decoding(*names: str, prompt: int = 3, max_tokens: int = 32, **config: Any) -> AheadStage:
    """Requests that have their first token, and nothing in flight."""
    stage = AheadStage(**config)
    for name in names:
        stage.add(name, prompt, max_tokens=max_tokens)
    stage.step()
    assert all(len(entry.output_token_ids) == 1 for entry in stage.journal)
    return stage


# ------------------------------------------------------------------------------------------- golden traces


def test_a_prompt_and_its_answer_are_planned_a_step_ahead_of_each_result() -> None:
    stage = AheadStage(max_num_batched_tokens=4)
    entry = stage.add("a", 6, max_tokens=4)
    trace: list[tuple[list[Share], tuple[bool, ...], int]] = []
    plans: list[StepPlan] = []
    while entry.finish_reason is None:
        while stage.may_plan() and (plan := stage.begin()) is not None:
            plans.append(plan)
            sampled = tuple(row.sample for row in plan.rows)
            trace.append((stage.shares(plan), sampled, len(entry.output_token_ids)))
        stage.end(plans.pop(0))
    assert trace == [
        ([("a", 0, 4)], (False,), 0),
        ([("a", 4, 2)], (True,), 0),
        ([("a", 6, 1)], (True,), 0),  # its input is unknown yet
        ([("a", 7, 1)], (True,), 1),
        ([("a", 8, 1)], (True,), 2),  # the fourth token, after which nothing is planned
    ]
    assert plans == []
    assert entry.finish_reason is FinishReason.LENGTH
    assert stage.pool.num_in_use == stage.pool.num_quarantined == 0


def test_a_request_that_arrives_joins_the_step_behind_the_two_in_flight_and_others_go_on_beside_it() -> None:
    stage = decoding("a")
    first, second = stage.two()
    stage.add("b", 2)
    stage.end(first)
    third = stage.in_flight()
    assert stage.shares(second) == [("a", 4, 1)]
    assert stage.shares(third) == [("a", 5, 1), ("b", 0, 2)]
    stage.end(second)
    assert stage.shares(stage.in_flight()) == [("a", 6, 1), ("b", 2, 1)]


def test_a_block_is_allocated_for_a_token_that_is_not_known_yet() -> None:
    stage = decoding("a", prompt=BLOCK_SIZE - 1)
    first, second = stage.two()
    assert [row.new_block_ids for row in first.rows] == [()]
    assert [len(row.new_block_ids) for row in second.rows] == [1]


def test_two_steps_are_the_most_in_flight() -> None:
    stage = decoding("a")
    stage.two()
    with pytest.raises(AssertionError, match="a step is in flight"):
        stage.begin()


def test_a_request_with_the_prefix_of_one_in_flight_waits_for_it_also_where_that_was_planned_ahead() -> None:
    stage = AheadStage(max_num_batched_tokens=16)
    prompt = range(100, 109)
    stage.add("a", prompt)
    first = stage.in_flight()
    stage.add("b", [*prompt[:8], 7])
    second = stage.in_flight()
    assert stage.shares(second) == [("a", 9, 1)]
    stage.end(first)
    third = stage.in_flight()
    assert stage.shares(third) == [("a", 10, 1), ("b", 8, 1)]


# ------------------------------------------------------------------------------------------ what waits


@pytest.mark.parametrize(
    "make_it_wait",
    [
        lambda stage: stage.scheduler.recovery.poison_bisection.crashed.add(1),
        lambda stage: stage.scheduler.reset_prefix_cache(reset_running_requests=True),
    ],
    ids=["a suspect of a crash", "an empty prefix cache"],
)
def test_what_must_see_a_result_first_keeps_the_next_step_from_being_planned(
    make_it_wait: Callable[[AheadStage], object],
) -> None:
    stage = decoding("a", "b")
    plan = stage.in_flight()
    assert stage.may_plan()
    make_it_wait(stage)
    assert not stage.may_plan()
    stage.end(plan)
    assert stage.may_plan()


def test_a_step_with_a_grammars_row_is_waited_for_since_its_next_mask_depends_on_its_token() -> None:
    stage = decoding("a")
    form = stage.add("form", 2, constraint=Constraint(grammar=None))
    plan = stage.in_flight()
    assert stage.shares(plan) == [("a", 3, 1)]  # the other one waits for its mask, and keeps nothing waiting
    assert stage.may_plan()
    stage.scheduler.guide(form.serial, TokenMask(0, b"\xff"))
    ahead = stage.in_flight()
    assert stage.shares(ahead) == [("a", 4, 1), ("form", 0, 2)]
    stage.end(plan)
    assert not stage.may_plan()
    stage.end(ahead)
    assert stage.shares(stage.in_flight()) == [("a", 5, 1)]


def test_without_look_ahead_a_step_is_waited_for() -> None:
    stage = decoding("a", async_scheduling=False)
    stage.in_flight()
    assert not stage.may_plan()


def test_where_a_block_is_missing_nothing_is_preempted_before_the_result_is_there() -> None:
    stage = decoding("a", "b", prompt=3, num_blocks=2, max_model_len=8)
    plan = stage.in_flight()  # fills both blocks
    assert stage.begin() is None
    assert stage.scheduler.counters.num_preemptions == 0
    stage.end(plan)
    assert stage.step() == [("a", 4, 1)]
    assert stage.scheduler.counters.num_preemptions == 1


def test_a_waiting_request_takes_no_row_of_a_running_one_before_the_result_is_there() -> None:
    stage = decoding("a", policy="priority", max_num_seqs=1)
    plan = stage.in_flight()
    stage.add("urgent", 2, priority=-1)
    assert stage.begin() is None
    stage.end(plan)
    assert stage.step() == [("urgent", 0, 2)]


def test_an_answer_with_its_last_token_on_its_way_has_no_share_in_the_next_step() -> None:
    stage = decoding("short", "long", max_tokens=32)
    stage.add("last", 2, max_tokens=1)
    first, second = stage.two()
    assert [name for name, *_ in stage.shares(first)] == ["short", "long", "last"]
    assert [name for name, *_ in stage.shares(second)] == ["short", "long"]


def test_nor_has_one_that_has_no_place_for_another_token() -> None:
    stage = decoding("a", prompt=2, num_blocks=1, max_model_len=4)
    assert stage.in_flight().rows[0].start == 2
    assert stage.begin() is None


# ------------------------------------------------------------------------- the end of a request, at each point

End = Callable[[AheadStage, StepPlan], None]


def _abort(stage: AheadStage, first: StepPlan) -> None:
    stage.scheduler.abort(1)


def _expire(stage: AheadStage, first: StepPlan) -> None:
    stage.now_s = 10.0
    stage.scheduler.expire(stage.now_s)


ENDS = {"abort": (_abort, FinishReason.ABORT), "deadline": (_expire, FinishReason.DEADLINE)}


def with_deadline() -> AheadStage:
    stage = AheadStage()
    stage.add("a", 2, deadline_s=10.0)
    stage.add("b", 2)
    stage.step()
    return stage


@pytest.mark.parametrize(("end", "reason"), ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("point", ["one in flight", "two in flight", "the first is done"])
def test_the_blocks_of_a_request_that_ends_are_quarantined_until_the_last_step_in_flight_is_done(
    end: End, reason: FinishReason, point: str
) -> None:
    stage = with_deadline()
    entry = stage.journal.get(1)
    assert entry is not None
    plans = [stage.in_flight()] if point == "one in flight" else [*stage.two()]
    if point == "the first is done":
        stage.end(plans.pop(0))
    num_tokens = len(entry.output_token_ids)
    end(stage, plans[0])
    assert entry.finish_reason is reason
    while plans:
        assert stage.pool.num_quarantined == 1
        stage.end(plans.pop(0))
    assert stage.pool.num_quarantined == 0
    assert len(entry.output_token_ids) == num_tokens  # late tokens are dropped
    assert [name for name, *_ in stage.step()] == ["b"]


@pytest.mark.parametrize(
    ("params", "token", "reason"),
    [({"stop_token_ids": [7]}, 7, FinishReason.STOP), ({}, 2, FinishReason.STOP)],
    ids=["stop token", "end of sequence"],
)
def test_a_token_that_ends_an_answer_voids_its_row_of_the_step_behind(
    params: dict[str, Any], token: int, reason: FinishReason
) -> None:
    stage = AheadStage()
    entry = stage.add("a", 2, params=params, eos_token_ids=(2,))
    stage.add("b", 2)
    stage.step()
    first, second = stage.two()
    stage.end(first, {"a": token})
    assert (entry.finish_reason, entry.output_token_ids) == (reason, [9, token])
    assert stage.pool.num_quarantined == 1
    late = stage.result(second, {"a": 5})
    third = stage.in_flight()
    assert [name for name, *_ in stage.shares(third)] == ["b"]
    stage.scheduler.apply(late, 0.0)
    assert entry.output_token_ids == [9, token]
    assert stage.pool.num_quarantined == 0


def test_a_row_that_failed_is_void_in_the_step_behind() -> None:
    stage = decoding("a", "b")
    entry = stage.journal.get(1)
    first, second = stage.two()
    stage.end(first, failing=["a"])
    assert entry is not None
    assert (entry.finish_reason, entry.failure) == (FinishReason.ERROR, "planted")
    stage.end(second)
    assert len(entry.output_token_ids) == 1


def test_the_row_of_a_request_that_ended_is_given_away_after_the_steps_that_name_it() -> None:
    stage = decoding("a", prompt=2, max_num_seqs=1)
    first, second = stage.two()
    stage.add("b", 2)
    stage.scheduler.abort(1)
    stage.end(first)
    third = stage.in_flight()
    assert (third.ended, [start.row_id for start in third.starts]) == ((0,), [0])
    taken = {*third.rows[0].new_block_ids}
    assert not taken & {block for row in (*first.rows, *second.rows) for block in row.new_block_ids}
    assert stage.pool.num_quarantined == 1
    stage.end(second)
    assert stage.pool.num_quarantined == 0


# ----------------------------------------------------------------------------------- memory errors and crashes


def test_a_step_without_memory_makes_the_one_behind_it_void_and_everything_is_planned_again() -> None:
    stage = AheadStage(max_num_batched_tokens=16)
    small, large = stage.add("small", 3), stage.add("large", 9)
    first, second = stage.two()
    stage.lack_memory(first)
    assert (small.num_preemptions, large.num_preemptions) == (0, 1)
    assert stage.pool.num_quarantined > 0  # the void plan names its blocks
    assert not stage.may_plan()
    # Whatever a result of the void plan says, it is not applied.
    stage.end(second)
    assert (small.output_token_ids, large.output_token_ids) == ([], [])
    assert stage.pool.num_quarantined == 0
    assert stage.step() == [("small", 0, 3)]


def test_a_request_that_the_void_step_has_started_keeps_its_row_and_its_blocks() -> None:
    stage = decoding("a", "c")
    first = stage.in_flight()
    stage.add("b", 2)
    second = stage.in_flight()
    assert [start.request_id for start in second.starts] == ["b"]
    stage.lack_memory(first)
    stage.lack_memory(second)
    stage.scheduler.abort(1)  # so that it is not held back for them
    stage.scheduler.abort(2)
    third = stage.in_flight()
    assert (third.starts, [row.new_block_ids for row in third.rows]) == ((), [()])
    assert stage.shares(third) == [("b", 0, 1)]  # of memory for more it has not been shown yet


def test_the_second_of_two_steps_may_lack_memory_alone() -> None:
    stage = decoding("a", "b")
    first, second = stage.two()
    stage.end(first)
    stage.lack_memory(second)
    assert [len(entry.output_token_ids) for entry in stage.journal] == [2, 2]
    assert stage.scheduler.counters.num_preemptions == 1


def test_a_crash_suspects_the_requests_of_both_steps_and_then_nothing_is_planned_ahead() -> None:
    core = EngineCore(Admission(Journal(), 4, 4, 100))
    core.is_scheduling = True
    config = make_config(async_scheduling=True)
    scheduler = core.new_scheduler(config)
    core.journal.open(make_request((1, 2, 3), request_id="a", params=SamplingParams(), max_tokens=8))
    core.add_arrivals()
    first = core.plan_step(0.0)
    core.journal.open(make_request((4, 5), request_id="b", params=SamplingParams(), max_tokens=8))
    core.add_arrivals()
    second = core.plan_step(0.0)
    assert first is not None
    assert second is not None
    assert scheduler.marks() == {1: 4, 2: 2}
    assert scheduler.num_rows_in_flight == 2
    core.fail_step(first, RuntimeError("planted"))
    assert core.recovery.poison_bisection.crashed == {1, 2}
    again = core.new_scheduler(config)
    assert core.plan_step(0.0) is not None
    assert not again.may_plan
    # Results of both come late.
    for plan in (first, second):
        again.apply(StepResult(plan.step_id, ()), 0.0)
    assert again.is_step_in_flight


def test_abandoned_steps_leave_nothing_behind() -> None:
    stage = decoding("a", "b")
    stage.two()
    stage.scheduler.abort(1)
    stage.scheduler.abandon_step()
    stage.scheduler.check()
    assert (stage.pool.num_quarantined, stage.scheduler.is_step_in_flight) == (0, False)
    assert stage.scheduler.marks() == {}
    assert stage.step() == [("b", 3, 1)]


def test_results_come_in_the_order_of_the_plans_and_any_other_is_late() -> None:
    stage = decoding("a")
    first, second = stage.two()
    [entry] = stage.journal
    stage.end(second)
    assert len(entry.output_token_ids) == 1
    stage.end(first)
    assert len(entry.output_token_ids) == 2
    stage.end(second)
    assert len(entry.output_token_ids) == 3
