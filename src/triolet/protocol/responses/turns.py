"""Turns of a session, and the effects that the session asks for."""

from __future__ import annotations

import attrs

from triolet.core.request.params import SamplingParams
from triolet.protocol.errors import WireError
from triolet.protocol.responses.client_events import ClientEvent
from triolet.protocol.responses.input_items import Message
from triolet.protocol.responses.output_items import Event
from triolet.protocol.responses.requests import CreateResponse, ResumeResponse
from triolet.protocol.responses.response import ResponseBuilder


@attrs.define(eq=False, kw_only=True)
class Turn:
    """One `response.create` or `response.resume`, with its response.

    Args:
        stream_id: its lane.
        request: the request; None for a resume.
        params: its sampling parameters.
        resume: the response to read on; None for a create.
        error: why it cannot be started.
        messages: chat for the model, once started.
        answer: the response, once started.
        was_told: whether any event was sent to the client.
        num_bytes: length of the message that asked for it.
    """

    stream_id: str | None
    request: CreateResponse | None = None
    params: SamplingParams | None = None
    resume: ResumeResponse | None = None
    error: WireError | None = None
    messages: list[Message] = attrs.field(factory=list)
    answer: ResponseBuilder | None = None
    was_told: bool = False
    num_bytes: int = 0

    @classmethod
    def of(cls, event: ClientEvent) -> Turn:
        """Return the turn of a `response.create` or `response.resume`, valid or not."""
        return cls(
            stream_id=event.stream_id,
            request=event.body if isinstance(event.body, CreateResponse) else None,
            params=event.params,
            resume=event.body if isinstance(event.body, ResumeResponse) else None,
            error=event.error,
            num_bytes=event.num_bytes,
        )


@attrs.frozen
class Send:
    """Effect: send this event to the client."""

    event: Event


@attrs.frozen
class Start:
    """Effect: generate the response of this turn, or read it on."""

    turn: Turn


@attrs.frozen
class Stop:
    """Effect: stop the turn."""

    turn: Turn


@attrs.frozen
class Close:
    """Effect: close the connection after everything sent before."""

    code: int
    reason: str


Effect = Send | Start | Stop | Close
