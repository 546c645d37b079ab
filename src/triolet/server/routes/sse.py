"""Server-sent events: headers once the request is admitted, then events, and comments as keep-alive."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from triolet.observability.prometheus import GatewayMetrics
from triolet.protocol.errors import WireError, of_exception
from triolet.protocol.generation import STREAM_END
from triolet.protocol.json.encoding import encode
from triolet.server.routes.app_context import context_of
from triolet.server.routes.errors import log_failure
from triolet.server.routes.request_body import cancel_on_disconnect
from triolet.server.transport.request_body import ClientDisconnected

KEEP_ALIVE_S = 15.0  # below the idle limit of every proxy
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would buffer the events
]


class EventSender:
    """Sender of events. An error before `start` is an HTTP error, afterwards an event."""

    def __init__(self, send: Send, metrics: GatewayMetrics) -> None:
        self._send, self._metrics = send, metrics
        self._nursery: trio.Nursery | None = None
        self._lock = trio.Lock()
        self._sent_s = trio.current_time()
        self.has_started = False

    def start_soon(self, task: Callable[[], Awaitable[None]]) -> None:
        """Start a task that sends further events until the stream of events ends."""
        assert self._nursery is not None, "events are written in the scope of `EventStream`"
        self._nursery.start_soon(task)

    async def start(self) -> None:
        """Send the headers."""
        self.has_started = True
        async with self._lock:
            await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            await self._send({"type": "http.response.body", "body": b"", "more_body": True})

    async def send(self, data: Mapping[str, Any], event: str | None = None) -> None:
        """Send an event."""
        name = f"event: {event}\n" if event is not None else ""
        await self._write(f"{name}data: {encode(data)}\n\n".encode())

    async def end(self) -> None:
        """Send the last event and end the response."""
        async with self._lock:
            await self._send({"type": "http.response.body", "body": STREAM_END, "more_body": False})
        self._metrics.note_sse_sent(len(STREAM_END))

    async def keep_alive(self) -> None:
        """Send comments while nothing else is sent."""
        while True:
            await trio.sleep_until(self._sent_s + KEEP_ALIVE_S)
            if self.has_started and trio.current_time() >= self._sent_s + KEEP_ALIVE_S:
                await self._write(b": keep-alive\n\n")
            elif not self.has_started:
                self._sent_s = trio.current_time()

    async def _write(self, text: bytes) -> None:
        self._metrics.num_sse_waiting_bytes += len(text)
        try:
            async with self._lock:
                await self._send({"type": "http.response.body", "body": text, "more_body": True})
                self._sent_s = trio.current_time()
        finally:
            self._metrics.num_sse_waiting_bytes -= len(text)
        self._metrics.note_sse_sent(len(text))


class EventStream(Response):
    """Response of server-sent events.

    Args:
        write: sends the events; what it raises before `EventSender.start` becomes an HTTP error.
        error_event: makes the data of the event that says what `write` raised later; by default `{"error": ...}`.
    """

    def __init__(
        self,
        write: Callable[[EventSender], Awaitable[None]],
        error_event: Callable[[WireError], Mapping[str, Any]] | None = None,
    ) -> None:
        super().__init__()
        self._write, self._error_event = write, error_event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = EventSender(send, context_of(Request(scope)).gateway_metrics)
        with suppress(ClientDisconnected):
            await cancel_on_disconnect(receive, lambda: self._run(events, scope))
            await events.end()  # inside: some servers report a disconnect as soon as the response has ended

    async def _run(self, events: EventSender, scope: Scope) -> None:
        async with trio.open_nursery() as nursery:
            events._nursery = nursery
            # Proxies close connections on which nothing comes for a minute or so.
            nursery.start_soon(events.keep_alive)
            failure = await self._try_to_write(events)
            async with events._lock:  # what another task sends is not cut
                nursery.cancel_scope.cancel()
        if failure is not None and not events.has_started:
            raise failure
        if failure is not None:
            error = of_exception(failure)
            # The client is not told what happened, so the log is.
            if error.status == 500:
                log_failure(Request(scope), failure)
            if self._error_event is None:
                await events.send({"error": error.streamed_body()})
            else:
                event = self._error_event(error)
                await events.send(event, event["type"])

    async def _try_to_write(self, events: EventSender) -> Exception | None:
        try:
            await self._write(events)
        except Exception as error:
            return error
        return None
