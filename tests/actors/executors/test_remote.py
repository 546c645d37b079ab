"""Workers over TCP: their end in every form costs the streams a pause, and strangers on the port cost nothing."""

from __future__ import annotations

import errno
import os
import random
import re
import signal
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing
import trustme

from tests.actors.executors.harness import (
    TOKEN,
    ask_six,
    first_step,
    ignore,
    life,
    open_files,
    processes_here,
    remote_that,
    second_step,
)
from tests.actors.harness import unexpected
from tests.scale import num_cases, one_in
from triolet.actors.executors.registry import open_executor
from triolet.actors.executors.remote import agent, handshaking, link, port
from triolet.actors.executors.remote.agent import Agent
from triolet.actors.executors.remote.executor import RemoteExecutor
from triolet.actors.executors.remote.port import WorkerPort
from triolet.config.address import Address
from triolet.config.engine import EngineConfig
from triolet.core.recovery.recovery_state import is_external
from triolet.errors import ConfigError, FrameError, ModelError, RunnerDied, WorkerRefused
from triolet.ipc.handshake import CHALLENGE_BYTES, HELLO, PROOF_BYTES, Hello, refusal_of, seal
from triolet.ipc.messages import LAYOUT, REPLIES, Pong, ProcessEnded

SOON_S = 300.0  # on a machine under load; nothing takes this long when all is well
FAKE_WORKER = (sys.executable, "-P", "-m", "tests.actors.executors.fake_worker")
workers_here = partial(processes_here, FAKE_WORKER[-1])
CONFIG = EngineConfig(model="nowhere", tokenizer="nowhere", runner="remote")


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    before = open_files()
    yield
    assert open_files() == before


@pytest.fixture
async def listening() -> AsyncIterator[WorkerPort]:
    made = WorkerPort(Address("127.0.0.1", 0), TOKEN)
    made.start()
    yield made
    made.close()
    await made.closed.wait()


async def serve(nursery: trio.Nursery, handle: Callable[[trio.SocketStream], Awaitable[None]]) -> Address:
    """Serve on a free port of this machine, and return its address."""
    [listener] = await nursery.start(partial(trio.serve_tcp, handle, 0, host="127.0.0.1"))
    return Address("127.0.0.1", listener.socket.getsockname()[1])


async def death_while_idle(executor: RemoteExecutor, cause: Callable[[], None]) -> RunnerDied:
    """Return the death that ends a life which computes nothing."""
    try:
        async with executor.running():
            await executor.start(ignore)
            await executor.execute(first_step(), unexpected)
            cause()
            await trio.sleep(SOON_S)
    except RunnerDied as died:
        return died
    pytest.fail("it lives on")


# ----------------------------------------------------------------------------------------------- deaths


