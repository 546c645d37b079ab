"""A client's byte stream, with the two things that a server wants and a socket does not have: patience that ends, and
bytes that can be read a second time.
"""

from __future__ import annotations

import trio

SEND_CHUNK_BYTES = 2**16  # patience is counted per chunk: a slow client is not a stalled one


class ClientStream(trio.abc.HalfCloseableStream):
    """A connection with one client, plain or TLS.

    Args:
        transport: what the listener accepted.
        write_timeout: seconds that the client may take to accept 64 KiB; may be changed.
    """

    def __init__(
        self, transport: trio.SocketStream | trio.SSLStream[trio.SocketStream], write_timeout: float
    ) -> None:
        self._transport = transport
        self.write_timeout = write_timeout
        self._unread = b""

    @property
    def is_tls(self) -> bool:
        """Whether it is encrypted."""
        return isinstance(self._transport, trio.SSLStream)

    @property
    def socket(self) -> trio.socket.SocketType:
        """The socket below."""
        transport = self._transport
        return (
            transport.transport_stream.socket if isinstance(transport, trio.SSLStream) else transport.socket
        )

    def unread(self, data: bytes) -> None:
        """Let the next reader read this first."""
        self._unread = data + self._unread

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """As of any stream; what was put back comes first."""
        if not self._unread:
            return bytes(await self._transport.receive_some(max_bytes))
        await trio.lowlevel.checkpoint()
        size = len(self._unread) if max_bytes is None else max_bytes
        data, self._unread = self._unread[:size], self._unread[size:]
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send, and give the client up if it takes nothing for too long.

        Raises:
            trio.BrokenResourceError: the client is gone, or is not reading.
        """
        view = memoryview(data)
        for start in range(0, max(len(view), 1), SEND_CHUNK_BYTES):
            with trio.move_on_after(self.write_timeout) as patience:
                await self._transport.send_all(view[start : start + SEND_CHUNK_BYTES])
            if patience.cancelled_caught:  # half of it may be on its way: there is no going on from here
                await trio.aclose_forcefully(self._transport)
                raise trio.BrokenResourceError(f"the client took nothing for {self.write_timeout:g} s")

    async def wait_send_all_might_not_block(self) -> None:
        """As of any stream."""
        await self._transport.wait_send_all_might_not_block()

    @property
    def can_half_close(self) -> bool:
        """Whether it can be said that nothing follows while the client goes on speaking; TLS can not."""
        return isinstance(self._transport, trio.abc.HalfCloseableStream)

    async def send_eof(self) -> None:
        """Say that nothing follows, where that can be said."""
        if isinstance(self._transport, trio.abc.HalfCloseableStream):
            await self._transport.send_eof()
        else:
            await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        """Close it, however it stands."""
        await self._transport.aclose()
