"""Which trace a request belongs to: the two headers of W3C Trace Context, carried along unread.

Nothing here judges them. Whoever exports a span reads them with OpenTelemetry's own parser, for which a header that it
does not understand is none.

Source: W3C Trace Context, level 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TRACE_HEADERS = ("traceparent", "tracestate")
MAX_HEADER_CHARS = 1024  # W3C asks for 512 at least; a longer one costs memory and says nothing more

TraceHeaders = tuple[tuple[str, str], ...]
"""Names, in small letters, and values."""


def pick_trace_headers(headers: Mapping[str, Any], prefix: str = "") -> TraceHeaders:
    """The headers that belong to a trace, if there are any; others, and what is no text, are left out.

    Args:
        headers: by name, in any case.
        prefix: of their names.
    """
    wanted = {prefix + name: name for name in TRACE_HEADERS}
    return tuple(
        (wanted[name.lower()], value)
        for name, value in headers.items()
        if name.lower() in wanted and isinstance(value, str) and len(value) <= MAX_HEADER_CHARS
    )
