"""The gateway: lets WebSockets in, and has their requests answered by the engine.

    open_gateway            one nursery, for the resumable answers
      serve_websocket       a connection: handshake, who may enter, then ...
        ServerSocket.run      ... reads the network
        Connection.run        ... and holds the conversation; leaving it aborts all that the client had asked for

What goes wrong with one connection is logged and ends there: only Trio's own exceptions leave `serve_websocket`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import attrs
import trio
from trio_websocket import ConnectionClosed

from triolet.config.server import GatewayConfig
from triolet.engine.engine import Engine
from triolet.engine.token_stream import TokenStream
from triolet.protocol.errors import WireError, of_exception
from triolet.protocol.json import encode
from triolet.protocol.responses.input_items import Message
from triolet.protocol.responses.response import ResponseBuilder
from triolet.protocol.responses.session import shutting_down
from triolet.protocol.responses.snapshot import ReplaySkipper
from triolet.protocol.responses.turns import Turn
from triolet.server.responses.generate import (
    ActiveResponses,
    EmitEvents,
    WaitForRoom,
    access_to,
    responses_context,
)
from triolet.server.responses.resumable import ResumableResponses
from triolet.server.responses.websocket_connection import ResponsesConnection
from triolet.server.transport.client_stream import ClientStream
from triolet.server.transport.websocket import Handshake, ServerSocket, SocketLimits

PATH = "/v1/responses"

log = logging.getLogger("triolet.gateway")


@attrs.frozen
class _Owner:
    """Who was let in: with a key, or, where there are no keys, without a name."""

    name: str | None


class ResponsesService:
    """What the connections of one server share; `open_gateway` makes it.

    Args:
        engine: answers.
        config: the limits.
        nursery: for what outlives a connection.
    """

    def __init__(self, engine: Engine, config: GatewayConfig, nursery: trio.Nursery) -> None:
        self.engine, self.config = engine, config
        self.access = access_to(engine, config)
        self.resumable = ResumableResponses(
            nursery, config.resume_grace, config.max_stored_responses, self._remember
        )
        self.active = ActiveResponses()
        self.context = responses_context(engine, config, self.resumable.find)
        self.store = self.context.store
        self._limits = SocketLimits(
            max_message_bytes=config.max_message_bytes,
            max_message_fragments=config.max_message_fragments,
            max_pings_per_second=config.max_pings_per_second,
            close_timeout=config.close_timeout,
        )
        self._connections: set[ResponsesConnection] = set()
        self._connections_by_key: Counter[str] = Counter()
        self._active_by_key: Counter[str] = Counter()
        self._is_draining = False
        self._all_gone = trio.lowlevel.ParkingLot()

    @property
    def num_connections(self) -> int:
        """WebSockets that are open now."""
        return len(self._connections)

    # -------------------------------------------------------------------------------- one connection

    async def serve_websocket(self, stream: trio.abc.Stream) -> None:
        """Serve a client whose request for a WebSocket is the next thing to be read; the stream is closed at the end.

        Args:
            stream: the connection.
        """
        if isinstance(stream, ClientStream):  # the patience for a slow reader is the connection's
            stream.write_timeout = 2 * self.config.write_timeout + self.config.close_timeout
        try:
            socket = ServerSocket(stream, self._limits)
            handshake: Handshake | None = None
            with trio.move_on_after(self.config.handshake_timeout):
                handshake = await socket.handshake()
            if handshake is not None and (owner := await self._admit_waiting(handshake)) is not None:
                await self._hold(socket, owner.name)
        except* (ConnectionClosed, trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        except* Exception:
            log.exception("a WebSocket failed")
        finally:
            await trio.aclose_forcefully(stream)

    async def _admit_waiting(self, handshake: Handshake) -> _Owner | None:
        """Answer a request for a WebSocket; None if it was refused."""
        try:
            owner = self._admit(handshake)
        except WireError as error:
            headers = {"Content-Type": "application/json"}
            if error.status in (429, 503):
                headers["Retry-After"] = "1"
            await handshake.reject(error.status, headers, encode({"error": error.body()}).encode())
            return None
        await handshake.accept()
        return _Owner(owner)

    async def _hold(self, socket: ServerSocket, owner: str | None) -> None:
        """Hold the conversation, and then the goodbye."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(socket.run)
            connection = ResponsesConnection(socket, self.config, self.context, self.answer, owner)
            with self._counted(connection, owner):
                await connection.run()
            with trio.move_on_after(self.config.close_timeout):
                await socket.ended.wait()
            nursery.cancel_scope.cancel()

    def _admit(self, handshake: Handshake) -> str | None:
        """Whose connection this will be.

        Raises:
            WireError: it may not be opened.
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
            raise _too_many(f"A key can have {limit} connections.")
        return owner

    @contextmanager
    def _counted(self, connection: ResponsesConnection, owner: str | None) -> Iterator[None]:
        self._connections.add(connection)
        if self._is_draining:  # since it was let in
            connection.drain()
        with _counting(self._connections_by_key, owner):
            try:
                yield
            finally:
                self._connections.remove(connection)
                if not self._connections:
                    self._all_gone.unpark_all()

    # ------------------------------------------------------------------------------------- answering

    async def answer(
        self, turn: Turn, owner: str | None, emit: EmitEvents, wait_for_room: WaitForRoom
    ) -> None:
        """Have the engine answer a turn of a conversation.

        Args:
            turn: that was started.
            owner: whose.
            tell: gets the events.
            room: waits until it should get more.
        Raises:
            Exception: there will be no answer, or no more of it.
        """
        assert turn.answer is not None, "a turn that was started has an answer"
        if turn.resume is None and not turn.answer.request.resumable:
            await self._make(turn.answer, turn.messages, owner, emit, wait_for_room)
            return

        async def make(
            answer: ResponseBuilder, wanted: Callable[[], Awaitable[None]], grown: Callable[[], None]
        ) -> None:
            await self._make(answer, turn.messages, owner, lambda events: grown(), wanted)

        if turn.resume is None:
            self.resumable.begin(turn.answer, owner, make)
        starting_after = -1 if turn.resume is None else turn.resume.starting_after
        await self.resumable.read(turn.answer, starting_after, emit, wait_for_room)

    async def _make(
        self,
        answer: ResponseBuilder,
        messages: list[Message],
        owner: str | None,
        emit: EmitEvents,
        wait_for_room: WaitForRoom,
    ) -> None:
        with self.place(owner):
            await self.active.make(self.engine, answer, messages, owner, emit, wait_for_room)

    def resume_generation(
        self, answer: ResponseBuilder, owner: str | None, stream: TokenStream | None, rest: ReplaySkipper
    ) -> None:
        """Go on with a resumable response that the last server has begun; see `triolet.server.responses.snapshot_file`.

        Args:
            answer: as it was there.
            owner: who may read it.
            stream: of the engine; None if it is over.
            rest: what is new in that.
        """

        async def make(
            answer: ResponseBuilder, wanted: Callable[[], Awaitable[None]], grown: Callable[[], None]
        ) -> None:
            if stream is None:
                return
            try:
                with _counting(self._active_by_key, owner):  # it has its place since the last server
                    await self.active.resume_generation(
                        answer, owner, stream, rest, lambda events: grown(), wanted
                    )
            except Exception as error:  # its readers know of it: this is an ending like others
                log.exception("a response of the last server failed")
                answer.fail(of_exception(error), int(time.time()))

        self.resumable.take_up(answer, owner, make)

    def _remember(self, answer: ResponseBuilder, owner: str | None) -> None:
        if answer.request.store and answer.can_be_continued:
            self.store.put(answer.stored(owner))

    @contextmanager
    def place(self, owner: str | None) -> Iterator[None]:
        """Hold one of the responses that a key may have at the same time.

        Raises:
            WireError: it has as many as it may.
        """
        limit = self.config.max_active_per_key
        if owner is not None and limit is not None and self._active_by_key[owner] >= limit:
            raise _too_many(f"A key can have {limit} responses at the same time.")
        with _counting(self._active_by_key, owner):
            yield

    # ---------------------------------------------------------------------------------- the way down

    async def drain(self, deadline: float) -> None:
        """Take nothing new, let active responses finish, and end every connection.

        Args:
            deadline: absolute `trio.current_time()`; what has not finished by then ends with `response.failed`.
        """
        self._is_draining = True
        for connection in tuple(self._connections):
            connection.drain()
        with trio.move_on_at(deadline):
            await self._wait_until_all_are_gone()
        for connection in tuple(self._connections):
            connection.end()
        with trio.move_on_after(self.config.close_timeout):
            await self._wait_until_all_are_gone()

    async def _wait_until_all_are_gone(self) -> None:
        while self._connections:
            await self._all_gone.park()


@asynccontextmanager
async def open_gateway(
    engine: Engine, config: GatewayConfig | None = None
) -> AsyncGenerator[ResponsesService]:
    """A gateway to an engine; what its connections have running ends with the scope.

    Args:
        engine: answers.
        config: the limits; by default their defaults.
    """
    async with trio.open_nursery() as nursery:
        yield ResponsesService(engine, config or GatewayConfig(), nursery)
        nursery.cancel_scope.cancel()


def _too_many(sentence: str) -> WireError:
    return WireError(
        sentence, code="rate_limit_exceeded", status=429, type="rate_limit_error", retry_after_s=1.0
    )


@contextmanager
def _counting(counter: Counter[str], owner: str | None) -> Iterator[None]:
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
