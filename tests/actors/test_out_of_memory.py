"""When memory runs out in a step, the largest waits and the others go on; nothing is restarted for that.

A process that finds none for a single token is replaced, and a request that never finds any fails with a typed error.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from tests.actors.executors.harness import ask_six, executor_that, first_step, ignore, second_step, step_ahead
from tests.actors.harness import FakeExecutor, answer_of, assert_all_blocks_back, fake_engine, unexpected
from triolet import SamplingParams
from triolet.core.load_progress import OnProgress
from triolet.core.request.model_info import ModelInfo
from triolet.core.step_plan import PlanRow, StepPlan, StepResult
from triolet.engine.engine import Engine
from triolet.errors import RequestFailed, ResourceShortage

NUM_TOKENS = 12


class NarrowExecutor(FakeExecutor):
    """Finds memory for so many tokens of a step, and for none at all of a prompt that begins with 49."""

    def __init__(self, most_tokens: int) -> None:
        super().__init__(num_blocks=128, block_size=4)
        self.most_tokens, self.num_misfits = most_tokens, 0

    async def start(self, on_progress: OnProgress) -> ModelInfo:
        info = await super().start(on_progress)
        self.model.most_tokens = self.most_tokens
        return info

    async def compute(self, plan: StepPlan) -> StepResult:
        rows = {row_id: row.start for row_id, row in self.model.rows.items()}
        rows |= {start.row_id: start for start in plan.starts}
        is_hopeless = any(rows[row.row_id].prompt_token_ids[0] == 49 for row in plan.rows)
        self.model.most_tokens = 0 if is_hopeless else self.most_tokens
        result = await super().compute(plan)
        self.num_misfits += result.out_of_memory is not None
        return result


async def ask(engine: Engine, prompt: list[int]) -> None:
    output = await engine.complete(prompt, SamplingParams(max_tokens=NUM_TOKENS, seed=len(prompt)))
    assert output.outputs[0].token_ids == answer_of(prompt, len(prompt), NUM_TOKENS)


@pytest.mark.parametrize("most_tokens", [1, 3, 10, 40])
async def test_the_batch_is_tried_smaller_until_it_fits_and_every_answer_is_right(
    most_tokens: int, autojump_clock: MockClock
) -> None:
    executor = NarrowExecutor(most_tokens)
    async with fake_engine(executor, max_num_seqs=8, max_num_batched_tokens=64) as engine:
        async with trio.open_nursery() as nursery:
            for length in (2, 3, 5, 8, 30, 4, 6, 7):
                nursery.start_soon(ask, engine, [length] * length)
        assert engine.statistics().num_preemptions > 0
        assert engine.statistics().num_restarts == 0
        assert_all_blocks_back(engine)
    assert 0 < executor.num_misfits < 60
    assert executor.num_lives == 1


async def test_one_that_can_never_fit_gets_one_clear_error_and_the_others_their_answers(
    autojump_clock: MockClock,
) -> None:
    async with fake_engine(NarrowExecutor(1000), max_num_seqs=8, max_num_batched_tokens=64) as engine:
        async with trio.open_nursery() as nursery:
            for length in (2, 3, 5, 8):
                nursery.start_soon(ask, engine, [length] * length)
            with pytest.raises(
                RequestFailed, match="there is no memory for even one token of it alone: planted"
            ):
                await engine.complete([49] * 20, SamplingParams(max_tokens=NUM_TOKENS, seed=1))
        assert engine.statistics().num_restarts == 0
        assert_all_blocks_back(engine)


# ------------------------------------------------------------------- no memory for a single token


@pytest.mark.parametrize("when", [1, 9])
async def test_a_process_without_memory_for_one_token_is_replaced_and_no_stream_is_lost(
    when: int, tmp_path: Path
) -> None:
    assert await ask_six(executor_that("lose_memory", when, tmp_path / "mark")) == 1


async def test_what_has_no_memory_for_a_step_of_one_token_says_so() -> None:
    executor = executor_that("lose_memory", 2)
    async with executor.running():
        await executor.start(ignore)
        await executor.execute(first_step(), unexpected)
        with pytest.raises(
            ResourceShortage, match=r"a shortage of memory for a step of one token \(planted\)"
        ):
            await executor.execute(second_step(), unexpected)


async def test_a_step_of_one_token_that_only_follows_one_without_memory_ends_no_process() -> None:
    executor = executor_that("ahead", "lack_memory", 1)
    again = StepPlan(3, (), (), (PlanRow(0, 0, 3, (), sample=True),))
    async with executor.running():
        await executor.start(ignore)
        results = [await executor.execute(plan, unexpected) for plan in (first_step(), step_ahead(2), again)]
    assert [result.out_of_memory for result in results] == ["planted", "the step before found none", None]


class ShortExecutor(FakeExecutor):
    """Lacks memory in every seventh step, and in all with a prompt that begins with 49."""

    def __init__(self) -> None:
        super().__init__(num_blocks=128, block_size=4)
        self.num_steps = 0

    async def compute(self, plan: StepPlan) -> StepResult:
        result = await super().compute(plan)
        self.num_steps += 1
        prompts = [self.model.rows[row.row_id].start.prompt_token_ids for row in plan.rows]
        if self.num_steps % 7 == 0 or any(prompt[0] == 49 for prompt in prompts):
            raise ResourceShortage("memory", "a step of one token")
        return result


async def test_shortages_with_progress_between_them_never_end_an_engine(autojump_clock: MockClock) -> None:
    async with fake_engine(ShortExecutor(), max_num_seqs=2) as engine:
        async with trio.open_nursery() as nursery:
            for length in range(1, 17):
                nursery.start_soon(ask, engine, [length] * length)
        assert engine.statistics().num_restarts > 10  # more than crashes in so short a time may be
        engine.check_health()
        assert_all_blocks_back(engine)


async def test_a_request_that_finds_no_memory_in_any_process_fails_alone_with_a_typed_error(
    autojump_clock: MockClock,
) -> None:
    async with fake_engine(ShortExecutor(), max_num_seqs=8, max_num_batched_tokens=64) as engine:
        async with trio.open_nursery() as nursery:
            for length in (2, 3, 5, 8):
                nursery.start_soon(ask, engine, [length] * length)
            with pytest.raises(ResourceShortage, match="memory for request mine, also when computed alone"):
                await engine.complete(
                    [49] * 20, SamplingParams(max_tokens=NUM_TOKENS, seed=1), request_id="mine"
                )
        await trio.sleep(0.2)  # the failure is told before the runner is back
        engine.check_health()
        assert_all_blocks_back(engine)
