"""The fork server: each process that dies is replaced by a fork; what goes wrong with a server costs a start only."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.actors.executors.harness import ask_six, first_step, ignore, life, open_files
from tests.actors.harness import unexpected
from tests.scale import one_in
from tests.source_tree import ROOT, SRC
from triolet.actors.executors import child_process, standby
from triolet.actors.executors.child_process import ForkServer
from triolet.actors.executors.connection import RunnerProcess
from triolet.actors.executors.process import ProcessExecutor
from triolet.actors.executors.standby import ForkSource
from triolet.config.engine import EngineConfig
from triolet.errors import ResourceShortage, RunnerDied

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no fork server")

FAKE = (sys.executable, "-P", "-m", "tests.actors.executors.fake_worker")


def executor_with(*server: str, keep_standby: bool = True, step_timeout: float = 30.0) -> ProcessExecutor:
    config = EngineConfig(
        model="nowhere", runner="process", keep_standby=keep_standby, step_timeout=step_timeout
    )
    return ProcessExecutor(config, FAKE, [*FAKE, "fork_server", *server])


def server_of(executor: ProcessExecutor) -> ForkServer:
    source = executor._standby.source
    assert isinstance(source, ForkSource)
    return source.server


def process_of(executor: ProcessExecutor) -> RunnerProcess:
    process = executor._here()
    assert isinstance(process, RunnerProcess)
    return process


def told_of(process_id: int, name: str) -> str:
    return Path(f"/proc/{process_id}/{name}").read_text()


def parent_of(process_id: int) -> int:
    return int(told_of(process_id, "stat").rpartition(")")[2].split()[1])


def is_there(process_id: int) -> bool:
    """Return whether a process lives; a zombie does not."""
    try:
        return told_of(process_id, "stat").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def wait_until_gone(process_id: int) -> None:
    with trio.fail_after(60):
        while is_there(process_id):  # noqa: ASYNC110 - another process changes it
            await trio.sleep(0.01)


@asynccontextmanager
async def one_life(executor: ProcessExecutor) -> AsyncIterator[int]:
    """A life with its server, in which a step has been computed; the number of its process."""
    async with executor.running():
        info = await executor.start(ignore)
        executor._standby.start()
        assert (await executor.execute(first_step(), unexpected)).tokens
        assert info.process_id is not None
        yield info.process_id


async def die(
    executor: ProcessExecutor,
    number: int = signal.SIGKILL,
    look: Callable[[int], object] = lambda process_id: None,
) -> RunnerDied:
    """A life in which something is looked at before its process gets a signal; how it ends."""

    async def live() -> None:
        async with one_life(executor) as process_id:
            look(process_id)
            os.kill(process_id, number)
            await trio.sleep(60)

    with pytest.raises(RunnerDied) as caught:
        await live()
    return caught.value


async def end(executor: ProcessExecutor) -> None:
    """A life that ends well, after which nothing is left."""
    async with executor.running():
        pass


async def test_each_process_that_dies_is_replaced_by_a_fork_of_one_server() -> None:
    executor, parents = executor_with(), list[int]()
    await die(executor)
    server = server_of(executor)
    for _ in range(3):
        await die(executor, look=lambda process_id: parents.append(parent_of(process_id)))
    assert parents == [server.child.pid] * 3
    assert server_of(executor) is server
    async with one_life(executor) as process_id:
        pass
    await wait_until_gone(process_id)
    await wait_until_gone(server.child.pid)


async def test_a_server_that_was_started_ahead_gives_the_first_process() -> None:
    executor = executor_with()
    executor.prepare()
    server = server_of(executor)
    async with one_life(executor) as process_id:
        assert parent_of(process_id) == server.child.pid


async def test_a_server_that_was_started_ahead_and_is_not_used_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "STANDBY_S", 0.1)
    executor = executor_with()
    executor.prepare()
    with trio.fail_after(60):
        await server_of(executor).gone()
    assert executor._standby.source is None


@pytest.mark.parametrize("number", one_in(3, [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM]))
async def test_how_a_fork_has_died_is_known_as_of_any_process(number: signal.Signals) -> None:
    executor = executor_with()
    spawned = await die(executor, number)
    forked = await die(executor, number)
    assert spawned.returncode == forked.returncode == -number
    assert forked.reason.startswith(f"was killed by {number.name}")
    await end(executor)


async def test_how_a_fork_has_ended_by_itself_is_known() -> None:
    executor = executor_with("-", "exit", "1")
    await die(executor)
    with pytest.raises(RunnerDied, match="ended with exit status 3"):
        await life(executor, first_step())
    await end(executor)


async def test_a_fork_has_the_same_open_as_the_one_before() -> None:
    """What another process's end closes must not stay open, fork after fork."""
    executor, counts = executor_with(), list[int]()
    for _ in range(4):
        await die(executor, look=lambda process_id: counts.append(len(os.listdir(f"/proc/{process_id}/fd"))))
    assert counts == [counts[0]] * 4
    await end(executor)


