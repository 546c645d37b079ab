"""Fork server of an executor: the next process of a model runner is there in milliseconds, with torch imported.

Importing torch takes seconds of a processor, and 150 MB of memory that its forks can share. So one process imports it,
computes nothing and is forked (`workers.fork_server`), crash after crash. On Linux only: elsewhere the libraries of the
system do not expect a fork.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack

import attrs
import trio

from triolet.actors.executors.child_process import ForkedProcess, SpawnedProcess, worker_environment
from triolet.actors.executors.connection import (
    Ends,
    Pipes,
    RunnerProcess,
    open_pipe,
    pipes_to_a_process,
)
from triolet.ipc.forks import FORK, IMPORTING, MAX_MESSAGE_BYTES, PROCESS_ID, READY

FORK_SERVER: tuple[str, ...] = (sys.executable, "-P", "-m", "triolet.workers.fork_server")

IMPORT_SILENCE_S = 60.0  # of a server that imports, after which another process is started; on a busy machine
SILENCE_S = 2.0  # of one that only has to fork, likewise
LOOK_S = 1.0  # between two looks at the processes of a server that is to end


@attrs.define(eq=False)
class ForkServer:
    """One fork server; see `Standby`. Made by `spawn`."""

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
        # Blocks for a millisecond or two, and must: see `RunnerProcess.spawn`.
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

    async def take(self) -> RunnerProcess | None:
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
        return RunnerProcess(child, Pipes(*ours))

    async def _fork(self, its: Ends) -> ForkedProcess:
        """Have a process forked that gets these ends of its pipes.

        Raises:
            ConnectionError: see `take`.
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
            ConnectionError: see `take`.
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
