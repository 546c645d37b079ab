"""A server that is killed: the next one continues its resumable responses from the journal."""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from tests.e2e.server import serve
from tests.e2e.test_handing_over import WISH, connection, heard, text_of

NUM_STREAMS = 32


def wish(number: int) -> dict[str, Any]:
    drawn = {"temperature": 1.0, "seed": number} if number % 2 else {}
    return {**WISH, "input": f"Tell me story number {number}.", "max_output_tokens": 200, **drawn}


@pytest.mark.slow
def test_32_responses_go_on_after_kill_9_as_if_unbroken(tmp_path: Path) -> None:
    flags = ("--journal", str(tmp_path / "journal"))
    before: list[list[Any]] = [[] for _ in range(NUM_STREAMS)]
    with serve(*flags) as server, contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(connection(server)) for _ in before]
        for number, socket in enumerate(sockets):
            socket.send(json.dumps(wish(number)))
        begun = threading.Barrier(NUM_STREAMS + 1)

        def listen(number: int) -> None:
            before[number] += heard(sockets[number], 5 + number)
            begun.wait()
            with contextlib.suppress(ConnectionClosed):
                before[number].extend(heard(sockets[number]))

        readers = [threading.Thread(target=listen, args=(number,)) for number in range(NUM_STREAMS)]
        for reader in readers:
            reader.start()
        begun.wait()
        server.process.kill()
        for reader in readers:
            reader.join()
        server.process.wait()
    with serve(*flags) as server:
        for events in before:
            with connection(server) as socket:
                place = {
                    "response_id": events[0]["response"]["id"],
                    "starting_after": events[-1]["sequence_number"],
                }
                socket.send(json.dumps({"type": "response.resume", **place}))
                events += heard(socket)
        unbroken = []
        for number in range(NUM_STREAMS):
            with connection(server) as socket:
                socket.send(json.dumps(wish(number)))
                unbroken.append(heard(socket))
    for events, expected in zip(before, unbroken, strict=True):
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert text_of(events) == text_of(expected)
        ending = events[-1]["response"]
        assert ending["output"][0]["content"] == expected[-1]["response"]["output"][0]["content"]
        assert ending["usage"]["output_tokens"] == 200
