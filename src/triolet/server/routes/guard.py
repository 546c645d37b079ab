"""Access middleware: request ids, keys, hosts and origins, and error responses for all exceptions.

It is a plain ASGI middleware, so that handlers learn at once when the client disconnects.
"""

from __future__ import annotations

import attrs
import trio
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triolet.observability.prometheus import UNMATCHED
from triolet.protocol.access import preflight_headers
from triolet.protocol.errors import WireError
from triolet.protocol.responses.session import shutting_down
from triolet.server.routes.app_context import AppContext
from triolet.server.routes.errors import answer_error, error_response
from triolet.server.routes.request_body import free_kept
from triolet.server.transport.ids import request_id_of
from triolet.server.transport.request_body import ClientDisconnected

# No key is needed for these: load balancers and Prometheus send none, and the page asks the user for one.
OPEN_PATHS = frozenset(("/", "/health", "/health/ready", "/ping", "/metrics", "/version"))
# Also answered while the server drains: its operator watches the drain there.
OPEN_IN_DRAIN = frozenset(("/metrics", "/version"))
CLIENT_LEFT = 499  # nginx' status for a client that left before it was answered
OPEN_FOLDER = "/static/"


@attrs.frozen(eq=False)
class AccessMiddleware:
    """ASGI middleware around the app.

    Args:
        app: the inner ASGI app.
        context: has the rules.
    """

    app: ASGIApp
    context: AppContext

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        request = Request(scope, receive)
        route = _route_of(scope)
        state = scope.setdefault("state", {})
        headers, access = request.headers, self.context.access
        state["request_id"] = request_id_of(headers.get("x-request-id"))
        state["arrived_s"] = trio.current_time()
        cross_origin = access.cross_origin_headers(headers.get("origin"), headers.get("host"))
        response = _Response(send, state["request_id"], cross_origin)
        try:
            refusal = self._refusal(request)
            if refusal is not None:
                await refusal(scope, receive, response.send)
            else:
                await self.app(scope, receive, response.send)
        except ClientDisconnected:
            pass  # no response can be sent
        except Exception as error:
            if response.has_started:
                raise  # a part was sent already: the server closes the connection
            await (await answer_error(request, error))(scope, receive, response.send)
        finally:
            self.context.gateway_metrics.note_response(route, response.status)
            await free_kept(state)

    def _refusal(self, request: Request) -> Response | None:
        access, headers = self.context.access, request.headers
        path = _path(request.scope)
        try:
            access.check_host(headers.get("host"))
            access.check_origin(headers.get("origin"), headers.get("host"))
            if request.method == "OPTIONS" and "access-control-request-method" in headers:
                asked = headers.get("access-control-request-headers")
                return Response(status_code=204, headers=preflight_headers(asked))
            if path not in OPEN_PATHS and not path.startswith(OPEN_FOLDER):
                request.scope["state"]["owner"] = access.owner(headers.get("authorization"))
            gateway = self.context.gateway
            if gateway is not None and gateway.is_draining and path not in OPEN_IN_DRAIN:
                return self._drain_refusal()
        except WireError as error:
            self.context.gateway_metrics.note_error(error.status, error.code)
            return error_response(error)
        return None

    def _drain_refusal(self) -> Response:
        error = shutting_down()
        self.context.gateway_metrics.note_error(error.status, error.code)
        response = error_response(error)
        response.headers["connection"] = "close"  # the next attempt must reach another server
        return response


@attrs.define(eq=False)
class _Response:
    """Response being sent, with the headers that every response has."""

    _send: Send
    _request_id: str
    _more: dict[str, str]
    has_started: bool = attrs.field(default=False, init=False)
    status: int = attrs.field(default=CLIENT_LEFT, init=False)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_started, self.status = True, message["status"]
            headers = MutableHeaders(raw=list(message.get("headers", [])))
            headers["x-request-id"] = self._request_id
            # A browser must not take generated text for a script or a page.
            headers["x-content-type-options"] = "nosniff"
            headers.update(self._more)
            message = {**message, "headers": headers.raw}
        await self._send(message)


def _route_of(scope: Scope) -> str:
    """Return the pattern of the route of a request; a path that is unknown is not told, since clients make it up."""
    # Matched here: a refusal comes before the app matches it, and one endpoint may have several routes.
    partial = UNMATCHED
    for route in (one for one in scope["app"].routes if isinstance(one, Route)):
        match = route.matches(scope)[0]
        if match is Match.FULL:
            return route.path
        if match is Match.PARTIAL and partial is UNMATCHED:  # the method is another one
            partial = route.path
    return partial


def _path(scope: Scope) -> str:
    """Return the path below the mount point of the app."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) or "/"
