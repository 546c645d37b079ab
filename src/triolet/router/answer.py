"""Answer of a router to one request over HTTP, which one engine begins and others may go on with."""

from __future__ import annotations

import json
from typing import Final

import attrs
import h11
import trio

from triolet.protocol.errors import WireError
from triolet.protocol.generation import STREAM_END
from triolet.protocol.responses.session import shutting_down
from triolet.router.chunks import ChunkContinuation, SentChunks
from triolet.router.client_request import ClientRequest
from triolet.router.client_response import Send
from triolet.router.continuation import Continuation, Diverged, SentEvents
from triolet.router.engines import RoutedEngine
from triolet.router.homes import Home, Homes
from triolet.router.refusals import Refused, is_cut_off

CHUNKED: Final = ("/v1/chat/completions", "/v1/completions")
# Headers that are about one connection, and not about the request or the answer.
HOP_HEADERS: Final = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"transfer-encoding",
        b"te",
        b"upgrade",
        b"host",
        b"content-length",
        b"expect",
        b"date",  # the listener's own comes instead
    )
)


@attrs.define(eq=False)
class Answer:
    """What a client has been sent of an answer.

    Args:
        request: that is answered.
        send: to the client.
        follower: of its events; None if it is no stream, or its events are not known.
        homes: of all clients' responses.
        home: of the response that the request is about; None if any engine will do.
    """

    request: ClientRequest
    send: Send
    follower: StreamFollower | None
    _homes: Homes
    home: Home | None = None
    has_begun: bool = False
    _engine: RoutedEngine | None = None  # the present one
    _noted: str | None = None  # id of the response at the engine that is noted as its home
    _whole: bytearray = attrs.field(factory=bytearray)

    @classmethod
    def to(cls, request: ClientRequest, send: Send, homes: Homes, home: Home | None) -> Answer:
        """Return the answer to a request, of which nothing was sent."""
        follower = None
        if request.is_stream and (request.path in CHUNKED or request.path == "/v1/responses"):
            may_move = home is None and not request.is_bound
            follower = StreamFollower(has_chunks=request.path in CHUNKED, may_move=may_move)
        return cls(request, send, follower, homes, home)

    @property
    def may_move(self) -> bool:
        """True if another engine can go on with it."""
        return not self.has_begun or (self.follower is not None and not self.request.is_bound)

    def begin_again(self, engine: RoutedEngine) -> None:
        """Expect the answer of an engine from its beginning."""
        self._engine = engine
        self._whole.clear()
        if self.follower is not None:
            self.follower.begin_again()

    async def add(self, head: h11.Response, piece: bytes) -> None:
        """Pass a piece of the answer on, or keep it where only a whole answer is of use.

        Raises:
            Diverged: the rest is another answer than that which was begun.
            Refused: the engine shuts down, and does not make the rest.
        """
        if self.follower is not None and head.status_code == 200:
            data = self.follower.follow(piece)
            if (ids := self.follower.ids) is not None:
                self._note(*ids)
            if data:
                await self._begin(head)
                await self.send({"type": "http.response.body", "body": data, "more_body": True})
            self.follower.check()
        elif head.status_code != 200 or not self._is_collected:
            await self._begin(head)
            await self.send({"type": "http.response.body", "body": piece, "more_body": True})
        else:
            self._whole += piece

    async def end(self, head: h11.Response) -> None:
        """Send the rest."""
        body = bytes(self._whole)
        if self.request.path == "/v1/responses" and body:
            response_id = json.loads(body)["id"]
            self._note(response_id, response_id)  # first: the client may ask for it at once
        if self.home is not None and self.home.is_moved and self.request.response_id is not None:
            body = body.replace(self.home.response_id.encode(), self.request.response_id.encode())
        await self._begin(head)
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    @property
    def _is_collected(self) -> bool:
        """True if the answer is sent when it is whole."""
        if self.home is not None and self.home.is_moved:
            return not self.request.is_stream
        return self.request.method == "POST" and not self.request.is_stream

    def _note(self, response_id: str, engine_id: str) -> None:
        """Note where the response is, with its id there."""
        if engine_id == self._noted:
            return
        assert self._engine is not None
        self._noted = engine_id
        self._homes.note(response_id, Home(self._engine, engine_id, is_moved=engine_id != response_id))

    async def fail(self, error: WireError) -> None:
        """End the answer with an error, as far as its protocol allows.

        Raises:
            WireError: the error, where nothing was sent.
        """
        if not self.has_begun:
            raise error
        if self.follower is not None:
            body = self.follower.failure(error)
            await self.send({"type": "http.response.body", "body": body, "more_body": False})
            return
        raise trio.BrokenResourceError("the engine ended amid its answer")

    async def _begin(self, head: h11.Response) -> None:
        if self.has_begun:
            return
        self.has_begun = True
        headers = [(name, value) for name, value in head.headers if name.lower() not in HOP_HEADERS]
        await self.send({"type": "http.response.start", "status": head.status_code, "headers": headers})


