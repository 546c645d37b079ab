"""Processes of this machine that compute for an engine: children of this one, and forks of a child that imported torch.

Importing torch takes seconds of a processor, and 150 MB of memory that its forks can share. So one process, the fork
server, imports it, computes nothing and is forked (`workers.fork_server`), crash after crash. On Linux only: elsewhere
the libraries of the system do not expect a fork.

The system tells only a parent how a child has ended. The parent of a forked process is the fork server, which waits for
it and writes the exit code into a pipe.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final, Protocol

import attrs
import trio

from triolet.config.environment import SECRET_VARIABLES
from triolet.core.recovery.supervision import typed_shortages
from triolet.ipc.forks import FORK, IMPORTING, MAX_MESSAGE_BYTES, PROCESS_ID, READY

# Of the fields behind the name in /proc/PID/stat.
STAT_TIMES = slice(11, 13)  # in user mode and in the system, ticks
STAT_EXIT_CODE = 49
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
EXIT_CODE: Final = struct.Struct("i")
"""What a fork server writes when a process has ended: its exit code, as in `Popen.returncode`."""


class ChildProcess(Protocol):
    """Process that can be killed and waited for."""

    @property
    def pid(self) -> int:
        """Number of the process."""
        ...

    @property
    def returncode(self) -> int | None:
        """Exit code of a process that has been waited for, as in `Popen`; None before."""
        ...

    @property
    def is_alive(self) -> bool:
        """False once the system says that it has ended."""
        ...

    def kill(self) -> None:
        """Kill it; harmless when repeated, and after its end."""
        ...

    async def wait(self) -> None:
        """Wait until it has ended, and the system has freed what it held. Once only, or `end_now`."""
        ...

    def end_now(self) -> None:
        """Kill it, block until it has ended, and close what belongs to it."""
        ...


@attrs.define(eq=False)
class SpawnedProcess:
    """Child of this process."""

    popen: subprocess.Popen[bytes]
    _pidfd: int | None  # of Linux only; open until the process has been reaped

    @classmethod
    def spawn(
        cls, command: Sequence[str], cores: frozenset[int] | None = None, **options: Any
    ) -> SpawnedProcess:
        """Start a process; return when its program has been found.

        Args:
            cores: that it is bound to, as far as the system can do that; None for those of this one.
            options: of `Popen`.
        Raises:
            OSError: no process can be started now; nothing is left of the attempt.
        """
        # A Ctrl-C at the terminal is for the engine, which knows in which order to stop.
        popen = subprocess.Popen(command, start_new_session=True, **options)
        try:
            if cores is not None and sys.platform == "linux":
                with suppress(OSError):  # the load says what is wrong with them
                    os.sched_setaffinity(popen.pid, cores)
            # Opened here, where it may fail: the task that waits for the end of the process cannot report it.
            return cls(popen, os.pidfd_open(popen.pid) if sys.platform == "linux" else None)
        except BaseException:
            popen.kill()
            popen.wait()
            raise

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def returncode(self) -> int | None:
        return self.popen.returncode

    @property
    def is_alive(self) -> bool:
        return self.popen.poll() is None

    def kill(self) -> None:
        self.popen.kill()

    async def wait(self) -> None:
        if self.popen.poll() is not None:  # `Popen.kill` looks first, and reaps
            await trio.lowlevel.checkpoint()
        elif self._pidfd is not None:
            await trio.lowlevel.wait_readable(self._pidfd)
            self.popen.wait()
        else:
            await trio.to_thread.run_sync(self.popen.wait, limiter=trio.CapacityLimiter(1))

    async def ended(self) -> None:
        """Wait until it ends, and leave it to `wait`; for ever where the system tells nothing but in `wait`."""
        if self._pidfd is None:
            await trio.sleep_forever()
        else:
            await trio.lowlevel.wait_readable(self._pidfd)

    def end_now(self) -> None:
        self.popen.kill()
        self.popen.wait()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


@attrs.define(eq=False)
class ForkedProcess:
    """Child of a fork server."""

    pid: int
    _pidfd: int  # open until its end is known
    _exit: int  # to read its exit code from
    returncode: int | None = attrs.field(default=None, init=False)

    @property
    def is_alive(self) -> bool:
        return self.returncode is None and not _is_readable(self._pidfd)

    def kill(self) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def wait(self) -> None:
        await trio.lowlevel.wait_readable(self._pidfd)
        # A fork server that hangs leaves it to be asked for here.
        if (code := exit_code_of(self.pid)) is None:
            await trio.lowlevel.wait_readable(self._exit)
        self._note_end(code)

    def end_now(self) -> None:
        self.kill()
        if self.returncode is None:
            _is_readable(self._pidfd, None)
            self._note_end(exit_code_of(self.pid))

    def _note_end(self, code: int | None) -> None:
        told = os.read(self._exit, EXIT_CODE.size) if code is None or _is_readable(self._exit) else b""
        if len(told) == EXIT_CODE.size:
            [code] = EXIT_CODE.unpack(told)
        # A fork server that has ended has taken its children along.
        self.returncode = -signal.SIGKILL if code is None else code
        os.close(self._pidfd)
        os.close(self._exit)


def _is_readable(fd: int, timeout_ms: int | None = 0) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_ms))


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
    with suppress(OSError, ValueError, IndexError):
        return os.waitstatus_to_exitcode(int(_stat_of(process_id)[STAT_EXIT_CODE]))
    return None


def processor_s_of(process_id: int) -> float:
    """Return the processor time that a process has used, seconds; 0 if the system does not say."""
    with suppress(OSError, ValueError):
        return sum(map(int, _stat_of(process_id)[STAT_TIMES])) / TICKS_PER_S
    return 0.0


def _stat_of(process_id: int) -> list[bytes]:
    """Return the fields behind the name that Linux tells of a process.

    Raises:
        OSError: there is no such process, or another system.
    """
    with open(f"/proc/{process_id}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def worker_environment() -> dict[str, str]:
    """Return this program's environment without secrets, and with its module search path."""
    search_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    shared = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
    return {**shared, "PYTHONPATH": search_path}


