"""Session on one WebSocket, without the socket: client events in, effects out.

A lane is a queue of turns. One turn of a lane is active at a time, lanes are independent of each other, and all lanes
of a connection have at most `max_active` active turns; lanes that wait for a place get it in order of arrival.

    turn       what comes                      effects                                             turn next
    -          response.create, it is right    none, or Start                                      queued, starting
    -          response.create, it is wrong    its error, when the turns before it have ended      over
    -          response.resume                 none, or Start                                      queued, starting
    queued     the turn before it ends         Start, or the error of what it continues            starting, over
    starting   told of its first events        Send of each                                        active
    starting   refused by the engine           Send of an error                                    over
    active     told of more                    Send of each                                        active
    active     told of its terminal event      Send of each; it can be continued from now on       over
    starting,  response.cancel                 Stop, Send of its ending                            over
    active
    active     response.steer                  Stop, Send of its ending; a successor in its place  over
    any        an event that is wrong          Send of an error                                    same
    queued     the server drains               its error, when the turns before it have ended      over
    starting,  the server ends it              Stop, Send of response.failed                       over
    active
    active     the server ends it, and the     Stop                                                over
               next one goes on with it

So every `response.create` ends exactly once: with one `error`, or with one terminal event after `response.created`,
possibly from the next server. The error of a create waits for its place in the lane, because clients tell the turns of
a lane apart by their order alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import attrs

from triolet.core.request.params import SamplingParams
from triolet.core.request.tokenizer_interface import TokenizerInterface
from triolet.protocol.access import Access
from triolet.protocol.errors import WireError
from triolet.protocol.responses.output_items import Event
from triolet.protocol.responses.requests import (
    CancelResponse,
    ClientEvent,
    CreateResponse,
    RequestEcho,
    ResumeResponse,
    SamplingPlan,
    SteerResponse,
)
from triolet.protocol.responses.response import EventsGone, ResponseBuilder
from triolet.protocol.responses.response_items import Message, NewId, check_chat
from triolet.protocol.responses.store import (
    ResponseStore,
    StoreBudget,
    previous_messages,
    prompt_of,
    with_items,
)


@attrs.define(eq=False, kw_only=True)
class Turn:
    """One `response.create` or `response.resume`, with its response."""

    stream_id: str | None
    request: CreateResponse | None = None  # the request; None for a resume
    planned: SamplingPlan | None = None  # its sampling parameters and tool plan
    resume: ResumeResponse | None = None  # the response to read on; None for a create
    error: WireError | None = None  # why it cannot be started
    messages: list[Message] = attrs.field(factory=list)  # chat for the model, once started
    answer: ResponseBuilder | None = None  # the response, once started
    was_told: bool = False  # whether any event was sent to the client
    num_bytes: int = 0  # length of the message that asked for it

    @classmethod
    def of(cls, event: ClientEvent) -> Turn:
        """Return the turn of a `response.create` or `response.resume`, valid or not."""
        return cls(
            stream_id=event.stream_id,
            request=event.body if isinstance(event.body, CreateResponse) else None,
            planned=event.planned,
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


@attrs.define(eq=False)
class _Lane:
    queue: deque[Turn] = attrs.field(factory=deque)
    active: Turn | None = None


@attrs.define(eq=False, kw_only=True)
class TurnQueues:
    """Lanes of one connection, each a queue of turns; the one without a name always exists."""

    max_active: int  # most active turns, of all lanes together
    max_lanes: int  # most named lanes; a used name counts until the connection ends
    max_queued: int  # most queued turns
    max_queued_bytes: int  # most bytes of their messages together
    num_active: int = attrs.field(default=0, init=False)
    num_queued: int = attrs.field(default=0, init=False)
    num_queued_bytes: int = attrs.field(default=0, init=False)
    _lanes: dict[str | None, _Lane] = attrs.field(factory=lambda: {None: _Lane()}, init=False)
    _waiting: deque[str | None] = attrs.field(
        factory=deque, init=False
    )  # idle lanes with a turn, oldest first

    @property
    def active(self) -> list[Turn]:
        """Active turns, and those told to start."""
        return [lane.active for lane in self._lanes.values() if lane.active is not None]

    def active_in(self, stream_id: str | None) -> Turn | None:
        """Return the active turn of a lane."""
        lane = self._lanes.get(stream_id)
        return None if lane is None else lane.active

    def is_active(self, turn: Turn) -> bool:
        """Return whether this turn is the active one of its lane."""
        return self.active_in(turn.stream_id) is turn

    def add(self, turn: Turn) -> None:
        """Append a turn to its lane.

        Raises:
            WireError: there are too many lanes or queued turns.
        """
        if (
            turn.stream_id not in self._lanes and len(self._lanes) > self.max_lanes
        ):  # one more than the named ones
            raise WireError(
                f"A connection can have {self.max_lanes} named lanes; open another one.",
                code="websocket_stream_limit_reached",
                param="stream_id",
            )
        if self.num_queued >= self.max_queued or (
            self.num_queued and self.num_queued_bytes + turn.num_bytes > self.max_queued_bytes
        ):
            raise WireError(
                f"{self.num_queued} responses wait on this connection; wait for their responses first.",
                code="rate_limit_exceeded",
                status=429,
                type="rate_limit_error",
            )
        lane = self._lanes.setdefault(turn.stream_id, _Lane())
        lane.queue.append(turn)
        self.num_queued += 1
        self.num_queued_bytes += turn.num_bytes
        if lane.active is None and len(lane.queue) == 1:
            self._waiting.append(turn.stream_id)

    def put_first(self, turn: Turn) -> None:
        """Insert a turn right after the active one of its lane."""
        self._lanes[turn.stream_id].queue.appendleft(turn)
        self.num_queued += 1
        self.num_queued_bytes += turn.num_bytes

    def take_next(self) -> Turn | None:
        """Activate and return the next turn, if one may start."""
        if not self._waiting or self.num_active >= self.max_active:
            return None
        lane = self._lanes[self._waiting.popleft()]
        turn = lane.active = lane.queue.popleft()
        self.num_queued -= 1
        self.num_queued_bytes -= turn.num_bytes
        self.num_active += 1
        return turn

    def end(self, turn: Turn) -> None:
        """End an active turn."""
        lane = self._lanes[turn.stream_id]
        lane.active = None
        self.num_active -= 1
        if lane.queue:
            self._waiting.append(turn.stream_id)

    def refuse_queued(self, error: WireError) -> list[Turn]:
        """Give all queued turns an error; remove and return those that wait for a place, and not for their lane."""
        refused: list[Turn] = []
        for lane in self._lanes.values():
            for turn in lane.queue:
                turn.error = turn.error or error
            if lane.active is None:
                refused += lane.queue
                lane.queue.clear()
        self._waiting.clear()
        self.num_queued -= len(refused)
        self.num_queued_bytes -= sum(turn.num_bytes for turn in refused)
        return refused

    def clear(self) -> None:
        """Remove all queued turns."""
        for lane in self._lanes.values():
            lane.queue.clear()
        self._waiting.clear()
        self.num_queued = self.num_queued_bytes = 0


TERMINAL_TYPES = ("response.completed", "response.failed", "response.incomplete")
MAX_LOCAL_RESPONSES = 64
MAX_LOCAL_BYTES = 16 * 2**20


@attrs.frozen(kw_only=True)
class ResponsesContext:
    """Settings and shared state of a server that its sessions need.

    Args:
        access: rules of the server.
        models: names of the model; responses carry the first one, or the name of the adapter that was asked for.
        adapter_names: returns the names of the model's adapters.
        defaults: the model's default sampling parameters.
        store: of responses that outlive their connection.
        find_resumable: finds a resumable response by id and owner.
        new_id: makes ids.
        tool_parser: format of the model's tool calls.
        reasoning_parser: format of the model's reasoning.
        tokenizer: the model's.
        max_active: most active turns of a connection.
        max_lanes: most named lanes.
        max_queued: most queued turns.
        max_queued_bytes: most bytes of their messages together.
        local_budget: memory for responses with `store: false`, of all connections together.
        saves_snapshot: resumable responses are saved for the next server.
    """

    models: tuple[str, ...]
    defaults: SamplingParams
    store: ResponseStore
    new_id: NewId
    access: Access = attrs.field(factory=Access)
    adapter_names: Callable[[], tuple[str, ...]] = tuple
    find_resumable: Callable[[str, str | None], ResponseBuilder | None] = lambda response_id, owner: None
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    tokenizer: TokenizerInterface | None = None
    max_active: int = 16
    max_lanes: int = 32
    max_queued: int = 256
    max_queued_bytes: int = 64 * 2**20
    local_budget: StoreBudget | None = None
    saves_snapshot: bool = False

    def serves(self, name: str) -> bool:
        """Tell whether the model, or an adapter of it, has a name."""
        # Adapters are looked up last: most requests name the model.
        return name in self.models or name in self.adapter_names()

    def planned(self, request: CreateResponse) -> SamplingPlan:
        """Return the sampling parameters and the tool plan of a request.

        Raises:
            WireError: a value or a tool is invalid.
        """
        # Once per request, because a client may send hundreds of tools, and a plan reads them all.
        tools = request.plan(self.tool_parser, self.reasoning_parser, self.tokenizer)
        # Its name has been checked: one that is not the model's is an adapter's.
        adapter = None if not request.model or request.model in self.models else request.model
        return SamplingPlan(
            request.sampling_params(self.defaults, tools),
            tools,
            RequestEcho.of(request),
            adapter or self.models[0],
            adapter,
            self.defaults,
            self.new_id,
        )

    def answer(
        self, request: CreateResponse, planned: SamplingPlan, before: tuple[Message, ...], now: int
    ) -> ResponseBuilder:
        """Return a new response, still without events.

        Args:
            request: what is asked for.
            planned: from `planned`.
            before: the chat that it continues, see `previous_messages`.
            now: seconds since the epoch.
        Raises:
            WireError: the chat is too long, or lacks the call of an output.
        """
        new = request.input.messages()
        check_chat(before, new)
        return ResponseBuilder(
            response_id=self.new_id("resp"),
            request=request,
            params=planned.params,
            model=planned.model or self.models[0],
            adapter=planned.adapter,
            created_at=now,
            new_id=planned.new_id or self.new_id,
            plan=planned.tools,
            echo=planned.echo,
            chat=(*before, *new),
            survives_restart=self.saves_snapshot and request.resumable,
        )


class Session:
    """Session of one connection; see the table in the module. `now` is always seconds since the epoch.

    Args:
        owner: name of the connection's key; None where there are no keys.
    """

    def __init__(self, context: ResponsesContext, owner: str | None = None) -> None:
        self._context, self._owner = context, owner
        self._lanes = TurnQueues(
            max_active=context.max_active,
            max_lanes=context.max_lanes,
            max_queued=context.max_queued,
            max_queued_bytes=context.max_queued_bytes,
        )
        self._is_draining = False
        self._is_closed = False
        self._local = ResponseStore(MAX_LOCAL_RESPONSES, MAX_LOCAL_BYTES, context.local_budget)

    def close(self) -> None:
        """Delete the responses that only this connection could continue."""
        self._local.clear()

    @property
    def active(self) -> list[Turn]:
        """Turns that are starting or active."""
        return self._lanes.active

    # ---------------------------------------------------------------------------- what the client says

    def receive(self, event: ClientEvent, now: int) -> list[Effect]:
        """Handle a client event."""
        if self._is_closed:
            return []
        if event.type in ("response.create", "response.resume"):
            return self._enqueue(event, now)
        if event.type == "response.steer":
            return self._steer(event, now)
        if event.error is not None:
            return [Send(event.error.event(event.stream_id))]
        assert isinstance(event.body, CancelResponse), "there are four kinds of events"
        return self._cancel(event.body, now)

    def _cancel(self, wish: CancelResponse, now: int) -> list[Effect]:
        turn = self._active_turn(wish)
        if turn is None or turn.answer is None:
            error = WireError(
                "There is no such active response on this connection.",
                code="response_not_found",
                status=404,
                param="response_id" if wish.response_id else "stream_id",
            )
            return [Send(error.event(wish.stream_id))]
        return [Stop(turn), *self.emit(turn, turn.answer.cancel(now), now)]

    def _active_turn(self, wish: CancelResponse) -> Turn | None:
        if wish.response_id is not None:
            return self._turn_of(wish.response_id)
        return self._lanes.active_in(wish.stream_id)

    def _turn_of(self, response_id: str) -> Turn | None:
        turns = (turn for turn in self.active if turn.answer is not None)
        return next((turn for turn in turns if turn.answer and turn.answer.response_id == response_id), None)

    # ------------------------------------------------------------------------------------------- steer

    def _steer(self, event: ClientEvent, now: int) -> list[Effect]:
        steer = event.body
        if not isinstance(steer, SteerResponse):
            message = event.error.message if event.error else ""
            return [_steer_failed(event, None, "invalid_input", message)]
        turn = self._turn_of(steer.previous_response_id)
        if not steer.input.is_of_user:
            return [_steer_failed(event, turn, "invalid_input", "input must be messages of the user")]
        if self._is_draining:
            return [_steer_failed(event, turn, "successor_creation_failed", shutting_down().message)]
        if turn is None or turn.answer is None or turn.request is None or turn.planned is None:
            return [_steer_failed(event, turn, *self._why_not_active(steer.previous_response_id))]
        request = attrs.evolve(
            turn.request, input=steer.input, previous_response_id=turn.answer.response_id, generate=True
        )
        try:
            # By its model, which need not be the server's first.
            planned = turn.planned.for_successor(request)
        except WireError as error:
            return [_steer_failed(event, turn, "successor_creation_failed", error.message)]
        self._lanes.put_first(Turn(stream_id=turn.stream_id, request=request, planned=planned))
        return self._steered(turn, turn.answer, now)

    def _why_not_active(self, response_id: str) -> tuple[str, str]:
        for store in (self._local, self._context.store):
            if store.get(response_id, self._owner) is not None:
                return "response_already_completed", "the response is over"
        return "response_not_found", "there is no such active response on this connection"

    def _steered(self, turn: Turn, answer: ResponseBuilder, now: int) -> list[Effect]:
        events = answer.begin()
        named = {"id": self._context.new_id("steer"), "previous_response_id": answer.response_id}
        events.append(answer.numbered({"type": "response.steer.accepted", "steer": named}))
        return [Stop(turn), *self.emit(turn, [*events, *answer.cancel(now, steered=True)], now)]

    # ------------------------------------------------------------------------- what comes of the turns

    def emit(self, turn: Turn, events: Sequence[Event], now: int) -> list[Effect]:
        """Send events of a turn; events of a turn that is no longer active are dropped."""
        if not self._lanes.is_active(turn):
            return []
        effects: list[Effect] = []
        assert turn.answer is not None, "an active turn has an answer"
        for event in events:
            turn.was_told = True
            effects.append(Send(_in_lane(event, turn.stream_id)))
            if event["type"] in TERMINAL_TYPES:
                self._store_response(turn.answer)
                effects += self._ended(turn, now)
        return effects

    def refuse(self, turn: Turn, error: WireError, now: int) -> list[Effect]:
        """End a turn with an error."""
        if not self._lanes.is_active(turn):
            return []
        # A reader that lost its place is no reason to fail the response, which others read.
        if turn.was_told and turn.answer is not None and not isinstance(error, EventsGone):
            return self.emit(turn, turn.answer.fail(error, now), now)
        return [Send(error.event(turn.stream_id)), *self._ended(turn, now)]

    def end_turn(self, turn: Turn, now: int) -> list[Effect]:
        """End a turn from which nothing comes any more, unless it has ended."""
        return self._ended(turn, now) if self._lanes.is_active(turn) else []

    # ------------------------------------------------------------------------------------ the way down

    def drain(self, now: int) -> list[Effect]:
        """Refuse new and queued turns; close the connection after the last active one."""
        self._is_draining = True
        effects: list[Effect] = []
        for turn in self._lanes.refuse_queued(shutting_down()):
            assert turn.error is not None, "it has just been refused"
            effects.append(Send(turn.error.event(turn.stream_id)))
        return effects + self._closed_if_idle()

    def end(self, now: int) -> list[Effect]:
        """End all turns and close the connection: the server ends."""
        effects = self.drain(now)
        for turn in self.active:
            goes_on = turn.was_told and turn.answer is not None and turn.answer.survives_restart
            effects += [Stop(turn), *(self._ended(turn, now) if goes_on else self._failed(turn, now))]
        return effects + self._closed_if_idle()

    def _failed(self, turn: Turn, now: int) -> list[Effect]:
        return self.refuse(turn, shutting_down(), now)

    def expire(self, now: int) -> list[Effect]:
        """Close the connection: it has reached its longest lifetime."""
        error = WireError(
            "This connection has reached its longest lifetime; open another one.",
            code="websocket_connection_limit_reached",
        )
        if self._is_closed:
            return []
        effects = [Send(error.event()), *self.drain(now)]
        for turn in self.active:
            effects += [Stop(turn), *self._failed(turn, now)]
        return effects + self._closed_if_idle()

    def abandon(self) -> list[Effect]:
        """Stop all turns without sending anything: the client does not read."""
        self._is_draining = self._is_closed = True
        self._lanes.clear()
        return [Stop(turn) for turn in self.active]

    def _closed_if_idle(self) -> list[Effect]:
        if self._lanes.num_active or self._lanes.num_queued or not self._is_draining or self._is_closed:
            return []
        self._is_closed = True
        return [Close(1001, "the server is going away")]

    # ------------------------------------------------------------------------------------------- turns

    def _enqueue(self, event: ClientEvent, now: int) -> list[Effect]:
        turn = Turn.of(event)
        if self._is_draining:
            turn.error = turn.error or shutting_down()
        try:
            self._lanes.add(turn)
        except WireError as error:
            return [Send(error.event(turn.stream_id))]
        return self._start_waiting(now)

    def _start_waiting(self, now: int) -> list[Effect]:
        effects: list[Effect] = []
        while (turn := self._lanes.take_next()) is not None:
            if turn.error is not None:  # never raised: its traceback would refer to the turn that keeps it
                effects.append(self._refused(turn, turn.error))
                continue
            try:
                self._prepare(turn, now)
            except WireError as error:
                effects.append(self._refused(turn, error))
            else:
                effects.append(Start(turn))
        return effects

    def _refused(self, turn: Turn, error: WireError) -> Send:
        """End a turn that cannot be started."""
        self._lanes.end(turn)
        return Send(error.event(turn.stream_id))

    def _prepare(self, turn: Turn, now: int) -> None:
        """Prepare a turn that may start now, one without an error.

        Raises:
            WireError: the turn cannot be started.
        """
        if turn.resume is not None:
            turn.answer = self._context.find_resumable(turn.resume.response_id, self._owner)
            if turn.answer is None:
                raise WireError(
                    "There is no response of that id that could be resumed.",
                    code="response_not_found",
                    status=404,
                    param="response_id",
                )
            return
        request, planned = turn.request, turn.planned
        assert request is not None and planned is not None, "a turn without an error has a request"
        if request.priority < 0:
            self._context.access.check_priority(self._owner, request.priority)
        stores = (self._local, self._context.store)
        before = previous_messages(request.previous_response_id, self._owner, *stores)
        request = turn.request = attrs.evolve(request, input=with_items(request.input, self._owner, *stores))
        turn.answer = self._context.answer(request, planned, before, now)
        turn.messages = prompt_of(request.instructions, turn.answer.chat)

    def _ended(self, turn: Turn, now: int) -> list[Effect]:
        self._lanes.end(turn)
        return self._start_waiting(now) + self._closed_if_idle()

    def _store_response(self, answer: ResponseBuilder) -> None:
        """Store a finished response, so that it can be continued."""
        if answer.can_be_continued:
            store = self._context.store if answer.request.store else self._local
            store.put(answer.stored(self._owner))


def shutting_down() -> WireError:
    """Return the error for requests during shutdown."""
    return WireError(
        "The server is shutting down.", code="service_unavailable", status=503, type="server_error"
    )


def _in_lane(event: Event, stream_id: str | None) -> Event:
    return event if stream_id is None else {**event, "stream_id": stream_id}


def _steer_failed(event: ClientEvent, turn: Turn | None, code: str, message: str) -> Send:
    failed: Event = {
        "type": "response.steer.failed",
        "sequence_number": 0,
        "error": {"type": "invalid_request_error", "code": code, "message": message},
        "steer": {name: "" if value is None else value for name, value in event.steer.items()},
    }
    return Send(_in_lane(failed, None if turn is None else turn.stream_id))
