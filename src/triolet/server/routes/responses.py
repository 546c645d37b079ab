"""`/v1/responses` over HTTP: the requests, responses and store of the WebSocket, one response at a time."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import attrs
import trio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from triolet.core.request.request import FinishReason, pick_trace_headers
from triolet.protocol.errors import WireError, of_exception, unsupported, wrong
from triolet.protocol.json.encoding import encode
from triolet.protocol.responses.input_items_page import InputItems, page_of
from triolet.protocol.responses.output_items import Event
from triolet.protocol.responses.requests import CreateResponse, ResumeResponse, SamplingPlan
from triolet.protocol.responses.response import EventsGone, ResponseBuilder
from triolet.protocol.responses.response_items import Message
from triolet.protocol.responses.session import Turn, shutting_down
from triolet.protocol.responses.store import previous_messages, prompt_of, with_items
from triolet.server.routes.app_context import AppContext, context_of, deadline_of, owner_of
from triolet.server.routes.errors import error_response, log_failure
from triolet.server.routes.request_body import cancel_on_disconnect, read_json
from triolet.server.routes.sse import EventSender, EventStream

EmitEvents = Callable[[Sequence[Event]], None]
WaitForRoom = Callable[[], Awaitable[None]]
# Any such number fits into 64 bits.
MAX_NUMBER_DIGITS = 18


async def responses(request: Request) -> Response:
    """Generate a response, complete or as events."""
    context, owner = context_of(request), owner_of(request)

    def planned_body(payload: dict[str, Any]) -> tuple[CreateResponse, SamplingPlan]:
        body = CreateResponse.of(payload)
        return body, context.responses_context.planned(body)

    # A plan reads all tools and forms, so that of a long body is made where the body is parsed.
    body, planned = await read_json(request, planned_body)
    body = context.named(body)
    if body.triolet_events and not body.stream:
        raise wrong("triolet_events", "left out where stream is false", True)
    if body.resumable and context.gateway is None:
        raise unsupported("resumable", "resumable is not supported without a gateway")
    if (deadline_s := deadline_of(request, body.timeout)) is not None:
        body = attrs.evolve(body, timeout=deadline_s - trio.current_time())
    context.access.check_priority(owner, body.priority)
    body = body.traced_by(pick_trace_headers(request.headers))
    store = context.responses_context.store
    before = previous_messages(body.previous_response_id, owner, store)
    body = attrs.evolve(body, input=with_items(body.input, owner, store))
    answer = context.responses_context.answer(body, planned, before, int(time.time()))
    run = _Run(context, owner, answer, prompt_of(body.instructions, answer.chat))
    if body.stream:
        return _Stream(run.generate, answer, request).response()
    return as_json(await cancel_on_disconnect(request.receive, run.to_end))


async def get_response(request: Request) -> Response:
    """Answer a stored or active response; with `stream=true` the events of a resumable one after `starting_after`."""
    context, owner = context_of(request), owner_of(request)
    response_id: str = request.path_params["id"]
    answer = context.responses_context.find_resumable(response_id, owner)
    if request.query_params.get("stream") == "true":
        if answer is None or context.gateway is None:
            raise not_found("There is no response of that id that could be resumed.")
        number = _number(request.query_params.get("starting_after", "-1"))
        resume = ResumeResponse(response_id=response_id, starting_after=number)
        turn = Turn(stream_id=None, resume=resume, answer=answer)
        gateway = context.gateway
        stream = _Stream(
            lambda emit, wait_for_room: gateway.answer(turn, owner, emit, wait_for_room),
            answer,
            request,
            last_number=number,
        )
        return stream.response()
    stored = context.responses_context.store.get(response_id, owner)
    if stored is not None:
        return as_json(stored.response)
    if answer is None:
        answer = context.active.find(response_id, owner)
    if answer is not None:
        return as_json(answer.response())
    raise not_found("There is no response of that id.")


def as_json(response: dict[str, Any]) -> Response:
    """Return a JSON body."""
    return Response(encode(response), media_type="application/json")


async def delete_response(request: Request) -> Response:
    """Delete a finished response: what is stored of it, and what is kept for readers that come back."""
    context, owner = context_of(request), owner_of(request)
    response_id: str = request.path_params["id"]
    if context.active.find(response_id, owner) is not None:
        raise WireError(
            "The response is in progress; cancel it first.",
            code="response_in_progress",
            status=409,
            param="response_id",
        )
    was_stored = context.responses_context.store.delete(response_id, owner)
    was_kept = context.gateway is not None and context.gateway.resumable.forget(response_id, owner)
    if not was_stored and not was_kept:
        raise not_found("There is no response of that id.")
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


async def no_websocket(request: Request) -> Response:
    """Answer a GET that is no WebSocket upgrade."""
    error = WireError(
        "GET /v1/responses opens a WebSocket; POST makes a response.", code="upgrade_required", status=426
    )
    response = error_response(error)
    response.headers["upgrade"] = "websocket"
    return response


async def no_such_operation(request: Request) -> Response:
    """Answer a request for an operation of OpenAI's API, whose name would else be read as the id of a response."""
    path = request.url.path
    return error_response(WireError(f"{path} is not offered by this server.", code="not_found", status=404))


