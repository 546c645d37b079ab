"""Worker's side: connects to an engine, and has a process compute for it, life after life.

The agent imports no torch and computes nothing. It makes the connection and hands it to a fresh process of
`triolet.workers.runner`, which then speaks with the engine itself. The agent watches both: when the process dies, it
tells the engine how, and ends the connection; when the engine ends the connection, it ends the process, also one that
hangs. Then the next life begins, with a connection of its own. Over TLS, and where the system cannot tell the end of a
connection without reading from it, the agent passes the bytes on, which adds a hop.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import attrs
import trio

from triolet.actors.executors.child_process import describe_exit, exit_code_of, worker_environment
from triolet.actors.executors.group import Rendezvous
from triolet.actors.executors.process import WORKER
from triolet.actors.executors.remote.handshaking import join, watch_other_end
from triolet.actors.supervisor import root_cause
from triolet.config.address import Address
from triolet.core.recovery.supervision import Backoff, shortage_of
from triolet.ipc import lifeline
from triolet.ipc.handshake import MAX_NAME_CHARS, Welcome
from triolet.ipc.messages import REPLIES, ProcessEnded

logger = logging.getLogger("triolet.worker")

CONNECT_S = 10.0  # until connection and handshake are made
FIRST_PAUSE_S, LAST_PAUSE_S = 0.1, 2.0  # between two attempts to reach the engine, or to keep a process alive
SHORT_LIFE_S = 5.0  # of a process, which is an attempt in vain
GRACE_S = 2.0  # from the end of a connection until its process is killed
GROUP_BYTES = 16
READ_BYTES = 2**16
UNREACHABLE = (OSError, EOFError, trio.BrokenResourceError, trio.TooSlowError)


@attrs.frozen
class End:
    """Connection of one rank."""

    stream: trio.abc.Stream
    sock: trio.socket.SocketType  # below it


@attrs.frozen
class Agent:
    """Worker of one engine: one process, or as many as the engine's `tensor_parallel_size`."""

    engine: Address
    token: str = attrs.field(repr=False)
    tls: ssl.SSLContext | None = None  # that the engine's certificate must satisfy
    command: Sequence[str] = WORKER  # starts the process, if there is one
    name: str = attrs.field(factory=socket.gethostname)  # that the engine knows it by

    async def run(self) -> None:
        """Work for the engine until it refuses this worker; an engine that cannot be reached is tried again.

        Raises:
            WorkerRefused: another token, or another version.
            FrameError: that is no engine.
        """
        pauses, is_told = Backoff(FIRST_PAUSE_S, LAST_PAUSE_S), False
        while True:
            try:
                ends = await self._connect()
            except Exception as error:
                if not (isinstance(error, UNREACHABLE) or _passes(error)):
                    raise
                if not is_told:
                    logger.warning(
                        "the engine at %s cannot be reached (%s); trying on", self.engine, _why(error)
                    )
                is_told = True
            else:
                is_told, began_s = False, trio.current_time()
                logger.info("connected to the engine at %s", self.engine)
                await self._try_to_live(ends)
                if trio.current_time() - began_s >= SHORT_LIFE_S:
                    pauses.reset()
                    continue
            await trio.sleep(pauses.next_s())

    async def _connect(self) -> list[End]:
        """Connect each rank; the engine's first answer says how many there are."""
        group, ends = secrets.token_bytes(GROUP_BYTES), list[End]()
        num_ranks = 1
        with trio.fail_after(CONNECT_S):
            try:
                while len(ends) < num_ranks:
                    end, welcome = await self._join(group, len(ends))
                    ends.append(end)
                    num_ranks = welcome.num_ranks
            except BaseException:
                for end in ends:
                    end.sock.close()
                raise
        return ends

    async def _join(self, group: bytes, rank: int) -> tuple[End, Welcome]:
        socket_stream = await trio.open_tcp_stream(self.engine.host, self.engine.port)
        try:
            watch_other_end(socket_stream.socket)
            stream: trio.abc.Stream = socket_stream
            if self.tls is not None:
                stream = trio.SSLStream(socket_stream, self.tls, server_hostname=self.engine.host)
            welcome = await join(
                stream,
                self.token,
                name=self.name[:MAX_NAME_CHARS],
                process_id=os.getpid(),
                group=group,
                rank=rank,
            )
        except BaseException:
            socket_stream.socket.close()
            raise
        return End(stream, socket_stream.socket), welcome

    async def _try_to_live(self, ends: Sequence[End]) -> None:
        """Do as `_live`, if the machine has what that needs now; otherwise log what is missing."""
        try:
            await self._live(ends)
        except* Exception as errors:
            if errors.split(_passes)[1] is not None:
                raise
            logger.warning("no process can be started for the engine: %s", root_cause(errors))
        finally:
            for end in ends:
                end.sock.close()

    async def _live(self, ends: Sequence[End]) -> None:
        """Have a process for each rank compute until one of them, or the engine, ends."""
        if len(ends) == 1:
            await self._live_at(ends[0], self.command)
            return
        rendezvous = Rendezvous()
        try:
            rendezvous.begin_life()
            async with trio.open_nursery() as nursery:
                for rank, end in enumerate(ends):
                    life = self._live_at(end, rendezvous.command(rank, len(ends)))
                    nursery.start_soon(_until, life, nursery.cancel_scope)
        finally:
            rendezvous.close()

    async def _live_at(self, end: End, command: Sequence[str]) -> None:
        """Have a process compute at a connection until it, or the engine, ends."""
        with end.sock:
            if self.tls is None and sys.platform == "linux":
                await self._compute_at(end.sock, command)
            else:
                await self._compute_behind(end.stream, command)

    async def _compute_at(self, sock: trio.socket.SocketType, command: Sequence[str]) -> None:
        """Have a process speak with the engine itself."""
        os.set_blocking(sock.fileno(), True)  # for the process: the agent reads no more from it
        async with self._process(sock, command) as process:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_until, _readable(process.life), nursery.cancel_scope)
                nursery.start_soon(_until, _end_of(sock), nursery.cancel_scope)
            last = await process.last_message()
            os.set_blocking(sock.fileno(), False)
            with suppress(OSError):  # the engine has gone, or reads nothing any more
                os.write(sock.fileno(), last)
            with suppress(OSError):  # what the process has sent last is delivered before its end is
                sock.shutdown(socket.SHUT_WR)

    async def _compute_behind(self, stream: trio.abc.Stream, command: Sequence[str]) -> None:
        """Pass on what a process and the engine say to each other."""
        here, there = trio.socket.socketpair()
        with here, there:
            os.set_blocking(there.fileno(), True)
            async with self._process(there, command) as process, trio.SocketStream(here) as end:
                there.close()  # only the process has it now, and its end is the process's
                async with trio.open_nursery() as nursery:
                    scope = nursery.cancel_scope
                    nursery.start_soon(_until, _pass_on(stream, _ProcessEnd(end, scope)), scope)
                    nursery.start_soon(_until, _pass_on(end, stream), scope)
                end.socket.close()  # which ends a process that lives, as the end of the connection does
                last = await process.last_message()
                with (
                    trio.move_on_after(GRACE_S),
                    suppress(trio.BrokenResourceError, trio.ClosedResourceError),
                ):
                    await stream.send_all(last)

    @asynccontextmanager
    async def _process(
        self, sock: trio.socket.SocketType, command: Sequence[str]
    ) -> AsyncGenerator[WorkerProcess]:
        """Enclose the life of a process that speaks over a socket."""
        process = _spawn(sock, command)
        try:
            yield process
        finally:
            process.popen.kill()
            # Its memory is free before the next one loads. That takes milliseconds, and nothing else goes on here.
            returncode = process.popen.wait()
            trio.lowlevel.notify_closing(process.life)
            os.close(process.life)
            logger.info("the model runner's process %d %s", process.popen.pid, describe_exit(returncode))


