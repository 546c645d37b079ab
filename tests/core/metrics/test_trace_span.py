"""Trace span of a finished request: its times are those of its answers, first ones and last ones."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from triolet.core.metrics.iteration_stats import FinishedRequest
from triolet.core.metrics.trace_span import span_of
from triolet.core.request.request import FinishReason, RequestMetrics

STARTED = RequestMetrics(
    num_generation_tokens=5,
    arrival_time=1000.0,
    queued_ts=20.0,
    scheduled_ts=20.5,
    first_token_ts=22.0,
    last_token_ts=26.0,
)
NOT_SCHEDULED = RequestMetrics(arrival_time=1000.0, queued_ts=20.0)
WITHOUT_TOKEN = attrs.evolve(NOT_SCHEDULED, scheduled_ts=20.5)
HEADERS = (("traceparent", "00-1-2-01"),)


def finished(metrics: RequestMetrics = STARTED, **fields: Any) -> FinishedRequest:
    defaults: dict[str, Any] = {
        "finish_reason": FinishReason.STOP,
        "num_prompt_tokens": 7,
        "num_cached_tokens": 4,
        "max_tokens": 16,
        "n": 1,
        "e2e_latency": 8.0,
        "request_id": "r",
        "temperature": 0.25,
        "top_p": 0.5,
    }
    return FinishedRequest(metrics=metrics, **(defaults | fields))


def latencies(metrics: RequestMetrics) -> dict[str, object]:
    """The durations in the span, under the last part of their names."""
    attributes = span_of(finished(metrics), "m").attributes
    return {
        name.removeprefix("gen_ai.latency."): value
        for name, value in attributes.items()
        if name.startswith("gen_ai.latency.") and name != "gen_ai.latency.e2e"
    }


def test_a_span_lasts_from_the_arrival_to_the_end() -> None:
    span = span_of(finished(trace_headers=HEADERS), "m")
    assert (span.began_at, span.ended_at) == (1000.0, 1008.0)
    assert span.trace_headers == HEADERS


def test_a_span_says_what_was_asked_for_and_what_came() -> None:
    attributes = span_of(finished(), "m").attributes
    assert {name: value for name, value in attributes.items() if "latency" not in name} == {
        "gen_ai.request.id": "r",
        "gen_ai.request.n": 1,
        "gen_ai.request.max_tokens": 16,
        "gen_ai.request.temperature": 0.25,
        "gen_ai.request.top_p": 0.5,
        "gen_ai.response.model": "m",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.prompt_tokens": 7,
        "gen_ai.usage.completion_tokens": 5,
    }
    assert attributes["gen_ai.latency.e2e"] == 8.0


def test_the_latencies_of_a_whole_answer_divide_its_time() -> None:
    assert latencies(STARTED) == {
        "time_in_queue": 0.5,
        "time_to_first_token": 2.0,
        "time_in_model_prefill": 1.5,
        "time_in_model_decode": 4.0,
        "time_in_model_inference": 5.5,
    }


@pytest.mark.parametrize(
    ("metrics", "found", "events"),
    [
        (NOT_SCHEDULED, {}, ()),
        (WITHOUT_TOKEN, {"time_in_queue": 0.5}, (("scheduled", 1000.5),)),
        (
            attrs.evolve(STARTED, scheduled_ts=0.0),
            {"time_to_first_token": 2.0},
            (("first_token", 1002.0),),
        ),
    ],
)
def test_what_did_not_happen_has_no_latency_and_no_event(
    metrics: RequestMetrics, found: dict[str, float], events: tuple[tuple[str, float], ...]
) -> None:
    assert latencies(metrics) == found
    assert span_of(finished(metrics), "m").events == events


def test_the_events_are_the_first_step_and_the_first_token() -> None:
    assert span_of(finished(), "m").events == (("scheduled", 1000.5), ("first_token", 1002.0))


def test_what_happens_at_the_arrival_has_a_latency_of_zero() -> None:
    at_once = attrs.evolve(STARTED, scheduled_ts=20.0, first_token_ts=20.0, last_token_ts=20.0)
    assert set(latencies(at_once).values()) == {0.0}
    assert len(latencies(at_once)) == 5


def several_answers() -> FinishedRequest:
    """Three answers: one was never scheduled, and the last to end neither began nor got its last token last."""
    early = finished(
        attrs.evolve(STARTED, num_generation_tokens=2, first_token_ts=21.0, last_token_ts=30.0),
        n=3,
        finish_reason=FinishReason.LENGTH,
    )
    unscheduled = finished(NOT_SCHEDULED, n=3, finish_reason=FinishReason.DEADLINE)
    return finished(
        attrs.evolve(STARTED, scheduled_ts=20.75, arrival_time=1000.0),
        n=3,
        e2e_latency=12.0,
        others=(early, unscheduled),
    )


def test_several_answers_have_one_span_from_the_first_event_of_any_to_the_last() -> None:
    span = span_of(several_answers(), "m")
    assert span.events == (("scheduled", 1000.5), ("first_token", 1001.0))
    assert (span.began_at, span.ended_at) == (1000.0, 1012.0)
    found = {name.rpartition(".")[2]: value for name, value in span.attributes.items() if "time_" in name}
    assert found == {
        "time_in_queue": 0.5,
        "time_to_first_token": 1.0,
        "time_in_model_prefill": 0.5,
        "time_in_model_decode": 9.0,
        "time_in_model_inference": 9.5,
    }


def test_several_answers_are_counted_together_in_the_order_of_their_ends() -> None:
    attributes = span_of(several_answers(), "m").attributes
    assert attributes["gen_ai.request.n"] == 3
    assert attributes["gen_ai.response.finish_reasons"] == ("length", "deadline", "stop")
    assert attributes["gen_ai.usage.completion_tokens"] == 7
    assert attributes["gen_ai.usage.prompt_tokens"] == 7


@pytest.mark.parametrize(
    ("reason", "failure"),
    [
        ("stop", None),
        ("length", None),
        ("repetition", None),
        ("error", "error"),
        ("abort", "abort"),
        ("deadline", "deadline"),
        ("shutdown", "shutdown"),
    ],
)
def test_an_answer_that_is_not_complete_is_a_failure(reason: str, failure: str | None) -> None:
    assert span_of(finished(finish_reason=FinishReason(reason)), "m").failure == failure


def test_the_failure_of_several_answers_is_the_first_one() -> None:
    answers = [
        finished(n=3, finish_reason=FinishReason(reason)) for reason in ("stop", "deadline", "shutdown")
    ]
    assert span_of(attrs.evolve(answers[2], others=tuple(answers[:2])), "m").failure == "deadline"
