"""Engines and a router in front of them, each a program of its own, and a client of its WebSocket."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs

from tests.e2e.server import Server, serve
from tests.source_tree import SRC
from triolet.client.address import ServerAddress
from triolet.client.websocket import open_responses_socket


@attrs.frozen
class Fleet:
    """Running engines, and the router in front of them."""

    engines: list[Server]
    router: Server

    def moved(self) -> float:
        """Requests that went on at another engine."""
        lines = self.router.get("/metrics").splitlines()
        return next(
            float(line.split()[-1])
            for line in lines
            if line.startswith("triolet:router_moved_requests_total")
        )


@contextmanager
def open_fleet(num_engines: int, *flags: str) -> Iterator[Fleet]:
    """Start engines with these flags, and a router."""
    with ExitStack() as stack:
        engines = [stack.enter_context(serve("--dtype", "float32", *flags)) for _ in range(num_engines)]
        process = subprocess.Popen(
            [sys.executable, "-m", "triolet", "route", "--port", "0", *(engine.url for engine in engines)],
            env={**os.environ, "PYTHONPATH": str(SRC)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        assert process.stdout is not None
        stack.enter_context(process.stdout)
        yield Fleet(engines, Server(process, process.stdout.readline().strip()))


async def events_of(url: str, payload: dict[str, Any], api_key: str | None = None) -> list[dict[str, Any]]:
    """Ask for one response; return all its events."""
    events: list[dict[str, Any]] = []
    async with open_responses_socket(ServerAddress.of(url, api_key)) as socket:
        await socket.send(json.dumps({"type": "response.create", **payload}))
        while not events or not ended(events[-1]):
            events.append(json.loads(await socket.receive()))
    return events


def ended(event: dict[str, Any]) -> bool:
    """Tell whether an event is the last one of its response."""
    return event["type"] in ("response.completed", "response.incomplete", "response.failed", "error")


def text_of(events: list[dict[str, Any]]) -> str:
    """Return the text that the deltas are."""
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