async def test_streams_go_on_after_the_death_of_a_workers_process(
    tmp_path: Path, nursery: trio.Nursery
) -> None:
    with trio.fail_after(SOON_S):
        assert await ask_six(remote_that(nursery, "kill", 7, tmp_path / "mark")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("misdeed", ["exit", "rubbish", "segfault", "half_a_frame", "another_step", "raise"])
async def test_streams_go_on_after_every_kind_of_death(
    misdeed: str, tmp_path: Path, nursery: trio.Nursery
) -> None:
    with trio.fail_after(SOON_S):
        assert await ask_six(remote_that(nursery, misdeed, 7, tmp_path / "mark")) == 1


@pytest.mark.slow
async def test_an_idle_process_that_is_stopped_is_known_within_three_seconds_and_ends(
    nursery: trio.Nursery,
) -> None:
    executor, stopped = remote_that(nursery), list[int]()

    def stop() -> None:
        stopped.extend(workers_here())
        os.kill(stopped[0], signal.SIGSTOP)

    died = await death_while_idle(executor, stop)
    assert re.search(r"on .*, process \d+, did not answer a ping within 2.0 s$", str(died))
    assert link.PING_S + link.ANSWER_S <= 3.0
    assert died.returncode is None
    with trio.fail_after(SOON_S):  # it would never end by itself
        while stopped[0] in workers_here():  # noqa: ASYNC110 - the system ends it
            await trio.sleep(0.05)
        assert await life(executor, first_step(), second_step())


async def test_a_process_that_dies_idle_is_known_without_a_ping(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "PING_S", 2 * SOON_S)
    died = await death_while_idle(remote_that(nursery), lambda: os.kill(workers_here()[0], signal.SIGKILL))
    assert str(died).endswith(", was killed by SIGKILL")


@pytest.mark.slow
async def test_a_machine_that_vanishes_is_known_within_three_seconds(listening: WorkerPort) -> None:
    """A relay that goes silent while both of its connections stay open."""
    is_there = trio.Event()
    is_there.set()

    async def pass_on(source: trio.SocketStream, sink: trio.SocketStream) -> None:
        async for data in source:
            await is_there.wait()
            await sink.send_all(data)

    async def relay(worker: trio.SocketStream) -> None:
        engine = await trio.open_tcp_stream("127.0.0.1", listening.address.port)
        async with engine, trio.open_nursery() as both:
            both.start_soon(pass_on, worker, engine)
            both.start_soon(pass_on, engine, worker)

    executor = RemoteExecutor(CONFIG, listening)
    async with trio.open_nursery() as nursery:
        between = await serve(nursery, relay)
        nursery.start_soon(Agent(between, TOKEN, command=FAKE_WORKER).run)

        def vanish() -> None:
            nonlocal is_there
            is_there = trio.Event()

        died = await death_while_idle(executor, vanish)
        assert "did not answer a ping within 2.0 s" in str(died)
        assert link.PING_S + link.ANSWER_S <= 3.0
        nursery.cancel_scope.cancel()


@pytest.mark.slow
async def test_a_second_worker_takes_over_and_the_streams_go_on(
    listening: WorkerPort, tmp_path: Path
) -> None:
    killer = (*FAKE_WORKER, "kill", "7", str(tmp_path / "mark"))
    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(Agent(listening.address, TOKEN, command=killer).run)
        with trio.fail_after(SOON_S):
            assert await ask_six(RemoteExecutor(CONFIG, listening)) == 1
        nursery.cancel_scope.cancel()
    assert workers_here() == []


@pytest.mark.slow
async def test_an_engine_that_ends_leaves_no_process_and_its_successor_is_found(
    nursery: trio.Nursery,
) -> None:
    first = WorkerPort(Address("127.0.0.1", 0), TOKEN)
    nursery.start_soon(Agent(first.address, TOKEN, command=FAKE_WORKER).run)
    assert await life(RemoteExecutor(CONFIG, first), first_step())
    first.close()
    await first.closed.wait()
    second = WorkerPort(first.address, TOKEN)
    with trio.fail_after(SOON_S):
        assert await life(RemoteExecutor(CONFIG, second), first_step())
    nursery.cancel_scope.cancel()
    second.close()
    with trio.CancelScope(shield=True):
        await second.closed.wait()


NO_PROCESS = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
NO_THREAD = RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    ("num_ranks", "error"),
    [(1, NO_PROCESS), (2, NO_PROCESS), (2, MemoryError()), (1, NO_THREAD), (1, None)],
    ids=["shortage", "group", "memory", "thread", "dies"],
)
async def test_a_worker_that_can_start_no_process_or_loses_it_at_once_tries_on_after_longer_and_longer_pauses(
    num_ranks: int, error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawn, spawned_s = agent._spawn, list[float]()

    def spawn_or_fail(*arguments: Any) -> agent.WorkerProcess:
        spawned_s.append(trio.current_time())
        if error is not None:
            raise error
        return spawn(*arguments)

    monkeypatch.setattr(agent, "_spawn", spawn_or_fail)
    listening = WorkerPort(Address("127.0.0.1", 0), TOKEN, num_ranks=num_ranks)
    listening.start()
    with trio.fail_after(SOON_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Agent(listening.address, TOKEN, command=("true",)).run)
            while len(spawned_s) < 5 * num_ranks:  # noqa: ASYNC110 - the agent does not report it
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
        listening.close()
        await listening.closed.wait()
    begun_s = spawned_s[::num_ranks]
    assert all(later - sooner >= 0.1 * 2**n for n, (sooner, later) in enumerate(pairwise(begun_s)))


async def test_a_shortage_at_either_end_of_a_connection_passes_and_the_worker_connects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors_there, errors_here = [MemoryError(), NO_THREAD], [MemoryError(), trio.BrokenResourceError()]
    connect, accept = trio.open_tcp_stream, trio.SocketListener.accept

    async def connect_at_last(*arguments: Any) -> trio.SocketStream:
        if errors_there:
            raise errors_there.pop()
        return await connect(*arguments)

    async def accept_at_last(listener: trio.SocketListener) -> trio.SocketStream:
        stream = await accept(listener)
        if errors_here:
            await stream.aclose()
            raise errors_here.pop()
        return stream

    monkeypatch.setattr(trio, "open_tcp_stream", connect_at_last)
    monkeypatch.setattr(trio.SocketListener, "accept", accept_at_last)
    listening = WorkerPort(Address("127.0.0.1", 0), TOKEN)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Agent(listening.address, TOKEN, command=FAKE_WORKER).run)
        with trio.fail_after(SOON_S):
            assert await life(RemoteExecutor(CONFIG, listening), first_step())
        nursery.cancel_scope.cancel()
    listening.close()
    await listening.closed.wait()
    assert (errors_there, errors_here) == ([], [])