@attrs.frozen
class Pipes:
    """This side's ends of the pipes to a runner's process."""

    requests: trio.lowlevel.FdStream = attrs.field(converter=trio.lowlevel.FdStream)
    replies: trio.lowlevel.FdStream = attrs.field(converter=trio.lowlevel.FdStream)
    errors: trio.lowlevel.FdStream = attrs.field(converter=trio.lowlevel.FdStream)
    life: int
    """Reading end of its lifeline."""

    def close(self) -> None:
        """Close all."""
        for stream in (self.requests, self.replies, self.errors):
            stream.close()
        os.close(self.life)


Ends = tuple[int, int, int, int]
"""Descriptors of one side: requests, replies, errors, lifeline."""


@contextmanager
def pipes_to_a_process() -> Iterator[tuple[Ends, Ends]]:
    """Open the pipes to a process that is started within the scope; yield this side's ends and its.

    Those of the process are closed with the scope, and this side's, too, if it fails.

    Raises:
        ResourceShortage: they cannot be opened, or the process cannot be started.
    """
    with typed_shortages("a process for the model runner"), ExitStack() as theirs, ExitStack() as ours:
        requests_end, requests = open_pipe(reader=theirs, writer=ours)
        replies, replies_end = open_pipe(reader=ours, writer=theirs)
        errors, errors_end = open_pipe(reader=ours, writer=theirs)
        life, life_end = open_pipe(reader=ours, writer=theirs)
        yield (requests, replies, errors, life), (requests_end, replies_end, errors_end, life_end)
        ours.pop_all()


def open_pipe(reader: ExitStack, writer: ExitStack) -> tuple[int, int]:
    """Open a pipe whose ends are closed with these stacks; return (reading end, writing end)."""
    ends = os.pipe()
    reader.callback(os.close, ends[0])
    writer.callback(os.close, ends[1])
    return ends


FORK_SERVER: tuple[str, ...] = (sys.executable, "-P", "-m", "triolet.workers.fork_server")

IMPORT_SILENCE_S = 60.0  # of a server that imports, after which another process is started; on a busy machine
SILENCE_S = 2.0  # of one that only has to fork, likewise
LOOK_S = 1.0  # between two looks at the processes of a server that is to end


