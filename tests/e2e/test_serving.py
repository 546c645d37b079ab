"""`triolet serve` against clients that die, clients that stall, and signals."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from math import inf
from typing import Any

import pytest
import trio

from tests.actors.harness import STEP_S, fake_engine
from tests.e2e.server import Server, serve
from tests.server.routes.harness import MODEL, ChatTokenizer
from triolet.config.server import GatewayConfig
from triolet.engine.engine import Engine
from triolet.server import create_app
from triolet.server.responses.service import open_gateway
from triolet.server.transport.listener import Listener

# Asks for a long stream, says so when it has the first piece of it, and reads on for ever.
CLIENT = """
import socket, sys
stream = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
stream.sendall(sys.argv[2].encode())
while data := stream.recv(65536):
    if b"DELTA" in data or b"delta" in data or b"choices" in data:
        print("streaming", flush=True)
"""
LONG: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "HELLO"}]},
    "/v1/completions": {"prompt": "HELLO", "max_tokens": 200},
    "/v1/responses": {"input": "HELLO"},
}


def request_of(path: str, **fields: object) -> str:
    body = json.dumps({"model": MODEL, "stream": True, **LONG[path], **fields})
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n{body}"


@asynccontextmanager
async def listening() -> AsyncGenerator[tuple[Engine, int]]:
    """The whole of a server in this process, with a step of 10 ms of real time."""
    config = GatewayConfig(port=0)
    async with fake_engine(None, ChatTokenizer()) as engine, open_gateway(engine, config) as gateway:
        front = Listener(config, create_app(engine, config, gateway=gateway), gateway.serve_websocket)
        async with trio.open_nursery() as nursery:
            url = await nursery.start(front.run)
            yield engine, int(url.rpartition(":")[2])
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("path", LONG)
async def test_a_client_that_is_killed_frees_its_blocks_within_a_step_and_50_ms(path: str) -> None:
    async with listening() as (engine, port):
        took_s = [inf]
        while min(took_s) > STEP_S + 0.05 and len(took_s) <= 10:  # the machine may be busy
            client = await trio.lowlevel.open_process(
                [sys.executable, "-c", CLIENT, str(port), request_of(path)], stdout=subprocess.PIPE
            )
            assert client.stdout is not None
            assert (await client.stdout.receive_some()).startswith(b"streaming")
            assert engine.statistics().kv_blocks_in_use > 0
            client.kill()
            began = time.perf_counter()
            while engine.statistics().kv_blocks_in_use:  # a count of the engine's
                await trio.sleep(0.001)
                assert time.perf_counter() - began < 2
            took_s.append(time.perf_counter() - began)
            await client.wait()
            await client.stdout.aclose()
        assert min(took_s) <= STEP_S + 0.05, took_s


@pytest.fixture
def server() -> Iterator[Server]:
    with serve("--grace-period", "2") as running:
        yield running


def stalled_client(port: int) -> socket.socket:
    """Asks for megabytes, and never reads."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    wish = request_of("/v1/chat/completions", n=8, logprobs=True, top_logprobs=20, ignore_eos=True, seed=1)
    client.sendall(wish.encode())
    return client


def test_a_signal_ends_the_server_within_the_grace_period_whoever_does_not_read(server: Server) -> None:
    clients = [stalled_client(server.port) for _ in range(3)]
    time.sleep(1)
    assert server.metrics()["num_requests_running"] > 0
    began = time.monotonic()
    assert server.stop() == 0
    # What runs may use the whole of the grace period; after it nothing may hold the end up but the goodbye itself.
    assert time.monotonic() - began < 2 + 2 + 3
    for client in clients:
        client.close()


def test_what_runs_when_the_signal_comes_ends_with_a_word(server: Server) -> None:
    client = socket.create_connection(("127.0.0.1", server.port))
    client.sendall(request_of("/v1/chat/completions", ignore_eos=True, n=8, seed=1).encode())
    received = client.recv(100)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    with pytest.raises(OSError, match=r".+"):
        socket.create_connection(("127.0.0.1", server.port))
    while data := client.recv(2**16):
        received += data
    client.close()
    assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert received.count(b'"finish_reason":"length"') == 8 or b"service_unavailable" in received
    assert server.process.wait(10) == 0


def test_a_second_signal_ends_at_once() -> None:
    with serve("--grace-period", "60") as server:
        clients = [stalled_client(server.port) for _ in range(2)]
        time.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert server.stop() != 0  # within half of the grace period
    for client in clients:
        client.close()
