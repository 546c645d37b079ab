"""The executors whose model lives in this process, beyond the contract: threads, resets, steps in the background."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.actors.executors.harness import first_step, ignore, num_runner_threads
from tests.actors.harness import (
    VOCAB,
    LetterTokenizer,
    answer_of,
    model_info,
    unexpected,
)
from tests.core.fake_model import FakeModel
from triolet import SamplingParams
from triolet.actors.executors.contract import Executor
from triolet.actors.executors.in_process import InlineExecutor, Load, LoadCancelled, ThreadExecutor
from triolet.config.engine import EngineConfig
from triolet.core.load_progress import LoadProgress, OnProgress
from triolet.core.request.model_info import ModelInfo
from triolet.core.step_plan import PlanRow, StepPlan, StepResult, StepRunner, after_step
from triolet.engine.open_engine import run_engine
from triolet.errors import ResourceShortage

NUM_BLOCKS, BLOCK_SIZE = 16, 4


class Planted(Exception):
    pass


@attrs.define(eq=False)
class FakeRunner:
    """A runner over the fake model that notes which thread drives it."""

    model: FakeModel = attrs.field(factory=lambda: FakeModel(NUM_BLOCKS, BLOCK_SIZE, VOCAB))
    threads: set[str] = attrs.field(factory=set)
    num_resets: int = 0
    before_step: Callable[[StepPlan], None] = lambda plan: None

    def load(self, on_progress: OnProgress) -> tuple[StepRunner, ModelInfo]:
        self._note_thread()
        for part in range(3):
            on_progress(LoadProgress("weights", part, 3))
        return self, model_info(NUM_BLOCKS, BLOCK_SIZE)

    def execute(self, plan: StepPlan) -> StepResult:
        self._note_thread()
        self.before_step(plan)
        return self.model.execute(plan)

    def reset(self) -> None:
        self._note_thread()
        self.num_resets += 1
        self.model = FakeModel(NUM_BLOCKS, BLOCK_SIZE, VOCAB)

    def _note_thread(self) -> None:
        self.threads.add(threading.current_thread().name)


@attrs.define(eq=False)
class BackgroundFake(FakeRunner):
    """One that leaves every step but the first to the test, which is to write to `done`."""

    done: list[int] = attrs.field(factory=list)
    has_begun: trio.Event = attrs.field(factory=trio.Event)
    num_halts: int = 0
    plan: StepPlan | None = None

    def begin(self, plan: StepPlan, done_fd: int) -> BackgroundFake | None:
        if plan.starts:
            return None
        self._note_thread()
        self.done.append(done_fd)
        self.has_begun.set()
        self.plan = plan
        return self

    def results(self, count: int) -> list[StepResult]:
        results = []
        for _ in range(count):
            assert self.plan is not None, "it is over"
            result = self.model.execute(self.plan)
            result, self.plan = after_step(self.plan, result, must_halt=self.num_halts > 0)
            results.append(result)
        return results

    @property
    def is_over(self) -> bool:
        return self.plan is None

    def halt(self) -> None:
        self.num_halts += 1


Make = Callable[[Load], Executor]
for_each_executor = pytest.mark.parametrize("make", [InlineExecutor, ThreadExecutor])


# ----------------------------------------------------------------------------------------- for both


@for_each_executor
async def test_a_later_life_keeps_the_model_and_forgets_the_requests(make: Make) -> None:
    runner = FakeRunner()
    loads: list[FakeRunner] = []

    def load(on_progress: OnProgress) -> tuple[StepRunner, ModelInfo]:
        loads.append(runner)
        return runner.load(on_progress)

    executor = make(load)
    for _ in range(3):
        async with executor.running():
            await executor.start(ignore)
            assert not runner.model.rows
            await executor.execute(first_step(), unexpected)
    assert (len(loads), runner.num_resets) == (1, 2)


@for_each_executor
@pytest.mark.parametrize("error", [Planted("planted"), SystemError("planted")], ids=repr)
async def test_the_very_error_of_a_step_is_raised_and_the_next_life_works(
    make: Make, error: Exception
) -> None:
    def fail(plan: StepPlan) -> None:
        raise error

    runner = FakeRunner(before_step=fail)
    executor = make(runner.load)

    async def live() -> StepResult:
        async with executor.running():
            await executor.start(ignore)
            return await executor.execute(first_step(), unexpected)

    with pytest.raises(type(error), match="planted") as caught:
        await live()
    assert caught.value is error
    runner.before_step = lambda plan: None
    assert (await live()).tokens
    assert num_runner_threads() == 0


# --------------------------------------------------------------------------------- only in a thread


async def test_the_thread_is_one_of_its_own_from_loading_on() -> None:
    runner = FakeRunner()
    executor = ThreadExecutor(runner.load)
    async with executor.running():
        await executor.start(ignore)
        await executor.execute(first_step(), unexpected)
        assert num_runner_threads() == 1
    assert runner.threads == {"triolet-runner"}


async def test_the_loop_goes_on_while_a_step_runs() -> None:
    may_end = threading.Event()

    def wait(plan: StepPlan) -> None:
        assert may_end.wait(60), "no other thread could set it"

    executor = ThreadExecutor(FakeRunner(before_step=wait).load)
    async with executor.running():
        await executor.start(ignore)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(executor.execute, first_step(), unexpected)
            await wait_all_tasks_blocked()
            may_end.set()


async def test_a_task_cancelled_during_a_step_waits_for_its_end() -> None:
    has_begun, may_end = threading.Event(), threading.Event()
    events: list[str] = []

    def slow(plan: StepPlan) -> None:
        has_begun.set()
        assert may_end.wait(60)
        events.append("step ended")

    executor = ThreadExecutor(FakeRunner(before_step=slow).load)

    async def live(*, task_status: trio.TaskStatus[None]) -> None:
        async with executor.running():
            await executor.start(ignore)
            task_status.started()
            try:
                await executor.execute(first_step(), unexpected)
            finally:
                events.append("waiter left")

    async with trio.open_nursery() as nursery:
        await nursery.start(live)
        assert await trio.to_thread.run_sync(has_begun.wait, 60)
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await wait_all_tasks_blocked()
        assert events == []
        may_end.set()
    assert events == ["step ended", "waiter left"]
    assert num_runner_threads() == 0


async def test_a_cancelled_load_ends_at_its_next_report() -> None:
    has_begun, may_go_on = threading.Event(), threading.Event()
    told: list[int] = []
    ends: list[str] = []

    def load(on_progress: OnProgress) -> tuple[StepRunner, ModelInfo]:
        on_progress(LoadProgress("weights", 0, 2))
        has_begun.set()
        assert may_go_on.wait(60)
        try:
            on_progress(LoadProgress("weights", 1, 2))
        except LoadCancelled:
            ends.append("cancelled")
            raise
        ends.append("went on")
        return FakeRunner().load(on_progress)

    executor = ThreadExecutor(load)

    async def live() -> None:
        async with executor.running():
            await executor.start(lambda progress: told.append(progress.done_bytes))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(live)
        assert await trio.to_thread.run_sync(has_begun.wait, 60)
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await wait_all_tasks_blocked()
        may_go_on.set()
    assert (told, ends) == ([0], ["cancelled"])
    assert num_runner_threads() == 0


async def test_the_engines_scope_waits_for_the_step_in_flight_and_leaves_no_thread() -> None:
    has_begun, may_end = threading.Event(), threading.Event()
    events: list[str] = []

    def slow(plan: StepPlan) -> None:
        has_begun.set()
        assert may_end.wait(60)
        events.append("step ended")

    executor = ThreadExecutor(FakeRunner(before_step=slow).load)
    config = EngineConfig(runner="thread", max_num_seqs=2, max_num_batched_tokens=16)
    async with trio.open_nursery() as nursery:
        async with run_engine(config, executor, LetterTokenizer) as engine:
            async with engine.generate("HELLO", SamplingParams(max_tokens=5)):
                assert await trio.to_thread.run_sync(has_begun.wait, 60)
            nursery.start_soon(trio.to_thread.run_sync, may_end.set)
        events.append("engine closed")
    assert events == ["step ended", "engine closed"]
    assert num_runner_threads() == 0


async def no_thread(*_: object, **__: object) -> None:
    raise RuntimeError("can't start new thread")


async def test_a_thread_that_cannot_be_started_is_a_shortage_and_the_next_life_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor = ThreadExecutor(FakeRunner().load)

    async def live() -> StepResult:
        async with executor.running():
            await executor.start(ignore)
            return await executor.execute(first_step(), unexpected)

    with trio.fail_after(60), monkeypatch.context() as patch:
        patch.setattr(trio.to_thread, "run_sync", no_thread)
        with pytest.raises(ResourceShortage, match="processes or threads for the model runner"):
            await live()
    with trio.fail_after(60):
        assert (await live()).tokens
    assert num_runner_threads() == 0


async def test_a_life_that_is_cancelled_while_its_thread_starts_leaves_no_thread() -> None:
    executor = ThreadExecutor(FakeRunner().load)
    with trio.fail_after(60), trio.CancelScope() as scope:
        scope.cancel()
        async with executor.running():
            await executor.start(ignore)
    assert scope.cancelled_caught
    assert num_runner_threads() == 0


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="an eventfd is Linux'")
SECOND_STEP = StepPlan(2, (), (), (PlanRow(0, 3, 1, (), sample=True),))


@linux_only
async def test_a_descriptor_that_the_background_cannot_have_is_a_shortage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_descriptor(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "eventfd", no_descriptor)
    with pytest.raises(ResourceShortage, match=r"RLIMIT_NOFILE.* for the model runner"):
        async with ThreadExecutor(FakeRunner().load).running():
            pass


@linux_only
async def test_a_step_that_needs_no_thread_is_begun_in_the_loop_and_others_go_on_until_it_is_over() -> None:
    runner = BackgroundFake()
    executor = ThreadExecutor(runner.load)
    results: list[StepResult] = []

    async def compute() -> None:
        results.append(await executor.execute(SECOND_STEP, unexpected))

    async with executor.running():
        await executor.start(ignore)
        await executor.execute(first_step(), unexpected)
        runner.threads.clear()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(compute)
            await wait_all_tasks_blocked()
            assert (len(runner.done), results) == (1, [])
            os.eventfd_write(runner.done[0], 1)
    assert [token.token_id for token in results[0].tokens] == [answer_of([1, 2, 3], 5, 2)[1]]
    assert runner.threads == {threading.current_thread().name}


# -------------------------------------------------------------------------------------------- runs


RUN = StepPlan(2, (), (), (PlanRow(0, 3, 1, (), sample=True),), 4)


@for_each_executor
async def test_a_run_that_is_halted_ends_after_the_step_that_it_is_at(make: Make) -> None:
    told: list[StepResult] = []
    executor = make(
        FakeRunner(before_step=lambda plan: executor.halt() if plan.num_steps == 3 else None).load
    )
    async with executor.running():
        await executor.start(ignore)
        await executor.execute(first_step(), unexpected)
        last = await executor.execute(RUN, told.append)
        assert ([result.is_last for result in told], last.is_last) == ([False], True)
        again = attrs.evolve(RUN, step_id=3, rows=(PlanRow(0, 5, 1, (), sample=True),), num_steps=2)
        assert not (await executor.execute(again, told.append)).failures
    assert [result.is_last for result in told] == [False, False], "to halt is about one run"


@for_each_executor
async def test_an_error_of_the_reader_of_a_run_ends_the_run_and_is_raised_here(make: Make) -> None:
    runner = FakeRunner()
    executor = make(runner.load)
    told: list[StepResult] = []

    def refuse(result: StepResult) -> None:
        told.append(result)
        raise Planted("full")

    async with executor.running():
        await executor.start(ignore)
        await executor.execute(first_step(), unexpected)
        with pytest.raises(Planted, match="full"):
            await executor.execute(RUN, refuse)
    assert len(told) == 1
    assert num_runner_threads() == 0


@linux_only
async def test_a_run_in_the_background_is_followed_to_its_end() -> None:
    runner = BackgroundFake()
    executor = ThreadExecutor(runner.load)
    told: list[StepResult] = []

    async def compute() -> None:
        told.append(await executor.execute(RUN, told.append))

    async with executor.running():
        await executor.start(ignore)
        await executor.execute(first_step(), unexpected)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(compute)
            await wait_all_tasks_blocked()
            for count, num_told in (
                (1, 1),
                (2, 3),
                (1, 4),
            ):  # of two, the executor was not quick enough to hear one by one
                os.eventfd_write(runner.done[0], count)
                await wait_all_tasks_blocked(cushion=0.01)
                assert len(told) == num_told
    assert [result.is_last for result in told] == [False, False, False, True]
    assert (
        tuple(token.token_id for result in told for token in result.tokens) == answer_of([1, 2, 3], 5, 5)[1:]
    )


@linux_only
@pytest.mark.parametrize("plan", [SECOND_STEP, RUN], ids=["step", "run"])
async def test_a_task_cancelled_during_a_plan_in_the_background_halts_it_and_waits_for_its_end(
    plan: StepPlan,
) -> None:
    runner = BackgroundFake()
    executor = ThreadExecutor(runner.load)
    told: list[StepResult] = []
    events: list[str] = []

    async def live() -> None:
        async with executor.running():
            await executor.start(ignore)
            await executor.execute(first_step(), unexpected)
            try:
                await executor.execute(plan, told.append)
            finally:
                events.append("left")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(live)
        await runner.has_begun.wait()
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await wait_all_tasks_blocked()
        assert (events, runner.num_halts) == ([], 1)
        os.eventfd_write(runner.done[0], 1)
    assert (events, told) == (["left"], [])
    assert num_runner_threads() == 0


@linux_only
async def test_a_run_with_refused_results_is_waited_for_before_its_memory_is_given_back() -> None:
    runner = BackgroundFake()
    executor = ThreadExecutor(runner.load)

    def refuse(result: StepResult) -> None:
        raise ValueError("full")

    async def compute() -> None:
        with pytest.raises(ValueError, match="full"):
            await executor.execute(RUN, refuse)
        assert runner.is_over

    async with executor.running():
        await executor.start(ignore)
        await executor.execute(first_step(), unexpected)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(compute)
            await wait_all_tasks_blocked()
            os.eventfd_write(runner.done[0], 1)
            await wait_all_tasks_blocked(cushion=0.01)
            assert not runner.is_over
            os.eventfd_write(runner.done[0], 1)  # it was halted
