"""What an actor's crash costs: a pause."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from types import ModuleType
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.actors.harness import (
    STEP_S,
    FakeExecutor,
    LetterTokenizer,
    Panic,
    answer_of,
    assert_all_blocks_back,
    fake_engine,
)
from triolet import SamplingParams
from triolet.actors import detokenizer, scheduler, tokenizer
from triolet.actors.actor_progress import ActorProgress
from triolet.actors.channels import Channels
from triolet.actors.model_runner import PROOF
from triolet.actors.supervisor import ActorStuck, restart_cause
from triolet.actors.tokenizer import ask_tokenizer, tokenizer_actor
from triolet.config.engine import EngineConfig
from triolet.core.engine_core import EngineCore
from triolet.core.load_progress import LoadProgress, OnProgress
from triolet.core.messages import SchedulerMessage, Wake
from triolet.core.output.outputs import RequestOutput
from triolet.core.request.model_info import LoadedModel, ModelInfo
from triolet.core.request.request import FinishReason
from triolet.core.request.tokenizer_interface import Tokenize, Tokenized
from triolet.core.scheduling.budget import SchedulerConfig
from triolet.core.scheduling.scheduler import Scheduler
from triolet.core.step_plan import StepPlan, StepResult
from triolet.engine.engine import Engine
from triolet.engine.open_engine import run_engine
from triolet.engine.token_stream import TokenStream
from triolet.errors import EngineDead, InvalidPrompt, RequestFailed, ResourceShortage, RunnerDied
from triolet.observability.loop_monitor import run_in_thread
from triolet.observability.prometheus import Metrics


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


async def test_every_start_after_the_first_is_counted_also_those_that_fail_while_loading(
    autojump_clock: MockClock,
) -> None:
    class DiesWhileLoading(FakeExecutor):
        num_starts = 0

        async def start(self, on_progress: OnProgress) -> ModelInfo:
            self.num_starts += 1
            if self.num_starts in (2, 3):
                raise Planted
            return await super().start(on_progress)

    executor = DiesWhileLoading(num_blocks=64, block_size=4)
    crash_in_steps(executor, 3)
    answers: dict[int, tuple[object, object]] = {}
    async with fake_engine(executor) as engine:
        await collect(engine, [1] * 5, 1, 8, answers)
        assert (engine.statistics().num_restarts, executor.num_starts) == (3, 4)
    assert answers[1][0] == answers[1][1]


@pytest.mark.parametrize("turn", range(1, 11))
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("module", "name"), [(scheduler, "_handle"), (detokenizer, "deliver")], ids=["scheduler", "detokenizer"]
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
    # Six for the engine's supervisor; the others cannot even compute their first token, and the root allows three.
    assert executor.num_lives == 6 + 3


async def test_a_death_that_no_request_saw_is_raised_where_the_engine_ends(autojump_clock: MockClock) -> None:
    executor = FakeExecutor(num_blocks=64, block_size=4)
    crash_in_steps(executor, *range(1, 100))

    async def die_alone() -> None:
        async with fake_engine(executor) as engine:
            with trio.move_on_after(0.001):
                await engine.complete([1, 2, 3], SamplingParams(max_tokens=5))
            executor.before_step = lambda plan: None
            engine._die(Planted("while no request waited"))

    with pytest.raises(EngineDead) as caught:
        await die_alone()
    assert isinstance(caught.value.__cause__, Planted)


async def test_a_tokenizer_panic_fails_one_request_and_no_other(autojump_clock: MockClock) -> None:
    async with fake_engine() as engine, trio.open_nursery() as nursery:
        answers: dict[int, tuple[object, object]] = {}
        nursery.start_soon(collect, engine, [1, 2], 1, 10, answers)
        with pytest.raises(InvalidPrompt, match="could not be tokenized"):
            await engine.complete("panic", SamplingParams(max_tokens=1))
        await engine.complete("FINE", SamplingParams(max_tokens=1))
    assert answers[1][0] == answers[1][1]


async def test_a_request_that_is_tokenised_when_the_engine_dies_is_told_why(
    autojump_clock: MockClock, stuck_tokenizer: None
) -> None:
    executor = FakeExecutor(num_blocks=64, block_size=4)
    crash_in_steps(executor, *range(1, 100))
    async with fake_engine(executor) as engine, trio.open_nursery() as nursery:

        async def ask() -> None:
            with pytest.raises(EngineDead) as caught:
                await engine.complete("HELLO")
            assert isinstance(caught.value.__cause__, Planted)

        for _ in range(30):  # more than the tokenizer's channel holds
            nursery.start_soon(ask)
        with pytest.raises(EngineDead):
            await engine.complete([1], SamplingParams(max_tokens=5))


async def test_a_question_that_dies_with_a_tokenizer_is_asked_again() -> None:
    may_go_on = threading.Event()

    class SlowTokenizer(LetterTokenizer):
        def tokenize(self, message: Tokenize) -> Tokenized:
            assert may_go_on.wait(60)
            return super().tokenize(message)

    model, channels, progress = LoadedModel(), Channels(), ActorProgress()
    answers: list[tuple[int, ...]] = []

    async def ask(prompt: str) -> None:
        answers.append((await ask_tokenizer(channels, progress, Tokenize(prompt))).token_ids)

    with trio.fail_after(300):
        async with trio.open_nursery() as nursery:
            for prompt in "ABC":  # one more than there are threads
                nursery.start_soon(ask, prompt)
            for _ in range(2):
                async with trio.open_nursery() as life:
                    actor = partial(
                        tokenizer_actor,
                        model,
                        channels,
                        progress,
                        SlowTokenizer,
                        run_thread=run_in_thread,
                        inline=False,
                    )
                    await life.start(actor)
                    await wait_all_tasks_blocked()
                    life.cancel_scope.cancel()
                    may_go_on.set()
    assert sorted(answers) == [(0,), (1,), (2,)]


async def test_no_plan_of_a_scheduler_that_has_crashed_is_computed_for_rows_that_the_next_one_replaces(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next scheduler has to wait for a resource of the machine; the runner has all the time to go on."""
    executor, began = FakeExecutor(num_blocks=64, block_size=4), list[int]()
    new_scheduler, handle = EngineCore.new_scheduler, scheduler._handle

    def crash_at_an_arrival(message: SchedulerMessage, core: EngineCore, channels: Channels) -> None:
        if isinstance(message, Wake) and channels.num_unread_plans and len(began) == 1:
            in_flight.append(len(executor.plans))
            raise ResourceShortage("memory", "a planted crash")
        handle(message, core, channels)

    def note_life(core: EngineCore, config: SchedulerConfig) -> Scheduler:
        began.append(len(executor.plans))
        return new_scheduler(core, config)

    in_flight: list[int] = []
    monkeypatch.setattr(scheduler, "_handle", crash_at_an_arrival)
    monkeypatch.setattr(EngineCore, "new_scheduler", note_life)
    answers: dict[int, tuple[object, object]] = {}
    async with fake_engine(executor, async_scheduling=True) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(collect, engine, [1] * 3, 1, 20, answers)
        await trio.sleep(5.5 * STEP_S)
        nursery.start_soon(collect, engine, [2] * 3, 2, 20, answers)
    assert in_flight, "two steps were planned when it crashed"
    assert began[1:] == in_flight, "the one that was computed, and not the one behind it"
    assert len(answers) == 2
    assert all(got == expected for got, expected in answers.values())


