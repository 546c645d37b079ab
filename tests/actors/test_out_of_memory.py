"""When memory runs out in a step, the largest waits and the others go on; nothing is restarted for that."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from tests.actors.harness import FakeExecutor, answer_of, assert_all_blocks_back, fake_engine
from triolet import SamplingParams
from triolet.core.load_progress import OnProgress
from triolet.core.request.model_info import ModelInfo
from triolet.core.step_plan import StepPlan, StepResult
from triolet.engine.engine import Engine
from triolet.errors import RequestFailed

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
