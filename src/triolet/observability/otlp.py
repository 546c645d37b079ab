"""Tracing: one span per finished request, exported with OpenTelemetry over OTLP (HTTP, protobuf).

It joins an engine as a stat logger: spans are made in the engine's loop, of numbers that were counted anyway, and sent
by a thread of OpenTelemetry's. Its queue is bounded, and what does not fit is dropped; an exporter that fails or hangs
is a line in the log and nothing else. The tracer is the engine's own: a program's global one is neither used nor set.

Needs the extra `otel`, whose packages are imported when an engine starts that has an `otlp_traces_endpoint`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Self

from triolet.core.metrics.iteration_stats import EngineStatistics, FinishedRequest, IterationStats
from triolet.core.metrics.trace_span import SPAN_NAME, Span, span_of
from triolet.core.request.request import TraceHeaders

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import SpanExporter

CLOSE_S: Final = 3.0  # for what is still to be sent; a collector that does not answer is not waited for
EXPORT_TIMEOUT_S: Final = 3.0  # of one batch, tries again included
DEFAULT_SERVICE: Final = "triolet"

logger = logging.getLogger("triolet.tracing")


def otlp_exporter(endpoint: str) -> SpanExporter:
    """Return the exporter; headers, certificates and the like come from OpenTelemetry's own variables."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)


class Tracing:
    """Spans of one engine.

    Args:
        exporter: where they go.
        model_name: what they call the model.
    """

    def __init__(self, exporter: SpanExporter, model_name: str) -> None:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._exporter, self._model_name = exporter, model_name
        self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("triolet.engine")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, endpoint: str, model_name: str) -> Self:
        """Return a `Tracing` that exports to this URL.

        Raises:
            ImportError: the extra is not installed.
        """
        return cls(otlp_exporter(endpoint), model_name)

    def current_headers(self) -> TraceHeaders:
        """Return the headers of the span that the calling task is in, if the embedding program traces itself."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier)
        return tuple(carrier.items())

    # ------------------------------------------------------------------------------ as a stat logger

    def record(self, statistics: EngineStatistics, iteration: IterationStats) -> None:
        """Export a span for each finished request."""
        self._export_all([finished for finished in iteration.finished_requests if finished.is_last])

    def log(self) -> None:
        """Do nothing: spans are sent as they come."""

    def _export_all(self, requests: Sequence[FinishedRequest]) -> None:
        for finished in requests:
            try:
                self._export(span_of(finished, self._model_name))
            except Exception:
                logger.exception("the span of request %s is lost", finished.request_id)

    def _export(self, span: Span) -> None:
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, Status, StatusCode

        # An empty context to start from: what is active in the engine's loop has nothing to do with the request.
        parent = self._propagator.extract(dict(span.trace_headers), Context())
        made = self._tracer.start_span(
            SPAN_NAME,
            context=parent,
            kind=SpanKind.SERVER,
            attributes=span.attributes,
            start_time=_nanoseconds(span.began_at),
        )
        for name, at in span.events:
            made.add_event(name, timestamp=_nanoseconds(at))
        if span.failure is not None:
            made.set_status(Status(StatusCode.ERROR, span.failure))
        made.end(_nanoseconds(span.ended_at))

    # ------------------------------------------------------------------------------------- the end

    def close(self) -> None:
        """Flush for at most CLOSE_S seconds and end the export thread. Blocks: call it outside of the event loop."""
        shutdown_timer = threading.Timer(CLOSE_S, self._exporter.shutdown)
        shutdown_timer.daemon = True
        shutdown_timer.start()
        self._provider.shutdown()
        shutdown_timer.cancel()
        shutdown_timer.join()


def _resource() -> Resource:
    """Return the resource by `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES`; default service name: triolet."""
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource

    resource = Resource.create()
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        return resource.merge(Resource({SERVICE_NAME: DEFAULT_SERVICE}))
    return resource


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
