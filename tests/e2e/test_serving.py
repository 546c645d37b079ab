"""`triolet serve` against clients that die, clients that stall, and signals."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from tests.actors.harness import fake_engine
from tests.e2e.server import Server, serve
from tests.server.routes.harness import MODEL, ChatTokenizer
from triolet.config.server import GatewayConfig
from triolet.engine.engine import Engine
from triolet.server import create_app
from triolet.server.responses.service import ResponsesService, open_gateway
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
    async with serving_whole() as (engine, _, _, port):
        yield engine, port


@asynccontextmanager
async def serving_whole(
    config: GatewayConfig = GatewayConfig(port=0),  # noqa: B008
) -> AsyncGenerator[tuple[Engine, ResponsesService, Listener, int]]:
    async with fake_engine(None, ChatTokenizer()) as engine, open_gateway(engine, config) as gateway:
        front = Listener(config, create_app(engine, config, gateway=gateway), gateway.serve_websocket)
        async with trio.open_nursery() as nursery:
            url = await nursery.start(front.run)
            yield engine, gateway, front, int(url.rpartition(":")[2])
            nursery.cancel_scope.cancel()


async def num_steps_of_a_killed(command: list[str], engine: Engine) -> int:
    """Kill a client amid its streams; return how many steps the engine has made when all their blocks are free.

    Steps are counted from the death on, which closes the client's sockets: a busy machine takes longer for each.
    """
    client = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE)
    assert client.stdout is not None
    assert (await client.stdout.receive_some()).startswith(b"streaming")
    assert engine.statistics().kv_blocks_in_use > 0
    client.kill()
    await client.wait()
    num_before = engine.statistics().steps
    while engine.statistics().num_requests_live or engine.statistics().kv_blocks_in_use:  # noqa: ASYNC110
        await trio.sleep(0.001)
    await client.stdout.aclose()
    return engine.statistics().steps - num_before


@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=() if path == "/v1/responses" else pytest.mark.slow) for path in LONG]
)
async def test_a_client_that_is_killed_frees_its_blocks_with_the_step_in_flight(path: str) -> None:
    async with listening() as (engine, port):
        assert (
            await num_steps_of_a_killed([sys.executable, "-c", CLIENT, str(port), request_of(path)], engine)
            <= 3
        )


async def answer_to(port: int, request: bytes) -> bytes:
    """All that a new connection is answered, until the server closes it."""
    received = b""
    async with await trio.open_tcp_stream("127.0.0.1", port) as client:
        await client.send_all(request)
        while data := await client.receive_some():
            received += data
    return received


async def test_while_it_drains_new_requests_and_upgrades_get_503_and_the_running_ones_finish() -> None:
    host = "HTTP/1.1\r\nHost: localhost\r\n"
    upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    requests = {
        **{path: request_of(path) for path in LONG},
        "whole": request_of("/v1/chat/completions", stream=False),
        "health": f"GET /health {host}\r\n",
        "ready": f"GET /health/ready {host}\r\n",
        "models": f"GET /v1/models {host}\r\n",
        "upgrade": f"GET /v1/responses {host}{upgrade}Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
    }
    with trio.fail_after(300):
        async with serving_whole() as (engine, gateway, front, port), trio.open_nursery() as nursery:
            finished: list[bytes] = []

            async def run() -> None:
                finished.append(await answer_to(port, request_of("/v1/completions").encode()))

            nursery.start_soon(run)
            while not engine.statistics().num_requests_live:  # noqa: ASYNC110
                await trio.sleep(0.01)
            far = trio.current_time() + 600
            await front.drain()
            nursery.start_soon(gateway.drain, far)
            nursery.start_soon(engine.drain, far)
            await trio.testing.wait_all_tasks_blocked(0.01)
            for name, request in requests.items():
                answer = await answer_to(port, request.encode())
                assert answer.startswith(b"HTTP/1.1 503"), name
                head, _, body = answer.partition(b"\r\n\r\n")
                assert b"retry-after: 5" in head.lower(), name
                assert json.loads(body)["error"]["code"] == "service_unavailable", name
            assert (await answer_to(port, f"GET /metrics {host}\r\n".encode())).startswith(b"HTTP/1.1 200")
            await front.stop(far)
            nursery.cancel_scope.cancel()
    (answer,) = finished
    assert b'"finish_reason":"length"' in answer and b'"stop_reason":"shutdown"' not in answer


@pytest.fixture
def server() -> Iterator[Server]:
    with serve("--grace-period", "2") as running:
        yield running


def until(condition: Callable[[], bool]) -> None:
    """Wait for it; on a busy machine that may take a while, and no test waits this long when all is well."""
    deadline_s = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def is_refused(port: int) -> bool:
    """Tell whether the server answers new requests with 503, or listens no more."""
    try:
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return not client.recv(100).startswith(b"HTTP/1.1 200")
    except OSError:
        return True


def stalled_client(port: int) -> socket.socket:
    """Asks for megabytes, and never reads."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    wish = request_of("/v1/chat/completions", n=8, logprobs=True, top_logprobs=20, ignore_eos=True, seed=1)
    client.sendall(wish.encode())
    return client


@pytest.mark.slow
def test_a_signal_ends_the_server_within_the_grace_period_also_with_clients_that_do_not_read(
    server: Server,
) -> None:
    clients = [stalled_client(server.port) for _ in range(3)]
    until(lambda: server.metrics()["num_requests_running"] > 0)
    time.sleep(1)  # until the clients' buffers are full
    # What runs may use the whole of the grace period (2 s); after it nothing may hold the end up but the goodbye
    # itself. A wait for these clients would never end, so the limit may be generous.
    assert server.stop(within_s=60) == 0
    for client in clients:
        client.close()


@pytest.mark.slow
def test_what_runs_when_the_signal_comes_ends_with_a_word(server: Server) -> None:
    client = socket.create_connection(("127.0.0.1", server.port))
    client.sendall(request_of("/v1/chat/completions", ignore_eos=True, n=8, seed=1).encode())
    received = client.recv(100)
    server.process.send_signal(signal.SIGTERM)
    until(lambda: is_refused(server.port))
    while data := client.recv(2**16):
        received += data
    client.close()
    assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert received.count(b'"finish_reason":"length"') == 8 or b"service_unavailable" in received
    assert server.process.wait(60) == 0


@pytest.mark.slow
def test_a_second_signal_ends_at_once() -> None:
    with serve("--grace-period", "600") as server:
        clients = [stalled_client(server.port) for _ in range(2)]
        until(lambda: server.metrics()["num_requests_running"] > 0)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: is_refused(server.port))  # two signals that wait together are one
        assert server.stop(within_s=60) != 0  # a tenth of the grace period
    for client in clients:
        client.close()
