"""Table of an engine's requests by id: their admission, and the one way in which they leave.

A request exists in one of two places. Before its admission it is a `Submission`, held only by the task of its caller;
from then on it is an entry in the journal with an output beside it. The step from the one to the other has no
checkpoint, and neither has leaving, so that no cancellation can come in between.
"""

from __future__ import annotations

import itertools
import time
from typing import cast

import trio

from triolet.actors.actor_progress import ActorProgress
from triolet.actors.channels import Channels
from triolet.actors.detokenizer import deliver
from triolet.config.engine import EngineConfig
from triolet.core.engine_core import EngineCore
from triolet.core.output.request_status import EndedRequests
from triolet.core.output.stop_strings import HoldBack
from triolet.core.request.request import Request
from triolet.core.request.status import FinishReason, RequestStatus
from triolet.engine.availability import Availability
from triolet.engine.request_preparation import RequestPreparation
from triolet.engine.snapshot import fill_in, goes_on
from triolet.engine.submission import Submission, counted_admission
from triolet.errors import RequestIdInUse
from triolet.ipc.snapshot import Snapshot


class RequestTable:
    """Submissions of one engine, from their admission until their reader has left.

    Args:
        config: of the engine.
        core: of the engine.
        channels: to the actors.
        progress: of the actors.
        preparation: checks and encodes submissions.
        availability: whether requests are taken.
    """

    def __init__(
        self,
        config: EngineConfig,
        core: EngineCore,
        channels: Channels,
        progress: ActorProgress,
        preparation: RequestPreparation,
        availability: Availability,
    ) -> None:
        self.submissions: dict[str, Submission] = {}
        self._hold_back = cast("HoldBack", config.hold_back)
        self._core, self._channels, self._progress = core, channels, progress
        self._preparation, self._availability = preparation, availability
        self._endings = EndedRequests()
        self._ids = (f"request-{number}" for number in itertools.count(1))
        self._resumed: set[str] = set()  # ids of streams that are yet to be entered

    def new_id(self) -> str:
        """Return an id that no request has."""
        taken = {*self.submissions, *self._resumed}
        return next(name for name in self._ids if name not in taken)

    def keep_ids(self, snapshot: Snapshot) -> None:
        """Keep the ids of resumed requests from being given to others before their streams are entered."""
        self._resumed |= {saved.request_id for saved in snapshot.requests}

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
        params = self._preparation.check(submission.params)
        was_admitted = submission.saved is not None
        num_places = submission.num_places(params.n)
        admission.reserve(
            trio.current_time(), num_places, client=submission.client, was_admitted=was_admitted
        )
        self.submissions[request_id], submission.began_s = submission, trio.current_time()
        self._resumed.discard(request_id)
        try:
            with submission.admission:
                requests = await self._preparation.resolve(submission, params)
            self._availability.check_open()
            if not was_admitted:
                admission.check_tokens(trio.current_time(), submission.client)
        except BaseException:
            del self.submissions[request_id]
            raise
        finally:
            admission.give_back(num_places, submission.client)
        # No checkpoint from here on: the request is in the journal, with a reader, or it is nowhere.
        self._open(submission, requests)
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
        for entry, answer in zip(submission.entries, saved.answers if saved else (), strict=False):
            fill_in(core.journal, entry, answer)
            deliver(core, self._progress, entry.serial)

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
        core = self._core
        for entry in submission.entries:  # first of all: its blocks are free from here on
            core.finish(entry.serial, FinishReason.ABORT)
        now_s = trio.current_time()
        for entry in submission.entries:
            core.close_output(entry.serial, entry.finish_reason or FinishReason.ABORT, now_s)
        self._progress.stepped.unpark_all()
        core.admission.ended(now_s)
        if self.submissions.get(submission.request_id) is not submission:
            return  # it had ended before, and a later request has the id now
        del self.submissions[submission.request_id]
        self._endings.remember(submission.request_id, submission.status(), now_s)

    def end_admissions(self) -> None:
        """Cancel the requests that wait for their admission."""
        for submission in self.submissions.values():
            if not submission.outputs:
                submission.admission.cancel()
