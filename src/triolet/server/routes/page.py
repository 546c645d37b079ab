"""The page at `/`: files of the package, and the headers that let them do no more than they must."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from triolet.core.request.param_validation import ApiFamily
from triolet.core.request.params import SAMPLING_PARAMETERS

TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
}
PARAMETERS: Final = "parameters.js"
"""Made from the table of sampling parameters, so that the page has the controls that the engine has."""


def _files_below(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path and the content type of each file of the page; what has no type here is not served."""
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _files_below(entry, f"{prefix}{entry.name}/")
        elif (kind := TYPES.get(Path(entry.name).suffix)) is not None:
            yield prefix + entry.name, kind


FOLDER: Final = files("triolet.server.routes") / "static"
FILES: Final = dict(sorted(_files_below(FOLDER)))
"""Content type of each file of the page, by its path."""

# Only these files run, and they connect to this server only.
HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


async def page(request: Request) -> Response:
    """Return the page itself."""
    return _file(request, "index.html")


async def static(request: Request) -> Response:
    """Return one of the files that the page loads."""
    name = request.path_params["name"]
    if name == PARAMETERS:
        return Response(parameters_module(), headers={"content-type": TYPES[".js"], **HEADERS})
    return _file(request, name)


@cache
def parameters_module() -> str:
    """Return a JavaScript module with the controls of the sampling parameters, under their names in Responses."""
    controls = []
    for parameter in SAMPLING_PARAMETERS:
        control, name = parameter.spec.control, parameter.wire_name(ApiFamily.RESPONSES)
        if control is not None and name is not None:
            limits = {"min": control.minimum, "max": control.maximum, "step": control.step}
            given = {key: value for key, value in limits.items() if value is not None}
            shown = {"name": name, "label": control.label, "kind": control.kind, "help": parameter.spec.help}
            if control.kind == "range":
                given["default"] = parameter.default
            controls.append({**shown, **given})
    return f"export const PARAMETERS = {json.dumps(controls, indent=2)};\n"


@cache
def _content_of(name: str) -> tuple[bytes, str]:
    """Return a file of the page and its etag, read once: the event loop waits for the disk."""
    content = (FOLDER / name).read_bytes()
    return content, f'"{hashlib.sha256(content).hexdigest()[:32]}"'


def _file(request: Request, name: str) -> Response:
    if name not in FILES:
        raise HTTPException(404)
    content, etag = _content_of(name)
    # A browser asks each time whether a file has changed, and is told in a few bytes that it has not.
    headers = {"content-type": FILES[name], "etag": etag, **HEADERS}
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers)
