"""The executor whose model lives in a process, beyond the contract: every way in which a process may go."""

from __future__ import annotations

import errno
import importlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.actors.executors.fake_worker import NUM_BLOCKS
from tests.actors.executors.harness import (
    ask_six,
    executor_that,
    first_step,
    ignore,
    life,
    open_files,
    run_of,
    second_step,
)
from tests.actors.harness import LetterTokenizer, answer_of, unexpected
from tests.scale import one_in
from tests.source_tree import ROOT, SRC
from triolet import SamplingParams
from triolet.actors.executors import process as process_runner
from triolet.actors.executors.child_process import ChildProcess
from triolet.actors.executors.connection import MAX_LINE_BYTES, RunnerProcess
from triolet.actors.executors.process import ProcessExecutor
from triolet.actors.executors.standby import KEPT_AFTER_S, STANDBY_S, Standby
from triolet.config.engine import EngineConfig
from triolet.core.load_progress import IMPORTS, LoadProgress, OnProgress
from triolet.core.recovery import recovery_state
from triolet.core.recovery.recovery_state import step_kind
from triolet.core.request.model_info import ModelInfo
from triolet.core.step_plan import StepPlan, StepResult
from triolet.core.worker_call import WorkerCall
from triolet.engine.open_engine import run_engine
from triolet.errors import (
    ConfigError,
    EngineUnhealthy,
    ModelError,
    ResourceShortage,
    RunnerDied,
    RunnerFailed,
)
from triolet.ipc.messages import REPLIES, REQUESTS, ImportModules, Reply, Request
from triolet.workers import runner

SOON_S = 300.0  # on a machine that is busy with other things; nothing takes this long when all is well


def process_of(info: ModelInfo) -> int:
    assert info.process_id is not None
    return info.process_id


def process_here(executor: ProcessExecutor) -> RunnerProcess:
    process = executor._here()
    assert isinstance(process, RunnerProcess)
    return process


def exists(process_id: int) -> bool:
    """Also true of a zombie."""
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def is_running(process_id: int) -> bool:
    """Not so of a zombie, which waits for nothing but its parent, or for the process that takes in orphans."""
    state = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(process_id)], capture_output=True, text=True, check=False
    )
    return state.stdout.strip()[:1] not in ("", "Z")


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    before = open_files()
    yield
    assert open_files() == before


async def death_of(executor: ProcessExecutor, *plans: StepPlan) -> RunnerDied:
    """The death that this life must end with."""
    with pytest.raises(RunnerDied) as caught:
        await life(executor, *plans)
    return caught.value


# ------------------------------------------------------------------------------ the worker's transport


SOCKET_WORKER = """
import sys
from tests.actors.executors.fake_worker import Misbehaving
from triolet.workers.runner import FdTransport, serve
fd = int(sys.argv.pop())
serve(Misbehaving().load, FdTransport(fd, fd))
"""


def test_a_worker_serves_over_a_socket_and_ends_when_the_other_side_closes_it() -> None:
    here, there = socket.socketpair()
    with here, there:
        process = subprocess.Popen(
            [sys.executable, "-c", SOCKET_WORKER, str(there.fileno())], pass_fds=[there.fileno()], cwd=ROOT
        )
        there.close()
        here.settimeout(30.0)
        reader, replies = REPLIES.reader(), list[Reply]()
        asked: list[tuple[Request, int]] = [(EngineConfig(model="nowhere"), 3), (first_step(), 4)]
        for request, num_replies in asked:
            here.sendall(REQUESTS.pack(request))
            while len(replies) < num_replies:
                reader.feed(here.recv(2**16))
                replies += REPLIES.messages(reader)
    assert process.wait(30.0) == 0
    assert [type(reply) for reply in replies] == [LoadProgress, LoadProgress, ModelInfo, StepResult]


# ------------------------------------------------------------------------------ the executors' contract


async def test_a_process_loads_computes_and_is_gone_afterwards() -> None:
    executor = executor_that()
    files = open_files()
    async with executor.running():
        info = await executor.start(ignore)
        result = await executor.execute(first_step(), unexpected)
        assert exists(process_of(info))
    assert (info.folder, info.num_kv_blocks) == ("nowhere", NUM_BLOCKS)
    assert [token.token_id for token in result.tokens] == list(answer_of([1, 2, 3], 5, 1))
    assert process_of(info) != os.getpid()
    assert not exists(process_of(info))
    assert open_files() == files


