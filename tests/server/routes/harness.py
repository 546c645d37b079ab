"""The app over the fake engine, and a client that is no more than the ASGI calls themselves: all on virtual time."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio
from starlette.types import Message

from tests.actors.harness import FakeExecutor, LetterTokenizer, fake_engine
from triolet.config.server import GatewayConfig
from triolet.core.request.prompt import ChatPrompt, TextPair
from triolet.core.request.tokenizer_interface import Tokenize, Tokenized
from triolet.engine.engine import Engine
from triolet.server import create_app
from triolet.server.responses.service import ResponsesService, open_gateway

MODEL = "triolet-nano"
HELLO: Mapping[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "HELLO"}]}


class ChatTokenizer(LetterTokenizer):
    """Chats, too: their contents one after the other."""

    def tokenize(self, message: Tokenize) -> Tokenized:
        prompt = message.prompt
        if isinstance(prompt, ChatPrompt):
            prompt = prompt.messages
        if isinstance(prompt, TextPair):
            prompt = prompt.text + prompt.text_pair
        if not isinstance(prompt, str):
            prompt = "".join(str(one.get("content")) for one in prompt or ())
        return super().tokenize(attrs.evolve(message, prompt=prompt))


@attrs.frozen
class Answer:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> tuple[int, str, str | None]:
        """Status, code and field of an error; its sentence must be there."""
        error = self.json["error"]
        assert error.keys() == {"type", "code", "message", "param"}
        assert isinstance(error["message"], str) and error["message"]
        return self.status, error["code"], error["param"]

    @property
    def events(self) -> list[Any]:
        """The data of a stream, which must end as one does."""
        lines = [line for line in self.body.decode().splitlines() if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@attrs.define(eq=False)
class Call:
    """A request on its way. `leave` is what a client does that goes."""

    app: Any
    scope: dict[str, Any]
    body: bytes
    status: int = 0
    headers: dict[str, str] = attrs.field(factory=dict)
    received: bytearray = attrs.field(factory=bytearray)
    is_over: bool = False
    _was_asked: bool = False
    _has_left: trio.Event = attrs.field(factory=trio.Event)
    _news: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    async def run(self) -> Answer:
        await self.app(self.scope, self._receive, self._send)
        return Answer(self.status, self.headers, bytes(self.received))

    def leave(self) -> None:
        self._has_left.set()

    async def has_received(self, part: bytes) -> None:
        while part not in self.received:
            await self._news.park()

    async def _receive(self) -> Message:
        await trio.lowlevel.checkpoint()
        if not self._was_asked:
            self._was_asked = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self._has_left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await trio.lowlevel.checkpoint()
        assert not self.is_over, "nothing follows the end"
        if message["type"] == "http.response.start":
            assert self.status == 0, "a response begins once"
            self.status = message["status"]
            self.headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
        else:
            assert self.status, "a response begins with its head"
            self.received += message.get("body", b"")
            self.is_over = not message.get("more_body", False)
        self._news.unpark_all()


@attrs.frozen(eq=False)
class Scene:
    """A server without a port."""

    engine: Engine
    app: Any
    gateway: ResponsesService | None

    def call(
        self,
        method: str,
        path: str,
        payload: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> Call:
        path, _, query = path.partition("?")
        if body is None:
            body = b"" if payload is None else json.dumps(payload).encode()
        given = {name.lower(): value for name, value in (headers or {}).items()}
        fields = {"host": "localhost:8000", **given}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in fields.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
        }
        return Call(self.app, scope, body)

    async def post(self, path: str, payload: Any = None, **more: Any) -> Answer:
        return await self.call("POST", path, payload, **more).run()

    async def get(self, path: str, **more: Any) -> Answer:
        return await self.call("GET", path, **more).run()


@asynccontextmanager
async def serving(
    executor: FakeExecutor | None = None,
    config: GatewayConfig | None = None,
    *,
    with_gateway: bool = True,
    **fields: Any,
) -> AsyncGenerator[Scene]:
    """The app over a fake engine with these fields."""
    async with fake_engine(executor, ChatTokenizer(), **fields) as engine:
        if not with_gateway:
            yield Scene(engine, create_app(engine, config), None)
            return
        async with open_gateway(engine, config) as gateway:
            yield Scene(engine, create_app(engine, config, gateway=gateway), gateway)


def texts(events: Sequence[Any]) -> str:
    """What a stream of chat chunks says."""
    return "".join(choice["delta"].get("content") or "" for chunk in events for choice in chunk["choices"])
