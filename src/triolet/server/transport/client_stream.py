"""Byte stream of one client, with a write timeout, and what all streams of a client share: turns and memory.

A connection takes a turn for each piece of input, and a client has a few turns in each pass of the event loop, with
however many connections. Otherwise N connections, each of which yields after a millisecond, hold up everything else for
N milliseconds a pass. The connections of one client wait in the order in which they asked.

The memory budget bounds the bodies and messages that are being received and parsed, per client and in all. Without it,
many connections with one long body each take memory that no limit of a single body bounds. The first 16 KiB of every
body are free, so that a client with short requests is never refused because of others.
"""

from __future__ import annotations

from collections import Counter
from types import TracebackType
from typing import Final, NoReturn, Self

import attrs
import trio

from triolet.protocol.errors import WireError

SEND_CHUNK_BYTES = 2**16  # the timeout is counted per chunk: a slow client is not a stalled one
TURNS_PER_PASS: Final = (
    4  # of one client: a turn is less than a millisecond, and a request passes the loop ten times
)


@attrs.define(eq=False)
class ClientTurns:
    """Turns of each client's connections to have their input handled, counted in each pass of the event loop.

    A client is an API key once it is known, or else an address.
    """

    _num_taken: Counter[str] = attrs.field(factory=Counter, init=False)  # in this pass, by client
    _waiting: dict[str, trio.lowlevel.ParkingLot] = attrs.field(factory=dict, init=False)
    _first_taken: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)

    async def run(self) -> NoReturn:
        """Give out the turns of each pass; needed by every task that waits in `take`."""
        while True:
            if not self._num_taken:
                await self._first_taken.park()
            await trio.lowlevel.checkpoint()
            self.begin_pass()

    async def take(self, client: str) -> None:
        """Wait for the next turn of a client; no checkpoint if there is one left in this pass."""
        if client in self._waiting or self._num_taken[client] >= TURNS_PER_PASS:
            await self._waiting.setdefault(client, trio.lowlevel.ParkingLot()).park()
        else:
            self._num_taken[client] += 1
            self._first_taken.unpark_all()

    def begin_pass(self) -> None:
        """Give each client its turns of one more pass, those first that have waited longest."""
        self._num_taken.clear()
        for client, lot in tuple(self._waiting.items()):
            if woken := len(lot.unpark(count=TURNS_PER_PASS)):
                self._num_taken[client] = woken
            if not lot:
                del self._waiting[client]


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
