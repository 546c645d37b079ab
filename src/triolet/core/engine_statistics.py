"""Snapshot of an engine's counts, all taken at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from triolet.core.scheduling.scheduler import Scheduler, SchedulerCounters


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
        num_restarts: actors restarted after a crash, since the start.
        prefix_cache_queries: tokens looked up in the prefix cache, since the start.
        prefix_cache_hits: tokens found in the prefix cache.
        steps: forward passes finished, since the start.
        num_requests_received: requests accepted or rejected, since the start; each of n answers to one prompt counts.
            Every received request is live or has ended.
        num_requests_ended: received requests that have ended, by finish reason or `rejected`.
        num_requests_deferred: waiting requests that may not be scheduled even if rows and blocks are free: they wait
            for a prefix that another request computes, for a grammar mask, or for the search for a request that crashes
            the runner.
        spec_decode_num_drafts: drafts proposed, since the start.
        spec_decode_num_draft_tokens: draft tokens proposed.
        spec_decode_num_accepted_tokens: draft tokens accepted.
        spec_decode_num_accepted_tokens_per_pos: draft tokens accepted, by position in the draft.
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
    num_restarts: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    steps: int
    num_requests_received: int
    num_requests_ended: Mapping[str, int]
    num_requests_deferred: int = 0
    spec_decode_num_drafts: int = 0
    spec_decode_num_draft_tokens: int = 0
    spec_decode_num_accepted_tokens: int = 0
    spec_decode_num_accepted_tokens_per_pos: tuple[int, ...] = ()
    # These depend on the process and the machine: two snapshots are equal if the engines did the same.
    engine_index: int = attrs.field(default=0, eq=False)
    longest_task_step_s: float = attrs.field(default=0.0, eq=False)
    num_long_task_steps: int = attrs.field(default=0, eq=False)


def statistics_of(
    scheduler: Scheduler,
    counters: SchedulerCounters,
    *,
    num_running: int,
    engine_index: int = 0,
    num_restarts: int = 0,
    longest_task_step_s: float = 0.0,
    num_long_task_steps: int = 0,
) -> EngineStatistics:
    """Collect the counts of an engine.

    Args:
        scheduler: gives blocks and journal.
        counters: totals over all schedulers of the engine.
        num_running: requests with a row; 0 while there is no scheduler.
        engine_index: see `EngineStatistics`, as for the following ones.
    """
    pool, journal = scheduler.pool, scheduler.journal
    return EngineStatistics(
        num_requests_running=num_running,
        num_requests_waiting=len(journal) - num_running,
        num_requests_live=len(journal),
        num_requests_deferred=min(scheduler.num_deferred, len(journal) - num_running),
        kv_blocks_total=pool.num_blocks,
        kv_blocks_free=pool.num_free,
        kv_blocks_cached=pool.num_cached,
        kv_blocks_in_use=pool.num_in_use,
        kv_blocks_quarantined=pool.num_quarantined,
        num_preemptions=counters.num_preemptions,
        engine_index=engine_index,
        num_restarts=num_restarts,
        prefix_cache_queries=counters.prefix_cache_queries,
        prefix_cache_hits=counters.prefix_cache_hits,
        steps=counters.num_steps_done,
        num_requests_received=journal.stats.num_received,
        num_requests_ended=journal.stats.endings,
        spec_decode_num_drafts=counters.num_drafts,
        spec_decode_num_draft_tokens=counters.num_draft_tokens,
        spec_decode_num_accepted_tokens=sum(counters.num_accepted_tokens_per_pos),
        spec_decode_num_accepted_tokens_per_pos=tuple(counters.num_accepted_tokens_per_pos),
        longest_task_step_s=longest_task_step_s,
        num_long_task_steps=num_long_task_steps,
    )
