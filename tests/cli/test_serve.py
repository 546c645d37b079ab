"""`triolet serve`: its flags, and the listener that is opened again when it breaks."""

from __future__ import annotations

import gc
import logging
import os
import platform
import socket
import subprocess
import sys
from contextlib import AsyncExitStack
from typing import Any, cast

import attrs
import click
import pytest
import trio
import trio.testing
from click.testing import CliRunner
from trio.testing import MockClock

from tests.actors.harness import fake_engine
from tests.server.responses.websocket_client import ChatTokenizer, Client
from triolet.cli import main, options
from triolet.cli.models.chosen import SERVER_DEFAULTS
from triolet.cli.serve import (
    FREED_BLOCKS,
    NUM_TRIMS,
    TRIM_INTERVAL_S,
    Server,
    return_memory,
    run,
    warn_of_open_access,
)
from triolet.config.engine import EngineConfig
from triolet.config.server import GatewayConfig
from triolet.core.request.params import SamplingParams
from triolet.engine.engine import Engine
from triolet.errors import ConfigError
from triolet.server.responses.service import ResponsesService, open_gateway
from triolet.server.transport.client_stream import FREE_BYTES, InputBudget
from triolet.server.transport.listener import Listener


def test_every_field_of_both_configurations_has_a_flag_with_its_help() -> None:
    shown = " ".join(CliRunner().invoke(main, ["serve", "--help"], terminal_width=400).output.split())
    for config in (EngineConfig, GatewayConfig):
        for field in attrs.fields(config):
            assert f"--{field.name.replace('_', '-')} " in shown
            if config is GatewayConfig and field.name in options.SHARED_FIELDS:
                continue  # the engine's
            assert field.metadata["help"] in shown


def test_a_servers_model_lives_in_a_process_of_its_own_unless_an_option_says_otherwise() -> None:
    defaults = SERVER_DEFAULTS
    assert options.engine_config({}, {}, defaults=defaults).runner == "process"
    assert options.engine_config({}, {"TRIOLET_RUNNER": "thread"}, defaults=defaults).runner == "thread"
    assert options.engine_config({"runner": "inline"}, {}, defaults=defaults).runner == "inline"


def test_flags_and_environment_of_the_server_are_read_like_the_engines() -> None:
    environ = {"TRIOLET_API_KEYS": "one, two", "TRIOLET_PORT": "1", "TRIOLET_GRACE_PERIOD": "3.5"}
    config = options.gateway_config({"port": "9000", "connection_lifetime": "none"}, environ)
    assert config == GatewayConfig(port=9000, grace_period=3.5)


def test_keys_of_the_server_are_the_engines_by_flag_or_environment() -> None:
    environ = {"TRIOLET_API_KEYS": "one, two"}
    assert options.engine_config({}, environ).api_keys == ("one", "two")
    assert options.engine_config({"api_keys": "three"}, environ).api_keys == ("three",)
    assert options.gateway_config({}, environ).api_keys == ()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"port": "http"}, "--port must be a whole number; got 'http'"),
        ({"max_lanes": "0"}, "--max-lanes must be a whole number of at least 1; got 0"),
        ({"write_timeout": "soon"}, "--write-timeout must be a number of seconds; got 'soon'"),
        ({"grace_period": "-1"}, "--grace-period must be above 0 and at most 1e+09 seconds; got -1.0"),
    ],
)
def test_a_wrong_value_is_named(flags: dict[str, str], message: str) -> None:
    with pytest.raises(click.UsageError) as raised:
        options.gateway_config(flags, {})
    assert raised.value.message == message


