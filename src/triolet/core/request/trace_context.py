"""Trace context of a request: the two headers of W3C Trace Context, carried along unread.

The headers are not checked here. The exporter of spans reads them with OpenTelemetry's own parser, which ignores a
header that it does not understand.

Source: W3C Trace Context, level 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TRACE_HEADERS = ("traceparent", "tracestate")
MAX_HEADER_CHARS = 1024  # W3C asks for 512 at least; a longer one costs memory and says nothing more

TraceHeaders = tuple[tuple[str, str], ...]
"""Names, in lower case, and values."""


def pick_trace_headers(headers: Mapping[str, Any], prefix: str = "") -> TraceHeaders:
    """Return the trace headers among `headers`; values that are not text, or too long, are left out.

    Args:
        headers: values by name, in upper or lower case.
        prefix: text before the names of trace headers.
    """
    wanted = {prefix + name: name for name in TRACE_HEADERS}
    return tuple(
        (wanted[name.lower()], value)
        for name, value in headers.items()
        if name.lower() in wanted and isinstance(value, str) and len(value) <= MAX_HEADER_CHARS
    )
