"""Response of a router to one HTTP request of a client, and what the metrics have of it."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final

from triolet.observability.prometheus import GatewayMetrics

Send = Callable[[dict[str, Any]], Awaitable[None]]

CLIENT_LEFT: Final = 499  # nginx' status for a client that left before it was answered


class ClientResponse:
    """One response.

    Args:
        send: of the ASGI request.
        headers: that it has in place of those of the same names, their names in small letters.
        metrics: count what is sent.
    """

    def __init__(self, send: Send, headers: Mapping[str, str], metrics: GatewayMetrics) -> None:
        self._send, self._headers, self._metrics = send, headers, metrics
        self._is_event_stream = False
        self.status = CLIENT_LEFT

    async def send(self, message: dict[str, Any]) -> None:
        """Send a message of the ASGI response."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            given = {name.lower(): value for name, value in message["headers"]}
            self._is_event_stream = given.get(b"content-type", b"").startswith(b"text/event-stream")
            kept = [
                (name, value)
                for name, value in message["headers"]
                if name.lower().decode("latin-1") not in self._headers
            ]
            message = {**message, "headers": [*kept, *_encoded(self._headers.items())]}
        num_bytes = len(message.get("body", b"")) if self._is_event_stream else 0
        self._metrics.num_sse_waiting_bytes += num_bytes
        try:
            await self._send(message)
        finally:
            self._metrics.num_sse_waiting_bytes -= num_bytes
        if num_bytes:
            self._metrics.note_sse_sent(num_bytes)

    async def send_json(
        self, status: int, value: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> None:
        """Send a whole response with JSON."""
        all_headers = {"content-type": "application/json", **(headers or {})}
        await self.send_whole(status, all_headers, json.dumps(value).encode())

    async def send_whole(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Send a whole response."""
        length = {} if status == 204 else {"content-length": str(len(body))}
        encoded = _encoded({**headers, **length}.items())
        await self.send({"type": "http.response.start", "status": status, "headers": encoded})
        await self.send({"type": "http.response.body", "body": body, "more_body": False})


def _encoded(headers: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
