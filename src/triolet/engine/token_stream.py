"""Stream of the outputs of one request. Leaving its scope aborts the request.

`async with engine.generate(...) as stream: async for output in stream: ...`. Nothing happens before the scope is
entered, and everything is given back when it is left, in any way: `__aexit__` makes one synchronous call and has no
checkpoint, so that no cancellation can come in between. There is no task and no nursery per request, and no clean-up
is left to the garbage collector.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Self
from weakref import WeakValueDictionary

import attrs
import trio

from triolet.actors.actor_progress import ActorProgress
from triolet.actors.channels import Channels
from triolet.actors.detokenizer import deliver
from triolet.core.engine_core import EngineCore
from triolet.core.output.detokenizer import HoldBack
from triolet.core.output.output_processor import (
    EndedRequests,
    OutputCollector,
    ParallelCollector,
    RequestProgress,
)
from triolet.core.output.outputs import RequestOutput
from triolet.core.request.request import FinishReason, Request, RequestStatus
from triolet.engine.live_requests import has_first_token, progress_of
from triolet.engine.snapshot import fill_in, goes_on, saved_request
from triolet.engine.submission import (
    RequestPreparation,
    Submission,
    TrioRunGuard,
    counted_admission,
    seconds,
)
from triolet.errors import EngineClosed, EngineDead, RequestFailed, RequestIdInUse, StreamMisused
from triolet.recording.recorder import Recorder

SCOPE_ENDED = "the engine's scope has ended"


@attrs.define
class Availability:
    """State of an engine: open, then closed or dead. Death is final."""

    is_serving: bool = True  # whether admitted requests are still computed; True also while an engine drains
    _closed: str | None = None
    _cause: BaseException | None = None
    _was_death_told: bool = False

    @property
    def is_open(self) -> bool:
        """True if requests are taken."""
        return self._closed is None and self._cause is None

    @property
    def death(self) -> EngineDead | None:
        """Error of a dead engine; None while it lives."""
        return None if self._cause is None else death_by(self._cause)

    def close(self, reason: str, *, still_serving: bool = False) -> None:
        """Refuse requests from now on; the first reason stays.

        Args:
            reason: text of the error for later requests.
            still_serving: whether admitted requests go on, if they have not been ended before.
        """
        self._closed = self._closed or reason
        self.is_serving &= still_serving

    def die(self, cause: BaseException, *, was_told: bool) -> None:
        """Record the death of the engine.

        Args:
            cause: error of the last crash.
            was_told: whether a stream gets the error now.
        """
        self._cause = cause
        self._was_death_told = was_told

    def check_open(self) -> None:
        """Check that requests are taken.

        Raises:
            EngineDead: the engine has died.
            EngineClosed: the engine is closed or drains.
        """
        if (death := self.death) is not None:
            self._was_death_told = True
            raise death
        if self._closed is not None:
            raise EngineClosed(self._closed)

    def check_serving(self) -> None:
        """Check that admitted requests are computed.

        Raises:
            EngineDead: the engine has died.
            EngineClosed: its scope has ended.
        """
        if (death := self.death) is not None:
            raise death
        if not self.is_serving:
            raise EngineClosed(SCOPE_ENDED)

    def check_death_told(self) -> None:
        """Raise the death of the engine, if no stream and no caller has seen it.

        Raises:
            EngineDead: the engine has died, and no stream or caller has got the error.
        """
        if not self._was_death_told and (death := self.death) is not None:
            raise death


def death_by(cause: BaseException) -> EngineDead:
    """Return a new error for a dead engine."""
    # One for each reader: a shared one would collect the tracebacks of all.
    error = EngineDead(f"the engine gave up after repeated crashes; the last one was: {cause!r}")
    error.__cause__ = cause
    return error


# `RequestTable` has an engine's requests by id: their admission, and the one way in which they leave. A
# request exists in one of two places. Before its admission it is a `Submission`, held only by the task of its
# caller; from then on it is an entry in the journal with an output beside it. The step from the one to the
# other has no checkpoint, and neither has leaving, so that no cancellation can come in between.
class RequestTable:
    """Submissions of one engine, from their admission until their reader has left.

    Args:
        channels: to the actors.
        preparation: checks and encodes submissions.
        availability: whether requests are taken.
    """

    def __init__(
        self,
        hold_back: HoldBack,
        core: EngineCore,
        channels: Channels,
        progress: ActorProgress,
        preparation: RequestPreparation,
        availability: Availability,
    ) -> None:
        self.submissions: dict[str, Submission] = {}
        self._hold_back, self._core, self._channels, self._progress = hold_back, core, channels, progress
        self._preparation, self._availability = preparation, availability
        self._endings = EndedRequests()
        self._ids = (f"request-{number}" for number in itertools.count(1))
        # By their ids, those of streams that are yet to be entered; one that never is may be dropped.
        self._resumed = WeakValueDictionary[str, Submission]()
        self.recorder: Recorder | None = None  # set if the engine records its requests

    @property
    def num_lost_records(self) -> int:
        """Records that the recorder could not write."""
        return 0 if self.recorder is None else self.recorder.num_lost

    def new_id(self) -> str:
        """Return an id that no request has."""
        return next(name for name in self._ids if name not in self.submissions and name not in self._resumed)

    def keep_ids(self, submissions: Iterable[Submission]) -> None:
        """Keep the ids of resumed requests from being given to others before their streams are entered."""
        self._resumed.update({submission.request_id: submission for submission in submissions})

    def status(self, request_id: str) -> RequestStatus | None:
        """Return the status of a request; None for an id that is unknown, or that ended too long ago."""
        if (submission := self.submissions.get(request_id)) is not None:
            return submission.status()
        return self._endings.get(request_id, trio.current_time())

    async def admit(self, submission: Submission) -> None:
        """Admit a request. If this raises, nothing is held: no place, no entry, no output."""
        with counted_admission(self._core.journal.stats):
            await self._take_in(submission)

    async def _take_in(self, submission: Submission) -> None:
        self._availability.check_open()
        admission, request_id = self._core.admission, submission.request_id
        if (other := self.submissions.get(request_id)) is not None and other.is_live:
            raise RequestIdInUse(request_id)
        params = self._preparation.check(submission)
        was_admitted = submission.saved is not None
        num_places = submission.num_places(params.n)
        admission.reserve(
            trio.current_time(), num_places, client=submission.account, was_admitted=was_admitted
        )
        self.submissions[request_id], submission.began_s = submission, trio.current_time()
        self._resumed.pop(request_id, None)
        try:
            with submission.admission:
                requests = await self._preparation.resolve(submission, params)
            self._availability.check_open()
            if not was_admitted:
                admission.check_tokens(trio.current_time(), submission.account)
        except BaseException:
            del self.submissions[request_id]
            raise
        finally:
            admission.give_back(num_places, submission.account)
        # No checkpoint from here on: the request is in the journal, with a reader, or it is nowhere.
        try:
            self._open(submission, requests)
        except BaseException:
            del self.submissions[request_id]
            self._end(submission)
            submission.outputs = ()
            raise
        if submission.was_aborted:
            self.abort(request_id)

    def _open(self, submission: Submission, requests: tuple[Request, ...]) -> None:
        core, saved = self._core, submission.saved
        if not core.outputs:
            self._progress.progressed_s = trio.current_time()
        submission.open(
            core.add(
                goes_on(requests, saved) if saved else requests,
                arrival_time=time.time(),
                hold_back=self._hold_back,
                notify=submission.reader.ring,
                others_wait=saved is None or not any(answer.has_begun for answer in saved.answers),
            )
        )
        self._channels.wake_scheduler()
        if self.recorder is not None and submission.pooling is None:
            self.recorder.admit(saved_request(submission, trio.current_time()), submission.outputs)
        for entry, answer in zip(submission.entries, saved.answers if saved else (), strict=False):
            fill_in(core.journal, entry, answer)
            deliver(core, self._progress, entry.serial, trio.current_time())

    def abort(self, request_id: str) -> None:
        """End a request; see `Engine.abort`."""
        submission = self.submissions.get(request_id)
        if submission is None:
            return
        submission.was_aborted = True
        for entry in submission.entries:
            self._core.finish(entry.serial, FinishReason.ABORT)

    def leave(self, submission: Submission) -> None:
        """End a request that its reader leaves, and free its id. Synchronous, no checkpoint."""
        self._end(submission)
        self._progress.stepped.unpark_all()
        now_s = trio.current_time()
        self._core.admission.ended(now_s)
        if self.submissions.get(submission.request_id) is not submission:
            return  # it had ended before, and a later request has the id now
        del self.submissions[submission.request_id]
        self._endings.remember(submission.request_id, submission.status(), now_s)

    def _end(self, submission: Submission) -> None:
        """End what is in the journal of a request, and its outputs."""
        core, entries = self._core, submission.entries
        for entry in entries:  # first of all: its blocks are free from here on
            core.finish(entry.serial, FinishReason.ABORT)
        for entry in entries:
            core.close_output(entry.serial, entry.finish_reason or FinishReason.ABORT, trio.current_time())
        if self.recorder is not None and entries:
            self.recorder.end(entries[0].serial)

    def end_admissions(self) -> None:
        """Cancel the requests that wait for their admission."""
        for submission in self.submissions.values():
            if not submission.outputs:
                submission.admission.cancel()


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

    def follow(self, interval: float = 0.0) -> ProgressStream:
        """Return an iterator over changes of `progress`, which ends with the first token or with the request.

        The outputs are not touched, and several tasks may follow while one reads.

        Args:
            interval: shortest time between two looks at the progress, seconds.
        Raises:
            InvalidRequest: `interval` is no number of seconds.
            StreamMisused: outside of the `async with`.
        """
        self._readable()
        return ProgressStream(self._submission, self._core, self._progress, seconds("interval", interval))

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
            self._submission.forget_error()
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

    def __init__(
        self, submission: Submission, core: EngineCore, progress: ActorProgress, interval_s: float
    ) -> None:
        self._submission, self._core, self._progress = submission, core, progress
        self._interval_s, self._looked_s = interval_s, -math.inf
        self._shown: RequestProgress | None = None
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """True if the last value was the final one: the request had a token, or had ended."""
        return self._is_over

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestProgress:
        await trio.lowlevel.checkpoint()
        while not self._is_over:
            # Not parked meanwhile, so that the steps in between cost nothing.
            await self._sleep_until_next_look()
            self._is_over = has_first_token(self._submission)
            progress = progress_of(self._submission, self._core)
            if progress != self._shown:
                self._shown = progress
                return progress
            if not self._is_over:
                await self._progress.stepped.park()
        raise StopAsyncIteration

    async def _sleep_until_next_look(self) -> None:
        if (next_s := self._looked_s + self._interval_s) > trio.current_time():
            await trio.sleep_until(next_s)
        self._looked_s = trio.current_time()
