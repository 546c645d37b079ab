"""Byte stream to one client, with a write timeout and a buffer for bytes that were read too early."""

from __future__ import annotations

import trio

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
        for start in range(0, max(len(view), 1), SEND_CHUNK_BYTES):
            with trio.move_on_after(self.write_timeout) as timeout:
                await self._transport.send_all(view[start : start + SEND_CHUNK_BYTES])
            if (
                timeout.cancelled_caught
            ):  # part of the chunk may have been sent: the stream cannot be continued
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