# --------------------------------------------------------------------------- while the runner is away


class SlowToStartAgain(FakeExecutor):
    """Its later lives take a second to begin."""

    async def start(self, on_progress: OnProgress) -> ModelInfo:
        if self.num_lives:
            await trio.sleep(1)
        return await super().start(on_progress)


@asynccontextmanager
async def runner_away(**arguments: Any) -> AsyncGenerator[tuple[Engine, TokenStream]]:
    """A request has four tokens, its runner has just crashed and needs a second to come back."""
    executor = SlowToStartAgain(num_blocks=64, block_size=4)
    crash_in_steps(executor, 5)
    async with fake_engine(executor) as engine:
        async with engine.generate([9], PARAMS, request_id="r", **arguments) as stream:
            await trio.sleep(0.5)
            assert engine.statistics().num_restarts == 1
            yield engine, stream
        await trio.sleep(1)
        assert_all_blocks_back(engine)


PARAMS = SamplingParams(max_tokens=30, seed=1)
ANSWER = answer_of([9], 1, 30)


async def last_of(stream: TokenStream) -> RequestOutput:
    return [output async for output in stream][-1]


async def test_a_restart_is_seen_from_outside_while_it_lasts_and_afterwards(
    autojump_clock: MockClock,
) -> None:
    async with runner_away() as (engine, stream):
        metrics = Metrics(engine)
        # the scheduler restarts with the runner
        assert engine.statistics().restarting == ("model_runner", "scheduler")
        assert engine.statistics().restarts == {("model_runner", "crash"): 1}
        assert re.search(rb'actor_restarting{actor="model_runner".*} 1.0', metrics.render())
        assert (await last_of(stream)).outputs[0].token_ids == ANSWER
        assert engine.statistics().restarting == ()
        text = metrics.render()
        assert re.search(rb'actor_restarting{actor="model_runner".*} 0.0', text)
        assert re.search(rb'actor_restarts_total{actor="model_runner",cause="crash".*} 1.0', text)
        assert re.search(rb'actor_restarts_total{actor="scheduler",cause="hang".*} 0.0', text)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ValueError("x"), "crash"),
        (None, "crash"),
        (RunnerDied("was killed", -9), "exit"),
        (RunnerDied("took too long", -9, is_hang=True), "hang"),
        (ActorStuck("x"), "hang"),
        (ExceptionGroup("x", [ActorStuck("x")]), "hang"),
        (ResourceShortage("descriptors", "a process"), "shortage"),
    ],
)
def test_the_cause_of_a_restart_is_told_by_its_error(error: BaseException | None, cause: str) -> None:
    assert restart_cause(error) == cause


