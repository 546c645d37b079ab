"""A server that is killed: the next one continues its resumable responses from the journal."""

from __future__ import annotations

import contextlib
import itertools
import json
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from websockets.exceptions import ConnectionClosed

from tests.e2e.server import Server, serve
from tests.e2e.test_handing_over import ENDINGS, WISH, connection, heard, text_of

NUM_STREAMS = 32
NUM_KILLS = 50


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


@attrs.define(eq=False)
class Stream:
    """A response, and all that its client has read of it, from however many servers."""

    number: int
    events: list[Any] = attrs.field(factory=list)

    @property
    def is_over(self) -> bool:
        return bool(self.events) and self.events[-1]["type"] in ENDINGS

    def read(self, server: Server, begun: threading.Semaphore) -> None:
        """Ask for it, or for the rest, and read until the end of it or of the server."""
        message = wish(self.number)
        if self.events:
            message = {
                "type": "response.resume",
                "response_id": self.events[0]["response"]["id"],
                "starting_after": self.events[-1]["sequence_number"],
            }
        is_begun = False
        with contextlib.suppress(ConnectionClosed), connection(server) as socket:
            socket.send(json.dumps(message))
            while not self.is_over:
                self.events.append(json.loads(socket.recv(300)))
                if not is_begun:
                    is_begun = True
                    begun.release()


@contextlib.contextmanager
def reading(server: Server, streams: list[Stream]) -> Iterator[None]:
    """Read the streams in threads; all have an event of this server in the scope, and have ended after it."""
    begun = threading.Semaphore(0)
    readers = [threading.Thread(target=stream.read, args=(server, begun)) for stream in streams]
    for reader in readers:
        reader.start()
    for _ in readers:
        assert begun.acquire(timeout=300)
    yield
    for reader in readers:
        reader.join()


@pytest.mark.slow
def test_no_response_is_lost_or_changed_by_50_kills_of_the_server(tmp_path: Path) -> None:
    # One that has ended makes way for a new one, so that every kill meets 32.
    flags = ("--journal", str(tmp_path / "journal"))
    numbers = itertools.count()
    streams: list[Stream] = []
    num_met = 0  # responses that had not ended, of all kills
    for _ in range(NUM_KILLS):
        going = [stream for stream in streams if not stream.is_over]
        fresh = [Stream(next(numbers)) for _ in range(NUM_STREAMS - len(going))]
        streams += fresh
        with serve(*flags) as server, reading(server, [*going, *fresh]):
            server.process.kill()
        num_met += sum(not stream.is_over for stream in [*going, *fresh])
    with serve(*flags) as server, reading(server, [stream for stream in streams if not stream.is_over]):
        pass
    unbroken = [Stream(stream.number) for stream in streams]
    with serve() as server:
        for start in range(0, len(unbroken), NUM_STREAMS):
            with reading(server, unbroken[start : start + NUM_STREAMS]):
                pass
    assert num_met >= NUM_KILLS * NUM_STREAMS // 2  # some may end before the last one begins
    for stream, expected in zip(streams, unbroken, strict=True):
        assert [event["sequence_number"] for event in stream.events] == list(range(len(stream.events)))
        assert text_of(stream.events) == text_of(expected.events)
        ending, whole = stream.events[-1]["response"], expected.events[-1]["response"]
        assert ending["output"][0]["content"] == whole["output"][0]["content"]
        assert ending["usage"]["output_tokens"] == whole["usage"]["output_tokens"] == 200


@pytest.mark.slow
def test_responses_end_as_ever_when_the_file_of_the_journal_can_grow_no_more(tmp_path: Path) -> None:
    path, log = tmp_path / "journal", tmp_path / "log"
    streams, after = [Stream(number) for number in range(4)], Stream(4)
    with log.open("wb") as file, serve("--journal", str(path), log=file.fileno()) as server:
        with reading(server, streams):
            assert server.metrics()["journal_write_errors"] == 0
            limit = path.stat().st_size + 100
            resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (limit, limit))
        with reading(server, [after]):
            pass
        metrics = server.metrics()
        assert metrics["journal_write_errors"] == 1
        assert path.stat().st_size <= limit
        assert [stream.events[-1]["response"]["usage"]["output_tokens"] for stream in streams] == [200] * 4
        assert after.events[-1]["response"]["usage"]["output_tokens"] == 200
    assert log.read_text().count("cannot be written, the server goes on without it") == 1
