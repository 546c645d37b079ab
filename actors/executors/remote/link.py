"""Connection of the engine to a worker on another machine, from its handshake to its end.

Between two conversations the worker is pinged every second. A machine that vanishes is known within three seconds: idle
from a ping without an answer, within a step from the system's own probes. When a worker's process ends, its machine
tells how it has ended and closes the connection, and that is seen at once.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

import attrs
import trio

from triolet.actors.executors.child_process import describe_exit
from triolet.actors.executors.connection import (
    READ_BYTES,
    Descriptor,
    FrameWriter,
    Posted,
    RunnerConnection,
    receive_when_ready,
)
from triolet.errors import FrameError, RunnerDied
from triolet.ipc.messages import REPLIES, REQUESTS, ImportModules, Ping, Pong, ProcessEnded, Reply

PING_S = 1.0  # between two pings of an idle worker
ANSWER_S = 2.0  # for the answer to one
PREPARE_S = 300.0  # for the imports of a fresh process, on a machine under load
MAX_LAST_READS = 64  # of what a process has sent before its end: the event loop waits for them
LOST = "has ended with its machine, or cannot be reached any more"


class StreamFrameWriter(FrameWriter):
    """Writer of frames to a stream whose bytes are not those of the descriptor: all of them are written by `run`."""

    def __init__(self, sink: Descriptor, stream: trio.abc.SendStream) -> None:
        super().__init__(sink)
        self._stream = stream

    async def _write_rest(self) -> None:
        data = bytes(self._rest)
        await self._stream.send_all(data)
        del self._rest[: len(data)]

    def _write(self, data: bytes | memoryview) -> int:
        self._is_broken = self._sink.fileno() < 0
        return 0


@attrs.define(eq=False)
class WorkerLink(RunnerConnection):
    """Connection to one worker's process.

    Its owner is, first, the port that the worker has connected to, and then the executor that takes it from there.
    """

    _stream: trio.abc.Stream
    _socket: trio.socket.SocketType  # below the stream
    name: str  # that the worker has given itself
    worker: str  # the worker's machine and process, for people
    is_prepared: bool = attrs.field(default=False, init=False)  # its process has imported what a load needs
    _turn: trio.Lock = attrs.field(factory=trio.Lock, init=False)  # of the conversation that goes on
    _is_plain: bool = attrs.field(init=False)  # the stream's bytes are those of the socket
    _writer: FrameWriter = attrs.field(init=False)
    _cause: str | None = attrs.field(default=None, init=False)  # of its end, if a ping has found it
    _returncode: int | None = attrs.field(default=None, init=False)  # of its process, if that was told

    def __attrs_post_init__(self) -> None:
        self._is_plain = isinstance(self._stream, trio.SocketStream)
        self._writer = (
            FrameWriter(self._socket) if self._is_plain else StreamFrameWriter(self._socket, self._stream)
        )

    async def prepare(self) -> None:
        """Have a fresh process import what a load needs.

        Raises:
            RunnerDied: it has ended, or takes too long.
        """
        late = f"took more than {PREPARE_S} s to import its modules"
        async with self.conversation(PREPARE_S, late):
            await self.ask(ImportModules())
            await self._ping()

    async def keep(self) -> None:
        """Watch the connection until it ends; what cannot be sent at once is sent in here."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            nursery.start_soon(self._ping_while_idle)
            nursery.start_soon(self._writer.run)
            await self._dying.wait()
            nursery.cancel_scope.cancel()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[RunnerConnection]:
        """Enclose the life of the worker's process: when the scope is left, the connection is closed, which ends it."""
        try:
            with self._idle:
                yield self
            if self._idle.cancelled_caught:
                raise await self.death()
        finally:
            self._kill()

    @asynccontextmanager
    async def conversation(self, timeout_s: float | None, late: str) -> AsyncGenerator[None]:
        """Enclose a request and its reply, after the ping that may be on its way."""
        try:
            self._turn.acquire_nowait()
        except trio.WouldBlock:
            await self._turn.acquire()
        try:
            async with RunnerConnection.conversation(self, timeout_s, late):
                yield
        finally:
            self._turn.release()

    def post(self, message: Posted) -> bool:
        return self._writer.put(REQUESTS.pack(message))

    async def gone(self) -> None:
        """Return: the other machine starts the next process when this one has ended."""
        await trio.lowlevel.checkpoint()

    @property
    def is_alive(self) -> bool:
        return not self._dying.is_set()

    def discard(self) -> None:
        """Close the connection, which ends the process."""
        self._kill()

    async def _ping(self) -> None:
        """Ping and wait for the answer, within a conversation."""
        await self.ask(Ping())
        while not isinstance(await self.reply(), Pong):
            pass  # progress of its imports

    async def _ping_while_idle(self) -> None:
        late = f"did not answer a ping within {ANSWER_S} s"
        try:
            while True:
                await trio.sleep(PING_S)
                if self.is_idle:
                    async with self.conversation(ANSWER_S, late):
                        await self._ping()
        except RunnerDied as death:
            self._cause = death.reason
            self._note_death()
            self._idle.cancel()

    async def _watch(self) -> None:
        """Note that the other end has closed the connection."""
        if sys.platform == "linux" and self.is_alive:  # elsewhere the next ping finds it
            with select.epoll() as end:
                end.register(self._socket.fileno(), select.EPOLLRDHUP)
                await trio.lowlevel.wait_readable(end.fileno())
            # A conversation that goes on may still read the last reply, and then sees the end itself.
            async with self._turn:
                self._note_death()

    async def _send(self, frame: bytes) -> None:
        self._writer.put(frame)
        await self._writer.flush()

    async def _receive(self) -> bytes:
        if self._is_plain:
            return await receive_when_ready(self._socket, self._reader.num_missing)
        return bytes(await self._stream.receive_some(READ_BYTES))  # a record of TLS is shorter

    def _kill(self) -> None:
        self._socket.close()
        self._note_death()

    async def reply(self) -> Reply:
        reply = await RunnerConnection.reply(self)
        if isinstance(reply, ProcessEnded):
            self._returncode = reply.returncode
            raise EOFError
        return reply

    async def death(self, reason: str | None = None, *, is_hang: bool = False) -> RunnerDied:
        await trio.lowlevel.checkpoint()
        is_hang = is_hang and reason is not None
        reason = reason or self._cause
        if reason is None:
            self._read_rest()
        self._kill()
        is_lost = reason is None and self._returncode is None
        if reason is None:
            reason = LOST if self._returncode is None else describe_exit(self._returncode)
        prefix = f"on {self.worker} "
        return RunnerDied(
            reason if reason.startswith(prefix) else prefix + reason,
            self._returncode,
            is_hang=is_hang,
            is_lost=is_lost,
        )

    def _read_rest(self) -> None:
        """Read how the process has ended, if that has arrived."""
        with suppress(OSError, FrameError):
            for _ in range(MAX_LAST_READS if self._is_plain else 0):
                if not (data := os.read(self._socket.fileno(), READ_BYTES)):
                    break
                self._reader.feed(data)
                for reply in REPLIES.messages(self._reader):
                    if isinstance(reply, ProcessEnded):
                        self._returncode = reply.returncode