async def test_an_error_of_the_function_that_is_told_of_loads_ends_the_opening_or_nothing(
    autojump_clock: MockClock,
) -> None:
    class Telling(SlowToStartAgain):
        async def start(self, on_progress: OnProgress) -> ModelInfo:
            on_progress(LoadProgress("weights", 0, 2))
            return await super().start(on_progress)

    def fail(told: LoadProgress) -> None:
        if is_planted:
            raise Planted

    executor = Telling(num_blocks=64, block_size=4)
    crash_in_steps(executor, 5)
    config = EngineConfig(runner="inline")
    is_planted = True
    with pytest.raises(Planted):
        async with run_engine(config, executor, LetterTokenizer, on_progress=fail):
            pytest.fail("it has opened")
    is_planted = False
    async with run_engine(config, executor, LetterTokenizer, on_progress=fail) as engine:
        is_planted = True
        output = await engine.complete([9], PARAMS)
    assert output.outputs[0].token_ids == ANSWER
    assert executor.num_lives == 2


async def test_the_model_names_no_process_while_there_is_none(autojump_clock: MockClock) -> None:
    class InProcess(SlowToStartAgain):
        async def start(self, on_progress: OnProgress) -> ModelInfo:
            return attrs.evolve(await super().start(on_progress), process_id=100 + self.num_lives)

    executor = InProcess(num_blocks=64, block_size=4)
    crash_in_steps(executor, 5)
    async with fake_engine(executor) as engine:
        before = engine.model_info.process_id
        async with engine.generate([9], PARAMS) as stream:
            await trio.sleep(0.5)
            assert engine.model_info.process_id is None
            await last_of(stream)
        assert engine.model_info.process_id not in (None, before)


