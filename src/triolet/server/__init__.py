"""Serve an engine over HTTP and WebSockets: an ASGI app with the routes of OpenAI and vLLM, and a chat page.

    app = triolet.server.create_app(engine)

The app runs on any ASGI server on Trio and can be mounted in another app. `serve(engine)` listens itself, for
WebSockets too.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triolet.server.routes.app import create_app
    from triolet.server.routes.serve import serve

__all__ = ["create_app", "serve"]

_HOMES = {"create_app": "triolet.server.routes.app", "serve": "triolet.server.routes.serve"}


def __getattr__(name: str) -> Any:
    # Imported on first use: a program that needs only the transport does not load Starlette.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
