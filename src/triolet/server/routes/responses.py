"""`/v1/responses` without a WebSocket: the same requests, answers and store, one response at a time."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import attrs
import trio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from triolet.core.request.trace_context import pick_trace_headers
from triolet.protocol.errors import WireError, of_exception, unsupported, wrong
from triolet.protocol.json import encode
from triolet.protocol.responses.input_items import Message
from triolet.protocol.responses.input_items_page import input_items, page_of
from triolet.protocol.responses.output_items import Event
from triolet.protocol.responses.requests import CreateResponse, ResumeResponse
from triolet.protocol.responses.response import ResponseBuilder
from triolet.protocol.responses.session import shutting_down
from triolet.protocol.responses.store import previous_messages, prompt_of
from triolet.protocol.responses.turns import Turn
from triolet.server.routes.app_context import AppContext, context_of, deadline_of, owner_of
from triolet.server.routes.errors import error_response, log_failure
from triolet.server.routes.request_body import cancel_on_disconnect, read_json
from triolet.server.routes.sse import EventSender, EventStream

EmitEvents = Callable[[Sequence[Event]], None]
WaitForRoom = Callable[[], Awaitable[None]]
MAX_NUMBER_DIGITS = 18


async def responses(request: Request) -> Response:
    """Make a response, whole or in events."""
    context, owner = context_of(request), owner_of(request)
    body = await read_json(request, CreateResponse.of)
    context.check_model(body.model)
    if body.resumable and context.gateway is None:
        raise unsupported("resumable", "resumable is not supported without a gateway")
    if (deadline_s := deadline_of(request, body.timeout)) is not None:
        body = attrs.evolve(body, timeout=deadline_s - trio.current_time())
    body = body.traced_by(pick_trace_headers(request.headers))
    params = context.responses_context.params(body)
    before = previous_messages(body.previous_response_id, owner, context.responses_context.store)
    answer = context.responses_context.answer(body, params, before, int(time.time()))
    making = _Making(context, owner, answer, prompt_of(body.instructions, answer.chat))
    if body.stream:
        return EventStream(_Stream(making.make, answer, request).write)
    await cancel_on_disconnect(request.receive, making.whole)
    return as_json(answer.response())


async def get_response(request: Request) -> Response:
    """A response that is remembered; with `stream=true` one that can be resumed, after `starting_after`."""
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
            lambda emit, wait_for_room: gateway.answer(turn, owner, emit, wait_for_room), answer, request
        )
        return EventStream(stream.write)
    stored = context.responses_context.store.get(response_id, owner)
    if stored is not None:
        return as_json(stored.response)
    if answer is None:
        answer = context.active.find(response_id, owner)
    if answer is not None:
        return as_json(answer.response())
    raise not_found("There is no response of that id.")


def as_json(response: dict[str, Any]) -> Response:
    """A body of JSON."""
    return Response(encode(response), media_type="application/json")


async def delete_response(request: Request) -> Response:
    """Forget a response."""
    response_id: str = request.path_params["id"]
    if not context_of(request).responses_context.store.delete(response_id, owner_of(request)):
        raise not_found("There is no response of that id.")
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


async def no_websocket(request: Request) -> Response:
    """GET is for WebSockets."""
    error = WireError(
        "GET /v1/responses opens a WebSocket; POST makes a response.", code="upgrade_required", status=426
    )
    response = error_response(error)
    response.headers["upgrade"] = "websocket"
    return response


@attrs.frozen(eq=False)
class _Making:
    """A response that the engine is to make."""

    context: AppContext
    owner: str | None
    answer: ResponseBuilder
    messages: list[Message]

    async def make(self, emit: EmitEvents, wait_for_room: WaitForRoom) -> None:
        gateway = self.context.gateway
        if gateway is None:
            active, engine = self.context.active, self.context.engine
            await active.generate(engine, self.answer, self.messages, self.owner, emit, wait_for_room)
        else:
            turn = Turn(
                stream_id=None, request=self.answer.request, answer=self.answer, messages=self.messages
            )
            await gateway.answer(turn, self.owner, emit, wait_for_room)
        self._keep()

    async def whole(self) -> None:
        """Make it, for a client that waits for its end.

        Raises:
            WireError: it could not be finished.
        """
        await self.make(lambda events: None, trio.lowlevel.checkpoint)
        if self.answer.is_handed_over:
            raise shutting_down()
        response = self.answer.response()
        if response["status"] == "failed":
            is_closing = response["finish_reason"] == "shutdown"
            raise WireError(
                response["error"]["message"],
                code="service_unavailable" if is_closing else "server_error",
                status=503 if is_closing else 500,
                type="server_error",
            )

    def _keep(self) -> None:
        """A response that is over can be continued."""
        if self.answer.can_be_continued and self.answer.request.store:
            self.context.responses_context.store.put(self.answer.stored(self.owner))


@attrs.define(eq=False)
class _Stream:
    """The events of a response, from who makes them to who sends them."""

    make: Callable[[EmitEvents, WaitForRoom], Awaitable[None]]
    answer: ResponseBuilder
    request: Request
    _told: list[Event] = attrs.field(factory=list, init=False)
    _was_told: bool = attrs.field(default=False, init=False)
    _is_made: bool = attrs.field(default=False, init=False)
    _failure: Exception | None = attrs.field(default=None, init=False)
    _senders: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)
    _makers: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)

    async def write(self, events: EventSender) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._make)
            while told := await self._take():
                if not events.has_started:
                    await events.start()
                for event in told:
                    await events.send(event, event["type"])
        if self._failure is not None:
            raise self._failure

    async def _make(self) -> None:
        try:
            await self.make(self._tell, self._wait_for_room)
        except Exception as error:
            self._fail(error)
        if self.answer.is_handed_over:  # no event says so: the next one comes from the next server
            self._failure = shutting_down()
        self._is_made = True
        self._senders.unpark_all()

    def _fail(self, error: Exception) -> None:
        """Before the first event it is an error, and afterwards the last event says it."""
        if not self._was_told:
            self._failure = error
            return
        said = of_exception(error)
        if said.status == 500:
            log_failure(self.request, error)
        self._tell(self.answer.fail(said, int(time.time())))

    def _tell(self, events: Sequence[Event]) -> None:
        self._told += events
        self._was_told = True
        self._senders.unpark_all()

    async def _wait_for_room(self) -> None:
        """The engine's outputs join in their stream while a client is slow."""
        await trio.lowlevel.checkpoint()
        while self._told:
            await self._makers.park()

    async def _take(self) -> list[Event]:
        """What was told since; nothing at the end."""
        await trio.lowlevel.checkpoint()
        self._makers.unpark_all()
        while not self._told and not self._is_made:
            await self._senders.park()
        told, self._told = self._told, []
        return told


def _number(text: str) -> int:
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= MAX_NUMBER_DIGITS):
        raise wrong("starting_after", "a whole number", text)
    return int(text)


def not_found(sentence: str) -> WireError:
    """There is no such response, or it is somebody else's."""
    return WireError(sentence, code="response_not_found", status=404, param="response_id")


# --------------------
# `/v1/responses/{id}/...`: what can be done with a response beside reading it.


async def cancel_response(request: Request) -> Response:
    """End a response that is being made, wherever it was asked for; one that is over stays as it is."""
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
    """What a response was asked in, with the turns before: messages, calls and their outputs."""
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
    return as_json(page_of(input_items(response_id, chat), request.query_params))
