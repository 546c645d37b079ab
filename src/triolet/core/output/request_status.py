"""Status of requests for callers: the table of live requests, progress to the first token, and endings."""

from __future__ import annotations

from collections import OrderedDict

import attrs

from triolet.core.request.status import RequestStatus


@attrs.frozen(kw_only=True)
class LiveRequest:
    """Request that waits or runs, at the moment of the query. All n answers to a prompt are one request.

    Args:
        request_id: the caller's, or the engine's.
        client: to which its tokens are counted.
        priority: lower goes first under the `priority` policy.
        status: `waiting` or `running`; `waiting` also before it is admitted.
        queue_position: how many requests go before it; 0 once it has been scheduled.
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


@attrs.frozen(kw_only=True)
class RequestProgress:
    """Progress of a request to its first token. Successive looks at one request never show it going back.

    Args:
        status: `waiting` or `running`.
        queue_position: how many requests go before it; 0 once it has been scheduled.
        num_prompt_tokens: length of the prompt.
        num_computed_tokens: tokens of the prompt that have been computed, or were found in the prefix cache.
    """

    status: RequestStatus
    queue_position: int
    num_prompt_tokens: int
    num_computed_tokens: int

    def after(self, earlier: RequestProgress | None) -> RequestProgress:
        """Return the later of both: a request that is overtaken or preempted keeps its last place."""
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


MAX_ENDINGS = 1024
MAX_AGE_S = 600.0


@attrs.define
class EndedRequests:
    """Statuses of the requests that ended last, by request id: late queries get an answer, and memory is bounded.

    Args:
        max_endings: most statuses stored.
        max_age_s: time after which one is dropped, seconds.
    """

    max_endings: int = MAX_ENDINGS
    max_age_s: float = MAX_AGE_S
    _endings: OrderedDict[str, tuple[RequestStatus, float]] = attrs.field(factory=OrderedDict, init=False)

    def remember(self, request_id: str, status: RequestStatus, now_s: float) -> None:
        """Store the status of an ended request; it replaces an earlier one of the same id."""
        self._endings.pop(request_id, None)
        self._endings[request_id] = (status, now_s)
        self._forget_old(now_s)

    def get(self, request_id: str, now_s: float) -> RequestStatus | None:
        """Return the status with which the request ended, if it is still stored."""
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
