"""Client events: parse and check a WebSocket message before anything acts on it.

Parsing needs no state of the session, so a long message can be parsed in another thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from triolet.core.request.params import SamplingParams
from triolet.core.request.request import TraceHeaders
from triolet.protocol.errors import WireError, model_not_found, wrong
from triolet.protocol.json import JsonLimits, parse_object
from triolet.protocol.responses.requests import (
    CancelResponse,
    CreateResponse,
    ResumeResponse,
    SteerResponse,
    check_stream_id,
)
from triolet.protocol.structuring import structure

Body = CreateResponse | CancelResponse | SteerResponse | ResumeResponse


@attrs.frozen(kw_only=True)
class ClientEvent:
    """Parsed message of a client.

    Args:
        num_bytes: length of the message.
        type: type of the event; None if it is unknown.
        stream_id: its lane; None also for an invalid name.
        payload: the JSON object.
        body: the structured event, if it is valid.
        params: sampling parameters of a `response.create`.
        error: why it is invalid.
    """

    num_bytes: int
    type: str | None = None
    stream_id: str | None = None
    payload: Mapping[str, Any] = attrs.field(factory=dict)
    body: Body | None = None
    params: SamplingParams | None = None
    error: WireError | None = None

    def traced_by(self, headers: TraceHeaders) -> ClientEvent:
        """Return the event with the connection's trace headers, if it starts a response and has none itself."""
        if not isinstance(self.body, CreateResponse):
            return self
        return attrs.evolve(self, body=self.body.traced_by(headers))


def read_event(
    raw: str | bytes,
    models: tuple[str, ...],
    params_of: Callable[[CreateResponse], SamplingParams],
    limits: JsonLimits | None = None,
) -> ClientEvent:
    """Parse and check a message; errors are returned in the event.

    Args:
        raw: the message.
        models: names under which the model answers.
        params_of: returns the sampling parameters of a request; raises WireError.
        limits: on the shape of the JSON.
    """
    try:
        payload = parse_object(raw, limits)
    except WireError as error:
        return ClientEvent(num_bytes=len(raw), error=error)
    kind, stream_id = payload.get("type"), _lane_of(payload)
    facts: dict[str, Any] = {"num_bytes": len(raw), "stream_id": stream_id, "payload": payload}
    if not isinstance(kind, str) or kind not in _READERS:
        rule = "one of " + ", ".join(_READERS)
        return ClientEvent(**facts, error=wrong("type", rule, kind, code="unknown_event_type"))
    try:
        body = _READERS[kind](payload)
        if not isinstance(body, SteerResponse):
            check_stream_id(body.stream_id)
        params = None
        if isinstance(body, CreateResponse):
            if body.model not in models:
                raise model_not_found(body.model)
            params = params_of(body)
    except WireError as error:
        return ClientEvent(**facts, type=kind, error=error)
    return ClientEvent(**facts, type=kind, body=body, params=params)


_READERS: Mapping[str, Callable[[Mapping[str, Any]], Body]] = {
    "response.create": CreateResponse.of,
    "response.cancel": lambda payload: structure(payload, CancelResponse),
    "response.steer": lambda payload: structure(payload, SteerResponse),
    "response.resume": lambda payload: structure(payload, ResumeResponse),
}


def _lane_of(payload: Mapping[str, Any]) -> str | None:
    """Return the lane of a message; None, the lane without a name, if the name is invalid."""
    stream_id = payload.get("stream_id")
    try:
        check_stream_id(stream_id)
    except WireError:
        return None
    return stream_id
