"""What tests of the wire are made of: requests, outputs, and events held against the SDK's classes."""

from __future__ import annotations

import itertools
from typing import Any, get_args

from openai.types.responses.responses_server_event import ResponsesServerEvent

from triolet import SamplingParams
from triolet.core.output.outputs import CompletionOutput, Logprob, RequestOutput
from triolet.core.request.request import FinishReason, RequestMetrics
from triolet.core.tools import ToolPlan
from triolet.protocol.json.encoding import encode
from triolet.protocol.responses.output_items import Event
from triolet.protocol.responses.requests import CreateResponse
from triolet.protocol.responses.response import ResponseBuilder

_CLASSES = {
    get_args(member.model_fields["type"].annotation)[0]: member
    for member in get_args(get_args(ResponsesServerEvent)[0])
}
NOW = 1_795_192_114


def create(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "input": "Hello", **fields}


def answer(plan: ToolPlan | None = None, response_id: str = "resp_1", **fields: Any) -> ResponseBuilder:
    request = CreateResponse.of(create(**fields))
    plan = plan or request.plan("hermes", None)
    numbers = itertools.count(1)
    return ResponseBuilder(
        response_id=response_id,
        request=request,
        params=request.sampling_params(SamplingParams(), plan),
        model="m",
        created_at=NOW,
        new_id=lambda prefix: f"{prefix}_{next(numbers)}",
        plan=plan,
    )


def output(
    text: str = "",
    reason: FinishReason | None = None,
    *,
    num_tokens: int = 1,
    logprobs: bool = False,
    num_cached_tokens: int = 0,
    num_cache_creation_tokens: int = 0,
) -> RequestOutput:
    positions = tuple({7: Logprob(-0.1, 1, "Hi"), 8: Logprob(-2.5, 2, "Ho")} for _ in range(num_tokens))
    completion = CompletionOutput(
        index=0,
        text=text,
        token_ids=(7,) * num_tokens,
        logprobs=positions if logprobs else None,
        finish_reason=reason,
    )
    return RequestOutput(
        request_id="resp_1",
        prompt=None,
        prompt_token_ids=(1, 2, 3),
        outputs=(completion,),
        finished=reason is not None,
        metrics=RequestMetrics(queued_ts=1.0, scheduled_ts=1.5, first_token_ts=2.0, last_token_ts=3.0),
        num_cached_tokens=num_cached_tokens,
        num_cache_creation_tokens=num_cache_creation_tokens,
    )


def assert_valid(event: Event) -> None:
    """The SDK's own class for its type takes it; the SDK itself would let anything pass."""
    if event["type"] == "response.steer.failed":  # gives back what came, which no class can have foreseen
        event = {**event, "steer": {**event["steer"], "input": ""}}
    _CLASSES[event["type"]].model_validate_json(encode(event))


def types(events: list[Event]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]
