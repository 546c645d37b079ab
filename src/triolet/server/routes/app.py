"""The ASGI app: its routes and middleware."""

from __future__ import annotations

from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route

from triolet.config.server import GatewayConfig
from triolet.engine.adapters import adapter_usage
from triolet.engine.engine import Engine
from triolet.errors import TrioletError
from triolet.observability.prometheus import GatewayMetrics, Metrics
from triolet.protocol.chat_completions import ChatRequest
from triolet.protocol.completions import CompletionRequest
from triolet.protocol.json.structuring import prepare_to_structure
from triolet.protocol.pooling import ClassifyRequest, EmbeddingsRequest, PoolingRequest
from triolet.protocol.responses.requests import CreateResponse
from triolet.protocol.scoring import RerankRequest, ScoreRequest
from triolet.server.models.routing import ModelMiddleware, list_resident, stop_model
from triolet.server.responses.generate import ActiveResponses, responses_context
from triolet.server.responses.service import ResponsesService
from triolet.server.routes.app_context import AppContext
from triolet.server.routes.chat_completions import chat_completions
from triolet.server.routes.completions import completions
from triolet.server.routes.errors import answer_error, answer_http_error
from triolet.server.routes.guard import AccessMiddleware
from triolet.server.routes.operations import (
    collective_rpc,
    health,
    is_paused,
    is_sleeping,
    load,
    load_lora_adapter,
    metrics,
    model,
    models,
    pause,
    ready,
    requests,
    reset_other_cache,
    reset_prefix_cache,
    resume,
    sleep,
    start_profile,
    stop_profile,
    unload_lora_adapter,
    update_weights_from_disk,
    version,
    wake_up,
    weight_info,
)
from triolet.server.routes.page import page, static
from triolet.server.routes.pooling.embeddings import classify, embeddings, pooling
from triolet.server.routes.pooling.scoring import rerank, score
from triolet.server.routes.responses import (
    cancel_response,
    delete_response,
    get_response,
    list_input_items,
    no_such_operation,
    no_websocket,
    responses,
)
from triolet.server.routes.tokenize import detokenize, input_tokens, tokenize
from triolet.server.transport.input_limits import input_budget

BODIES: Final = (
    ChatRequest,
    CompletionRequest,
    CreateResponse,
    EmbeddingsRequest,
    PoolingRequest,
    ClassifyRequest,
    ScoreRequest,
    RerankRequest,
)


def create_app(
    engine: Engine,
    config: GatewayConfig | None = None,
    *,
    gateway: ResponsesService | None = None,
) -> Starlette:
    """Return an ASGI app that serves an engine; it must run in the engine's Trio thread.

    Args:
        engine: a running engine; it must stay open while the app runs.
        config: keys, origins, hosts and limits; the fields about listening are not used.
        gateway: shares stored responses and limits per key with WebSockets; without it the app has a store of its own,
            no limits per key, and no resumable responses.
    """
    # Some milliseconds each, in which the loop would be held.
    prepare_to_structure(*BODIES)
    config = config or GatewayConfig()
    context = AppContext(
        engine=engine,
        config=config,
        responses_context=gateway.context if gateway is not None else responses_context(engine, config),
        active=gateway.active if gateway is not None else ActiveResponses(),
        gateway=gateway,
        metrics=Metrics(
            engine,
            config.metrics_prefix,
            (lambda: adapter_usage(engine.requests(), engine.config.max_loras))
            if engine.config.enable_lora
            else None,
        ),
        gateway_metrics=gateway.metrics if gateway is not None else GatewayMetrics(config.metrics_prefix),
        input_budget=gateway.input_budget if gateway is not None else input_budget(config),
    )
    middleware = [Middleware(AccessMiddleware, context=context)]
    if gateway is not None and gateway.models is not None:
        middleware.append(Middleware(ModelMiddleware, context=context, host=gateway.models))
    profiling = [
        Route("/start_profile", start_profile, methods=["POST"]),
        Route("/stop_profile", stop_profile, methods=["POST"]),
    ]
    adapters = [
        Route("/v1/load_lora_adapter", load_lora_adapter, methods=["POST"]),
        Route("/v1/unload_lora_adapter", unload_lora_adapter, methods=["POST"]),
    ]
    app = Starlette(
        routes=[
            *(adapters if config.lora_dir is not None else ()),
            *(profiling if engine.config.profile_dir is not None else ()),
            Route("/", page),
            Route("/static/{name:path}", static),
            Route("/health", health),
            Route("/ping", health, methods=["GET", "POST"]),
            Route("/load", load),
            Route("/health/ready", ready),
            Route("/metrics", metrics),
            Route("/version", version),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/detokenize", detokenize, methods=["POST"]),
            Route("/v1/requests", requests),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/pause", pause, methods=["POST"]),
            Route("/resume", resume, methods=["POST"]),
            Route("/is_paused", is_paused),
            Route("/sleep", sleep, methods=["POST"]),
            Route("/wake_up", wake_up, methods=["POST"]),
            Route("/is_sleeping", is_sleeping),
            Route("/update_weights_from_disk", update_weights_from_disk, methods=["POST"]),
            Route("/weight_info", weight_info),
            Route("/reset_prefix_cache", reset_prefix_cache, methods=["POST"]),
            Route("/reset_mm_cache", reset_other_cache, methods=["POST"]),
            Route("/reset_encoder_cache", reset_other_cache, methods=["POST"]),
            Route("/collective_rpc", collective_rpc, methods=["POST"]),
            Route("/v1/operator/models", list_resident),
            Route("/v1/operator/models/stop", stop_model, methods=["POST"]),
            Route("/v1/responses", responses, methods=["POST"]),
            Route("/v1/responses", no_websocket, methods=["GET"]),
            Route("/v1/responses/compact", no_such_operation, methods=["POST"]),
            Route("/v1/responses/input_tokens", input_tokens, methods=["POST"]),
            Route("/v1/responses/{id}", get_response, methods=["GET"]),
            Route("/v1/responses/{id}", delete_response, methods=["DELETE"]),
            Route("/v1/responses/{id}/cancel", cancel_response, methods=["POST"]),
            Route("/v1/responses/{id}/input_items", list_input_items, methods=["GET"]),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/embeddings", embeddings, methods=["POST"]),
            Route("/classify", classify, methods=["POST"]),
            Route("/pooling", pooling, methods=["POST"]),
            Route("/score", score, methods=["POST"]),
            Route("/v1/score", score, methods=["POST"]),
            Route("/rerank", rerank, methods=["POST"]),
            Route("/v1/rerank", rerank, methods=["POST"]),
            Route("/v2/rerank", rerank, methods=["POST"]),
        ],
        middleware=middleware,
        exception_handlers={TrioletError: answer_error, HTTPException: answer_http_error},
    )
    app.state.context = context
    return app
