"""Clients of the gateway over streams in memory: one that is a program's, and one that sends any bytes it likes."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio
import trio.testing
import wsproto
from wsproto.connection import ConnectionType
from wsproto.events import AcceptConnection, CloseConnection, Message, RejectConnection, RejectData, Request

from tests.actors.harness import LetterTokenizer
from triolet.core.request.prompt import ChatPrompt
from triolet.core.request.tokenizer_interface import Tokenize, Tokenized
from triolet.errors import InvalidPrompt
from triolet.protocol.responses.output_items import Event
from triolet.server.responses.service import ResponsesService

PATH = "/v1/responses"
ENDINGS = ("error", "response.completed", "response.incomplete", "response.failed")


class ChatTokenizer(LetterTokenizer):
    """One token is one character, of all contents of a chat."""

    def tokenize(self, message: Tokenize) -> Tokenized:
        match message.prompt:
            case str(text):
                contents = [text]
            case ChatPrompt(messages=messages) | list(messages):
                contents = [said["content"] for said in messages]
            case _:
                raise InvalidPrompt("prompt must be a text or a chat here", field="prompt")
        text = "".join(contents)
        return Tokenized(text, tuple(ord(char) % 50 for char in text), ())


@attrs.define(eq=False)
class Client:
    """One end of a connection, spoken with wsproto alone."""

    stream: trio.abc.Stream
    protocol: wsproto.WSConnection = attrs.field(factory=lambda: wsproto.WSConnection(ConnectionType.CLIENT))
    events: list[Event] = attrs.field(factory=list)
    closed: CloseConnection | None = None
    rejection: RejectConnection | None = None
    body: bytes = b""
    _text: str = ""

    async def open(self, path: str = PATH, host: str = "localhost", **headers: str) -> bool:
        """Shake hands; whether the server agreed."""
        extra = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        await self.stream.send_all(self.protocol.send(Request(host=host, target=path, extra_headers=extra)))
        while True:
            for event in await self._receive():
                if isinstance(event, AcceptConnection):
                    return True
                if isinstance(event, RejectConnection):
                    self.rejection = event
                if isinstance(event, RejectData):
                    self.body += event.data
                    if event.body_finished:
                        return False
                if isinstance(event, CloseConnection):
                    return False

    async def _receive(self) -> list[Any]:
        data = await self.stream.receive_some(2**16)
        self.protocol.receive_data(bytes(data) or None)
        return list(self.protocol.events())

    async def send(self, message: dict[str, Any]) -> None:
        await self.send_text(json.dumps(message))

    async def send_text(self, text: str) -> None:
        await self.stream.send_all(self.protocol.send(wsproto.events.TextMessage(data=text)))

    async def create(self, **fields: Any) -> None:
        await self.send(
            {
                "type": "response.create",
                "model": "triolet-nano",
                "input": "Hi",
                "max_output_tokens": 8,
                **fields,
            }
        )

    async def next_events(self) -> list[Event]:
        """What comes next; nothing, if the connection has ended."""
        events: list[Event] = []
        while not events and self.closed is None:
            for event in await self._receive():
                if isinstance(event, Message):
                    self._text += event.data if isinstance(event.data, str) else event.data.decode()
                    if event.message_finished:
                        events.append(json.loads(self._text))
                        self._text = ""
                if isinstance(event, wsproto.events.Ping):
                    await self.stream.send_all(self.protocol.send(event.response()))
                if isinstance(event, CloseConnection):
                    self.closed = event
        self.events += events
        return events

    async def until_ended(self, num_endings: int = 1) -> list[Event]:
        """Read on until that many requests have ended, or the connection; everything that came."""
        events: list[Event] = []
        while sum(event["type"] in ENDINGS for event in events) < num_endings:
            if not (news := await self.next_events()):
                break
            events += news
        return events

    async def until_closed(self) -> int:
        """Read on to the end; the code of the close."""
        while self.closed is None:
            await self.next_events()
        return int(self.closed.code)


def text_of(events: list[Event], stream_id: str | None = None) -> str:
    """What the deltas of a lane say together."""
    return "".join(
        event["delta"]
        for event in events
        if event["type"] == "response.output_text.delta" and event.get("stream_id") == stream_id
    )


@asynccontextmanager
async def connected(gateway: ResponsesService, **headers: str) -> AsyncGenerator[Client]:
    """A client that was let in, over a stream of unlimited capacity; it is gone when the scope is left."""
    ours, theirs = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(gateway.serve_websocket, theirs)
        client = Client(ours)
        assert await client.open(**headers)
        yield client
        await trio.aclose_forcefully(ours)


@asynccontextmanager
async def connected_through(
    gateway: ResponsesService, pair: tuple[trio.abc.Stream, trio.abc.Stream]
) -> AsyncGenerator[Client]:
    """The same, over given streams."""
    ours, theirs = pair
    async with trio.open_nursery() as nursery:
        nursery.start_soon(gateway.serve_websocket, theirs)
        client = Client(ours)
        assert await client.open()
        yield client
        await trio.aclose_forcefully(ours)
