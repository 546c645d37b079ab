"""A request that makes the runner crash fails alone, with the cause; all others are answered as if it had not been."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.actors.executors.fake_worker import NUM_BLOCKS, POISON
from tests.actors.harness import (
    FakeExecutor,
    LetterTokenizer,
    Panic,
    answer_of,
    assert_all_blocks_back,
    fake_engine,
)
from triolet import SamplingParams
from triolet.actors.executors.process import ProcessExecutor
from triolet.config.engine import EngineConfig
from triolet.core.step_plan import StepPlan, StepResult
from triolet.engine.engine import Engine
from triolet.engine.open_engine import run_engine
from triolet.errors import RequestFailed, RunnerDied, RunnerFailed

NUM_REQUESTS, NUM_TOKENS = 16, 6


class PoisonedExecutor(FakeExecutor):
    """Crashes in every step that computes a token of a prompt that begins with POISON."""

    def __init__(self, error: type[BaseException] = ValueError, from_length: int = 0) -> None:
        super().__init__(num_blocks=256, block_size=4)
        self.error, self.from_length = error, from_length

    async def compute(self, plan: StepPlan) -> StepResult:
        result = await super().compute(plan)
        for planned in plan.rows:
            row = self.model.rows[planned.row_id]
            if row.start.prompt_token_ids[0] == POISON and len(row.tokens) > self.from_length:
                raise self.error("poisoned")
        return result


def prompts(*poisoned: int, num_requests: int = NUM_REQUESTS) -> list[list[int]]:
    return [
        [POISON if number in poisoned else 20, *range(number % 40, number % 40 + 5)]
        for number in range(num_requests)
    ]


async def ask_all(engine: Engine, asked: Sequence[list[int]]) -> list[RequestFailed]:
    """The failures of the poisoned ones; every other answer is right."""
    failures: list[RequestFailed] = []

    async def ask(number: int, prompt: list[int]) -> None:
        params = SamplingParams(max_tokens=NUM_TOKENS, seed=number)
        if prompt[0] != POISON:
            output = await engine.complete(prompt, params)
            assert output.outputs[0].token_ids == answer_of(prompt, number, NUM_TOKENS)
            return
        with pytest.raises(
            RequestFailed, match="crashes the model runner, also when computed alone"
        ) as caught:
            await engine.complete(prompt, params)
        failures.append(caught.value)

    async with trio.open_nursery() as nursery:
        for number, prompt in enumerate(asked):
            nursery.start_soon(ask, number, prompt)
    await trio.sleep(0.1)  # the last failure is told before the runner is back
    return failures


@pytest.mark.parametrize("poisoned", range(NUM_REQUESTS))
@pytest.mark.parametrize("error", [ValueError, Panic])
async def test_one_of_sixteen_fails_with_the_cause_and_fifteen_are_answered(
    poisoned: int, error: type[BaseException], autojump_clock: MockClock
) -> None:
    executor = PoisonedExecutor(error)
    async with fake_engine(executor, max_num_seqs=16, max_num_batched_tokens=256) as engine:
        (failure,) = await ask_all(engine, prompts(poisoned))
        assert isinstance(failure.__cause__, error)
        assert (
            2 <= engine.statistics().num_restarts <= 1 + 1 + 4
        )  # the crash itself, and 1 + log2(16) retries
        assert_all_blocks_back(engine)
    assert executor.num_lives <= 1 + 6, "no supervisor has lost its patience"


@pytest.mark.parametrize("max_num_batched_tokens", [4, 9, 64])
async def test_a_poison_that_works_late_and_in_small_steps_is_found_as_well(
    max_num_batched_tokens: int, autojump_clock: MockClock
) -> None:
    executor = PoisonedExecutor(from_length=8)
    async with fake_engine(executor, max_num_seqs=4, max_num_batched_tokens=max_num_batched_tokens) as engine:
        assert len(await ask_all(engine, prompts(5))) == 1
        assert_all_blocks_back(engine)


@pytest.mark.parametrize("max_num_seqs", [1, 3, 16])
async def test_many_poisoned_requests_exhaust_no_limit_of_restarts(
    max_num_seqs: int, autojump_clock: MockClock
) -> None:
    async with fake_engine(
        PoisonedExecutor(), max_num_seqs=max_num_seqs, max_num_batched_tokens=256
    ) as engine:
        poisoned = range(0, 20, 2)
        assert len(await ask_all(engine, prompts(*poisoned, num_requests=20))) == len(poisoned)
        for _ in range(30):  # and one after the other, with no other request there
            assert len(await ask_all(engine, prompts(0, num_requests=1))) == 1
        assert trio.current_time() < 30, "all in one window of restarts"
        engine.check_health()
        assert_all_blocks_back(engine)


async def test_a_request_that_leaves_while_it_is_on_trial_ends_the_trial(autojump_clock: MockClock) -> None:
    async with fake_engine(PoisonedExecutor()) as engine, trio.open_nursery() as nursery:
        poison_bisection = engine._core.recovery.poison_bisection
        params = SamplingParams(max_tokens=NUM_TOKENS, seed=0)
        async with engine.generate([POISON, 1], params):
            nursery.start_soon(ask_all, engine, prompts(num_requests=1))
            for _ in range(100):
                await trio.sleep(0.001)
                if poison_bisection.is_bisecting:
                    break
            assert poison_bisection.is_bisecting
        assert not poison_bisection.is_bisecting


# ------------------------------------------------------------------------------ in a real process


@pytest.mark.parametrize(
    ("misdeed", "cause", "what"),
    [
        pytest.param("raise", RunnerFailed, "ValueError: planted", marks=pytest.mark.slow),
        ("kill", RunnerDied, "SIGKILL"),
        pytest.param("hang", RunnerDied, "step_timeout", marks=pytest.mark.slow),
    ],
)
async def test_a_process_that_raises_dies_or_hangs_for_one_request_goes_on_for_the_others(
    misdeed: str, cause: type[Exception], what: str, tmp_path: Path, mock_clock: MockClock
) -> None:
    """A hang moves the clock on by a limit that no slow step of a busy machine reaches."""
    command = [sys.executable, "-P", "-m", "tests.actors.executors.fake_worker", misdeed, "poison", ""]
    config = EngineConfig(
        model="nowhere",
        runner="process",
        max_num_seqs=16,
        max_num_batched_tokens=NUM_BLOCKS,
        step_timeout=600.0,
    )
    mock_clock.rate = 1.0  # restarts wait for a moment

    async def jump_at_each_misdeed() -> None:
        num_told = 0
        while True:
            if (num := len(os.listdir(tmp_path))) > num_told:
                num_told = num
                mock_clock.jump(600.0)
            await wait_all_tasks_blocked(0.01)

    executor = ProcessExecutor(config, [*command, str(tmp_path)])
    async with trio.open_nursery() as nursery:
        if misdeed == "hang":
            nursery.start_soon(jump_at_each_misdeed)
        async with run_engine(config, executor, LetterTokenizer) as engine:
            (failure,) = await ask_all(engine, prompts(3, num_requests=8))
            assert isinstance(failure.__cause__, cause)
            assert what in str(failure)
            engine.check_health()
            assert_all_blocks_back(engine)
        nursery.cancel_scope.cancel()


async def test_one_of_several_answers_fails_under_the_name_that_the_caller_knows(
    autojump_clock: MockClock,
) -> None:
    async with fake_engine(PoisonedExecutor()) as engine:
        with pytest.raises(RequestFailed, match=r"^request mine failed: it crashes") as caught:
            await engine.complete([POISON, 1], SamplingParams(n=3, max_tokens=5, seed=1), request_id="mine")
        assert caught.value.request_id == "mine"
        await trio.sleep(0.1)
        assert_all_blocks_back(engine)
