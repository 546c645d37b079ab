"""Several tokens of a request in one step: a client that reads, leaves or outlives a crash sees no difference."""

from __future__ import annotations

import random
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.actors.harness import FakeExecutor, assert_all_blocks_back, fake_engine
from tests.core.fake_model import REPETITIVE
from triolet import CompletionOutput, RequestOutputKind, SamplingParams
from triolet.core.step_plan import StepPlan
from triolet.engine.engine import Engine
from triolet.observability.prometheus import Metrics

CIRCLE = [1, 4, 6, 5, 2, 0]  # BEGFCA
DRAFTS: dict[str, Any] = {"speculative": "ngram", "prompt_lookup_min": 2}


def params_of(seed: int, **fields: Any) -> SamplingParams:
    return SamplingParams(seed=REPETITIVE + seed, **({"max_tokens": 40} | fields))


@pytest.mark.parametrize(
    "fields", [{}, {"stop": ["GF"]}, {"stop": ["CAB"], "include_stop_str_in_output": True}]
)
@pytest.mark.parametrize("hold_back", ["exact", "blind"])
async def test_a_stop_string_amid_the_tokens_of_a_step_ends_the_answer_there(
    fields: dict[str, Any], hold_back: str, autojump_clock: MockClock
) -> None:
    answers, steps = [], []
    for settings in ({}, DRAFTS):
        async with fake_engine(hold_back=hold_back, **settings) as engine:
            outputs = [await engine.complete(CIRCLE * 2, params_of(seed, **fields)) for seed in range(6)]
            answers.append([output.outputs for output in outputs])
            steps.append(engine.statistics().steps)
            await trio.sleep(1)  # a stop string is found while the next step is under way
            assert_all_blocks_back(engine)
    assert answers[0] == answers[1]
    assert steps[1] < steps[0]


async def test_a_stream_brings_all_tokens_of_a_step_in_one_output(autojump_clock: MockClock) -> None:
    params = params_of(0, output_kind=RequestOutputKind.DELTA)
    async with fake_engine(**DRAFTS) as engine, engine.generate(CIRCLE * 2, params) as stream:
        sizes = [len(output.outputs[0].token_ids) async for output in stream]
    assert sum(sizes) == 40
    assert max(sizes) > 2


async def test_the_statistics_and_the_metrics_tell_what_came_of_drafts(autojump_clock: MockClock) -> None:
    async with fake_engine(**DRAFTS) as engine:
        metrics = Metrics(engine)
        output = await engine.complete(CIRCLE * 2, params_of(0))
        now = engine.statistics()
        text = metrics.render().decode()
    num_right = now.spec_decode_num_accepted_tokens
    assert now.steps == len(output.outputs[0].token_ids) - num_right
    assert 0 < num_right <= now.spec_decode_num_draft_tokens
    assert sum(now.spec_decode_num_accepted_tokens_per_pos) == num_right
    assert (
        f'spec_decode_num_accepted_tokens_total{{engine="0",model_name="triolet-nano"}} {num_right}.0' in text
    )
    for position, count in enumerate(now.spec_decode_num_accepted_tokens_per_pos):
        assert (
            f'per_pos_total{{engine="0",model_name="triolet-nano",position="{position}"}} {count}.0' in text
        )


async def _answer(engine: Engine, place: int, num_read: int | None) -> dict[int, CompletionOutput] | None:
    """What a reader gets that stays to the end, and nothing of one that leaves after so many outputs."""
    last: dict[int, CompletionOutput] = {}
    params = params_of(place, n=1 + place % 2, max_tokens=10 + place % 30)
    async with engine.generate((CIRCLE * 3)[place % 6 :], params) as stream:
        async for output in stream:
            last |= {answer.index: answer for answer in output.outputs}
            if num_read is not None and (num_read := num_read - 1) < 0:
                break
    return last if num_read is None else None


async def _answers(readers: list[int | None], executor: FakeExecutor, **settings: Any) -> list[Any]:
    answers: list[Any] = [None] * len(readers)
    async with fake_engine(executor, **settings) as engine:

        async def read(place: int) -> None:
            await trio.sleep(place % 7 * 0.01)
            answers[place] = await _answer(engine, place, readers[place])

        async with trio.open_nursery() as nursery:
            for place in range(len(readers)):
                nursery.start_soon(read, place)
        await trio.sleep(1)
        assert_all_blocks_back(engine)
    return answers


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
async def test_crashes_preemptions_and_leavers_change_no_answer(
    policy: str, autojump_clock: MockClock
) -> None:
    dice = random.Random(3)
    readers = [dice.choice([None, None, dice.randrange(12)]) for _ in range(40)]
    plain = await _answers(readers, FakeExecutor(num_blocks=64, block_size=4))
    executor = FakeExecutor(num_blocks=26, block_size=4)
    crashing = {17, 60, 61}

    def crash(plan: StepPlan) -> None:
        if plan.step_id in crashing:
            raise RuntimeError("planted")

    executor.before_step = crash
    tried = await _answers(readers, executor, policy=policy, max_num_batched_tokens=24, **DRAFTS)
    assert tried == plain
    assert sum(answer is not None for answer in plain) == readers.count(None)
    assert executor.num_lives == 1 + len(crashing)
    assert max(len(row.draft_token_ids) for plan in executor.plans for row in plan.rows) == 4
