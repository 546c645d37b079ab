"""Base of the handlers of `/v1/chat/completions` and `/v1/completions`: complete or streamed responses."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar, Generic, Self, TypeVar

import attrs
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from triolet.core.output.outputs import RequestOutput
from triolet.core.request.params import SamplingParams
from triolet.core.request.request import FinishReason
from triolet.engine.token_stream import TokenStream
from triolet.protocol.generation import GenerationRequest, Usage
from triolet.protocol.responses.session import shutting_down
from triolet.server.responses.vendor_events import VendorEventSender
from triolet.server.routes.app_context import AppContext, owner_of
from triolet.server.routes.request_body import cancel_on_disconnect
from triolet.server.routes.sse import EventSender, EventStream
from triolet.server.transport.ids import new_id

Body = TypeVar("Body", bound=GenerationRequest)


@attrs.define(eq=False)
class GenerationHandler(ABC, Generic[Body]):
    """One response to one client."""

    ID_PREFIX: ClassVar[str]

    context: AppContext
    body: Body
    params: SamplingParams
    arguments: dict[str, Any]
    owner: str | None
    usage: Usage = attrs.field(factory=Usage, init=False)
    frame: dict[str, Any] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        context = self.context
        # A response carries the first name of the model, or that of the adapter.
        model = context.engine.model_name if self.body.model in context.model_names else self.body.model
        self.frame = {"answer_id": new_id(self.ID_PREFIX), "created": int(time.time()), "model": model}

    @classmethod
    def for_request(
        cls, request: Request, context: AppContext, body: Body, params: SamplingParams, **more: Any
    ) -> Self:
        """Return the handler of a request."""
        arguments = {**context.arguments(request, body), **context.adapter_argument(body.model)}
        return cls(context, body, params, arguments, owner_of(request), **more)

    async def response(self, request: Request) -> Response:
        """Return the response: a stream of events, or the complete body."""
        if self.body.stream:
            return EventStream(self.stream)
        # `EventStream` does the same for a stream.
        return JSONResponse(await cancel_on_disconnect(request.receive, self.complete))

    def tell_vendor_events(self, events: EventSender, stream: TokenStream) -> None:
        """Send what the answer waits for until it begins, if the client asked for that."""
        if not self.body.triolet_events:
            return

        async def tell(event: dict[str, Any]) -> None:
            await events.send({**self.empty_chunk(), "triolet": event})

        events.start_soon(VendorEventSender.of(self.context.engine, stream, tell).run)

    def check_streamed(self, output: RequestOutput) -> None:
        """Check that an output does not end a streamed answer with the server.

        Raises:
            WireError: it does. The client has the text so far, and the error tells it when to try again.
        """
        if any(completion.finish_reason is FinishReason.SHUTDOWN for completion in output.outputs):
            raise shutting_down()

    def check_whole(self, choices: Iterable[dict[str, Any]]) -> None:
        """Check that an answer has tokens, if it ended with the server.

        Raises:
            WireError: it has none: the client loses nothing by trying again.
        """
        is_empty = not self.usage.num_completion_tokens
        if is_empty and any(choice["stop_reason"] == FinishReason.SHUTDOWN for choice in choices):
            raise shutting_down()

    @abstractmethod
    def empty_chunk(self) -> dict[str, Any]:
        """Return a chunk without choices."""

    @abstractmethod
    async def complete(self) -> dict[str, Any]:
        """Generate the complete response body."""

    @abstractmethod
    async def stream(self, events: EventSender) -> None:
        """Generate the response and send it in chunks."""
