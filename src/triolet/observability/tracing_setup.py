"""Whether spans are exported, and what becomes of the trace headers that callers bring. There is no Trio in it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from triolet.config.engine import EngineConfig
from triolet.core.request.trace_context import TraceHeaders, pick_trace_headers
from triolet.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from triolet.observability.otlp import Tracing

logger = logging.getLogger("triolet.tracing")


def open_tracing(config: EngineConfig) -> Tracing | None:
    """Who exports spans; None if nobody is to.

    Raises:
        ConfigError: the packages for it are not installed.
    """
    endpoint = config.otlp_traces_endpoint
    if endpoint is None:
        return None
    from triolet.observability.otlp import Tracing

    try:
        return Tracing.to(endpoint, config.model_name)
    except ImportError as error:
        rule = "used with the extra otel (pip install 'triolet[otel]')"
        raise ConfigError("otlp_traces_endpoint", rule, endpoint) from error


def accepted_trace_headers(given: object, tracing: Tracing | None) -> TraceHeaders:
    """What a request carries along of the headers that its caller gave.

    Args:
        given: by name, in any case; only the two of W3C Trace Context count. Without any, the span counts that the
            calling task is in.
        tracing: who will want them; None drops them, with one warning for all.
    Raises:
        InvalidRequest: they are no mapping of texts.
    """
    if given is None:
        return () if tracing is None else tracing.current_headers()
    if not isinstance(given, Mapping) or not all(
        isinstance(item, str) for pair in given.items() for item in pair
    ):
        rule = "trace_headers must be a mapping of texts to texts"
        raise InvalidRequest(f"{rule}, got {type(given).__name__}", field="trace_headers", got=given)
    picked = pick_trace_headers(given)
    if picked and tracing is None:
        _warn_once()
        return ()
    return picked


@cache
def _warn_once() -> None:
    logger.warning("a request belongs to a trace, but none are exported (otlp_traces_endpoint)")
