"""Error responses: a status, the body that OpenAI's clients read, and Retry-After."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from triolet.errors import TrioletError
from triolet.protocol.errors import WireError, of_exception
from triolet.protocol.generation import GenerationRequest

logger = logging.getLogger("triolet.http")


def error_response(error: WireError) -> Response:
    """Return the response for an error."""
    return JSONResponse({"error": error.body()}, error.status, error.headers)


async def answer_error(request: Request, error: Exception) -> Response:
    """Answer an exception of triolet; a failure of the engine is logged with its cause."""
    wire_error = of_exception(error)
    request.app.state.context.gateway_metrics.note_error(wire_error.status, wire_error.code)
    if wire_error.status == 500:
        log_failure(request, error)
    return error_response(wire_error)


async def answer_http_error(request: Request, error: Exception) -> Response:
    """Answer an exception of the router: unknown path or method."""
    assert isinstance(error, HTTPException)
    codes = {404: "not_found", 405: "method_not_allowed"}
    sentence = {
        404: f"There is nothing at {request.url.path}",
        405: f"{request.method} is not possible at {request.url.path}",
    }.get(error.status_code, error.detail)
    wire_error = WireError(
        sentence, code=codes.get(error.status_code, "invalid_request"), status=error.status_code
    )
    response = error_response(wire_error)
    response.headers.update(error.headers or {})
    return response


def log_failure(request: Request, error: BaseException) -> None:
    """Log a failure for the operator, under the id that the client has got."""
    request_id = request.scope.get("state", {}).get("request_id", "?")
    logger.error("request %s failed: %s %s", request_id, request.method, request.url.path, exc_info=error)


@contextmanager
def refusals(body: GenerationRequest) -> Iterator[None]:
    """Translate errors of the engine to the field names of this body."""
    try:
        yield
    except WireError:
        raise
    except TrioletError as error:
        raise body.refusal(error) from error