async def test_a_listener_that_breaks_is_opened_again_at_the_same_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken, urls, listen = trio.Event(), [], Listener.run

    async def run(front: Listener, *, task_status: trio.TaskStatus[str]) -> None:
        async with trio.open_nursery() as nursery:
            urls.append(await nursery.start(listen, front))
            task_status.started(urls[-1])
            if len(urls) == 1:
                await broken.wait()
                raise RuntimeError("planted")

    monkeypatch.setattr(Listener, "run", run)
    server = Server(GatewayConfig(port=0), EngineConfig(runner="inline"))
    async with (
        fake_engine(tokenizer=ChatTokenizer()) as engine,
        open_gateway(engine, server.gateway) as gateway,
    ):
        async with trio.open_nursery() as nursery:
            await nursery.start(server._listen, engine, gateway)
            broken.set()
            with trio.fail_after(60):
                while len(urls) < 2:
                    await trio.testing.wait_all_tasks_blocked(0.01)
            assert urls[0] == urls[1]
            stream = await trio.open_tcp_stream("127.0.0.1", int(urls[1].rpartition(":")[2]))
            client = Client(stream)
            assert await client.open()
            await client.create()
            assert (await client.until_ended())[-1]["type"] == "response.incomplete"
            await stream.aclose()
            nursery.cancel_scope.cancel()
    assert "planted" in caplog.text


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"host": "203.0.113.1"}, "host"),
        ({"port": 70_000}, "port"),
        ({"certfile": "nowhere.pem"}, "certfile"),
        ({"keyfile": "key.pem"}, "keyfile"),
        ({"port": 8000, "uds": "nowhere/socket"}, "uds"),
        ({"port": 8000, "uds": __file__}, "uds"),
        ({}, "port"),
    ],
)
async def test_an_address_or_a_certificate_that_cannot_be_used_is_found_before_the_model_is_loaded(
    fields: dict[str, Any], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def opened(stack: AsyncExitStack, config: EngineConfig) -> None:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr(sys.modules[run.__module__], "opened", opened)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = GatewayConfig.create(GatewayConfig(port=taken.getsockname()[1]), **fields)
        with pytest.RaisesGroup(
            pytest.RaisesExc(ConfigError, check=lambda error: error.field == field), flatten_subgroups=True
        ):
            await Server(config, EngineConfig()).run()


async def test_clients_are_refused_until_the_model_is_loaded_and_then_answered_at_the_same_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, ports = Server(GatewayConfig(port=0), EngineConfig(runner="inline")), list[int]()

    async def opened(stack: AsyncExitStack, config: EngineConfig) -> Engine:
        ports.append(server._sockets[0].getsockname()[1])
        with pytest.raises(OSError, match=r"127\.0\.0\.1"):
            await trio.open_tcp_stream("127.0.0.1", ports[0])
        return await stack.enter_async_context(fake_engine(tokenizer=ChatTokenizer()))

    async def serve(self: Server, engine: Engine, gateway: ResponsesService, signalled: trio.Event) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(self._listen, engine, gateway)
            async with await trio.open_tcp_stream("127.0.0.1", ports[0]) as stream:
                await stream.send_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")
            nursery.cancel_scope.cancel()

    monkeypatch.setattr(sys.modules[run.__module__], "opened", opened)
    monkeypatch.setattr(Server, "_serve", serve)
    await server.run()
    assert ports


class StalledListener:
    """Listener with a client that never goes away by itself."""

    async def drain(self) -> None:
        await trio.lowlevel.checkpoint()

    async def stop(self, deadline: float) -> None:
        await trio.sleep_until(deadline)


class StalledGateway:
    """Responses service with a client that answers no close frame."""

    models = None  # one model

    def __init__(self, close_timeout_s: float) -> None:
        self.close_timeout_s = close_timeout_s

    async def drain(self, deadline: float) -> None:
        await trio.sleep_until(deadline + self.close_timeout_s)


@pytest.mark.parametrize(("grace_s", "close_timeout_s"), [(25.0, 2.0), (2.0, 2.0), (5.0, 60.0)])
async def test_clients_that_stall_leave_a_part_of_the_grace_period_for_the_end_of_the_engine(
    grace_s: float, close_timeout_s: float, autojump_clock: trio.testing.MockClock
) -> None:
    config = GatewayConfig(grace_period=grace_s, close_timeout=close_timeout_s)
    server = Server(config, EngineConfig(runner="inline"))
    server._front = cast(Listener, StalledListener())
    gateway = cast(ResponsesService, StalledGateway(close_timeout_s))
    async with fake_engine() as engine, engine.generate("HELLO", SamplingParams(max_tokens=200)) as stream:
        began_s = trio.current_time()
        await server._drain(engine, gateway)
        left_s = began_s + grace_s - trio.current_time()
        async for output in stream:
            assert output.finished
    assert left_s >= min(close_timeout_s, grace_s / 4) - 0.01


async def test_a_listener_that_a_drain_has_stopped_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(GatewayConfig(port=0, grace_period=0.5), EngineConfig(runner="inline"))
    with caplog.at_level(logging.INFO):
        async with (
            fake_engine(tokenizer=ChatTokenizer()) as engine,
            open_gateway(engine, server.gateway) as gateway,
            trio.open_nursery() as nursery,
        ):
            await nursery.start(server._listen, engine, gateway)
            with trio.fail_after(60):
                await server._drain(engine, gateway)
                await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
    assert "draining" in caplog.text
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(
    ("host", "keys", "warns"),
    [
        ("0.0.0.0", (), True),
        ("::", (), True),
        ("192.0.2.7", (), True),
        ("0.0.0.0", ("key",), False),
        ("127.0.0.2", (), False),
        ("localhost", (), False),
    ],
)
def test_a_server_that_other_machines_reach_without_a_key_warns_at_its_start(
    host: str, keys: tuple[str, ...], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_open_access(GatewayConfig(host=host, api_keys=keys), EngineConfig())
    assert ("without API keys" in caplog.text) is warns


@pytest.mark.parametrize(("keys", "warns"), [((), True), (("key",), False)])
def test_a_clients_key_in_the_environment_of_a_server_without_keys_warns_and_names_the_servers_variable(
    keys: tuple[str, ...], warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRIOLET_API_KEY", "meant")
    warn_of_open_access(GatewayConfig(), EngineConfig(api_keys=keys))
    assert ("set TRIOLET_API_KEYS or --api-keys" in caplog.text) is warns
    assert "meant" not in caplog.text


@pytest.mark.parametrize("text", ["", ",", " , "])
def test_keys_that_are_given_and_empty_are_refused(text: str) -> None:
    rule = f"must be one text or several with commas between them; got {text!r}"
    with pytest.raises(click.UsageError, match=f"^TRIOLET_API_KEYS {rule}$"):
        options.engine_config({}, {"TRIOLET_API_KEYS": text})
    with pytest.raises(click.UsageError, match=f"^--api-keys {rule}$"):
        options.engine_config({"api_keys": text}, {})
    with pytest.raises(click.UsageError, match=f"^--priority-keys {rule}$"):
        options.gateway_config({"priority_keys": text}, {})


def test_a_server_that_ends_does_not_have_all_its_objects_visited(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ended(self: Server) -> None:
        await trio.lowlevel.checkpoint()

    frozen_before = gc.get_freeze_count()
    new = [[number] for number in range(2000)]
    interval_s = sys.getswitchinterval()
    monkeypatch.setattr(Server, "run", ended)
    # It holds for the whole process.
    for function in ("share_heaps", "return_ends_of_heaps"):
        monkeypatch.setattr(sys.modules[run.__module__], function, lambda: None)
    try:
        run(GatewayConfig(port=0), EngineConfig())
        assert gc.get_freeze_count() > frozen_before + len(new) / 2
    finally:
        sys.setswitchinterval(interval_s)


async def test_memory_is_returned_after_long_bodies_full_collections_and_much_that_was_dropped_and_not_for_nothing(
    autojump_clock: MockClock,
) -> None:
    budget, trims = InputBudget(max_bytes=10**6, max_bytes_per_client=10**6), list[float]()
    num_blocks, num_collections = 10**6, 3

    async def trim() -> None:
        await trio.lowlevel.checkpoint()
        trims.append(trio.current_time())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(return_memory, budget, trim, lambda: num_blocks, lambda: num_collections)
        for num_bodies in range(3):
            await trio.sleep((NUM_TRIMS + 3.5) * TRIM_INTERVAL_S)
            assert (
                len(trims) == NUM_TRIMS * num_bodies
            )  # after the body, and while what it asked for is in work
            with budget.reservation("a") as reservation:
                reservation.grow_to(FREE_BYTES + 1)
        await trio.sleep((NUM_TRIMS + 3.5) * TRIM_INTERVAL_S)
        trims.clear()
        for num_more, num_trims in (
            (10**6, 0),
            (1 - FREED_BLOCKS, 0),
            (-2, 1),
            (1 - FREED_BLOCKS, 1),
            (0, 1),
        ):
            num_blocks += num_more
            await trio.sleep(2 * TRIM_INTERVAL_S)
            assert len(trims) == num_trims
        num_collections += 1
        await trio.sleep(2 * TRIM_INTERVAL_S)
        assert len(trims) == 2
        nursery.cancel_scope.cancel()


THREADS = """
import ctypes, threading
from triolet.cli.serve import share_heaps

share_heaps()
malloc = ctypes.CDLL(None).malloc
malloc.restype = ctypes.c_void_p
pieces, together = [], threading.Barrier(6)

def take():
    together.wait()
    pieces.append(malloc(5000))
    together.wait()

threads = [threading.Thread(target=take) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len({piece >> 26 for piece in pieces}))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has heaps of threads")
def test_all_threads_share_a_heap_of_the_c_allocator() -> None:
    # glibc's heaps of threads begin at multiples of 64 MiB; by default these would be six.
    environ = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    told = subprocess.run(
        [sys.executable, "-c", THREADS], env=environ, capture_output=True, text=True, check=True
    )
    assert int(told.stdout) <= 2


TEXTS = """
import ctypes, pathlib, threading
from triolet.cli.serve import return_ends_of_heaps

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def resident_mib():
    [line] = [line for line in pathlib.Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024

def read_long_texts():
    for size in (16 * 2**20, 8 * 2**20):
        piece = libc.malloc(size)
        ctypes.memset(piece, 1, size)
        libc.free(piece)

return_ends_of_heaps()
before_mib = resident_mib()
thread = threading.Thread(target=read_long_texts)
thread.start()
thread.join()
libc.malloc_trim(0)
print(resident_mib() - before_mib)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's heaps")
def test_what_a_thread_has_freed_at_the_end_of_its_heap_is_returned() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    told = subprocess.run(
        [sys.executable, "-c", TEXTS], env=environ, capture_output=True, text=True, check=True
    )
    assert float(told.stdout) < 4.0
