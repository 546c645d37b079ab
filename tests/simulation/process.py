"""A simulated process of the model runner: the real executor of processes, with frames in memory in place of pipes.

Its task computes what it has been sent, one plan after the other, whether or not the engine has read the results. The
engine's side reads frames, limits the time of every step, and kills what hangs, as it does with a process.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import attrs
import trio

from tests.simulation.model import FaultyExecutor
from tests.simulation.world import World, is_planted
from triolet.actors.executors.connection import Posted, RunnerConnection
from triolet.actors.executors.contract import Following, Tell
from triolet.actors.executors.process import ProcessExecutor
from triolet.actors.supervisor import foreign_errors_kept
from triolet.config.engine import EngineConfig
from triolet.core.step_plan import StepPlan, StepResult, after_step
from triolet.core.worker_call import WorkerCall, WorkerOutcome
from triolet.errors import RunnerDied
from triolet.ipc.failures import describe
from triolet.ipc.messages import REPLIES, REQUESTS, Reply

Compute = Callable[[StepPlan], Awaitable[StepResult]]


@attrs.define(eq=False)
class SimulatedProcess(RunnerConnection):
    """One process: a task, and channels in place of pipes."""

    world: World
    compute: Compute
    _requests: trio.MemorySendChannel[bytes] = attrs.field(init=False)
    _unread: trio.MemoryReceiveChannel[bytes] = attrs.field(init=False)
    _replies: trio.MemoryReceiveChannel[bytes] = attrs.field(init=False)
    _outbox: trio.MemorySendChannel[bytes] = attrs.field(init=False)
    _life: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)
    _cause: RunnerDied | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self._requests, self._unread = trio.open_memory_channel(math.inf)
        self._outbox, self._replies = trio.open_memory_channel(math.inf)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[RunnerConnection]:
        failures: list[BaseException] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._work)
            try:
                with self._idle:
                    yield self
                if self._idle.cancelled_caught:
                    raise await self.death()
            except BaseException as error:
                failures.append(error)
            nursery.cancel_scope.cancel()
        if failures:
            raise failures[0]

    def post(self, message: Posted) -> bool:
        if self._dying.is_set():
            return False
        self._requests.send_nowait(REQUESTS.pack(message))
        return True

    async def gone(self) -> None:
        await trio.lowlevel.checkpoint()

    @property
    def is_alive(self) -> bool:
        return not self._dying.is_set()

    def _kill(self) -> None:
        self._end(RunnerDied("was killed by SIGKILL", -9))

    async def death(self, reason: str | None = None, *, is_hang: bool = False) -> RunnerDied:
        self._kill()
        await trio.lowlevel.checkpoint()
        self.world.expect(reason is None or is_hang, f"the process {reason}")
        assert self._cause is not None
        return self._cause if reason is None else RunnerDied(reason, -9, is_hang=is_hang)

    async def _send(self, frame: bytes) -> None:
        await trio.lowlevel.checkpoint()
        if self._dying.is_set():
            raise trio.BrokenResourceError
        self._requests.send_nowait(frame)

    async def _receive(self) -> bytes:
        try:
            return await self._replies.receive()
        except trio.EndOfChannel:
            return b""

    def _end(self, cause: RunnerDied) -> None:
        """It is dead from here on; what it has replied may still be read."""
        self._cause = self._cause or cause
        self._life.cancel()
        self._outbox.close()
        self._note_death()

    async def _work(self) -> None:
        reader = REQUESTS.reader()
        with self._life:
            async for frame in self._unread:
                reader.feed(frame)
                for request in REQUESTS.messages(reader):
                    if isinstance(request, StepPlan):
                        await self._answer(request)

    async def _answer(self, plan: StepPlan) -> None:
        errors: list[BaseException] = []
        rest: StepPlan | None = plan
        with foreign_errors_kept(errors.append):
            while rest is not None:
                result = await self.compute(rest)
                must_halt = self._unread.statistics().current_buffer_used > 0
                result, rest = after_step(rest, result, must_halt=must_halt)
                self._reply(result)
        for error in errors:
            self.world.expect(is_planted(error), f"the process failed of itself: {error!r}")
            if isinstance(error, RunnerDied):
                self._end(error)
            else:
                self._reply(describe(error))
                self._end(RunnerDied("ended with exit status 1", 1))

    def _reply(self, reply: Reply) -> None:
        if self.is_alive:  # it may have been killed at the very end of its step
            self._outbox.send_nowait(REPLIES.pack(reply))


class _Executor(ProcessExecutor):
    """The real one, without a standby."""

    def __init__(self, world: World, compute: Compute) -> None:
        limits = world.story.limits
        super().__init__(EngineConfig(model="nowhere", step_timeout=limits["step_timeout"]))
        self._world, self._compute = world, compute

    async def _next_process(self) -> RunnerConnection:
        return SimulatedProcess(self._world, self._compute)

    def _suspect(self) -> None:
        pass


class FaultyProcessExecutor(FaultyExecutor):
    """The runner of a story in a process, which is sent plans ahead."""

    def __init__(self, world: World, replica: int = 0) -> None:
        super().__init__(world, replica)
        self._process = _Executor(world, self.compute)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        async with super().running(), self._process.running():
            yield

    async def execute(self, plan: StepPlan, tell: Tell) -> StepResult:
        return await self._process.execute(plan, tell)

    async def execute_in_turn(self, plan: StepPlan, tell: Tell, following: Following) -> StepResult:
        return await self._process.execute_in_turn(plan, tell, following)

    def send_ahead(self, plan: StepPlan) -> None:
        self._process.send_ahead(plan)

    async def call(self, call: WorkerCall, limit_s: float | None) -> WorkerOutcome:
        self.world.expect(not self._process._sent, "a call is made while plans are open")
        return await super().call(call, limit_s)

    def halt(self) -> None:
        self._process.halt()

    async def _hang(self, plan: StepPlan) -> None:
        """What hangs is ended by the engine's side; that is a crash of its rows."""
        self.world.num_crashes += self._lengths(plan)
        await trio.sleep_forever()
