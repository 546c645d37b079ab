"""Passing of descriptors over Unix sockets of Trio's, without waiting for the other end."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import trio


async def wait_for_room(connection: trio.socket.SocketType) -> None:
    """Wait until a byte can be sent.

    Raises:
        OSError: the connection is closed.
    """
    if connection.fileno() < 0:
        raise BrokenPipeError
    await trio.lowlevel.wait_writable(connection)


def has_hung_up(connection: trio.socket.SocketType) -> bool:
    """Return True if the process at the other end, which sends nothing, has ended."""
    try:
        with _borrowed(connection) as plain:
            return plain.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def send_fd(connection: trio.socket.SocketType, fd: int) -> None:
    """Send one byte with a descriptor, which a writable Unix socket has room for.

    Raises:
        OSError: the connection is closed.
    """
    with _borrowed(connection) as plain:
        socket.send_fds(plain, [b"."], [fd])


@contextmanager
def _borrowed(connection: trio.socket.SocketType) -> Iterator[socket.socket]:
    """Use a socket of Trio's as a plain one, without a second descriptor: there may be none left."""
    if connection.fileno() < 0:
        # Another task can close it between a wait's end and the step of the task that waited.
        raise BrokenPipeError
    plain = socket.socket(fileno=connection.fileno())
    try:
        yield plain
    finally:
        plain.detach()
