"""Statistics of steps and requests since the last report: the source of every metric, exact to the token.

The journal counts tokens here; the engine counts how requests begin and end. A request that is received ends exactly
once: rejected on admission, or accepted and ended with one reason. So at every moment

    received = rejected + live + ended, summed over all reasons,

and when no request is live, all that were received have ended. Totals last as long as the engine; all else is reported
once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

import attrs

from triolet.core.request.request import FinishReason, RequestMetrics, TraceHeaders

REJECTED = "rejected"


@attrs.frozen(kw_only=True)
class ReplicaStatistics:
    """Counts of one replica of an engine; see `EngineStatistics`.

    Args:
        replica: its number, from 0 on.
        is_living: whether it computes; False while it restarts.
        is_parked: whether it is one of `autoscale` that is not needed now, or has no worker.
    """

    replica: int
    is_living: bool
    is_parked: bool = False
    num_requests_running: int
    num_requests_waiting: int
    kv_blocks_total: int
    kv_blocks_in_use: int
    steps: int
    num_preemptions: int
    prefix_cache_queries: int
    prefix_cache_hits: int


@attrs.frozen(kw_only=True)
class EngineStatistics:
    """Counts of one engine at one moment. Free + cached + in use + quarantined blocks are always the total.

    Args:
        num_requests_running: requests with a row in the runner's table.
        num_requests_waiting: admitted requests without a row: new or preempted.
        num_requests_live: running and waiting requests.
        kv_blocks_total: blocks of the KV cache.
        kv_blocks_free: blocks without content.
        kv_blocks_cached: blocks in no block table, with content that the prefix cache can find.
        kv_blocks_in_use: blocks in a block table.
        kv_blocks_quarantined: blocks of ended requests, until the step in flight ends.
        num_preemptions: times that a request's blocks were taken back, since the start.
        num_restarts: starts of an actor after a crash, those that failed while loading included, since the start.
        restarts: crashes and hangs of actors, and starts that failed, since the start, by actor and cause.
        restarting: actors that have ended and do not serve again yet; streams may wait for them.
        prefix_cache_queries: tokens looked up in the prefix cache, since the start.
        prefix_cache_hits: tokens found in the prefix cache.
        external_prefix_cache_queries: tokens looked up in the prefix store, since the start.
        external_prefix_cache_hits: tokens whose KV was found there.
        num_failed_kv_saves: blocks that could not be written to the prefix store.
        steps: forward passes finished, since the start.
        num_requests_received: requests accepted or rejected, since the start; each of n answers to one prompt counts.
            Every received request is live or has ended.
        num_requests_ended: received requests that have ended, by finish reason or `rejected`.
        num_requests_deferred: waiting requests that may not be scheduled even if rows and blocks are free: they wait
            for a prefix of another request, for a grammar mask, or for the search for one that crashes the runner.
        spec_decode_num_drafts: drafts proposed, since the start.
        spec_decode_num_draft_tokens: draft tokens proposed.
        spec_decode_num_accepted_tokens: draft tokens accepted.
        spec_decode_num_accepted_tokens_per_pos: draft tokens accepted, by position in the draft.
        sleep_level: level of the sleep that the engine is in or falls into; None while it is awake.
        is_paused: whether generation is paused.
        num_lost_records: records that are missing in the file of `record`.
        replicas: counts of each replica; empty for an engine that has only one, without a number.
        num_moved_requests: times that a request went on at another replica after the death of its own, since the start.
        engine_index: number of the engine among those that are open in this process; the metrics' label `engine`.
        longest_task_step_s: longest time between two checkpoints of any task in the program, seconds, since the start;
            no other task runs meanwhile.
        num_long_task_steps: times that a task ran for more than 10 ms between two checkpoints, since the start.
    """

    num_requests_running: int
    num_requests_waiting: int
    num_requests_live: int
    kv_blocks_total: int
    kv_blocks_free: int
    kv_blocks_cached: int
    kv_blocks_in_use: int
    kv_blocks_quarantined: int
    num_preemptions: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    steps: int
    num_requests_received: int
    num_requests_ended: Mapping[str, int]
    external_prefix_cache_queries: int = 0
    external_prefix_cache_hits: int = 0
    num_failed_kv_saves: int = 0
    num_restarts: int = 0
    restarts: Mapping[tuple[str, str], int] = attrs.field(factory=dict)
    restarting: tuple[str, ...] = ()
    num_requests_deferred: int = 0
    spec_decode_num_drafts: int = 0
    spec_decode_num_draft_tokens: int = 0
    spec_decode_num_accepted_tokens: int = 0
    spec_decode_num_accepted_tokens_per_pos: tuple[int, ...] = ()
    sleep_level: int | None = None
    is_paused: bool = False
    num_lost_records: int = 0
    replicas: tuple[ReplicaStatistics, ...] = ()
    num_moved_requests: int = 0
    # These depend on the process and the machine: two snapshots are equal if the engines did the same.
    engine_index: int = attrs.field(default=0, eq=False)
    longest_task_step_s: float = attrs.field(default=0.0, eq=False)
    num_long_task_steps: int = attrs.field(default=0, eq=False)


@attrs.frozen(kw_only=True)
class FinishedRequest:
    """Statistics of an accepted request that has ended. Times are seconds."""

    finish_reason: FinishReason  # as in its last output
    metrics: RequestMetrics  # times and counts
    num_prompt_tokens: int  # length of the prompt
    num_cached_tokens: int  # of these, the tokens whose KV was found in the prefix cache
    max_tokens: int  # answer tokens that it might have had
    n: int  # answers that were asked for; each of them is accepted, and ends, as a request
    e2e_latency: float  # from its arrival to its end
    request_id: str = ""  # as the caller knows it, one for all n
    temperature: float = 1.0  # of its parameters
    top_p: float = 1.0  # likewise
    trace_headers: TraceHeaders = ()  # of the trace that it belongs to
    is_last: bool = True  # True if it is the last of the n to end
    others: tuple[FinishedRequest, ...] = ()  # the other n - 1, if it is

    @property
    def answers(self) -> tuple[FinishedRequest, ...]:
        """All n answers, in the order in which they ended, once all have; before that only this one."""
        return (*self.others, self)


@attrs.frozen(kw_only=True)
class IterationStats:
    """Statistics since the last report, as a rule of one step."""

    step_tokens: tuple[int, ...] = ()  # for each finished step, the tokens that it computed
    # Prompt tokens of the requests that got their first token, or that are pooled and got their result.
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # of these, the tokens whose KV was found in the prefix cache
    num_generation_tokens: int = 0  # tokens generated
    # For each request that got its first token, seconds since its arrival.
    times_to_first_token: tuple[float, ...] = ()
    inter_token_latencies: tuple[float, ...] = ()  # for every other token, seconds since the one before
    finished_requests: tuple[FinishedRequest, ...] = ()  # those that ended
    num_accepted: int = 0  # requests that were admitted
    # How many requests were refused, by the bound of `EngineConfig` that they met; None is any other reason.
    rejections: Mapping[str | None, int] = MappingProxyType({})


class StatsAccumulator:
    """Accumulator of statistics. `take` is called at least once per step."""

    def __init__(self) -> None:
        self.num_received = 0
        self._endings: Counter[str] = Counter()
        self._partly: dict[tuple[str, float], list[FinishedRequest]] = {}  # ended answers of several
        self._clear()

    def _clear(self) -> None:
        self._step_tokens: list[int] = []
        self._first_tokens: list[tuple[float, int, int]] = []
        self._gaps: list[float] = []
        self._pooled: list[tuple[int, int]] = []
        self._finished: list[FinishedRequest] = []
        self._num_accepted = 0
        self._rejections: Counter[str | None] = Counter()

    @property
    def endings(self) -> Mapping[str, int]:
        """Number of requests that have ended so far, by reason; `rejected` is one of them."""
        return MappingProxyType(dict(self._endings))

    def rejected(self, limit: str | None) -> None:
        """Count a request refused on admission; `limit` is the bound that it met, if that was the reason."""
        self.num_received += 1
        self._endings[REJECTED] += 1
        self._rejections[limit] += 1

    def withdrawn(self) -> None:
        """Count a request that its caller left before it was admitted."""
        self.num_received += 1
        self._endings[FinishReason.ABORT] += 1

    def accepted(self) -> None:
        """Count a request that is in the journal; of n answers to one prompt each counts."""
        self.num_received += 1
        self._num_accepted += 1

    def ended(self, finished: FinishedRequest) -> None:
        """Count the end of an accepted request."""
        self._endings[finished.finish_reason] += 1
        self._finished.append(finished if finished.n == 1 else self._with_others(finished))

    def _with_others(self, finished: FinishedRequest) -> FinishedRequest:
        """Return one of n answers: the last to end carries the others."""
        # the arrival time is in the key because an id may be used again before the last answer's end is counted
        key = finished.request_id, finished.metrics.queued_ts
        others = self._partly.setdefault(key, [])
        if len(others) + 1 < finished.n:
            others.append(attrs.evolve(finished, is_last=False))
            return others[-1]
        del self._partly[key]
        return attrs.evolve(finished, others=tuple(others))

    def step(self, num_tokens: int) -> None:
        """Count a step and the tokens that it computed."""
        self._step_tokens.append(num_tokens)

    def first_token(self, seconds: float, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Count a first token, `seconds` after the arrival of its request."""
        self._first_tokens.append((seconds, num_prompt_tokens, num_cached_tokens))

    def next_token(self, seconds: float) -> None:
        """Count a further token, `seconds` after the one before."""
        self._gaps.append(seconds)

    def pooled(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Count the prompt of a pooled request that got its result."""
        self._pooled.append((num_prompt_tokens, num_cached_tokens))

    def take(self) -> IterationStats | None:
        """Return the statistics since the last call; None if there are none."""
        if not (self._step_tokens or self._finished or self._num_accepted or self._rejections):
            return None
        prompts = [*[(prompt, cached) for _, prompt, cached in self._first_tokens], *self._pooled]
        taken = IterationStats(
            step_tokens=tuple(self._step_tokens),
            num_prompt_tokens=sum(prompt for prompt, _ in prompts),
            num_cached_tokens=sum(cached for _, cached in prompts),
            num_generation_tokens=len(self._first_tokens) + len(self._gaps),
            times_to_first_token=tuple(seconds for seconds, _, _ in self._first_tokens),
            inter_token_latencies=tuple(self._gaps),
            finished_requests=tuple(self._finished),
            num_accepted=self._num_accepted,
            rejections=MappingProxyType(dict(self._rejections)),
        )
        self._clear()
        return taken
