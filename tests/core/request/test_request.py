"""A request: its account, what ends it, its trace headers, its times, and the requests for several answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.core.make import make_request
from triolet.core.request.params import SamplingParams
from triolet.core.request.pooling_params import PoolingParams
from triolet.core.request.prompt_adapter import SoftPrompt
from triolet.core.request.request import Request, RequestMetrics, RequestTask, fan_out, pick_trace_headers


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
    assert metrics.num_preemptions == 0
    assert (metrics.first_token_latency, metrics.queued_time, metrics.prefill_time) == (0.0, 0.0, 0.0)
    assert (metrics.decode_time, metrics.inference_time) == (0.0, 0.0)
    started = RequestMetrics(queued_ts=1.0, scheduled_ts=3.0)
    assert (started.queued_time, started.prefill_time, started.inference_time) == (2.0, 0.0, 0.0)


def test_a_request_without_limits_of_time_runs_until_its_answer_ends() -> None:
    request = make_request()
    assert (request.deadline_s, request.queue_deadline_s) == (float("inf"), float("inf"))


def test_virtual_tokens_of_a_request_are_those_of_its_soft_prompt() -> None:
    soft_prompt = SoftPrompt(name="s", int_id=1, path="/s", digest="d", num_virtual_tokens=2)
    assert make_request((0, 0, 5), soft_prompt=soft_prompt).num_virtual_tokens == 2
    assert make_request((0, 0, 5)).num_virtual_tokens == 0


# --------------------------------------------------------------------------- several answers


def no_seed() -> int:
    raise AssertionError("the caller gave a seed")


def answers(draw_seed: Callable[[], int] = no_seed, **fields: Any) -> tuple[Request, ...]:
    """The requests for three answers to one prompt."""
    params = SamplingParams(**({"n": 3, "seed": 10} | fields.pop("params", {})))
    return fan_out(make_request(request_id="r", params=params, **fields), draw_seed)


def test_a_request_for_one_answer_is_itself() -> None:
    request = make_request()
    assert fan_out(request, no_seed) == (request,)
    assert fan_out(request, no_seed)[0] is request


def test_each_of_several_answers_is_a_request_for_one_with_its_place_among_them() -> None:
    requests = answers(seed=10)
    assert [request.request_id for request in requests] == ["0_r", "1_r", "2_r"]
    assert [(request.parent_id, request.index) for request in requests] == [("r", 0), ("r", 1), ("r", 2)]
    assert [request.num_answers for request in requests] == [3, 3, 3]
    assert [request.params.n for request in requests] == [1, 1, 1]


def test_answers_have_one_seed_after_the_other_where_the_caller_gave_one() -> None:
    assert [request.seed for request in answers(seed=10)] == [10, 11, 12]


def test_a_seed_above_64_bits_goes_on_with_the_least() -> None:
    params = {"seed": 2**63 - 2}
    seeds = [request.seed for request in answers(seed=2**63 - 2, params=params)]
    assert seeds == [2**63 - 2, 2**63 - 1, -(2**63)]


def test_all_answers_but_the_first_draw_a_seed_where_the_caller_gave_none() -> None:
    drawn = iter([50, 60])
    requests = answers(lambda: next(drawn), seed=40, params={"seed": None})
    assert [request.seed for request in requests] == [40, 50, 60]


def test_only_the_first_answer_computes_the_log_probabilities_of_the_prompt() -> None:
    requests = answers(params={"prompt_logprobs": 2, "logprobs": 1})
    assert [request.params.prompt_logprobs for request in requests] == [2, None, None]
    assert [request.params.logprobs for request in requests] == [1, 1, 1]


def test_only_the_first_answer_can_time_out_in_the_queue() -> None:
    requests = answers(queue_deadline_s=5.0, deadline_s=9.0)
    assert [request.queue_deadline_s for request in requests] == [5.0, float("inf"), float("inf")]
    assert [request.deadline_s for request in requests] == [9.0, 9.0, 9.0]
