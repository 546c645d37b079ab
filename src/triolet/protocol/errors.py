"""Errors as clients get them: an HTTP status, a code for programs, a sentence for people, and the field.

`of_exception` maps every exception that the engine raises on purpose. Of any other the client learns only that the
server failed, because its text may contain paths and addresses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from triolet.core.request.param_validation import ApiFamily
from triolet.core.request.params import SAMPLING_PARAMETERS
from triolet.errors import (
    EngineClosed,
    EngineDead,
    InvalidRequest,
    Overloaded,
    ProfileConflict,
    PromptTooLong,
    ResourceShortage,
    TrioletError,
    UnsupportedFeature,
    shown,
)

RESTART_S: Final = 5.0  # about the time until the next server has started

_PROMPT_NAMES = {
    ApiFamily.CHAT: "messages",
    ApiFamily.COMPLETIONS: "prompt",
    ApiFamily.RESPONSES: "input",
}


def _field_names(family: ApiFamily) -> dict[str, str]:
    """Return the names on the wire of the engine's fields."""
    names = {
        parameter.name: parameter.wire_name(family) or parameter.name for parameter in SAMPLING_PARAMETERS
    }
    names |= dict.fromkeys(("prompt", "prompt_token_ids", "messages"), _PROMPT_NAMES[family])
    return {**names, "prompt_logprobs": names["logprobs"], "structured_outputs.tool_calls": "tools"}


FIELD_NAMES = {family: _field_names(family) for family in ApiFamily}
"""Names that clients of each family know the engine's fields by."""


class WireError(TrioletError):
    """Error in reply to a request.

    Args:
        message: sentence for people.
        code: word for programs.
        status: HTTP status.
        type: group of the code: `invalid_request_error`, `rate_limit_error`, `authentication_error` or
            `server_error`.
        param: path of the wrong field in the request.
        retry_after_s: seconds after which another attempt makes sense.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "invalid_value",
        status: int = 400,
        type: str = "invalid_request_error",  # noqa: A002  # the key's name on the wire
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.code, self.status, self.type = message, code, status, type
        self.param, self.retry_after_s = param, retry_after_s

    def body(self) -> dict[str, Any]:
        """Return the `error` object of a body or an event."""
        return {"type": self.type, "code": self.code, "message": self.message, "param": self.param}

    @property
    def retry_after(self) -> int | None:
        """Value of the Retry-After header, in whole seconds; None if another attempt makes no sense."""
        seconds = self.retry_after_s
        # A 503 passes, at the latest with the next server.
        if seconds is None and self.status == 503:
            seconds = RESTART_S
        return None if seconds is None else max(math.ceil(seconds), 1)

    @property
    def headers(self) -> dict[str, str]:
        """Headers of an answer with this error, beside those of its body."""
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        return {**headers, "www-authenticate": "Bearer"} if self.status == 401 else headers

    def streamed_body(self) -> dict[str, Any]:
        """Return the `error` object where no header can follow; `retry_after` stands for the header."""
        return self.body() if self.retry_after is None else {**self.body(), "retry_after": self.retry_after}

    def response_event(self, last_number: int) -> dict[str, Any]:
        """Return the `error` event that ends a stream of a response over HTTP, in OpenAI's form.

        Args:
            last_number: number of the event before it. It is this one's too: the next event of a response that
                another server continues has the number behind it, and `starting_after` must not skip that.
        """
        return {**self.streamed_body(), "type": "error", "sequence_number": last_number}

    def event(self, stream_id: str | None = None) -> dict[str, Any]:
        """Return the `error` event of a WebSocket."""
        event: dict[str, Any] = {"type": "error", "status": self.status, "error": self.streamed_body()}
        if stream_id is not None:
            event["stream_id"] = stream_id
        return event


def wrong(param: str, rule: str, got: object, *, code: str = "invalid_value") -> WireError:
    """Return the error for a value `got` of `param` that breaks `rule`."""
    return WireError(f"{param} must be {rule}; got {shown(got)}", code=code, param=param)


def missing(param: str) -> WireError:
    """Return the error for a required field that is absent."""
    return WireError(f"{param} must be given", code="missing_required_parameter", param=param)


def unsupported(param: str, sentence: str) -> WireError:
    """Return the error for a known field with a value that this server does not support."""
    return WireError(sentence, code="unsupported_parameter", param=param)


def model_not_found(name: str) -> WireError:
    """Return the error for a model name that is not served here."""
    return WireError(
        f"The model {shown(name)} does not exist.", code="model_not_found", status=404, param="model"
    )


def of_exception(
    error: BaseException, names: Mapping[str, str] = FIELD_NAMES[ApiFamily.RESPONSES]
) -> WireError:
    """Return the error that a client is told for an exception of the engine.

    Args:
        error: the exception; one that was not raised on purpose is told as a failure of the server without its text.
        names: names of the engine's fields in the request.
    """
    match error:
        case WireError():
            return error
        case InvalidRequest():
            code = "unsupported_parameter" if isinstance(error, UnsupportedFeature) else "invalid_value"
            if isinstance(error, PromptTooLong):
                code = "context_length_exceeded"
            return _named(error, code, names)
        case Overloaded():
            return WireError(
                str(error),
                code="rate_limit_exceeded",
                status=429,
                type="rate_limit_error",
                retry_after_s=error.retry_after_s,
            )
        case ResourceShortage():
            return WireError(
                str(error),
                code="resource_shortage",
                status=503,
                type="server_error",
                retry_after_s=error.retry_after_s,
            )
        case ProfileConflict():
            return WireError(str(error), code="conflict", status=409)
        case EngineClosed():
            return WireError(
                "The server is shutting down.", code="service_unavailable", status=503, type="server_error"
            )
        case EngineDead():  # the next server, or another one, can answer
            return WireError(
                "The engine has died.", code="service_unavailable", status=503, type="server_error"
            )
        case _:
            return WireError(
                "The server failed to answer this request.",
                code="server_error",
                status=500,
                type="server_error",
            )


def _named(error: InvalidRequest, code: str, names: Mapping[str, str]) -> WireError:
    """Return the error with the name of the field as the client wrote it, also where its sentence begins with it."""
    field, message = error.field or "", str(error)
    name = names.get(field, field)
    # Errors of the engine begin with the field that they are about.
    if field and message.startswith(f"{field} "):
        message = name + message.removeprefix(field)
    return WireError(message, code=code, param=name or None)
