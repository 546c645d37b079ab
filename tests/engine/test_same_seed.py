"""The same seed gives the same tokens: alone, in company, after a preemption or a crash, in whatever order."""

from __future__ import annotations

import random

import pytest
import trio
from trio.testing import MockClock

from tests.actors.harness import STEP_S, FakeExecutor, answer_of, assert_all_blocks_back, fake_engine
from triolet import SamplingParams
from triolet.core.step_plan import StepPlan
from triolet.engine.engine import Engine

NUM_REQUESTS, NUM_TOKENS = 6, 24
PROMPTS = [list(range(seed, seed + 3 + seed)) for seed in range(NUM_REQUESTS)]
EXPECTED = {seed: answer_of(PROMPTS[seed], seed, NUM_TOKENS) for seed in range(NUM_REQUESTS)}


async def ask(engine: Engine, seed: int, answers: dict[int, tuple[int, ...]]) -> None:
    params = SamplingParams(max_tokens=NUM_TOKENS, seed=seed)
    answers[seed] = tuple((await engine.complete(PROMPTS[seed], params)).outputs[0].token_ids)


async def ask_all(engine: Engine, order: list[int], pause_s: float = 0.0) -> dict[int, tuple[int, ...]]:
    """All at once, or one after the other has begun."""
    answers: dict[int, tuple[int, ...]] = {}
    async with trio.open_nursery() as nursery:
        for seed in order:
            nursery.start_soon(ask, engine, seed, answers)
            await trio.sleep(pause_s)
    assert_all_blocks_back(engine)
    return answers


async def test_alone(autojump_clock: MockClock) -> None:
    answers: dict[int, tuple[int, ...]] = {}
    async with fake_engine() as engine:
        for seed in range(NUM_REQUESTS):
            await ask(engine, seed, answers)
    assert answers == EXPECTED


@pytest.mark.parametrize("pause_s", [0.0, STEP_S, 3 * STEP_S])
@pytest.mark.parametrize("order_seed", range(4))
async def test_in_a_batch_and_in_any_order(
    order_seed: int, pause_s: float, autojump_clock: MockClock
) -> None:
    order = random.Random(order_seed).sample(range(NUM_REQUESTS), NUM_REQUESTS)
    async with fake_engine(max_num_seqs=NUM_REQUESTS, max_num_batched_tokens=64) as engine:
        assert await ask_all(engine, order, pause_s) == EXPECTED


@pytest.mark.parametrize("budget", [1, 3, 7])
async def test_with_chunked_prefill(budget: int, autojump_clock: MockClock) -> None:
    async with fake_engine(max_num_batched_tokens=budget) as engine:
        assert await ask_all(engine, list(range(NUM_REQUESTS))) == EXPECTED


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_blocks", [9, 12, 16])
async def test_after_preemptions(num_blocks: int, caching: bool, autojump_clock: MockClock) -> None:
    executor = FakeExecutor(num_blocks, block_size=4)
    async with fake_engine(executor, enable_prefix_caching=caching) as engine:
        assert await ask_all(engine, list(range(NUM_REQUESTS))) == EXPECTED
        assert engine.statistics().num_preemptions > 0


async def test_from_the_prefix_cache(autojump_clock: MockClock) -> None:
    async with fake_engine() as engine:
        await ask_all(engine, list(range(NUM_REQUESTS)))
        hits = engine.statistics().prefix_cache_hits
        assert await ask_all(engine, list(range(NUM_REQUESTS))) == EXPECTED
        assert engine.statistics().prefix_cache_hits > hits


async def test_after_crashes_and_preemptions_together(autojump_clock: MockClock) -> None:
    executor, steps = FakeExecutor(num_blocks=12, block_size=4), 0

    def crash_three_times(plan: StepPlan) -> None:
        nonlocal steps
        steps += 1
        if steps in (10, 30, 50):
            raise MemoryError("planted")

    executor.before_step = crash_three_times
    async with fake_engine(executor) as engine:
        assert await ask_all(engine, list(range(NUM_REQUESTS))) == EXPECTED
        assert engine.statistics().num_preemptions > 0
        assert engine.statistics().num_restarts == 3


async def test_seeds_that_the_engine_draws_are_those_of_its_own_seed(autojump_clock: MockClock) -> None:
    async def answers(seed: int) -> list[tuple[int, ...]]:
        async with fake_engine(seed=seed) as engine:
            params = SamplingParams(max_tokens=9)
            return [tuple((await engine.complete([1, 2], params)).outputs[0].token_ids) for _ in range(3)]

    first = await answers(1)
    assert first == await answers(1)
    assert first != await answers(2)
    assert len(set(first)) == 3
