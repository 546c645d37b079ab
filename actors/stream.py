"""A running answer. Leaving its scope is the abort.

`async with engine.generate(...) as stream: async for output in stream: ...`. Nothing happens before the scope is
entered, and everything is given back when it is left, however it is left: `__aexit__` makes one synchronous call and
has no checkpoint, so that no cancellation can come in between. There is no task and no nursery per request, and
nothing here is left to the garbage collector.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

import trio

from triolet.core.outputs import FinishReason, RequestOutput
from triolet.errors import RequestFailed, StreamMisused

if TYPE_CHECKING:
    from triolet.actors.engine import Engine
    from triolet.actors.submission import Submission
    from triolet.actors.wiring import Stream


class TokenStream:
    """What `Engine.generate` returns; not to be made otherwise."""

    def __init__(self, engine: Engine, submission: Submission) -> None:
        self._engine = engine
        self._submission = submission
        self._stream: Stream | None = None
        self._was_entered = False
        self._was_left = False
        self._is_read = False
        self._is_over = False

    @property
    def request_id(self) -> str:
        """The id that the caller gave, or the engine's."""
        return self._submission.request_id

    async def __aenter__(self) -> Self:
        if self._was_entered:
            raise StreamMisused("a stream can be entered once; call generate() again")
        self._was_entered = True
        self._stream = await self._engine._admit(self._submission)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._was_left = True
        if self._stream is not None:
            self._engine._leave(self._submission)
            self._stream.readers.unpark_all()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        stream = self._readable()
        if self._is_read:
            raise StreamMisused("a stream has one reader; another task is waiting for its next output")
        self._is_read = True
        try:
            if self._has_news(stream):
                await trio.lowlevel.checkpoint()  # parking would have been one
            while not self._has_news(stream):
                await stream.readers.park()
        finally:
            self._is_read = False
        return self._next_output(self._readable())

    def _has_news(self, stream: Stream) -> bool:
        return (
            stream.feed.collector.has_output() or self._is_over or self._was_left or stream.error is not None
        )

    def _readable(self) -> Stream:
        if self._stream is None or self._was_left:
            raise StreamMisused("a stream must be read inside of its `async with`")
        return self._stream

    def _next_output(self, stream: Stream) -> RequestOutput:
        collector = stream.feed.collector
        if not self._is_over and collector.has_output() and collector.finish_reason is not FinishReason.ERROR:
            output = collector.take()
            self._is_over = output.finished
            return output
        if self._is_over:
            raise StopAsyncIteration
        self._is_over = True
        raise stream.error or RequestFailed(
            self.request_id, stream.feed.entry.failure or "for an unknown reason"
        )

    async def text(self) -> str:
        """Read to the end; return the whole text, whatever part of it was read before.

        Raises:
            RequestFailed: it could not be finished.
            EngineDead: nor could anything else.
        """
        stream = self._readable()
        async for _ in self:
            pass
        return stream.feed.collector.text
