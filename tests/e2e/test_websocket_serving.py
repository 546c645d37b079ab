"""The whole of a server in this process, over real sockets: clients that are killed, and thousands that come and go."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio
import trustme
from websockets.sync.client import connect

from tests.actors.executors.frames import TEXT, Frame
from tests.e2e.server import serve
from tests.e2e.test_serving import listening, num_steps_of_a_killed, until
from tests.server.responses.websocket_client import ENDINGS, Client
from tests.server.transport.test_websocket import HEAD
from tests.source_tree import SRC
from triolet.engine.engine import Engine

# Asks for long streams, says so when it has begun to get them, and reads on for ever.
CLIENT = """
import json, sys
from websockets.sync.client import connect
with connect(f"ws://localhost:{sys.argv[1]}/v1/responses") as socket:
    for lane in "abc":
        wish = {"type": "response.create", "model": "triolet-nano", "input": "HELLO", "stream_id": lane}
        socket.send(json.dumps({**wish, "ignore_eos": True}))
    for message in socket:
        if "delta" in message:
            print("streaming", flush=True)
"""


async def test_a_client_that_is_killed_frees_its_blocks_with_the_step_in_flight() -> None:
    async with listening() as (engine, port):
        assert await num_steps_of_a_killed([sys.executable, "-c", CLIENT, str(port)], engine) <= 3


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


async def come_and_go(port: int, number: int) -> None:
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    client = Client(stream)
    assert await client.open()
    match number % 3:
        case 0:  # says goodbye
            await client.send({"type": "response.cancel"})
            await client.next_events()
            await stream.aclose()
        case 1:  # is just gone
            await trio.aclose_forcefully(stream)
        case 2:  # is gone in the middle of an answer
            await client.create(max_output_tokens=100)
            await client.next_events()
            await stream.aclose()


async def until_idle(engine: Engine, num_tasks: int) -> None:
    for _ in range(6000):  # five minutes
        if trio.lowlevel.current_statistics().tasks_living == num_tasks and not len(engine._core.journal):
            return
        await trio.sleep(0.05)
    raise AssertionError(f"{trio.lowlevel.current_statistics().tasks_living - num_tasks} tasks are left")


@pytest.mark.slow
@pytest.mark.skipif(
    not os.path.exists("/proc/self/statm"), reason="counts descriptors and memory through /proc"
)
async def test_ten_thousand_connections_leave_nothing_behind() -> None:
    num_rounds, num_clients, at_once = 20, 500, 100
    async with listening() as (engine, port):
        await come_and_go(port, 2)
        await trio.sleep(0.5)
        num_tasks = trio.lowlevel.current_statistics().tasks_living
        descriptors, resident = num_descriptors(), []
        for _ in range(num_rounds):
            for first in range(0, num_clients, at_once):
                async with trio.open_nursery() as nursery:
                    for number in range(first, first + at_once):
                        nursery.start_soon(come_and_go, port, number)
            await until_idle(engine, num_tasks)
            assert num_descriptors() == descriptors
            gc.collect()
            resident.append(resident_bytes())
        print("resident MiB after each round:", [round(size / 2**20, 1) for size in resident])
        assert engine.statistics().kv_blocks_in_use == 0
        assert max(resident[-3:]) <= 1.02 * min(resident[-3:])
        assert resident[-1] <= 1.02 * resident[num_rounds // 2]


@pytest.mark.slow
def test_a_port_that_is_taken_is_said_and_ends_the_command() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "triolet", "serve", "--port", str(port)]
        environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 2 and ran.stdout == ""
    assert f"--port must be free; another program listens there; got {port}" in ran.stderr


def stalled_client(port: int) -> socket.socket:
    """Asks for much, in many lanes, and never reads."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.sendall(HEAD.replace(b"Host: x", b"Host: localhost"))
    assert client.recv(12) == b"HTTP/1.1 101"
    for lane in "abcdefgh":
        wish = {
            "type": "response.create",
            "model": "triolet-nano",
            "input": "x",
            "stream_id": lane,
            "ignore_eos": True,
            "top_logprobs": 20,
        }
        client.sendall(Frame(TEXT, json.dumps(wish).encode()).encode())
    return client


@pytest.mark.slow
def test_a_signal_ends_the_server_within_the_grace_period_also_with_clients_that_do_not_read() -> None:
    with serve("--grace-period", "5") as server:
        clients = [stalled_client(server.port) for _ in range(3)]
        until(lambda: server.metrics()["num_requests_running"] > 0)
        time.sleep(1)  # until the clients' buffers are full
        # A wait for these clients would never end, so the limit may be many grace periods.
        assert server.stop(within_s=60) == 0
        for client in clients:
            client.close()


@pytest.mark.slow
def test_a_stream_gets_its_ending_before_the_server_ends() -> None:
    with (
        serve("--grace-period", "2") as server,
        connect(f"ws://127.0.0.1:{server.port}/v1/responses") as client,
    ):
        wish = {"type": "response.create", "model": "triolet-nano", "input": "x"}
        client.send(json.dumps({**wish, "ignore_eos": True, "stream_id": "long"}))
        client.send(json.dumps({**wish, "max_output_tokens": 5, "stream_id": "short"}))
        events: list[Any] = []
        while sum(event["type"] == "response.created" for event in events) < 2:
            events.append(json.loads(client.recv()))
        server.process.send_signal(signal.SIGTERM)
        events += [json.loads(message) for message in client]
        assert client.close_code == 1001
        assert server.process.wait(300) == 0
    last = {event["stream_id"]: event for event in events if event["type"] in ENDINGS}
    assert last["short"]["type"] in ("response.incomplete", "response.completed")
    assert last["long"]["type"] in ("response.failed", "response.incomplete", "response.completed")


@pytest.mark.slow
def test_with_a_certificate_the_server_speaks_tls_and_nothing_else(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    key.write_bytes(certificate.private_key_pem.bytes())
    chain.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    with serve("--certfile", str(chain), "--keyfile", str(key)) as server:
        assert server.url.startswith("https://")
        with connect(f"wss://localhost:{server.port}/v1/responses", ssl=trusting) as client:
            wish = {"type": "response.create", "model": "triolet-nano", "input": "Hello!", "temperature": 0}
            client.send(json.dumps(wish))
            events = [json.loads(client.recv())]
            while events[-1]["type"] not in ENDINGS:
                events.append(json.loads(client.recv()))
        assert events[-1]["type"] == "response.completed"
        with socket.create_connection(("127.0.0.1", server.port)) as plain:
            plain.sendall(HEAD)
            with suppress(ConnectionResetError):
                assert not plain.recv(1000).startswith(b"HTTP/1.1")
        assert server.stop() == 0
