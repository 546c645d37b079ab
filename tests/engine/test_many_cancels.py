"""Thousands of requests that leave at random points by random ways: nothing leaks, and what is answered is right.

Clients come in bursts, share beginnings, and are too many for the blocks, so that requests are queued, refused and
preempted; every count of the scheduler is checked after every step (`fake_engine`).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock

from tests.actors.harness import STEP_S, VOCAB, FakeExecutor, answer_of, assert_all_blocks_back, fake_engine
from tests.actors.scene import STATES, State, open_scene
from tests.scale import one_in
from triolet import SamplingParams
from triolet.core.metrics.iteration_stats import EngineStatistics
from triolet.core.output.outputs import RequestOutput
from triolet.core.request.request import FinishReason
from triolet.core.step_plan import StepPlan
from triolet.engine.engine import Engine
from triolet.engine.token_stream import TokenStream
from triolet.errors import Overloaded

NUM_CLIENTS = 50
BEGINNINGS = [[number] * length for number, length in enumerate((0, 4, 8, 13))]


class Planted(Exception):
    pass


@attrs.define
class Client:
    """Asks again and again, and rarely waits for the end.

    Args:
        engine: what it asks.
        random: decides everything.
        endings: counts how its requests ended.
    """

    engine: Engine
    random: random.Random
    endings: Counter[str]

    async def run(self, num_requests: int) -> None:
        ways_out = [
            self.read_to_the_end,
            self.give_up_after_a_while,
            self.stop_reading,
            self.fail,
            self.be_aborted,
            self.be_late,
            self.be_cancelled_elsewhere,
        ]
        for _ in range(num_requests):
            if self.random.random() < 0.1:  # the others' bursts go on meanwhile
                await trio.sleep(self.random.uniform(0, 40 * STEP_S))
            await self.until_let_in(self.random.choice(ways_out))

    async def until_let_in(self, way_out: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await way_out()
            except Overloaded as refusal:
                self.endings["refused"] += 1
                await trio.sleep(refusal.retry_after_s)
            else:
                self.endings[way_out.__name__] += 1
                return

    def ask(self, **arguments: Any) -> TokenStream:
        tail = [self.random.randrange(VOCAB) for _ in range(self.random.randint(1, 8))]
        params = SamplingParams(max_tokens=self.random.randint(1, 24), seed=self.random.randrange(100))
        priority = self.random.randint(0, 2)
        return self.engine.generate(
            self.random.choice(BEGINNINGS) + tail, params, priority=priority, **arguments
        )

    def a_while(self) -> float:
        """Long enough to be anywhere in a request's life; sometimes not long enough for anything."""
        return self.random.choice([0, STEP_S, 10 * STEP_S, 30 * STEP_S]) * self.random.random()

    def check(self, stream: TokenStream, output: RequestOutput) -> None:
        """Whatever comes is the beginning of the right answer; all of it, if it was not ended before."""
        params = stream._submission.params
        assert params is not None and params.seed is not None and params.max_tokens is not None
        expected = answer_of(output.prompt_token_ids, params.seed, params.max_tokens)
        token_ids = output.outputs[0].token_ids
        assert token_ids == expected[: len(token_ids)]
        assert (output.finish_reason is FinishReason.LENGTH) == (token_ids == expected)

    async def read(self, stream: TokenStream) -> FinishReason | None:
        async for output in stream:
            self.check(stream, output)
        return output.finish_reason

    # ------------------------------------------------------------------------------------ ways out

    async def read_to_the_end(self) -> None:
        async with self.ask() as stream:
            assert await self.read(stream) is FinishReason.LENGTH

    async def give_up_after_a_while(self) -> None:
        with trio.CancelScope() as scope:
            scope.deadline = trio.current_time() + self.a_while()
            async with self.ask() as stream:
                await self.read(stream)

    async def stop_reading(self) -> None:
        num_outputs = self.random.randint(0, 10)
        async with self.ask() as stream:
            async for output in stream:
                self.check(stream, output)
                num_outputs -= 1
                if num_outputs < 0:
                    break

    async def fail(self) -> None:
        async def read_and_fail() -> None:
            async with self.ask() as stream:
                async for output in stream:
                    self.check(stream, output)
                    if self.random.random() < 0.2:
                        raise Planted
                raise Planted

        with suppress(Planted):
            await read_and_fail()

    async def be_aborted(self) -> None:
        async def abort(request_id: str) -> None:
            await trio.sleep(self.a_while())
            self.engine.abort(request_id)

        async with self.ask() as stream, trio.open_nursery() as nursery:
            nursery.start_soon(abort, stream.request_id)
            assert await self.read(stream) in (FinishReason.LENGTH, FinishReason.ABORT)

    async def be_late(self) -> None:
        deadline = trio.current_time() + self.a_while()
        async with self.ask(deadline=deadline, queue_timeout=20 * STEP_S) as stream:
            assert await self.read(stream) in (FinishReason.LENGTH, FinishReason.DEADLINE)

    async def be_cancelled_elsewhere(self) -> None:
        with trio.CancelScope() as scope:
            async with self.ask():
                scope.deadline = trio.current_time() + self.a_while()
                await trio.sleep_forever()


