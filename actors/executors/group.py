"""Executor whose model is computed by a group of processes, each with a part of it: tensor parallelism.

Every rank is a process with pipes and a lifeline of its own, and gets the same frames. All reply, and rank 0's results
count. A rank that dies or hangs ends the group: the others, which wait for it, are killed, and the supervisor starts a
new life.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TypeVar

import trio

from triolet.actors.executors.contract import Tell
from triolet.actors.executors.process import ProcessExecutor
from triolet.config.engine import EngineConfig
from triolet.core.load_progress import LoadProgress, OnProgress
from triolet.core.request.lora import Adapter
from triolet.core.request.model_info import ModelInfo
from triolet.core.step_plan import StepPlan, StepResult
from triolet.core.worker_call import WorkerCall, WorkerOutcome
from triolet.errors import ConfigError, RunnerDied

T = TypeVar("T")

GRACE_S = 1.0  # from the failure of one rank in a load until the others are killed


class GroupExecutor:
    """Executor of several processes.

    Args:
        config: with a `model` and a `tensor_parallel_size` above 1.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._life = 0
        self._folder = tempfile.TemporaryDirectory(prefix="triolet-ranks-")
        self._meeting = Path(self._folder.name)
        size = config.tensor_parallel_size
        self._ranks = [ProcessExecutor(config, self._command(rank, size)) for rank in range(size)]

    def _command(self, rank: int, size: int) -> tuple[str, ...]:
        module = "triolet.workers.rank"
        return (sys.executable, "-P", "-m", module, str(rank), str(size), str(self._meeting))

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Start the processes, and end them with the scope; see `ProcessExecutor.running`."""
        self._life += 1
        (self._meeting / "life").write_text(str(self._life))
        async with AsyncExitStack() as stack:
            for rank in self._ranks:
                await stack.enter_async_context(rank.running())
            yield

    async def start(self, on_progress: OnProgress) -> ModelInfo:
        """Load all parts of the model; rank 0's progress is reported. See `ProcessExecutor.start`."""
        return await self._on_all(
            lambda rank: rank.start(on_progress if rank is self._ranks[0] else _ignore), GRACE_S
        )

    async def execute(self, plan: StepPlan, tell: Tell) -> StepResult:
        """Compute a plan on all ranks; see `ProcessExecutor.execute`."""
        return await self._on_all(
            lambda rank: rank.execute(plan, tell if rank is self._ranks[0] else _ignore)
        )

    async def _on_all(self, call: Callable[[ProcessExecutor], Awaitable[T]], grace_s: float = 0.0) -> T:
        """Make a call on all ranks; return what rank 0 gives. The first failure ends the group."""
        results: dict[ProcessExecutor, T] = {}
        failures: list[Exception] = []
        async with trio.open_nursery() as nursery:

            async def on(rank: ProcessExecutor) -> None:
                try:
                    results[rank] = await call(rank)
                except Exception as failure:
                    failures.append(failure)
                    # A load that one rank refuses makes its peers fail, perhaps earlier: its reason is waited for.
                    nursery.cancel_scope.deadline = trio.current_time() + grace_s

            for rank in self._ranks:
                nursery.start_soon(on, rank)
        if failures:
            # A rank whose peer has died fails, too; a refusal says most, then the death.
            kinds = (ConfigError, RunnerDied)
            raise next((each for kind in kinds for each in failures if isinstance(each, kind)), failures[0])
        return results[self._ranks[0]]

    async def prepare_adapter(self, adapter: Adapter, *, is_pinned: bool) -> None:
        for rank in self._ranks:
            await rank.prepare_adapter(adapter, is_pinned=is_pinned)

    async def call(self, call: WorkerCall, limit_s: float | None) -> WorkerOutcome:
        """Call the worker of every rank; return rank 0's outcome."""
        return await self._on_all(lambda rank: rank.call(call, limit_s))

    def use_weights(self, folder: str | None) -> None:
        for rank in self._ranks:
            rank.use_weights(folder)

    def forget_model(self) -> None:
        """Do nothing: the model has ended with its processes."""

    def halt(self) -> None:
        for rank in self._ranks:
            rank.halt()

    def close(self) -> None:
        """Remove the folder in which the ranks find each other."""
        self._folder.cleanup()


def _ignore(told: LoadProgress | StepResult) -> None:
    pass
