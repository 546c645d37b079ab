"""What every handler works with: the engine, the rules of the server, and who is asking."""

from __future__ import annotations

import secrets
import time
from typing import Any

import attrs
import trio
from starlette.requests import Request

from triolet.actors.engine import Engine
from triolet.config_gateway import GatewayConfig
from triolet.metrics import Metrics
from triolet.wire.access import Access
from triolet.wire.errors import model_not_found, wrong
from triolet.wire.generation import GenerationRequest
from triolet.wire.store import ResponseStore

TIMEOUT_HEADER = "x-request-timeout"


def new_id(prefix: str) -> str:
    """An id that nobody can guess."""
    return f"{prefix}_{secrets.token_hex(16)}"


@attrs.frozen(eq=False, kw_only=True)
class Service:
    """One app's.

    Args:
        engine: what answers.
        config: of the server.
        store: responses that later ones may continue.
        metrics: of the engine.
        began_at: when the app was made, seconds since the epoch.
    """

    engine: Engine
    config: GatewayConfig
    store: ResponseStore
    metrics: Metrics
    began_at: int = attrs.field(factory=lambda: int(time.time()))

    @property
    def access(self) -> Access:
        """Who may enter."""
        config = self.config
        return Access(
            listens_on=config.host,
            api_keys=config.api_keys,
            allowed_origins=config.allowed_origins,
            allowed_hosts=config.allowed_hosts,
        )

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that the model is asked for by; the first is the one that it answers with."""
        names = (self.engine.model_name, self.engine.config.model)
        return tuple(dict.fromkeys(name for name in names if name))

    @property
    def tool_parser(self) -> str | None:
        """How the model writes calls of tools."""
        return getattr(self.engine, "tool_parser", None)

    @property
    def reasoning_parser(self) -> str | None:
        """How the model marks reasoning."""
        return getattr(self.engine, "reasoning_parser", None)

    def check_model(self, name: str) -> None:
        """Hold the name of a model to those that are served.

        Raises:
            WireError: there is none of that name.
        """
        if name not in self.model_names:
            raise model_not_found(name)

    def arguments(self, request: Request, body: GenerationRequest) -> dict[str, Any]:
        """What `Engine.generate` is told beside prompt and parameters."""
        return {
            "priority": body.priority,
            "client": body.client or owner_of(request),
            "cache_salt": body.cache_salt,
            "deadline": deadline_of(request, body.timeout),
        }


def service_of(request: Request) -> Service:
    """The app's."""
    service: Service = request.app.state.service
    return service


def owner_of(request: Request) -> str | None:
    """Whose request it is, where there are keys."""
    owner: str | None = request.scope["state"].get("owner")
    return owner


def deadline_of(request: Request, timeout_s: float | None) -> float | None:
    """When the answer ends with what there is, by the body or by the header, whichever is sooner.

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
    arrived_s: float = request.scope["state"].get("arrived_s", trio.current_time())
    return arrived_s + min(seconds)
