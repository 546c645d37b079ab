"""HTTP of a server with several models: the `model` of a body chooses the engine, and operators see and stop models.

The middleware reads the body, since it names the model, and hands the parsed object on: it is parsed once.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import attrs
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from triolet.protocol.errors import model_not_found
from triolet.server.models.host import ModelHost
from triolet.server.routes.app_context import AppContext
from triolet.server.routes.operations import operator_context
from triolet.server.routes.request_body import cancel_on_disconnect, read_json

MODEL_PATHS = frozenset(
    (
        "/tokenize",
        "/detokenize",
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/classify",
        "/pooling",
        "/score",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    )
)
"""Paths whose bodies have a `model`."""


@attrs.frozen(eq=False)
class ModelMiddleware:
    """ASGI middleware that gives a request the context of its model.

    Args:
        app: the inner ASGI app.
        context: of the server's first model.
        host: has the others.
    """

    app: ASGIApp
    context: AppContext
    host: ModelHost

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or scope["method"] != "POST" or path not in MODEL_PATHS:
            await self.app(scope, receive, send)
            return
        payload: dict[str, Any] = await read_json(Request(scope, receive), lambda payload: payload)
        scope["state"]["payload"] = payload
        name = payload.get("model")
        with ExitStack() as held:
            if isinstance(name, str) and (hosted := self.host.model_of(name)) is not None:
                held.enter_context(self.host.hold(hosted))
                loaded = await cancel_on_disconnect(receive, lambda: self.host.loaded(hosted))
                scope["state"]["context"] = attrs.evolve(
                    self.context, engine=loaded.engine, responses_context=loaded.context
                )
            await self.app(scope, receive, send)


async def list_resident(request: Request) -> Response:
    """Answer the state of every model, to an operator."""
    context = operator_context(request)
    engine, host = context.engine, _host_of(context)
    first = {
        "id": engine.model_name,
        **ModelHost.description_of_first(engine),
        "max_model_len": engine.max_model_len,
    }
    others = [] if host is None else [{"id": name, **host.described(name)} for name in host.names]
    return JSONResponse({"object": "list", "data": [first, *others]})


async def stop_model(request: Request) -> Response:
    """Unload a model as soon as no request holds it, for an operator."""
    context = operator_context(request)
    payload = await read_json(request, lambda payload: payload)
    name, host = payload.get("model"), _host_of(context)
    if name in context.model_names and (host is None or name not in host.names):
        before = ModelHost.description_of_first(context.engine)
        context.engine.sleep_when_idle()
        return JSONResponse({"id": name, **before, "stopping": before["state"] == "loaded"})
    if host is None or name not in host.names:
        raise model_not_found(str(name))
    before = host.described(name)
    host.stop(name)
    return JSONResponse({"id": name, **before, "stopping": before["state"] == "loaded"})


def _host_of(context: AppContext) -> ModelHost | None:
    return None if context.gateway is None else context.gateway.models
