"""Byte stream of one client, with a write timeout, and the memory budget for what is received.

The budget bounds the bodies and messages that are being received and parsed, per client and in all. Without it, many
connections with one long body each take memory that no limit of a single body bounds. The first 16 KiB of every body
are free, so that a client with short requests is never refused because of others.
"""

from __future__ import annotations

from collections import Counter
from types import TracebackType
from typing import Final, Self

import attrs
import trio

from triolet.protocol.errors import WireError

SEND_CHUNK_BYTES = 2**16  # the timeout is counted per chunk: a slow client is not a stalled one


class ClientStream(trio.abc.HalfCloseableStream):
    """Connection with one client, plain or TLS.

    Args:
        transport: the accepted connection.
        write_timeout: seconds in which the client must accept 64 KiB; may be changed later.
    """

    def __init__(
        self, transport: trio.SocketStream | trio.SSLStream[trio.SocketStream], write_timeout: float
    ) -> None:
        self._transport = transport
        self.write_timeout = write_timeout
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

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if not self._unread:
            return bytes(await self._transport.receive_some(max_bytes))
        await trio.lowlevel.checkpoint()
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

    async def aclose(self) -> None:
        await self._transport.aclose()


# An ordinary request costs the budget nothing, and so it is never refused for the long ones of others.
FREE_BYTES: Final = 2**14


@attrs.define(eq=False)
class InputBudget:
    """Budget shared by all connections of a server."""

    max_bytes: int  # of all clients together
    max_bytes_per_client: int  # of one API key, or, without keys, of one address
    num_bytes: int = attrs.field(default=0, init=False)
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
