"""What waits to be sent to one client: put without waiting, by whoever has something, and taken by the one writer.

Nothing bounds a `put`; who puts waits for `room` before it makes more. So a client that reads slowly holds up its own
answers and nobody else: the engine's outputs join in their streams meanwhile.
"""

from __future__ import annotations

import attrs
import trio

HIGH_WATER_BYTES = 2**16  # some hundred events
MAX_ANSWERS = 1024  # to messages that are no requests, such as errors


@attrs.define(eq=False)
class SendQueue:
    """Messages, and after them perhaps the end.

    Args:
        close: code and reason, once the end was put.
    """

    close: tuple[int, str] | None = None
    _texts: list[str] = attrs.field(factory=list, init=False)
    _num_bytes: int = attrs.field(default=0, init=False)
    _writer: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)
    _makers: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)

    def put(self, text: str) -> None:
        """Send this; after the end nothing is."""
        if self.close is None:
            self._texts.append(text)
            self._num_bytes += len(text)
            self._writer.unpark_all()

    def put_close(self, code: int, reason: str) -> None:
        """After this, the connection ends; the first reason stays."""
        if self.close is None:
            self.close = (code, reason)
            self._writer.unpark_all()

    def abort(self, code: int, reason: str) -> None:
        """The connection ends, and what waits is dropped."""
        self._num_bytes -= sum(map(len, self._texts))
        self._texts.clear()
        self.put_close(code, reason)

    async def wait_for_room(self) -> None:
        """Wait until more should be put."""
        await trio.lowlevel.checkpoint()
        while self._num_bytes > HIGH_WATER_BYTES:
            await self._makers.park()

    async def wait_for_reply_room(self) -> None:
        """Wait until one more message of the client should be answered: later than `room`, so that a client that reads
        slowly can still cancel what it reads.
        """
        await trio.lowlevel.checkpoint()
        while len(self._texts) > MAX_ANSWERS:
            await self._makers.park()

    async def take(self) -> list[str]:
        """Everything that waits, or, if the end has come, nothing."""
        while not self._texts and self.close is None:
            await self._writer.park()
        texts, self._texts = self._texts, []
        return texts

    def sent(self, texts: list[str]) -> None:
        """These are with the network now."""
        self._num_bytes -= sum(map(len, texts))
        self._makers.unpark_all()
