"""The policy `fair` in a whole engine: a client with few short requests beside one with a hundred long ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.actors.harness import STEP_S, FakeExecutor, answer_of, assert_all_blocks_back, fake_engine
from triolet import SamplingParams
from triolet.actors.engine import Engine

NUM_LONG, LONG_PROMPT, LONG_ANSWER = 100, 40, 60
SHORT_PROMPT, SHORT_ANSWER = 8, 6
LIMITS: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64}


def roomy() -> FakeExecutor:
    return FakeExecutor(num_blocks=512, block_size=4)


def tight() -> FakeExecutor:
    """Blocks for three long requests at a time."""
    return FakeExecutor(num_blocks=80, block_size=4)


async def hog(engine: Engine, served: Counter[str]) -> None:
    """A hundred long requests at once."""

    async def ask(number: int) -> None:
        prompt = [number % 50, number // 50] * (LONG_PROMPT // 2)
        params = SamplingParams(max_tokens=LONG_ANSWER, seed=number)
        async with engine.generate(prompt, params, client="hog") as stream:
            async for output in stream:
                served["hog"] += len(output.outputs[0].token_ids) == 1 and LONG_PROMPT
                served["hog"] += 1
        assert output.outputs[0].token_ids == answer_of(prompt, number, LONG_ANSWER)

    async with trio.open_nursery() as nursery:
        for number in range(NUM_LONG):
            nursery.start_soon(ask, number)


async def time_to_first_token_s(engine: Engine, seed: int, served: Counter[str]) -> float:
    """One short request, to its end."""
    began_s, prompt = trio.current_time(), [seed % 50, 7, seed // 50, 3] * (SHORT_PROMPT // 4)
    ttft_s = None
    async with engine.generate(
        prompt, SamplingParams(max_tokens=SHORT_ANSWER, seed=seed), client="light"
    ) as stream:
        async for output in stream:
            if ttft_s is None:
                ttft_s = trio.current_time() - began_s
                served["light"] += SHORT_PROMPT
            served["light"] += 1
            token_ids = output.outputs[0].token_ids
    assert ttft_s is not None
    assert token_ids == answer_of(prompt, seed, SHORT_ANSWER)
    return ttft_s


@pytest.mark.parametrize("executor", [roomy, tight])
async def test_a_light_clients_first_token_takes_at_most_twice_as_long_as_alone(
    executor: Callable[[], FakeExecutor], autojump_clock: MockClock
) -> None:
    served: Counter[str] = Counter()
    async with fake_engine(executor(), **LIMITS, policy="fair") as engine:
        alone_s = await time_to_first_token_s(engine, 0, served)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hog, engine, served)
            await trio.sleep(10.5 * STEP_S)
            times_s = []
            for seed in range(1, 40):
                times_s.append(await time_to_first_token_s(engine, seed, served))
                await trio.sleep((seed % 7) * 0.3 * STEP_S)  # at any point of a step
            assert engine.statistics().num_requests_live > NUM_LONG / 2
            assert max(times_s) <= 2 * alone_s + 1e-9  # a sum of steps is not exact
            nursery.cancel_scope.cancel()
        await trio.sleep(2 * STEP_S)
        assert_all_blocks_back(engine)


@pytest.mark.parametrize("executor", [roomy, tight])
async def test_so_does_each_of_a_few_that_come_together(
    executor: Callable[[], FakeExecutor], autojump_clock: MockClock
) -> None:
    served: Counter[str] = Counter()
    times_s: list[float] = []

    async def ask(engine: Engine, seed: int) -> None:
        times_s.append(await time_to_first_token_s(engine, seed, served))

    async with fake_engine(executor(), **LIMITS, policy="fair") as engine:
        alone_s = await time_to_first_token_s(engine, 0, served)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hog, engine, served)
            await trio.sleep(10.5 * STEP_S)
            async with trio.open_nursery() as light:
                for seed in range(1, 4):
                    light.start_soon(ask, engine, seed)
            nursery.cancel_scope.cancel()
    assert max(times_s) <= 2 * alone_s + 1e-9


async def test_under_fcfs_the_light_client_waits_for_the_hundred(autojump_clock: MockClock) -> None:
    served: Counter[str] = Counter()
    async with fake_engine(roomy(), **LIMITS, policy="fcfs") as engine:
        alone_s = await time_to_first_token_s(engine, 0, served)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hog, engine, served)
            await trio.sleep(10.5 * STEP_S)
            assert await time_to_first_token_s(engine, 1, served) > 100 * alone_s
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("executor", [roomy, tight])
@pytest.mark.parametrize("num_lanes", [8, 32])
async def test_while_both_want_more_than_there_is_both_get_the_same_number_of_tokens(
    executor: Callable[[], FakeExecutor], num_lanes: int, autojump_clock: MockClock
) -> None:
    served: Counter[str] = Counter()
    seeds = count(1)

    async def ask_on(engine: Engine) -> None:
        while True:
            await time_to_first_token_s(engine, next(seeds) % 2000, served)

    async with fake_engine(executor(), **LIMITS, policy="fair") as engine:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hog, engine, served)
            await trio.sleep(10.5 * STEP_S)
            for _ in range(num_lanes):  # one after the other in each, so that it always has some waiting
                nursery.start_soon(ask_on, engine)
            served.clear()
            await trio.sleep(250 * STEP_S)
            assert engine.statistics().num_requests_waiting > NUM_LONG / 4
            nursery.cancel_scope.cancel()
    assert jain(served) >= 0.95, served


def jain(served: Counter[str]) -> float:
    """Jain's index: 1 where all have the same, 1/n where one has everything."""
    return served.total() ** 2 / (len(served) * sum(tokens**2 for tokens in served.values()))