class CancelAtStep(trio.abc.Instrument):
    """Cancels a task's scope when the task has run from one checkpoint to the next this many times."""

    def __init__(self, scope: trio.CancelScope, num_steps: int) -> None:
        self.scope, self.num_steps = scope, num_steps
        self.task = trio.lowlevel.current_task()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self.task:
            self.num_steps -= 1
            if self.num_steps == 0:
                self.scope.cancel()


@pytest.mark.parametrize("num_steps", one_in(2, range(1, 31)))
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.name)
async def test_a_cancel_at_any_checkpoint_leaks_nothing(
    state: State, num_steps: int, autojump_clock: MockClock
) -> None:
    async with open_scene(state) as scene:
        with trio.CancelScope() as scope:
            cancel = CancelAtStep(scope, num_steps)
            trio.lowlevel.add_instrument(cancel)
            async with scene.subject() as stream:
                await stream.text()
        trio.lowlevel.remove_instrument(cancel)
        assert scope.cancelled_caught == (cancel.num_steps <= 0)
        await scene.assert_nothing_is_held()


async def let_them_come(num_requests: int, executor: FakeExecutor, policy: str) -> EngineStatistics:
    """Afterwards all blocks are back, no task is left, and every way out was gone often."""
    num_tasks = trio.lowlevel.current_statistics().tasks_living
    endings: Counter[str] = Counter()
    limits: dict[str, Any] = {"max_num_seqs": 12, "max_num_batched_tokens": 40, "max_queued_requests": 30}
    async with fake_engine(executor, policy=policy, **limits) as engine:
        async with trio.open_nursery() as nursery:
            for number in range(NUM_CLIENTS):
                client = Client(engine, random.Random(number), endings)
                nursery.start_soon(client.run, num_requests // NUM_CLIENTS)
        await trio.sleep(2 * STEP_S)
        assert_all_blocks_back(engine)
        statistics = engine.statistics()
    assert trio.lowlevel.current_statistics().tasks_living == num_tasks
    assert endings.total() - endings["refused"] == num_requests
    assert min(endings.values()) > num_requests / 30
    return statistics


@pytest.mark.slow
@pytest.mark.parametrize("num_requests", [2_500, 10_000])
async def test_thousands_of_requests_with_cancels_at_random_points_leak_nothing(
    num_requests: int, autojump_clock: MockClock
) -> None:
    statistics = await let_them_come(num_requests, FakeExecutor(num_blocks=40, block_size=4), "fcfs")
    assert statistics.num_preemptions > num_requests / 100
    assert statistics.prefix_cache_hits > num_requests / 10
    assert statistics.num_restarts == 0


@pytest.mark.slow
async def test_nor_do_they_when_the_runner_crashes_now_and_then(autojump_clock: MockClock) -> None:
    executor = FakeExecutor(num_blocks=40, block_size=4)

    def crash_now_and_then(plan: StepPlan) -> None:
        if len(executor.plans) % 97 == 0 and len(executor.plans) < 500:
            raise MemoryError("planted")

    executor.before_step = crash_now_and_then
    statistics = await let_them_come(2_000, executor, "priority")
    assert statistics.num_preemptions > 20
    assert statistics.num_restarts == 5
