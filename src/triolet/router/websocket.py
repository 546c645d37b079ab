"""WebSockets of a router's clients: each response is computed by an engine, and moved to another one if that dies.

    socket --messages--> reader --turns--> lanes (one task each) --> engine's WebSocket (one for each turn, `upstreams`)
    engine --events----> turn   --events-> send queue --> writer --> socket

The turns of a lane come one after the other, as in an engine. A message that starts no turn, such as
`response.cancel`, goes to the engine of the turn that it is about.

A response is moved with its whole request, and with a seed that the router has given it if the client has not. A turn
that depends on what one engine alone has (`previous_response_id`, `response.resume`, and after `response.steer`) goes
to that engine, and fails with it.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs
import trio
from trio_websocket import ConnectionClosed

from triolet.client.address import ServerAddress
from triolet.client.http import HttpError
from triolet.client.websocket import ClientWebSocket, ConnectionLost
from triolet.core.recovery.supervision import shortage_of
from triolet.core.request.request import TraceHeaders
from triolet.errors import ResourceShortage
from triolet.protocol.errors import WireError, of_exception
from triolet.protocol.json.encoding import encode
from triolet.protocol.json.parsing import JsonLimits
from triolet.protocol.responses.session import shutting_down
from triolet.router.client_request import (
    CONTROLS,
    RoutedPrompt,
    is_without_seed,
    new_seed,
    parsed_request,
    with_field,
)
from triolet.router.continuation import Continuation, Diverged, Event, SentEvents
from triolet.router.engines import CONNECTION, SHORTAGE_S, Engines, RoutedEngine
from triolet.router.homes import Home, Homes
from triolet.router.owed import OwedAnswers
from triolet.router.refusals import (
    Refused,
    events_moved,
    is_cut_off,
    is_of_engine,
    passed_on,
    refusal_of_event,
    refusal_of_frames,
    unavailable,
)
from triolet.router.upstreams import Upstreams
from triolet.server.transport.websocket import SendQueue, ServerSocket

MAX_MOVES: Final = 8  # of one response
NO_ENGINE_S: Final = 30.0  # that a turn waits for an engine
MAX_LANES: Final = 64
MAX_QUEUED: Final = 256  # turns of one client
MAX_WAITING: Final = 4  # of the longest messages: turns that wait, and messages about one turn
MAX_CONTROLS: Final = 256  # messages about one turn that its next engine has to get, too
GOING_AWAY: Final = (1001, "the server is going away")  # as an engine says it

logger = logging.getLogger("triolet.router")


class Moved(Exception):
    """The engine ends before the response does."""


@attrs.define(eq=False)
class RoutedTurn:
    """One message that an engine answers with a response or an error."""

    text: str  # the message
    payload: Mapping[str, Any]  # its fields that are looked at; empty if it is no JSON object
    prompt: RoutedPrompt
    stream_id: str | None
    refusal: WireError | None = None  # why no engine can answer it, if that is so
    request_id: str = attrs.field(factory=lambda: secrets.token_hex(8))  # for the dispatcher
    seed: int = attrs.field(factory=new_seed)  # if the client gives none
    sent: SentEvents = attrs.field(factory=SentEvents)
    continuation: Continuation | None = None
    upstream: ClientWebSocket | None = None
    controls: list[Mapping[str, Any]] = attrs.field(factory=list)  # messages about it
    num_control_chars: int = 0  # of all of these
    num_controls_sent: int = 0  # to the present engine
    owed: OwedAnswers = attrs.field(init=False)  # by the present engine
    noted: str | None = None  # id of the response at the engine that the router knows it to be at
    is_bound: bool = False  # to its engine
    response_ids: set[str] = attrs.field(factory=set)  # that the client knows: each steering adds one

    def __attrs_post_init__(self) -> None:
        self.begin_again()

    def begin_again(self) -> None:
        """Expect the answers of an engine from their beginning."""
        self.num_controls_sent, self.owed = 0, OwedAnswers(self.payload)
        for control in self.controls:
            self.owed.add(control)
        self.continuation = Continuation(self.sent) if self.sent.num_events else None

    def forget_controls(self) -> None:
        """Forget the messages that its engine has got, if no other one will ever get them."""
        if self.is_bound and self.num_controls_sent == len(self.controls):
            self.controls.clear()
            self.num_controls_sent = self.num_control_chars = 0

    @property
    def previous_id(self) -> str | None:
        """Id of the response that it continues; None if it continues none."""
        given = self.payload.get("previous_response_id")
        # The answer to the end mark of a resume may come behind its turn: its WebSocket has no other one.
        is_resume = self.payload.get("type") == "response.resume"
        return given if isinstance(given, str) and not is_resume else None

    @property
    def wanted_id(self) -> object:
        """Id of the response that binds the turn to its engine; None if any engine will do."""
        is_resume = self.payload.get("type") == "response.resume"
        return self.payload.get("response_id" if is_resume else "previous_response_id")

    @property
    def is_stored(self) -> bool:
        """False if its response can be continued on the engine's WebSocket alone."""
        return self.payload.get("type") != "response.create" or self.payload.get("store") is not False

    @property
    def has_caught_up(self) -> bool:
        """True if the present engine has come to where the last one ended."""
        return self.continuation is None or self.continuation.has_caught_up

    @property
    def response_id(self) -> str | None:
        """The id that the client knows; None before its first event."""
        return None if self.sent.response is None else self.sent.response["id"]


