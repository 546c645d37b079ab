"""Connection of the engine to one model runner: conversations of a request and its replies, and how they end.

A step is one frame each way, and takes a tenth of a millisecond where the model is small: every turn of the event loop
that it does not need is a good part of that. So a frame is written at once, by the task that has made it, and a reader
waits first and reads then: right after a request the reply cannot be there. Pipes and sockets are the same here.

`RunnerProcess` is one to a process that it has started, over pipes; `remote.link.WorkerLink` is one to a process on
another machine, over TCP.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Final, Protocol

import attrs
import trio

from triolet.actors.executors.child_process import (
    ChildProcess,
    Pipes,
    SpawnedProcess,
    describe_exit,
    exit_code_of,
    pipes_to_a_process,
    processor_s_of,
    worker_environment,
)
from triolet.core.recovery.supervision import StderrTail
from triolet.core.step_plan import StepPlan
from triolet.errors import FrameError, RunnerDied
from triolet.ipc import lifeline
from triolet.ipc.messages import (
    REPLIES,
    REQUESTS,
    FrameReader,
    Halt,
    ImportModules,
    PrepareAdapter,
    Reply,
    Request,
)

logger = logging.getLogger("triolet.runner")

SHORT_BYTES: Final = 2**12  # at most, of nearly all messages and of lines of a log
READ_BYTES: Final = 2**16  # what a pipe holds on Linux
# Read or written at once of a long frame, such as a tensor: a socket holds some of them.
LONG_BYTES: Final = 2**20
GRACE_S = 1.0  # from the end of its requests until a process is killed
MAX_LINE_BYTES = 2_000  # of the log; some libraries draw progress bars without ever ending a line
RECENT_S = 1.0  # age of the oldest lines that are told with a death, when it is told

Posted = Halt | PrepareAdapter | ImportModules | StepPlan
"""Requests that need not be waited for: they are not answered, or their answer is waited for later."""


class Descriptor(Protocol):
    """Pipe or socket that does not block."""

    def fileno(self) -> int:
        """Return its number; -1 once it is closed."""
        ...


async def receive_when_ready(source: Descriptor, num_expected: int = 0) -> bytes:
    """Wait for bytes and return them; none after the last. A checkpoint.

    Args:
        source: to read from.
        num_expected: bytes that are known to come.
    Raises:
        ClosedResourceError: this end is closed, or is being closed.
        BrokenResourceError: the connection is broken.
    """
    while True:
        # Asked each time: what is closed has no descriptor, and its number may be that of another file.
        if (fd := source.fileno()) < 0:
            raise trio.ClosedResourceError
        await trio.lowlevel.wait_readable(fd)
        try:
            if num_expected > SHORT_BYTES:
                with suppress(MemoryError):
                    return os.read(fd, min(num_expected, LONG_BYTES))
            data = os.read(fd, SHORT_BYTES)
        except BlockingIOError:  # the system may err
            continue
        except OSError as error:
            raise trio.BrokenResourceError from error
        if len(data) == SHORT_BYTES:
            # Not from the beginning: each read takes memory for the most that it may give.
            with suppress(OSError, MemoryError):  # the next call meets it again
                data += os.read(fd, READ_BYTES)
        return data


class FrameWriter:
    """Writer of whole frames, in the order in which they are put.

    Args:
        sink: nothing else writes to it.
    """

    def __init__(self, sink: Descriptor) -> None:
        self._sink = sink
        self._rest = bytearray()
        self._is_broken = False
        self._has_rest = trio.Event()
        self._is_written = trio.Event()
        self._is_written.set()

    def put(self, frame: bytes) -> bool:
        """Write a frame, or what there is room for; `run` writes the rest. Never waits.

        Returns:
            False if the connection is broken.
        """
        if not (self._rest or self._is_broken):
            frame = frame[self._write(frame) :]
        if frame and not self._is_broken:
            self._rest += frame
            self._is_written = trio.Event()
            self._has_rest.set()
        return not self._is_broken

    async def flush(self) -> None:
        """Wait until all is written. A checkpoint.

        Raises:
            BrokenResourceError: it never will be.
        """
        await self._is_written.wait()
        if self._is_broken:
            raise trio.BrokenResourceError

    async def run(self) -> None:
        """Write what is left of frames, until cancelled."""
        while True:
            await self._has_rest.wait()
            self._has_rest = trio.Event()
            while self._rest and not self._is_broken:
                try:
                    await self._write_rest()
                except (OSError, ValueError, trio.BrokenResourceError, trio.ClosedResourceError):
                    self._is_broken = True
            self._is_written.set()

    async def _write_rest(self) -> None:
        """Write some of what is left."""
        await trio.lowlevel.wait_writable(self._sink.fileno())
        with memoryview(self._rest) as rest, rest[:LONG_BYTES] as first:
            num_written = self._write(first)
        del self._rest[:num_written]

    def _write(self, data: bytes | memoryview) -> int:
        """Write what there is room for; return how many bytes that was."""
        try:
            return os.write(self._sink.fileno(), data)
        except BlockingIOError:
            return 0
        except OSError:
            self._is_broken = True
            return 0


@attrs.define(eq=False)
class RunnerConnection(ABC):
    """Connection to a model runner; see `RunnerProcess` and `WorkerLink`."""

    _reader: FrameReader = attrs.field(factory=REPLIES.reader, init=False)
    _dying: trio.Event = attrs.field(factory=trio.Event, init=False)
    _idle: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)
    _talk: trio.CancelScope | None = attrs.field(default=None, init=False)
    _late: str = attrs.field(default="", init=False)  # what the runner did if the conversation lasts too long

    @abstractmethod
    def running(self) -> AbstractAsyncContextManager[RunnerConnection]:
        """Enclose the life of the runner; nothing of it is left here when the scope ends."""

    @abstractmethod
    def post(self, message: Posted) -> bool:
        """Send a request without waiting, behind those that were sent before.

        Returns:
            False if it will not be sent: there is no room for it now, or the runner has ended.
        """

    @abstractmethod
    async def gone(self) -> None:
        """Wait until the system has freed what the runner held."""

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """False once it is known that the runner has ended."""

    @property
    def processor_s(self) -> float:
        """Processor time that the runner has used, seconds; 0 where this side cannot know."""
        return 0.0

    @abstractmethod
    def _kill(self) -> None:
        """Have the runner end at once."""

    @abstractmethod
    async def death(self, reason: str | None = None, *, is_hang: bool = False) -> RunnerDied:
        """Kill the runner if it still lives, and return the exception that says how it died.

        Args:
            reason: why it is killed, if it still lives.
            is_hang: that reason is a hang.
        """

    @abstractmethod
    async def _send(self, frame: bytes) -> None:
        """Send the whole frame of a request."""

    @abstractmethod
    async def _receive(self) -> bytes:
        """Receive some bytes of the replies; none after the last."""

    @asynccontextmanager
    async def conversation(self, timeout_s: float | None, late: str) -> AsyncGenerator[None]:
        """Enclose a request and its reply; a runner whose conversation is broken off is killed.

        Args:
            timeout_s: longest time until the reply, or until `allow`, seconds; None for ever.
            late: what the runner did if it takes longer, for the error, or until `allow`.
        Raises:
            RunnerDied: the runner has ended, was killed after `timeout_s`, or sent something that is no reply.
        """
        if self._dying.is_set():
            raise await self.death()
        scope = self._talk = trio.CancelScope()
        self._late = late
        if timeout_s is not None:
            scope.deadline = trio.current_time() + timeout_s
        try:
            try:
                with scope:
                    yield
            except (trio.BrokenResourceError, trio.ClosedResourceError, EOFError):
                self._note_death()
                raise await self.death() from None
            except FrameError as error:
                raise await self.death(f"and the engine do not understand each other ({error})") from error
            if scope.cancelled_caught:
                reason = None if self._dying.is_set() else self._late
                raise await self.death(reason, is_hang=True) from None
        except BaseException:
            self._kill()
            raise
        finally:
            self._talk = None
        if self._dying.is_set():
            self._idle.cancel()

    async def ask(self, request: Request) -> None:
        """Send a request, within a conversation."""
        await self.ask_packed(REQUESTS.pack(request))

    async def ask_packed(self, frame: bytes) -> None:
        """Send the frame of a request, within a conversation."""
        await self._send(frame)

    def allow(self, timeout_s: float | None, late: str | None = None) -> None:
        """Set the deadline of the conversation anew, unless it is being called off.

        Args:
            timeout_s: seconds from now.
            late: see `conversation`; None for the same as before.
        """
        self._late = late or self._late
        if self._talk is not None and timeout_s is not None and not self._dying.is_set():
            self._talk.deadline = trio.current_time() + timeout_s

    async def reply(self) -> Reply:
        """Receive the next reply, within a conversation."""
        while (payload := self._reader.next_payload()) is None:
            if not (data := await self._receive()):
                raise EOFError
            self._reader.feed(data)
        return REPLIES.unpack(payload)

    @property
    def is_idle(self) -> bool:
        """True between two conversations."""
        return self._talk is None

    def halt(self) -> None:
        """Send a `Halt`, after a plan."""
        self.post(Halt())

    def _note_death(self) -> None:
        """Cancel the task that waits for the runner."""
        if self._dying.is_set():
            return
        self._dying.set()
        if self._talk is None:
            self._idle.cancel()
        else:  # its last reply is on its way, or will never come
            self._talk.deadline = trio.current_time()


@attrs.define(eq=False)
class RunnerProcess(RunnerConnection):
    """One process, with all descriptors that must be closed after it."""

    child: ChildProcess
    _pipes: Pipes
    _writer: FrameWriter = attrs.field(init=False)  # of the requests
    _exited: trio.Event = attrs.field(factory=trio.Event, init=False)
    _line: bytes = attrs.field(default=b"", init=False)
    _stderr_tail: StderrTail = attrs.field(factory=StderrTail, init=False)

    def __attrs_post_init__(self) -> None:
        self._writer = FrameWriter(self._pipes.requests)

    @classmethod
    def spawn(cls, command: Sequence[str], cores: frozenset[int] | None = None) -> RunnerProcess:
        """Start a process; return when its program has been found.

        Args:
            cores: that the process is bound to, as far as the system can do that; None for those of this one.
        Raises:
            ResourceShortage: no process can be started now; nothing is left of the attempt.
        """
        # Blocks for a millisecond or two. It must: Linux tells the process of the end of the *thread* that started it,
        # and the threads in which Trio starts processes end after ten idle seconds.
        with pipes_to_a_process() as (ours, (requests, replies, errors, life)):
            child = SpawnedProcess.spawn(
                command,
                cores,
                stdin=requests,
                stdout=replies,
                stderr=errors,
                pass_fds=[life],
                env={**worker_environment(), lifeline.VARIABLE: str(life)},
            )
        return cls(child, Pipes(*ours))

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[RunnerProcess]:
        """Enclose the life of the process: when left it is asked to end, then killed, and always reaped."""
        failure: BaseException | None = None
        trio.lowlevel.spawn_system_task(self._reap)  # may take longer than this scope waits
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            nursery.start_soon(self._log_errors)
            nursery.start_soon(self._writer.run)
            try:
                with self._idle:
                    yield self
                if self._idle.cancelled_caught:
                    raise await self.death()
            except BaseException as error:  # raised again below, without the nursery's group around it
                failure = error
            with trio.CancelScope(shield=True):
                await self._end()
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    def post(self, message: Posted) -> bool:
        return self._writer.put(REQUESTS.pack(message))  # the reader of the replies learns of a death

    async def gone(self) -> None:
        """Wait until the system has freed what the process held."""
        await self._exited.wait()

    @property
    def is_alive(self) -> bool:
        """False once the system says that it has ended."""
        return self.child.is_alive

    async def take(self) -> RunnerProcess:
        """Return this process, as the source of itself (`process.Source`)."""
        await trio.lowlevel.checkpoint()
        return self

    async def ended(self) -> None:
        """Wait until a process that is not `running()` ends."""
        await trio.lowlevel.wait_readable(self._pipes.life)

    def discard(self) -> None:
        """Kill a process that was never `running()`, and close what belongs to it."""
        self.child.kill()
        self._pipes.close()
        trio.lowlevel.spawn_system_task(self._reap)  # the system takes a while to free its memory

    async def _watch(self) -> None:
        """Wait for the end of the lifeline, whatever else is cancelled."""
        with trio.CancelScope(shield=True), suppress(trio.ClosedResourceError):
            await trio.lowlevel.wait_readable(self._pipes.life)
            self._note_death()

    async def _reap(self) -> None:
        """Wait for the end of the process, also after its scope has ended."""
        try:
            await self._wait_for_exit()
        finally:  # also if all of Trio ends first
            self.child.end_now()
        self._exited.set()
        self._note_death()

    async def _wait_for_exit(self) -> None:
        await self.child.wait()

    @property
    def processor_s(self) -> float:
        return processor_s_of(self.child.pid)

    def _kill(self) -> None:
        self.child.kill()

    async def _send(self, frame: bytes) -> None:
        self._writer.put(frame)
        await self._writer.flush()

    async def _receive(self) -> bytes:
        return await receive_when_ready(self._pipes.replies, self._reader.num_missing)

    async def death(self, reason: str | None = None, *, is_hang: bool = False) -> RunnerDied:
        self.child.kill()  # changes no exit status of a process that is ending already
        self._note_death()  # nothing that it does can follow, and the end of its lifeline may take a while
        await trio.lowlevel.checkpoint()
        returncode = self.child.returncode
        # 0 may be yet to change: descriptors are closed before it is known how a process ends.
        if returncode is None and not (returncode := exit_code_of(self.child.pid)):
            await self._exited.wait()
            returncode = self.child.returncode
        assert returncode is not None
        self._read_rest()
        is_hang = is_hang and reason is not None
        reason = reason or describe_exit(returncode)
        if tail := self._stderr_tail.since(trio.current_time() - RECENT_S):
            reason += "; the end of its log: " + " | ".join(tail)
        return RunnerDied(reason, returncode, is_hang=is_hang)

    async def _end(self) -> None:
        self._pipes.requests.close()
        if not self._dying.is_set():
            with trio.move_on_after(GRACE_S):
                await self._exited.wait()
            self.child.kill()
            await self._exited.wait()
        self._read_rest()
        self._pipes.replies.close()
        self._pipes.errors.close()
        trio.lowlevel.notify_closing(self._pipes.life)
        os.close(self._pipes.life)

    async def _log_errors(self) -> None:
        """Pass what the process writes to standard error on to the log, line by line, until it is closed."""
        with suppress(trio.ClosedResourceError):
            while data := await self._pipes.errors.receive_some(SHORT_BYTES):
                self._hear(data)

    def _read_rest(self) -> None:
        """Log what a dead process has left in the pipe: it may be the reason."""
        with suppress(BlockingIOError):
            while data := os.read(self._pipes.errors.fileno(), SHORT_BYTES):
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
            self._stderr_tail.add_line(text, trio.current_time())
            logger.warning("process %d: %s", self.child.pid, text)
