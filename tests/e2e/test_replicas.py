"""Two replicas in processes of their own: a kill of either costs its streams a prefill, and no token."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Sequence

import pytest
import trio

import triolet
from triolet import Engine, SamplingParams
from triolet.core.replicas.replicated_core import ReplicatedCore

NUM_STREAMS, NUM_TOKENS, NUM_KILLS = 8, 60, 2


async def answers_of(engine: Engine) -> list[Sequence[int]]:
    answers: dict[int, Sequence[int]] = {}

    async def ask(index: int) -> None:
        params = SamplingParams(
            temperature=0.9 if index % 2 else 0.0, seed=index, max_tokens=NUM_TOKENS, ignore_eos=True
        )
        output = await engine.complete(f"Tell me about the number {index}.", params)
        answers[index] = output.outputs[0].token_ids

    async with trio.open_nursery() as nursery:
        for index in range(NUM_STREAMS):
            nursery.start_soon(ask, index)
    return [answers[index] for index in range(NUM_STREAMS)]


@pytest.mark.slow
async def test_kills_of_one_replica_after_the_other_change_no_answer() -> None:
    draw = random.Random(3)
    async with triolet.open_engine(device="cpu", dtype="float32") as engine:
        expected = await answers_of(engine)
    async with triolet.open_engine(device="cpu", dtype="float32", replicas=2) as engine:
        core = engine._core
        assert isinstance(core, ReplicatedCore)
        for number in range(NUM_KILLS):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_kill, engine, core, number % 2, draw.randrange(2, NUM_TOKENS // 2))
                assert await answers_of(engine) == expected
            async for restarting in engine.follow_restarts():
                if not restarting and engine.statistics().num_restarts == number + 1:
                    break
        statistics = engine.statistics()
    assert statistics.restarts == {("model_runner", "exit"): NUM_KILLS}
    assert statistics.num_moved_requests > 0


async def _kill(engine: Engine, core: ReplicatedCore, replica: int, num_steps: int) -> None:
    """Kill the process of a replica once it has computed so many more steps."""
    until = engine.statistics().replicas[replica].steps + num_steps
    while engine.statistics().replicas[replica].steps < until:  # noqa: ASYNC110 - it tells of no step
        await trio.sleep(0.001)
    info = core.replicas[replica].model.info
    assert info is not None
    assert info.process_id is not None
    os.kill(info.process_id, signal.SIGKILL)
