"""Program of the fork server: `python -m triolet.workers.fork_server`, started by `actors.executors.child_process`.

It imports what the load of a model needs, once, and then only forks: each process is a model runner (`workers.runner`),
or a rank of a group (`workers.rank`), that shares the memory of the imports and loads at once. The server computes
nothing, so that there is no device and no pool of threads whose state a fork would miss.

It speaks over its standard input (`ipc.forks`). When that is closed, the server ends as soon as it has no children.
Linux ends it with the engine, and its children with it.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

import attrs

from triolet.core.load_progress import LoadProgress, OnProgress
from triolet.ipc import lifeline
from triolet.ipc.forks import (
    EXIT_CODE,
    FORK,
    IMPORTING,
    MAX_MESSAGE_BYTES,
    NUM_DESCRIPTORS,
    PROCESS_ID,
    READY,
)
from triolet.workers.parent_death import die_with_parent
from triolet.workers.runner import import_model_code, run


@attrs.frozen
class Child:
    """Process that the server has forked."""

    process_id: int
    exit_fd: int
    """Pipe for its exit code."""


@attrs.define(eq=False)
class Forks:
    """Forks of this process, and the connection of the engine that wants them."""

    _connection: socket.socket
    _become: Callable[[], NoReturn]  # what a fork is
    _poll: select.poll = attrs.field(factory=select.poll, init=False)
    _children: dict[int, Child] = attrs.field(factory=dict, init=False)  # by pidfd

    def run(self) -> None:
        """Fork until the connection is closed and all children have ended."""
        self._poll.register(self._connection, select.POLLIN)
        is_open = True
        while is_open or self._children:
            for fd, _ in self._poll.poll():
                if fd in self._children:
                    self._reap(fd)
                elif not self._answer():
                    self._poll.unregister(self._connection)
                    is_open = False

    def _answer(self) -> bool:
        """Answer a request; return False if there are no more."""
        fds: list[int] = []
        try:
            # Without a free descriptor the system closes some instead of handing them over.
            request, fds, _, _ = socket.recv_fds(self._connection, MAX_MESSAGE_BYTES, NUM_DESCRIPTORS)
            if request == FORK:
                process_id = self._fork(fds) if len(fds) == NUM_DESCRIPTORS else 0
                self._connection.send(PROCESS_ID.pack(process_id))
            return request == FORK
        except ConnectionError:  # the engine has gone
            return False
        finally:
            for fd in fds:
                os.close(fd)

    def _fork(self, fds: list[int]) -> int:
        """Fork a model runner at these descriptors; return its number, 0 if that is not possible."""
        server_id = os.getpid()
        try:
            process_id = os.fork()
        except OSError:
            return 0
        if process_id == 0:
            try:
                die_with_parent(server_id)
                self._become_runner(*fds)
            finally:  # an error must not make it a second server
                os._exit(1)
        try:
            pidfd, exit_fd = os.pidfd_open(process_id), os.dup(fds[-1])
        except OSError:  # its end could not be told
            os.kill(process_id, signal.SIGKILL)
            os.waitpid(process_id, 0)
            return 0
        self._children[pidfd] = Child(process_id, exit_fd)
        self._poll.register(pidfd, select.POLLIN)
        return process_id

    def _become_runner(self, requests: int, replies: int, errors: int, life: int, exit_fd: int) -> NoReturn:
        """Be a model runner, in the process that was forked, with what such a process has open and no more."""
        self._connection.detach()
        for standard, fd in enumerate((requests, replies, errors)):
            os.dup2(fd, standard)
            os.close(fd)
        for pidfd, sibling in self._children.items():
            os.close(pidfd)
            os.close(sibling.exit_fd)
        os.close(exit_fd)
        os.environ[lifeline.VARIABLE] = str(life)
        self._become()

    def _reap(self, pidfd: int) -> None:
        """Wait for a child that has ended, and tell how."""
        child = self._children.pop(pidfd)
        self._poll.unregister(pidfd)
        _, status = os.waitpid(child.process_id, 0)
        with suppress(BrokenPipeError):
            os.write(child.exit_fd, EXIT_CODE.pack(os.waitstatus_to_exitcode(status)))
        os.close(child.exit_fd)
        os.close(pidfd)


def main(
    connection: socket.socket, become: Callable[[], NoReturn], prepare: Callable[[OnProgress], None]
) -> NoReturn:
    """Be a fork server.

    Args:
        become: run in each fork, from its standard streams on.
        prepare: imports what that will need.
    """
    die_with_parent()  # one that died before this line has closed the connection

    def note(progress: LoadProgress) -> None:
        with suppress(OSError):  # there is no room for it, or the engine has gone
            connection.send(IMPORTING, socket.MSG_DONTWAIT)

    prepare(note)
    gc.collect()
    gc.freeze()  # a collection in a process would write to the memory that it shares
    with suppress(ConnectionError):
        connection.send(READY)
    Forks(connection, become).run()
    os._exit(0)


if __name__ == "__main__":
    main(socket.socket(fileno=0), run, import_model_code)
