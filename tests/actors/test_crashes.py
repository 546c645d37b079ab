"""What an actor's crash costs: a pause."""

from __future__ import annotations

from types import ModuleType

import pytest
import trio
from trio.testing import MockClock

from tests.actors.harness import FakeExecutor, answer_of, assert_all_blocks_back, fake_engine
from triolet import SamplingParams
from triolet.actors import detokenizer, scheduler
from triolet.actors.engine import Engine
from triolet.core.plan import StepPlan
from triolet.errors import EngineDead, InvalidPrompt


class Planted(Exception):
    pass


def crash_in_steps(executor: FakeExecutor, *steps: int) -> None:
    calls = 0

    def before_step(plan: StepPlan) -> None:
        nonlocal calls
        calls += 1
        if calls in steps:
            raise Planted(f"in step {calls}")

    executor.before_step = before_step


async def collect(
    engine: Engine, prompt: list[int], seed: int, num_tokens: int, into: dict[int, tuple[object, object]]
) -> None:
    output = await engine.complete(prompt, SamplingParams(max_tokens=num_tokens, seed=seed))
    into[seed] = (output.outputs[0].token_ids, answer_of(prompt, seed, num_tokens))


@pytest.mark.parametrize("step", range(1, 12))
async def test_streams_go_on_after_a_crash_of_the_runner(step: int, autojump_clock: MockClock) -> None:
    executor = FakeExecutor(num_blocks=64, block_size=4)
    crash_in_steps(executor, step, step + 2)
    answers: dict[int, tuple[object, object]] = {}
    async with fake_engine(executor) as engine:
        async with trio.open_nursery() as nursery:
            for seed in range(6):
                nursery.start_soon(collect, engine, [seed] * (seed + 3), seed, 12, answers)
        assert engine.statistics().num_restarts == 2
        assert_all_blocks_back(engine)
    assert executor.num_lives == 3
    assert len(answers) == 6
    assert all(got == expected for got, expected in answers.values())


@pytest.mark.parametrize("turn", range(1, 11))
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("module", "name"), [(scheduler, "_take_in"), (detokenizer, "deliver")], ids=["scheduler", "detokenizer"]
)
async def test_streams_go_on_after_a_crash_of_another_actor(
    module: ModuleType,
    name: str,
    when: str,
    turn: int,
    autojump_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = 0
    original = getattr(module, name)

    def planted(*args: object) -> None:
        nonlocal calls
        calls += 1
        if calls == turn and when == "before":
            raise Planted
        original(*args)
        if calls == turn and when == "after":
            raise Planted

    monkeypatch.setattr(module, name, planted)
    answers: dict[int, tuple[object, object]] = {}
    async with fake_engine() as engine:
        async with trio.open_nursery() as nursery:
            for seed in range(3):
                nursery.start_soon(collect, engine, [seed] * (seed + 3), seed, 9, answers)
        assert engine.statistics().num_restarts == 1
        assert_all_blocks_back(engine)
    assert len(answers) == 3
    assert all(got == expected for got, expected in answers.values())


async def test_past_the_roots_patience_every_stream_gets_the_real_cause(autojump_clock: MockClock) -> None:
    executor = FakeExecutor(num_blocks=64, block_size=4)
    crash_in_steps(executor, *range(1, 100))
    async with fake_engine(executor) as engine:
        async with engine.generate([1, 2, 3], SamplingParams(max_tokens=5)) as stream:
            with pytest.raises(EngineDead, match="gave up") as caught:
                await stream.text()
        assert isinstance(caught.value.__cause__, Planted)
        with pytest.raises(EngineDead):
            await engine.complete([1], SamplingParams(max_tokens=1))
        assert engine.statistics().num_requests_live == 0
    assert executor.num_lives == 4 * 6


async def test_a_tokenizer_panic_fails_one_request_and_no_other(autojump_clock: MockClock) -> None:
    async with fake_engine() as engine, trio.open_nursery() as nursery:
        answers: dict[int, tuple[object, object]] = {}
        nursery.start_soon(collect, engine, [1, 2], 1, 10, answers)
        with pytest.raises(InvalidPrompt, match="could not be tokenized"):
            await engine.complete("panic", SamplingParams(max_tokens=1))
        await engine.complete("FINE", SamplingParams(max_tokens=1))
    assert answers[1][0] == answers[1][1]
