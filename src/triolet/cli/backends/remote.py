"""Backend of the chat with a server, over the WebSocket of the Responses protocol.

Every reply has a connection of its own, and is asked for with the whole conversation, so nothing is lost with a
connection or a server between two replies. Within one, a response is resumable: after a lost connection the next one
asks for the events after the last that came. A server that does not know the response any more is asked again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import attrs
import trio

from triolet.cli.backends.base import ModelEntry, ReplyRequest, ReplySink
from triolet.cli.backends.events import GONE, RETRIED, TOO_LONG, RefusedByServer, ResponseReader
from triolet.cli.reply import Reply
from triolet.client.address import ServerAddress, ServerError
from triolet.client.http import HttpError, model_cards
from triolet.client.websocket import TOO_BIG, ClientWebSocket, ConnectionLost, open_responses_socket
from triolet.core.request.param_validation import ApiFamily
from triolet.core.request.params import SAMPLING_PARAMETERS, SamplingParams
from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.core.tools.answer import THINKING_SWITCHES

FIRST_DELAY_S: Final = 0.25
MAX_DELAY_S: Final = 4.0
GIVE_UP_AFTER_S: Final = 120.0  # without a connection: a large model loads in less
CANCEL_WITHIN_S: Final = 1.0
WIRE_NAMES: Final = {one.name: one.wire_name(ApiFamily.RESPONSES) for one in SAMPLING_PARAMETERS}


@attrs.define(eq=False)
class RemoteBackend:
    """Server that speaks the Responses protocol over WebSockets."""

    _address: ServerAddress
    model: str  # name of the model in requests
    max_model_len: int | None = None
    # Other servers, and models that are not loaded yet, do not tell it; most templates have this one.
    thinking_switch: str | None = THINKING_SWITCHES[0]
    # False leaves vendor events out: strict readers of the events do not know them.
    wants_vendor_events: bool = True

    @classmethod
    async def open(cls, address: ServerAddress, model: str | None = None) -> RemoteBackend:
        """Ask the server for its models.

        Args:
            address: of the server.
            model: name of one; by default the first that the server lists.
        Raises:
            ServerError: the server cannot be reached, refuses this client, or has no such model.
        """
        backend = cls(address, "")
        await backend._choose(model)
        return backend

    @property
    def facts(self) -> tuple[str, ...]:
        length = () if self.max_model_len is None else (f"{self.max_model_len} tokens",)
        return (self.model, self._address.websocket_url, *length)

    @property
    def defaults(self) -> SamplingParams:
        return SamplingParams(max_tokens=None)

    @property
    def knows_defaults(self) -> bool:
        return False

    async def models(self) -> list[ModelEntry]:
        return [
            ModelEntry(
                one["id"],
                f"{length} tokens" if (length := one.get("max_model_len")) else "",
                is_present=one["id"] == self.model,
            )
            for one in await model_cards(self._address)
        ]

    async def switch(self, model: str) -> None:  # a preset of a server is a model of its own
        await self._choose(model)

    async def _choose(self, model: str | None) -> None:
        cards = {one["id"]: one for one in await model_cards(self._address)}
        name = model or next(iter(cards), None)
        if name is None or name not in cards:
            raise ServerError(f"{self._address} has no model {name!r}; it has {', '.join(cards) or 'none'}")
        self.model, self.max_model_len = name, cards[name].get("max_model_len")
        self.thinking_switch = cards[name].get("thinking_switch", THINKING_SWITCHES[0])

    # ------------------------------------------------------------------------------------------ replies

    async def reply(self, request: ReplyRequest, reply: Reply, sink: ReplySink) -> None:
        reader = ResponseReader(reply, sink)
        lost_at: float | None = None
        delay_s = FIRST_DELAY_S
        while not reader.is_over:
            before = reader.last_number
            try:
                async with open_responses_socket(self._address) as socket:
                    await self._follow(socket, request, reader)
            except (ConnectionLost, HttpError) as error:
                if isinstance(error, ConnectionLost) and error.close_code == TOO_BIG:
                    raise RefusedByServer(
                        f"the server takes no message this long ({error})", TOO_LONG
                    ) from error
                if not error.is_transient:
                    raise
                if lost_at is None or reader.last_number > before:  # what came since then is progress
                    lost_at, delay_s = trio.current_time(), FIRST_DELAY_S
                    sink.notice(f"The connection was lost ({error}); trying to connect again.")
                if trio.current_time() - lost_at > GIVE_UP_AFTER_S:
                    raise ServerError(f"no connection to {self._address}: {error}") from error
                sink.waits_for(lambda: "connecting again")
                await trio.sleep(delay_s)
                delay_s = min(2 * delay_s, MAX_DELAY_S)

    async def _follow(self, socket: ClientWebSocket, request: ReplyRequest, reader: ResponseReader) -> None:
        """Read a response to its end over one connection, from its beginning or from where it was."""
        try:
            if reader.response_id is None:
                await _send(socket, self._create(request))
            else:
                resume = {"response_id": reader.response_id, "starting_after": reader.last_number}
                await _send(socket, {"type": "response.resume", **resume})
            while not reader.is_over:
                event = await _next_event(socket)
                try:
                    reader.take(event, trio.current_time())
                except RefusedByServer as error:
                    if error.code in RETRIED and not reader.is_over:
                        raise ConnectionLost(str(error)) from error
                    if error.code not in GONE or reader.response_id is None or reader.is_over:
                        raise
                    reader.sink.notice(
                        "The server no longer has this response; asking again with the whole conversation."
                    )
                    reader.start_over()
                    await _send(socket, self._create(request))
        except trio.Cancelled:
            # Closing alone would leave a resumable response running. Its end is read for the figures in it.
            with trio.move_on_after(CANCEL_WITHIN_S, shield=True):
                await _cancel(socket, reader)
            raise

    def _create(self, request: ReplyRequest) -> dict[str, Any]:
        """Return the event that asks for a response."""
        body: dict[str, Any] = {
            "type": "response.create",
            "model": self.model,
            "input": [{"type": "message", **message} for message in request.messages],
            "store": False,  # the next question comes with the whole conversation
            "resumable": True,
        }
        if self.wants_vendor_events:
            body["triolet_events"] = True
        for name, value in request.sampling.items():
            body[str(WIRE_NAMES[name])] = value
        if request.thinks is not None and self.thinking_switch is not None:
            body["chat_template_kwargs"] = {self.thinking_switch: request.thinks}
            if not request.thinks:
                body["reasoning"] = {"effort": "none"}
        if request.form is not None:
            body["text"] = {"format": _format(request.form)}
        return body


def _format(form: StructuredOutputsParams) -> Mapping[str, Any]:
    if form.json is None:
        return {"type": "json_object"}
    return {"type": "json_schema", "name": "answer", "schema": json.loads(form.json), "strict": True}


async def _send(socket: ClientWebSocket, event: Mapping[str, Any]) -> None:
    # Not as escapes, which make a text in another script three times as long, and too long for the server.
    text = json.dumps(event, ensure_ascii=False).encode(errors="replace").decode()
    try:
        await socket.send(text)
    except ConnectionLost as error:
        raise await socket.refusal() or error from error


async def _next_event(socket: ClientWebSocket) -> dict[str, Any]:
    try:
        event = json.loads(await socket.receive())
    except ValueError as error:
        raise ConnectionLost("the server sent something that is not JSON") from error
    if not isinstance(event, dict):
        raise ConnectionLost("the server sent something that is not an object")
    return event


async def _cancel(socket: ClientWebSocket, reader: ResponseReader) -> None:
    """End the response in the server; whatever goes wrong, the connection is closed next."""
    named = {} if reader.response_id is None else {"response_id": reader.response_id}
    try:
        await _send(socket, {"type": "response.cancel", **named})
        while not reader.is_over:
            reader.take(await _next_event(socket), trio.current_time())
    except (ServerError, RefusedByServer):
        return
