"""Responses service: accept WebSockets and have the engine generate the responses.

    open_gateway               one nursery, for the resumable responses
      serve_websocket          one connection: handshake, access checks, then
        ServerSocket.run         reads the network
        ResponsesConnection.run  runs the session; leaving it aborts all responses that the client waits for

An exception in one connection is logged and ends only that connection: only Trio's own exceptions leave
`serve_websocket`.

A connection has a reader, a writer and a task per active turn, in one nursery. Leaving it aborts all turns.

    socket --messages--> reader --effects of the session--> turns (one task each), send queue
    engine --outputs---> turns  --events------------------> send queue --> writer --> socket

`protocol.responses.session` makes all decisions. Only the writer sends messages, and it is cancelled only together with
the connection, because half a frame cannot be taken back. A turn waits for room in the send queue before it takes its
next output from the engine: outputs that a slow client has not read yet are merged, and the engine never waits.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager

import attrs
import trio
from trio_websocket import ConnectionClosed

from triolet.config.server import GatewayConfig
from triolet.engine.engine import Engine
from triolet.engine.token_stream import TokenStream
from triolet.observability.prometheus import UNMATCHED, GatewayMetrics
from triolet.protocol.errors import WireError, of_exception
from triolet.protocol.json.encoding import encode
from triolet.protocol.responses.requests import ClientEvent, CreateResponse, SamplingPlan, read_event
from triolet.protocol.responses.response import ResponseBuilder
from triolet.protocol.responses.response_items import Message
from triolet.protocol.responses.session import (
    Close,
    Effect,
    ResponsesContext,
    Send,
    Session,
    Start,
    Stop,
    Turn,
    shutting_down,
)
from triolet.protocol.responses.snapshot import ReplaySkipper
from triolet.server.models.host import FurtherModel, ModelHost, ModelNotLoaded
from triolet.server.responses.generate import (
    ActivePerKey,
    ActiveResponses,
    EmitEvents,
    WaitForRoom,
    access_to,
    adapter_names,
    over_limit,
    responses_context,
)
from triolet.server.responses.resumable import MIN_SHARE, ResumableResponses
from triolet.server.transport.client_stream import ClientStream, client_address
from triolet.server.transport.ids import id_maker
from triolet.server.transport.input_limits import (
    ROUTED_BYTES,
    ROUTED_HEADER,
    input_budget,
    json_limits,
    socket_limits,
)
from triolet.server.transport.parse_thread import LONG_INPUT_BYTES, parse_in_thread
from triolet.server.transport.websocket import NO_CLOSE_FRAME, PING, Handshake, SendQueue, ServerSocket

FAILED, SLOW = 1011, 1013

PlanOf = Callable[[CreateResponse], SamplingPlan]
"""Returns the sampling parameters and the tool plan of a request."""

RunTurn = Callable[[Turn, str | None, EmitEvents, WaitForRoom], Awaitable[None]]
"""Generates the response of a turn: (turn, owner, emit events, wait for room)."""

logger = logging.getLogger("triolet.gateway")


class ResponsesConnection:
    """One client on a WebSocket, after the handshake.

    Args:
        socket: its `run` must run in another task.
        config: limits of the server.
        context: models, defaults and store of the server.
        answer: generates the response of a turn.
        owner: name of the API key; None without keys.
        on_error: told of status and code of each error that the client gets.
        models: the further models of the server, if it has any.
    """

    def __init__(
        self,
        socket: ServerSocket,
        config: GatewayConfig,
        context: ResponsesContext,
        answer: RunTurn,
        owner: str | None,
        on_error: Callable[[int, str], None] = lambda status, code: None,
        models: ModelHost | None = None,
    ) -> None:
        self._on_error, self._models = on_error, models
        self._socket, self._config, self._context = socket, config, context
        self._json_limits = json_limits(config, routed=socket.is_routed)
        self._run_response, self._owner = answer, owner
        self._session = Session(context, owner)
        self._send_queue = SendQueue()
        self._turns: dict[Turn, trio.CancelScope] = {}
        self._nursery: trio.Nursery | None = None

    @property
    def num_waiting_bytes(self) -> int:
        """Bytes of events that wait to be sent."""
        return self._send_queue.num_bytes

    async def run(self) -> None:
        """Serve until the connection ends."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._until_it_ends, self._write)
                nursery.start_soon(self._until_it_ends, self._watch)
                if self._config.connection_lifetime is not None:
                    nursery.start_soon(self._until_it_ends, self._expire)
                await self._until_it_ends(self._read)
        finally:
            self._session.close()

    def drain(self) -> None:
        """Refuse new turns; the connection closes after its last active turn."""
        self._apply(self._session.drain(_now()))

    def end(self) -> None:
        """Fail every active turn and close the connection."""
        self._apply(self._session.end(_now()))

    async def _until_it_ends(self, task: Callable[[], Awaitable[None]]) -> None:
        assert self._nursery is not None
        try:
            await task()
        except ConnectionClosed:
            if self._send_queue.close is not None and task == self._read:
                return  # the writer is sending the close frame
        except Exception:
            logger.exception("a WebSocket failed")
            if task != self._write:
                self._disconnect(FAILED, "internal error")
                return
        self._nursery.cancel_scope.cancel()

    def _disconnect(self, code: int, reason: str) -> None:
        """Stop all turns at once and send only the close frame."""
        self._apply(self._session.abandon())
        self._send_queue.abort(code, reason)

    # ---------------------------------------------------------------------------------- reader, writer

    async def _read(self) -> None:
        while True:
            raw = await self._socket.get_message()
            await self._send_queue.wait_for_reply_room()
            await self._socket.take_turn()
            event = (await self._parse(raw)).traced_by(self._socket.trace_headers)
            self._apply(self._session.receive(event, _now()))
            self._socket.message_taken()

    async def _parse(self, raw: str | bytes) -> ClientEvent:
        if self._models is None:
            return await self._read_event(raw, self._context.planned)
        try:
            return await self._read_event(raw, self._plan)
        except ModelNotLoaded as wanted:
            # Later messages of this connection wait for the load.
            return await self._read_event(raw, await self._plan_when_loaded(self._models, wanted.name))

    def _plan(self, request: CreateResponse) -> SamplingPlan:
        """Return the plan of a request for any model of the server."""
        if self._models is None or self._models.model_of(request.model) is None:
            return self._context.planned(request)
        return self._models.plan(request)

    async def _plan_when_loaded(self, models: ModelHost, name: str) -> PlanOf:
        """Load a model; return what plans its requests, or refuses them if it cannot be loaded."""
        try:
            with models.hold(name):
                return (await models.loaded(name)).context.planned
        except WireError as error:
            refusal = error

        def refused(request: CreateResponse) -> SamplingPlan:
            raise refusal

        return refused

    async def _read_event(self, raw: str | bytes, plan_of: PlanOf) -> ClientEvent:
        limits = self._json_limits
        if len(raw) < LONG_INPUT_BYTES:
            return read_event(raw, self._context.serves, plan_of, limits)
        # The engine is asked here, in the thread of its event loop.
        names = frozenset((*self._context.models, *self._context.adapter_names()))
        return await parse_in_thread(
            lambda: read_event(raw, names.__contains__, plan_of, limits), self._socket.client
        )

    async def _write(self) -> None:
        send_queue = self._send_queue
        while texts := await send_queue.take():
            await self._socket.send_texts(texts)
            send_queue.mark_sent(texts)
        assert send_queue.close is not None, "only a close frame leaves the queue empty"
        await self._socket.close(*send_queue.close)

    async def _watch(self) -> None:
        """Disconnect a client that does not read, or does not answer pings."""
        config, socket = self._config, self._socket
        while trio.current_time() - socket.heard_s < 2 * config.ping_interval:
            with trio.move_on_after(config.ping_interval):
                await socket.stalled(config.write_timeout)
                self._disconnect(SLOW, "the client does not read")
                break
            self._send_queue.put(PING)
        else:
            logger.info("a client sent nothing for %g s", 2 * config.ping_interval)
            return
        await trio.sleep(config.write_timeout)  # if the client reads on, it still gets the close frame

    async def _expire(self) -> None:
        assert self._config.connection_lifetime is not None
        await trio.sleep(self._config.connection_lifetime)
        self._apply(self._session.expire(_now()))
        await trio.sleep_forever()

    # ------------------------------------------------------------------------------------------- turns

    def _apply(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(event):
                    if event["type"] == "error":
                        self._on_error(event["status"], event["error"]["code"])
                    self._send_queue.put(encode(event))
                case Start(turn):
                    assert self._nursery is not None
                    self._turns[turn] = trio.CancelScope()
                    self._nursery.start_soon(self._run_turn, turn)
                case Stop(turn):
                    if scope := self._turns.get(turn):
                        scope.cancel()
                case Close(code, reason):
                    self._send_queue.put_close(code, reason)

    async def _run_turn(self, turn: Turn) -> None:
        try:
            with self._turns[turn]:
                # Many may begin in one pass, since the steps of the engine end many responses at the same time.
                await self._socket.take_turn()
                await self._run_response(
                    turn,
                    self._owner,
                    lambda events: self._apply(self._session.emit(turn, events, _now())),
                    self._send_queue.wait_for_room,
                )
        except Exception as error:
            wire_error = of_exception(error)
            if turn.was_told:  # the client gets an event of its response, and none of type `error`
                self._on_error(wire_error.status, wire_error.code)
            if wire_error.status >= 500:
                logger.exception("a response failed")
            self._apply(self._session.refuse(turn, wire_error, _now()))
        else:
            if turn.resume is not None:  # a client that had the last event already gets no other one
                self._apply(self._session.end_turn(turn, _now()))
        finally:
            del self._turns[turn]


def _now() -> int:
    return int(time.time())


PATH = "/v1/responses"


@attrs.frozen
class _Owner:
    """Result of a successful access check: the key's name, or None where there are no keys."""

    name: str | None


class ResponsesService:
    """State shared by all connections of one server; made by `open_gateway`.

    Args:
        engine: a running engine.
        nursery: for tasks that outlive a connection.
        models: further models, by name; they are loaded when a request asks for them.
    """

    def __init__(
        self,
        engine: Engine,
        config: GatewayConfig,
        nursery: trio.Nursery,
        models: Mapping[str, FurtherModel] | None = None,
    ) -> None:
        self.engine, self.config = engine, config
        self.access = access_to(engine, config)
        self.resumable = ResumableResponses(
            nursery,
            config.resume_grace,
            config.max_stored_responses,
            self._store_finished,
            # A response that is being generated cannot be evicted, so each key has a fixed share.
            max_per_owner=max(MIN_SHARE, config.max_stored_responses // max(1, len(self.access.api_keys))),
            max_bytes=config.max_resumable_bytes,
            max_bytes_per_owner=config.max_resumable_bytes_per_key if self.access.api_keys else None,
        )
        self.active = ActiveResponses()
        self.input_budget = input_budget(config)
        self.context = responses_context(engine, config, self.resumable.find)
        self.store = self.context.store
        self.models: ModelHost | None = None
        if models:
            self.models = ModelHost(models, config, self._context_of)
            self.context = self.models.added_to(self.context)
            nursery.start_soon(self.models.run, nursery)
        self._limits = socket_limits(config)
        self._connections: set[ResponsesConnection] = set()
        self._connections_by_key: Counter[str] = Counter()
        self.active_per_key = ActivePerKey(config.max_active_per_key)
        self._is_draining = False
        self.metrics = GatewayMetrics(
            config.metrics_prefix, lambda: len(self._connections), self._num_waiting_bytes
        )
        self._no_connections = trio.lowlevel.ParkingLot()

    def _context_of(self, engine: Engine, name: str) -> ResponsesContext:
        """Return what sessions need to know of a further model; the store is that of the server."""
        return attrs.evolve(
            self.context,
            models=(name,),
            adapter_names=lambda: adapter_names(engine),
            defaults=engine.default_sampling_params(),
            new_id=id_maker(engine.tool_parser),
            tool_parser=engine.tool_parser,
            reasoning_parser=engine.reasoning_parser,
            tokenizer=engine.tokenizer,
        )

    def _num_waiting_bytes(self) -> int:
        return sum(connection.num_waiting_bytes for connection in self._connections)

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    # -------------------------------------------------------------------------------- one connection

    async def serve_websocket(self, stream: trio.abc.Stream) -> None:
        """Serve a client whose upgrade request is the next thing to read; the stream is closed at the end."""
        if isinstance(stream, ClientStream):  # the connection itself times out slow readers
            stream.write_timeout = 2 * self.config.write_timeout + self.config.close_timeout
        try:
            socket = ServerSocket(stream, self._limits)
            handshake: Handshake | None = None
            with trio.move_on_after(self.config.handshake_timeout):
                handshake = await socket.handshake()
            if handshake is not None and (owner := await self._handshake(handshake)) is not None:
                if handshake.header(ROUTED_HEADER) is not None:
                    socket.allow_routed(ROUTED_BYTES)
                socket.use_budget(self.input_budget, owner.name or client_address(stream))
                await self._serve_session(socket, owner.name)
        except* (ConnectionClosed, trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        except* Exception:
            logger.exception("a WebSocket failed")
        finally:
            await trio.aclose_forcefully(stream)

    async def _handshake(self, handshake: Handshake) -> _Owner | None:
        """Accept or reject an upgrade request; None if rejected."""
        try:
            owner = self._admit(handshake)
        except WireError as error:
            self.metrics.note_error(error.status, error.code)
            self.metrics.note_response(PATH if handshake.path == PATH else UNMATCHED, error.status)
            await handshake.refuse(error)
            return None
        self.metrics.note_response(PATH, 101)
        await handshake.accept()
        return _Owner(owner)

    async def _serve_session(self, socket: ServerSocket, owner: str | None) -> None:
        """Run the session, then the closing handshake."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(socket.run)
            connection = ResponsesConnection(
                socket, self.config, self.context, self.answer, owner, self.metrics.note_error, self.models
            )
            with self._counted(connection, owner):
                await connection.run()
            with trio.move_on_after(self.config.close_timeout):
                await socket.ended.wait()
            nursery.cancel_scope.cancel()
        self.metrics.note_close(NO_CLOSE_FRAME if socket.closed is None else socket.closed.code)

    def _admit(self, handshake: Handshake) -> str | None:
        """Return the name of the key that opens the connection.

        Raises:
            WireError: the connection is refused.
        """
        host = handshake.header("host")
        self.access.check_host(host)
        self.access.check_origin(handshake.header("origin"), host)
        owner = self.access.owner(handshake.authorization)
        if handshake.path != PATH:
            raise WireError("There is no WebSocket here.", code="not_found", status=404)
        if self._is_draining:
            raise shutting_down()
        limit = self.config.max_connections_per_key
        if owner is not None and limit is not None and self._connections_by_key[owner] >= limit:
            raise over_limit(f"A key can have {limit} connections.")
        return owner

    @contextmanager
    def _counted(self, connection: ResponsesConnection, owner: str | None) -> Iterator[None]:
        self._connections.add(connection)
        if self._is_draining:  # began during the handshake
            connection.drain()
        with _counted_in(self._connections_by_key, owner):
            try:
                yield
            finally:
                self._connections.remove(connection)
                if not self._connections:
                    self._no_connections.unpark_all()

    # ------------------------------------------------------------------------------------- answering

    async def answer(
        self, turn: Turn, owner: str | None, emit: EmitEvents, wait_for_room: WaitForRoom
    ) -> None:
        """Generate the response of a turn.

        Args:
            turn: a started turn.
            owner: name of the key.
            emit: receives the events.
            wait_for_room: waits until more events may be emitted.
        Raises:
            Exception: the response cannot be generated, or not finished.
        """
        assert turn.answer is not None, "a started turn has a response"
        if turn.resume is None and not turn.answer.request.resumable:
            await self._generate(turn.answer, turn.messages, owner, emit, wait_for_room)
            return

        async def generate(answer: ResponseBuilder, emit: EmitEvents, wait_for_reader: WaitForRoom) -> None:
            await self._generate(answer, turn.messages, owner, emit, wait_for_reader)

        if turn.resume is None:
            self.resumable.begin(turn.answer, owner, generate)
        starting_after = -1 if turn.resume is None else turn.resume.starting_after
        await self.resumable.read(turn.answer, starting_after, emit, wait_for_room)

    async def _generate(
        self,
        answer: ResponseBuilder,
        messages: list[Message],
        owner: str | None,
        emit: EmitEvents,
        wait_for_room: WaitForRoom,
    ) -> None:
        with self.acquire_slot(owner, answer):
            if self.models is None or (hosted := self.models.model_of(answer.model)) is None:
                await self.active.generate(self.engine, answer, messages, owner, emit, wait_for_room)
                return
            with self.models.hold(hosted):  # again: it may have waited in its lane
                engine = (await self.models.loaded(hosted)).engine
                await self.active.generate(engine, answer, messages, owner, emit, wait_for_room)

    def continue_restored(
        self, answer: ResponseBuilder, owner: str | None, stream: TokenStream | None, rest: ReplaySkipper
    ) -> None:
        """Continue a resumable response of the previous server; see `snapshot_file`.

        Args:
            answer: the response as it was there.
            owner: name of the key that may read it.
            stream: of the engine; None for a finished response.
            rest: skips what the previous server has sent already.
        """

        async def generate(answer: ResponseBuilder, emit: EmitEvents, wait_for_reader: WaitForRoom) -> None:
            if stream is None:
                return
            try:
                with self.active_per_key.hold(owner, answer):  # admitted by the previous server already
                    await self.active.resume(self.engine, answer, owner, stream, rest, emit, wait_for_reader)
            except Exception as error:  # readers are told by an event, as for every other failure
                logger.exception("a response of the previous server failed")
                answer.fail(of_exception(error), int(time.time()))

        self.resumable.restore(answer, owner, generate)

    def _store_finished(self, answer: ResponseBuilder, owner: str | None) -> None:
        if answer.request.store and answer.can_be_continued:
            self.store.put(answer.stored(owner))

    @contextmanager
    def acquire_slot(self, owner: str | None, answer: ResponseBuilder | None = None) -> Iterator[None]:
        """Hold one of the active responses that a key may have.

        Args:
            owner: name of the key.
            answer: the response; its place is free as soon as it is over.
        Raises:
            WireError: the key has reached its limit.
        """
        self.metrics.note_request(owner)
        with self.active_per_key.acquire(owner, answer):
            yield

    # ---------------------------------------------------------------------------------- the way down

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    async def drain(self, deadline: float) -> None:
        """Refuse new work, let active responses finish, and end every connection.

        Args:
            deadline: absolute `trio.current_time()`; responses still active then end with `response.failed`.
        """
        self._is_draining = True
        for connection in tuple(self._connections):
            connection.drain()
        with trio.move_on_at(deadline):
            await self._wait_for_connections()
        for connection in tuple(self._connections):
            connection.end()
        with trio.move_on_after(self.config.close_timeout):
            await self._wait_for_connections()

    async def _wait_for_connections(self) -> None:
        while self._connections:
            await self._no_connections.park()


@asynccontextmanager
async def open_gateway(
    engine: Engine,
    config: GatewayConfig | None = None,
    models: Mapping[str, FurtherModel] | None = None,
) -> AsyncGenerator[ResponsesService]:
    """Open the responses service of an engine; its tasks are cancelled when the scope ends.

    Args:
        engine: a running engine.
        config: the limits; default: `GatewayConfig()`.
        models: further models, by name; they are loaded when a request asks for them.
    """
    async with trio.open_nursery() as nursery:
        yield ResponsesService(engine, config or GatewayConfig(), nursery, models)
        nursery.cancel_scope.cancel()


@contextmanager
def _counted_in(counter: Counter[str], owner: str | None) -> Iterator[None]:
    if owner is None:
        yield
        return
    counter[owner] += 1
    try:
        yield
    finally:
        counter[owner] -= 1
        if not counter[owner]:
            del counter[owner]
