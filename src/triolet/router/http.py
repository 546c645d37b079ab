"""HTTP of a router's clients: every request goes to an engine, and its answer comes back as it is.

A request that asks for a stream of events is moved to another engine if its own dies, and the client sees one stream.
Any other one is asked again of another engine, as long as nothing of its answer was sent.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, Final
from urllib.parse import quote

import h11
import trio

from triolet.client.address import ServerAddress, ServerError
from triolet.client.http import RECEIVE_BYTES, HttpError, connect, reason_of
from triolet.config.server import GatewayConfig
from triolet.core.recovery.supervision import shortage_of
from triolet.errors import ResourceShortage
from triolet.observability.prometheus import CONTENT_TYPE, UNMATCHED, GatewayMetrics
from triolet.protocol.access import Access, preflight_headers
from triolet.protocol.errors import WireError, of_exception
from triolet.protocol.responses.session import shutting_down
from triolet.router.answer import CHUNKED, HOP_HEADERS, Answer
from triolet.router.client_request import ClientRequest, is_without_seed, new_seed, parsed_request, with_field
from triolet.router.client_response import ClientResponse, Send
from triolet.router.continuation import Diverged
from triolet.router.engines import CONNECTION, SHORTAGE_S, Engines, EngineUse, RoutedEngine
from triolet.router.homes import Home, Homes
from triolet.router.refusals import Refused, events_moved, passed_on, unavailable
from triolet.router.websocket import MAX_MOVES, NO_ENGINE_S
from triolet.server.transport.client_stream import InputBudget
from triolet.server.transport.ids import request_id_of
from triolet.server.transport.input_limits import ROUTED_HEADER, json_limits
from triolet.server.transport.request_body import ClientDisconnected, Receive, read_body

# Routes of the engines that a client of the fleet may use; all others are for the operator of one engine.
PREFIXES: Final = (
    "/v1/models", "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/score",
    "/v1/rerank", "/v2/rerank", "/tokenize", "/detokenize", "/classify", "/pooling", "/score", "/rerank", "/version",
)  # fmt: skip
HEALTH_PATHS: Final = ("/health", "/ping", "/health/ready")
SEEDED: Final = (*CHUNKED, "/v1/responses")
# Characters of a path that need no encoding (RFC 3986, 3.3), beside letters, digits, `_.-`.
PATH_CHARS: Final = "/:@!$&'()*+,;=~"
# Headers that the router has judged or makes: an engine knows neither the name nor the pages of the router.
OWN_HEADERS: Final = HOP_HEADERS | {b"origin", b"x-request-id", ROUTED_HEADER.encode()}

logger = logging.getLogger("triolet.router")


class Broken(Exception):
    """The engine ends before its answer does."""


class RouterApp:
    """ASGI app of a router.

    Args:
        engines: the fleet.
        homes: of all clients' responses.
        access: rules for hosts and web pages; keys are the engines'.
        config: the limits on bodies.
        budget: memory for bodies and messages that are being read.
        metrics: of the router.
    """

    def __init__(
        self,
        engines: Engines,
        homes: Homes,
        access: Access,
        config: GatewayConfig,
        budget: InputBudget,
        metrics: GatewayMetrics,
    ) -> None:
        self._engines, self._homes, self._access = engines, homes, access
        self._config, self._json_limits = config, json_limits(config)
        self._budget, self._metrics = budget, metrics
        self.is_draining = False  # True: new requests are refused

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request."""
        assert scope["type"] == "http"
        headers = {
            name.lower().decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        host, origin = headers.get("host"), headers.get("origin")
        more = {
            "x-request-id": request_id_of(headers.get("x-request-id")),
            **self._access.cross_origin_headers(origin, host),
        }
        response = ClientResponse(send, more, self._metrics)
        try:
            self._access.check_host(host)
            self._access.check_origin(origin, host)
            if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                preflight = preflight_headers(headers.get("access-control-request-headers"))
                await response.send_whole(204, preflight, b"")
            else:
                await self._answer(scope, receive, response, more["x-request-id"])
        except ClientDisconnected:
            pass  # no response can be sent
        except (WireError, ResourceShortage) as raised:
            error = of_exception(raised)
            self._metrics.note_error(error.status, error.code)
            # The next attempt must reach another server.
            closing = {"connection": "close"} if self.is_draining else {}
            await response.send_json(error.status, {"error": error.body()}, {**error.headers, **closing})
        finally:
            self._metrics.note_response(_route_of(scope["path"]), response.status)

    async def _answer(
        self, scope: Mapping[str, Any], receive: Receive, response: ClientResponse, request_id: str
    ) -> None:
        path = scope["path"]
        if self.is_draining and path != "/metrics":
            raise shutting_down()
        if path in HEALTH_PATHS:
            if not self._engines.up:
                raise unavailable("No engine is ready.")
            engines = [_facts(one) for one in self._engines.all]
            await response.send_json(200, {"status": "ok", "engines": engines})
        elif path == "/metrics":
            await response.send_whole(200, {"content-type": CONTENT_TYPE}, self._metrics.render())
        elif _route_of(path) is not UNMATCHED:
            request = await self._request(scope, receive, request_id)
            await self._until_it_disconnects(request, receive, response.send)
        else:
            message = f"A router has no {path}: ask the engine itself."
            raise WireError(message, code="not_found", status=404, type="invalid_request_error")

    async def _request(self, scope: Mapping[str, Any], receive: Receive, request_id: str) -> ClientRequest:
        # A key is judged by the engine alone, so that any name may stand there: the address counts.
        client = (scope.get("client") or ("",))[0]
        with self._budget.reservation(client) as reservation:
            body = b"".join(
                await read_body(receive, scope["headers"], self._config.max_body_bytes, reservation)
            )
            is_read = scope["method"] == "POST"
            key = next(
                (
                    value.decode("latin-1")
                    for name, value in scope["headers"]
                    if name.lower() == b"authorization"
                ),
                "",
            )
            parsed = await parsed_request(body if is_read else b"", self._json_limits, client, key)
        if parsed.refusal is not None:
            raise parsed.refusal
        headers = (
            *((name, value) for name, value in scope["headers"] if name.lower() not in OWN_HEADERS),
            (b"x-request-id", request_id.encode()),
            (ROUTED_HEADER.encode(), b"1"),
        )
        payload = parsed.kept
        if payload.get("stream") is True and is_without_seed(payload) and scope["path"] in SEEDED:
            body = with_field(body, "seed", new_seed())
        path, target = scope["path"], _target_of(scope)
        return ClientRequest(scope["method"], path, target, headers, body, payload, parsed.prompt)

    async def _until_it_disconnects(self, request: ClientRequest, receive: Receive, send: Send) -> None:
        failure: Exception | None = None
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                while (await receive())["type"] != "http.disconnect":
                    pass
                nursery.cancel_scope.cancel()  # closes the connection to the engine, which aborts the request

            nursery.start_soon(watch)
            try:
                await self._pass_on(request, send)
            except Exception as error:  # raised again below, without the nursery's group around it
                failure = error
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _pass_on(self, request: ClientRequest, send: Send) -> None:
        home = await self._home_of(request)
        answer = Answer.to(request, send, self._homes, home)
        refused_by: set[RoutedEngine] = set()
        last: RoutedEngine | None = None
        for _ in range(MAX_MOVES + 1):
            if self._engines.is_closed or (
                home is None and not await self._engines.wait_for_one(NO_ENGINE_S)
            ):
                break
            name = secrets.token_hex(8)
            engine = (
                home.engine if home is not None else self._engines.place(name, request.prompt, refused_by)
            )
            if engine is None:
                continue
            if last is not None and engine is not last:
                self._engines.on_move()
            last, refusal, is_broken = engine, None, False
            try:
                if await self._attempt(request, answer, engine, name, refused_by):
                    return
            except Refused as error:
                refusal = error.error
            except (Broken, ServerError) as error:
                if (shortage := shortage_of(error, CONNECTION)) is None:
                    is_broken = True
                    self._engines.note_lost(engine)
                elif not answer.has_begun:
                    raise shortage from None
                else:
                    await trio.sleep(SHORTAGE_S)
            except Diverged as error:
                logger.warning("an answer cannot go on at %s: %s", engine.address, error)
                break
            finally:
                self._engines.finish(name)
            if home is not None or not answer.may_move:
                break
            if refusal is not None:
                await self._engines.note_refusal(engine, refusal, refused_by)
            elif is_broken:
                await self._engines.pass_over(engine, refused_by)
        if self._engines.is_closed:
            await answer.fail(shutting_down())
        elif answer.has_begun:
            await answer.fail(unavailable("The answer could not be continued by another engine."))
        else:
            await answer.fail(unavailable("No engine could answer."))

    async def _attempt(
        self,
        request: ClientRequest,
        answer: Answer,
        engine: RoutedEngine,
        name: str,
        refused_by: set[RoutedEngine],
    ) -> bool:
        """Have an engine answer; return True when it has, and False if it was found to be down meanwhile."""
        home, use = answer.home, EngineUse()
        whole: h11.Response | None = None
        answer.begin_again(engine)
        with use.scope, self._engines.computing(engine, use, lambda: home is None and answer.may_move):
            async with _asked(engine.address, _target(request, home), _body(request, home), request) as asked:
                head, pieces = asked
                if answer.has_begun and head.status_code not in (200, 429, 503):
                    raise Diverged(f"it answers {head.status_code}")
                if head.status_code != 200 and (
                    answer.has_begun
                    or (head.status_code == 503 and home is None and self._has_others(engine, refused_by))
                ):
                    body = b"".join([piece async for piece in pieces])
                    raise Refused(passed_on(HttpError(engine.address, head.status_code, body, head.headers)))
                async for piece in pieces:
                    await trio.lowlevel.checkpoint_if_cancelled()  # before the piece counts as sent
                    with use.sending():
                        await answer.add(head, piece)
                    self._engines.note_progress(name, len(piece) // 64)
                whole = head
        # Outside of the scope: what becomes of the engine now does not matter any more.
        if whole is not None:
            await answer.end(whole)
        return whole is not None

    def _has_others(self, engine: RoutedEngine, refused_by: set[RoutedEngine]) -> bool:
        """Return whether there are engines that have not refused a request that this one refuses."""
        return not refused_by.union((engine,)).issuperset(self._engines.up)

    async def _home_of(self, request: ClientRequest) -> Home | None:
        previous_id = request.payload.get("previous_response_id")
        return await self._homes.find(previous_id or request.response_id, request.api_key)


def _target_of(scope: Mapping[str, Any]) -> str:
    """Return path and query as the client has sent them; a server need not tell the path so, and it is encoded anew."""
    path = scope.get("raw_path") or quote(scope["path"], safe=PATH_CHARS).encode()
    query = scope.get("query_string", b"")
    whole: bytes = path + (b"?" + query if query else b"")
    return whole.decode("latin-1")


def _route_of(path: str) -> str:
    """Return the route of a path without what clients make up; `UNMATCHED` if a router has none."""
    if path in (*HEALTH_PATHS, "/metrics"):
        return path
    prefixes = (prefix for prefix in PREFIXES if path == prefix or path.startswith(f"{prefix}/"))
    return next(prefixes, UNMATCHED)


def _body(request: ClientRequest, home: Home | None) -> bytes:
    """Return the body for an engine, with the ids that it knows."""
    if home is None or not request.payload.get("previous_response_id"):
        return request.body
    return with_field(request.body, "previous_response_id", home.response_id)


def _target(request: ClientRequest, home: Home | None) -> str:
    """Return the path and query for an engine, with the id that it knows.

    Raises:
        WireError: 404, the events of a response are asked for that another engine has begun.
    """
    if home is None or not home.is_moved or request.response_id is None:
        return request.target
    if request.method == "GET" and "stream=true" in request.target.partition("?")[2].split("&"):
        raise events_moved()
    return request.target.replace(request.response_id, home.response_id, 1)


@asynccontextmanager
async def _asked(
    address: ServerAddress, target: str, body: bytes, request: ClientRequest
) -> AsyncIterator[tuple[h11.Response, AsyncIterator[bytes]]]:
    """Send a request to an engine; yield the head of its answer, and the pieces of its body.

    Raises:
        ServerError: it cannot be reached.
        Broken: it ends before its answer does.
    """
    try:
        stream = await connect(address)
    except OSError as error:
        raise ServerError(f"cannot connect to {address}: {reason_of(error)}") from error
    protocol = h11.Connection(h11.CLIENT)
    headers = [(b"Host", address.authority.encode()), (b"Connection", b"close"), *request.headers]
    if body or request.method == "POST":
        headers.append((b"Content-Length", str(len(body)).encode()))
    target = address.base_path.removesuffix("/v1") + target

    async def next_event() -> Any:
        while (event := protocol.next_event()) is h11.NEED_DATA:
            protocol.receive_data(bytes(await stream.receive_some(RECEIVE_BYTES)))
        return event

    async def pieces() -> AsyncGenerator[bytes]:
        while isinstance(event := await next_event(), h11.Data):
            yield bytes(event.data)

    async with stream:
        try:
            data = [
                protocol.send(h11.Request(method=request.method, target=target, headers=headers)),
                protocol.send(h11.Data(data=body)),
                protocol.send(h11.EndOfMessage()),
            ]
            # An engine may have answered, and hung up, before it has read all.
            with suppress(trio.BrokenResourceError):
                await stream.send_all(b"".join(one for one in data if one))
            head = await next_event()
            while isinstance(head, h11.InformationalResponse):
                head = await next_event()
            if not isinstance(head, h11.Response):
                raise Broken
            async with aclosing(pieces()) as coming:
                yield head, coming
        except (trio.BrokenResourceError, trio.ClosedResourceError, h11.RemoteProtocolError) as error:
            raise Broken from error


def _facts(engine: RoutedEngine) -> dict[str, Any]:
    return {
        "url": str(engine.address),
        "state": engine.state.value,
        "requests": len(engine.uses),
        "requests_total": engine.num_requests,
    }
