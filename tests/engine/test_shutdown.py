"""How an engine ends: drained, closed, by its body's exception, or before it has begun."""

from __future__ import annotations

import math
import signal
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.actors.harness import STEP_S, FakeExecutor, answer_of, assert_all_blocks_back, fake_engine
from triolet import SamplingParams
from triolet.core.output.outputs import RequestOutput
from triolet.core.request.request import FinishReason
from triolet.core.step_plan import StepPlan
from triolet.engine.engine import Engine
from triolet.errors import EngineClosed, InvalidRequest
from triolet.recording.recorder import Recorder

LONG = SamplingParams(max_tokens=100, seed=1)
SHORT = SamplingParams(max_tokens=3, seed=1)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C as at a terminal; a shell that starts a program in the background lets it ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


async def test_draining_lets_all_requests_finish_and_none_in(autojump_clock: MockClock) -> None:
    outputs: list[RequestOutput] = []
    async with fake_engine(max_num_seqs=2) as engine, trio.open_nursery() as nursery:

        async def ask(seed: int) -> None:
            outputs.append(await engine.complete([seed], SamplingParams(max_tokens=10, seed=seed)))

        for seed in range(5):
            nursery.start_soon(ask, seed)
        await trio.sleep(STEP_S)
        nursery.start_soon(engine.drain, trio.current_time() + 60)
        await wait_all_tasks_blocked()
        with pytest.raises(EngineClosed, match="draining"):
            await engine.complete([1], SHORT)
    assert [output.finish_reason for output in outputs] == [FinishReason.LENGTH] * 5
    assert trio.current_time() < 1


async def test_what_has_not_finished_when_the_drain_is_over_gets_what_there_is(
    autojump_clock: MockClock,
) -> None:
    async with fake_engine() as engine, engine.generate([1, 2], LONG) as stream:
        await engine.drain(trio.current_time() + 5.5 * STEP_S)
        assert trio.current_time() == pytest.approx(5.5 * STEP_S)
        output = [output async for output in stream][-1]
        assert output.finish_reason is FinishReason.SHUTDOWN
        assert output.outputs[0].token_ids == answer_of([1, 2], 1, 5)
        await trio.sleep(STEP_S)
        assert_all_blocks_back(engine)


async def test_a_drain_with_a_wrong_deadline_changes_nothing(autojump_clock: MockClock) -> None:
    async with fake_engine() as engine:
        with pytest.raises(InvalidRequest, match="deadline"):
            await engine.drain(math.nan)
        assert (await engine.complete([1], SHORT)).finished


