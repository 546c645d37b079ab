"""Frames over a descriptor: all bytes arrive, in order, and a step costs one turn of the event loop."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import attrs
import pytest
import trio
import trio.testing

from tests.actors.executors.harness import executor_that, first_step, ignore, remote_that, step_ahead
from tests.actors.harness import unexpected
from triolet.actors.executors.connection import (
    LONG_BYTES,
    READ_BYTES,
    SHORT_BYTES,
    FrameWriter,
    receive_when_ready,
)
from triolet.actors.executors.contract import Executor
from triolet.actors.executors.remote.link import StreamFrameWriter
from triolet.ipc.messages import REPLIES, CallAnswer

NUM_STEPS = 40


@pytest.fixture
def ends() -> Iterator[tuple[trio.socket.SocketType, socket.socket]]:
    here, there = socket.socketpair()
    here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with there, trio.socket.from_stdlib_socket(here) as ours:
        yield ours, there


@attrs.define(eq=False)
class Turns(trio.abc.Instrument):
    """Counter of the turns of the event loop."""

    count: int = 0

    def before_io_wait(self, timeout: float) -> None:
        self.count += 1


async def turns_of_a_step(executor: Executor) -> int:
    """Return the fewest turns of the event loop in which a step was computed: other tasks may add some."""
    turns, counts = Turns(), list[int]()
    async with executor.running():
        await executor.start(ignore)
        await executor.execute(first_step(), unexpected)
        trio.lowlevel.add_instrument(turns)
        for number in range(NUM_STEPS):
            turns.count = 0
            plan = attrs.evolve(step_ahead(2 + number), is_ahead=False)
            await executor.execute(plan, unexpected)
            counts.append(turns.count)
        trio.lowlevel.remove_instrument(turns)
    return min(counts)


async def test_a_step_in_a_process_and_on_a_worker_takes_one_turn_of_the_event_loop(
    nursery: trio.Nursery,
) -> None:
    assert await turns_of_a_step(executor_that()) == 1
    assert await turns_of_a_step(remote_that(nursery)) == 1


async def test_a_frame_for_which_there_is_room_is_written_at_once(
    ends: tuple[trio.socket.SocketType, socket.socket],
) -> None:
    ours, theirs = ends
    assert FrameWriter(ours).put(b"frame")
    assert theirs.recv(100) == b"frame"
    await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_frames_longer_than_there_is_room_for_arrive_whole_and_in_order(
    ends: tuple[trio.socket.SocketType, socket.socket], nursery: trio.Nursery, is_stream: bool
) -> None:
    ours, theirs = ends
    writer = StreamFrameWriter(ours, trio.SocketStream(ours)) if is_stream else FrameWriter(ours)
    nursery.start_soon(writer.run)
    frames = [b"first", bytes(range(256)) * 4000, b"last"]
    assert all(writer.put(frame) for frame in frames)
    with trio.move_on_after(0):
        await writer.flush()
        pytest.fail("there is no room for so many bytes")
    theirs.setblocking(False)
    reader, data = trio.socket.from_stdlib_socket(theirs), b""
    while len(data) < sum(map(len, frames)):
        data += await receive_when_ready(reader)
    assert data == b"".join(frames)
    await writer.flush()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_writer_with_a_closed_end_says_so(
    ends: tuple[trio.socket.SocketType, socket.socket], is_stream: bool
) -> None:
    ours, _ = ends
    writer = StreamFrameWriter(ours, trio.SocketStream(ours)) if is_stream else FrameWriter(ours)
    ours.close()
    assert not writer.put(b"frame")
    with pytest.raises(trio.BrokenResourceError):
        await writer.flush()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_task_that_waits_for_a_flush_is_told_that_the_other_end_has_gone(
    ends: tuple[trio.socket.SocketType, socket.socket], nursery: trio.Nursery, is_stream: bool
) -> None:
    ours, theirs = ends
    writer = StreamFrameWriter(ours, trio.SocketStream(ours)) if is_stream else FrameWriter(ours)
    assert writer.put(bytes(2**20))
    nursery.start_soon(writer.run)
    await trio.testing.wait_all_tasks_blocked()
    theirs.close()
    with pytest.raises(trio.BrokenResourceError):
        await writer.flush()


async def test_a_reader_gets_what_was_sent_before_the_end_and_then_nothing(
    ends: tuple[trio.socket.SocketType, socket.socket],
) -> None:
    ours, theirs = ends
    theirs.sendall(b"last words")
    theirs.close()
    assert await receive_when_ready(ours) == b"last words"
    assert await receive_when_ready(ours) == b""


async def test_short_messages_are_read_into_little_memory_and_long_ones_in_few_reads(
    ends: tuple[trio.socket.SocketType, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(fd: int, num_bytes: int) -> bytes:
        sizes.append(num_bytes)
        return read_bytes(fd, num_bytes)

    read_bytes, sizes = os.read, list[int]()
    ours, theirs = ends
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**18)
    monkeypatch.setattr(os, "read", read)
    for message, num_reads in ((b"short", 1), (bytes(SHORT_BYTES), 2), (bytes(40_000), 2)):
        sizes.clear()
        theirs.sendall(message)
        assert await receive_when_ready(ours) == message
        assert sizes == [SHORT_BYTES, READ_BYTES][:num_reads]


async def test_a_long_frame_is_read_in_few_reads_of_bounded_memory(
    ends: tuple[trio.socket.SocketType, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(fd: int, num_bytes: int) -> bytes:
        sizes.append(num_bytes)
        return take(num_bytes)

    def take(num_bytes: int) -> bytes:
        data = bytes(frame[:num_bytes])
        del frame[:num_bytes]
        return data

    ours, theirs = ends
    message = CallAnswer(bytes(range(256)) * 2**14)
    frame, sizes, reader = bytearray(REPLIES.pack(message)), list[int](), REPLIES.reader()
    theirs.sendall(b"readable")
    monkeypatch.setattr(os, "read", read)
    while (payload := reader.next_payload()) is None:
        reader.feed(await receive_when_ready(ours, reader.num_missing))
    monkeypatch.undo()
    assert REPLIES.unpack(payload) == message
    assert sizes[:2] == [SHORT_BYTES, READ_BYTES]
    assert max(sizes) == LONG_BYTES and len(sizes) == 6  # 4 MiB
    assert reader.num_missing == 0


async def test_a_long_message_is_read_in_small_parts_where_memory_is_short(
    ends: tuple[trio.socket.SocketType, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(fd: int, num_bytes: int) -> bytes:
        if num_bytes > SHORT_BYTES:
            raise MemoryError
        return read_bytes(fd, num_bytes)

    read_bytes, data = os.read, b""
    ours, theirs = ends
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**18)
    monkeypatch.setattr(os, "read", read)
    message = bytes(range(250)) * 100
    theirs.sendall(message)
    while len(data) < len(message):
        data += await receive_when_ready(ours, len(message) - len(data))
    assert data == message


async def test_a_reader_with_its_own_end_closed_is_told_so_before_and_while_it_waits(
    ends: tuple[trio.socket.SocketType, socket.socket], nursery: trio.Nursery
) -> None:
    ours, _ = ends

    async def close() -> None:
        await trio.testing.wait_all_tasks_blocked()
        ours.close()

    nursery.start_soon(close)
    for _ in range(2):
        with pytest.raises(trio.ClosedResourceError):
            await receive_when_ready(ours)
