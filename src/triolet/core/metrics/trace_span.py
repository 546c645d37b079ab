"""Trace span of a finished request: one span, under vLLM's names, made from its statistics.

Pure: `triolet.observability.otlp` makes an OpenTelemetry span of it.

Source: vLLM's `llm_request` span; OpenTelemetry's semantic conventions for generative AI.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from triolet.core.metrics.iteration_stats import FinishedRequest
from triolet.core.request.request import STATUS_OF_ENDING, FinishReason, RequestStatus, TraceHeaders

SPAN_NAME = "llm_request"

Value = str | bool | int | float | tuple[str, ...]


@attrs.frozen(kw_only=True)
class Span:
    """Span of one request, from its arrival to the end of the last of its answers."""

    trace_headers: TraceHeaders  # of the parent span; empty if it begins a trace
    began_at: float  # seconds since the epoch
    ended_at: float  # likewise
    attributes: Mapping[str, Value]  # by name; times are seconds
    events: tuple[tuple[str, float], ...] = ()  # name and time of events in between, seconds since the epoch
    failure: str | None = None  # why the answer is not complete; None if it is


def span_of(finished: FinishedRequest, model_name: str) -> Span:
    """Return the span of a request after all of its answers have ended.

    Args:
        finished: the last of them.
        model_name: under which the model is shown.
    """
    answers = finished.answers
    began_at = finished.metrics.arrival_time
    attributes: dict[str, Value] = {
        "gen_ai.request.id": finished.request_id,
        "gen_ai.request.n": finished.n,
        "gen_ai.request.max_tokens": finished.max_tokens,
        "gen_ai.request.temperature": finished.temperature,
        "gen_ai.request.top_p": finished.top_p,
        "gen_ai.response.model": model_name,
        "gen_ai.response.finish_reasons": tuple(str(answer.finish_reason) for answer in answers),
        "gen_ai.usage.prompt_tokens": finished.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": sum(answer.metrics.num_generation_tokens for answer in answers),
        "gen_ai.latency.e2e": finished.e2e_latency,
    }
    moments = _moments(answers)
    return Span(
        trace_headers=finished.trace_headers,
        began_at=began_at,
        ended_at=began_at + finished.e2e_latency,
        attributes=attributes | _latencies(**moments),
        events=tuple((name, began_at + after_s) for name, after_s in moments.items() if name != "last_token"),
        failure=_failure(answers),
    )


def _moments(answers: tuple[FinishedRequest, ...]) -> dict[str, float]:
    """Return the times of events, in seconds since the arrival: the first answer's first ones, the last one's last."""
    queued_s = answers[0].metrics.queued_ts
    scheduled = [answer.metrics.scheduled_ts for answer in answers if answer.metrics.scheduled_ts]
    first = [answer.metrics.first_token_ts for answer in answers if answer.metrics.first_token_ts]
    moments = {"scheduled": min(scheduled) - queued_s} if scheduled else {}
    if first:
        moments["first_token"] = min(first) - queued_s
        moments["last_token"] = max(answer.metrics.last_token_ts for answer in answers) - queued_s
    return moments


def _latencies(
    scheduled: float | None = None, first_token: float | None = None, last_token: float | None = None
) -> dict[str, Value]:
    """Return the durations between events; those of events that did not happen are left out."""
    found: dict[str, Value] = {}
    if scheduled is not None:
        found["gen_ai.latency.time_in_queue"] = scheduled
    if first_token is not None:
        found["gen_ai.latency.time_to_first_token"] = first_token
    if scheduled is not None and first_token is not None and last_token is not None:
        found["gen_ai.latency.time_in_model_prefill"] = first_token - scheduled
        found["gen_ai.latency.time_in_model_decode"] = last_token - first_token
        found["gen_ai.latency.time_in_model_inference"] = last_token - scheduled
    return found


def _failure(answers: tuple[FinishedRequest, ...]) -> str | None:
    reasons: list[FinishReason] = [answer.finish_reason for answer in answers]
    broken = (one for one in reasons if STATUS_OF_ENDING[one] is not RequestStatus.COMPLETED)
    return next(broken, None)
