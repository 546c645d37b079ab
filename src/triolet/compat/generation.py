"""Outputs of a request in vLLM's form: `async for output in engine.generate(...)`.

The safe form is that of every stream here, `async with engine.generate(...) as outputs: async for ...`: leaving the
scope aborts the request. The bare form works too, within the limits of the language. The request ends at once when the
loop runs to its end, when waiting for an output is cancelled or fails, and, since only the loop refers to the iterator,
when the loop is left by `break` or by an exception. An iterator that is kept, in a variable or in the traceback of a
kept exception, goes on until it is collected or the engine's scope ends.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

import trio

from triolet.aio import AsyncioTokenStream
from triolet.compat.async_facts import checkpoint
from triolet.core.output.output_processor import RequestProgress
from triolet.core.output.outputs import RequestOutput
from triolet.engine.token_stream import TokenStream


class Generation:
    """Outputs of one request, returned by `AsyncLLM.generate`.

    Args:
        stream: not yet entered.
    """

    def __init__(self, stream: TokenStream | AsyncioTokenStream) -> None:
        self._stream = stream
        self._close_anywhere: Callable[[], None] | None = (
            None  # closes the stream from any thread, once entered
        )

    @property
    def request_id(self) -> str:
        """Id that the caller gave."""
        return self._stream.request_id

    @property
    def progress(self) -> RequestProgress:
        """Progress of the request towards its first token."""
        return self._stream.progress

    async def __aenter__(self) -> Self:
        await self._enter()
        return self

    async def _enter(self) -> None:
        await self._stream.__aenter__()
        if isinstance(self._stream, AsyncioTokenStream):
            self._close_anywhere = self._stream.close
        else:
            token, close = trio.lowlevel.current_trio_token(), self._stream.close
            self._close_anywhere = lambda: token.run_sync_soon(close)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(self._stream, AsyncioTokenStream):
            await self._stream.__aexit__(kind, error, traceback)
        else:
            self.close()

    def close(self) -> None:
        """End the request, in any state. Synchronous, and harmless when repeated."""
        self._stream.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        try:
            if self._close_anywhere is None:
                await self._enter()
            output = await anext(self._stream)
        except BaseException:  # the end of the answer, too
            self.close()
            raise
        return output

    async def aclose(self) -> None:
        """End the request, as with any async generator."""
        self.close()  # before the checkpoint, so that a cancellation there cannot prevent the abort
        await checkpoint()

    def __del__(self) -> None:
        if self._close_anywhere is not None:
            # Garbage may be collected in any thread, also after the end of the Trio run.
            with suppress(trio.RunFinishedError):
                self._close_anywhere()


class TextPieces:
    """Texts of one answer, none of them empty, returned by `AsyncLLM.stream_generate`.

    Args:
        outputs: of kind DELTA.
    """

    def __init__(self, outputs: Generation) -> None:
        self._outputs = outputs

    async def __aenter__(self) -> Self:
        await self._outputs.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._outputs.__aexit__(kind, error, traceback)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        while True:
            output = await anext(self._outputs)
            if output.text:
                return output.text
