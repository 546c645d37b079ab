"""Both ends of the handshake between an engine and a worker (`ipc.handshake`), over a stream."""

from __future__ import annotations

import secrets
import socket
from importlib.metadata import version
from typing import Final, TypeVar

import trio

from triolet.errors import FrameError, WorkerRefused
from triolet.ipc.handshake import (
    CHALLENGE_BYTES,
    GREETING_BYTES,
    HEAD_BYTES,
    MAX_NAME_CHARS,
    Hello,
    Welcome,
    challenge_of,
    greeting_with,
    length_after,
    refusal_of,
    seal,
    unseal,
    unseal_welcome,
)
from triolet.ipc.messages import LAYOUT

VERSION: Final = version("triolet")
SILENCE_S: Final = 3  # after which the system gives up a connection whose other end does not acknowledge

P = TypeVar("P", Hello, Welcome)


def watch_other_end(sock: trio.socket.SocketType) -> None:
    """Have the system end the connection when the other machine has been silent for `SILENCE_S`, also within a step."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Not every system has all of them.
    for name, value in (
        ("TCP_KEEPIDLE", 1),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", SILENCE_S - 1),
        ("TCP_USER_TIMEOUT", 1000 * SILENCE_S),
    ):
        if (number := getattr(socket, name, None)) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, number, value)


async def admit(stream: trio.abc.Stream, token: str, num_ranks: int) -> Hello:
    """Let a worker in, on the engine's side; the caller bounds the time.

    Args:
        num_ranks: processes that a worker is to start.
    Raises:
        WorkerRefused: it has another token, or runs another version; it has been told.
        FrameError: it is no worker.
        EOFError: it has left.
    """
    challenge = secrets.token_bytes(CHALLENGE_BYTES)
    await stream.send_all(greeting_with(challenge))
    try:
        hello = unseal(await _packet(stream, Hello), Hello, token, challenge)
        if len(hello.challenge) != CHALLENGE_BYTES or len(hello.name) > MAX_NAME_CHARS:
            raise FrameError(f"a worker must send a challenge of {CHALLENGE_BYTES} bytes and a short name")
        if refusal := refusal_of(hello, VERSION):
            raise WorkerRefused(refusal)
    except WorkerRefused as refused:
        # The proof of this one is not checked: it has to be read by a worker with another token.
        await stream.send_all(seal(Welcome(str(refused), 0), token, challenge))
        raise
    await stream.send_all(seal(Welcome("", num_ranks), token, hello.challenge + challenge))
    return hello


async def join(
    stream: trio.abc.Stream, token: str, *, name: str, process_id: int, group: bytes, rank: int
) -> Welcome:
    """Introduce a worker to an engine, on the worker's side; the caller bounds the time.

    Args:
        name: of the worker, for people, at most `MAX_NAME_CHARS`.
        process_id: of the worker.
        group: the same for all ranks of one worker.
        rank: of this connection.
    Raises:
        WorkerRefused: the engine does not take it, or cannot prove that it knows the token.
        FrameError: it is no engine.
        EOFError: it has left.
    """
    challenge = challenge_of(await _exactly(stream, GREETING_BYTES))
    mine = secrets.token_bytes(CHALLENGE_BYTES)
    hello = Hello(VERSION, LAYOUT, mine, name, process_id, group, rank)
    await stream.send_all(seal(hello, token, challenge))
    return unseal_welcome(await _packet(stream, Welcome), token, mine + challenge)


async def _packet(stream: trio.abc.Stream, kind: type[P]) -> bytes:
    return await _exactly(stream, length_after(await _exactly(stream, HEAD_BYTES), kind))


async def _exactly(stream: trio.abc.Stream, num_bytes: int) -> bytes:
    """Receive so many bytes, and none of what follows."""
    data = b""
    while len(data) < num_bytes:
        if not (more := await stream.receive_some(num_bytes - len(data))):
            raise EOFError
        data += more
    return data
