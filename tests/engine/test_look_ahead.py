"""An engine with two steps in flight: the same answers, and whatever must find nothing in flight waits for that."""

from __future__ import annotations

from typing import Any

import trio
from trio.testing import MockClock

from tests.actors.harness import STEP_S, FakeExecutor, answer_of, assert_all_blocks_back, fake_engine
from tests.engine.test_pause import PROMPTS, assert_whole, read_all
from tests.engine.test_worker_calls import CallableExecutor
from triolet import SamplingParams
from triolet.core.output.outputs import RequestOutput
from triolet.core.step_plan import StepPlan


class WatchedExecutor(CallableExecutor):
    """Notes the plans that lie in the runner's inbox when a call is made."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.num_computed = 0

    async def compute(self, plan: StepPlan) -> Any:
        result = await super().compute(plan)
        self.num_computed += 1
        return result


async def test_streams_read_the_same_tokens_and_most_steps_are_planned_ahead(
    autojump_clock: MockClock,
) -> None:
    executor, outputs = FakeExecutor(64, 4), dict[int, RequestOutput]()
    async with fake_engine(executor, async_scheduling=True) as engine:
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(read_all, engine, outputs, number)
        assert_whole(outputs, range(4))
        assert_all_blocks_back(engine)
    assert sum(plan.is_ahead for plan in executor.plans) > 0.8 * len(executor.plans)


async def test_a_reader_that_leaves_has_its_blocks_back_when_both_steps_are_done(
    autojump_clock: MockClock,
) -> None:
    async with fake_engine(async_scheduling=True) as engine:
        async with engine.generate(PROMPTS[0], SamplingParams(max_tokens=40, seed=0)) as stream:
            await stream.__anext__()
            await trio.sleep(STEP_S / 2)
        assert engine.statistics().kv_blocks_quarantined > 0
        await trio.sleep(STEP_S)
        assert engine.statistics().kv_blocks_quarantined > 0
        await trio.sleep(STEP_S)
        assert engine.statistics().kv_blocks_quarantined == 0
        assert_all_blocks_back(engine)


async def test_a_call_that_changes_the_weights_waits_for_both_steps_and_none_is_planned_before_it(
    autojump_clock: MockClock,
) -> None:
    executor = WatchedExecutor(call_s=STEP_S / 3)
    async with fake_engine(executor, async_scheduling=True) as engine:
        async with engine.generate([1, 2, 3], SamplingParams(max_tokens=30, seed=7)) as stream:
            await stream.__anext__()
            await trio.sleep(STEP_S / 2)
            num_planned = engine._core.counters.steps
            num_computed = executor.num_computed
            await engine.collective_rpc("change", invalidates=True)
            assert executor.num_computed == num_planned == num_computed + 2
            text = await stream.text()
        assert [ord(char) - 65 for char in text] == list(answer_of([1, 2, 3], 7, 30))
        assert_all_blocks_back(engine)


async def test_calls_are_made_soon_although_a_step_is_always_in_flight(autojump_clock: MockClock) -> None:
    executor = CallableExecutor()
    async with fake_engine(executor, async_scheduling=True) as engine:
        async with engine.generate([1, 2, 3], SamplingParams(max_tokens=40, seed=7)) as stream:
            await stream.__anext__()
            await trio.sleep(STEP_S / 2)
            began_s = trio.current_time()
            await engine.collective_rpc("look")
            assert trio.current_time() - began_s < 2.1 * STEP_S
            await stream.text()


async def test_a_pause_begins_when_nothing_is_in_flight_and_streams_go_on_exactly_after_it(
    autojump_clock: MockClock,
) -> None:
    executor, outputs = FakeExecutor(64, 4), dict[int, RequestOutput]()
    async with fake_engine(executor, async_scheduling=True) as engine:
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(read_all, engine, outputs, number)
            for _ in range(6):
                await trio.sleep(1.5 * STEP_S)
                await engine.pause_generation("keep")
                num_steps = len(executor.plans)
                await trio.sleep(20 * STEP_S)
                assert len(executor.plans) == num_steps
                engine.check_health()
                engine.resume_generation()
        assert_whole(outputs, range(4))
        assert_all_blocks_back(engine)


async def test_an_engine_that_sleeps_gives_up_its_model_when_nothing_is_in_flight(
    autojump_clock: MockClock,
) -> None:
    executor, outputs = FakeExecutor(64, 4), dict[int, RequestOutput]()
    async with fake_engine(executor, async_scheduling=True) as engine:
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(read_all, engine, outputs, number)
            await trio.sleep(3.5 * STEP_S)
            await engine.sleep(level=1, mode="keep")
            assert executor.num_unloads == 1
            await engine.wake_up()
        assert_whole(outputs, range(4))
        assert_all_blocks_back(engine)


async def test_a_crash_with_two_steps_in_flight_costs_no_token(autojump_clock: MockClock) -> None:
    executor, outputs = FakeExecutor(64, 4), dict[int, RequestOutput]()
    crashes = iter([5, 11, 12])
    next_crash = next(crashes)

    def before_step(plan: StepPlan) -> None:
        nonlocal next_crash
        if len(executor.plans) >= next_crash:
            next_crash = next(crashes, 10**6)
            raise RuntimeError("planted")

    executor.before_step = before_step
    async with fake_engine(executor, async_scheduling=True) as engine:
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(read_all, engine, outputs, number)
        assert_whole(outputs, range(4))
        assert_all_blocks_back(engine)
    assert executor.num_lives == 4
