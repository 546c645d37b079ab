"""Send queue of one WebSocket: `put` never waits, one writer takes.

`put` has no limit: producers call `wait_for_room` before they make more. So a slow reader delays only its own
responses, while the engine's outputs are merged in their streams.
"""

from __future__ import annotations

import attrs
import trio

HIGH_WATER_BYTES = 2**16  # some hundred events
MAX_REPLIES = 1024  # to messages that start no response, such as errors


@attrs.define(eq=False)
class SendQueue:
    """Bounded by its producers: texts to send, then perhaps a close frame.

    Args:
        close: code and reason of the close frame, once queued.
    """

    close: tuple[int, str] | None = None
    _texts: list[str] = attrs.field(factory=list, init=False)
    _num_bytes: int = attrs.field(default=0, init=False)
    _writer: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)
    _producers: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)

    def put(self, text: str) -> None:
        """Queue a text; ignored after `put_close`."""
        if self.close is None:
            self._texts.append(text)
            self._num_bytes += len(text)
            self._writer.unpark_all()

    def put_close(self, code: int, reason: str) -> None:
        """Queue the close frame; the first code and reason are kept."""
        if self.close is None:
            self.close = (code, reason)
            self._writer.unpark_all()

    def abort(self, code: int, reason: str) -> None:
        """Drop all queued texts and close the connection."""
        self._num_bytes -= sum(map(len, self._texts))
        self._texts.clear()
        self.put_close(code, reason)

    async def wait_for_room(self) -> None:
        """Wait until less than HIGH_WATER_BYTES are queued."""
        await trio.lowlevel.checkpoint()
        while self._num_bytes > HIGH_WATER_BYTES:
            await self._producers.park()

    async def wait_for_reply_room(self) -> None:
        """Wait until one more client message may be answered.

        This limit is higher than that of `wait_for_room`, so that a slow reader can still cancel a response.
        """
        await trio.lowlevel.checkpoint()
        while len(self._texts) > MAX_REPLIES:
            await self._producers.park()

    async def take(self) -> list[str]:
        """Take all queued texts; an empty list means that only the close frame is left."""
        while not self._texts and self.close is None:
            await self._writer.park()
        texts, self._texts = self._texts, []
        return texts

    def mark_sent(self, texts: list[str]) -> None:
        """Record that these texts were handed to the network."""
        self._num_bytes -= sum(map(len, texts))
        self._producers.unpark_all()