class RoutedConnection:
    """One client on a WebSocket, after the handshake.

    Args:
        socket: its `run` must run in another task.
        engines: the fleet.
        homes: of all clients' responses.
        api_key: of the client, which the engines check; None without one.
        limits: on the shape of messages.
        max_message_bytes: length of the longest message, which bounds those that wait.
        on_error: told of status and code of each error that the client gets.
        trace_headers: of the client's upgrade request, which engines get with theirs.
    """

    def __init__(
        self,
        socket: ServerSocket,
        engines: Engines,
        homes: Homes,
        api_key: str | None,
        limits: JsonLimits,
        max_message_bytes: int,
        on_error: Callable[[int, str], None],
        trace_headers: TraceHeaders = (),
    ) -> None:
        self._socket, self._engines, self._homes, self._api_key = socket, engines, homes, api_key
        self._limits, self._on_error, self._trace_headers = limits, on_error, trace_headers
        self._max_waiting_chars = MAX_WAITING * max_message_bytes
        self._upstreams: Upstreams
        self._send_queue = SendQueue()
        self._lanes: dict[str | None, deque[RoutedTurn]] = {}  # the first turn of each is the present one
        self._num_queued = 0
        self._num_waiting_chars = 0  # of turns behind the present ones
        self._is_draining = False
        self._nursery: trio.Nursery | None = None

    @property
    def num_waiting_bytes(self) -> int:
        """Bytes of events that wait to be sent."""
        return self._send_queue.num_bytes

    async def run(self) -> None:
        """Serve until the connection ends; leaving it aborts all responses."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self._upstreams = Upstreams(nursery, self._address, self._trace_headers)
                nursery.start_soon(self._write)
                await self._read()
        except* ConnectionClosed:
            pass

    def send(self, text: str) -> None:
        """Send a message to the client."""
        self._send_queue.put(text)

    def drain(self) -> None:
        """Refuse new turns; the connection closes after its last one."""
        self._is_draining = True
        self._close_if_drained()

    def _close_if_drained(self) -> None:
        if self._is_draining and not self._lanes:
            self._send_queue.put_close(*GOING_AWAY)

    async def _read(self) -> None:
        while True:
            raw = await self._socket.get_message()
            await self._send_queue.wait_for_reply_room()
            await self._socket.take_turn()
            await self._receive(raw if isinstance(raw, str) else raw.decode("utf-8", "replace"))
            self._socket.message_taken()

    async def _write(self) -> None:
        while texts := await self._send_queue.take():
            await self._socket.send_texts(texts)
            self._send_queue.mark_sent(texts)
        assert self._send_queue.close is not None, "only a close frame leaves the queue empty"
        await self._socket.close(*self._send_queue.close)

    async def _receive(self, text: str) -> None:
        try:
            parsed = await parsed_request(text, self._limits, self._socket.client, self._api_key or "")
        except (WireError, ResourceShortage) as error:
            self._tell_error(None, of_exception(error))
            return
        payload = parsed.fields
        is_control = payload.get("type") in CONTROLS
        if is_control and (turn := self._turn_of(payload)) is not None:
            await self._control(turn, payload, len(text))
            return
        stream_id = payload.get("stream_id")
        self._queue(
            RoutedTurn(
                text,
                parsed.kept,
                parsed.prompt,
                stream_id if isinstance(stream_id, str) else None,
                refusal=parsed.refusal,
            )
        )

    def _turn_of(self, payload: Mapping[str, Any]) -> RoutedTurn | None:
        """Return the present turn that a message is about."""
        response_id = payload.get("response_id") or payload.get("previous_response_id")
        for lane, turns in self._lanes.items():
            if not turns:
                continue
            if response_id is None:
                is_meant = lane == payload.get("stream_id")
            else:
                is_meant = isinstance(response_id, str) and response_id in turns[0].response_ids
            if is_meant:
                return turns[0]
        return None

    async def _control(self, turn: RoutedTurn, payload: Mapping[str, Any], num_chars: int) -> None:
        turn.forget_controls()
        num_kept = len(turn.controls)
        if num_kept >= MAX_CONTROLS or (
            num_kept and turn.num_control_chars + num_chars > self._max_waiting_chars
        ):
            self._refuse_more(turn.stream_id, f"{num_kept} messages about this response wait for its engine.")
            return
        if payload["type"] == "response.steer":
            turn.is_bound = True
        turn.controls.append(payload)
        turn.num_control_chars += num_chars
        turn.owed.add(payload)
        await _send_controls(turn)

    def _queue(self, turn: RoutedTurn) -> None:
        if self._is_draining:
            self._tell_error(turn.stream_id, shutting_down())
            return
        lane = self._lanes.get(turn.stream_id)
        if self._num_queued >= MAX_QUEUED or (lane is None and len(self._lanes) >= MAX_LANES):
            message = f"A connection can have {MAX_QUEUED} responses in {MAX_LANES} lanes."
            self._refuse_more(turn.stream_id, message)
            return
        num_chars = self._num_waiting_chars + len(turn.text)
        if lane is not None and self._num_waiting_chars and num_chars > self._max_waiting_chars:
            message = f"Messages that wait must have at most {self._max_waiting_chars} characters together."
            self._refuse_more(turn.stream_id, message)
            return
        self._num_queued += 1
        if lane is None:
            assert self._nursery is not None
            self._lanes[turn.stream_id] = deque([turn])
            self._nursery.start_soon(self._run_lane, turn.stream_id)
        else:
            self._num_waiting_chars = num_chars
            lane.append(turn)

    def _refuse_more(self, stream_id: str | None, message: str) -> None:
        """Tell that this client is too far ahead of its answers."""
        error = WireError(message, code="rate_limit_exceeded", status=429, type="rate_limit_error")
        self._tell_error(stream_id, error)

    async def _run_lane(self, stream_id: str | None) -> None:
        turns = self._lanes[stream_id]
        while turns:
            try:
                await self._run_turn(turns[0])
            finally:
                turns.popleft()
                self._num_queued -= 1
                if turns:
                    self._num_waiting_chars -= len(turns[0].text)
        del self._lanes[stream_id]
        self._close_if_drained()

    # -------------------------------------------------------------------------------------- one turn

    async def _run_turn(self, turn: RoutedTurn) -> None:
        if turn.refusal is not None:
            self._tell_error(turn.stream_id, turn.refusal)
            return
        await self._homes.find(turn.wanted_id, self._api_key)
        refused_by: set[RoutedEngine] = set()
        last: RoutedEngine | None = None
        for _ in range(MAX_MOVES + 1):
            refusal: WireError | None = None
            is_broken = False
            home = self._homes.of(turn.wanted_id)
            if self._engines.is_closed or (
                home is None and not await self._engines.wait_for_one(NO_ENGINE_S)
            ):
                break
            if home is not None and home.is_moved and turn.payload.get("type") == "response.resume":
                self._tell_error(turn.stream_id, events_moved())
                return
            engine = (
                home.engine
                if home is not None
                else self._engines.place(turn.request_id, turn.prompt, refused_by)
            )
            if engine is None:
                continue
            if last is not None and engine is not last:
                self._engines.on_move()
            last = engine
            try:
                if await self._attempt(turn, engine, home):
                    return
            except Diverged as error:
                logger.warning("a response cannot go on at %s: %s", engine.address, error)
                message = "The answer could not be continued by another engine: it differs."
                self._refuse(turn, unavailable(message))
                return
            except (HttpError, Refused) as error:
                refusal = passed_on(error) if isinstance(error, HttpError) else error.error
                if is_of_engine(refusal):
                    self._engines.note_not_ready(engine)
                may_pass = refusal.status == 503 or (refusal.status == 429 and turn.sent.num_events)
                if home is not None or not may_pass:
                    self._refuse(turn, refusal)
                    return
            except ConnectionLost as error:
                if (refusal := refusal_of_frames(error)) is not None:
                    self._refuse(turn, refusal)
                    return
                if (shortage := shortage_of(error, CONNECTION)) is not None:  # this machine's
                    if not turn.sent.num_events:
                        self._refuse(turn, of_exception(shortage))
                        return
                    await trio.sleep(SHORTAGE_S)
                elif error.close_code is None:
                    is_broken = True
                    self._engines.note_lost(engine)
                else:  # its other connections may go on
                    self._engines.note_not_ready(engine)
            finally:
                turn.upstream = None
                self._engines.finish(turn.request_id)
            if turn.is_bound or home is not None:
                break
            if refusal is not None:
                await self._engines.note_refusal(engine, refusal, refused_by)
            elif is_broken:
                await self._engines.pass_over(engine, refused_by)
        if self._engines.is_closed:
            self._refuse(turn, shutting_down())
        else:
            gone = turn.is_bound or self._homes.of(turn.wanted_id) is not None
            message = "The engine of this response is not there any more." if gone else "No engine is there."
            self._refuse(turn, unavailable(message))

    async def _attempt(self, turn: RoutedTurn, engine: RoutedEngine, home: Home | None) -> bool:
        """Have an engine compute the turn; return True when it is over, and False if it must be moved."""
        turn.begin_again()
        scope = trio.CancelScope()
        with scope, self._engines.computing(engine, scope, lambda: home is None and not turn.is_bound):
            use = self._upstreams.use(engine, turn.stream_id, turn.previous_id, is_stored=turn.is_stored)
            async with use as upstream:
                await _send_first(upstream.socket, _message(turn, home))
                if (mark := turn.owed.end_mark) is not None:
                    await upstream.socket.send(encode(mark))
                turn.upstream = upstream.socket
                try:
                    while not turn.owed.is_over:
                        await _send_controls(turn)
                        event = await upstream.socket.receive()
                        await self._relay(turn, engine, event, may_move=home is None and not turn.is_bound)
                    upstream.keep_for(set() if turn.is_stored else turn.response_ids)
                except Moved:
                    self._engines.note_not_ready(engine)
                except ConnectionLost:
                    if turn.owed.num_ends > 0:
                        raise
        # An answer to a late cancel that does not come is no reason to compute the response again.
        return turn.owed.num_ends <= 0

    def _address(self, engine: RoutedEngine) -> ServerAddress:
        return attrs.evolve(engine.address, api_key=self._api_key)

    async def _relay(self, turn: RoutedTurn, engine: RoutedEngine, text: str, *, may_move: bool) -> None:
        event: Event = json.loads(text)
        if turn.owed.is_of_mark(event):
            return
        if _is_shutting_down(event) and not turn.is_bound and turn.sent.response is None:
            raise Moved
        if may_move and is_cut_off(event):
            raise Moved
        if _is_expired(event):  # its WebSocket, which may be older than the turn
            if turn.is_bound:
                return  # the end of the response follows
            raise Moved
        if event["type"] == "error" and not turn.has_caught_up:
            raise Refused(refusal_of_event(event))
        turn.owed.note(event)
        if turn.continuation is not None:
            followed = turn.continuation.follow(event)
            self._note_move(turn, engine, turn.continuation.response_id)
            if followed is None:
                return
            event, text = followed, encode(followed)
        turn.sent.note(event)
        kind = event["type"]
        if kind == "response.created":
            new_id = event["response"]["id"]
            self._homes.note(new_id, Home(engine, new_id))
            turn.noted = new_id
            turn.response_ids.add(new_id)
        elif kind.endswith(".delta"):
            self._engines.note_progress(turn.request_id, len(event["delta"]))
        self._send_queue.put(text)
        await self._send_queue.wait_for_room()

    def _note_move(self, turn: RoutedTurn, engine: RoutedEngine, new_id: str | None) -> None:
        """Note the engine that goes on with a response, as soon as that one has told its id."""
        if new_id is None or turn.response_id is None or new_id == turn.noted:
            return
        self._homes.note(turn.response_id, Home(engine, new_id, is_moved=True))
        turn.noted = new_id

    def _refuse(self, turn: RoutedTurn, error: WireError) -> None:
        """End a turn with an error: in an event of its response, if that has begun."""
        if turn.sent.response is None:
            self._tell_error(turn.stream_id, error)
            return
        event = turn.sent.failure("server_error", error.message)
        self._send_queue.put(
            encode(event if turn.stream_id is None else {**event, "stream_id": turn.stream_id})
        )

    def _tell_error(self, stream_id: str | None, error: WireError) -> None:
        self._on_error(error.status, error.code)
        self._send_queue.put(encode(error.event(stream_id)))


def _message(turn: RoutedTurn, home: Home | None) -> str:
    """Return the message for an engine: with the ids that it knows, and a seed."""
    kind = turn.payload.get("type")
    if home is not None:
        name = "response_id" if kind == "response.resume" else "previous_response_id"
        return with_field(turn.text.encode(), name, home.response_id).decode()
    if kind == "response.create" and is_without_seed(turn.payload):
        return with_field(turn.text.encode(), "seed", turn.seed).decode()
    return turn.text


async def _send_first(socket: ClientWebSocket, text: str) -> None:
    """Send an engine the message that begins a turn.

    Raises:
        ConnectionLost: the connection has ended, with the code that the engine gives where the message was too much.
    """
    try:
        await socket.send(text)
    except ConnectionLost as error:
        raise await socket.refusal() or error from None


async def _send_controls(turn: RoutedTurn) -> None:
    """Send an engine the messages about its turn that it has not got, with the ids that it knows."""
    # An engine that has not caught up would end the response before the place where the client has it.
    while turn.upstream is not None and turn.has_caught_up and turn.num_controls_sent < len(turn.controls):
        known = dict(turn.controls[turn.num_controls_sent])
        turn.num_controls_sent += 1
        if turn.continuation is not None:
            for name in ("response_id", "previous_response_id"):
                if name in known:
                    known[name] = turn.continuation.new_id(known[name])
        try:
            await turn.upstream.send(json.dumps(known))
        except ConnectionLost:
            return  # the task that reads from it moves the turn


def _is_expired(event: Event) -> bool:
    """Return True for an error of an engine that closes its WebSocket for its age."""
    return event["type"] == "error" and bool(
        event["error"].get("code") == "websocket_connection_limit_reached"
    )


def _is_shutting_down(event: Event) -> bool:
    """Return True for an error of an engine that begins nothing new."""
    return event["type"] == "error" and bool(event["error"].get("code") == "service_unavailable")
