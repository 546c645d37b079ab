"""Stream of the outputs of one request. Leaving its scope aborts the request.

`async with engine.generate(...) as stream: async for output in stream: ...`. Nothing happens before the scope is
entered, and everything is given back when it is left, in any way: `__aexit__` makes one synchronous call and has no
checkpoint, so that no cancellation can come in between. There is no task and no nursery per request, and no clean-up
is left to the garbage collector.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

import trio

from triolet.actors.actor_progress import ActorProgress
from triolet.core.engine_core import EngineCore
from triolet.core.output.output_collector import OutputCollector, ParallelCollector
from triolet.core.output.output_processor import RequestProgress
from triolet.core.output.outputs import RequestOutput
from triolet.engine.live_requests import has_first_token, progress_of
from triolet.engine.request_table import RequestTable
from triolet.engine.submission import Submission
from triolet.engine.trio_run import TrioRunGuard
from triolet.errors import RequestFailed, StreamMisused


class TokenStream:
    """Stream of the outputs of one request; made by `Engine.generate`."""

    def __init__(
        self,
        submission: Submission,
        requests: RequestTable,
        core: EngineCore,
        progress: ActorProgress,
        run: TrioRunGuard,
    ) -> None:
        self._run = run
        self._submission, self._requests = submission, requests
        self._core, self._progress = core, progress
        self._was_entered = False
        self._was_left = False
        self._is_read = False
        self._is_over = False

    @property
    def request_id(self) -> str:
        """Id that the caller gave, or that the engine made."""
        return self._submission.request_id

    @property
    def progress(self) -> RequestProgress:
        """Progress towards the first token; it never decreases.

        Raises:
            StreamMisused: outside of the `async with`.
        """
        self._readable()
        return progress_of(self._submission, self._core)

    def follow(self) -> ProgressStream:
        """Return an iterator over changes of `progress`, which ends with the first token or with the request.

        The outputs are not touched, and several tasks may follow while one reads.

        Raises:
            StreamMisused: outside of the `async with`.
        """
        self._readable()
        return ProgressStream(self._submission, self._core, self._progress)

    async def __aenter__(self) -> Self:
        self._run.check()
        if self._was_entered:
            raise StreamMisused("a stream can be entered once; call generate() again")
        self._was_entered = True
        await self._requests.admit(self._submission)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Abort the request, as leaving the scope does. Synchronous, and harmless when repeated."""
        if self._was_left:
            return
        self._run.check()
        self._was_left = True
        if self._submission.outputs:
            self._requests.leave(self._submission)
            self._submission.reader.ring()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        self._run.check()
        answers = self._readable()
        if self._is_read:
            raise StreamMisused("a stream has one reader; another task is waiting for its next output")
        self._is_read = True
        try:
            if self._has_news(answers):
                await trio.lowlevel.checkpoint()  # waiting would have been one
            else:
                await self._submission.reader.wait()
            while not self._has_news(answers):
                await self._submission.reader.wait()
        finally:
            self._is_read = False
        return self._next_output(self._readable())

    def _has_news(self, answers: ParallelCollector | OutputCollector) -> bool:
        if answers.has_output():
            return True
        is_at_end = self._is_over or self._was_left or self._submission.error is not None
        return is_at_end or answers.failed is not None

    def _readable(self) -> ParallelCollector | OutputCollector:
        if self._submission.answers is None or self._was_left:
            raise StreamMisused("a stream must be read inside of its `async with`")
        return self._submission.answers

    def _next_output(self, answers: ParallelCollector | OutputCollector) -> RequestOutput:
        if not self._is_over and answers.has_output() and answers.failed is None:
            output = answers.take()
            self._is_over = output.finished
            return output
        if self._is_over:
            raise StopAsyncIteration
        self._is_over = True
        failure = answers.failed.failure if answers.failed is not None else None
        raise self._submission.error or RequestFailed(self.request_id, failure or "for an unknown reason")

    async def text(self) -> str:
        """Read to the end; return the whole text of the first answer, with the part that was read before.

        Raises:
            RequestFailed: the answer could not be finished.
            EngineDead: the engine has died.
        """
        answers = self._readable()
        async for _ in self:
            pass
        return answers.text


class ProgressStream:
    """Iterator over the changes of a request's progress, at most one per step; made by `TokenStream.follow`.

    Ends with the first token, or with the request. It needs no clean-up, so it may be dropped at any point.
    """

    def __init__(self, submission: Submission, core: EngineCore, progress: ActorProgress) -> None:
        self._submission, self._core, self._progress = submission, core, progress
        self._shown: RequestProgress | None = None
        self._is_over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestProgress:
        await trio.lowlevel.checkpoint()
        while not self._is_over:
            self._is_over = has_first_token(self._submission)
            progress = progress_of(self._submission, self._core)
            if progress != self._shown:
                self._shown = progress
                return progress
            if not self._is_over:
                await self._progress.stepped.park()
        raise StopAsyncIteration
