"""Sleep: the runner gives up the model, and what waits is computed when the engine is awake, with the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.actors.harness import STEP_S, FakeExecutor, answer_of, assert_all_blocks_back, fake_engine
from tests.engine.test_pause import assert_whole, read_all
from triolet import SamplingParams
from triolet.core.load_progress import OnProgress
from triolet.core.output.outputs import RequestOutput
from triolet.core.request.model_info import ModelInfo
from triolet.core.step_plan import StepPlan, StepResult
from triolet.engine import weights
from triolet.engine.engine import Engine
from triolet.errors import EngineClosed, InvalidRequest, ResourceShortage, RunnerDied

SHORT = SamplingParams(max_tokens=3, seed=1)
LOAD_S = 100 * STEP_S


def asleep(engine: Engine) -> bool:
    """Whether it sleeps now: to a type checker a property that was False stays so."""
    return engine.is_sleeping


class Sleeper(FakeExecutor):
    """A fake executor whose later loads take a second."""

    def __init__(self) -> None:
        super().__init__(64, 4)
        self.faults: list[Exception] = []  # of loads
        self.step_faults: list[Exception] = []  # at the end of steps

    async def start(self, on_progress: OnProgress) -> ModelInfo:
        if self.num_lives:
            await trio.sleep(LOAD_S)
        if self.faults:
            raise self.faults.pop(0)
        return await super().start(on_progress)

    async def compute(self, plan: StepPlan) -> StepResult:
        result = await super().compute(plan)
        if self.step_faults:
            raise self.step_faults.pop(0)
        return result


@pytest.mark.parametrize("level", [0, 1, 2])
async def test_kept_streams_go_on_exactly_after_a_sleep_at_any_step(
    level: int, autojump_clock: MockClock
) -> None:
    executor, outputs = Sleeper(), dict[int, RequestOutput]()
    async with fake_engine(executor, num_scheduler_steps=4, step_timeout=0.5) as engine:
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(read_all, engine, outputs, number)
            for nap in range(1, 9):
                await trio.sleep(2.5 * STEP_S)
                await engine.sleep(level, "keep")
                await engine.sleep(0, "keep")  # it sleeps as deeply already
                assert asleep(engine) and engine.statistics().sleep_level == level
                assert executor.num_unloads == (nap if level else 0)
                assert level == 0 or engine.statistics().kv_blocks_in_use == 0
                num_steps = len(executor.plans)
                await trio.sleep(10)  # much longer than step_timeout
                engine.check_health()
                assert len(executor.plans) == num_steps
                async with trio.open_nursery() as wakers:
                    wakers.start_soon(engine.wake_up)
                    await wait_all_tasks_blocked()
                    engine.check_health()  # a load is no hang
                    assert await engine.wake_up()
                assert not asleep(engine)
                engine.check_health()
        assert_whole(outputs, range(4))
        assert_all_blocks_back(engine)
        statistics = engine.statistics()
        assert (statistics.num_restarts, statistics.restarting, statistics.sleep_level) == (0, (), None)


async def test_an_idle_engine_falls_asleep_and_the_next_request_wakes_it(autojump_clock: MockClock) -> None:
    executor = Sleeper()
    async with fake_engine(executor, sleep_after=5.0) as engine:
        for nap in range(1, 4):
            await trio.sleep(4.9)
            assert not asleep(engine)
            assert (await engine.complete([1, 2], SHORT)).outputs[0].token_ids == answer_of([1, 2], 1, 3)
            await trio.sleep(4.9)
            assert not asleep(engine)
            await trio.sleep(0.2)
            assert asleep(engine) and engine.wakes_by_itself and executor.num_unloads == nap
            began_s = trio.current_time()
            assert (await engine.complete([1, 2], SHORT)).outputs[0].token_ids == answer_of([1, 2], 1, 3)
            assert LOAD_S < trio.current_time() - began_s < LOAD_S + 1
        assert engine.statistics().num_restarts == 0
        await trio.sleep(6)
        await engine.sleep()  # asked for: no request ends it
        with trio.move_on_after(10) as scope:
            await engine.complete([1, 2], SHORT)
        assert scope.cancelled_caught and asleep(engine)
        assert await engine.wake_up()
        await engine.pause_generation()
        await trio.sleep(100)  # a pause is not the engine's own idleness
        assert not asleep(engine)


async def test_parts_that_are_woken_alone_compute_nothing(autojump_clock: MockClock) -> None:
    executor = Sleeper()
    async with fake_engine(executor) as engine:
        await engine.sleep()
        for tags in (["scheduling"], ["kv_cache"], "kv_cache"):
            assert not await engine.wake_up(tags)
            await trio.sleep(2 * LOAD_S)
            assert executor.num_lives == 1
        assert await engine.wake_up(["weights"])
        assert (executor.num_lives, executor.num_unloads) == (2, 1)
        await engine.sleep(0)
        assert not await engine.wake_up(["weights", "kv_cache"])
        assert await engine.wake_up(["scheduling"])
        assert await engine.wake_up() and executor.num_lives == 2
        wrong: list[tuple[Any, Any]] = [(3, "keep"), (True, "keep"), ("1", "keep"), (1, "nap")]
        for level, mode in wrong:
            with pytest.raises(InvalidRequest, match=r"(level|mode) must be"):
                await engine.sleep(level, mode)
        others: list[Any] = [[], ["cache"], [1]]
        for other in others:
            with pytest.raises(InvalidRequest, match="tags must be"):
                await engine.wake_up(other)
        assert not asleep(engine)


async def test_sleep_and_wake_up_meet_in_any_order(autojump_clock: MockClock) -> None:
    outputs = dict[int, RequestOutput]()
    async with fake_engine(Sleeper()) as engine:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_all, engine, outputs, 0)
            await trio.sleep(2.5 * STEP_S)
            nursery.start_soon(engine.sleep, 1, "keep")
            await wait_all_tasks_blocked()
            await engine.wake_up()  # before the step in flight has ended
            await engine.sleep(1, "keep")
            nursery.start_soon(engine.wake_up)
            await trio.sleep(LOAD_S / 2)
            await engine.sleep(1, "keep")  # while the model is loaded
            assert asleep(engine)
            await engine.wake_up()
            with trio.move_on_after(3 * STEP_S):
                await engine.sleep(1, "wait")  # taken back: the live one had not finished
            assert not asleep(engine)
        assert_whole(outputs, range(1))


async def test_of_sleeps_that_wait_together_each_takes_back_its_own(autojump_clock: MockClock) -> None:
    outputs, scopes = dict[int, RequestOutput](), [trio.CancelScope() for _ in range(3)]

    async def sleep(number: int) -> None:
        with scopes[number]:
            await engine.sleep(number, "wait")

    async with fake_engine(Sleeper()) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(read_all, engine, outputs, 0)
        await trio.sleep(2.5 * STEP_S)
        for number in range(3):
            nursery.start_soon(sleep, number)
            await wait_all_tasks_blocked()
        for number, level in ((1, 2), (2, 0), (0, None)):
            scopes[number].cancel()
            await wait_all_tasks_blocked()
            assert engine._core.sleep.level == level
            assert asleep(engine) is (level is not None)
    assert_whole(outputs, range(1))


async def test_crashes_around_a_sleep_lose_nothing(autojump_clock: MockClock) -> None:
    executor, outputs = Sleeper(), dict[int, RequestOutput]()
    async with fake_engine(executor) as engine:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_all, engine, outputs, 0)
            await trio.sleep(4.5 * STEP_S)

            def crash(plan: object) -> None:
                executor.before_step = lambda plan: None
                raise RunnerDied("killed", -9)

            executor.before_step = crash
            await engine.sleep(1, "keep")  # during the recovery
            assert asleep(engine) and engine.statistics().num_restarts == 1
            executor.faults = [RunnerDied("killed", -9)]  # in the load of the waking
            assert await engine.wake_up()
            assert engine.statistics().num_restarts == 2
        assert_whole(outputs, range(1))


async def test_a_sleep_that_follows_a_crash_gives_up_the_model(autojump_clock: MockClock) -> None:
    executor = Sleeper()

    def crash(plan: object) -> None:
        executor.before_step = lambda plan: None
        raise ResourceShortage("memory", "a step")  # which is waited out before the next life

    async with fake_engine(executor) as engine:
        executor.before_step = crash
        async with engine.generate([1], SHORT):
            await trio.sleep(1.5 * STEP_S)
        assert engine.statistics().num_restarts == 1
        await engine.sleep(2, "keep")
        await trio.sleep(3 * LOAD_S)
        assert asleep(engine)
        assert (executor.num_lives, executor.num_unloads) == (1, 1)
        await engine.wake_up()
        assert (await engine.complete([1, 2], SHORT)).outputs[0].token_ids == answer_of([1, 2], 1, 3)


@pytest.mark.parametrize("since_s", [LOAD_S / 2, LOAD_S + STEP_S / 2])
async def test_a_sleep_amid_the_load_of_a_waking_engine_returns_when_that_model_is_given_up(
    since_s: float, autojump_clock: MockClock
) -> None:
    executor = Sleeper()
    async with fake_engine(executor) as engine:
        executor.step_faults = [RunnerDied("killed", -9)]
        async with engine.generate([1], SHORT):
            await trio.sleep(0.5 * STEP_S)
            await engine.sleep(1, "keep")  # the step in flight ends with the life of the runner
        async with trio.open_nursery() as nursery:
            # A runner whose last life died computes one step as a proof, with the model that it has loaded.
            nursery.start_soon(engine.wake_up)
            await trio.sleep(since_s)
            num_lives, num_unloads = executor.num_lives, executor.num_unloads
            await engine.sleep(1, "keep")
            assert asleep(engine)
            assert executor.num_lives - num_lives == (since_s < LOAD_S)
            assert executor.num_unloads == num_unloads + 1
            nursery.cancel_scope.cancel()


async def test_a_drain_wakes_the_engine_for_what_is_live(autojump_clock: MockClock) -> None:
    outputs = dict[int, RequestOutput]()
    async with fake_engine(Sleeper()) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(read_all, engine, outputs, 0)
        await trio.sleep(4.5 * STEP_S)
        await engine.sleep(1, "keep")
        nursery.start_soon(engine.drain, trio.current_time() + 100)
        await wait_all_tasks_blocked()
        with pytest.raises(EngineClosed):
            await engine.sleep()
        await trio.sleep(2 * LOAD_S)
        assert_whole(outputs, range(1))


async def test_deadlines_and_cancellation_go_on_in_sleep(autojump_clock: MockClock) -> None:
    async with fake_engine(Sleeper()) as engine:
        async with engine.generate([1], SamplingParams(max_tokens=50)):
            await trio.sleep(2.5 * STEP_S)
            await engine.sleep(1, "keep")
            output = await engine.complete([2], deadline=trio.current_time() + 1)
            assert output.finish_reason == "deadline"
        assert engine.statistics().num_requests_live == 0
        await engine.wake_up()
        assert_all_blocks_back(engine)


async def test_a_sleeper_wakes_with_the_weights_that_it_was_given(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "check_folder", lambda current, new: None)
    executor = Sleeper()
    async with fake_engine(executor, sleep_after=5.0) as engine:
        await engine.sleep(2)
        assert await engine.reload_weights("/new-1") == 1
        assert (engine.weight_version, executor.folder) == (0, None)
        await engine.wake_up()
        assert (engine.weight_version, executor.folder) == (1, "/new-1")
        await trio.sleep(6)
        assert engine.wakes_by_itself
        assert await engine.reload_weights("/new-2") == engine.weight_version == 2
