"""Two runs of `triolet serve`, one after the other: what the first could not finish, the second one does."""

from __future__ import annotations

import json
import signal
import stat
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect
from websockets.sync.connection import Connection

from tests.e2e.server import Server, serve

ENDINGS = ("error", "response.completed", "response.incomplete", "response.failed")
NUM_TOKENS = 1800  # which no server computes in the grace period
WISH = {
    "type": "response.create",
    "model": "triolet-nano",
    "input": "Tell me a story about a fox.",
    "temperature": 0,
    "ignore_eos": True,
    "max_output_tokens": NUM_TOKENS,
    "resumable": True,
}


def connection(server: Server) -> Connection:
    return connect(f"ws://127.0.0.1:{server.port}/v1/responses")


def heard(socket: Connection, num_events: int = 10**6) -> list[Any]:
    """What comes until there are so many events, or one is the last."""
    events: list[Any] = []
    while len(events) < num_events and not (events and events[-1]["type"] in ENDINGS):
        events.append(json.loads(socket.recv(300)))
    return events


def text_of(events: list[Any]) -> str:
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


@pytest.mark.slow
def test_a_response_goes_on_after_sigterm_and_a_restart_as_if_unbroken(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    flags = ("--snapshot", str(path), "--grace-period", "0.2")
    with serve(*flags) as server, connection(server) as socket:
        socket.send(json.dumps(WISH))
        before = heard(socket, 30)
        server.process.send_signal(signal.SIGTERM)
        before += map(json.loads, socket)
        assert socket.close_code == 1001
        assert server.process.wait(300) == 0
    assert [event["type"] for event in before if event["type"] in ENDINGS] == []
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with serve(*flags) as server:
        assert not path.exists()
        with connection(server) as socket:
            place = {
                "response_id": before[0]["response"]["id"],
                "starting_after": before[-1]["sequence_number"],
            }
            socket.send(json.dumps({"type": "response.resume", **place}))
            after = heard(socket)
        with connection(server) as socket:
            socket.send(json.dumps(WISH))
            unbroken = heard(socket)
    events = before + after
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert text_of(events) == text_of(unbroken)
    ending, expected = events[-1]["response"], unbroken[-1]["response"]
    assert ending["finish_reason"] == "length" and ending["status"] == expected["status"]
    assert ending["output"][0]["content"] == expected["output"][0]["content"]
    assert ending["usage"]["output_tokens"] == NUM_TOKENS
