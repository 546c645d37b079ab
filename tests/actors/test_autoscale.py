"""Replicas that come with the queue and go when it is gone, on a virtual clock."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace

import attrs
import pytest
import trio
from trio.testing import MockClock

from tests.actors.harness import STEP_S as FAKE_STEP_S
from tests.actors.harness import LetterTokenizer
from tests.actors.test_replicas import LOAD_S, MortalExecutor, ask, core_of, killed, prompt_of, segfault
from triolet.actors.replicas.autoscaler import FurtherReplica
from triolet.config.engine import EngineConfig
from triolet.core.replicas import autoscale
from triolet.core.replicas.autoscale import AutoscalePolicy
from triolet.core.step_plan import StepPlan, StepResult
from triolet.engine import open_engine
from triolet.engine.engine import Engine
from triolet.engine.open_engine import run_engine

ROWS = 8
STEP_S = 0.1
GROW_S, SHRINK_S = autoscale.GROW_S, 8.0


@attrs.define
class FakeSupply:
    """Workers that wait."""

    num_ready: int = 0
    wanted: list[int] = attrs.field(factory=list)  # numbers that were asked for, each once in a row

    def want(self, num_workers: int) -> None:
        if self.wanted[-1:] != [num_workers]:
            self.wanted.append(num_workers)


class WorkerExecutor(MortalExecutor):
    """A slow fake model on a worker that is taken from the supply, and given back."""

    def __init__(self, supply: FakeSupply) -> None:
        super().__init__()
        self._supply = supply

    def supply(self) -> FakeSupply:
        return self._supply

    async def compute(self, plan: StepPlan) -> StepResult:
        await trio.sleep(STEP_S - FAKE_STEP_S)
        return await super().compute(plan)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        self._supply.num_ready -= 1
        try:
            async with super().running():
                yield
        finally:
            self._supply.num_ready += 1


@asynccontextmanager
async def growing_engine(
    supply: FakeSupply, most: int = 3
) -> AsyncGenerator[tuple[Engine, Sequence[WorkerExecutor]]]:
    executors = [WorkerExecutor(supply) for _ in range(most)]
    config = EngineConfig(
        runner="remote",
        autoscale=(1, most),
        step_timeout=None,
        max_num_seqs=ROWS,
        max_num_batched_tokens=64,
        block_size=4,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(open_engine, "AutoscalePolicy", partial(AutoscalePolicy, shrink_s=SHRINK_S))
        async with run_engine(config, executors[0], LetterTokenizer, *executors[1:]) as engine:
            yield engine, executors
            core_of(engine).table.check()
            assert not core_of(engine).journal


def states(engine: Engine) -> list[str]:
    return [
        "lives" if each.is_living else "parked" if each.is_parked else "absent"
        for each in engine.statistics().replicas
    ]


async def until(engine: Engine, wanted: list[str]) -> None:
    with trio.fail_after(15):
        while states(engine) != wanted:  # noqa: ASYNC110 - on a virtual clock
            await trio.sleep(0.05)


@asynccontextmanager
async def long_queue(engine: Engine, num_requests: int = 80, num_tokens: int = 20) -> AsyncGenerator[None]:
    """Requests that are more than the rows of all replicas; all have their answers when the scope ends."""
    async with trio.open_nursery() as nursery:
        for number in range(num_requests):
            nursery.start_soon(ask, engine, number, prompt_of(number), num_tokens)
        yield


async def test_a_worker_beyond_the_least_becomes_a_replica_when_requests_wait_and_leaves_when_they_are_gone(
    autojump_clock: MockClock,
) -> None:
    supply = FakeSupply(num_ready=2)
    async with growing_engine(supply) as (engine, _):
        assert states(engine) == ["lives", "parked", "parked"]
        await ask(engine, 0, prompt_of(0))
        assert states(engine) == ["lives", "parked", "parked"]
        async with long_queue(engine):
            await trio.sleep(GROW_S + LOAD_S + 2)
            assert states(engine) == ["lives", "lives", "parked"]
            assert supply.num_ready == 0
        steps = [each.steps for each in engine.statistics().replicas]
        assert steps[1] > 0
        await trio.sleep(2 * SHRINK_S + 5)
        assert states(engine) == ["lives", "parked", "parked"]
        assert supply.num_ready == 1
        statistics = engine.statistics()
        assert statistics.kv_blocks_total == 256, "a replica that is parked has no KV cache"
        assert statistics.steps == sum(steps), "what it has computed counts on"
        assert statistics.num_moved_requests == statistics.num_restarts == 0
        assert statistics.restarting == ()
        await ask(engine, 1, prompt_of(1))


async def test_a_worker_that_joins_while_requests_wait_is_used(autojump_clock: MockClock) -> None:
    supply = FakeSupply(num_ready=1)
    async with growing_engine(supply) as (engine, _), long_queue(engine):
        await trio.sleep(GROW_S + 3)
        assert states(engine) == ["lives", "parked", "parked"]
        supply.num_ready += 1
        await trio.sleep(LOAD_S + 2)
        assert states(engine) == ["lives", "lives", "parked"]


async def test_a_worker_is_asked_for_while_requests_wait_and_not_wanted_afterwards(
    autojump_clock: MockClock,
) -> None:
    supply = FakeSupply(num_ready=1)
    async with growing_engine(supply, most=2) as (engine, _):
        async with long_queue(engine):
            await trio.sleep(GROW_S + 3)
            assert states(engine) == ["lives", "parked"]
            assert supply.wanted == [1, 2]
            supply.num_ready += 1
            await until(engine, ["lives", "lives"])
        await trio.sleep(SHRINK_S + 5)
        assert supply.wanted == [1, 2, 1]
        assert states(engine) == ["lives", "parked"]


async def test_a_replica_that_is_not_needed_finishes_what_it_has_and_gets_nothing_more(
    autojump_clock: MockClock,
) -> None:
    supply = FakeSupply(num_ready=2)
    async with growing_engine(supply, most=2) as (engine, executors), trio.open_nursery() as nursery:
        async with long_queue(engine):
            await trio.sleep(GROW_S + LOAD_S + 2)
            assert states(engine) == ["lives", "lives"]
        table = core_of(engine).table
        for number in range(50, 54):
            nursery.start_soon(ask, engine, number, prompt_of(number), 20)
        await trio.sleep(2.5 * STEP_S)
        assert min(len(share) for share in table.shares) > 0
        num_held = len(table.shares[1])
        executors[1].hang = trio.Event()
        await trio.sleep(SHRINK_S + 3)
        assert (table.draining, len(table.shares[1])) == ({1}, num_held)
        await ask(engine, 60, prompt_of(60))
        assert states(engine) == ["lives", "lives"]
        executors[1].hang.set()
        executors[1].hang = None
        await trio.sleep(5)
        assert states(engine) == ["lives", "parked"]
        assert engine.statistics().num_moved_requests == 0


async def test_a_queue_that_comes_back_keeps_a_replica_that_was_to_end(autojump_clock: MockClock) -> None:
    supply = FakeSupply(num_ready=2)
    async with growing_engine(supply, most=2) as (engine, executors):
        async with long_queue(engine):
            await trio.sleep(GROW_S + LOAD_S + 2)
        executors[1].hang = trio.Event()
        table = core_of(engine).table
        async with long_queue(engine, num_requests=4):
            await trio.sleep(SHRINK_S + 2)
            assert table.draining == {1}
            async with long_queue(engine):
                await trio.sleep(GROW_S + 2)
                assert table.draining == set()
                executors[1].hang.set()
                executors[1].hang = None
        assert states(engine) == ["lives", "lives"]


async def test_the_death_of_a_further_replica_costs_its_streams_a_prefill_and_it_comes_back(
    autojump_clock: MockClock,
) -> None:
    supply = FakeSupply(num_ready=2)
    async with growing_engine(supply, most=2) as (engine, executors):
        async with long_queue(engine):
            await trio.sleep(GROW_S + LOAD_S + 2)
            executors[1].death = killed()
            await trio.sleep(0.1)
            assert states(engine) == ["lives", "absent"]
            await trio.sleep(LOAD_S + 1)
            assert states(engine) == ["lives", "lives"]
        assert engine.statistics().num_moved_requests > 0


async def test_a_further_replica_that_cannot_be_started_is_given_up_for_a_while_and_nothing_waits_for_it(
    autojump_clock: MockClock,
) -> None:
    supply = FakeSupply(num_ready=2)
    async with growing_engine(supply, most=2) as (engine, executors):
        executors[1].cannot_load = True
        async with long_queue(engine, num_requests=120):
            await until(engine, ["lives", "absent"])
            await until(engine, ["lives", "parked"])
            assert supply.num_ready == 1
            engine.check_health()
            assert engine.statistics().restarting == ()
            executors[1].cannot_load = False
            await until(engine, ["lives", "lives"])


async def test_a_further_replica_that_has_lived_for_long_is_tried_again_as_soon_as_after_its_first_failure(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    lives_s = iter((0.0, 0.0, 0.0, 3600.0, 0.0))

    async def supervise(*, task_status: trio.TaskStatus[None]) -> None:
        await trio.sleep(next(lives_s))
        raise RuntimeError("crashed too often")

    core = SimpleNamespace(replicas=[SimpleNamespace(is_parked=True)], retire=lambda number: None)
    calls = SimpleNamespace(parked={0}, park=lambda number: None)
    replica = FurtherReplica(0, core, supervise, calls, lambda: None)  # type: ignore[arg-type]
    await nursery.start(replica.run)
    pauses_s = []
    for life_s in (1.0, 1.0, 1.0, 3601.0, 1.0):
        replica.begin()
        began_s = trio.current_time()
        await trio.sleep(life_s)
        assert not replica.is_started
        pauses_s.append(round(replica.not_before_s - began_s) % 3600)
    assert pauses_s == [1, 2, 4, 1, 2]


async def test_suspects_of_a_further_replica_that_crashes_again_and_again_go_to_another_one(
    autojump_clock: MockClock,
) -> None:
    supply = FakeSupply(num_ready=2)
    async with growing_engine(supply, most=2) as (engine, executors):
        async with long_queue(engine):
            await trio.sleep(GROW_S + LOAD_S + 2)
            executors[1].cannot_load, executors[1].death = True, segfault()
        assert states(engine)[0] == "lives"


async def test_a_dead_first_replica_is_made_up_for_by_a_worker_that_waits(autojump_clock: MockClock) -> None:
    supply = FakeSupply(num_ready=2)
    async with growing_engine(supply, most=2) as (engine, executors):
        executors[0].cannot_load, executors[0].death = True, segfault()
        with trio.fail_after(60):
            await ask(engine, 0, prompt_of(0))
        assert states(engine) == ["absent", "lives"]


async def test_calls_reach_the_replicas_that_are_there(autojump_clock: MockClock) -> None:
    supply = FakeSupply(num_ready=2)
    async with growing_engine(supply, most=2) as (engine, executors):
        assert await engine.apply_model(id) == [id(executors[0].model)]
        async with long_queue(engine):
            await trio.sleep(GROW_S + LOAD_S + 2)
            assert await engine.apply_model(id) == [id(each.model) for each in executors]


@pytest.mark.parametrize("seed", range(2))
async def test_engines_grow_and_shrink_at_random_and_lose_no_answer(
    seed: int, autojump_clock: MockClock
) -> None:
    draw = random.Random(seed)
    supply = FakeSupply(num_ready=3)
    async with growing_engine(supply) as (engine, executors), trio.open_nursery() as nursery:
        for burst in range(6):
            for number in range(draw.randrange(30)):
                nursery.start_soon(ask, engine, number, prompt_of(number), draw.randrange(1, 40))
            await trio.sleep(draw.random() * 6)
            victim = executors[draw.randrange(3)]
            victim.death = draw.choice([None, killed()])
            await trio.sleep(draw.random() * (16 if burst % 2 else 4))
            victim.death = None
            assert supply.num_ready >= 0