async def test_nothing_is_left_open_here() -> None:
    executor = executor_with()
    await end(executor)  # what is imported first may keep a file open
    before = open_files()
    await die(executor)
    await die(executor)
    async with one_life(executor):
        pass
    assert open_files() == before


async def test_a_server_that_dies_takes_its_process_along_and_the_next_one_is_a_fork_of_another_server() -> (
    None
):
    executor = executor_with()
    await die(executor)
    server = server_of(executor)
    forks = list[int]()

    def kill_server(process_id: int) -> None:
        forks.append(process_id)
        server.child.kill()

    await die(executor, signal.SIGCONT, kill_server)
    await wait_until_gone(forks[0])
    async with one_life(executor) as process_id:
        assert server_of(executor) is not server
        assert parent_of(process_id) == server_of(executor).child.pid
    await server.gone()


@pytest.mark.parametrize("is_needed", [True, False])
async def test_a_server_that_dies_while_it_waits_is_reaped_and_replaced_where_it_is_needed(
    is_needed: bool, mock_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    executor = executor_with("fork")  # so that the process is no fork, and goes on
    async with one_life(executor) as process_id:
        assert parent_of(process_id) == os.getpid()
        server = server_of(executor)
        if not is_needed:
            executor._standby.expire()
        server.child.kill()
        with caplog.at_level(logging.WARNING, "triolet.runner"):
            await server.gone()
        assert executor._standby.source is None
        assert "the standby of the model runner has ended" in caplog.text
        mock_clock.jump(standby.KEPT_AFTER_S)
        await wait_all_tasks_blocked()
        assert (executor._standby.source is not None) == is_needed
        assert is_there(process_id)


async def test_a_load_that_has_to_import_has_more_time_than_those_in_forks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cold_s = child_process.IMPORT_SILENCE_S
    executor, companion = executor_with(), executor_with()
    companion.peers = (companion, executor)
    for each in (executor, companion):
        async with one_life(each):
            limit_s = each._load_silence_limit_s()
            assert limit_s is not None and limit_s < cold_s
    executor.prepare()
    os.kill(server_of(executor).child.pid, signal.SIGSTOP)
    monkeypatch.setattr(child_process, "IMPORT_SILENCE_S", 0.5)
    async with executor.running():
        assert [each._load_silence_limit_s() for each in (executor, companion)] == [cold_s, cold_s]
        await executor.start(ignore)
        learned_s = executor._load_silence_limit_s()
        assert learned_s is not None and learned_s < cold_s


@pytest.mark.parametrize("misdeed", ["hang", "fork", "stop"])
async def test_a_server_that_gives_no_process_is_ended_and_another_process_is_started(
    misdeed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit, bad in (("IMPORT_SILENCE_S", "hang"), ("SILENCE_S", "stop")):
        monkeypatch.setattr(child_process, limit, 0.5 if misdeed == bad else 60.0)
    executor = executor_with(*([misdeed] if misdeed in ("hang", "fork") else []))
    await die(executor)
    server = server_of(executor)
    if misdeed == "stop":
        os.kill(server.child.pid, signal.SIGSTOP)
    with trio.fail_after(60):
        async with one_life(executor) as process_id:
            assert parent_of(process_id) == os.getpid()
            await server.gone()
    assert not is_there(server.child.pid)


async def test_a_server_that_is_not_needed_any_more_lives_as_long_as_its_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(standby, "STANDBY_S", 0.2)
    monkeypatch.setattr(child_process, "LOOK_S", 0.05)
    executor = executor_with(keep_standby=False)
    await die(executor)
    server = server_of(executor)
    async with executor.running():
        info = await executor.start(ignore)
        assert info.process_id is not None
        assert parent_of(info.process_id) == server.child.pid
        with trio.fail_after(60):
            while executor._standby.source is not None:  # noqa: ASYNC110 - it tells of no change
                await trio.sleep(0.01)
        assert (await executor.execute(first_step(), unexpected)).tokens
        assert is_there(server.child.pid)
    await server.gone()


async def test_a_fork_that_hangs_is_killed_and_its_end_is_known_though_its_server_hangs_too() -> None:
    executor, processes = executor_with(), list[RunnerProcess]()
    await die(executor)

    async def hang() -> None:
        async with one_life(executor) as process_id:
            for each in (process_id, server_of(executor).child.pid):
                os.kill(each, signal.SIGSTOP)
            processes.append(process_of(executor))
            await executor.kill("was late")

    with trio.fail_after(60), pytest.raises(RunnerDied):
        await hang()
    await processes[0].gone()
    assert processes[0].child.returncode == -signal.SIGKILL
    await executor._standby.end()


async def test_without_descriptors_the_process_is_not_there_and_the_shortage_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor = executor_with()
    await die(executor)
    pipe, num_left = os.pipe, [4]

    def run_out() -> tuple[int, int]:
        num_left[0] -= 1
        if num_left[0] < 0:
            raise OSError(24, "Too many open files")
        return pipe()

    before = open_files()
    monkeypatch.setattr(os, "pipe", run_out)
    with pytest.raises(ResourceShortage, match="file descriptors"):
        await server_of(executor).fork()
    monkeypatch.undo()
    assert open_files() == before
    async with one_life(executor):
        pass


async def test_streams_go_on_over_crashes_of_forks() -> None:
    executor = executor_with()
    num_steps = [0]
    execute = executor.execute_in_turn

    async def kill_sometimes(*args: object) -> object:
        num_steps[0] += 1
        executor._standby.start()
        if num_steps[0] in (2, 9):
            process_of(executor).child.kill()
        return await execute(*args)  # type: ignore[arg-type]

    executor.execute_in_turn = kill_sometimes  # type: ignore[method-assign, assignment]
    assert await ask_six(executor) >= 2


PARENT = """
import trio
from tests.actors.executors.harness import ignore
from tests.actors.executors.test_fork_server import die, executor_with, server_of

async def main():
    executor = executor_with()
    await die(executor)
    async with executor.running():
        info = await executor.start(ignore)
        print(server_of(executor).child.pid, info.process_id, flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


def test_server_and_fork_die_with_the_engine() -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(SRC)])}
    with subprocess.Popen([sys.executable, "-c", PARENT], env=environ, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        process_ids = [int(word) for word in parent.stdout.readline().split()]
        assert [is_there(process_id) for process_id in process_ids] == [True, True]
        parent.kill()
    deadline_s = time.monotonic() + 20  # on a busy machine; by themselves they would live longer
    while any(map(is_there, process_ids)) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert [is_there(process_id) for process_id in process_ids] == [False, False]


IMPORTS_ONLY = """
import os, torch
def fail(*args):
    raise AssertionError("a device was asked for")
for name in dir(torch.cuda):
    if callable(getattr(torch.cuda, name)) and not isinstance(getattr(torch.cuda, name), type):
        setattr(torch.cuda, name, fail)
from triolet.workers.runner import import_model_code
import_model_code(lambda progress: None)
print(len(os.listdir("/proc/self/task")))
"""


@pytest.mark.slow
def test_what_is_imported_asks_for_no_device_and_starts_no_thread() -> None:
    """Both would be broken in a fork."""
    environ = {**os.environ, "PYTHONPATH": str(SRC), "OPENBLAS_NUM_THREADS": "1"}  # NumPy's survives a fork
    ran = subprocess.run(
        [sys.executable, "-c", IMPORTS_ONLY], env=environ, capture_output=True, text=True, check=False
    )
    assert (ran.stdout.strip(), ran.returncode) == ("1", 0), ran.stderr


@pytest.mark.slow
async def test_the_real_server_imports_torch_and_shares_it() -> None:
    server = ForkServer.spawn()
    with trio.fail_after(300):
        forked = await server.fork()
    assert forked is not None
    process = RunnerProcess(*forked)
    assert "torch" in told_of(process.child.pid, "maps")
    lines = told_of(process.child.pid, "smaps_rollup").splitlines()[1:]
    num_kb = {line.split()[0]: int(line.split()[1]) for line in lines}
    assert num_kb["Private_Dirty:"] < 0.1 * num_kb["Rss:"]
    process.discard()
    await process.gone()
    server.discard()
    await server.gone()
