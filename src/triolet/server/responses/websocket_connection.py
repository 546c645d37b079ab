"""One WebSocket: a reader, a writer, and a task for each active turn, in one nursery. Leaving it aborts everything.

    socket --messages--> reader --effects of the conversation--> turns (a task each), outbox
    engine --outputs---> turns  --events-----------------------> outbox --> writer --> socket

What is decided, `protocol.responses.session` decides. Only the writer sends messages, and it is cancelled only
together with the
connection: half a frame can not be taken back. A turn waits for room in the outbox before it takes its next output from
the engine, so what a slow client has not read yet is joined, and nothing here ever waits on the engine's side.
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
from triolet.server.responses.generate import EmitEvents, WaitForRoom
from triolet.server.responses.send_queue import SendQueue
from triolet.server.transport.websocket import PING, ServerSocket

LONG_MESSAGE_BYTES = 2**16  # takes a millisecond to read: the other connections do not wait for longer ones
FAILED, SLOW = 1011, 1013

AnswerTurn = Callable[[Turn, str | None, EmitEvents, WaitForRoom], Awaitable[None]]
"""Has a turn answered: told of its events by the first function, after the second has let it go on."""

log = logging.getLogger("triolet.gateway")


class ResponsesConnection:
    """A client on a WebSocket whose handshake is done.

    Args:
        socket: whose `run` runs beside this one's.
        config: the limits.
        service: what the conversation must know.
        answer: has a turn answered.
        owner: whose key it came with.
    """

    def __init__(
        self,
        socket: ServerSocket,
        config: GatewayConfig,
        context: ResponsesContext,
        answer: AnswerTurn,
        owner: str | None,
    ) -> None:
        self._socket, self._config, self._context = socket, config, context
        self._answer, self._owner = answer, owner
        self._conversation = Session(context, owner)
        self._send_queue = SendQueue()
        self._turns: dict[Turn, trio.CancelScope] = {}
        self._nursery: trio.Nursery | None = None

    async def run(self) -> None:
        """Serve until the client leaves, or has to."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._until_it_ends, self._write)
            nursery.start_soon(self._until_it_ends, self._watch)
            if self._config.connection_lifetime is not None:
                nursery.start_soon(self._until_it_ends, self._grow_old)
            await self._until_it_ends(self._read)

    def drain(self) -> None:
        """Take nothing new; the connection ends with the last of its active turns."""
        self._apply(self._conversation.drain(_now()))

    def end(self) -> None:
        """End every turn, say so, and end the connection."""
        self._apply(self._conversation.end(_now()))

    async def _until_it_ends(self, task: Callable[[], Awaitable[None]]) -> None:
        assert self._nursery is not None
        try:
            await task()
        except ConnectionClosed:
            if self._send_queue.close is not None and task == self._read:
                return  # the writer is saying goodbye
        except Exception:
            log.exception("a WebSocket failed")
            if task != self._write:
                self._give_up(FAILED, "internal error")
                return
        self._nursery.cancel_scope.cancel()

    def _give_up(self, code: int, reason: str) -> None:
        """Free what the client holds, at once; the writer says goodbye."""
        self._apply(self._conversation.abandon())
        self._send_queue.abort(code, reason)

    # ---------------------------------------------------------------------------------- reader, writer

    async def _read(self) -> None:
        while True:
            raw = await self._socket.get_message()
            await self._send_queue.wait_for_reply_room()
            event = (await self._understood(raw)).traced_by(self._socket.trace_headers)
            self._apply(self._conversation.receive(event, _now()))

    async def _understood(self, raw: str | bytes) -> ClientEvent:
        models, params_of = self._context.models, self._context.params
        if len(raw) < LONG_MESSAGE_BYTES:
            return read_event(raw, models, params_of)
        return await trio.to_thread.run_sync(read_event, raw, models, params_of)

    async def _write(self) -> None:
        send_queue = self._send_queue
        while texts := await send_queue.take():
            await self._socket.send_texts(texts)
            send_queue.sent(texts)
        assert send_queue.close is not None, "only the end leaves an outbox empty"
        await self._socket.close(*send_queue.close)

    async def _watch(self) -> None:
        """Give up a client that takes nothing, and one that gives no sign of life when it is asked for one."""
        config, socket = self._config, self._socket
        while trio.current_time() - socket.heard_s < 2 * config.ping_interval:
            with trio.move_on_after(config.ping_interval):
                await socket.stalled(config.write_timeout)
                self._give_up(SLOW, "the client does not read")
                break
            self._send_queue.put(PING)
        else:
            log.info("a client gave no sign of life for %g s", 2 * config.ping_interval)
            return
        await trio.sleep(config.write_timeout)  # it may read on, and then learn why

    async def _grow_old(self) -> None:
        assert self._config.connection_lifetime is not None
        await trio.sleep(self._config.connection_lifetime)
        self._apply(self._conversation.expire(_now()))
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
                    self._nursery.start_soon(self._take_turn, turn)
                case Stop(turn):
                    if scope := self._turns.get(turn):
                        scope.cancel()
                case Close(code, reason):
                    self._send_queue.put_close(code, reason)

    async def _take_turn(self, turn: Turn) -> None:
        try:
            with self._turns[turn]:
                await self._answer(
                    turn,
                    self._owner,
                    lambda events: self._apply(self._conversation.emit(turn, events, _now())),
                    self._send_queue.wait_for_room,
                )
        except Exception as error:
            told = of_exception(error)
            if told.status >= 500:
                log.exception("a response failed")
            self._apply(self._conversation.refuse(turn, told, _now()))
        finally:
            del self._turns[turn]


def _now() -> int:
    return int(time.time())
