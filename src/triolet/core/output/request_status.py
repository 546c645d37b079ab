"""A line of the table of live requests."""

from __future__ import annotations

from collections import OrderedDict

import attrs

from triolet.core.request.status import RequestStatus


@attrs.frozen(kw_only=True)
class LiveRequest:
    """A request that waits or runs, at the moment it was asked about. All n answers to a prompt are one.

    Args:
        request_id: the caller's, or the engine's.
        client: whom it is counted for.
        priority: lower goes first under the `priority` policy.
        status: `waiting` or `running`; `waiting` also before it is let in.
        queue_position: how many requests go before it; 0 once it has been let in.
        n: answers that were asked for.
        num_prompt_tokens: length of the prompt; 0 while it is not known.
        num_cached_tokens: of these, the tokens whose KV was found in the prefix cache.
        num_computed_tokens: tokens of the prompt that have been computed, or were found.
        num_output_tokens: of all its answers so far.
        num_kv_blocks: blocks that it holds; several answers may hold the same one.
        num_preemptions: times that blocks were taken back.
        age_s: since it arrived, seconds.
        time_left_s: until its deadline, seconds; None if it has none.
    """

    request_id: str
    client: str | None
    priority: int
    status: RequestStatus
    queue_position: int = 0
    n: int = 1
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_kv_blocks: int = 0
    num_preemptions: int = 0
    age_s: float = 0.0
    time_left_s: float | None = None


# --------------------
# How far a request has come on its way to its first token.


@attrs.frozen(kw_only=True)
class RequestProgress:
    """A look at a request. Two looks at the same one, one after the other, never show it going back.

    Args:
        status: where it is.
        queue_position: how many requests go before it; 0 once it has been let in.
        num_prompt_tokens: length of the prompt.
        num_computed_tokens: tokens of the prompt that have been computed, or were found in the prefix cache.
    """

    status: RequestStatus
    queue_position: int
    num_prompt_tokens: int
    num_computed_tokens: int

    def after(self, earlier: RequestProgress | None) -> RequestProgress:
        """The same, but not behind what was shown before: who is overtaken, or preempted, stays where it was."""
        if earlier is None or self._is_ahead_of(earlier):
            return self
        return attrs.evolve(
            self,
            queue_position=min(self.queue_position, earlier.queue_position),
            num_computed_tokens=max(self.num_computed_tokens, earlier.num_computed_tokens),
        )

    def _is_ahead_of(self, earlier: RequestProgress) -> bool:
        is_nearer = self.queue_position <= earlier.queue_position
        return is_nearer and self.num_computed_tokens >= earlier.num_computed_tokens


# --------------------
# How requests have ended, remembered for a while: a caller who asks late is told, and memory stays bounded.


MAX_ENDINGS = 1024
MAX_AGE_S = 600.0


@attrs.define
class EndedRequests:
    """The latest endings, by request id.

    Args:
        max_endings: how many are remembered.
        max_age_s: for how long, seconds.
    """

    max_endings: int = MAX_ENDINGS
    max_age_s: float = MAX_AGE_S
    _endings: OrderedDict[str, tuple[RequestStatus, float]] = attrs.field(factory=OrderedDict, init=False)

    def remember(self, request_id: str, status: RequestStatus, now_s: float) -> None:
        """A request of that id has ended; an earlier one of the same id is forgotten."""
        self._endings.pop(request_id, None)
        self._endings[request_id] = (status, now_s)
        self._forget_old(now_s)

    def get(self, request_id: str, now_s: float) -> RequestStatus | None:
        """How it has ended, if that is still known."""
        self._forget_old(now_s)
        status, _ = self._endings.get(request_id, (None, 0.0))
        return status

    def __len__(self) -> int:
        return len(self._endings)

    def _forget_old(self, now_s: float) -> None:
        while self._endings:
            oldest, (_, ended_s) = next(iter(self._endings.items()))
            if len(self._endings) <= self.max_endings and now_s - ended_s <= self.max_age_s:
                return
            del self._endings[oldest]
