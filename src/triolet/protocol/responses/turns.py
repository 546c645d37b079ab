"""The turns of a conversation, and what is to be done for them."""

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
    """One `response.create`, or one `response.resume`, and what came of it.

    Args:
        stream_id: its lane.
        request: what was asked for; None for a resume.
        params: with what it is to be sampled.
        resume: what is to be read on; None for a create.
        error: why there will be no answer.
        messages: what the model is asked with, once it has started.
        answer: once it has started.
        was_told: whether the client knows of it.
        num_bytes: how long the message was that asked for it.
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
        """The turn that a `response.create` or a `response.resume` asks for, be it right or wrong."""
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
    """Say this to the client."""

    event: Event


@attrs.frozen
class Start:
    """Have the engine answer this turn, or read its answer on."""

    turn: Turn


@attrs.frozen
class Stop:
    """Nobody wants more of this turn."""

    turn: Turn


@attrs.frozen
class Close:
    """End the connection, after what was said before."""

    code: int
    reason: str


Effect = Send | Start | Stop | Close
