"""Routes for operators: health, metrics, version, models and live requests."""

from __future__ import annotations

from typing import Any

import attrs
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import triolet
from triolet.core.request.lora import LoRARequest
from triolet.core.request.pooling_params import GENERATE
from triolet.errors import EngineDead, EngineUnhealthy
from triolet.observability.prometheus import CONTENT_TYPE
from triolet.protocol.errors import WireError, model_not_found
from triolet.protocol.responses.session import shutting_down
from triolet.server.routes.app_context import AppContext, context_of, owner_of


async def health(request: Request) -> Response:
    """Answer 200 while the engine makes progress, is idle or restarts a part of itself, otherwise 503 (liveness).

    While the server drains the access middleware answers 503 to every route but a few, this one included.
    """
    try:
        context_of(request).engine.check_health()
    except (EngineUnhealthy, EngineDead) as error:
        sentence = (
            str(error)
            if isinstance(error, EngineUnhealthy)
            else "The engine has stopped after repeated failures."
        )  # the cause may contain file names
        raise WireError(sentence, code="unhealthy", status=503, type="server_error") from None
    # A restart is no reason to end the server: the streams wait for it, and would be lost.
    restarting = context_of(request).engine.statistics().restarting
    return JSONResponse(
        {"status": "restarting", "restarting": restarting} if restarting else {"status": "ok"}
    )


async def ready(request: Request) -> Response:
    """Answer 200 while new requests are computed at once, otherwise 503 (readiness)."""
    await health(request)
    engine = context_of(request).engine
    if not engine.is_open:
        raise shutting_down()
    if restarting := engine.statistics().restarting:
        raise WireError(
            f"The engine is restarting: {', '.join(restarting)}.",
            code="restarting",
            status=503,
            type="server_error",
            retry_after_s=1.0,
        )
    return JSONResponse({"status": "ok"})


async def metrics(request: Request) -> Response:
    """Answer the metrics in Prometheus' text format."""
    context = context_of(request)
    text = context.metrics.render() + context.gateway_metrics.render()
    return Response(text, headers={"content-type": CONTENT_TYPE})


async def version(request: Request) -> Response:
    """Answer the version of triolet."""
    return JSONResponse({"version": triolet.__version__})


async def requests(request: Request) -> Response:
    """List the live requests; with keys, those of the same key."""
    context = context_of(request)
    # Prompts are not shown, but ids and lengths of other keys' requests would be.
    host = None if context.gateway is None else context.gateway.models
    engines = [context.engine, *(() if host is None else host.engines)]
    live = [one for engine in engines for one in engine.requests(owner_of(request))]
    return JSONResponse(
        {"object": "list", "data": [{"object": "request", **attrs.asdict(one)} for one in live]}
    )


async def models(request: Request) -> Response:
    """List the served models under all their names."""
    context = context_of(request)
    adapters = [_adapter_card(context, adapter) for adapter in context.engine.loras()]
    return JSONResponse(
        {"object": "list", "data": [*(_card(context, name) for name in context.model_names), *adapters]}
    )


async def model(request: Request) -> Response:
    """Answer one model by name."""
    context = context_of(request)
    name: str = request.path_params["name"]
    if not name:  # a trailing slash
        return await models(request)
    if (adapter := context.adapter(name)) is not None:
        return JSONResponse(_adapter_card(context, adapter))
    if name not in context.model_names:
        raise model_not_found(name)
    return JSONResponse(_card(context, name))


def _adapter_card(context: AppContext, adapter: LoRARequest) -> dict[str, Any]:
    # The folder is not shown: with keys, it would tell any client about the disk of the server.
    return {
        "id": adapter.lora_name,
        "object": "model",
        "created": context.began_at,
        "owned_by": "triolet",
        "root": adapter.lora_name,
        "parent": adapter.base_model_name or context.engine.model_name,
        "max_model_len": context.engine.max_model_len,
        "tasks": (GENERATE,),
    }


def _card(context: AppContext, name: str) -> dict[str, Any]:
    host = None if context.gateway is None else context.gateway.models
    if host is not None and name in host.names:
        card = {
            "id": name,
            "object": "model",
            "created": context.began_at,
            "owned_by": "triolet",
            "root": name,
        }
        # Longest context and tasks are known once it has been loaded.
        return {**card, "parent": None, "max_model_len": None, "tasks": None, **host.described(name)}
    return {
        "id": name,
        "object": "model",
        # Clients require it; when the model was made is not known.
        "created": context.began_at,
        "owned_by": "triolet",
        "root": context.engine.model_name,
        "parent": None,
        "max_model_len": context.engine.max_model_len,
        "tasks": context.engine.model_info.tasks,
    }
