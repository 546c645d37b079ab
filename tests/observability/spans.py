"""A trace that a caller has begun, and what the tests of tracing ask of the spans that come out."""

from __future__ import annotations

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"
OTHER = f"00-{'1' * 32}-{SPAN}-01"
HEADERS = {"traceparent": PARENT, "tracestate": "congo=t61rcWkgMzE"}
ENDPOINT = "http://127.0.0.1:1/v1/traces"


def the_span(exporter: InMemorySpanExporter) -> ReadableSpan:
    [span] = exporter.get_finished_spans()
    return span


def trace_of(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"{span.context.trace_id:032x}"
