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
from typing import NoReturn, Self

import trio

from triolet.aio import AsyncioTokenStream
from triolet.compat.async_facts import checkpoint
from triolet.compat.operations.request_log import RequestLines
from triolet.compat.refusals import refuse
from triolet.core.output.output_processor import RequestProgress
from triolet.core.output.outputs import RequestOutput
from triolet.engine.token_stream import TokenStream
from triolet.errors import StreamMisused, TrioletError


class Generation:
    """Outputs of one request, returned by `AsyncLLM.generate`.

    Args:
        stream: not yet entered.
        begin_lines: writes the first lines about a request to the log, by its id; None writes none.
    """

    def __init__(
        self,
        stream: TokenStream | AsyncioTokenStream,
        begin_lines: Callable[[str], RequestLines] | None = None,
    ) -> None:
        self._stream = stream
        self._begin_lines = begin_lines
        self._lines: RequestLines | None = None
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
        if self._begin_lines is not None:
            self._lines = self._begin_lines(self.request_id)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._lines is not None:
            self._lines.aborted()  # if it has not ended
        if isinstance(self._stream, AsyncioTokenStream):
            await self._stream.__aexit__(kind, error, traceback)
        else:
            self.close()

    def close(self) -> None:
        """End the request, in any state. Synchronous, and harmless when repeated."""
        self._stream.close()
        if self._lines is not None:
            self._lines.aborted()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        try:
            if self._close_anywhere is None:
                await self._enter()
            output = await anext(self._stream)
        except StreamMisused:  # of a second reader: the first one reads on
            raise
        except BaseException as error:  # the end of the answer, too
            if self._lines is not None and isinstance(error, TrioletError):
                self._lines.failed(error)
            self.close()
            raise
        if self._lines is not None and output.finished:
            self._lines.finished(output.finish_reason)
        return output

    async def get(self) -> RequestOutput:
        """Return the next output, as vLLM's collector of `add_request` does.

        Raises:
            StreamMisused: the last output has been read; vLLM's would wait for ever.
        """
        async for output in self:
            return output
        raise StreamMisused("the request has ended, and its last output has been read")

    def get_nowait(self) -> NoReturn:
        """Refuse the call: an output is computed while it is waited for.

        Raises:
            UnsupportedFeature: always.
        """
        refuse("get_nowait", "get() waits for the next output, and trio.move_on_after(0) bounds the wait")

    async def aclose(self) -> None:
        """End the request, as with any async generator."""
        self.close()  # before the checkpoint, so that a cancellation there cannot prevent the abort
        await checkpoint()

    def __del__(self) -> None:
        if self._lines is not None:
            self._lines.aborted()
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
