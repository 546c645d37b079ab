"""Context of the request handlers: the engine, the server's settings, and the key of a request."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import attrs
import trio
from starlette.requests import Request

from triolet.config.server import GatewayConfig
from triolet.engine.engine import Engine
from triolet.observability.prometheus import GatewayMetrics, Metrics
from triolet.protocol.access import Access
from triolet.protocol.errors import model_not_found, wrong
from triolet.protocol.generation import GenerationRequest
from triolet.protocol.pooling import PooledRequest
from triolet.protocol.responses.requests import CreateResponse
from triolet.protocol.responses.session import ResponsesContext
from triolet.server.responses.generate import (
    ActiveResponses,
    access_to,
    adapter_argument,
    salt_of,
)
from triolet.server.responses.service import ResponsesService
from triolet.server.transport.client_stream import InputBudget

TIMEOUT_HEADER = "x-request-timeout"

NamesModel = TypeVar("NamesModel", bound=GenerationRequest | PooledRequest | CreateResponse)


@attrs.frozen(eq=False, kw_only=True)
class AppContext:
    """Shared state of one app.

    Args:
        engine: computes the answers.
        config: limits and rules of the server.
        responses_context: how responses are made, and where they are remembered.
        active: responses that are being made.
        gateway: of the server that the app belongs to, if any.
        gateway_metrics: of connections and responses.
        metrics: of the engine.
        input_budget: memory for bodies that are being read.
        began_at: start of the app, seconds since the epoch.
        adapter_numbers: for adapters that are loaded over HTTP; none is used twice.
    """

    engine: Engine
    config: GatewayConfig
    responses_context: ResponsesContext
    active: ActiveResponses
    gateway: ResponsesService | None
    gateway_metrics: GatewayMetrics
    metrics: Metrics
    input_budget: InputBudget
    began_at: int = attrs.field(factory=lambda: int(time.time()))
    adapter_numbers: Iterator[int] = attrs.field(factory=lambda: itertools.count(1))

    @property
    def access(self) -> Access:
        return access_to(self.engine, self.config)

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names of the model; responses carry the first one."""
        return self.responses_context.models

    def check_model(self, name: str, *, takes_adapters: bool = False) -> None:
        """Check the name of a model.

        Args:
            takes_adapters: whether it may be the name of a loaded adapter, too. The engine knows them, so that this is
                not for the thread in which a long body is parsed.
        Raises:
            WireError: no model of that name is served.
        """
        adapters = self.responses_context.adapter_names if takes_adapters else tuple
        if name not in self.model_names and name not in adapters():
            raise model_not_found(name)

    def named(self, body: NamesModel) -> NamesModel:
        """Return a body with the name of its model or adapter: the server's first one where the client names none.

        Raises:
            WireError: no model or adapter of that name is served.
        """
        if not body.model:
            return attrs.evolve(body, model=self.model_names[0])
        self.check_model(body.model, takes_adapters=True)
        return body

    def adapter_argument(self, name: str) -> dict[str, Any]:
        """Return the argument of `Engine.generate` for the adapter of a name; none if it is the model's.

        Raises:
            WireError: neither the model nor an adapter has that name.
        """
        return {} if name in self.model_names else adapter_argument(self.engine, name)

    def acquire_slot(self, owner: str | None) -> AbstractContextManager[None]:
        """Hold one of the active responses that a key may have.

        Raises:
            WireError: the key has reached its limit.
        """
        # An app without a gateway has no limits per key.
        return nullcontext() if self.gateway is None else self.gateway.acquire_slot(owner)

    def arguments(self, request: Request, body: GenerationRequest | PooledRequest) -> dict[str, Any]:
        """Return the arguments of `Engine.generate` or `encode` beside prompt and parameters.

        Raises:
            WireError: the key may not set this priority, or the deadline is invalid.
        """
        self.access.check_priority(owner_of(request), body.priority)
        return {
            "priority": body.priority,
            "client": body.client or owner_of(request),
            "cache_salt": salt_of(body.cache_salt, owner_of(request)),
            "deadline": deadline_of(request, body.timeout),
            "trace_headers": request.headers,
            "owner": owner_of(request),
        }


def context_of(request: Request) -> AppContext:
    """Return the context of the app that serves a request."""
    # With several models, a request has the context of its own.
    context: AppContext = request.scope["state"].get("context") or request.app.state.context
    return context


def owner_of(request: Request) -> str | None:
    """Return the name of the key of a request; None where there are no keys."""
    owner: str | None = request.scope["state"].get("owner")
    return owner


def client_of(request: Request) -> str:
    """Return the key's name or, without keys, the client's address: what limits per client count by."""
    address = request.client.host if request.client is not None else ""
    return owner_of(request) or address


def deadline_of(request: Request, timeout_s: float | None) -> float | None:
    """Return the deadline by the body or by the header, whichever is sooner; None without one.

    Raises:
        WireError: the header holds no number of seconds.
    """
    texts = request.headers.getlist(TIMEOUT_HEADER)
    seconds = [] if timeout_s is None else [timeout_s]
    for text in texts:
        try:
            seconds.append(float(text))
        except ValueError:
            raise wrong(TIMEOUT_HEADER, "a number of seconds", text) from None
    if not seconds:
        return None
    if not min(seconds) > 0:  # NaN is not, either
        raise wrong(TIMEOUT_HEADER, "above 0 seconds", min(seconds))
    # From the arrival, since reading a long body takes time as well.
    arrived_s: float = request.scope["state"].get("arrived_s", trio.current_time())
    return arrived_s + min(seconds)
