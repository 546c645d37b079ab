"""Frames over a descriptor: written without waiting where there is room, read when the system says that some are there.

A step is one frame each way, and takes a tenth of a millisecond where the model is small: every turn of the event loop
that it does not need is a good part of that. So a frame is written at once, by the task that has made it, and a reader
waits first and reads then: right after a request the reply cannot be there. Pipes and sockets are the same here; TLS
needs a stream, and a task that writes to it.
"""

from __future__ import annotations

import os
from typing import Final, Protocol

import trio

READ_BYTES: Final = 2**16  # what a pipe holds on Linux


class Descriptor(Protocol):
    """Pipe or socket that does not block."""

    def fileno(self) -> int:
        """Return its number; -1 once it is closed."""
        ...


async def receive_when_ready(source: Descriptor) -> bytes:
    """Wait for bytes and return them; none after the last. A checkpoint.

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
            return os.read(fd, READ_BYTES)
        except BlockingIOError:  # the system may err
            continue
        except OSError as error:
            raise trio.BrokenResourceError from error


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
        del self._rest[: self._write(self._rest[:READ_BYTES])]

    def _write(self, data: bytes | bytearray) -> int:
        """Write what there is room for; return how many bytes that was."""
        try:
            return os.write(self._sink.fileno(), data)
        except BlockingIOError:
            return 0
        except OSError:
            self._is_broken = True
            return 0


class StreamFrameWriter(FrameWriter):
    """Writer of frames to a stream whose bytes are not those of the descriptor: all of them are written by `run`."""

    def __init__(self, sink: Descriptor, stream: trio.abc.SendStream) -> None:
        super().__init__(sink)
        self._stream = stream

    async def _write_rest(self) -> None:
        data = bytes(self._rest)
        await self._stream.send_all(data)
        del self._rest[: len(data)]

    def _write(self, data: bytes | bytearray) -> int:
        self._is_broken = self._sink.fileno() < 0
        return 0