class StreamFollower:
    """Server-sent events of one answer, from one engine or from several.

    Args:
        has_chunks: whether they are chunks, and not events of a response.
        may_move: whether another engine may go on with them.
    """

    def __init__(self, *, has_chunks: bool, may_move: bool = True) -> None:
        self._has_chunks, self._may_move = has_chunks, may_move
        self._events, self._chunks = SentEvents(), SentChunks()
        self._continuation: Continuation | ChunkContinuation | None = None
        self._rest = bytearray()  # of an event that is not whole
        self._has_sent = False
        self._stop: Exception | None = None  # why nothing more of this engine follows

    def begin_again(self) -> None:
        """Expect the answer of another engine from its beginning."""
        self._rest.clear()
        self._stop = None
        if self._has_sent:
            self._continuation = (
                ChunkContinuation(self._chunks) if self._has_chunks else Continuation(self._events)
            )

    def follow(self, piece: bytes) -> bytes:
        """Return what the client is to be sent for a piece of an engine's answer; see also `check`."""
        # A long event comes in many pieces: each is looked at once, and the whole when its end is there.
        seen = max(len(self._rest) - 1, 0)
        self._rest += piece
        if self._rest.find(b"\n\n", seen) < 0:
            return b""
        *blocks, rest = bytes(self._rest).split(b"\n\n")
        self._rest = bytearray(rest)
        followed = []
        try:
            for block in blocks:
                followed.append(self._block(block))
        except (Diverged, Refused) as stop:  # what came before it is the client's
            self._stop = stop
        return b"".join(followed)

    def check(self) -> None:
        """Check that more of this engine's answer may follow what has come of it.

        Raises:
            Diverged: the rest is another answer than that which was begun.
            Refused: the engine shuts down, and does not make the rest.
        """
        if self._stop is not None:
            raise self._stop

    def _block(self, block: bytes) -> bytes:
        lines = block.split(b"\n")
        data = b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:"))
        if not data or block + b"\n\n" == STREAM_END:
            return block + b"\n\n"
        event = json.loads(data)
        if self._may_move and is_cut_off(event):
            raise Refused(shutting_down())
        if self._continuation is not None:
            followed = self._continuation.follow(event)
            if followed is None:
                return b""
            event = followed
            others = [line for line in lines if not line.startswith(b"data:")]
            block = b"\n".join([*others, b"data: " + json.dumps(event).encode()])
        self._has_sent = True
        if self._has_chunks:
            self._chunks.note(event)
        else:
            self._events.note(event)
        return block + b"\n\n"

    @property
    def ids(self) -> tuple[str, str] | None:
        """Id of the response for the client, and that of the present engine; None before the engine has told it."""
        if self._events.response is None:
            return None
        known: str = self._events.response["id"]
        if not isinstance(self._continuation, Continuation):
            return known, known
        new_id = self._continuation.response_id
        return None if new_id is None else (known, new_id)

    def failure(self, error: WireError) -> bytes:
        """Return what ends the stream with an error."""
        if self._has_chunks or self._events.response is None:
            last = f"data: {json.dumps({'error': error.streamed_body()})}\n\n"
        else:
            event = self._events.failure("server_error", error.message)
            last = f"event: response.failed\ndata: {json.dumps(event)}\n\n"
        return last.encode() + STREAM_END