async def test_a_mistake_of_a_worker_is_no_shortage_and_ends_it(
    listening: WorkerPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("planted")

    monkeypatch.setattr(agent, "_spawn", fail)
    with trio.fail_after(SOON_S), pytest.RaisesGroup(KeyError, flatten_subgroups=True):
        await Agent(listening.address, TOKEN, command=FAKE_WORKER).run()


@pytest.mark.slow
async def test_a_worker_that_had_no_process_for_a_while_works_afterwards(
    listening: WorkerPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawn, errors = agent._spawn, [NO_PROCESS, OSError(errno.EMFILE, "Too many open files")]

    def spawn_at_last(*arguments: Any) -> agent.WorkerProcess:
        if errors:
            raise errors.pop()
        return spawn(*arguments)

    monkeypatch.setattr(agent, "_spawn", spawn_at_last)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Agent(listening.address, TOKEN, command=FAKE_WORKER).run)
        with trio.fail_after(SOON_S):
            assert await life(RemoteExecutor(CONFIG, listening), first_step())
        nursery.cancel_scope.cancel()
    assert (errors, workers_here()) == ([], [])


# -------------------------------------------------------------------------------------------- strangers


async def refusal_by(listening: WorkerPort, token: str = TOKEN) -> str:
    with pytest.raises(WorkerRefused) as caught, trio.fail_after(SOON_S):
        await Agent(listening.address, token, command=FAKE_WORKER).run()
    return str(caught.value)


async def test_a_worker_with_another_token_is_told_so(listening: WorkerPort) -> None:
    assert await refusal_by(listening, "other") == (
        "the engine refuses this worker: both ends must have the same worker token; got a proof of another one"
    )


async def test_a_worker_of_another_version_is_told_so(
    listening: WorkerPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshaking, "refusal_of", lambda hello, version: refusal_of(hello, "9.9"))
    assert await refusal_by(listening) == (
        "the engine refuses this worker: both ends must run the same version of triolet; the worker runs "
        f"{handshaking.VERSION}, the engine 9.9"
    )


async def test_a_rank_that_a_worker_does_not_have_or_has_already_is_refused_and_leaves_nothing(
    listening: WorkerPort, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(port, "LOG_S", 0.0)
    joining = Agent(listening.address, TOKEN)
    with trio.fail_after(SOON_S):
        first, _ = await joining._join(b"first", 0)
        for worker, rank in ((b"other", 1), (b"first", 0)):
            refused, _ = await joining._join(worker, rank)
            while await refused.sock.recv(1000):
                pass
            refused.sock.close()
            assert f"a worker must have each of the ranks 0 to 0 once; got rank {rank}" in caplog.text
            assert [*listening._groups] == [b"first"]
        first.sock.close()
        while listening._groups:  # noqa: ASYNC110 - the port does not report it
            await trio.sleep(0.01)


async def test_a_server_of_another_kind_is_no_engine(nursery: trio.Nursery) -> None:
    async def answer(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.send_all(
                b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            )

    address = await serve(nursery, answer)
    with pytest.raises(FrameError, match="an engine must begin with"), trio.fail_after(SOON_S):
        await Agent(address, TOKEN, command=FAKE_WORKER).run()


async def bother(address: Address, draw: random.Random) -> None:
    """Connect as a stranger, and stay until the port ends the connection, or leave before."""
    hello = seal(
        Hello("1", LAYOUT, b"c" * CHALLENGE_BYTES, "host", 1, b"", 0), "other", b"e" * CHALLENGE_BYTES
    )
    data = draw.choice(
        [
            b"",
            draw.randbytes(draw.randrange(1, 5000)),
            HELLO + b"\xff\xff",
            HELLO + b"\x00\x00" + bytes(PROOF_BYTES),
            hello,
            hello[: draw.randrange(len(hello))],
            REPLIES.pack(Pong()),
        ]
    )
    stream = await trio.open_tcp_stream(address.host, address.port)
    async with stream:
        with suppress(trio.BrokenResourceError):
            if draw.random() < 0.5:
                for byte in data[:100]:
                    await stream.send_all(bytes([byte]))
                    await trio.sleep(draw.random() * 0.02)
            elif data:
                await stream.send_all(data)
            while draw.random() < 0.9 and await stream.receive_some(1000):
                pass


async def test_strangers_with_rubbish_and_slow_bytes_cost_the_streams_nothing_and_are_dropped(
    listening: WorkerPort, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(port, "HANDSHAKE_S", 2.0)
    monkeypatch.setattr(port, "LOG_S", 2 * SOON_S)
    draw = random.Random(5)
    async with trio.open_nursery() as nursery, trio.open_nursery() as strangers:
        nursery.start_soon(Agent(listening.address, TOKEN, command=FAKE_WORKER).run)
        for _ in range(num_cases(150)):
            strangers.start_soon(bother, listening.address, draw)
        with trio.fail_after(SOON_S):
            assert await ask_six(RemoteExecutor(CONFIG, listening)) == 0
            while strangers.child_tasks:  # noqa: ASYNC110 - the port ends the connections of those that stay
                await trio.sleep(0.05)
        nursery.cancel_scope.cancel()
    refused = [record for record in caplog.records if "is refused" in record.getMessage()]
    assert len(refused) == 1, "a line at most in that time"


@pytest.mark.slow
async def test_silent_peers_keep_no_worker_out(
    listening: WorkerPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port, "HANDSHAKE_S", 2 * SOON_S)
    silent = [
        await trio.open_tcp_stream("127.0.0.1", listening.address.port) for _ in range(port.MAX_UNKNOWN + 5)
    ]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Agent(listening.address, TOKEN, command=FAKE_WORKER).run)
        with trio.fail_after(SOON_S):
            assert await life(RemoteExecutor(CONFIG, listening), first_step())
            for stream in silent[:5]:  # the oldest have made room
                with suppress(trio.BrokenResourceError):
                    while await stream.receive_some(1000):
                        pass
        nursery.cancel_scope.cancel()
    for stream in silent:
        await trio.aclose_forcefully(stream)


# -------------------------------------------------------------------------------------------------- TLS


@attrs.frozen
class Certificate:
    file: str
    authority: ssl.SSLContext


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    ca = trustme.CA()
    file = tmp_path_factory.mktemp("tls") / "cert.pem"
    ca.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(file)
    context = ssl.create_default_context()
    ca.configure_trust(context)
    return Certificate(str(file), context)


async def test_with_a_certificate_workers_speak_tls_and_their_death_is_known(
    certificate: Certificate, tmp_path: Path
) -> None:
    fields: dict[str, Any] = {"worker_listen": "127.0.0.1:0", "worker_token": TOKEN}
    secured = WorkerPort.of(attrs.evolve(CONFIG, worker_certfile=certificate.file, **fields))
    command = (*FAKE_WORKER, "kill", "7", str(tmp_path / "mark"))
    async with trio.open_nursery() as nursery:
        secured.start()
        nursery.start_soon(Agent(secured.address, TOKEN, certificate.authority, command).run)
        with trio.fail_after(SOON_S):
            assert await ask_six(RemoteExecutor(CONFIG, secured)) == 1
        nursery.cancel_scope.cancel()
    secured.close()
    await secured.closed.wait()
    assert workers_here() == []


@pytest.mark.parametrize(
    ("with_tls", "misdeed", "returncode", "words"),
    one_in(
        2,
        [
            (False, "kill", -signal.SIGKILL, "was killed by SIGKILL"),
            (True, "kill", -signal.SIGKILL, "was killed by SIGKILL"),
            (True, "segfault", -signal.SIGSEGV, "was killed by SIGSEGV"),
            (False, "segfault", -signal.SIGSEGV, "was killed by SIGSEGV"),
            (False, "exit", 3, "ended with exit status 3"),
            (True, "exit", 3, "ended with exit status 3"),
        ],
    ),
)
async def test_a_worker_tells_how_its_process_has_ended(
    with_tls: bool, misdeed: str, returncode: int, words: str, certificate: Certificate, tmp_path: Path
) -> None:
    fields: dict[str, Any] = {"worker_listen": "127.0.0.1:0", "worker_token": TOKEN}
    listening = WorkerPort.of(
        attrs.evolve(CONFIG, worker_certfile=certificate.file if with_tls else None, **fields)
    )
    command = (*FAKE_WORKER, misdeed, "1", str(tmp_path / "mark"))
    async with trio.open_nursery() as nursery:
        listening.start()
        authority = certificate.authority if with_tls else None
        nursery.start_soon(Agent(listening.address, TOKEN, authority, command).run)
        with trio.fail_after(SOON_S), pytest.raises(RunnerDied) as died:
            await life(RemoteExecutor(CONFIG, listening), first_step())
        nursery.cancel_scope.cancel()
    listening.close()
    await listening.closed.wait()
    assert died.value.returncode == returncode
    assert str(died.value).endswith(words)
    assert is_external(died.value) == (misdeed == "kill")
    assert not died.value.is_lost


LAST_WORDS = "import os; os.read(0, 1); os.write(1, b'R' * 50_000); os._exit(3)"


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="waits for a process that another task reaps")
async def test_what_a_process_behind_tls_has_sent_last_arrives_though_the_engine_still_sends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spawned: list[agent.WorkerProcess] = []

    def spawn(*args: Any) -> agent.WorkerProcess:
        spawned.append(start(*args))
        return spawned[-1]

    start = agent._spawn
    monkeypatch.setattr(agent, "_spawn", spawn)
    here, engine = trio.testing.memory_stream_pair()
    pump = here.send_stream.send_all_hook
    assert pump is not None

    async def when_the_process_has_ended() -> None:
        here.send_stream.send_all_hook = pump
        wait = partial(os.waitid, os.P_PID, spawned[0].popen.pid, os.WEXITED | os.WNOWAIT)
        await trio.to_thread.run_sync(wait)
        await engine.send_all(b"a plan that was made ahead")
        try:
            await trio.testing.wait_all_tasks_blocked()
        except trio.Cancelled:
            here.send_stream.get_data_nowait()  # a record of TLS that is not whole is none
            raise
        await pump()

    here.send_stream.send_all_hook = when_the_process_has_ended
    await engine.send_all(b"P")
    behind = Agent(Address("127.0.0.1", 1), "token", command=[sys.executable, "-c", LAST_WORDS])
    await behind._compute_behind(here, behind.command)
    received = bytearray()
    last = REPLIES.pack(ProcessEnded(3))
    while not received.endswith(last):
        received += await engine.receive_some()
    assert received == b"R" * 50_000 + last


async def test_a_machine_that_ends_in_a_step_is_lost_and_no_request_is_a_suspect(
    listening: WorkerPort, tmp_path: Path
) -> None:
    executor = RemoteExecutor(CONFIG, listening)
    mark = tmp_path / "mark"
    command = (*FAKE_WORKER, "hang", "1", str(mark))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Agent(listening.address, TOKEN, command=command).run)

        async def end() -> None:
            while not mark.exists():  # noqa: ASYNC110 - a process makes it
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()

        nursery.start_soon(end)
        with trio.CancelScope(shield=True), trio.fail_after(SOON_S), pytest.raises(RunnerDied) as died:
            await life(executor, first_step())
    assert died.value.returncode is None
    assert died.value.is_lost
    assert is_external(died.value)
    assert str(died.value).endswith(", has ended with its machine, or cannot be reached any more")


# ------------------------------------------------------------------------------------- the configuration


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"worker_token": "t"}, "worker_listen must be HOST:PORT with runner 'remote'; got None"),
        ({"worker_listen": "127.0.0.1:0"}, "worker_token must be a text with runner 'remote'; got None"),
        (
            {"worker_listen": "127.0.0.1:0", "worker_token": "t", "worker_certfile": "nowhere.pem"},
            "worker_certfile must be a certificate chain with its private key",
        ),
        (
            {"worker_listen": "192.0.2.1:0", "worker_token": "t"},
            "worker_listen must be an address of this machine with a free port",
        ),
        (
            {"runner": "thread", "worker_listen": "127.0.0.1:0"},
            "worker_listen must be given together with runner 'remote' or 'ray', and not 'thread'; got '127.0.0.1:0'",
        ),
    ],
)
def test_fields_that_do_not_fit_together_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with (
        pytest.raises(ConfigError, match=re.escape(message)),
        open_executor(attrs.evolve(CONFIG, **fields)),
    ):
        pytest.fail("it is open")


@pytest.mark.slow
async def test_a_model_that_only_the_worker_has_needs_a_tokenizer_here(listening: WorkerPort) -> None:
    executor = RemoteExecutor(attrs.evolve(CONFIG, tokenizer=None), listening)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Agent(listening.address, TOKEN, command=FAKE_WORKER).run)
        with pytest.raises(
            ModelError, match=r"got nowhere, which is not on this machine \(give it as tokenizer\)"
        ):
            await life(executor)
        nursery.cancel_scope.cancel()
