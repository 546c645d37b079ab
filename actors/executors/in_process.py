"""Executors whose model runs in this process: in the event loop, or in a thread of its own."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Final, TypeVar

import attrs
import trio

from triolet.actors.executors.contract import Executor, Tell
from triolet.actors.executors.threads import run_in_thread
from triolet.core.load_progress import LoadProgress, OnProgress
from triolet.core.recovery.supervision import typed_shortages
from triolet.core.request.lora import Adapter
from triolet.core.request.model_info import ModelInfo
from triolet.core.step_plan import (
    AdapterRunner,
    BackgroundRunner,
    StepPlan,
    StepResult,
    StepRunner,
    StepsInBackground,
    steps_of,
)
from triolet.core.worker_call import WorkerCall, WorkerOutcome, outcome_of

T = TypeVar("T")
Told = TypeVar("Told")
Load = Callable[[OnProgress], tuple[StepRunner, ModelInfo]]
LoadFrom = Callable[[OnProgress, str | None], tuple[StepRunner, ModelInfo]]
"""Load from a folder; None for that of the configuration."""

PURPOSE: Final = "the model runner"
"""What a thread and a descriptor are needed for."""


@attrs.define(eq=False)
class _Kept:
    """Runner kept across the lives of the actor: its weights are read once."""

    load: Load
    load_from: LoadFrom | None = None
    folder: str | None = None  # of the weights; None for those of the configuration
    loaded: tuple[StepRunner, ModelInfo] | None = None
    background: BackgroundRunner | None = None

    def start(self, on_progress: OnProgress) -> ModelInfo:
        if self.loaded is None:
            if self.load_from is None:
                self.loaded = self.load(on_progress)
            else:
                self.loaded = self.load_from(on_progress, self.folder)
            self.background = self.loaded[0] if isinstance(self.loaded[0], BackgroundRunner) else None
        else:
            self.loaded[0].reset()
        return self.loaded[1]

    def execute(self, plan: StepPlan) -> StepResult:
        assert self.loaded is not None
        return self.loaded[0].execute(plan)

    def prepare_adapter(self, adapter: Adapter, is_pinned: bool) -> None:
        if self.loaded is not None and isinstance(runner := self.loaded[0], AdapterRunner):
            runner.prepare_adapter(adapter.path, adapter.digest, is_pinned=is_pinned)

    def call(self, call: WorkerCall) -> WorkerOutcome:
        assert self.loaded is not None
        return outcome_of(self.loaded[0], call)

    def use_weights(self, folder: str | None) -> None:
        if folder != self.folder:
            self.folder = folder
            self.forget()

    def forget(self) -> None:
        """Free the memory of model and KV cache now, not at the next garbage collection."""
        # Until then the rest of an engine may be held by the errors that its tasks ended with.
        self.loaded = self.background = None


class LoadCancelled(Exception):
    """Raised in a load whose result is not wanted any more."""


class InlineExecutor(Executor):
    """Executor in the event loop, which waits for the model: one thread, one order of events."""

    def __init__(self, load: Load, load_from: LoadFrom | None = None) -> None:
        self._kept = _Kept(load, load_from)
        self._is_halted = False

    def use_weights(self, folder: str | None) -> None:
        self._kept.use_weights(folder)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        yield

    def forget_model(self) -> None:
        """Drop model and KV cache; see `_Kept.forget`."""
        self._kept.forget()

    async def start(self, on_progress: OnProgress) -> ModelInfo:
        await trio.lowlevel.checkpoint()
        return self._kept.start(on_progress)

    async def execute(self, plan: StepPlan, tell: Tell) -> StepResult:
        self._is_halted = False
        steps = steps_of(plan, self._kept.execute, lambda: self._is_halted)
        while True:
            await trio.lowlevel.checkpoint()  # other tasks have their turn between two steps
            if (result := next(steps)).is_last:
                return result
            tell(result)

    async def prepare_adapter(self, adapter: Adapter, *, is_pinned: bool) -> None:
        await trio.lowlevel.checkpoint()
        self._kept.prepare_adapter(adapter, is_pinned)

    async def call(self, call: WorkerCall, limit_s: float | None) -> WorkerOutcome:
        await trio.lowlevel.checkpoint()
        return self._kept.call(call)

    def halt(self) -> None:
        self._is_halted = True


class ThreadExecutor(Executor):
    """Executor in one thread, from loading on: torch keeps its worker threads and modes by thread.

    The thread is never abandoned. A step cannot be interrupted, so a cancelled caller waits for its end.

    A step that needs no Python thread (`BackgroundRunner`) is begun in the event loop's thread. Handing it over would
    mean waiting for the interpreter's lock, which that thread keeps until it has nothing left to do: readers would come
    before the model.
    """

    def __init__(self, load: Load, load_from: LoadFrom | None = None) -> None:
        self._kept = _Kept(load, load_from)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._done_fd: int | None = None  # of a step in the background
        self._is_halted = False
        self._run: StepsInBackground | None = None  # in the background

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Start the thread, and wait for its end with the scope.

        Raises:
            ResourceShortage: no thread or no descriptor can be had now.
        """
        failure: BaseException | None = None
        with self._background_steps():
            async with trio.open_nursery() as nursery:
                # In a nursery, so that leaving the scope waits for the thread's end.
                try:
                    # Shielded: a task that is cancelled while it starts would stay, and wait for jobs for ever.
                    with typed_shortages(PURPOSE), trio.CancelScope(shield=True):
                        await nursery.start(self._run_thread)
                    try:
                        yield
                    finally:
                        self._jobs.put(None)
                except BaseException as error:  # raised again below, without the nursery's group around it
                    failure = error
        if failure is not None:
            raise failure

    @contextmanager
    def _background_steps(self) -> Iterator[None]:
        if sys.platform != "linux":
            yield
            return
        # Elsewhere than on Linux all steps go through the thread.
        with typed_shortages(PURPOSE):
            self._done_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            yield
        finally:
            os.close(self._done_fd)
            self._done_fd = None

    async def _run_thread(self, *, task_status: trio.TaskStatus[None]) -> None:
        token = trio.lowlevel.current_trio_token()

        def work() -> None:
            # Told from the thread itself: a job for one that cannot be started would be waited for for ever.
            token.run_sync_soon(task_status.started)
            self._work()

        # Its own limiter: the default one is shared with file and name look-ups, which must not wait for a model.
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(work, limiter=trio.CapacityLimiter(1), thread_name="triolet-runner")

    def use_weights(self, folder: str | None) -> None:
        self._kept.use_weights(folder)

    def forget_model(self) -> None:
        self._kept.forget()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    async def _call(self, function: Callable[[], T], on_cancel: Callable[[], None] = lambda: None) -> T:
        """Call a function in the thread and wait for its end, even when cancelled; `on_cancel` may hurry it."""
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

    async def _call_and_tell(
        self,
        function: Callable[[Callable[[Told], object]], T],
        tell: Callable[[Told], object],
        on_stop: Callable[[], None],
    ) -> T:
        """Call a function in the thread, and `tell`, in this one, with what it tells meanwhile; see `_call`.

        Args:
            function: takes what it tells with.
            tell: an error of it is raised once the function has ended.
            on_stop: hurries the function, whose result is not wanted any more.
        """
        token = trio.lowlevel.current_trio_token()
        errors: list[BaseException] = []

        def tell_here(told: Told) -> None:
            if errors:
                return
            try:
                tell(told)
            except BaseException as error:  # from here it would tear down Trio itself
                errors.append(error)
                on_stop()

        try:
            result = await self._call(
                partial(function, lambda told: token.run_sync_soon(tell_here, told)), on_stop
            )
        except Exception:
            if not errors:
                raise
        if errors:
            raise errors[0]
        return result

    async def start(self, on_progress: OnProgress) -> ModelInfo:
        """Load the model; `on_progress` is called in the Trio thread.

        A load that was cancelled, or whose `on_progress` raised, ends at its next report.
        """
        is_unwanted = threading.Event()

        def load(tell: Callable[[LoadProgress], object]) -> ModelInfo:
            def report(progress: LoadProgress) -> None:
                if is_unwanted.is_set():
                    raise LoadCancelled
                tell(progress)

            return self._kept.start(report)

        return await self._call_and_tell(load, on_progress, is_unwanted.set)

    async def execute(self, plan: StepPlan, tell: Tell) -> StepResult:
        self._is_halted = False
        background, done_fd = self._kept.background, self._done_fd
        if background is not None and done_fd is not None:
            self._run = background.begin(plan, done_fd)
            if self._run is not None:
                return await self._follow(self._run, done_fd, tell)
        return await self._call_and_tell(partial(self._compute, plan), tell, self.halt)

    async def prepare_adapter(self, adapter: Adapter, *, is_pinned: bool) -> None:
        # Not in the runner's own thread: a step must not wait for the disk.
        prepare = partial(self._kept.prepare_adapter, adapter, is_pinned)
        await run_in_thread(prepare, "reading an adapter")

    async def call(self, call: WorkerCall, limit_s: float | None) -> WorkerOutcome:
        return await self._call(partial(self._kept.call, call))

    def halt(self) -> None:
        self._is_halted = True
        if self._run is not None:
            self._run.halt()

    async def _follow(self, run: StepsInBackground, done_fd: int, tell: Tell) -> StepResult:
        """Wait for the results of a plan in the background, to its end, even when cancelled."""
        try:
            while True:
                for result in run.results(await _count_written(done_fd)):
                    if result.is_last:
                        return result
                    tell(result)
        except BaseException:  # usually Cancelled; the model writes into the run's memory until it is over
            run.halt()
            with trio.CancelScope(shield=True):
                while not run.is_over:
                    run.results(await _count_written(done_fd))
            raise
        finally:
            self._run = None

    def _compute(self, plan: StepPlan, tell: Callable[[StepResult], object]) -> StepResult:
        for result in steps_of(plan, self._kept.execute, lambda: self._is_halted):
            if result.is_last:
                break
            tell(result)
        return result


async def _count_written(eventfd: int) -> int:
    """Wait until an eventfd is written to; reset it and return its count."""
    await trio.lowlevel.wait_readable(eventfd)
    return os.eventfd_read(eventfd)
