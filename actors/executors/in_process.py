"""Where the model runs: in the event loop, or in a thread of its own; in a process of its own, see `process_runner`."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TypeVar

import attrs
import trio

from triolet.actors.model_runner import BackgroundRun, BackgroundRunner, Executor, Load, Runner, Tell
from triolet.config.engine import EngineConfig
from triolet.core.load_progress import LoadProgress, OnProgress
from triolet.core.request.model_info import ModelInfo
from triolet.core.step_plan import StepPlan, StepResult

T = TypeVar("T")


@attrs.define(eq=False)
class _Kept:
    """A runner that outlives the actor's lives: its weights are read once."""

    load: Load
    loaded: tuple[Runner, ModelInfo] | None = None
    background: BackgroundRunner | None = None

    def start(self, on_progress: OnProgress) -> ModelInfo:
        if self.loaded is None:
            self.loaded = self.load(on_progress)
            self.background = self.loaded[0] if isinstance(self.loaded[0], BackgroundRunner) else None
        else:
            self.loaded[0].reset()
        return self.loaded[1]

    def execute(self, plan: StepPlan) -> StepResult:
        assert self.loaded is not None
        return self.loaded[0].execute(plan)

    def forget(self) -> None:
        """Give the memory of model and KV cache back now, and not when garbage is next collected.

        Until then everything else of an engine may be held by the errors that its tasks ended with.
        """
        self.loaded = self.background = None


class LoadCancelled(Exception):
    """Nobody waits for this model any more."""


