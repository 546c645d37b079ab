"""Several replicas in one engine: the death of one costs its streams a prefill, and nothing else anything."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import attrs
import pytest
import trio
from trio.testing import MockClock

from tests.actors.executors.fake_worker import POISON
from tests.actors.harness import (
    STEP_S,
    FakeExecutor,
    LetterTokenizer,
    _checked_scheduler,
    answer_of,
)
from triolet import SamplingParams
from triolet.config.engine import EngineConfig
from triolet.core import engine_core
from triolet.core.load_progress import OnProgress
from triolet.core.replicas.replicated_core import ABSENCE_S, ReplicatedCore
from triolet.core.request.model_info import ModelInfo
from triolet.core.step_plan import StepPlan, StepResult
from triolet.core.worker_call import WorkerCall, WorkerOutcome
from triolet.engine.engine import Engine
from triolet.engine.open_engine import run_engine
from triolet.errors import (
    EngineDead,
    EngineUnhealthy,
    InvariantViolated,
    RequestFailed,
    RunnerDied,
    UnsupportedFeature,
)

NUM_TOKENS = 12
LOAD_S = 1.0  # of a replica's model


def killed() -> RunnerDied:
    return RunnerDied("was ended by SIGKILL", -9)


def segfault() -> RunnerDied:
    return RunnerDied("was ended by SIGSEGV", -11)


def lost() -> RunnerDied:
    return RunnerDied("cannot be reached any more", None, is_lost=True)


class MortalExecutor(FakeExecutor):
    """A fake model that takes a second to load; it dies when it is told to, and of the poison."""

    def __init__(self, num_blocks: int = 256) -> None:
        super().__init__(num_blocks, block_size=4)
        self.death: BaseException | None = None
        self.poison: int | None = None
        self.cannot_load = False
        self.comes_back = True
        self.hang: trio.Event | None = None
        self.step_times: list[float] = []
        self.died_s: list[float] = []

    async def start(self, on_progress: OnProgress) -> ModelInfo:
        await trio.sleep(LOAD_S if self.comes_back else math.inf)
        if self.cannot_load:
            raise RunnerDied("found no device", 1)
        return await super().start(on_progress)

    async def call(self, call: WorkerCall, limit_s: float | None) -> WorkerOutcome:
        await trio.lowlevel.checkpoint()
        return WorkerOutcome(id(self.model))

    async def compute(self, plan: StepPlan) -> StepResult:
        result = await super().compute(plan)
        if self.hang is not None:
            await self.hang.wait()
        firsts = [self.model.rows[planned.row_id].start.prompt_token_ids[:1] for planned in plan.rows]
        if self.poison is not None and (self.poison,) in firsts:
            self.died_s.append(trio.current_time())
            raise segfault()
        if self.death is not None:
            death, self.death = self.death, None
            self.died_s.append(trio.current_time())
            raise death
        self.step_times.append(trio.current_time())
        return result


@asynccontextmanager
async def replicated_engine(executors: Sequence[FakeExecutor], **fields: object) -> AsyncGenerator[Engine]:
    """An engine over fake models, one for each replica, whose counts are checked after every step."""
    config = EngineConfig.create(
        EngineConfig(
            runner="inline",
            replicas=len(executors),
            max_num_seqs=16,
            max_num_batched_tokens=64,
            block_size=4,
        ),
        **fields,
    )
    violations: list[InvariantViolated] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_core, "Scheduler", _checked_scheduler(violations))
        async with run_engine(config, executors[0], LetterTokenizer, *executors[1:]) as engine:
            yield engine
            core = core_of(engine)
            core.table.check()
            assert not core.journal
            assert engine.statistics().kv_blocks_in_use == 0
    assert violations == []


def core_of(engine: Engine) -> ReplicatedCore:
    assert isinstance(engine._core, ReplicatedCore)
    return engine._core


def living(engine: Engine) -> list[bool]:
    return [each.is_living for each in engine.statistics().replicas]


async def ask(engine: Engine, number: int, prompt: list[int], num_tokens: int = NUM_TOKENS) -> None:
    output = await engine.complete(prompt, SamplingParams(max_tokens=num_tokens, seed=number))
    assert output.outputs[0].token_ids == answer_of(prompt, number, num_tokens)


def prompt_of(number: int) -> list[int]:
    return [20, number % 40, *range(number % 40, number % 40 + 5)]


@pytest.mark.parametrize("num_replicas", [2, 3])
async def test_replicas_share_the_requests_and_answer_as_one(
    num_replicas: int, autojump_clock: MockClock
) -> None:
    executors = [MortalExecutor() for _ in range(num_replicas)]
    async with replicated_engine(executors) as engine:
        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(ask, engine, number, prompt_of(number))
        statistics = engine.statistics()
    assert statistics.steps == sum(each.steps for each in statistics.replicas)
    assert min(each.steps for each in statistics.replicas) >= NUM_TOKENS
    assert statistics.kv_blocks_total == 256 * num_replicas


async def test_a_prompt_goes_where_its_beginning_is_cached(autojump_clock: MockClock) -> None:
    executors = [MortalExecutor(), MortalExecutor()]
    prompts = [[number] * 24 for number in (1, 2)]
    async with replicated_engine(executors) as engine:
        async with trio.open_nursery() as nursery:
            for number, prompt in enumerate(prompts):
                nursery.start_soon(ask, engine, number, prompt)
        before = engine.statistics()
        assert [each.steps > 0 for each in before.replicas] == [True, True]
        for number in range(2, 8):
            await ask(engine, number, [*prompts[number % 2], 30 + number])
        after = engine.statistics()
    assert after.prefix_cache_hits - before.prefix_cache_hits == 6 * 24


async def test_streams_of_a_replica_that_is_killed_go_on_at_the_other_at_once(
    autojump_clock: MockClock,
) -> None:
    executors = [MortalExecutor(), MortalExecutor()]
    async with replicated_engine(executors) as engine:
        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(ask, engine, number, prompt_of(number), 40)
            await trio.sleep(8.5 * STEP_S)
            began_s = trio.current_time()
            executors[0].death = killed()
            await trio.sleep(2 * STEP_S)
            assert living(engine) == [False, True]
            assert engine.statistics().num_moved_requests == 5
        # 40 tokens and a prefill, and no wait for the other's load
        assert trio.current_time() - began_s < 60 * STEP_S < LOAD_S
        statistics = engine.statistics()
        await trio.sleep(2 * LOAD_S)
        assert living(engine) == [True, True]
        await ask(engine, 99, prompt_of(99))
    assert statistics.restarts == {("model_runner", "exit"): 1}
    gaps = [
        after - before
        for before, after in zip(executors[1].step_times, executors[1].step_times[1:], strict=False)
    ]
    assert max(gaps[:-1]) == pytest.approx(STEP_S), "the other's streams have not waited"


ROW_S, TOKEN_S = STEP_S / 10, STEP_S / 20  # that a row, and a further token of a prompt, add to a step


class MeasuredExecutor(MortalExecutor):
    """A fake model whose steps take longer with rows and with prompts, and say so.

    Attributes:
        lengthened: by step, the factor by which prompts have lengthened it.
    """

    def __init__(self) -> None:
        super().__init__(1024)
        self.lengthened: list[float] = []

    async def compute(self, plan: StepPlan) -> StepResult:
        decodes_s = STEP_S + ROW_S * len(plan.rows)
        further_s = TOKEN_S * (plan.num_tokens - len(plan.rows))
        await trio.sleep(decodes_s + further_s - STEP_S)
        result = await super().compute(plan)
        self.lengthened.append(1 + further_s / decodes_s)
        return attrs.evolve(result, elapsed_s=decodes_s + further_s)


async def test_streams_that_have_moved_at_most_double_the_steps_of_the_others_until_they_go_on(
    autojump_clock: MockClock,
) -> None:
    executors = [MeasuredExecutor(), MeasuredExecutor()]
    async with (
        replicated_engine(executors, max_num_batched_tokens=1024, max_num_seqs=32) as engine,
        trio.open_nursery() as nursery,
    ):
        for number in range(16):
            nursery.start_soon(ask, engine, number, prompt_of(number), 80)
            await trio.sleep(2 * STEP_S)
        num_steps = len(executors[1].lengthened)
        executors[0].death = killed()
        await trio.sleep(4 * STEP_S)
        num_moved = engine.statistics().num_moved_requests
    assert num_moved >= 7
    # together they have more than 100 tokens, and a step of 8 decodes takes as long as 36
    lengthened = executors[1].lengthened[num_steps:]
    assert max(lengthened) <= 2.1
    assert sum(each > 1.2 for each in lengthened) >= 3


async def test_a_poisoned_request_takes_down_one_replica_only_and_is_convicted(
    autojump_clock: MockClock,
) -> None:
    executors = [MortalExecutor(), MortalExecutor()]
    for executor in executors:
        executor.poison = POISON
    async with replicated_engine(executors) as engine:

        async def fail() -> None:
            with pytest.raises(RequestFailed, match="crashes the model runner, also when computed alone"):
                await engine.complete([POISON, 1, 2], SamplingParams(max_tokens=NUM_TOKENS))

        async with trio.open_nursery() as nursery:
            for number in range(16):
                nursery.start_soon(ask, engine, number, prompt_of(number))
            nursery.start_soon(fail)
        await trio.sleep(3 * LOAD_S)
        assert living(engine) == [True, True]
    deaths = sorted(len(executor.died_s) for executor in executors)
    assert deaths[0] == 0, "a suspect is tried on one replica"
    assert 2 <= deaths[1] <= 6


async def test_new_requests_do_not_wait_for_a_replica_that_looks_for_poison(
    autojump_clock: MockClock,
) -> None:
    executors = [MortalExecutor(), MortalExecutor()]
    async with replicated_engine(executors) as engine:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, engine, 0, prompt_of(0), 40)
            await trio.sleep(5.5 * STEP_S)
            executors[0].death = segfault()
            await trio.sleep(2 * STEP_S)
            assert living(engine) == [False, True]
            began_s = trio.current_time()
            for number in range(1, 5):
                await ask(engine, number, prompt_of(number))
            assert trio.current_time() - began_s < LOAD_S / 2
            assert engine.statistics().num_moved_requests == 0, "the suspect waits for its replica"


async def test_a_request_that_is_killed_twice_is_a_suspect(autojump_clock: MockClock) -> None:
    executors = [MortalExecutor(), MortalExecutor()]
    async with replicated_engine(executors) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(ask, engine, 0, prompt_of(0), 40)
        await trio.sleep(5.5 * STEP_S)
        executors[0].death = killed()
        executors[1].death = killed()
        await trio.sleep(3 * STEP_S)
        assert living(engine) == [False, False]
        assert engine.statistics().num_moved_requests == 1
        await trio.sleep(LOAD_S / 2)


async def test_an_engine_lives_as_long_as_one_replica_can_be_started(autojump_clock: MockClock) -> None:
    executors = [MortalExecutor(), MortalExecutor()]
    async with replicated_engine(executors) as engine:
        executors[0].cannot_load, executors[0].death = True, segfault()
        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(ask, engine, number, prompt_of(number))
        await trio.sleep(30)
        assert living(engine) == [False, True]
        engine.check_health()
        await ask(engine, 7, prompt_of(7))
        executors[0].cannot_load = False
        await trio.sleep(30)
        assert living(engine) == [True, True]


async def test_suspects_of_a_replica_that_cannot_be_started_go_to_another_one(
    autojump_clock: MockClock,
) -> None:
    executors = [MortalExecutor(), MortalExecutor()]
    async with replicated_engine(executors) as engine:
        executors[0].cannot_load, executors[0].death = True, segfault()
        with trio.fail_after(30):
            await ask(engine, 0, prompt_of(0))
        assert engine.statistics().num_moved_requests == 1
        assert living(engine) == [False, True]


async def test_streams_of_a_machine_that_is_gone_for_good_go_on_at_once(autojump_clock: MockClock) -> None:
    executors = [MortalExecutor(), MortalExecutor()]
    async with replicated_engine(executors) as engine:
        executors[0].comes_back, executors[0].death = False, lost()
        began_s = trio.current_time()
        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(ask, engine, number, prompt_of(number))
        assert trio.current_time() - began_s < LOAD_S
        assert engine.statistics().num_moved_requests == 5
        assert living(engine) == [False, True]


@pytest.mark.parametrize("num_lost", [1, 2])
async def test_suspects_of_a_replica_that_does_not_come_back_go_on_after_half_a_minute(
    num_lost: int, autojump_clock: MockClock
) -> None:
    """What was with one machine that is lost and then with another is a suspect, too."""
    executors = [MortalExecutor() for _ in range(1 + num_lost)]
    async with replicated_engine(executors) as engine:
        for executor in executors[:num_lost]:
            executor.comes_back, executor.death = False, segfault() if num_lost == 1 else lost()
        began_s = trio.current_time()
        await ask(engine, 0, prompt_of(0))
        assert ABSENCE_S <= trio.current_time() - began_s < ABSENCE_S + 3
        assert engine.statistics().num_moved_requests == num_lost
        assert living(engine) == [*[False] * num_lost, True]


@pytest.mark.parametrize("num_living", [0, 1])
async def test_deadlines_of_what_no_replica_computes_hold(num_living: int, autojump_clock: MockClock) -> None:
    executors = [MortalExecutor(), MortalExecutor()]
    for executor in executors[num_living:]:
        executor.death = segfault()
    ended_s = list[float]()

    async def be_late(deadline: float) -> None:
        output = await engine.complete(prompt_of(1), SamplingParams(max_tokens=900), deadline=deadline)
        assert output.finish_reason == "deadline"
        ended_s.append(trio.current_time())

    async with replicated_engine(executors) as engine:
        for executor in executors:
            executor.comes_back = False
        began_s = trio.current_time()
        async with trio.open_nursery() as nursery:
            for number in range(6):  # before the 9 s that 900 tokens take where a replica lives
                nursery.start_soon(be_late, began_s + 2 + number)
            await trio.sleep(1)
            assert living(engine) == [*[True] * num_living, *[False] * (2 - num_living)]
    assert ended_s == pytest.approx([began_s + 2 + number for number in range(6)], abs=2 * STEP_S)


async def test_an_engine_of_which_no_replica_can_be_started_is_dead(autojump_clock: MockClock) -> None:
    executors = [MortalExecutor(), MortalExecutor()]
    with pytest.raises(EngineDead):  # noqa: PT012  the scope itself raises it, at its end
        async with run_engine(
            EngineConfig(runner="inline", replicas=2), executors[0], LetterTokenizer, executors[1]
        ) as engine:
            for executor in executors:
                executor.cannot_load, executor.death = True, segfault()

            async def fail(number: int) -> None:
                with pytest.raises(EngineDead, match="found no device"):
                    await engine.complete(prompt_of(number), SamplingParams(max_tokens=NUM_TOKENS))

            async with trio.open_nursery() as nursery:
                for number in range(4):
                    nursery.start_soon(fail, number)
            raise engine.death or AssertionError("it lives")


async def test_answers_that_waited_for_a_first_token_are_dispatched_then(autojump_clock: MockClock) -> None:
    executors = [MortalExecutor(), MortalExecutor()]
    async with replicated_engine(executors) as engine:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, engine, 5, prompt_of(5), 40)
            output = await engine.complete(
                prompt_of(1), SamplingParams(n=6, max_tokens=NUM_TOKENS, seed=3, temperature=1.0)
            )
        assert len({one.token_ids for one in output.outputs}) == 6
        assert all(len(one.token_ids) == NUM_TOKENS for one in output.outputs)


async def test_aborts_end_requests_wherever_they_are(autojump_clock: MockClock) -> None:
    executors = [MortalExecutor(), MortalExecutor()]
    async with replicated_engine(executors) as engine:
        async with trio.open_nursery() as nursery:
            for number in range(12):
                nursery.start_soon(_abort_later, engine, number)
            await trio.sleep(6.5 * STEP_S)
            executors[0].death = segfault()
            executors[1].death = killed()
        await trio.sleep(2 * LOAD_S)
        assert living(engine) == [True, True]
        await ask(engine, 3, prompt_of(3))


async def _abort_later(engine: Engine, number: int) -> None:
    with trio.move_on_after(number * 1.5 * STEP_S):
        await ask(engine, number, prompt_of(number), 40)


async def test_what_would_have_to_hold_for_all_replicas_at_once_is_refused(autojump_clock: MockClock) -> None:
    async with replicated_engine([MortalExecutor(), MortalExecutor()]) as engine:
        for call in (engine.pause_generation, engine.sleep):
            with pytest.raises(UnsupportedFeature, match="is not offered with replicas above 1; got 2"):
                await call()
        with pytest.raises(
            UnsupportedFeature, match="reload_weights is not offered with replicas above 1; got 2"
        ):
            await engine.reload_weights("/nowhere")
        with pytest.raises(
            UnsupportedFeature, match="update_weights is not offered with replicas above 1; got 2"
        ):
            await engine.update_weights({})


async def test_a_call_into_the_workers_is_made_by_all_replicas(autojump_clock: MockClock) -> None:
    executors = [MortalExecutor(), MortalExecutor()]
    async with replicated_engine(executors) as engine:
        assert await engine.apply_model(id) == [id(executor.model) for executor in executors]


async def test_an_engine_is_unhealthy_only_when_no_replica_makes_steps(autojump_clock: MockClock) -> None:
    executors = [MortalExecutor(), MortalExecutor()]
    hang = trio.Event()
    async with replicated_engine(executors, step_timeout=5.0) as engine, trio.open_nursery() as nursery:
        try:
            for number in range(2):
                nursery.start_soon(ask, engine, number, prompt_of(number), 60)
            await trio.sleep(5.5 * STEP_S)
            executors[0].hang = hang
            await trio.sleep(0.3)
            for number in range(2, 8):  # with time the one that hangs becomes dearer than any other
                nursery.start_soon(ask, engine, number, prompt_of(number))
                await trio.sleep(1)
            engine.check_health()
            await trio.sleep(6)
            with pytest.raises(EngineUnhealthy):
                engine.check_health()
        finally:
            executors[0].hang = None
            hang.set()
