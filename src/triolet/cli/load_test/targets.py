"""One request to a server under test, over HTTP or a WebSocket, and the times of its answer's pieces."""

from __future__ import annotations

import enum
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Final

import attrs
import trio

from triolet.client.address import ServerAddress, ServerError
from triolet.client.http import request
from triolet.client.websocket import open_responses_socket

ENDINGS: Final = ("response.completed", "response.incomplete", "response.failed")
DELTAS: Final = ("response.output_text.delta", "response.reasoning_text.delta")


class Route(enum.Enum):
    """Way of asking."""

    CHAT = "chat"  # POST /chat/completions
    COMPLETIONS = "completions"  # POST /completions
    RESPONSES = "responses"  # POST /responses
    WEBSOCKET = "websocket"  # the Responses protocol on a WebSocket


@attrs.define
class Timeline:
    """What a client saw of one request; times in seconds of `trio.current_time`."""

    due_s: float  # when it was to be sent, whether or not the client was late
    sent_s: float = 0.0
    piece_s: list[float] = attrs.field(factory=list)  # arrival of each piece of the answer
    end_s: float | None = None  # None if it failed
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None

    def arrived(self, now: float) -> None:
        """Note a piece of the answer."""
        self.piece_s.append(now)

    def count(self, usage: Mapping[str, Any] | None) -> None:
        """Take the numbers of tokens from the server's usage, under the names of either API."""
        if usage:
            self.num_prompt_tokens = usage.get("prompt_tokens") or usage.get("input_tokens") or 0
            self.num_output_tokens = usage.get("completion_tokens") or usage.get("output_tokens") or 0


@attrs.frozen(kw_only=True)
class ServerTarget:
    """Server and route under test."""

    url: str  # as the user gave it
    address: ServerAddress
    route: Route
    model: str
    output_len: int  # tokens of each answer
    ignores_eos: bool = (
        True  # asks for answers of exactly that length: a field of vLLM's, SGLang's and triolet's
    )

    async def ask(self, prompt: str, timeline: Timeline) -> None:
        """Send one request and note the arrival of its answer.

        Raises:
            ServerError: the server cannot be reached, or does not answer in full.
        """
        over = self._over_websocket if self.route is Route.WEBSOCKET else self._over_http
        is_over = False
        async with aclosing(over(prompt)) as events:
            async for event in events:
                is_over |= self._note(event, timeline)
        if not is_over:
            raise ServerError("the answer ended before its end")
        timeline.end_s = trio.current_time()
        # Without usage every piece counts as a token.
        timeline.num_output_tokens = timeline.num_output_tokens or len(timeline.piece_s)

    async def _over_http(self, prompt: str) -> AsyncGenerator[Any]:
        async with request(self.address, PATHS[self.route], self._body(prompt)) as answer:
            while (data := await answer.next_data()) is not None:
                yield _parsed(data)
        # The closing `[DONE]`, or the end of a stream that has none.
        yield {"type": "done"}

    async def _over_websocket(self, prompt: str) -> AsyncGenerator[Any]:
        async with open_responses_socket(self.address) as socket:
            await socket.send(json.dumps({"type": "response.create", **self._body(prompt)}))
            while True:
                event = _parsed(await socket.receive())
                yield event
                if event.get("type") in ENDINGS:
                    return

    def _body(self, prompt: str) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "temperature": 0}
        if self.ignores_eos:
            body["ignore_eos"] = True
        if self.route in (Route.RESPONSES, Route.WEBSOCKET):
            body |= {"input": prompt, "max_output_tokens": self.output_len, "store": False}
        else:
            body |= {"max_tokens": self.output_len, "stream_options": {"include_usage": True}}
            is_chat = self.route is Route.CHAT
            body |= {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}
        return body if self.route is Route.WEBSOCKET else {**body, "stream": True}

    def _note(self, event: Mapping[str, Any], timeline: Timeline) -> bool:
        """Note one event; return True for the last one."""
        now, kind = trio.current_time(), event.get("type")
        if (error := event.get("error")) or kind in ("error", "response.failed"):
            error = error or (event.get("response") or {}).get("error") or event
            raise ServerError(str(error.get("message", error) if isinstance(error, Mapping) else error))
        if kind in DELTAS:
            timeline.arrived(now)
        elif kind in ENDINGS:
            timeline.count(event["response"].get("usage"))
            return True
        elif kind == "done":
            return self.route is not Route.RESPONSES
        elif kind is None:
            timeline.count(event.get("usage"))
            if any(_text_of(choice) for choice in event.get("choices") or ()):
                timeline.arrived(now)
        return False


PATHS: Final = {
    Route.CHAT: "/chat/completions",
    Route.COMPLETIONS: "/completions",
    Route.RESPONSES: "/responses",
}


def _text_of(choice: Mapping[str, Any]) -> str | None:
    delta = choice.get("delta") or {}
    return (
        choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
    )


def _parsed(data: str) -> Any:
    try:
        event = json.loads(data)
    except ValueError as error:
        raise ServerError("the server sent something that is not JSON") from error
    if not isinstance(event, dict):
        raise ServerError("the server sent something that is not an object")
    return event
