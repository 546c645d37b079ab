"""Errors that clients of a router get: those of the engines as they are, and its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from triolet.client.http import HttpError
from triolet.client.websocket import ConnectionLost
from triolet.core.request.request import FinishReason
from triolet.protocol.errors import WireError

# Close codes of an engine that are about what this client sent; with all others the engine ends the connection.
REFUSED_FRAMES: Final = (1002, 1003, 1007, 1008, 1009)
OVER_LIMIT: Final = 1013

# Names of errors whose answer has no `error` object, such as those of a proxy.
_CODES: Final = {
    401: "invalid_api_key",
    403: "permission_denied",
    404: "not_found",
    429: "rate_limit_exceeded",
    503: "service_unavailable",
}
# Errors with status 503 of an engine that takes nothing new: it shuts down, or is full. All others are about what the
# one request wants, such as a model that cannot be loaded, or a grammar that takes too long.
_OF_ENGINE: Final = ("service_unavailable", "too_many_connections")
_TYPES: Final = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class Refused(Exception):
    """The engine does not go on with an answer that another one has begun.

    Args:
        error: what it says.
    """

    def __init__(self, error: WireError) -> None:
        super().__init__(str(error))
        self.error = error


def unavailable(message: str) -> WireError:
    """Return the error of a fleet without an engine for a request."""
    return WireError(message, code="service_unavailable", status=503, type="server_error", retry_after_s=1.0)


def events_moved() -> WireError:
    """Return the error for the events of a response that another engine went on with."""
    message = "The response was moved to another engine, and its events cannot be read again."
    return WireError(message, code="response_not_found", status=404)


def is_of_engine(error: WireError) -> bool:
    """Return True for a refusal that other requests would get from this engine now, too."""
    return error.status == 503 and error.code in _OF_ENGINE


def is_cut_off(event: Mapping[str, Any]) -> bool:
    """Return True for an event that ends an answer for no other reason than that its engine shuts down."""
    if event.get("type") == "response.failed":
        return bool(event["response"].get("finish_reason") == FinishReason.SHUTDOWN)
    error = event if event.get("type") == "error" else event.get("error")
    return isinstance(error, Mapping) and bool(error.get("code") == "service_unavailable")


def passed_on(error: HttpError) -> WireError:
    """Return an engine's refusal as the client gets it."""
    return _refusal(error.error, error.status, error.retry_after_s, str(error))


def refusal_of_event(event: Mapping[str, Any]) -> WireError:
    """Return the refusal that an engine's `error` event on a WebSocket tells."""
    body = event["error"]
    return _refusal(body, event.get("status", 500), body.get("retry_after"), "")


def _refusal(body: Mapping[str, Any], status: int, retry_after_s: float | None, sentence: str) -> WireError:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    param = body.get("param")
    return WireError(
        str(body.get("message") or sentence),
        code=str(
            body.get("code") or _CODES.get(status, "invalid_request" if status < 500 else "server_error")
        ),
        status=status,
        type=str(body.get("type") or _TYPES.get(status, kind)),
        param=param if isinstance(param, str) else None,
        retry_after_s=retry_after_s,
    )


def refusal_of_frames(error: ConnectionLost) -> WireError | None:
    """Return the error for a client whose messages made an engine close the WebSocket; None if they did not."""
    if error.close_code == OVER_LIMIT:
        return WireError(
            str(error), code="rate_limit_exceeded", status=429, type="rate_limit_error", retry_after_s=1.0
        )
    return WireError(str(error), code="invalid_request") if error.close_code in REFUSED_FRAMES else None
