"""Statistics since the last report: each event is counted once, and requests that are received end once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from triolet.core.metrics.iteration_stats import (
    EngineStatistics,
    FinishedRequest,
    IterationStats,
    ReplicaStatistics,
    StatsAccumulator,
)
from triolet.core.request.request import FinishReason, RequestMetrics


def finished(reason: str = "stop", *, n: int = 1, name: str = "r", queued_ts: float = 1.0) -> FinishedRequest:
    return FinishedRequest(
        finish_reason=FinishReason(reason),
        metrics=RequestMetrics(queued_ts=queued_ts),
        num_prompt_tokens=7,
        num_cached_tokens=4,
        max_tokens=16,
        n=n,
        e2e_latency=8.0,
        request_id=name,
    )


def taken(stats: StatsAccumulator) -> IterationStats:
    report = stats.take()
    assert report is not None
    return report


# ----------------------------------------------------------------------------------- reports


def test_without_events_there_is_no_report() -> None:
    stats = StatsAccumulator()
    assert stats.take() is None
    assert (stats.num_received, dict(stats.endings)) == (0, {})


@pytest.mark.parametrize(
    ("count", "report"),
    [
        (lambda stats: stats.step(12), IterationStats(step_tokens=(12,))),
        (lambda stats: stats.step(0), IterationStats(step_tokens=(0,))),
        (lambda stats: stats.accepted(), IterationStats(num_accepted=1)),
        (lambda stats: stats.rejected("max_queue"), IterationStats(rejections={"max_queue": 1})),
        (lambda stats: stats.rejected(None), IterationStats(rejections={None: 1})),
        (lambda stats: stats.ended(finished()), IterationStats(finished_requests=(finished(),))),
    ],
)
def test_one_event_makes_a_report_of_nothing_else(
    count: Callable[[StatsAccumulator], None], report: IterationStats
) -> None:
    stats = StatsAccumulator()
    count(stats)
    assert stats.take() == report
    assert stats.take() is None


def test_an_empty_report_counts_nothing() -> None:
    report = IterationStats()
    assert (report.num_prompt_tokens, report.num_cached_tokens, report.num_generation_tokens) == (0, 0, 0)
    assert (report.num_accepted, dict(report.rejections), report.step_tokens) == (0, {}, ())


def test_tokens_are_counted_by_their_place_in_the_answer() -> None:
    stats = StatsAccumulator()
    stats.step(30)
    stats.first_token(0.5, 20, 16)
    stats.first_token(0.75, 8, 0)
    stats.step(2)
    stats.next_token(0.125)
    stats.next_token(0.25)
    stats.next_token(0.5)
    report = taken(stats)
    assert report.step_tokens == (30, 2)
    assert report.times_to_first_token == (0.5, 0.75)
    assert report.inter_token_latencies == (0.125, 0.25, 0.5)
    assert report.num_generation_tokens == 5
    assert (report.num_prompt_tokens, report.num_cached_tokens) == (28, 16)


def test_the_prompt_of_a_pooled_request_counts_and_generates_nothing() -> None:
    stats = StatsAccumulator()
    stats.step(9)
    stats.first_token(0.5, 3, 1)
    stats.pooled(6, 4)
    report = taken(stats)
    assert (report.num_prompt_tokens, report.num_cached_tokens, report.num_generation_tokens) == (9, 5, 1)


def test_a_report_holds_only_what_came_after_the_one_before() -> None:
    stats = StatsAccumulator()
    stats.step(9)
    stats.first_token(0.5, 3, 1)
    stats.next_token(0.25)
    stats.pooled(6, 4)
    stats.accepted()
    stats.rejected("max_queue")
    stats.ended(finished())
    first = taken(stats)
    stats.step(1)
    assert taken(stats) == IterationStats(step_tokens=(1,))
    assert (first.num_accepted, dict(first.rejections), len(first.finished_requests)) == (
        1,
        {"max_queue": 1},
        1,
    )


def test_rejections_are_counted_by_the_bound_that_was_met() -> None:
    stats = StatsAccumulator()
    for limit in ("max_queue", None, "max_queue"):
        stats.rejected(limit)
    stats.accepted()
    stats.accepted()
    report = taken(stats)
    assert dict(report.rejections) == {"max_queue": 2, None: 1}
    assert report.num_accepted == 2


# ------------------------------------------------------------------------------------ totals


def test_every_received_request_ends_once_and_totals_outlast_reports() -> None:
    stats = StatsAccumulator()
    for _ in range(4):
        stats.accepted()
    stats.rejected(None)
    stats.rejected("max_queue")
    stats.withdrawn()
    stats.ended(finished("stop"))
    stats.take()
    stats.ended(finished("stop"))
    stats.ended(finished("abort"))
    assert stats.num_received == 7
    assert dict(stats.endings) == {"rejected": 2, "abort": 2, "stop": 2}


def test_endings_that_were_handed_out_do_not_change() -> None:
    stats = StatsAccumulator()
    stats.withdrawn()
    before = stats.endings
    stats.withdrawn()
    assert (dict(before), dict(stats.endings)) == ({"abort": 1}, {"abort": 2})


# ----------------------------------------------------------------------------- several answers


def ended(stats: StatsAccumulator, *endings: FinishedRequest) -> tuple[FinishedRequest, ...]:
    for one in endings:
        stats.ended(one)
    return taken(stats).finished_requests


def test_the_last_of_several_answers_to_end_carries_the_others() -> None:
    stats = StatsAccumulator()
    first, second, last = ended(stats, *(finished(reason, n=3) for reason in ("length", "abort", "stop")))
    assert [one.is_last for one in (first, second, last)] == [False, False, True]
    assert (first.others, second.others, last.others) == ((), (), (first, second))
    assert first.answers == (first,)
    assert [one.finish_reason for one in last.answers] == ["length", "abort", "stop"]
    assert dict(stats.endings) == {"length": 1, "abort": 1, "stop": 1}


def test_the_only_answer_is_the_last_and_has_no_others() -> None:
    (only,) = ended(StatsAccumulator(), finished())
    assert (only.is_last, only.others, only.answers) == (True, (), (only,))


def test_an_answer_was_drawn_from_the_whole_distribution_unless_it_says_otherwise() -> None:
    assert (finished().temperature, finished().top_p) == (1.0, 1.0)


def test_answers_find_each_other_over_several_reports() -> None:
    stats = StatsAccumulator()
    (first,) = ended(stats, finished(n=2))
    (last,) = ended(stats, finished(n=2))
    assert (first.is_last, last.others) == (False, (first,))


@pytest.mark.parametrize("other", [finished(n=2, name="other"), finished(n=2, queued_ts=2.0)])
def test_answers_to_another_request_of_the_same_id_or_time_are_kept_apart(other: FinishedRequest) -> None:
    stats = StatsAccumulator()
    assert [one.is_last for one in ended(stats, finished(n=2), other)] == [False, False]
    assert [len(one.others) for one in ended(stats, other, finished(n=2))] == [1, 1]


def test_an_id_that_is_used_again_begins_with_no_answers() -> None:
    stats = StatsAccumulator()
    ended(stats, finished(n=2), finished(n=2))
    assert [one.is_last for one in ended(stats, finished(n=2))] == [False]


# ------------------------------------------------------------------------------------ snapshots


def test_a_replica_is_needed_unless_it_is_said_to_be_parked() -> None:
    replica = ReplicaStatistics(
        replica=1,
        is_living=True,
        num_requests_running=0,
        num_requests_waiting=0,
        kv_blocks_total=8,
        kv_blocks_in_use=0,
        steps=0,
        num_preemptions=0,
        prefix_cache_queries=0,
        prefix_cache_hits=0,
    )
    assert replica.is_parked is False


def snapshot(**fields: Any) -> EngineStatistics:
    counts: dict[str, Any] = dict.fromkeys(
        (
            "num_requests_running",
            "num_requests_waiting",
            "num_requests_live",
            "kv_blocks_total",
            "kv_blocks_free",
            "kv_blocks_cached",
            "kv_blocks_in_use",
            "kv_blocks_quarantined",
            "num_preemptions",
            "prefix_cache_queries",
            "prefix_cache_hits",
            "steps",
            "num_requests_received",
        ),
        0,
    )
    return EngineStatistics(**(counts | {"num_requests_ended": {}} | fields))


@pytest.mark.parametrize(
    "fields", [{"engine_index": 3}, {"longest_task_step_s": 0.5}, {"num_long_task_steps": 2}]
)
def test_snapshots_are_equal_if_the_engines_did_the_same_on_any_machine(fields: dict[str, Any]) -> None:
    assert snapshot(**fields) == snapshot()


@pytest.mark.parametrize(
    "fields", [{"steps": 1}, {"num_failed_kv_saves": 1}, {"num_requests_ended": {"stop": 1}}]
)
def test_snapshots_of_engines_that_did_something_else_differ(fields: dict[str, Any]) -> None:
    assert snapshot(**fields) != snapshot()


def test_what_an_engine_does_not_have_is_counted_as_zero() -> None:
    found = snapshot()
    assert (found.external_prefix_cache_queries, found.external_prefix_cache_hits) == (0, 0)
    assert (found.num_failed_kv_saves, found.num_restarts, found.num_requests_deferred) == (0, 0, 0)
    assert (found.spec_decode_num_drafts, found.spec_decode_num_draft_tokens) == (0, 0)
    assert (found.spec_decode_num_accepted_tokens, found.num_lost_records, found.num_moved_requests) == (
        0,
        0,
        0,
    )
    assert (found.engine_index, found.longest_task_step_s, found.num_long_task_steps) == (0, 0.0, 0)
    assert (found.is_paused, found.sleep_level) == (False, None)
