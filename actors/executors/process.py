"""Executor whose model runs in a process of its own: what happens there is, here, at worst an exception.

Every life has its own process, which loads the weights again: what a driver or a library has broken is left behind with
it. The process speaks frames (`ipc`) over its standard input and output; what it writes to standard error goes into the
log. However it ends, this side knows within milliseconds: from the end of its lifeline (`ipc.lifeline`), or from the
operating system if something else still holds that pipe.

The first life decides how many KV blocks there are. Later ones are asked for as many, whatever memory is free by then:
requests in flight were admitted for that number. If a load fails so, the next one measures anew, and the scheduler ends
what no longer fits.

    life of a process: spawned -> asked to load -> asked for step after step -> its requests end -> reaped
    one that dies:     ... -> its lifeline ends: the supervisor is told, the next one is spawned -> reaped -> that loads

A fresh process needs seconds to import torch. Where a reply takes a third of the time after which the process counts
as hung, a standby process is started: it imports the same modules and waits. It replaces the process that is killed. If
the reply comes after all, the standby is ended a few seconds later.

The system takes tens of milliseconds to free the memory of a process, and longer for a device's. Only the next process
waits for that, before it loads.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Final

import attrs
import trio

from triolet.actors.executors.call_frames import packed_call, value_of
from triolet.actors.executors.contract import Tell, with_kv_cache, with_weights
from triolet.actors.executors.standby import Standby
from triolet.config.engine import EngineConfig
from triolet.core.load_progress import IMPORTS, LoadProgress, OnProgress
from triolet.core.recovery.recovery_state import HangLimit, RareHangLimit, step_kind
from triolet.core.recovery.supervision import StderrTail, typed_shortages
from triolet.core.request.lora import Adapter
from triolet.core.request.model_info import ModelInfo
from triolet.core.step_plan import StepPlan, StepResult
from triolet.core.worker_call import WorkerCall, WorkerOutcome
from triolet.errors import (
    FrameError,
    InvalidRequest,
    ModelError,
    RunnerDied,
    RunnerFailed,
)
from triolet.ipc import lifeline
from triolet.ipc.failures import Failure, rebuild, rebuild_call_error
from triolet.ipc.messages import (
    REPLIES,
    REQUESTS,
    CallAnswer,
    FrameReader,
    Halt,
    ImportModules,
    PrepareAdapter,
    Reply,
    Request,
)

STAT_EXIT_CODE = 49  # of the fields behind the name in /proc/PID/stat


def describe_exit(returncode: int) -> str:
    """Describe an exit in words, for a log."""
    if returncode >= 0:
        return f"ended with exit status {returncode}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-returncode).name}"
    return f"was killed by signal {-returncode}"


def exit_code_of(process_id: int) -> int | None:
    """Return the exit code of a process that is dying or not yet waited for, as in `Popen.returncode`.

    Returns:
        None if it cannot be known before the process is waited for; 0 if it lives or is about to end.
    """
    if sys.platform != "linux":
        return None
    try:
        with open(f"/proc/{process_id}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return os.waitstatus_to_exitcode(int(fields[STAT_EXIT_CODE]))
    except (OSError, ValueError, IndexError):
        return None


logger = logging.getLogger("triolet.runner")

# -P: the folder that the engine was started in is nowhere to look for modules.
WORKER: tuple[str, ...] = (sys.executable, "-P", "-m", "triolet.workers.runner")

READ_BYTES = 2**16  # what a pipe holds on Linux
GRACE_S = 1.0  # from the end of its requests until a process is killed
SECRET_VARIABLES: Final = EngineConfig.secret_variables()
MAX_LINE_BYTES = 2_000  # of the log; some libraries draw progress bars without ever ending a line
# A process that hangs is killed: in a step after the time that `core.recovery.recovery_state` has learned,
# and in a load that makes no progress after a multiple of the longest silence of the loads before. The first one has
# no limit: it may compile kernels, and the operator watches it.
SUSPICION = 1 / 3  # of such a limit, after which a standby process is started
RECENT_S = 1.0  # age of the oldest lines that are told with a death, when it is told


class ProcessExecutor:
    """Executor in a process.

    Args:
        config: with a `model`; sent to the process without secrets.
        command: starts the process.
    """

    def __init__(self, config: EngineConfig, command: Sequence[str] = WORKER) -> None:
        self._config = config.without_secrets()
        self._command = tuple(command)
        self._process: RunnerProcess | None = None
        self._former: RunnerProcess | None = None
        self._standby = Standby(partial(RunnerProcess.spawn, self._command))
        self._load_silence = RareHangLimit(None)  # of the time in which a load makes no progress
        self._next_config = self._config  # of the next load
        self._hang_limit = HangLimit(config.step_timeout)
        self._is_running = False
        self._folder: str | None = None  # of the weights; None for those of the configuration
        self._unsent: list[PrepareAdapter] = []  # adapters to prepare, told with the next plan

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Start a process, and end it with the scope.

        Raises:
            ResourceShortage: no process can be started now.
            RunnerDied: the process ended between two requests.
        """
        self._hang_limit = HangLimit(self._config.step_timeout)
        self._unsent.clear()
        # Asked for only if there is one: a process that is killed has none.
        standby = None if self._standby.process is None else self._standby.take()
        process = standby or RunnerProcess.spawn(self._command)
        is_replaced = False
        try:
            async with process.running() as self._process:
                yield
        except RunnerDied:
            is_replaced = True
            raise
        finally:
            self._process, self._former = None, process
            if not is_replaced and self._standby.process is not None:
                await self._standby.end()

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
            while isinstance(reply := await self._reply(process, limit_s), LoadProgress):
                process.allow(limit_s)
                silence_s, heard_s = max(silence_s, trio.current_time() - heard_s), trio.current_time()
                if not self._load_silence.is_learned and reply.stage != IMPORTS:
                    on_progress(reply)
            if not isinstance(reply, ModelInfo | Failure):
                raise FrameError(f"a load must end with a ModelInfo; got a {type(reply).__name__}")
        if isinstance(reply, Failure):
            raise rebuild(reply, otherwise=ModelError)
        self._load_silence.observe(max(silence_s, trio.current_time() - heard_s))
        self._next_config = with_kv_cache(self._config, reply) if config is self._config else config
        return reply

    async def _reply(self, process: RunnerProcess, limit_s: float | None) -> Reply:
        """Receive the next reply; start a standby process if it takes so long that it may never come."""
        if limit_s is not None:
            with trio.move_on_after(limit_s * SUSPICION):
                return await process.reply()
            self._standby.start()
            try:
                return await process.reply()
            finally:
                self._standby.expire()
        return await process.reply()

    def _load_silence_limit_s(self) -> float | None:
        return None if self._config.step_timeout is None else self._load_silence.limit_s()

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
        """
        process, kind = self._here(), step_kind(plan)
        limit_s, began_s = self._hang_limit.limit_s(kind), trio.current_time()
        source = "step_timeout" if limit_s == self._config.step_timeout else "learned from such steps"
        async with process.conversation(limit_s, f"took more than {limit_s} s for a step ({source})"):
            while self._unsent:
                await process.ask(self._unsent.pop(0))
            await process.ask(plan)
            self._is_running = True
            try:
                while (
                    isinstance(reply := await self._reply(process, limit_s), StepResult) and not reply.is_last
                ):
                    _check(reply, plan)
                    self._hang_limit.observe(kind, trio.current_time() - began_s)
                    began_s = trio.current_time()
                    process.allow(limit_s)
                    tell(reply)
            finally:
                self._is_running = False
            _check(reply, plan)
        if isinstance(reply, Failure):
            raise rebuild(reply, otherwise=RunnerFailed)
        assert isinstance(reply, StepResult)
        self._hang_limit.observe(kind, trio.current_time() - began_s)
        return reply

    async def prepare_adapter(self, adapter: Adapter, *, is_pinned: bool) -> None:
        await trio.lowlevel.checkpoint()
        if self._process is None:
            return  # the next process is told once it has loaded the model
        message = PrepareAdapter(adapter.path, adapter.digest, is_pinned)
        # While a plan is being sent, nothing may come in between.
        if not (self._is_running or self._process.is_idle) or not self._process.post(message):
            self._unsent.append(message)

    async def call(self, call: WorkerCall, limit_s: float | None) -> WorkerOutcome:
        """Call the worker; see `Executor.call`. What cannot cross the pipe is an error of the call."""
        process = self._here()
        try:
            request = packed_call(call)
        except InvalidRequest as error:
            await trio.lowlevel.checkpoint()
            return WorkerOutcome(error=error)
        limit_s = None if limit_s is None else max(limit_s, 0.0)
        late = f"took more than {limit_s} s for the call of {call.name}"
        async with process.conversation(limit_s, late):
            await process.ask(request)
            reply = await process.reply()
            if not isinstance(reply, CallAnswer | Failure):
                raise FrameError(f"a call must end with a CallAnswer; got a {type(reply).__name__}")
        if isinstance(reply, Failure):  # of the process itself, which ends
            raise rebuild(reply, otherwise=RunnerFailed)
        if reply.failure is not None:
            return WorkerOutcome(error=rebuild_call_error(reply.failure))
        return WorkerOutcome(value_of(reply))

    def use_weights(self, folder: str | None) -> None:
        self._folder = folder

    def forget_model(self) -> None:
        """Do nothing: the model has ended with its process."""

    def halt(self) -> None:
        if self._is_running and self._process is not None:
            self._is_running = False  # once is enough
            self._process.halt()

    def _here(self) -> RunnerProcess:
        if self._process is None:
            raise RuntimeError("an executor must be used within its running()")
        return self._process


def _check(reply: Reply, plan: StepPlan) -> None:
    if not isinstance(reply, StepResult | Failure):
        raise FrameError(f"a step must end with a StepResult; got a {type(reply).__name__}")
    if isinstance(reply, StepResult) and reply.step_id != plan.step_id:
        raise FrameError(f"step {plan.step_id} must end with its result; got that of {reply.step_id}")


@attrs.define(eq=False)
class RunnerProcess:
    """One process, with all descriptors that must be closed after it."""

    _popen: subprocess.Popen[bytes]
    _requests: trio.lowlevel.FdStream
    _replies: trio.lowlevel.FdStream
    _errors: trio.lowlevel.FdStream
    _lifeline: int
    _pidfd: int | None  # of Linux only; open until the process has been reaped
    _reader: FrameReader = attrs.field(factory=REPLIES.reader)
    _dying: trio.Event = attrs.field(factory=trio.Event)
    _exited: trio.Event = attrs.field(factory=trio.Event)
    _line: bytes = b""
    _last_words: StderrTail = attrs.field(factory=StderrTail)
    _idle: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    _talk: trio.CancelScope | None = None

    @classmethod
    def spawn(cls, command: Sequence[str]) -> RunnerProcess:
        """Start a process; return when its program has been found.

        Raises:
            ResourceShortage: no process can be started now; nothing is left of the attempt.
        """
        # Blocks for a millisecond or two. It must: Linux tells the process of the end of the *thread* that started it,
        # and the threads in which Trio starts processes end after ten idle seconds.
        with typed_shortages("a process for the model runner"), ExitStack() as theirs, ExitStack() as ours:
            requests_end, requests = _open_pipe(reader=theirs, writer=ours)
            replies, replies_end = _open_pipe(reader=ours, writer=theirs)
            errors, errors_end = _open_pipe(reader=ours, writer=theirs)
            life, life_end = _open_pipe(reader=ours, writer=theirs)
            popen = subprocess.Popen(
                command,
                stdin=requests_end,
                stdout=replies_end,
                stderr=errors_end,
                pass_fds=[life_end],
                env={**_environment(), lifeline.VARIABLE: str(life_end)},
                # A Ctrl-C at the terminal is for the engine, which knows in which order to stop.
                start_new_session=True,
            )
            ours.callback(popen.wait)
            ours.callback(popen.kill)
            # Opened here, where it may fail: the task that waits for the end of the process has no one to tell.
            pidfd = os.pidfd_open(popen.pid) if sys.platform == "linux" else None
            ours.pop_all()
        stream = trio.lowlevel.FdStream
        return cls(popen, stream(requests), stream(replies), stream(errors), life, pidfd)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[RunnerProcess]:
        """Enclose the life of the process: when left it is asked to end, then killed, and always reaped."""
        failure: BaseException | None = None
        trio.lowlevel.spawn_system_task(self._reap)  # may take longer than this scope waits
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            nursery.start_soon(self._log_errors)
            try:
                with self._idle:
                    yield self
                if self._idle.cancelled_caught:
                    raise await self._death()
            except BaseException as error:  # raised again below, without the nursery's group around it
                failure = error
            with trio.CancelScope(shield=True):
                await self._end()
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    @asynccontextmanager
    async def conversation(self, timeout_s: float | None, late: str) -> AsyncGenerator[None]:
        """Enclose a request and its reply; a process whose conversation is broken off is killed.

        Args:
            timeout_s: longest time until the reply, or until `allow`, seconds; None for ever.
            late: what the process did if it takes longer, for the error.
        Raises:
            RunnerDied: the process has ended, was killed after `timeout_s`, or sent something that is no reply.
        """
        if self._dying.is_set():
            raise await self._death()
        scope = self._talk = trio.CancelScope()
        if timeout_s is not None:
            scope.deadline = trio.current_time() + timeout_s
        try:
            try:
                with scope:
                    yield
            except (trio.BrokenResourceError, trio.ClosedResourceError, EOFError):
                self._note_death()
                raise await self._death() from None
            except FrameError as error:
                raise await self._death(f"and the engine do not understand each other ({error})") from error
            if scope.cancelled_caught:
                raise await self._death(None if self._dying.is_set() else late, is_hang=True) from None
        except BaseException:
            self._popen.kill()
            raise
        finally:
            self._talk = None
        if self._dying.is_set():
            self._idle.cancel()

    async def ask(self, request: Request) -> None:
        """Send a request, within a conversation."""
        await self._requests.send_all(REQUESTS.pack(request))

    def allow(self, timeout_s: float | None) -> None:
        """Set the deadline of the conversation anew, unless it is being called off; seconds from now."""
        if self._talk is not None and timeout_s is not None and not self._dying.is_set():
            self._talk.deadline = trio.current_time() + timeout_s

    @property
    def is_idle(self) -> bool:
        """True between two conversations."""
        return self._talk is None

    def halt(self) -> None:
        """Send a `Halt`, after a plan."""
        self.post(Halt())

    def post(self, message: Halt | PrepareAdapter | ImportModules) -> bool:
        """Send a request that is not answered, and may come at any time but while another one is being sent.

        Returns:
            False if nothing was sent, because there is no room in the pipe now.
        """
        frame = REQUESTS.pack(message)
        # A pipe takes as much as this whole or not at all.
        if len(frame) > select.PIPE_BUF:
            return False
        # The reader of the replies learns of a death.
        with suppress(OSError):
            os.write(self._requests.fileno(), frame)
            return True
        return False

    async def reply(self) -> Reply:
        """Receive the next reply, within a conversation."""
        while (payload := self._reader.next_payload()) is None:
            if not (data := await self._replies.receive_some(READ_BYTES)):
                raise EOFError
            self._reader.feed(data)
        return REPLIES.unpack(payload)

    async def gone(self) -> None:
        """Wait until the system has freed what the process held."""
        await self._exited.wait()

    @property
    def is_alive(self) -> bool:
        """False once the system says that it has ended."""
        return self._popen.poll() is None

    def discard(self) -> None:
        """Kill a process that was never `running()`, and close what belongs to it."""
        self._popen.kill()
        for stream in (self._requests, self._replies, self._errors):
            stream.close()
        os.close(self._lifeline)
        trio.lowlevel.spawn_system_task(self._reap)  # the system takes a while to free its memory

    async def _watch(self) -> None:
        """Wait for the end of the lifeline, whatever else is cancelled."""
        with trio.CancelScope(shield=True), suppress(trio.ClosedResourceError):
            await trio.lowlevel.wait_readable(self._lifeline)
            self._note_death()

    async def _reap(self) -> None:
        """Wait for the end of the process, also after its scope has ended."""
        try:
            await self._wait_for_exit()
        finally:  # also if all of Trio ends first
            self._popen.kill()
            self._popen.wait()
            if self._pidfd is not None:
                os.close(self._pidfd)
        self._exited.set()
        self._note_death()

    async def _wait_for_exit(self) -> None:
        if self._popen.poll() is not None:  # `Popen.kill` looks first, and reaps
            return
        if self._pidfd is not None:
            await trio.lowlevel.wait_readable(self._pidfd)
            self._popen.wait()
        else:
            await trio.to_thread.run_sync(self._popen.wait, limiter=trio.CapacityLimiter(1))

    def _note_death(self) -> None:
        """Cancel the task that waits for the process."""
        if self._dying.is_set():
            return
        self._dying.set()
        if self._talk is None:
            self._idle.cancel()
        else:  # its last reply is in the pipe, or will never come
            self._talk.deadline = trio.current_time()

    async def _death(self, reason: str | None = None, *, is_hang: bool = False) -> RunnerDied:
        """Kill the process if it still lives, and return the exception that says how it died.

        Args:
            reason: why it is killed, if it still lives.
            is_hang: that reason is a hang.
        """
        self._popen.kill()  # changes no exit status of a process that is ending already
        await self._dying.wait()
        returncode = self._popen.returncode
        # 0 may be yet to change: descriptors are closed before it is known how a process ends.
        if returncode is None and not (returncode := exit_code_of(self._popen.pid)):
            await self._exited.wait()
            returncode = self._popen.returncode
        self._hear_the_rest()
        is_hang = is_hang and reason is not None
        reason = reason or describe_exit(returncode)
        if last_words := self._last_words.since(trio.current_time() - RECENT_S):
            reason += "; its last words: " + " | ".join(last_words)
        return RunnerDied(reason, returncode, is_hang=is_hang)

    async def _end(self) -> None:
        self._requests.close()
        if not self._dying.is_set():
            with trio.move_on_after(GRACE_S):
                await self._exited.wait()
            self._popen.kill()
            await self._exited.wait()
        self._hear_the_rest()
        self._replies.close()
        self._errors.close()
        trio.lowlevel.notify_closing(self._lifeline)
        os.close(self._lifeline)

    async def _log_errors(self) -> None:
        """Pass what the process writes to standard error on to the log, line by line, until it is closed."""
        with suppress(trio.ClosedResourceError):
            while data := await self._errors.receive_some(READ_BYTES):
                self._hear(data)

    def _hear_the_rest(self) -> None:
        """Log what a dead process has left in the pipe: it may be the reason."""
        with suppress(BlockingIOError):
            while data := os.read(self._errors.fileno(), READ_BYTES):
                self._hear(data)
        self._log(self._line)
        self._line = b""

    def _hear(self, data: bytes) -> None:
        *lines, self._line = (self._line + data).split(b"\n")
        if len(self._line) > MAX_LINE_BYTES:
            lines, self._line = [*lines, self._line], b""
        for whole in lines:
            self._log(whole)

    def _log(self, line: bytes) -> None:
        if text := line[:MAX_LINE_BYTES].decode(errors="replace").rstrip():
            self._last_words.hear(text, trio.current_time())
            logger.warning("process %d: %s", self._popen.pid, text)


def _open_pipe(reader: ExitStack, writer: ExitStack) -> tuple[int, int]:
    """Open a pipe whose ends are closed with these stacks; return (reading end, writing end)."""
    ends = os.pipe()
    reader.callback(os.close, ends[0])
    writer.callback(os.close, ends[1])
    return ends


def _environment() -> dict[str, str]:
    """Return this program's environment without secrets, and with its module search path."""
    search_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    shared = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
    return {**shared, "PYTHONPATH": search_path}
