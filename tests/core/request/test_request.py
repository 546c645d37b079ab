"""A request: which account it is counted for, what ends it, its trace headers, and its times."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.make import make_request
from triolet.core.request.params import SamplingParams
from triolet.core.request.pooling_params import PoolingParams
from triolet.core.request.request import RequestMetrics, RequestTask, pick_trace_headers


def test_a_request_is_counted_for_the_key_of_the_server_and_without_one_for_its_client() -> None:
    assert make_request(client="c", owner="o").account == "o"
    assert make_request(client="c").account == "c"
    assert make_request().account is None


def test_a_request_with_pooling_parameters_wants_vectors() -> None:
    assert make_request().task is RequestTask.GENERATE
    assert make_request(pooling=PoolingParams(task="embed")).task is RequestTask.POOL


@pytest.mark.parametrize(("ignore_eos", "ids"), [(False, {5, 8, 9}), (True, {5})])
def test_an_answer_ends_with_stop_token_ids_and_the_models_own_unless_those_are_ignored(
    ignore_eos: bool, ids: set[int]
) -> None:
    params = SamplingParams(stop_token_ids=[5], ignore_eos=ignore_eos)
    assert make_request(params=params, eos_token_ids=(9, 8)).ending_token_ids == ids


def test_a_plain_request_is_one_answer_told_token_by_token() -> None:
    request = make_request()
    assert (request.priority, request.index, request.num_answers, request.stream_interval) == (0, 0, 1, 1)
    assert request.arrival_s == 0.0


@pytest.mark.parametrize(
    ("headers", "picked"),
    [
        ({"Traceparent": "a", "TRACESTATE": "b", "other": "c"}, (("traceparent", "a"), ("tracestate", "b"))),
        ({"traceparent": 7}, ()),
        ({"traceparent": "x" * 1024}, (("traceparent", "x" * 1024),)),
        ({"traceparent": "x" * 1025}, ()),
    ],
)
def test_trace_headers_are_texts_of_at_most_1024_characters_by_their_lower_case_names(
    headers: dict[str, Any], picked: tuple[tuple[str, str], ...]
) -> None:
    assert pick_trace_headers(headers) == picked


def test_trace_headers_may_have_a_prefix() -> None:
    assert pick_trace_headers({"x-traceparent": "a", "traceparent": "b"}, "x-") == (("traceparent", "a"),)


def test_times_of_a_request_are_between_its_events() -> None:
    metrics = RequestMetrics(queued_ts=1.0, scheduled_ts=3.0, first_token_ts=7.0, last_token_ts=15.0)
    assert (metrics.first_token_latency, metrics.queued_time, metrics.prefill_time) == (6.0, 2.0, 4.0)
    assert (metrics.decode_time, metrics.inference_time) == (8.0, 12.0)


def test_times_before_an_event_are_zero() -> None:
    metrics = RequestMetrics(queued_ts=1.0)
    assert (metrics.scheduled_ts, metrics.first_token_ts, metrics.last_token_ts) == (0.0, 0.0, 0.0)
    assert (metrics.arrival_time, RequestMetrics().queued_ts, metrics.num_generation_tokens) == (0.0, 0.0, 0)
    assert (metrics.first_token_latency, metrics.queued_time, metrics.prefill_time) == (0.0, 0.0, 0.0)
    assert (metrics.decode_time, metrics.inference_time) == (0.0, 0.0)
    started = RequestMetrics(queued_ts=1.0, scheduled_ts=3.0)
    assert (started.queued_time, started.prefill_time, started.inference_time) == (2.0, 0.0, 0.0)
