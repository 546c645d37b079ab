"""Byte stream of one client, with a write timeout, and the memory that all streams of a client share.

A connection takes a turn (`ClientTurns`) for each piece of input.

The memory budget bounds the bodies and messages that are being received and parsed, per client and in all. Without it,
many connections with one long body each take memory that no limit of a single body bounds. The first 16 KiB of every
body are free, so that a client with short requests is never refused because of others.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

import attrs
import trio

from triolet.protocol.errors import WireError
from triolet.server.transport.client_turns import ClientTurns

SEND_CHUNK_BYTES = 2**16  # the timeout is counted per chunk: a slow client is not a stalled one


def address_of(connected: trio.socket.SocketType) -> str:
    """Return the address of the client; empty for a client on a Unix socket, which has none.

    Raises:
        OSError: the client has disconnected already.
    """
    address = connected.getpeername()
    return str(address[0]) if isinstance(address, tuple) else ""


class ClientStream(trio.abc.HalfCloseableStream):
    """Connection with one client, plain or TLS.

    Args:
        transport: the accepted connection.
        write_timeout: seconds in which the client must accept 64 KiB; may be changed later.
        turns: shared by all connections of a server.
        client: takes the turns; the address, until the key is known.
    """

    def __init__(
        self,
        transport: trio.SocketStream | trio.SSLStream[trio.SocketStream],
        write_timeout: float,
        turns: ClientTurns,
        client: str,
    ) -> None:
        self._transport = transport
        self.write_timeout = write_timeout
        self.client = client
        self._turns = turns
        self._unread = b""
        self.has_timed_out = False  # whether the client was disconnected because it does not read

    @property
    def is_tls(self) -> bool:
        return isinstance(self._transport, trio.SSLStream)

    @property
    def socket(self) -> trio.socket.SocketType:
        transport = self._transport
        return (
            transport.transport_stream.socket if isinstance(transport, trio.SSLStream) else transport.socket
        )

    def unread(self, data: bytes) -> None:
        """Put bytes back, to be returned by the next read."""
        self._unread = data + self._unread

    async def take_turn(self) -> None:
        """Wait until the client may have the next piece of its input handled."""
        await self._turns.take(self.client)

    def receive_nowait(self, max_bytes: int) -> bytes:
        """Return what has arrived already, without a checkpoint and without a turn; empty if that is nothing.

        A client that connects sends at once, and most connections have their request before their task runs.
        """
        if isinstance(self._transport, trio.SocketStream):
            # Also the end and errors are left to the next read that waits.
            with suppress(OSError):
                return os.read(self.socket.fileno(), max_bytes)
        return b""

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if self._unread:
            await trio.lowlevel.checkpoint()
        else:
            # Kept over the wait, which may be cancelled. The end of the input takes a turn as well: a client can close
            # hundreds of connections at once.
            self._unread = bytes(await self._transport.receive_some(max_bytes))
            await self.take_turn()
        size = len(self._unread) if max_bytes is None else max_bytes
        data, self._unread = self._unread[:size], self._unread[size:]
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of `data`, in chunks that must each be accepted within `write_timeout`.

        Raises:
            trio.BrokenResourceError: the client has disconnected or does not read.
        """
        view = memoryview(data)
        # In chunks: a time limit for all of `data` would depend on its length.
        for start in range(0, max(len(view), 1), SEND_CHUNK_BYTES):
            with trio.move_on_after(self.write_timeout) as timeout:
                await self._transport.send_all(view[start : start + SEND_CHUNK_BYTES])
            if (
                timeout.cancelled_caught
            ):  # part of the chunk may have been sent: the stream cannot be continued
                self.has_timed_out = True
                await trio.aclose_forcefully(self._transport)
                raise trio.BrokenResourceError(f"the client took nothing for {self.write_timeout:g} s")

    async def wait_send_all_might_not_block(self) -> None:
        await self._transport.wait_send_all_might_not_block()

    @property
    def can_half_close(self) -> bool:
        """True if the write side can be closed alone; False with TLS."""
        return isinstance(self._transport, trio.abc.HalfCloseableStream)

    async def send_eof(self) -> None:
        """Close the write side, if the transport can do that."""
        if isinstance(self._transport, trio.abc.HalfCloseableStream):
            await self._transport.send_eof()
        else:
            await trio.lowlevel.checkpoint()

    def end_writing(self) -> None:
        """Close the write side without a checkpoint, if it can be closed alone; nothing may be being sent."""
        if isinstance(self._transport, trio.SocketStream):
            with suppress(OSError):  # the client has gone
                self.socket.shutdown(socket.SHUT_WR)

    async def aclose(self) -> None:
        await self._transport.aclose()


def client_address(stream: trio.abc.Stream) -> str:
    """Return the address of the client of a stream; empty if it has none, or has disconnected already."""
    if not isinstance(stream, ClientStream):
        return ""
    try:
        return address_of(stream.socket)
    except OSError:
        return ""


# An ordinary request costs the budget nothing, and so it is never refused for the long ones of others.
FREE_BYTES: Final = 2**14


@attrs.define(eq=False)
class InputBudget:
    """Budget shared by all connections of a server."""

    max_bytes: int  # of all clients together
    max_bytes_per_client: int  # of one API key, or, without keys, of one address
    num_bytes: int = attrs.field(default=0, init=False)
    num_taken: int = attrs.field(default=0, init=False)  # bytes so far
    _by_client: Counter[str] = attrs.field(factory=Counter, init=False)

    def reservation(self, client: str) -> InputReservation:
        """Return an empty reservation; leaving its scope gives everything back."""
        return InputReservation(self, client)

    def add(self, client: str, num_bytes: int) -> None:
        """Take `num_bytes` from the budget.

        Raises:
            WireError: 429 over the client's share, 503 over the whole.
        """
        if self._by_client[client] + num_bytes > self.max_bytes_per_client:
            raise WireError(
                f"The long requests of one client must have at most {self.max_bytes_per_client} bytes together.",
                code="rate_limit_exceeded",
                status=429,
                type="rate_limit_error",
                retry_after_s=1.0,
            )
        if self.num_bytes + num_bytes > self.max_bytes:
            raise WireError(
                "The server is reading as many long requests as it can.",
                code="service_unavailable",
                status=503,
                type="server_error",
                retry_after_s=1.0,
            )
        self.num_bytes += num_bytes
        self.num_taken += num_bytes
        self._by_client[client] += num_bytes

    def remove(self, client: str, num_bytes: int) -> None:
        """Give `num_bytes` back."""
        self.num_bytes -= num_bytes
        self._by_client[client] -= num_bytes
        # A client that left shall not be remembered for ever.
        if not self._by_client[client]:
            del self._by_client[client]


@attrs.define(eq=False)
class InputReservation:
    """Bytes of one body or message, taken from an `InputBudget`."""

    _budget: InputBudget
    _client: str
    _num_taken: int = attrs.field(default=0, init=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()

    def grow_to(self, num_bytes: int) -> None:
        """Reserve the memory of a body that has this length so far.

        Raises:
            WireError: the budget is used up.
        """
        wanted = max(num_bytes - FREE_BYTES, 0)
        if wanted > self._num_taken:
            self._budget.add(self._client, wanted - self._num_taken)
            self._num_taken = wanted

    def clear(self) -> None:
        """Give everything back."""
        if self._num_taken:
            self._budget.remove(self._client, self._num_taken)
            self._num_taken = 0
