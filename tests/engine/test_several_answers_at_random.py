"""Many requests for several answers each, in too few blocks, with aborts, deadlines and actors that crash."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import trio

from tests.actors.harness import STEP_S, FakeExecutor, answer_of, assert_all_blocks_back, fake_engine
from tests.scale import one_in
from triolet import RequestOutputKind, SamplingParams
from triolet.core.journal import Journal, JournalEntry
from triolet.core.request.request import FinishReason
from triolet.core.scheduling.scheduler import Scheduler
from triolet.engine.engine import Engine

NUM_SEEDS = 60
NUM_CLIENTS = 12
CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
COMMIT, CLOSE, APPLY = Journal.commit, Journal.close, Scheduler.apply


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


@pytest.mark.parametrize("seed", one_in(2, range(NUM_SEEDS)))
async def test_whatever_happens_every_answer_is_its_own(seed: int, autojump_clock: trio.abc.Clock) -> None:
    draw = random.Random(seed)
    executor = FakeExecutor(num_blocks=draw.randint(9, 20), block_size=4)
    fields: dict[str, Any] = {
        "enable_prefix_caching": draw.random() < 0.7,
        "max_num_seqs": draw.randint(1, 6),
    }
    with planted(executor, draw):
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


@contextmanager
def planted(executor: FakeExecutor, draw: random.Random) -> Iterator[None]:
    """Up to three crashes: of the runner in a step, or of an actor that has just changed the journal or is about to."""
    places = draw.choices(["step", "before commit", "after commit", "after close"], k=draw.randint(0, 3))
    countdowns = {place: draw.randint(1, 40) for place in places}

    def reach(place: str) -> None:
        countdowns[place] = countdowns.get(place, 0) - 1
        if countdowns[place] == 0:
            raise RuntimeError(f"planted at {place}")

    def commit(journal: Journal, *arguments: Any) -> bool:
        reach("before commit")
        was_committed = COMMIT(journal, *arguments)
        reach("after commit")
        return was_committed

    def apply(scheduler: Scheduler, *arguments: Any) -> None:
        is_applying.append(True)
        try:
            APPLY(scheduler, *arguments)
        finally:
            is_applying.pop()

    def close(journal: Journal, entry: JournalEntry) -> list[int]:
        ended = CLOSE(journal, entry)
        if is_applying:  # in the scheduler's own task, and not in a client's
            reach("after close")
        return ended

    is_applying: list[bool] = []
    executor.before_step = lambda plan: reach("step")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "commit", commit)
        patch.setattr(Journal, "close", close)
        patch.setattr(Scheduler, "apply", apply)
        yield