async def test_a_request_that_comes_while_the_runner_is_away_waits_for_it(autojump_clock: MockClock) -> None:
    async with runner_away() as (engine, stream):
        output = await engine.complete([1, 2, 3], PARAMS)
        assert output.outputs[0].token_ids == answer_of([1, 2, 3], 1, 30)
        assert trio.current_time() > 1
        assert (await last_of(stream)).outputs[0].token_ids == ANSWER
        assert (await engine.complete([4], PARAMS)).outputs[0].token_ids == answer_of([4], 1, 30)


async def test_an_aborted_request_gets_what_there_is_while_the_runner_is_away(
    autojump_clock: MockClock,
) -> None:
    async with runner_away() as (engine, stream):
        engine.abort("r")
        output = await last_of(stream)
        assert (output.finish_reason, output.outputs[0].token_ids) == (FinishReason.ABORT, ANSWER[:4])


async def test_a_request_that_is_late_while_the_runner_is_away_gets_what_there_is(
    autojump_clock: MockClock,
) -> None:
    async with runner_away(deadline=trio.current_time() + 0.8) as (_, stream):
        output = await last_of(stream)
        assert (output.finish_reason, output.outputs[0].token_ids) == (FinishReason.DEADLINE, ANSWER[:4])


class NeverStartsAgain(FakeExecutor):
    """Its second life never begins."""

    async def start(self, on_progress: OnProgress) -> ModelInfo:
        if self.num_lives:
            await trio.sleep_forever()
        return await super().start(on_progress)


async def test_deadlines_hold_while_the_runner_does_not_come_back(autojump_clock: MockClock) -> None:
    executor, outputs = NeverStartsAgain(num_blocks=64, block_size=4), dict[int, RequestOutput]()
    crash_in_steps(executor, 5)
    ended_s = dict[int, float]()

    async def ask(number: int, **limits: Any) -> None:
        async with engine.generate([9], attrs.evolve(PARAMS, n=1 + number % 2), **limits) as stream:
            outputs[number] = await last_of(stream)
        ended_s[number] = trio.current_time()

    async with fake_engine(executor) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(partial(ask, 0, deadline=7.25))
        await trio.sleep(2)
        for number in range(1, 6):
            nursery.start_soon(partial(ask, number, deadline=5.0 + number, queue_timeout=math.inf))
        nursery.start_soon(partial(ask, 6, queue_timeout=3.5))
    assert {output.finish_reason for output in outputs.values()} == {FinishReason.DEADLINE}
    assert outputs[0].outputs[0].token_ids == ANSWER[:4]
    due_s = {0: 7.25, 6: 5.5} | {number: 5.0 + number for number in range(1, 6)}
    assert ended_s == pytest.approx(due_s, abs=1e-6)


async def test_all_that_are_aborted_at_once_are_told_while_the_runner_does_not_come_back(
    autojump_clock: MockClock,
) -> None:
    executor, outputs = NeverStartsAgain(num_blocks=64, block_size=4), list[RequestOutput]()
    crash_in_steps(executor, 5)

    async def ask(number: int) -> None:
        async with engine.generate([9], PARAMS, request_id=str(number)) as stream:
            outputs.append(await last_of(stream))

    async with fake_engine(executor) as engine:
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                for number in range(4):
                    nursery.start_soon(ask, number)
                await trio.sleep(1)
                for number in range(4):  # in one step of the event loop
                    engine.abort(str(number))
    assert [output.finish_reason for output in outputs] == [FinishReason.ABORT] * 4


async def test_an_abort_as_the_runner_crashes_is_told_although_it_does_not_come_back(
    autojump_clock: MockClock,
) -> None:
    executor = NeverStartsAgain(num_blocks=64, block_size=4)

    def crash(plan: StepPlan) -> None:
        engine.abort("r")  # ended by a scheduler that does not live to report it
        raise Planted

    async with fake_engine(executor) as engine:
        async with engine.generate([9], PARAMS, request_id="r") as stream:
            await trio.sleep(3.5 * STEP_S)
            executor.before_step = crash
            with trio.fail_after(10):
                output = await last_of(stream)
    assert output.finish_reason == FinishReason.ABORT


