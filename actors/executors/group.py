"""Executor whose model is computed by a group of processes, each with a part of it: tensor parallelism.

Every rank is a process with pipes and a lifeline of its own, and gets the same frames. All reply, and rank 0's results
count. A rank that dies or hangs ends the group: the others, which wait for it, are killed, and the supervisor starts a
new life.
"""

from __future__ import annotations

import sys
import tempfile
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import attrs
import trio

from triolet.actors.executors.contract import Executor, Tell
from triolet.actors.executors.process import ProcessExecutor
from triolet.config.engine import EngineConfig
from triolet.core.load_progress import LoadProgress, OnProgress
from triolet.core.recovery.supervision import typed_shortages
from triolet.core.request.lora import Adapter
from triolet.core.request.model_info import ModelInfo
from triolet.core.step_plan import StepPlan, StepResult
from triolet.core.worker_call import WorkerCall, WorkerOutcome
from triolet.errors import ConfigError, RunnerDied, RunnerFailed

T = TypeVar("T")

GRACE_S = 1.0  # from the failure of one rank in a load until the others are killed


class Rendezvous:
    """Folder on a machine in which the ranks of a group find each other, life after life."""

    def __init__(self) -> None:
        self._life = 0
        self._folder = tempfile.TemporaryDirectory(prefix="triolet-ranks-")

    def begin_life(self) -> None:
        """Have the ranks that start from now on meet each other, and none of an earlier life."""
        self._life += 1
        (Path(self._folder.name) / "life").write_text(str(self._life))

    def command(self, rank: int, size: int) -> tuple[str, ...]:
        """Return the command that starts a rank."""
        module = "triolet.workers.rank"
        return (sys.executable, "-P", "-m", module, str(rank), str(size), self._folder.name)

    def close(self) -> None:
        """Remove the folder."""
        self._folder.cleanup()


class GroupExecutor(Executor):
    """Executor of several processes.

    Args:
        ranks: executors of the ranks.
        begin_life: called before they are started.
    """

    def __init__(self, ranks: Sequence[ProcessExecutor], begin_life: Callable[[], Awaitable[None]]) -> None:
        self._ranks, self._begin_life = ranks, begin_life
        for rank in ranks:
            rank.peers = ranks
        self._deaths: list[RunnerDied] = []  # of this life, in their order
        self._asking: trio.CancelScope | None = None  # of the call that all ranks are to answer

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Start the processes, and end them with the scope; see `ProcessExecutor.running`."""
        await self._begin_life()
        failures: list[BaseException] = []
        body, is_over = trio.CancelScope(), trio.Event()
        self._deaths.clear()

        async def hold(rank: ProcessExecutor, task_status: trio.TaskStatus[None]) -> None:
            try:
                async with rank.running():
                    task_status.started()
                    await is_over.wait()
                    # The next load waits for the memory of this one, and the supervisor need not.
                    if any(isinstance(failure, RunnerDied) for failure in failures):
                        await rank.kill("was killed, since another rank had ended")
            except RunnerDied as death:
                self._deaths.append(death)
                if self._asking is None:
                    body.cancel()
                else:  # its own last reply may be there already, and the others' on their way
                    _end_within(self._asking, GRACE_S)

        # Each rank is held by a task of its own: its death must not hide the reason of another one's.
        try:
            async with trio.open_nursery() as nursery:
                try:
                    for rank in self._ranks:
                        await nursery.start(hold, rank)
                    with body:
                        yield
                except BaseException as error:
                    failures.append(error)
                if body.cancelled_caught:
                    failures.append(self._deaths[0])
                is_over.set()
        except BaseExceptionGroup:
            # Of a failure in the body it holds the cancellation that came with it, at most.
            if not failures or isinstance(failures[0], trio.Cancelled):
                raise  # what a rank's own task ended with
        if failures:
            raise failures[0]

    async def start(self, on_progress: OnProgress) -> ModelInfo:
        """Load all parts of the model; rank 0's progress is reported. See `ProcessExecutor.start`."""
        infos = await self._on_all(
            lambda rank: self._ranks[rank].start(_ignore if rank else on_progress), GRACE_S
        )
        return infos[0]

    async def execute(self, plan: StepPlan, tell: Tell) -> StepResult:
        """Compute a plan on all ranks; see `ProcessExecutor.execute`.

        Raises:
            RunnerFailed: the ranks have chosen different tokens.
        """
        told: list[deque[StepResult]] = [deque() for _ in self._ranks]

        def hear(rank: int, result: StepResult) -> None:
            told[rank].append(result)
            if all(told):  # only what all ranks say is passed on
                tell(_agreed([results.popleft() for results in told]))

        return _agreed(await self._on_all(lambda rank: self._ranks[rank].execute(plan, partial(hear, rank))))

    async def _on_all(self, call: Callable[[int], Awaitable[T]], grace_s: float = 0.0) -> list[T]:
        """Make a call on all ranks; return what each gives. The first failure ends the group.

        Args:
            call: takes the rank.
            grace_s: from the first failure until the ranks that have not replied are killed, seconds.
        """
        results: dict[int, T] = {}
        failures: list[Exception] = []

        async def on(rank: int, asking: trio.CancelScope) -> None:
            try:
                results[rank] = await call(rank)
            except Exception as failure:
                failures.append(failure)
                # A load that one rank refuses makes its peers fail, perhaps earlier: its reason is waited for.
                _end_within(asking, grace_s)

        try:
            async with trio.open_nursery() as nursery:
                self._asking = nursery.cancel_scope
                for rank in range(len(self._ranks)):
                    nursery.start_soon(on, rank, nursery.cancel_scope)
        finally:
            self._asking = None
        # A rank whose peer has died fails, too; a refusal says most, then the death.
        failures += self._deaths
        for kind in (ConfigError, RunnerDied, Exception):
            for failure in failures:
                if isinstance(failure, kind):
                    raise failure
        return [results[rank] for rank in range(len(self._ranks))]

    async def prepare_adapter(self, adapter: Adapter, *, is_pinned: bool) -> None:
        for rank in self._ranks:
            await rank.prepare_adapter(adapter, is_pinned=is_pinned)

    async def call(self, call: WorkerCall, limit_s: float | None) -> WorkerOutcome:
        """Call the worker of every rank; return the outcome with all values, or the first that is an error."""
        outcomes = await self._on_all(lambda rank: self._ranks[rank].call(call, limit_s))
        for outcome in outcomes:
            if outcome.error is not None:
                return outcome
        return WorkerOutcome(outcomes[0].value, others=tuple(outcome.value for outcome in outcomes[1:]))

    def use_weights(self, folder: str | None) -> None:
        for rank in self._ranks:
            rank.use_weights(folder)

    def forget_model(self) -> None:
        """Do nothing: the model has ended with its processes."""

    def halt(self) -> None:
        for rank in self._ranks:
            rank.halt()