@attrs.frozen
class WorkerProcess:
    """Process that an agent has started."""

    popen: subprocess.Popen[bytes]
    life: int
    """Reading end of its lifeline."""

    async def last_message(self) -> bytes:
        """Wait until the process begins to end, kill it if it does not, and return what the engine is told of that."""
        with trio.move_on_after(GRACE_S):
            await _readable(self.life)
        self.popen.kill()  # changes no exit status of a process that is ending already
        # 0 may be yet to change: descriptors are closed before it is known how a process ends.
        returncode = exit_code_of(self.popen.pid) or self.popen.wait()
        return REPLIES.pack(ProcessEnded(returncode))


def _spawn(sock: trio.socket.SocketType, command: Sequence[str]) -> WorkerProcess:
    """Start a process."""
    life, life_end = os.pipe()
    try:
        popen = subprocess.Popen(
            command,
            stdin=sock.fileno(),
            stdout=sock.fileno(),
            pass_fds=[life_end],
            env={**worker_environment(), lifeline.VARIABLE: str(life_end)},
            start_new_session=True,
        )
    except BaseException:
        os.close(life)
        raise
    finally:
        os.close(life_end)
    return WorkerProcess(popen, life)


async def _until(end: Coroutine[Any, Any, None], scope: trio.CancelScope) -> None:
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        await end
    scope.cancel()


async def _readable(fd: int) -> None:
    await trio.lowlevel.wait_readable(fd)


async def _end_of(sock: trio.socket.SocketType) -> None:
    """Wait until the other end has closed the connection, without reading from it."""
    with select.epoll() as end:
        end.register(sock.fileno(), select.EPOLLRDHUP)
        await trio.lowlevel.wait_readable(end.fileno())


@attrs.frozen
class _ProcessEnd:
    """End of a connection to a process, to be written to.

    Args:
        stream: the connection.
        scope: of all that goes on between the process and the engine.
    """

    stream: trio.abc.Stream
    scope: trio.CancelScope

    async def send_all(self, data: bytes | bytearray) -> None:
        """Send, until the process ends: from then on, let what it has sent last get to the engine."""
        try:
            await self.stream.send_all(data)
        except trio.BrokenResourceError:
            self.scope.deadline = trio.current_time() + GRACE_S
            await trio.sleep_forever()  # until the other direction has come to its end


async def _pass_on(source: trio.abc.Stream, sink: trio.abc.Stream | _ProcessEnd) -> None:
    while data := await source.receive_some(READ_BYTES):
        await sink.send_all(data)


def _passes(error: BaseException) -> bool:
    """Return whether an error says that the machine lacks something, perhaps not for long."""
    return isinstance(error, OSError) or shortage_of(error, "a worker") is not None


def _why(error: Exception) -> str:
    return str(error.__cause__ or error) or type(error).__name__
