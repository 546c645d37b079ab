"""The page at `/`: files of the package, and the headers that let them do no more than they must."""

from __future__ import annotations

from importlib.resources import files
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

FILES: Final = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "app.js": "text/javascript; charset=utf-8",
    "connection.js": "text/javascript; charset=utf-8",
    "conversation.js": "text/javascript; charset=utf-8",
    "engine.js": "text/javascript; charset=utf-8",
    "settings.js": "text/javascript; charset=utf-8",
}
# Only what is in these files runs, and it speaks to nobody but this server.
HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


async def page(request: Request) -> Response:
    """The page itself."""
    return _file("index.html")


async def static(request: Request) -> Response:
    """What it is made of."""
    return _file(request.path_params["name"])


def _file(name: str) -> Response:
    if name not in FILES:
        raise HTTPException(404)
    content = (files("triolet.server.routes") / "static" / name).read_bytes()
    return Response(content, headers={"content-type": FILES[name], **HEADERS})