async def test_a_later_life_is_another_process_that_knows_no_requests() -> None:
    executor, processes = executor_that(), set()
    for _ in range(2):
        async with executor.running():
            processes.add(process_of(await executor.start(ignore)))
            assert (await executor.execute(first_step(), unexpected)).tokens
    assert len(processes) == 2
    with pytest.raises(RunnerFailed, match="KeyError: 0"):
        await life(executor, second_step())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process cannot be bound to cores")
async def test_a_process_is_bound_to_the_cores_of_its_device_before_it_imports_anything() -> None:
    core = min(os.sched_getaffinity(0))
    executor = executor_that(device=f"cpu:{core}")
    async with executor.running():
        assert os.sched_getaffinity(process_here(executor).child.pid) == {core}
    executor = executor_that(device="cpu:9999")  # there is none; the load says so
    async with executor.running():
        assert os.sched_getaffinity(process_here(executor).child.pid) == os.sched_getaffinity(0)


async def test_an_executor_is_used_in_its_scope_or_not_at_all() -> None:
    executor = executor_that()
    with pytest.raises(RuntimeError, match=r"must be used within its running\(\)"):
        await executor.start(ignore)
    await life(executor)
    with pytest.raises(RuntimeError, match=r"must be used within its running\(\)"):
        await executor.execute(first_step(), unexpected)


# --------------------------------------------------------------------------------------------- deaths


@pytest.mark.parametrize("when", [pytest.param("load", marks=pytest.mark.slow), "2"])
@pytest.mark.parametrize(
    ("misdeed", "message", "returncode"),
    one_in(
        2,
        [
            ("exit", "ended with exit status 3", 3),
            ("kill", "was killed by SIGKILL", -signal.SIGKILL),
            (
                "segfault",
                r"was killed by SIGSEGV; the end of its log: Fatal Python error: Segmentation fault \| .*fake_worker",
                -signal.SIGSEGV,
            ),
            (
                "rubbish",
                r"and the engine do not understand each other \(a frame must begin with .*got b'Segmentation",
                -signal.SIGKILL,
            ),
            ("half_a_frame", "ended with exit status 0", 0),
            ("another_step", "and the engine do not understand each other", -signal.SIGKILL),
            ("leave_a_child", "ended with exit status 7", 7),
            ("close", "was killed by SIGKILL", -signal.SIGKILL),
        ],
    ),
)
async def test_a_death_is_told_with_its_cause_and_the_next_life_works(
    misdeed: str, when: str, message: str, returncode: int, tmp_path: Path
) -> None:
    executor = executor_that(misdeed, when, tmp_path / "mark")
    with trio.fail_after(SOON_S):
        died = await death_of(executor, first_step(), second_step())
    assert died.returncode == returncode
    assert (died.exit_status, died.signal) == ((returncode, None) if returncode >= 0 else (None, -returncode))
    with pytest.raises(RunnerDied, match=f"^the model runner's process {message}"):
        raise died
    assert len(await life(executor, first_step(), second_step())) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere this is not known before")
