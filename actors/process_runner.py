"""The executor whose model lives in a process of its own: what happens there is, here, at worst an exception.

Every life has its own process, which loads the weights again: a driver or a library that has broken something is left
behind with it. The process speaks frames (`ipc`) over its standard input and output; what it writes to standard error
goes into the log. However it ends, this side knows within milliseconds: from the end of its replies, or from the
operating system if something else still holds that pipe. A step that takes too long ends with the process killed.

    life of a process: spawned -> asked to load -> asked for step after step -> its requests end -> reaped
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress

import attrs
import trio

from triolet.config import EngineConfig
from triolet.core.model_info import ModelInfo
from triolet.core.plan import StepPlan, StepResult
from triolet.core.progress import LoadProgress, OnProgress
from triolet.errors import FrameError, ModelError, RunnerDied, RunnerFailed
from triolet.ipc.failures import Failure, rebuild
from triolet.ipc.frames import FrameReader
from triolet.ipc.messages import REPLIES, REQUESTS, Reply, Request

logger = logging.getLogger("triolet.runner")

# -P: the folder that the engine was started in is nowhere to look for modules.
WORKER: tuple[str, ...] = (sys.executable, "-P", "-m", "triolet.worker")

READ_BYTES = 2**16  # what a pipe holds on Linux
GRACE_S = 1.0  # from the end of its requests until a process is killed
ZOMBIE_S = 0.02  # from the end of its replies until the system knows that a process is dead
LAST_WORDS_S = 0.02  # for what a dead process has left in its pipes
MAX_LINE_BYTES = 2_000  # of the log; some libraries draw progress bars without ever ending a line
NUM_LAST_WORDS, MAX_LAST_WORDS_CHARS = 5, 200  # lines that are told with a death, if they ...
RECENT_S = 1.0  # ... are not older than this when it is told


class ProcessExecutor:
    """See `model_runner.Executor`.

    Args:
        config: with a `model`; sent to the process as it is.
        command: starts the process.
    """

    def __init__(self, config: EngineConfig, command: Sequence[str] = WORKER) -> None:
        self._config = config
        self._command = tuple(command)
        self._process: RunnerProcess | None = None
        self._has_loaded = False

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """The scope of one process, which is gone when it is left.

        Raises:
            RunnerDied: it ended while nobody was asking it anything.
        """
        try:
            async with RunnerProcess.spawn(self._command).running() as self._process:
                yield
        finally:
            self._process = None

    async def start(self, on_progress: OnProgress) -> ModelInfo:
        """See `Executor`. A load is only reported until one has succeeded; later ones mend something.

        Raises:
            ConfigError: a field that does not fit the model or the machine.
            ModelError: the model can not be loaded.
            RunnerDied: the process ended meanwhile.
        """
        process = self._here()
        async with process.conversation():
            await process.ask(self._config)
            while isinstance(reply := await process.reply(), LoadProgress):
                if not self._has_loaded:
                    on_progress(reply)
            if not isinstance(reply, ModelInfo | Failure):
                raise FrameError(f"a load must end with a ModelInfo; got a {type(reply).__name__}")
        if isinstance(reply, Failure):
            raise rebuild(reply, otherwise=ModelError)
        self._has_loaded = True
        return reply

    async def execute(self, plan: StepPlan) -> StepResult:
        """See `Executor`. Whoever is cancelled meanwhile does not wait for the step: the process is killed.

        Raises:
            RunnerDied: the process ended, or the step took longer than `step_timeout`.
            RunnerFailed: the step raised an exception.
        """
        process = self._here()
        async with process.conversation(self._config.step_timeout):
            await process.ask(plan)
            reply = await process.reply()
            if not isinstance(reply, StepResult | Failure):
                raise FrameError(f"a step must end with a StepResult; got a {type(reply).__name__}")
            if isinstance(reply, StepResult) and reply.step_id != plan.step_id:
                raise FrameError(f"step {plan.step_id} must end with its result; got that of {reply.step_id}")
        if isinstance(reply, Failure):
            raise rebuild(reply, otherwise=RunnerFailed)
        return reply

    def _here(self) -> RunnerProcess:
        if self._process is None:
            raise RuntimeError("an executor must be used within its running()")
        return self._process


@attrs.define(eq=False)
class RunnerProcess:
    """One process, with everything that must be closed when it is gone."""

    _popen: subprocess.Popen[bytes]
    _requests: trio.lowlevel.FdStream
    _replies: trio.lowlevel.FdStream
    _errors: trio.lowlevel.FdStream
    _reader: FrameReader = attrs.field(factory=REPLIES.reader)
    _exited: trio.Event = attrs.field(factory=trio.Event)
    _errors_ended: trio.Event = attrs.field(factory=trio.Event)
    _last_words: deque[tuple[float, str]] = attrs.field(factory=lambda: deque(maxlen=NUM_LAST_WORDS))
    _idle: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    _talk: trio.CancelScope | None = None

    @classmethod
    def spawn(cls, command: Sequence[str]) -> RunnerProcess:
        """Start a process; returns when its program has been found.

        Blocks for a millisecond or two. It must: Linux tells the process of the end of the *thread* that started it,
        and the threads in which Trio starts processes end after ten idle seconds.
        """
        (requests_end, requests), (replies, replies_end), (errors, errors_end) = (
            os.pipe(),
            os.pipe(),
            os.pipe(),
        )
        try:
            popen = subprocess.Popen(
                command,
                stdin=requests_end,
                stdout=replies_end,
                stderr=errors_end,
                env={**os.environ, "PYTHONPATH": _search_path()},
                # A Ctrl-C at the terminal is for the engine, which knows in which order to stop.
                start_new_session=True,
            )
        except BaseException:
            for fd in (requests, replies, errors):
                os.close(fd)
            raise
        finally:
            for fd in (requests_end, replies_end, errors_end):
                os.close(fd)
        stream = trio.lowlevel.FdStream
        return cls(popen, stream(requests), stream(replies), stream(errors))

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[RunnerProcess]:
        """The scope in which the process lives: asked to end when it is left, then killed, and always reaped."""
        failure: BaseException | None = None
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
                await self._end()  # with it end the two tasks above
        if failure is not None:
            raise failure

    # ------------------------------------------------------------------------------------ questions

    @asynccontextmanager
    async def conversation(self, timeout_s: float | None = None) -> AsyncGenerator[None]:
        """Around a question and its answer; the process does not survive one that was broken off.

        Args:
            timeout_s: how long it may take, seconds; None is for ever.
        Raises:
            RunnerDied: the process has ended, had to be killed after `timeout_s`, or sent what is no answer.
        """
        if self._exited.is_set():
            raise await self._death()
        scope = self._talk = trio.CancelScope()
        if timeout_s is not None:
            scope.deadline = trio.current_time() + timeout_s
        try:
            try:
                with scope:
                    yield
            except (trio.BrokenResourceError, trio.ClosedResourceError, EOFError):
                raise await self._death() from None
            except FrameError as error:
                raise await self._death(f"and the engine do not understand each other ({error})") from error
            if scope.cancelled_caught:
                late = f"took more than {timeout_s} s for a step (step_timeout)"
                raise await self._death(None if self._exited.is_set() else late) from None
        except BaseException:
            self._popen.kill()
            raise
        finally:
            self._talk = None
        if self._exited.is_set():
            self._idle.cancel()

    async def ask(self, request: Request) -> None:
        """Send a request, within a conversation."""
        await self._requests.send_all(REQUESTS.pack(request))

    async def reply(self) -> Reply:
        """The next reply, within a conversation."""
        while (payload := self._reader.next_payload()) is None:
            if not (data := await self._replies.receive_some(READ_BYTES)):
                raise EOFError
            self._reader.feed(data)
        return REPLIES.unpack(payload)

    # ---------------------------------------------------------------------------------------- death

    async def _watch(self) -> None:
        """Wait for the end of the process, whatever else is cancelled, and call off whoever waits for it."""
        with trio.CancelScope(shield=True):
            await _wait_for_exit(self._popen)
        self._exited.set()
        if self._talk is None:
            self._idle.cancel()
        else:  # its last reply may still be on the way
            self._talk.deadline = trio.current_time() + LAST_WORDS_S

    async def _death(self, reason: str | None = None) -> RunnerDied:
        """Make sure that the process is dead; the exception that tells how it died.

        Args:
            reason: why it is killed, if it still lives.
        """
        if reason is None:
            with trio.move_on_after(ZOMBIE_S):
                await self._exited.wait()
        self._popen.kill()
        await self._exited.wait()
        with trio.move_on_after(LAST_WORDS_S):
            await self._errors_ended.wait()
        reason = reason or _ending(self._popen.returncode)
        recent_s = trio.current_time() - RECENT_S
        if last_words := [text for said_s, text in self._last_words if said_s >= recent_s]:
            reason += "; its last words: " + " | ".join(last_words)
        return RunnerDied(reason, self._popen.returncode)

    async def _end(self) -> None:
        self._requests.close()
        with trio.move_on_after(GRACE_S):
            await self._exited.wait()
        self._popen.kill()
        await self._exited.wait()
        with trio.move_on_after(LAST_WORDS_S):
            await self._errors_ended.wait()
        self._replies.close()
        self._errors.close()

    # -------------------------------------------------------------------------------------- its log

    async def _log_errors(self) -> None:
        """Pass what the process writes to standard error on to the log, line by line, until it is closed."""
        line = b""
        with trio.CancelScope(shield=True), suppress(trio.ClosedResourceError):
            while data := await self._errors.receive_some(READ_BYTES):
                *lines, line = (line + data).split(b"\n")
                if len(line) > MAX_LINE_BYTES:
                    lines, line = [*lines, line], b""
                for whole in lines:
                    self._log(whole)
            self._log(line)
        self._errors_ended.set()

    def _log(self, line: bytes) -> None:
        if text := line[:MAX_LINE_BYTES].decode(errors="replace").rstrip():
            self._last_words.append((trio.current_time(), text[:MAX_LAST_WORDS_CHARS]))
            logger.warning("process %d: %s", self._popen.pid, text)


async def _wait_for_exit(popen: subprocess.Popen[bytes]) -> None:
    """Wait until the process has ended, and reap it."""
    if sys.platform == "linux":
        pidfd = os.pidfd_open(popen.pid)
        try:
            await trio.lowlevel.wait_readable(pidfd)
        finally:
            os.close(pidfd)
        popen.wait()
    else:
        await trio.to_thread.run_sync(popen.wait, limiter=trio.CapacityLimiter(1))


def _search_path() -> str:
    """Where this program finds its modules, in its order: the process must find the same ones."""
    return os.pathsep.join(path or os.getcwd() for path in sys.path)


def _ending(returncode: int) -> str:
    if returncode >= 0:
        return f"ended with exit status {returncode}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-returncode).name}"
    return f"was killed by signal {-returncode}"