class LocalGroup(GroupExecutor):
    """Executor of several processes on this machine; see `GroupExecutor`.

    Args:
        config: with a `model` and a `tensor_parallel_size` above 1.
    Raises:
        ConfigError: a field that a group does not honour.
    """

    def __init__(self, config: EngineConfig) -> None:
        check_group(config)
        self._rendezvous, size = Rendezvous(), config.tensor_parallel_size
        if sys.platform != "linux":
            config = attrs.evolve(
                config, keep_standby=False
            )  # all ranks are replaced, and one of them has died
        commands = [self._rendezvous.command(rank, size) for rank in range(size)]
        ranks = [ProcessExecutor(config, command, (*command, "fork")) for command in commands]
        super().__init__(ranks, self._meet)

    async def _meet(self) -> None:
        await trio.lowlevel.checkpoint()
        with typed_shortages("a process for the model runner"):
            self._rendezvous.begin_life()
            for rank in self._ranks:  # all at once, although they are started one after the other
                rank.prepare()

    def close(self) -> None:
        """Remove the folder in which the ranks find each other."""
        self._rendezvous.close()


def check_group(config: EngineConfig) -> None:
    """Check what a group does not honour.

    Raises:
        ConfigError: naming the first field of these that is given.
    """
    for field, is_wrong in (
        ("runner", config.runner in ("inline", "thread")),
        ("quantization", config.quantization != "none"),
        ("enable_lora", config.enable_lora),
        ("convert", config.convert != "auto"),
        ("classifier_from_token", bool(config.classifier_from_token)),
        ("weights_cache", config.weights_cache is not None),
        ("kv_store", config.kv_store is not None),
        ("kv_pool_bytes", config.kv_pool_bytes > 0),
        ("profile_dir", config.profile_dir is not None),
        ("device", ":" in config.device),  # each rank has a device of its own
    ):
        if is_wrong:
            rule = f"1 with {field} {getattr(config, field)!r}"
            raise ConfigError("tensor_parallel_size", rule, config.tensor_parallel_size)


def _end_within(scope: trio.CancelScope, grace_s: float) -> None:
    """Cancel a scope after a time, or when it would be cancelled anyway."""
    scope.deadline = min(scope.deadline, trio.current_time() + grace_s)


def _agreed(results: Sequence[StepResult]) -> StepResult:
    """Return rank 0's result of a step, if the others have chosen the same tokens.

    Raises:
        RunnerFailed: they have not: their KV caches would differ from here on, and no answer could be trusted.
    """
    first, *others = [
        [(token.request_id, token.position, token.token_id) for token in result.tokens] for result in results
    ]
    for rank, tokens in enumerate(others, start=1):
        if tokens != first:
            raise RunnerFailed(f"rank {rank} chose tokens {tokens}, and rank 0 {first}")
    return results[0]


def _ignore(told: LoadProgress) -> None:
    pass