async def test_a_drain_ends_when_the_engine_is_closed_meanwhile(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        async with fake_engine() as engine:
            await engine.generate([1, 2], LONG).__aenter__()
            nursery.start_soon(engine.drain, math.inf)
            await trio.sleep(STEP_S)
    assert trio.current_time() < 1


@pytest.mark.parametrize("ending", ["closed", "drained"])
async def test_a_request_that_is_tokenised_when_the_engine_ends_is_turned_away(
    ending: str, autojump_clock: MockClock, stuck_tokenizer: None
) -> None:
    refused: list[EngineClosed] = []

    async def ask(engine: Engine, prompt: str) -> None:
        with pytest.raises(EngineClosed) as caught:
            await engine.complete(prompt)
        refused.append(caught.value)

    async with trio.open_nursery() as nursery:
        async with fake_engine() as engine:
            for number in range(30):  # more than the tokenizer's channel holds
                nursery.start_soon(ask, engine, chr(65 + number))
            await wait_all_tasks_blocked()
            if ending == "drained":
                await engine.drain(trio.current_time() + 1)
                await wait_all_tasks_blocked()
                assert len(refused) == 30
    assert len(refused) == 30


@pytest.mark.parametrize(
    "error", [ValueError("mine"), KeyboardInterrupt(), BaseExceptionGroup("mine", [OSError()])]
)
async def test_the_bodys_exception_comes_out_of_the_engines_scope_bare(
    error: BaseException, autojump_clock: MockClock
) -> None:
    async def fail() -> None:
        async with fake_engine() as engine, engine.generate([1], LONG):
            await trio.sleep(STEP_S)
            raise error

    with pytest.raises(type(error)) as caught:
        await fail()
    assert caught.value is error


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_in_the_middle_of_a_step_interrupts_the_task_that_opened_the_engine_and_no_actor() -> None:
    executor = FakeExecutor(num_blocks=64, block_size=4)
    after: list[int] = []

    def interrupt(plan: StepPlan) -> None:
        signal.raise_signal(signal.SIGINT)
        after.append(len(executor.plans))  # the step goes on

    async def main() -> None:
        executor.before_step = interrupt
        async with fake_engine(executor) as engine, engine.generate([1], LONG) as stream:
            async for _ in stream:
                pass

    with pytest.raises(KeyboardInterrupt):
        trio.run(main, clock=MockClock(autojump_threshold=0))
    assert after[0] == 1


@pytest.mark.usefixtures("ctrl_c")
def test_a_second_ctrl_c_while_the_engine_is_closing_comes_out_bare_too() -> None:
    pressed: list[float] = []

    class SlowToStop(FakeExecutor):
        @asynccontextmanager
        async def running(self) -> AsyncGenerator[None]:
            try:
                yield
            finally:
                with trio.CancelScope(shield=True):
                    await trio.sleep(1.0)

    async def press_often() -> None:
        for _ in range(8):
            pressed.append(trio.current_time())
            signal.raise_signal(signal.SIGINT)
            await trio.sleep(0.1)

    async def main() -> None:
        async with fake_engine(SlowToStop(num_blocks=64, block_size=4)):
            trio.lowlevel.spawn_system_task(press_often)
            await trio.sleep_forever()

    with pytest.raises(KeyboardInterrupt):
        trio.run(main, clock=MockClock(autojump_threshold=0))
    assert pressed[-1] - pressed[0] > 0.5


async def test_a_cancelled_body_leaves_the_engines_scope_cancelled(autojump_clock: MockClock) -> None:
    num_tasks = trio.lowlevel.current_statistics().tasks_living
    with trio.move_on_after(1) as scope:
        async with fake_engine() as engine, engine.generate([1], LONG):
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert engine.statistics().num_requests_live == 0
    assert trio.lowlevel.current_statistics().tasks_living == num_tasks


async def test_what_the_start_fails_with_comes_out_bare(autojump_clock: MockClock) -> None:
    executor = FakeExecutor(num_blocks=4, block_size=4)

    async def start(on_progress: object) -> Any:
        await trio.lowlevel.checkpoint()
        raise FileNotFoundError("no model")

    executor.start = start  # type: ignore[method-assign]
    num_tasks = trio.lowlevel.current_statistics().tasks_living
    with pytest.raises(FileNotFoundError, match="no model"):
        await fake_engine(executor).__aenter__()
    assert trio.lowlevel.current_statistics().tasks_living == num_tasks


class Planted(Exception):
    pass


class FakeTracing:
    """An exporter that is closed with an error."""

    def __init__(self) -> None:
        self.num_closed = 0

    def close(self) -> None:
        self.num_closed += 1
        raise Planted("spans")


async def test_an_engine_that_cannot_be_built_gives_back_its_number_and_its_exporter(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise Planted("tree")

    tracing, stat_loggers = FakeTracing(), list[object]()
    monkeypatch.setattr(Engine, "add_stat_logger", lambda engine, logger: stat_loggers.append(logger))
    monkeypatch.setattr("triolet.engine.engine.open_tracing", lambda config: tracing)
    with monkeypatch.context() as patch:
        patch.setattr("triolet.engine.open_engine.build_supervision_tree", fail)
        with pytest.raises(Planted):
            await fake_engine().__aenter__()
    assert stat_loggers == [tracing] and tracing.num_closed == 1
    monkeypatch.undo()
    async with fake_engine() as engine:
        assert engine.index == 0


async def test_spans_that_cannot_be_sent_keep_no_recording_open(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tracing, closed, close = FakeTracing(), list[Recorder](), Recorder.close

    async def note_and_close(recorder: Recorder) -> None:
        await close(recorder)
        closed.append(recorder)

    monkeypatch.setattr(Recorder, "close", note_and_close)
    monkeypatch.setattr(Engine, "add_stat_logger", lambda engine, logger: None)
    monkeypatch.setattr("triolet.engine.engine.open_tracing", lambda config: tracing)
    with pytest.raises(Planted, match="spans"):
        async with fake_engine(record=str(tmp_path / "record.jsonl")) as engine, engine.generate([1], LONG):
            await trio.sleep(2 * STEP_S)
    assert (tracing.num_closed, len(closed)) == (1, 1)
