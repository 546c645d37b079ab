"""Tracing set-up: the exporter of an engine, and the trace headers of requests. Neither Trio nor torch is used here."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from triolet.config.engine import EngineConfig
from triolet.core.request.request import TraceHeaders, pick_trace_headers
from triolet.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from triolet.observability.otlp import Tracing

logger = logging.getLogger("triolet.tracing")


def open_tracing(config: EngineConfig) -> Tracing | None:
    """Return the exporter of spans; None without an endpoint.

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
    """Return the trace headers of a request.

    Args:
        given: by name, in any case; only the two of W3C Trace Context count. Without any, the span counts that the
            calling task is in.
        tracing: the exporter; None drops the headers, with one warning in all.
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
