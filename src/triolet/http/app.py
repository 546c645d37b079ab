"""The app: its routes, and what stands in front of them."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route

from triolet.actors.engine import Engine
from triolet.config_gateway import GatewayConfig
from triolet.errors import TrioletError
from triolet.http.chat import chat_completions
from triolet.http.completions import completions
from triolet.http.errors import answer_error, answer_http_error
from triolet.http.guard import Guard
from triolet.http.operations import health, metrics, model, models, version
from triolet.http.page import page, static
from triolet.http.service import Service
from triolet.http.texts import detokenize, embeddings, tokenize
from triolet.metrics import Metrics
from triolet.wire.store import ResponseStore


def create_app(
    engine: Engine,
    config: GatewayConfig | None = None,
    *,
    store: ResponseStore | None = None,
    metrics_prefix: str = "triolet:",
) -> Starlette:
    """An ASGI app that serves an engine; it must run in the engine's Trio thread.

    Args:
        engine: a running engine. It must go on running while the app does.
        config: keys, origins, hosts and limits; what is about listening is its server's business.
        store: where responses are remembered; by default the app has its own.
        metrics_prefix: of the names at `/metrics`.
    """
    config = config or GatewayConfig()
    store = store or ResponseStore(config.max_stored_responses, config.max_stored_bytes)
    service = Service(engine=engine, config=config, store=store, metrics=Metrics(engine, metrics_prefix))
    app = Starlette(
        routes=[
            Route("/", page),
            Route("/static/{name}", static),
            Route("/health", health),
            Route("/metrics", metrics),
            Route("/version", version),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/detokenize", detokenize, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/embeddings", embeddings, methods=["POST"]),
        ],
        middleware=[Middleware(Guard, service=service)],
        exception_handlers={TrioletError: answer_error, HTTPException: answer_http_error},
    )
    app.state.service = service
    return app