async def test_a_request_that_leaves_while_the_runner_is_away_is_not_computed_again(
    autojump_clock: MockClock,
) -> None:
    async with runner_away() as (engine, stream):
        assert engine.statistics().steps == 4
        await stream.__aexit__(None, None, None)
    assert engine.statistics().steps == 4


async def test_a_drain_while_the_runner_is_away_waits_for_it(autojump_clock: MockClock) -> None:
    async with runner_away() as (engine, stream):
        await engine.drain(trio.current_time() + 10)
        assert 1 < trio.current_time() < 2
        assert (await last_of(stream)).outputs[0].token_ids == ANSWER


async def test_an_engine_closes_at_once_while_the_runner_is_away(autojump_clock: MockClock) -> None:
    executor = SlowToStartAgain(num_blocks=64, block_size=4)
    crash_in_steps(executor, 5)
    async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
        async with fake_engine(executor) as engine:
            stream = await stack.enter_async_context(engine.generate([9], PARAMS))
            nursery.start_soon(engine.drain, math.inf)
            await trio.sleep(0.5)
        assert trio.current_time() == pytest.approx(0.5)
        output = await last_of(stream)
    assert (output.finish_reason, output.outputs[0].token_ids) == (FinishReason.SHUTDOWN, ANSWER[:4])


class AbruptExecutor(FakeExecutor):
    """Crashes once, in the second step of a run, before any client can have read what the first one gave."""

    async def compute(self, plan: StepPlan) -> StepResult:
        if self.num_lives == 1 and any(plan.step_id == earlier.step_id for earlier in self.plans):
            raise Planted("between two steps")
        return await super().compute(plan)


async def test_what_a_run_gave_before_a_crash_is_not_computed_again(autojump_clock: MockClock) -> None:
    executor = AbruptExecutor(num_blocks=64, block_size=4)
    async with fake_engine(executor) as engine:
        output = await engine.complete([1, 2, 3], SamplingParams(max_tokens=8, seed=5))
    assert output.outputs[0].token_ids == answer_of([1, 2, 3], 5, 8)
    starts = [
        start for plan in executor.plans for start in plan.starts if start.request_id == output.request_id
    ]
    assert [len(start.output_token_ids) for start in starts] == [
        0,
        2,
    ]  # a first step's token, and the run's first


async def test_a_step_that_always_fails_slowly_is_given_up(autojump_clock: MockClock) -> None:
    executor = FakeExecutor(num_blocks=64, block_size=4)

    async def slowly(plan: StepPlan) -> StepResult:
        await trio.sleep(60.0)  # longer than any window of restarts
        raise Planted("timed out again")

    executor.compute = slowly  # type: ignore[method-assign]
    async with fake_engine(executor) as engine:
        with pytest.raises(EngineDead) as caught:
            await engine.complete([1, 2, 3], SamplingParams(max_tokens=5))
    assert isinstance(caught.value.__cause__, Planted)
    assert executor.num_lives == 6 + 3


# -------------------------------------------------------------------- a later life with less memory


async def test_what_does_not_fit_into_a_smaller_second_life_fails_by_name_and_the_others_go_on(
    autojump_clock: MockClock,
) -> None:
    executor = FakeExecutor(num_blocks=64, block_size=4)
    errors: dict[str, RequestFailed] = {}
    answers: dict[str, tuple[int, ...]] = {}

    async def ask(name: str, prompt: list[int], num_tokens: int) -> None:
        try:
            output = await engine.complete(
                prompt, SamplingParams(max_tokens=num_tokens, seed=5), request_id=name
            )
            answers[name] = tuple(output.outputs[0].token_ids)
        except RequestFailed as error:
            errors[name] = error

    def crash(plan: StepPlan) -> None:
        if executor.num_lives == 1 and len(executor.plans) == 10:
            executor.num_blocks = 8  # of four tokens each
            raise Planted("and the memory is gone")

    executor.before_step = crash
    async with fake_engine(executor) as engine:
        with trio.fail_after(60.0):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, "too long already", [1] * 40, 20)
                nursery.start_soon(ask, "grows too long", [2] * 20, 30)
                nursery.start_soon(ask, "fits", [3] * 5, 20)
        assert_all_blocks_back(engine)
    assert answers == {"fits": answer_of([3] * 5, 5, 20)}
    assert errors.keys() == {"too long already", "grows too long"}
    for error in errors.values():
        assert "the model runner has now 8 KV blocks, and max_model_len is 32" in error.reason