@pytest.mark.parametrize(("misdeed", "returncode"), one_in(2, [("kill", -signal.SIGKILL), ("exit", 3)]))
async def test_a_death_is_told_before_the_system_is_done_with_it_and_the_next_life_loads_after_that(
    misdeed: str, returncode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_done = trio.Event()
    original = RunnerProcess._wait_for_exit

    async def wait_for_exit(self: RunnerProcess) -> None:
        await is_done.wait()
        await original(self)

    monkeypatch.setattr(RunnerProcess, "_wait_for_exit", wait_for_exit)
    executor = executor_that(misdeed, 2, tmp_path / "mark")
    with trio.fail_after(SOON_S):
        died = await death_of(executor, first_step(), second_step())
    assert died.returncode == returncode
    async with executor.running():
        with trio.move_on_after(0.5) as scope:
            await executor.start(ignore)
        assert scope.cancelled_caught
        is_done.set()
    assert len(await life(executor, first_step(), second_step())) == 2


def raising(error: OSError, after: int, original: Any) -> Any:
    """Return a function that does what the original does so many times, and then raises once."""
    num_calls = 0

    def call(*arguments: Any, **fields: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == after + 1:
            raise error
        return original(*arguments, **fields)

    return call


@pytest.mark.skipif(sys.platform != "linux", reason="waits for processes as Linux does")
@pytest.mark.parametrize(
    ("module", "name", "after", "number", "resource"),
    [
        (os, "pipe", 0, errno.EMFILE, "file descriptors for this process"),
        (os, "pipe", 3, errno.ENFILE, "file descriptors on this machine"),
        (subprocess, "Popen", 0, errno.EAGAIN, "processes or threads"),
        (subprocess, "Popen", 0, errno.ENOMEM, "memory"),
        (os, "pidfd_open", 0, errno.EMFILE, "file descriptors for this process"),
    ],
)
async def test_a_process_that_cannot_be_started_now_is_a_shortage_and_leaves_nothing(
    module: Any, name: str, after: int, number: int, resource: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RLIMIT_NPROC does not bind for root, so the calls of the system fail by themselves."""
    executor = executor_that("nothing")
    with monkeypatch.context() as patch:
        patch.setattr(module, name, raising(OSError(number, ""), after, getattr(module, name)))
        with pytest.raises(ResourceShortage, match=f"{resource}.*a process for the model runner"):
            await life(executor)
    assert len(await life(executor, first_step(), second_step())) == 2


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EMFILE, "")])
async def test_a_standby_for_which_there_is_no_room_is_left_out_and_ends_nothing(
    error: Exception, autojump_clock: MockClock
) -> None:
    def spawn() -> Any:
        tried.append(trio.current_time())
        raise error

    tried: list[float] = []
    standby = Standby(spawn, is_kept=True)
    standby.start()
    standby.keep()  # from a task of Trio's own
    await trio.sleep(2 * KEPT_AFTER_S)
    assert tried == [0.0, KEPT_AFTER_S]
    assert await standby.take() is None


async def test_progress_is_no_answer_to_a_plan() -> None:
    died = await death_of(executor_that("progress", 1), first_step())
    assert "a step must end with a StepResult; got a LoadProgress" in str(died)


async def test_a_step_is_not_taken_for_another_one() -> None:
    died = await death_of(executor_that("another_step", 1), first_step())
    assert "step 1 must end with its result; got that of 999" in str(died)


async def test_a_program_that_is_none_of_ours_is_recognised() -> None:
    executor = ProcessExecutor(EngineConfig(model="m"), [sys.executable, "-c", "print('hello')"])
    assert "a frame must begin with" in str(await death_of(executor))


async def test_a_program_that_is_not_there_is_an_error_and_leaves_nothing() -> None:
    executor = ProcessExecutor(EngineConfig(model="m"), ["/nowhere/python"])
    with pytest.raises(FileNotFoundError):
        await life(executor)


@pytest.mark.parametrize("when", ["idle", "step", "load"])
async def test_a_killed_process_is_noticed_by_itself_and_not_by_a_clock(
    when: str, mock_clock: MockClock
) -> None:
    """Trio's clock stands still, so that no look from time to time and no time limit can notice it."""
    executor = executor_that("hang", "load" if when == "load" else 1)

    async def live() -> None:
        async with executor.running():
            process_id = process_here(executor).child.pid
            if when == "load":
                await executor.start(lambda progress: os.kill(process_id, signal.SIGKILL))
            await executor.start(ignore)
            if when == "step":
                threading.Timer(0.1, os.kill, [process_id, signal.SIGKILL]).start()
                await executor.execute(first_step(), unexpected)
            os.kill(process_id, signal.SIGKILL)
            await trio.sleep_forever()

    with pytest.raises(RunnerDied, match="was killed by SIGKILL"):
        await live()


async def test_a_process_that_dies_idle_ends_its_life_without_being_asked() -> None:
    executor = executor_that()

    async def live() -> None:
        async with executor.running():
            os.kill(process_of(await executor.start(ignore)), signal.SIGTERM)
            await trio.sleep_forever()

    with pytest.raises(RunnerDied, match="was killed by SIGTERM"), trio.fail_after(SOON_S):
        await live()


async def test_a_step_that_hangs_is_killed_after_its_time() -> None:
    executor = executor_that("hang", 2, step_timeout=0.3)
    began_s = trio.current_time()
    died = await death_of(executor, first_step(), second_step())
    assert str(died).startswith("the model runner's process took more than 0.3 s for a step (step_timeout)")
    assert died.signal == signal.SIGKILL
    assert trio.current_time() - began_s < SOON_S


async def long_life(executor: ProcessExecutor, num_decodes: int) -> None:
    """Two plans for many steps, since each plan has the limit of its beginning."""
    async with executor.running():
        await executor.start(ignore)
        await executor.execute(first_step(), unexpected)
        await executor.execute(run_of(num_decodes, 3), lambda result: None)
        rest = attrs.evolve(run_of(2, 3 + num_decodes), step_id=3)
        await executor.execute(
            attrs.evolve(rest, rows=(attrs.evolve(rest.rows[0], new_block_ids=()),)), lambda result: None
        )


async def test_a_step_that_hangs_after_many_is_killed_long_before_its_longest_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery_state, "MIN_STEPS", 4)
    monkeypatch.setattr(recovery_state, "MIN_LIMIT_S", 0.3)
    monkeypatch.setattr(process_runner, "step_kind", lambda plan: (1, 1, 1))
    executor = executor_that("hang", 12, step_timeout=600.0)
    with trio.fail_after(SOON_S):
        with pytest.raises(RunnerDied) as caught:
            await long_life(executor, 10)
    assert "for a step (learned from such steps)" in caught.value.reason


async def test_what_a_life_has_learned_of_its_steps_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = executor_that()
    kind = step_kind(run_of(40, 3))
    await long_life(executor, 40)
    assert executor._hang_limit.limit_s(kind) == recovery_state.MIN_LIMIT_S
    await long_life(executor, 2)
    assert executor._hang_limit.limit_s(kind) == 30.0


async def jump_in_two(clock: MockClock, mark: Path, is_suspected: Callable[[], object]) -> None:
    """Let the time of a hang pass until it is suspected, and then the rest of it."""
    await jump_when_it_hangs(clock, mark, 11.0)
    while not is_suspected():
        await wait_all_tasks_blocked(0.01)
    clock.jump(20.0)


async def test_a_process_that_hangs_is_replaced_by_one_that_was_started_when_it_was_suspected(
    tmp_path: Path, mock_clock: MockClock
) -> None:
    executor = executor_that("hang", 1, tmp_path / "mark", step_timeout=30.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(jump_in_two, mock_clock, tmp_path / "mark", lambda: executor._standby.source)
        assert (await death_of(executor, first_step())).is_hang
    standby = executor._standby.source
    assert standby is not None
    async with executor.running():
        assert process_here(executor) is standby
        await executor.start(ignore)
        await executor.execute(first_step(), unexpected)
    await standby.gone()
    assert executor._standby.source is None


async def test_a_process_that_was_started_on_suspicion_is_ended_when_it_is_not_needed(
    mock_clock: MockClock,
) -> None:
    executor = executor_that()
    async with executor.running():
        executor._standby.start()
        standby = executor._standby.source
        assert standby is not None
        mock_clock.jump(60.0)  # a step that is suspected may have a long time left
        await wait_all_tasks_blocked()
        assert executor._standby.source is standby
        executor._standby.expire()
        mock_clock.jump(STANDBY_S)
        await standby.gone()
        executor._standby.start()
        second = executor._standby.source
        assert second is not None
        assert second is not standby
    await second.gone()  # with the executor's scope


async def die_after(executor: ProcessExecutor, clock: MockClock, delay_s: float) -> None:
    """Load the model, and kill the process when some seconds have passed."""
    async with executor.running():
        await executor.start(ignore)
        assert executor._standby.source is None  # its imports would take the time of the first steps
        clock.jump(delay_s)
        await wait_all_tasks_blocked()
        process_here(executor).child.kill()
        await executor.execute(first_step(), unexpected)


async def test_a_process_that_dies_is_replaced_by_the_one_that_is_kept_since_its_load(
    mock_clock: MockClock,
) -> None:
    executor = executor_that(keep_standby=True)
    with pytest.raises(RunnerDied):
        await die_after(executor, mock_clock, KEPT_AFTER_S)
    standby = executor._standby.source
    assert standby is not None
    async with executor.running():
        assert process_here(executor) is standby
        second = executor._standby.source  # for the next crash of a series
        assert second is not None
        await executor.start(ignore)
        await executor.execute(first_step(), unexpected)
        mock_clock.jump(KEPT_AFTER_S + STANDBY_S)
        await wait_all_tasks_blocked()
        assert executor._standby.source is second
    await second.gone()  # with the executor's scope


@pytest.mark.parametrize("delay_s", [0.0, KEPT_AFTER_S])
async def test_without_a_next_life_no_standby_is_left(delay_s: float, mock_clock: MockClock) -> None:
    executor = executor_that(keep_standby=True)
    with pytest.raises(RunnerDied):
        await die_after(executor, mock_clock, delay_s)
    standby = executor._standby.source
    assert (standby is None) == (delay_s == 0.0)
    mock_clock.jump(KEPT_AFTER_S + STANDBY_S)
    await wait_all_tasks_blocked()
    assert executor._standby.source is None
    if standby is not None:
        await standby.gone()


async def test_without_room_for_a_second_process_a_hang_is_healed_with_a_fresh_one(
    tmp_path: Path, mock_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(standby: Standby) -> None:
        tried.append(standby)
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", raising(OSError(errno.EAGAIN, ""), 0, subprocess.Popen))
            kept(standby)

    kept = Standby.start
    tried: list[object] = []
    executor = executor_that("hang", 1, tmp_path / "mark", step_timeout=30.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(jump_in_two, mock_clock, tmp_path / "mark", lambda: tried)
        monkeypatch.setattr(Standby, "start", start)
        assert (await death_of(executor, first_step())).is_hang
    monkeypatch.undo()
    assert await life(executor, first_step())


@pytest.mark.slow
async def test_a_standby_process_imports_the_modules_of_a_load() -> None:
    process = RunnerProcess.spawn(process_runner.WORKER)
    async with process.running(), process.conversation(None, ""):
        process.post(ImportModules())
        reply = await process.reply()
        assert isinstance(reply, LoadProgress)
        assert reply.stage == IMPORTS
        maps = Path(f"/proc/{process.child.pid}/maps")
        while b"torch" not in maps.read_bytes():  # noqa: ASYNC110, ASYNC240 - another process changes it
            await trio.sleep(0.05)


def limit_loads_to(monkeypatch: pytest.MonkeyPatch, limit_s: float) -> None:
    """Let a load after the first one be silent for so long, however long that was."""
    monkeypatch.setattr(recovery_state, "MIN_LIMIT_S", limit_s)
    monkeypatch.setattr(recovery_state, "FACTOR", 0.0)


async def test_a_later_load_that_makes_no_progress_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_loads_to(monkeypatch, 0.5)
    executor = executor_that("hang", "reload", tmp_path / "mark")
    await life(executor, first_step())
    with trio.fail_after(SOON_S):
        death = await death_of(executor)
    assert "made no progress in loading the model for more than 0.5 s" in death.reason


@pytest.mark.slow
async def test_a_later_load_that_computes_has_more_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_loads_to(monkeypatch, 0.5)
    monkeypatch.setattr(process_runner, "NUM_BUSY_LIMITS", 100)  # on a machine under load
    executor = executor_that("compute", "reload", tmp_path / "mark")
    for _ in range(2):
        with trio.fail_after(SOON_S):
            assert await life(executor, first_step())


async def test_a_load_that_computes_for_ever_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_loads_to(monkeypatch, 0.3)
    monkeypatch.setattr(process_runner, "NUM_BUSY_LIMITS", 2)
    executor = executor_that("compute", "reload", tmp_path / "mark")
    await life(executor, first_step())
    with trio.fail_after(SOON_S):
        death = await death_of(executor)
    assert death.is_hang


@pytest.mark.slow
async def test_a_rank_that_waits_for_one_that_computes_is_not_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_loads_to(monkeypatch, 0.5)
    monkeypatch.setattr(process_runner, "NUM_BUSY_LIMITS", 100)  # on a machine under load
    busy = executor_that("compute", "reload", tmp_path / "busy")
    waiting = executor_that("wait", "reload", tmp_path / "waiting")
    for one in (busy, waiting):
        one.peers = (busy, waiting)
    results: list[StepResult] = []

    async def live(one: ProcessExecutor) -> None:
        results.extend(await life(one, first_step()))

    for _ in range(2):
        async with trio.open_nursery() as nursery:
            for one in (busy, waiting):
                nursery.start_soon(live, one)
    assert len(results) == 4


async def test_a_stopped_process_that_loads_again_is_killed_and_the_next_life_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit_loads_to(monkeypatch, 0.5)
    executor = executor_that()
    await life(executor, first_step())

    async def stopped_life() -> None:
        async with executor.running():
            os.kill(process_here(executor).child.pid, signal.SIGSTOP)
            await executor.start(ignore)

    with pytest.raises(RunnerDied, match="made no progress"), trio.fail_after(SOON_S):
        await stopped_life()
    # The machine may have become slow: the next load has twice the time, until one succeeds.
    assert executor._load_silence_limit_s() == 1.0
    monkeypatch.undo()
    assert await life(executor, first_step())
    monkeypatch.setattr(recovery_state, "FACTOR", 0.0)
    assert executor._load_silence_limit_s() == recovery_state.MIN_LIMIT_S


def test_a_load_that_imports_modules_shows_that_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "IMPORT_REPORT_S", 0.0)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("imported_first", "imported_second"):
        (tmp_path / f"{name}.py").touch()
    finders, reports = list(sys.meta_path), list[LoadProgress]()
    with runner.imports_reported(reports.append):
        importlib.import_module("imported_first")
        importlib.import_module("imported_second")
    assert reports == [LoadProgress(IMPORTS, 0, 0)] * 2
    assert sys.meta_path == finders


async def test_without_a_step_timeout_a_load_may_take_for_ever() -> None:
    executor = executor_that(step_timeout=None)
    await life(executor)
    assert executor._load_silence_limit_s() is None


async def test_the_first_load_has_no_limit_and_later_ones_at_least_two_seconds() -> None:
    executor = executor_that()
    assert executor._load_silence_limit_s() is None
    await life(executor)
    limit_s = executor._load_silence_limit_s()
    assert limit_s is not None and limit_s >= 2.0


async def sizes_of(executor: ProcessExecutor) -> tuple[int, int]:
    async with executor.running():
        info = await executor.start(ignore)
    return info.num_kv_blocks, info.max_model_len


async def test_a_later_life_has_the_blocks_of_the_first_whatever_memory_is_free(tmp_path: Path) -> None:
    executor = executor_that("less_free_memory", "reload", tmp_path / "mark")
    first = await sizes_of(executor)
    assert [await sizes_of(executor) for _ in range(2)] == [first, first]


async def test_where_the_blocks_of_the_first_life_cannot_be_had_the_next_load_measures_anew(
    tmp_path: Path,
) -> None:
    executor = executor_that("less_memory", "reload", tmp_path / "mark")
    assert (await sizes_of(executor))[0] == NUM_BLOCKS
    with pytest.raises(ConfigError, match="num_kv_blocks"):
        await sizes_of(executor)
    assert [(await sizes_of(executor))[0] for _ in range(2)] == [NUM_BLOCKS // 2] * 2


async def test_without_a_step_timeout_a_step_may_take_for_ever() -> None:
    executor = executor_that("hang", 1, step_timeout=None)
    with trio.move_on_after(1) as waited:
        await life(executor, first_step())
    assert waited.cancelled_caught


# ---------------------------------------------------------------------------------------- being left


@pytest.mark.parametrize("when", ["load", "1"])
async def test_a_cancelled_task_does_not_wait_for_the_process(when: str, mock_clock: MockClock) -> None:
    """Trio's clock stands still: no grace period can end here."""
    executor = executor_that("hang", when)
    processes: list[ChildProcess] = []
    has_begun = trio.Event()

    async def live() -> None:
        async with executor.running():
            processes.append(process_here(executor).child)
            await executor.start(lambda progress: has_begun.set())
            await executor.execute(first_step(), unexpected)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(live)
        await has_begun.wait()
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    with trio.CancelScope() as scope:
        scope.cancel()
        await live()
    for process in processes:
        assert process.returncode == -signal.SIGKILL
        assert not exists(process.pid)


async def test_a_process_that_does_not_end_when_asked_is_killed() -> None:
    program = "import sys, time; sys.stdin.close(); time.sleep(60)"
    executor = ProcessExecutor(EngineConfig(model="m"), [sys.executable, "-c", program])
    async with executor.running():
        process_id = process_here(executor).child.pid
    assert not exists(process_id)


async def test_an_idle_process_leaves_by_itself_within_its_grace(mock_clock: MockClock) -> None:
    """Its grace has no end here, since Trio's clock stands still."""
    executor = executor_that()
    async with executor.running():
        process_id = process_of(await executor.start(ignore))
        process = process_here(executor).child
    assert not exists(process_id)
    assert process.returncode == 0


async def test_an_error_in_the_scope_is_raised_bare() -> None:
    executor = executor_that()

    async def live() -> None:
        async with executor.running():
            await executor.start(ignore)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await live()


async def test_a_process_outlives_the_threads_that_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux signals the end of the thread that started a process; it must not be one that Trio lends."""
    monkeypatch.setattr(trio._core._thread_cache, "IDLE_TIMEOUT", 0.05)
    await trio.to_thread.run_sync(lambda: None)
    executor = executor_that()
    async with executor.running():
        await executor.start(ignore)
        await trio.sleep(0.3)
        assert (await executor.execute(first_step(), unexpected)).tokens


PARENT = """
import sys, trio
from tests.actors.executors.harness import executor_that, first_step, ignore
from tests.actors.harness import unexpected

async def main():
    executor = executor_that("hang", 1)
    async with executor.running():
        info = await executor.start(ignore)
        print(info.process_id, flush=True)
        await (executor.execute(first_step(), unexpected) if sys.argv[1] == "step" else trio.sleep_forever())

trio.run(main)
"""


@pytest.mark.parametrize(
    "when",
    [
        pytest.param("idle", marks=pytest.mark.slow),
        "step",
        # It runs nothing at all, like one that waits in the kernel for a device or for room in a pipe.
        pytest.param("stopped", marks=pytest.mark.skipif(sys.platform != "linux", reason="of Linux")),
    ],
)
def test_a_process_dies_with_its_parent_however_that_dies(when: str) -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(SRC)])}
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, when], env=environ, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        process_id = int(parent.stdout.readline())
        time.sleep(0.2)
        assert is_running(process_id)
        if when == "stopped":
            os.kill(process_id, signal.SIGSTOP)
        parent.kill()
    deadline_s = time.monotonic() + 20  # on a busy machine; by itself it would live longer
    while is_running(process_id) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not is_running(process_id)


# ----------------------------------------------------------------------------------------- what it says


async def test_what_a_process_prints_goes_to_the_log_line_by_line_and_bounded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "triolet.runner"):
        [result] = await life(executor_that("print", 1), first_step())
    assert result.tokens
    lines = [
        record.getMessage().partition(": ")[2] for record in caplog.records if record.name == "triolet.runner"
    ]
    assert lines[0] == "a stray line"
    assert lines[1].startswith("not endedxxx")
    assert lines[-1] == "the last line"
    assert max(map(len, lines)) <= MAX_LINE_BYTES
    assert sum(len(line) for line in lines) < 3 * 2**16


@pytest.mark.parametrize(("misdeed", "expected"), [("refuse", ConfigError), ("raise", ModelError)])
async def test_a_load_that_refuses_its_configuration_leaves_no_traceback_and_a_mistake_does(
    misdeed: str, expected: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "triolet.runner"), pytest.raises(expected):
        await life(executor_that(misdeed, "load"))
    assert ("Traceback" in caplog.text) == (expected is ModelError)


@pytest.mark.parametrize(("method", "is_told"), [("unheard_of", False), ("refuse", True)])
async def test_a_call_of_a_method_that_there_is_not_leaves_no_traceback_and_a_mistake_does(
    method: str, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    executor = executor_that()
    with caplog.at_level(logging.WARNING, "triolet.runner"):
        async with executor.running():
            await executor.start(ignore)
            assert (await executor.call(WorkerCall(method, False, (), {}), 30.0)).error is not None
    assert ("Traceback" in caplog.text) == is_told


async def test_no_secret_reaches_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("API_KEYS", "PRIORITY_KEYS", "WORKER_TOKEN", "API_KEY"):
        monkeypatch.setenv(f"TRIOLET_{name}", "key-of-the-environment")
    asked = []
    pack = REQUESTS.pack

    def record(way: object, message: Request) -> bytes:
        asked.append(pack(message))
        return asked[-1]

    monkeypatch.setattr(type(REQUESTS), "pack", record)
    program = f"import os; open({str(tmp_path / 'environ')!r}, 'w').write(str(dict(os.environ)))"
    config = EngineConfig(model="nowhere", api_keys=("key-of-the-configuration",))
    await death_of(ProcessExecutor(config, [sys.executable, "-c", program]))
    assert b"nowhere" in asked[0]
    assert b"key-of-the" not in asked[0]
    environ = (tmp_path / "environ").read_text()
    assert "PYTHONPATH" in environ
    assert "key-of-the" not in environ
    assert config.without_secrets() == EngineConfig(model="nowhere")


async def test_a_process_finds_the_modules_that_its_parent_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("import tests.actors.executors.fake_worker as w; w.main()")
    monkeypatch.syspath_prepend(tmp_path)
    executor = ProcessExecutor(EngineConfig(model="m"), [sys.executable, "-P", "-m", "only_here"])
    assert await life(executor, first_step())


# ------------------------------------------------------------------------------------- in an engine


@pytest.mark.parametrize("misdeed", ["kill", "rubbish", pytest.param("exit", marks=pytest.mark.slow)])
async def test_streams_go_on_after_every_kind_of_death(misdeed: str, tmp_path: Path) -> None:
    assert await ask_six(executor_that(misdeed, 7, tmp_path / "mark")) == 1


async def jump_when_it_hangs(clock: MockClock, mark: Path, seconds: float) -> None:
    while not mark.exists():  # noqa: ASYNC240 - made by the process right before it hangs
        await wait_all_tasks_blocked(0.01)
    clock.jump(seconds)


async def test_streams_go_on_after_a_hang(tmp_path: Path, mock_clock: MockClock) -> None:
    """In virtual time, so that no step of a busy machine counts as a second hang."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(jump_when_it_hangs, mock_clock, tmp_path / "mark", 1.0)
        assert await ask_six(executor_that("hang", 7, tmp_path / "mark", step_timeout=1.0)) == 1


class StoppedInItsSecondLoad(ProcessExecutor):
    """Executor whose second process is stopped before it loads the model."""

    def __init__(self, ordinary: ProcessExecutor) -> None:
        super().__init__(ordinary._config, ordinary._command)
        self.num_loads, self.stopped = 0, trio.Event()

    async def start(self, on_progress: OnProgress) -> ModelInfo:
        self.num_loads += 1
        if self.num_loads == 2:
            os.kill(process_here(self).child.pid, signal.SIGSTOP)
            self.stopped.set()
        return await super().start(on_progress)


async def test_a_load_that_hangs_after_a_death_is_healed_after_two_seconds_and_the_streams_go_on(
    mock_clock: MockClock,
) -> None:
    """In virtual time, which goes on for the limit of a load alone: what a busy machine needs is not counted."""
    executor = StoppedInItsSecondLoad(executor_that(step_timeout=60.0))
    answers: dict[int, tuple[int, ...]] = {}
    async with run_engine(EngineConfig(runner="process"), executor, LetterTokenizer) as engine:

        async def ask(seed: int) -> None:
            params = SamplingParams(max_tokens=30, seed=seed)
            answers[seed] = tuple((await engine.complete([seed] * 5, params)).outputs[0].token_ids)

        os.kill(process_of(engine.model_info), signal.SIGKILL)
        async with trio.open_nursery() as nursery:
            for seed in range(4):
                nursery.start_soon(ask, seed)
            await executor.stopped.wait()
            await wait_all_tasks_blocked(0.01)
            mock_clock.jump(2.0)
        assert engine.statistics().num_restarts == 2
    assert answers == {seed: answer_of([seed] * 5, seed, 30) for seed in range(4)}


async def test_a_hang_shows_in_the_health_until_it_is_healed(tmp_path: Path, mock_clock: MockClock) -> None:
    executor = executor_that("hang", 7, tmp_path / "mark", step_timeout=1.0)
    config = EngineConfig(runner="process", step_timeout=0.5)
    async with run_engine(config, executor, LetterTokenizer) as engine:
        engine.check_health()
        async with engine.generate([1] * 5, SamplingParams(max_tokens=30, seed=4)) as stream:
            await jump_when_it_hangs(mock_clock, tmp_path / "mark", 0.4)
            engine.check_health()
            mock_clock.jump(0.2)
            with pytest.raises(EngineUnhealthy, match=r"^model_runner is stuck: .* for 0\.6 s$"):
                engine.check_health()
            mock_clock.jump(0.4)
            outputs = [output async for output in stream]
        assert outputs[-1].outputs[0].token_ids == answer_of([1] * 5, 4, 30)
        engine.check_health()
        assert engine.statistics().num_restarts == 1


@pytest.mark.parametrize("misdeed", ["kill", "refuse"])
async def test_an_engine_that_can_not_start_says_why(misdeed: str) -> None:
    expected = {"kill": RunnerDied, "refuse": ConfigError}[misdeed]
    with pytest.raises(expected):
        async with run_engine(EngineConfig(), executor_that(misdeed, "load"), LetterTokenizer):
            pytest.fail("it has started")