@attrs.define(eq=False)
class ForkServer:
    """Child of this process whose forks compute. Made by `spawn`."""

    child: SpawnedProcess
    _connection: socket.socket  # of messages, non-blocking
    _is_ready: bool = attrs.field(default=False, init=False)  # as far as it was read
    _forked: list[ForkedProcess] = attrs.field(factory=list, init=False)  # those that may live
    _gone: trio.Event = attrs.field(factory=trio.Event, init=False)

    @classmethod
    def spawn(cls, command: Sequence[str] = FORK_SERVER, cores: frozenset[int] | None = None) -> ForkServer:
        """Start a server, which begins to import.

        Args:
            cores: that it and its processes are bound to; None for those of this process.
        Raises:
            OSError: no process can be started now; nothing is left of the attempt.
        """
        # Blocks for a millisecond or two, and must: see `connection.RunnerProcess.spawn`.
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its, ExitStack() as undo:
            undo.callback(ours.close)
            ours.setblocking(False)
            # What it would say of an import that fails, the next load says, and in the log.
            child = SpawnedProcess.spawn(
                command, cores, stdin=its, stderr=subprocess.DEVNULL, env=worker_environment()
            )
            undo.pop_all()
        return cls(child, ours)

    async def fork(self) -> tuple[ForkedProcess, Pipes] | None:
        """Return a process that the server forks; None if it has ended, hangs or cannot fork.

        Raises:
            ResourceShortage: there are no descriptors for it.
        """
        try:
            with pipes_to_a_process() as (ours, its):
                child = await self._fork(its)
        except (ConnectionError, BlockingIOError):  # the latter where requests lie unread
            return None
        self._forked = [process for process in (*self._forked, child) if process.is_alive]
        return child, Pipes(*ours)

    async def _fork(self, its: Ends) -> ForkedProcess:
        """Have a process forked that gets these ends of its pipes.

        Raises:
            ConnectionError: see `fork`.
        """
        with ExitStack() as theirs, ExitStack() as ours:
            exit_fd, exit_end = open_pipe(reader=ours, writer=theirs)
            socket.send_fds(self._connection, [FORK], [*its, exit_end])
            theirs.close()  # whose end tells that the server has ended
            process_id = await self._answer()
            try:
                pidfd = os.pidfd_open(process_id)
            except ProcessLookupError:
                raise ConnectionError(f"the fork server's process {process_id} has ended") from None
            ours.pop_all()
        return ForkedProcess(process_id, pidfd, exit_fd)

    async def _answer(self) -> int:
        """Receive the number of a process.

        Raises:
            ConnectionError: see `fork`.
        """
        while True:
            limit_s = SILENCE_S if self._is_ready else IMPORT_SILENCE_S
            with trio.move_on_after(limit_s) as silence:
                await trio.lowlevel.wait_readable(self._connection)
            if silence.cancelled_caught:
                raise ConnectionError(f"the fork server has been silent for {limit_s} s")
            message = self._connection.recv(MAX_MESSAGE_BYTES)
            self._is_ready |= message == READY
            if len(message) == PROCESS_ID.size:
                [process_id] = PROCESS_ID.unpack(message)
                if process_id:
                    return int(process_id)
            if message not in (IMPORTING, READY):
                raise ConnectionError("the fork server has ended, or cannot fork")

    @property
    def is_alive(self) -> bool:
        """False once the system says that it has ended."""
        return self.child.is_alive

    def discard(self) -> None:
        """Let it end, as soon as none of its processes lives: its end would be theirs."""
        self._connection.close()
        trio.lowlevel.spawn_system_task(self._end)

    async def gone(self) -> None:
        """Wait until it has ended."""
        await self._gone.wait()

    async def _end(self) -> None:
        try:
            while any(process.is_alive for process in self._forked):  # noqa: ASYNC110 - the system tells one task only
                await trio.sleep(LOOK_S)
            self.child.kill()  # also one that hangs
            await self.child.wait()
        finally:  # also if all of Trio ends first
            self.child.end_now()
        self._gone.set()
