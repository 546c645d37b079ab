"""What a client is told when something is wrong: a status, a code to branch on, and a sentence.

`of_exception` decides it for every exception that the engine raises on purpose; for any other the client learns that
the server failed, and nothing else: its text may speak of files and addresses.
"""

from __future__ import annotations

from typing import Any

from triolet.errors import (
    EngineClosed,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    TrioletError,
    UnsupportedFeature,
    shown,
)

# Fields of the engine under the names that a client of the Responses protocol wrote them by.
_WIRE_NAMES = {
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "structured_outputs.tool_calls": "tools",
}


class WireError(TrioletError):
    """An answer that is an error.

    Args:
        message: a sentence for a person.
        code: for a program.
        status: of HTTP.
        type: the family of the code: `invalid_request_error`, `rate_limit_error`, `authentication_error` or
            `server_error`.
        param: the field that is wrong, by its path in the request.
        retry_after_s: when another try makes sense, seconds.
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
        """The `error` object of a body or an event."""
        return {"type": self.type, "code": self.code, "message": self.message, "param": self.param}

    def event(self, stream_id: str | None = None) -> dict[str, Any]:
        """The `error` event of a WebSocket."""
        event: dict[str, Any] = {"type": "error", "status": self.status, "error": self.body()}
        if stream_id is not None:
            event["stream_id"] = stream_id
        return event


def wrong(param: str, rule: str, got: object, *, code: str = "invalid_value") -> WireError:
    """`param` must be `rule`, and `got` is not."""
    return WireError(f"{param} must be {rule}; got {shown(got)}", code=code, param=param)


def missing(param: str) -> WireError:
    """A field that has to be there is not."""
    return WireError(f"{param} must be given", code="missing_required_parameter", param=param)


def unsupported(param: str, sentence: str) -> WireError:
    """A field that is known, and whose value can not be honoured."""
    return WireError(sentence, code="unsupported_parameter", param=param)


def model_not_found(name: str) -> WireError:
    """No model of that name is served here."""
    return WireError(
        f"The model {shown(name)} does not exist.", code="model_not_found", status=404, param="model"
    )


def of_exception(error: BaseException) -> WireError:
    """What a client is told about an exception of the engine."""
    match error:
        case WireError():
            return error
        case PromptTooLong():
            return WireError(str(error), code="context_length_exceeded", param="input")
        case InvalidRequest():
            code = "unsupported_parameter" if isinstance(error, UnsupportedFeature) else "invalid_value"
            return WireError(str(error), code=code, param=_WIRE_NAMES.get(error.field or "", error.field))
        case Overloaded():
            return WireError(
                str(error),
                code="rate_limit_exceeded",
                status=429,
                type="rate_limit_error",
                retry_after_s=error.retry_after_s,
            )
        case EngineClosed():
            return WireError(
                "The server is shutting down.", code="service_unavailable", status=503, type="server_error"
            )
        case _:
            return WireError(
                "The server failed to answer this request.",
                code="server_error",
                status=500,
                type="server_error",
            )
