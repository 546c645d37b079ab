"""Many requests for several answers each, in too few blocks, with aborts, deadlines and a runner that crashes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import trio

from tests.actors.harness import STEP_S, FakeExecutor, answer_of, assert_all_blocks_back, fake_engine
from triolet import RequestOutputKind, SamplingParams
from triolet.actors.engine import Engine
from triolet.core.outputs import FinishReason

NUM_SEEDS = 40
NUM_CLIENTS = 12
CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


class Client:
    """Asks once; what it has read is held against what the model answers."""

    def __init__(self, engine: Engine, name: str, draw: random.Random) -> None:
        self.engine, self.name = engine, name
        common = list(range(draw.choice([0, 3, 9])))
        self.prompt = common + [draw.randrange(50) for _ in range(draw.randint(1, 9))]
        self.n = draw.randint(1, 4)
        self.seed = draw.randrange(1000)
        self.max_tokens = draw.randint(1, 12)
        self.kind = draw.choice([CUMULATIVE, DELTA, FINAL_ONLY])
        self.start_s = draw.random() * 20 * STEP_S
        self.patience_s = draw.choice([float("inf"), draw.random() * 30 * STEP_S])
        self.abort_s = draw.choice([float("inf"), draw.random() * 30 * STEP_S])
        self.token_ids: dict[int, tuple[int, ...]] = {}
        self.reasons: dict[int, FinishReason] = {}
        self.num_finished = 0

    async def run(self) -> None:
        await trio.sleep(self.start_s)
        params = SamplingParams(
            n=self.n, seed=self.seed, max_tokens=self.max_tokens, output_kind=self.kind, logprobs=None
        )
        with trio.move_on_after(self.patience_s):
            async with self.engine.generate(self.prompt, params, request_id=self.name) as stream:
                async for output in stream:
                    assert not self.num_finished, "an output came after the last one"
                    self.num_finished += output.finished
                    for answer in output.outputs:
                        before = self.token_ids.get(answer.index, ()) if self.kind is DELTA else ()
                        self.token_ids[answer.index] = (*before, *answer.token_ids)
                        if answer.finish_reason is not None:
                            self.reasons[answer.index] = answer.finish_reason

    async def abort(self) -> None:
        if self.abort_s < float("inf"):
            await trio.sleep(self.start_s + self.abort_s)
            self.engine.abort(self.name)

    def check(self) -> None:
        for index, token_ids in self.token_ids.items():
            whole = answer_of(self.prompt, self.seed + index, self.max_tokens)
            assert token_ids == whole[: len(token_ids)]
            if self.reasons.get(index) is FinishReason.LENGTH:
                assert token_ids == whole
        if self.num_finished:
            assert set(self.reasons) == set(range(self.n))
        elif self.patience_s == float("inf"):
            raise AssertionError("a reader that waited got no last output")


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
async def test_whatever_happens_every_answer_is_its_own(seed: int, autojump_clock: trio.abc.Clock) -> None:
    draw = random.Random(seed)
    executor = FakeExecutor(num_blocks=draw.randint(9, 20), block_size=4)
    crashes = {draw.randint(1, 60) for _ in range(draw.randint(0, 3))}

    def crash(plan: object) -> None:
        if len(executor.plans) in crashes:
            raise RuntimeError("planted")

    executor.before_step = crash
    fields: dict[str, Any] = {"enable_prefix_caching": draw.random() < 0.7, "max_num_seqs": draw.randint(1, 6)}
    async with fake_engine(executor, **fields) as engine:
        clients = [Client(engine, f"r{number}", draw) for number in range(NUM_CLIENTS)]
        async with trio.open_nursery() as nursery:
            for client in clients:
                nursery.start_soon(client.run)
                nursery.start_soon(client.abort)
        for client in clients:
            client.check()
        await trio.sleep(2 * STEP_S)
        assert_all_blocks_back(engine)
        statistics = engine.statistics()
        assert statistics.num_requests_received == sum(statistics.num_requests_ended.values())
