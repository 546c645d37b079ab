"""The policy `fair` in a whole engine: a client with few short requests beside one with a hundred long ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import count, pairwise
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock

from tests.actors.harness import STEP_S, FakeExecutor, answer_of, assert_all_blocks_back, fake_engine
from triolet import SamplingParams
from triolet.core.load_progress import OnProgress
from triolet.core.request.model_info import ModelInfo
from triolet.core.request.pooling_params import PoolingInfo
from triolet.core.scheduling.policies.fair import LINGER_S
from triolet.core.step_plan import StepPlan, StepResult
from triolet.engine.engine import Engine

NUM_LONG, LONG_PROMPT, LONG_ANSWER = 100, 40, 60
SHORT_PROMPT, SHORT_ANSWER = 8, 6
LIMITS: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64}


def roomy() -> FakeExecutor:
    return FakeExecutor(num_blocks=512, block_size=4)


def tight() -> FakeExecutor:
    """Blocks for three long requests at a time."""
    return FakeExecutor(num_blocks=80, block_size=4)


async def hog(engine: Engine, served: Counter[str], long_answer: int = LONG_ANSWER) -> None:
    """A hundred long requests at once."""

    async def ask(number: int) -> None:
        prompt = [number % 50, number // 50] * (LONG_PROMPT // 2)
        params = SamplingParams(max_tokens=long_answer, seed=number)
        async with engine.generate(prompt, params, client="hog") as stream:
            async for output in stream:
                served["hog"] += len(output.outputs[0].token_ids) == 1 and LONG_PROMPT
                served["hog"] += 1
        assert output.outputs[0].token_ids == answer_of(prompt, number, long_answer)

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


@pytest.mark.slow
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
@pytest.mark.parametrize("num_lanes", [8, pytest.param(32, marks=pytest.mark.slow)])
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


class Laborious(FakeExecutor):
    """Steps take longer the more there is in them; the figures are those of a small model on a few cores."""

    FIXED_S, ROW_S, TOKEN_S = 1.5e-3, 0.28e-3, 0.2e-3

    async def compute(self, plan: StepPlan) -> StepResult:
        num_further = plan.num_tokens - len(plan.rows)
        elapsed_s = self.FIXED_S + len(plan.rows) * self.ROW_S + num_further * self.TOKEN_S
        self.plans.append(plan)
        await trio.sleep(elapsed_s)
        return attrs.evolve(self.model.execute(plan), elapsed_s=elapsed_s)


HUNDRED_ROWS: dict[str, Any] = {"max_num_seqs": 128, "max_num_batched_tokens": 512, "policy": "fair"}


async def visit(engine: Engine, num_visits: int, first_seed: int, served: Counter[str]) -> list[float]:
    """Short requests, one after the other, at any point of a step; their times to a first token."""
    times_s = []
    for seed in range(first_seed, first_seed + num_visits):
        times_s.append(await time_to_first_token_s(engine, seed, served))
        await trio.sleep((seed % 17) * 2.3e-3)
    return times_s


def laborious() -> Laborious:
    # Large blocks: every count of every block is checked after every step.
    return Laborious(num_blocks=1200, block_size=32)


@pytest.mark.parametrize("factor", [pytest.param(2.0, marks=pytest.mark.slow), None])
async def test_it_does_so_where_a_step_of_a_hundred_rows_takes_long(
    factor: float | None, autojump_clock: MockClock
) -> None:
    served: Counter[str] = Counter()
    async with fake_engine(laborious(), **HUNDRED_ROWS, fair_ttft_factor=factor) as engine:
        alone_s = max(await visit(engine, 10, 0, served))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hog, engine, served)
            await trio.sleep(0.4)
            times_s = await visit(engine, 40, 10, served)
            nursery.cancel_scope.cancel()
    if factor is None:
        assert max(times_s) > 5 * alone_s
    else:
        assert max(times_s) <= factor * alone_s + 1e-9


@pytest.mark.slow
async def test_a_client_alone_has_whole_steps_also_after_another_one_was_there(
    autojump_clock: MockClock,
) -> None:
    served: Counter[str] = Counter()
    executor = laborious()
    async with fake_engine(executor, **HUNDRED_ROWS) as engine:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hog, engine, served, 300)
            await trio.sleep(1.1)
            assert len(executor.plans[-1].rows) == NUM_LONG
            await visit(engine, 10, 10, served)
            assert len(executor.plans[-1].rows) < NUM_LONG / 4
            await trio.sleep(LINGER_S + 0.1)
            assert len(executor.plans[-1].rows) == NUM_LONG
            nursery.cancel_scope.cancel()


class PoolingExecutor(Laborious):
    async def start(self, on_progress: OnProgress) -> ModelInfo:
        pooling = PoolingInfo(tasks=("embed",), size=2)
        return attrs.evolve(await super().start(on_progress), pooling=pooling)


async def test_tokens_of_a_chat_beside_embeddings_come_within_one_and_a_half_times_of_what_they_take_alone(
    autojump_clock: MockClock,
) -> None:
    async def longest_gap_s(seed: int) -> float:
        times_s = []
        params = SamplingParams(max_tokens=40, seed=seed)
        async with engine.generate([seed, 3], params, client="chat") as stream:
            async for _ in stream:
                times_s.append(trio.current_time())
        return max(after - before for before, after in pairwise(times_s))

    executor, prompts = PoolingExecutor(num_blocks=1200, block_size=32), [[7, 9] * 15] * 300
    async with fake_engine(executor, **HUNDRED_ROWS, enable_prefix_caching=False) as engine:
        alone_s = await longest_gap_s(0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(engine.embed, prompts, client="documents"))
            await trio.sleep(0.05)
            await longest_gap_s(1)  # what rows cost is learned
            assert await longest_gap_s(2) <= 1.5 * alone_s
            # embeddings were computed beside every token
            assert sum(plan.num_tokens > 2 for plan in executor.plans[-39:]) == 39
            nursery.cancel_scope.cancel()


async def test_rows_of_a_client_that_is_held_back_take_turns(autojump_clock: MockClock) -> None:
    served: Counter[str] = Counter()
    executor = laborious()
    async with fake_engine(executor, **HUNDRED_ROWS) as engine:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hog, engine, served)
            await trio.sleep(0.5)
            await visit(engine, 5, 10, served)
            num_plans = len(executor.plans)
            await trio.sleep(0.5)
            turns = Counter(row.row_id for plan in executor.plans[num_plans:] for row in plan.rows)
            assert len(turns) == NUM_LONG
            assert max(turns.values()) - min(turns.values()) <= 1
            assert engine.statistics().num_preemptions == 0
            nursery.cancel_scope.cancel()
