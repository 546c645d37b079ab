"""Executor whose model runs in a process of its own: what happens there is, here, at worst an exception.

Every life has its own process, which loads the weights again: what a driver or a library has broken is left behind with
it. The process speaks frames (`ipc`) over its standard input and output; what it writes to standard error goes into the
log. However it ends, this side knows within milliseconds: from the end of its lifeline (`ipc.lifeline`), or from the
operating system if something else still holds that pipe.

The first life decides how many KV blocks there are. Later ones are asked for as many, whatever memory is free by then:
requests in flight were admitted for that number. If a load fails so, the next one measures anew, and the scheduler ends
what no longer fits.

A plan is sent before the result of the one before it has come, if it was made before that (`send_ahead`): the process
hands it to its device at once. Each has the time that its kind of step may take, from the result of the one before it.

    life of a process: spawned -> asked to load -> asked for step after step -> its requests end -> reaped
    one that dies:     ... -> its lifeline ends: the supervisor is told, the next one is spawned -> reaped -> that loads

A fresh process needs seconds to import torch. So every process is a fork of a server that has imported it
(`child_process.ForkServer`); elsewhere than on Linux, ten seconds after a load one is started that imports it, and
replaces the one that dies. With `keep_standby` off, this `Standby` is started where a reply takes a third of the time
after which the process counts as hung. If the reply comes after all, it is ended a few seconds later.

The system takes tens of milliseconds to free the memory of a process, and longer for a device's. Only the next process
waits for that, before it loads.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import NoReturn

import trio

from triolet.actors.executors.call_frames import packed_call, value_of
from triolet.actors.executors.child_process import FORK_SERVER, IMPORT_SILENCE_S, ForkServer
from triolet.actors.executors.connection import RunnerConnection, RunnerProcess
from triolet.actors.executors.contract import (
    Following,
    LookAheadExecutor,
    Tell,
    with_kv_cache,
    with_weights,
)
from triolet.actors.executors.standby import ForkSource, Standby
from triolet.config.devices import cores_of
from triolet.config.engine import EngineConfig
from triolet.core.load_progress import IMPORTS, LoadProgress, OnProgress
from triolet.core.recovery.recovery_state import HangLimit, RareHangLimit, step_kind
from triolet.core.request.lora import Adapter
from triolet.core.request.model_info import ModelInfo
from triolet.core.step_plan import StepPlan, StepResult
from triolet.core.worker_call import WorkerCall, WorkerOutcome
from triolet.errors import (
    FrameError,
    InvalidRequest,
    ModelError,
    ResourceShortage,
    RunnerDied,
    RunnerFailed,
)
from triolet.ipc.failures import Failure, rebuild, rebuild_call_error
from triolet.ipc.messages import (
    CallAnswer,
    ImportModules,
    PrepareAdapter,
    Reply,
)

# -P: the folder that the engine was started in is nowhere to look for modules.
WORKER: tuple[str, ...] = (sys.executable, "-P", "-m", "triolet.workers.runner")

# A process that hangs is killed: in a step after the time that `core.recovery.recovery_state` has learned,
# and in a load that makes no progress after a multiple of the longest silence of the loads before. The first one has
# no limit: it may compile kernels, and the operator watches it. A silent load that uses a processor is slow rather than
# stuck, perhaps on a machine that has become busy since: it has such a limit several times.
SUSPICION = 1 / 3  # of such a limit, after which a standby is started
NUM_BUSY_LIMITS = 4  # of a load that computes
LOOK = 0.9  # of such a limit, after which it is asked for the processor time
BUSY = 0.05  # part of that time for which a load has had a processor, if it computes


class ProcessExecutor(LookAheadExecutor):
    """Executor in a process.

    Args:
        config: with a `model`; sent to the process without secrets.
        command: starts the process.
        fork_server: starts a server whose forks do the same, on Linux; None for that of `WORKER`, or for none.
    """

    def __init__(
        self,
        config: EngineConfig,
        command: Sequence[str] = WORKER,
        fork_server: Sequence[str] | None = None,
    ) -> None:
        self._config = config.without_secrets()
        self._command = tuple(command)
        self._process: RunnerConnection | None = None
        self._former: RunnerConnection | None = None
        # Bound from its beginning on: the imports of one replica's next process must not slow down the others.
        cores = cores_of(config.device)
        self._spawn = partial(RunnerProcess.spawn, self._command, cores)
        if self._command == WORKER:
            fork_server = fork_server or FORK_SERVER
        if sys.platform != "linux":
            fork_server = None
        self._has_fork_server = fork_server is not None
        self._standby = Standby(
            partial(_spawn_importing, self._spawn)
            if fork_server is None
            else partial(_spawn_fork_server, fork_server, cores),
            is_kept=config.keep_standby,
        )
        self._load_silence = RareHangLimit(None)  # of the time in which a load makes no progress
        self._has_to_import = False  # whether the process has not imported yet what a load needs
        self._knows_imports = False  # whether the longest silence is that of such a process, too
        self._next_config = self._config  # of the next load
        self._hang_limit = HangLimit(config.step_timeout)
        # Plans that were sent and have no last result, in their order.
        self._sent: deque[StepPlan] = deque()
        self._ahead: StepPlan | None = None  # a plan made ahead that was not sent so far
        self._halted: StepPlan | None = None  # the last plan that was
        self._is_on_cpu = False  # whether the process computes there
        self._has_lacked_memory = False  # whether it found none for the last step
        self._folder: str | None = None  # of the weights; None for those of the configuration
        self._unsent: list[PrepareAdapter] = []  # adapters to prepare, told with the next plan
        self.peers: Sequence[ProcessExecutor] = (self,)
        """Executors that load together, this one among them: one that is silent may wait for another one."""

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Start a process, and end it with the scope.

        Raises:
            ResourceShortage: no process can be started now.
            RunnerDied: the process ended between two requests.
        """
        self._hang_limit = HangLimit(self._config.step_timeout)
        self._unsent.clear()
        process = await self._next_process()
        is_replaced = False
        try:
            async with process.running() as self._process:
                yield
        except RunnerDied:
            is_replaced = True
            self._standby.expire()  # there may be no next life
            raise
        finally:
            self._process, self._former = None, process
            if not is_replaced:
                await self._standby.end()

    def prepare(self) -> None:
        """Start what the next process is a fork of, so that its imports begin before `running`."""
        if self._config.keep_standby and self._has_fork_server:
            self._standby.start()
            self._standby.expire()

    async def _next_process(self) -> RunnerConnection:
        """Return the process of the next life."""
        if self._config.keep_standby and self._has_fork_server:
            self._standby.start()
        process = await self._standby.take()
        self._has_to_import = process is None
        if process is None:
            return self._spawn()
        if self._config.keep_standby:
            self._standby.start()  # crashes often come in series
        return process

    def _suspect(self) -> None:
        """Prepare for a process that may hang."""
        self._standby.start()

    def _trust(self) -> None:
        """Prepare for the death of a process that has loaded the model."""
        if self._config.keep_standby:
            self._standby.keep()

    async def start(self, on_progress: OnProgress) -> ModelInfo:
        """Load the model; only the loads up to the first that succeeds are reported.

        Raises:
            ConfigError: a field that does not fit the model or the machine.
            ModelError: the model cannot be loaded.
            ResourceShortage: it cannot be loaded now.
            RunnerDied: the process ended meanwhile, or made no progress for too long.
        """
        process, config = self._here(), self._next_config
        self._next_config = self._config  # unless this load succeeds, the next one measures free memory anew
        limit_s = self._load_silence_limit_s()
        late = f"made no progress in loading the model for more than {limit_s} s"
        silence_s, heard_s = 0.0, trio.current_time()
        async with self._hangs_counted(), process.conversation(limit_s, late):
            if self._former is not None:
                await self._former.gone()  # it may still hold most of the memory
            await process.ask(config if self._folder is None else with_weights(config, self._folder))
            while isinstance(reply := await self._load_reply(process, limit_s), LoadProgress):
                process.allow(limit_s)
                silence_s, heard_s = max(silence_s, trio.current_time() - heard_s), trio.current_time()
                if not self._load_silence.is_learned and reply.stage != IMPORTS:
                    on_progress(reply)
            if not isinstance(reply, ModelInfo | Failure):
                raise FrameError(f"a load must end with a ModelInfo; got a {type(reply).__name__}")
        if isinstance(reply, Failure):
            raise rebuild(reply, otherwise=ModelError)
        self._is_on_cpu, self._has_lacked_memory = reply.device == "cpu", False
        self._load_silence.observe(max(silence_s, trio.current_time() - heard_s))
        self._knows_imports |= self._has_to_import
        self._next_config = with_kv_cache(self._config, reply) if config is self._config else config
        self._trust()
        return reply

    async def _load_reply(self, process: RunnerConnection, limit_s: float | None) -> Reply:
        """Receive the next reply to a load, which has its time again and again while it computes."""
        if limit_s is None:
            return await process.reply()
        for _ in range(NUM_BUSY_LIMITS):
            process.allow(limit_s)
            before_s = self._processor_times()
            with trio.move_on_after(LOOK * limit_s):
                return await self._reply(process, limit_s)
            used_s = sum(now_s - before_s.get(rank, now_s) for rank, now_s in self._processor_times().items())
            if used_s < BUSY * LOOK * limit_s:
                break
        return await process.reply()

    def _processor_times(self) -> dict[RunnerConnection, float]:
        """Return the processor time of each process that loads together with this one, seconds."""
        return {each._process: each._process.processor_s for each in self.peers if each._process is not None}

    async def _reply(self, process: RunnerConnection, limit_s: float | None) -> Reply:
        """Receive the next reply; start a standby process if it takes so long that it may never come."""
        if limit_s is not None:
            with trio.move_on_after(limit_s * SUSPICION):
                return await process.reply()
            self._suspect()
            try:
                return await process.reply()
            finally:
                if not self._config.keep_standby:
                    self._standby.expire()
        return await process.reply()

    def _load_silence_limit_s(self) -> float | None:
        limit_s = None if self._config.step_timeout is None else self._load_silence.limit_s()
        # A load in a fork says nothing of one that imports first, or waits for a rank that does.
        if limit_s is not None and any(one._has_to_import and not one._knows_imports for one in self.peers):
            return max(limit_s, IMPORT_SILENCE_S)
        return limit_s

    @asynccontextmanager
    async def _hangs_counted(self) -> AsyncGenerator[None]:
        try:
            yield
        except RunnerDied as death:
            if death.is_hang:
                self._load_silence.count_hang()
            raise

    async def execute(self, plan: StepPlan, tell: Tell) -> StepResult:
        """Compute a plan. A cancelled caller does not wait for the step: the process is killed.

        Raises:
            RunnerDied: the process ended, or hung in a step.
            RunnerFailed: a step raised an exception.
            ResourceShortage: on a CPU, there is no memory for a step of one token.
        """
        return await self.execute_in_turn(plan, tell, _nothing_follows)

    async def execute_in_turn(self, plan: StepPlan, tell: Tell, following: Following) -> StepResult:
        """Compute a plan and those that follow it, within one conversation; see `execute`.

        Each plan has the time that its kind of step may take, from the result of the one before it.
        """
        process = self._here()
        async with process.conversation(*self._step_limit(plan)):
            try:
                await self._send(process, plan)
                reply = await self._last_reply(process, tell)
                while isinstance(reply, StepResult):
                    # Sent before anything else is done about the result: the runner must not wait.
                    follower = following()
                    is_sent = follower is None or self._send_now(process, follower)
                    if is_sent and not self._sent:
                        return reply
                    tell(reply)
                    if follower is not None and not is_sent:
                        await self._send(process, follower)
                    process.allow(*self._step_limit(self._sent[0]))
                    reply = await self._last_reply(process, tell)
            finally:
                self._sent.clear()
        assert isinstance(reply, Failure)
        raise rebuild(reply, otherwise=RunnerFailed)

    def send_ahead(self, plan: StepPlan) -> None:
        self._ahead = plan
        if self._process is not None:
            with suppress(FrameError):  # raised again when it is the plan's turn
                self._send_the_next(self._process)

    async def _send(self, process: RunnerConnection, plan: StepPlan) -> None:
        while self._unsent:
            await process.ask(self._unsent.pop(0))
        if not self._send_now(process, plan):
            await process.ask(plan)
            self._sent.append(plan)
            self._send_the_next(process)

    def _send_now(self, process: RunnerConnection, plan: StepPlan) -> bool:
        """Send a plan behind the others without waiting, unless it was sent ahead; False if that is not possible."""
        if any(plan is sent for sent in self._sent):
            return True
        if self._unsent or not process.post(plan):
            return False
        self._sent.append(plan)
        self._send_the_next(process)
        return True

    def _send_the_next(self, process: RunnerConnection) -> None:
        """Send the plan ahead, once the plan that it was made after is the last that was sent."""
        plan, last = self._ahead, self._sent[-1] if self._sent else None
        if plan is None or last is None or last.num_steps > 1 or self._unsent:
            return
        # In any other order it would be computed for rows that another plan leaves.
        if plan.is_ahead and plan.step_id == last.step_id + 1 and process.post(plan):
            self._sent.append(plan)
            self._ahead = None

    def _step_limit(self, plan: StepPlan) -> tuple[float | None, str]:
        limit_s = self._hang_limit.limit_s(step_kind(plan))
        source = "step_timeout" if limit_s == self._config.step_timeout else "learned from such steps"
        return limit_s, f"took more than {limit_s} s for a step ({source})"

    async def _last_reply(self, process: RunnerConnection, tell: Tell) -> StepResult | Failure:
        """Receive the replies to the oldest plan that was sent; return the last of them."""
        plan, began_s = self._sent[0], trio.current_time()
        kind = step_kind(plan)
        limit_s, late = self._step_limit(plan)
        while True:
            reply = _checked(await self._reply(process, limit_s), plan)
            if isinstance(reply, Failure):
                return reply
            self._check_memory(plan, reply)
            self._hang_limit.observe(kind, trio.current_time() - began_s)
            if reply.is_last:
                self._sent.popleft()
                return reply
            began_s = trio.current_time()
            process.allow(limit_s, late)
            tell(reply)

    def _check_memory(self, plan: StepPlan, result: StepResult) -> None:
        """Raise ResourceShortage if there was no memory for a step that cannot be any smaller."""
        is_void = plan.is_ahead and self._has_lacked_memory  # not computed, whatever memory there is
        problem = None if is_void else result.out_of_memory
        self._has_lacked_memory = problem is not None
        # A GPU has no more for another process, which would only load its model anew.
        if problem is not None and plan.num_tokens == 1 and self._is_on_cpu:
            raise ResourceShortage("memory", f"a step of one token ({problem})")

    async def prepare_adapter(self, adapter: Adapter, *, is_pinned: bool) -> None:
        await trio.lowlevel.checkpoint()
        if self._process is None:
            return  # the next process is told once it has loaded the model
        message = PrepareAdapter(adapter.path, adapter.digest, is_pinned)
        # A process that loads its model would not know what to do with it.
        if not (self._sent or self._process.is_idle) or not self._process.post(message):
            self._unsent.append(message)

    async def call(self, call: WorkerCall, limit_s: float | None) -> WorkerOutcome:
        """Call the worker; see `Executor.call`. What cannot cross the pipe, either way, is an error of the call."""
        process = self._here()
        try:
            frame = packed_call(call)
        except (InvalidRequest, ResourceShortage) as error:
            await trio.lowlevel.checkpoint()
            return WorkerOutcome(error=error)
        limit_s = None if limit_s is None else max(limit_s, 0.0)
        late = f"took more than {limit_s} s for the call of {call.name}"
        async with process.conversation(limit_s, late):
            await process.ask_packed(frame)
            reply = await process.reply()
            if not isinstance(reply, CallAnswer | Failure):
                raise FrameError(f"a call must end with a CallAnswer; got a {type(reply).__name__}")
        if isinstance(reply, Failure):  # of the process itself, which ends
            raise rebuild(reply, otherwise=RunnerFailed)
        if reply.failure is not None:
            return WorkerOutcome(error=rebuild_call_error(reply.failure))
        try:
            return WorkerOutcome(value_of(reply))
        except Exception as error:  # of this process: the runner is well
            return WorkerOutcome(error=error)

    async def kill(self, reason: str) -> NoReturn:
        """Kill the process, within `running()`; the next load waits until the system has freed what it held.

        Args:
            reason: the end of a sentence on the process, for the error.
        Raises:
            RunnerDied: as soon as the process begins to end.
        """
        raise await self._here().death(reason)

    def use_weights(self, folder: str | None) -> None:
        self._folder = folder

    def forget_model(self) -> None:
        """Do nothing: the model has ended with its process."""

    def halt(self) -> None:
        self._ahead = None  # it is sent in its turn, unless it is taken back
        if self._sent and self._process is not None and self._sent[0] is not self._halted:
            self._halted = self._sent[0]  # once is enough
            self._process.halt()

    def _here(self) -> RunnerConnection:
        if self._process is None:
            raise RuntimeError("an executor must be used within its running()")
        return self._process


def _nothing_follows() -> StepPlan | None:
    """Return None: the executor returns when the plan is computed."""
    return None


def _checked(reply: Reply, plan: StepPlan) -> StepResult | Failure:
    if not isinstance(reply, StepResult | Failure):
        raise FrameError(f"a step must end with a StepResult; got a {type(reply).__name__}")
    if isinstance(reply, StepResult) and reply.step_id != plan.step_id:
        raise FrameError(f"step {plan.step_id} must end with its result; got that of {reply.step_id}")
    return reply


def _spawn_importing(spawn: Callable[[], RunnerProcess]) -> RunnerProcess:
    """Start a process that imports what a load needs, and waits."""
    process = spawn()
    try:
        process.post(ImportModules())
    except BaseException:
        process.discard()
        raise
    return process


def _spawn_fork_server(command: Sequence[str], cores: frozenset[int] | None) -> ForkSource:
    return ForkSource(ForkServer.spawn(command, cores))