# ------------------------------------------------------------------------ while no scheduler lives


async def test_what_ends_while_no_scheduler_lives_is_not_told_to_the_dead_one(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one may have died in the middle of anything: what it would do with an abort is unknown."""
    async with runner_away() as (engine, stream):
        dead = engine._core.scheduler
        assert dead is not None
        monkeypatch.setattr(dead, "abort", lambda *arguments: pytest.fail("the dead were asked"))
        statistics = engine.statistics()
        assert (statistics.num_requests_running, statistics.num_requests_waiting) == (0, 1)
        began_s = trio.current_time()
        engine.abort("r")
        output = await last_of(stream)
        assert (output.finish_reason, output.outputs[0].token_ids) == (FinishReason.ABORT, ANSWER[:4])
        assert trio.current_time() == began_s, "no task waits for the runner to hear of that"


@pytest.mark.slow
@pytest.mark.parametrize("actor", ["model_runner", "scheduler", "detokenizer", "tokenizer"])
async def test_an_exception_planted_in_step_k_of_each_actor_changes_no_token(
    actor: str, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for first in range(1, 51):
        await _crash_four_times(actor, first, monkeypatch)


async def _crash_four_times(actor: str, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six streams at a time, whose prompts are texts: each actor has at least 200 steps."""
    calls = 0

    def reach() -> None:
        nonlocal calls
        calls += 1
        if calls in range(first, first + 200, 50):
            raise (Panic if calls % 2 else Planted)(f"in step {calls}")

    executor = FakeExecutor(num_blocks=256, block_size=4)
    with monkeypatch.context() as patch:
        if actor == "model_runner":
            executor.before_step = lambda plan: reach() if plan is not PROOF else None
        elif actor == "tokenizer":
            patch.setattr(tokenizer, "_answer", _reaching_with_a_question(tokenizer._answer, reach))
        else:
            module, name = (scheduler, "_handle") if actor == "scheduler" else (detokenizer, "deliver")
            patch.setattr(module, name, _reaching(getattr(module, name), reach))
        async with fake_engine(executor, max_num_seqs=6, max_num_batched_tokens=64) as engine:
            async with trio.open_nursery() as nursery:
                for seed in range(6):
                    nursery.start_soon(_ask_in_text, engine, seed)
            await trio.sleep(1)
            assert engine.statistics().num_restarts == 4
            assert_all_blocks_back(engine)


def _reaching(original: Any, reach: Callable[[], None]) -> Any:
    def planted(*arguments: Any) -> Any:
        reach()
        return original(*arguments)

    return planted


def _reaching_with_a_question(original: Any, reach: Callable[[], None]) -> Any:
    async def planted(tokenizer: object, request: tuple[Tokenize, Any], run: object) -> None:
        with request[1]:
            reach()
            await original(tokenizer, request, run)

    return planted


async def _ask_in_text(engine: Engine, seed: int) -> None:
    for turn in range(34):
        text = "ABCDEF"[seed] * (turn % 5 + 2)
        num_tokens = 140 if turn == 0 else 2
        output = await engine.complete(text, SamplingParams(max_tokens=num_tokens, seed=seed))
        assert output.outputs[0].token_ids == answer_of([seed] * len(text), seed, num_tokens)
