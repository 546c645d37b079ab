"""Following a request from the queue to its first token, beside whoever reads its outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import trio

from triolet.actors.wiring import Wiring
from triolet.core.request_progress import RequestProgress

if TYPE_CHECKING:
    from triolet.actors.submission import Submission


class Following:
    """What `TokenStream.follow` returns: yields what has changed, at most once per step.

    Ends with the first token, or with the request. It holds nothing, so it may be dropped at any point.
    """

    def __init__(self, submission: Submission, wiring: Wiring) -> None:
        self._submission, self._wiring = submission, wiring
        self._shown: RequestProgress | None = None
        self._is_over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestProgress:
        await trio.lowlevel.checkpoint()
        while not self._is_over:
            self._is_over = has_first_token(self._submission)
            progress = look_at(self._submission, self._wiring)
            if progress != self._shown:
                self._shown = progress
                return progress
            if not self._is_over:
                await self._wiring.stepped.park()
        raise StopAsyncIteration


def has_first_token(submission: Submission) -> bool:
    """Whether there is nothing left to follow."""
    return any(entry.output_token_ids or entry.finish_reason for entry in submission.entries)


def look_at(submission: Submission, wiring: Wiring) -> RequestProgress:
    """How far an admitted request has come; of several answers, the furthest counts."""
    first = submission.entries[0]
    num_prompt_tokens = len(first.request.prompt_token_ids)
    was_let_in = first.scheduled_s is not None or first.finish_reason is not None
    position, num_computed, _ = wiring.scheduler.whereabouts(first.serial) if wiring.scheduler else (0, 0, 0)
    progress = RequestProgress(
        status=submission.status(),
        queue_position=0 if was_let_in else position,
        num_prompt_tokens=num_prompt_tokens,
        num_computed_tokens=num_prompt_tokens
        if first.output_token_ids
        else min(num_computed, num_prompt_tokens),
    )
    submission.progress = progress.after(submission.progress)
    return submission.progress
