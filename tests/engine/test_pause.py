"""A pause: no request is computed, whatever happens meanwhile, and what is kept goes on with the same tokens."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.actors.harness import STEP_S, FakeExecutor, answer_of, assert_all_blocks_back, fake_engine
from triolet import SamplingParams
from triolet.core.output.outputs import RequestOutput
from triolet.engine.engine import Engine
from triolet.errors import EngineClosed, InvalidRequest

NUM_TOKENS = 20
PROMPTS = [[number + 1, 2, 3, 4, 5] for number in range(6)]


async def read_all(engine: Engine, outputs: dict[int, RequestOutput], number: int) -> None:
    params = SamplingParams(max_tokens=NUM_TOKENS, seed=number)
    outputs[number] = await engine.complete(PROMPTS[number], params)


def is_paused(engine: Engine) -> bool:
    """Whether it is paused now: to a type checker a property that was True stays so."""
    return engine.is_paused


def assert_whole(outputs: dict[int, RequestOutput], numbers: range) -> None:
    """These answers, and no others, with the tokens that they have without a pause."""
    assert {number: output.outputs[0].token_ids for number, output in outputs.items()} == {
        number: answer_of(PROMPTS[number], number, NUM_TOKENS) for number in numbers
    }


@pytest.mark.parametrize("clear_cache", [False, True])
async def test_streams_that_are_kept_go_on_exactly_from_any_step(
    clear_cache: bool, autojump_clock: MockClock
) -> None:
    executor, outputs = FakeExecutor(64, 4), dict[int, RequestOutput]()
    async with fake_engine(executor, num_scheduler_steps=4) as engine:
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(read_all, engine, outputs, number)
            for _ in range(12):
                await trio.sleep(1.5 * STEP_S)
                await engine.pause_generation("keep", clear_cache=clear_cache)
                num_steps = len(executor.plans)
                assert engine.is_paused and engine.statistics().is_paused
                await trio.sleep(20 * STEP_S)
                assert len(executor.plans) == num_steps
                engine.check_health()  # work is pending, and that is no hang
                engine.resume_generation()
                engine.check_health()
        assert_whole(outputs, range(4))
        assert_all_blocks_back(engine)


async def test_a_pause_that_waits_lets_the_live_ones_finish_and_later_ones_wait(
    autojump_clock: MockClock,
) -> None:
    outputs = dict[int, RequestOutput]()
    async with fake_engine() as engine, trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(read_all, engine, outputs, number)
        await trio.sleep(2.5 * STEP_S)
        nursery.start_soon(engine.pause_generation, "wait")
        await trio.sleep(STEP_S)
        nursery.start_soon(read_all, engine, outputs, 3)
        await engine.pause_generation("wait")  # does not let the later one go on
        await wait_all_tasks_blocked()  # the readers have read
        assert_whole(outputs, range(3))
        await trio.sleep(50 * STEP_S)
        assert_whole(outputs, range(3))
        engine.resume_generation()
        await trio.sleep(50 * STEP_S)
        assert_whole(outputs, range(4))


async def test_a_pause_that_aborts_ends_the_live_ones_with_what_they_have(autojump_clock: MockClock) -> None:
    outputs = dict[int, RequestOutput]()
    async with fake_engine() as engine, trio.open_nursery() as nursery:
        nursery.start_soon(read_all, engine, outputs, 0)
        await trio.sleep(8.5 * STEP_S)
        await engine.pause_generation()
        assert_all_blocks_back(engine)
        [output] = outputs.values()
        tokens = output.outputs[0].token_ids
        assert output.finish_reason == "abort" and 0 < len(tokens) < NUM_TOKENS
        assert tokens == answer_of(PROMPTS[0], 0, len(tokens))


async def test_deadlines_and_cancellation_go_on_in_a_pause(autojump_clock: MockClock) -> None:
    async with fake_engine() as engine:
        async with engine.generate([1], SamplingParams(max_tokens=50)):
            await trio.sleep(2.5 * STEP_S)
            await engine.pause_generation("keep")
            output = await engine.complete([2], deadline=trio.current_time() + 1)
            assert output.finish_reason == "deadline"
        assert_all_blocks_back(engine)


async def test_a_cancelled_pause_that_waits_is_taken_back(autojump_clock: MockClock) -> None:
    outputs = dict[int, RequestOutput]()
    async with fake_engine() as engine, trio.open_nursery() as nursery:
        nursery.start_soon(read_all, engine, outputs, 0)
        await trio.sleep(2.5 * STEP_S)
        with trio.move_on_after(STEP_S) as scope:
            await engine.pause_generation("wait")
        assert scope.cancelled_caught and not engine.is_paused
    assert_whole(outputs, range(1))


@pytest.mark.parametrize("former", ["abort", "keep", "wait"])
async def test_a_cancelled_pause_that_waits_ends_no_pause_that_has_begun(
    former: str, autojump_clock: MockClock
) -> None:
    async with fake_engine() as engine:
        await engine.pause_generation(former)
        with trio.CancelScope() as scope:
            scope.cancel()
            await engine.pause_generation("wait")
        assert scope.cancelled_caught and engine.is_paused
        engine.resume_generation()
        assert not is_paused(engine)


async def test_of_pauses_that_wait_together_each_takes_back_its_own(autojump_clock: MockClock) -> None:
    outputs, scopes = dict[int, RequestOutput](), [trio.CancelScope() for _ in range(3)]

    async def pause(number: int) -> None:
        with scopes[number]:
            await engine.pause_generation("wait")

    async with fake_engine() as engine, trio.open_nursery() as nursery:
        nursery.start_soon(read_all, engine, outputs, 0)
        await trio.sleep(2.5 * STEP_S)
        for number in range(3):
            nursery.start_soon(pause, number)
            await wait_all_tasks_blocked()
        for number, is_left in ((1, True), (0, True), (2, False)):
            scopes[number].cancel()
            await wait_all_tasks_blocked()
            assert engine.is_paused is is_left
    assert_whole(outputs, range(1))


async def test_a_crash_in_a_pause_changes_nothing_for_the_streams(autojump_clock: MockClock) -> None:
    executor, outputs = FakeExecutor(64, 4), dict[int, RequestOutput]()
    async with fake_engine(executor) as engine, trio.open_nursery() as nursery:
        for number in range(2):
            nursery.start_soon(read_all, engine, outputs, number)
        await trio.sleep(4.5 * STEP_S)

        def crash(plan: object) -> None:
            executor.before_step = lambda plan: None
            raise RuntimeError("planted")

        executor.before_step = crash
        await engine.pause_generation("keep")  # the step in flight crashes; the pause holds in the next life
        assert executor.num_lives == 2
        num_steps = len(executor.plans)
        await trio.sleep(50 * STEP_S)
        assert len(executor.plans) <= num_steps + 1 and not outputs  # one step proves the new runner
        engine.resume_generation()
        await trio.sleep(50 * STEP_S)
        assert_whole(outputs, range(2))


async def test_a_drain_ends_a_pause_and_allows_no_other(autojump_clock: MockClock) -> None:
    outputs = dict[int, RequestOutput]()
    async with fake_engine() as engine, trio.open_nursery() as nursery:
        nursery.start_soon(read_all, engine, outputs, 0)
        await trio.sleep(2.5 * STEP_S)
        await engine.pause_generation("keep")
        nursery.start_soon(engine.drain, trio.current_time() + 100)
        await trio.sleep(STEP_S)
        with pytest.raises(EngineClosed, match="drain"):
            await engine.pause_generation("keep")
        await trio.sleep(50 * STEP_S)
        assert_whole(outputs, range(1))


async def test_wrong_arguments_change_nothing(autojump_clock: MockClock) -> None:
    async with fake_engine() as engine:
        for mode in ("nap", "", 1, None):
            with pytest.raises(InvalidRequest, match="mode must be abort, wait or keep; got"):
                await engine.pause_generation(mode)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="clear_cache"):
            await engine.pause_generation("keep", clear_cache=1)  # type: ignore[arg-type]
        engine.resume_generation()
        assert not engine.is_paused
        assert (await engine.complete([1], SamplingParams(max_tokens=2))).finished
