"""Calls into the workers, seen by the engine: between steps, once, and never left without an answer."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.actors.harness import STEP_S, FakeExecutor, answer_of, assert_all_blocks_back, fake_engine
from triolet import SamplingParams
from triolet.core.step_plan import StepPlan
from triolet.core.worker_call import WorkerCall, WorkerOutcome
from triolet.errors import EngineClosed, InvalidRequest, UnknownWorkerMethod, WorkerCallTimeout


class CallableExecutor(FakeExecutor):
    """Notes what it computes and calls, in order, and lets a call take a while."""

    def __init__(self, call_s: float = 0.0) -> None:
        super().__init__(num_blocks=64, block_size=4)
        self.events: list[str] = []
        self.call_s = call_s
        self.limits_s: list[float | None] = []

    async def compute(self, plan: StepPlan) -> Any:
        self.events.append("begin")
        result = await super().compute(plan)
        self.events.append("end")
        return result

    async def call(self, call: WorkerCall, limit_s: float | None) -> WorkerOutcome:
        self.limits_s.append(limit_s)
        await trio.sleep(self.call_s)
        self.events.append(call.name)
        return WorkerOutcome([call.args, dict(call.kwargs)])


async def test_calls_are_made_between_two_steps_in_their_order(autojump_clock: MockClock) -> None:
    executor = CallableExecutor(call_s=STEP_S / 3)
    async with fake_engine(executor) as engine:
        params = SamplingParams(max_tokens=40, seed=7)
        async with engine.generate([1, 2, 3], params) as stream, trio.open_nursery() as nursery:
            await stream.__anext__()
            await trio.sleep(STEP_S / 2)  # in the middle of a step
            for name in "abc":
                nursery.start_soon(engine.collective_rpc, name)
                await trio.lowlevel.checkpoint()
            text = await stream.text()
        assert [ord(char) - 65 for char in text] == list(answer_of([1, 2, 3], 7, 40))
        assert_all_blocks_back(engine)
        called = [event for event in executor.events if event not in ("begin", "end")]
        assert called == ["a", "b", "c"]
        for number, event in enumerate(executor.events):
            assert event != "end" or executor.events[number - 1] == "begin"  # no call in a step
        # not at the end of a long run of steps, but after the one that was being computed
        assert executor.events.index("a") < executor.events.index("end", executor.events.index("end") + 1) + 4


async def test_a_call_that_invalidates_is_followed_by_steps_that_use_no_older_kv(
    autojump_clock: MockClock,
) -> None:
    executor = CallableExecutor(call_s=STEP_S)
    async with fake_engine(executor) as engine:
        prompt = [1, 2, 3, 4, 5]
        async with engine.generate(prompt, SamplingParams(max_tokens=30, seed=7)) as stream:
            await stream.__anext__()
            await trio.sleep(STEP_S * 1.5)
            num_before = len(executor.plans)
            await engine.collective_rpc("change", invalidates=True)
            num_at_call = executor.events[: executor.events.index("change")].count("begin")
            text = await stream.text()
        assert num_at_call <= num_before + 1
        first = executor.plans[num_at_call]  # computes everything again, from position 0
        assert [row.start for row in first.rows] == [0]
        assert [ord(char) - 65 for char in text] == list(answer_of(prompt, 7, 30))
        assert_all_blocks_back(engine)


async def test_a_call_left_by_its_caller_before_it_is_made_is_never_made(autojump_clock: MockClock) -> None:
    executor = CallableExecutor()
    async with fake_engine(executor) as engine:
        async with engine.generate([1], SamplingParams(max_tokens=30, seed=1)) as stream:
            await stream.__anext__()
            await trio.sleep(STEP_S / 4)
            with pytest.raises(WorkerCallTimeout, match=r"late must end within 0\.001 s"):
                await engine.collective_rpc("late", timeout=0.001, invalidates=True)
            assert len(await stream.text()) == 30
        assert "late" not in executor.events


@pytest.mark.parametrize("timeout_s", [STEP_S / 2, STEP_S])
async def test_a_call_is_not_made_once_its_time_is_over_and_has_all_of_it_from_its_beginning(
    timeout_s: float, autojump_clock: MockClock
) -> None:
    """Time is over in the very moment in which a step ends, or half a step after it."""
    executor = CallableExecutor(call_s=STEP_S)
    async with fake_engine(executor) as engine:
        async with engine.generate([1], SamplingParams(max_tokens=30, seed=1)) as stream:
            await stream.__anext__()
            await trio.sleep(STEP_S / 2)
            with pytest.raises(WorkerCallTimeout):
                await engine.collective_rpc("call", timeout=timeout_s, invalidates=True)
            assert len(await stream.text()) == 30
    assert executor.limits_s == ([] if timeout_s < STEP_S else [STEP_S])


async def test_wrong_calls_are_refused_and_a_call_does_not_outlive_the_engine(
    autojump_clock: MockClock,
) -> None:
    async with fake_engine() as engine:
        for wrong in (5, None, b"x"):
            with pytest.raises(InvalidRequest, match="method must be the name of a method, or a callable"):
                await engine.collective_rpc(wrong)  # type: ignore[arg-type]
        for timeout in (0, -1.0, float("nan"), float("inf"), "1"):
            with pytest.raises(InvalidRequest, match="timeout"):
                await engine.collective_rpc("a", timeout=timeout)  # type: ignore[arg-type]
        with pytest.raises(UnknownWorkerMethod, match="method must be called on a real model"):
            await engine.apply_model("os:getpid")
    with pytest.raises(EngineClosed):
        await engine.collective_rpc("a")
