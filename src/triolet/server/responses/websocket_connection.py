"""One WebSocket connection: a reader, a writer and a task per active turn, in one nursery. Leaving it aborts all turns.

    socket --messages--> reader --effects of the session--> turns (one task each), send queue
    engine --outputs---> turns  --events------------------> send queue --> writer --> socket

`protocol.responses.session` makes all decisions. Only the writer sends messages, and it is cancelled only together with
the connection, because half a frame cannot be taken back. A turn waits for room in the send queue before it takes its
next output from the engine: outputs that a slow client has not read yet are merged, and the engine never waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence

import trio
from trio_websocket import ConnectionClosed

from triolet.config.server import GatewayConfig
from triolet.protocol.errors import of_exception
from triolet.protocol.json import encode
from triolet.protocol.responses.client_events import ClientEvent, read_event
from triolet.protocol.responses.session import ResponsesContext, Session
from triolet.protocol.responses.turns import Close, Effect, Send, Start, Stop, Turn
from triolet.server.responses.generate import EmitEvents, WaitForRoom, json_limits
from triolet.server.responses.send_queue import SendQueue
from triolet.server.transport.parse_thread import LONG_INPUT_BYTES, parse_in_thread
from triolet.server.transport.websocket import PING, ServerSocket

FAILED, SLOW = 1011, 1013

RunTurn = Callable[[Turn, str | None, EmitEvents, WaitForRoom], Awaitable[None]]
"""Generates the response of a turn: (turn, owner, emit events, wait for room)."""

log = logging.getLogger("triolet.gateway")


class ResponsesConnection:
    """One client on a WebSocket, after the handshake.

    Args:
        socket: its `run` must run in another task.
        config: the limits.
        service: models, defaults, store and limits of the server.
        answer: generates the response of a turn.
        owner: name of the API key; None without keys.
    """

    def __init__(
        self,
        socket: ServerSocket,
        config: GatewayConfig,
        context: ResponsesContext,
        answer: RunTurn,
        owner: str | None,
    ) -> None:
        self._socket, self._config, self._context = socket, config, context
        self._run_response, self._owner = answer, owner
        self._session = Session(context, owner)
        self._send_queue = SendQueue()
        self._turns: dict[Turn, trio.CancelScope] = {}
        self._nursery: trio.Nursery | None = None

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
            log.exception("a WebSocket failed")
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
            event = (await self._parse(raw)).traced_by(self._socket.trace_headers)
            self._apply(self._session.receive(event, _now()))
            self._socket.message_taken()

    async def _parse(self, raw: str | bytes) -> ClientEvent:
        models, params_of = self._context.models, self._context.params
        limits = json_limits(self._config)
        if len(raw) < LONG_INPUT_BYTES:
            return read_event(raw, models, params_of, limits)
        return await parse_in_thread(lambda: read_event(raw, models, params_of, limits))

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
            log.info("a client sent nothing for %g s", 2 * config.ping_interval)
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
                await self._run_response(
                    turn,
                    self._owner,
                    lambda events: self._apply(self._session.emit(turn, events, _now())),
                    self._send_queue.wait_for_room,
                )
        except Exception as error:
            wire_error = of_exception(error)
            if wire_error.status >= 500:
                log.exception("a response failed")
            self._apply(self._session.refuse(turn, wire_error, _now()))
        finally:
            del self._turns[turn]


def _now() -> int:
    return int(time.time())