@attrs.frozen(eq=False)
class _Run:
    """Generation of one response."""

    context: AppContext
    owner: str | None
    answer: ResponseBuilder
    messages: list[Message]

    async def generate(self, emit: EmitEvents, wait_for_room: WaitForRoom) -> None:
        def store_and_emit(events: Sequence[Event]) -> None:
            # First: a client that has read the last event continues the response, or leaves, at once.
            self._store()
            emit(events)

        gateway = self.context.gateway
        if gateway is None:
            active, engine = self.context.active, self.context.engine
            await active.generate(
                engine, self.answer, self.messages, self.owner, store_and_emit, wait_for_room
            )
        else:
            turn = Turn(
                stream_id=None, request=self.answer.request, answer=self.answer, messages=self.messages
            )
            await gateway.answer(turn, self.owner, store_and_emit, wait_for_room)

    async def to_end(self) -> dict[str, Any]:
        """Generate the response for a client that waits for its end, and return it.

        Raises:
            WireError: the response could not be finished, or the server ended before it had any output.
        """
        await self.generate(lambda events: None, trio.lowlevel.checkpoint)
        if self.answer.is_handed_over:
            raise shutting_down()
        response = self.answer.response()
        if response["status"] != "failed":
            return response
        if response["finish_reason"] != FinishReason.SHUTDOWN:
            raise WireError(
                response["error"]["message"], code="server_error", status=500, type="server_error"
            )
        if not response["output"]:
            raise shutting_down()
        # A stream has sent its text before `response.failed`. Here the text is in the response only, and clients look
        # for it in no failed one.
        return {
            **response,
            "status": "incomplete",
            "error": None,
            "incomplete_details": {"reason": FinishReason.SHUTDOWN.value},
        }

    def _store(self) -> None:
        """Store a finished response, so that it can be continued; a resumable one is stored where it is generated."""
        request = self.answer.request
        if self.answer.can_be_continued and request.store and not request.resumable:
            self.context.responses_context.store.put(self.answer.stored(self.owner))


@attrs.define(eq=False)
class _Stream:
    """Relay of events, from the task that generates to the task that sends."""

    generate: Callable[[EmitEvents, WaitForRoom], Awaitable[None]]
    answer: ResponseBuilder
    request: Request
    last_number: int = -1  # `sequence_number` of the last event that the client has
    _pending: list[Event] = attrs.field(factory=list, init=False)
    _has_emitted: bool = attrs.field(default=False, init=False)
    _is_done: bool = attrs.field(default=False, init=False)
    _failure: Exception | None = attrs.field(default=None, init=False)
    _sender: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)
    _generators: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)

    def response(self) -> EventStream:
        """Return the response that sends the events."""
        return EventStream(self.write, lambda error: error.response_event(self.last_number))

    async def write(self, events: EventSender) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._generate)
            while pending := await self._take():
                if not events.has_started:
                    await events.start()
                for event in pending:
                    await events.send(event, event["type"])
                    self.last_number = event.get("sequence_number", self.last_number)
        if self._failure is not None:
            raise self._failure
        if not events.has_started:  # there was nothing after `starting_after`
            await events.start()

    async def _generate(self) -> None:
        try:
            await self.generate(self._emit, self._wait_for_room)
        except Exception as error:
            self._fail(error)
        if self.answer.is_handed_over:  # no last event: the next server sends the following ones
            self._failure = shutting_down()
        self._is_done = True
        self._sender.unpark_all()

    def _fail(self, error: Exception) -> None:
        """Record a failure: an HTTP error before the first event, an event afterwards."""
        if not self._has_emitted or isinstance(error, EventsGone):
            self._failure = error
            return
        said = of_exception(error)
        if said.status == 500:
            log_failure(self.request, error)
        self._emit(self.answer.fail(said, int(time.time())))

    def _emit(self, events: Sequence[Event]) -> None:
        self._pending += events
        self._has_emitted = True
        self._sender.unpark_all()

    async def _wait_for_room(self) -> None:
        """Wait until all events were taken; outputs of the engine are merged in their stream meanwhile."""
        await trio.lowlevel.checkpoint()
        while self._pending:
            await self._generators.park()

    async def _take(self) -> list[Event]:
        """Take the new events; an empty list means that the response is complete."""
        await trio.lowlevel.checkpoint()
        self._generators.unpark_all()
        while not self._pending and not self._is_done:
            await self._sender.park()
        pending, self._pending = self._pending, []
        return pending


def _number(text: str) -> int:
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= MAX_NUMBER_DIGITS):
        raise wrong("starting_after", "a whole number", text)
    return int(text)


def not_found(sentence: str) -> WireError:
    """Return the error for an unknown response, or one of another key."""
    # One error for both, so that an id of another key cannot be told from an unknown one.
    return WireError(sentence, code="response_not_found", status=404, param="response_id")


async def cancel_response(request: Request) -> Response:
    """Cancel an active response of the same key; a finished one is returned unchanged."""
    context, owner = context_of(request), owner_of(request)
    response_id: str = request.path_params["id"]
    answer = context.active.cancel(response_id, owner, int(time.time()))
    if answer is None:
        answer = context.responses_context.find_resumable(response_id, owner)
    if answer is not None:
        return as_json(answer.response())
    if (stored := context.responses_context.store.get(response_id, owner)) is not None:
        return as_json(stored.response)
    raise not_found("There is no response of that id.")


async def list_input_items(request: Request) -> Response:
    """List the input items of a response, those of previous turns included."""
    context, owner = context_of(request), owner_of(request)
    response_id: str = request.path_params["id"]
    if (stored := context.responses_context.store.get(response_id, owner)) is not None:
        chat = stored.messages[: stored.num_input]
    else:
        answer = context.active.find(response_id, owner)
        if answer is None:
            answer = context.responses_context.find_resumable(response_id, owner)
        if answer is None:
            raise not_found("There is no response of that id.")
        chat = answer.chat
    return as_json(page_of(InputItems(response_id, chat), request.query_params))