class InlineExecutor:
    """The model runs in the event loop, which waits for it: one thread, one order of events."""

    def __init__(self, load: Load) -> None:
        self._kept = _Kept(load)
        self._is_halted = False

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Nothing needs to run."""
        yield

    def forget_model(self) -> None:
        """See `_Kept.forget`."""
        self._kept.forget()

    async def start(self, on_progress: OnProgress) -> ModelInfo:
        """See `Executor`."""
        await trio.lowlevel.checkpoint()
        return self._kept.start(on_progress)

    async def execute(self, plan: StepPlan, tell: Tell) -> StepResult:
        """See `Executor`. Between two steps of a run others have their turn."""
        self._is_halted = False
        while True:
            await trio.lowlevel.checkpoint()
            result = self._kept.execute(plan)
            if self._is_halted or (rest := plan.after(result)) is None:
                return result
            tell(attrs.evolve(result, is_last=False))
            plan = rest

    def halt(self) -> None:
        """See `Executor`."""
        self._is_halted = True


class ThreadExecutor:
    """The model runs in one thread of its own, from loading on: torch keeps its worker threads and modes by thread.

    The thread is never abandoned. A step can not be interrupted, so whoever is cancelled while one runs waits for its
    end.

    A step that needs no thread of Python's is begun right here. To hand it over would be to wait for the interpreter's
    lock, which this thread keeps until it has nothing left to do: readers would come before the model.
    """

    def __init__(self, load: Load) -> None:
        self._kept = _Kept(load)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._done_fd: int | None = None  # of a step in the background
        self._is_halted = False
        self._run: BackgroundRun | None = None  # in the background

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """The scope in which the thread lives."""
        failure: BaseException | None = None
        with self._background_steps():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._run_thread)
                try:
                    yield
                except BaseException as error:  # raised again below, without the nursery's group around it
                    failure = error
                self._jobs.put(None)
        if failure is not None:
            raise failure

    @contextmanager
    def _background_steps(self) -> Iterator[None]:
        if sys.platform != "linux":
            yield
            return
        self._done_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            yield
        finally:
            os.close(self._done_fd)
            self._done_fd = None

    async def _run_thread(self) -> None:
        # Its own limiter: the default one is shared with file and name look-ups, which must not wait for a model.
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(
                self._work, limiter=trio.CapacityLimiter(1), thread_name="triolet-runner"
            )

    def forget_model(self) -> None:
        """See `_Kept.forget`."""
        self._kept.forget()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    async def _call(self, function: Callable[[], T], on_cancel: Callable[[], None] = lambda: None) -> T:
        """Run a function in the thread and wait for its end, even when cancelled; `on_cancel` may hurry it."""
        done = trio.Event()
        token = trio.lowlevel.current_trio_token()
        results: list[T] = []
        errors: list[BaseException] = []

        def job() -> None:
            try:
                results.append(function())
            except BaseException as error:
                errors.append(error)
            token.run_sync_soon(done.set)

        self._jobs.put(job)
        try:
            await done.wait()
        except trio.Cancelled:
            on_cancel()
            with trio.CancelScope(shield=True):
                await done.wait()
            raise
        if errors:
            raise errors[0]
        return results[0]

    async def start(self, on_progress: OnProgress) -> ModelInfo:
        """See `Executor`. `on_progress` is called in the Trio thread; a load that was cancelled, or whose `on_progress`
        raised, ends at its next report.
        """
        token = trio.lowlevel.current_trio_token()
        is_unwanted = threading.Event()
        errors: list[BaseException] = []

        def tell(progress: LoadProgress) -> None:
            try:
                on_progress(progress)
            except BaseException as error:  # from here it would tear down Trio itself
                errors.append(error)
                is_unwanted.set()

        def report(progress: LoadProgress) -> None:
            if is_unwanted.is_set():
                raise LoadCancelled
            token.run_sync_soon(tell, progress)

        try:
            info = await self._call(partial(self._kept.start, report), is_unwanted.set)
        except Exception:
            if not errors:
                raise
        if errors:
            raise errors[0]
        return info

    async def execute(self, plan: StepPlan, tell: Tell) -> StepResult:
        """See `Executor`."""
        self._is_halted = False
        background, done_fd = self._kept.background, self._done_fd
        if background is not None and done_fd is not None:
            self._run = background.begin(plan, done_fd)
            if self._run is not None:
                return await self._follow(self._run, done_fd, tell)
        token = trio.lowlevel.current_trio_token()

        def tell_there(result: StepResult) -> None:
            token.run_sync_soon(tell, result)

        return await self._call(partial(self._compute, plan, tell_there), self.halt)

    def halt(self) -> None:
        """See `Executor`."""
        self._is_halted = True
        if self._run is not None:
            self._run.halt()

    async def _follow(self, run: BackgroundRun, done_fd: int, tell: Tell) -> StepResult:
        """Wait for what a run gives, to its end, even when cancelled."""
        try:
            while True:
                for result in run.results(await _count_written(done_fd)):
                    if result.is_last:
                        return result
                    tell(result)
        except BaseException:  # as a rule Cancelled; the model writes into the run's memory until it is over
            run.halt()
            with trio.CancelScope(shield=True):
                while not run.is_over:
                    run.results(await _count_written(done_fd))
            raise
        finally:
            self._run = None

    def _compute(self, plan: StepPlan, tell: Tell) -> StepResult:
        while True:
            result = self._kept.execute(plan)
            if self._is_halted or (rest := plan.after(result)) is None:
                return result
            tell(attrs.evolve(result, is_last=False))
            plan = rest


async def _count_written(eventfd: int) -> int:
    """Wait until something has been written to it, and make it empty; returns how much that was."""
    await trio.lowlevel.wait_readable(eventfd)
    return os.eventfd_read(eventfd)


@contextmanager
def open_executor(config: EngineConfig) -> Iterator[Executor]:
    """The executor that the configuration names, with a real model, which is let go of when the scope is left."""
    config = attrs.evolve(config, model=model_source(config))
    if config.runner == "process":
        from triolet.actors.executors.process import ProcessExecutor

        yield ProcessExecutor(config)
        return

    def load(on_progress: OnProgress) -> tuple[Runner, ModelInfo]:
        # Here, and not above: torch takes a second to import, and whoever only names an engine should not wait for
        # it.
        from triolet.model.runner import load_configured_runner

        return load_configured_runner(config, on_progress)

    executor = InlineExecutor(load) if config.runner == "inline" else ThreadExecutor(load)
    try:
        yield executor
    finally:
        executor.forget_model()


def model_source(config: EngineConfig) -> str:
    """The folder or hub id to load: the shipped triolet-nano, if none is named."""
    if config.model is not None:
        return config.model
    from triolet.nano import PATH

    return str(PATH)
