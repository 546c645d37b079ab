"""Grammars in processes of their own: what becomes of those when clients leave, and of answers when processes die."""

from __future__ import annotations

import errno
import gc
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn, Self

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from tests.actors.test_structured_outputs import JSON, LARGE, SLOW, check_json, ending, first, opened, params
from tests.model.tiny import make_model
from tests.source_tree import ROOT, SRC
from triolet import Engine, RequestOutputKind
from triolet.actors.executors.grammar import grammar_process
from triolet.actors.executors.grammar.compiler_turns import CompilerTurns
from triolet.actors.executors.grammar.grammar_process import (
    IDLE_CHECK_S,
    IDLE_S,
    MAX_IDLE_S,
    GrammarLimits,
    GrammarProcess,
    GrammarProcesses,
)
from triolet.actors.executors.grammar.grammars import GrammarLate, GrammarRefused
from triolet.core.recovery import recovery_state
from triolet.core.recovery.recovery_state import RareHangLimit
from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.errors import InvalidParams, RequestFailed, ResourceShortage
from triolet.ipc.grammar import (
    GRAMMAR_REPLIES,
    GrammarReply,
    GrammarRequest,
    GrammarState,
    MaskAnswers,
    Vocabulary,
)

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama-plain", tmp_path_factory.mktemp("models") / "tiny", with_tokenizer=True)


def grammar_processes() -> list[int]:
    """Processes of grammars on this machine, and their copies; those of tests in parallel runs are among them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"triolet.workers.grammar" in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def children_of(parent: int) -> list[int]:
    children = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            children.append(int(path.parent.name))
    return children


def own_originals() -> list[int]:
    return [pid for pid in grammar_processes() if pid in children_of(os.getpid())]


async def comes_true(condition: Callable[[], bool]) -> None:
    """Wait for what the system does without a notification."""
    with trio.fail_after(60):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.01)


def session_niceness(pid: int) -> str:
    """Return the niceness of a process's group of sessions; nothing for the first group, which Linux does not show."""
    return Path(f"/proc/{pid}/autogroup").read_text().rpartition(" ")[2].strip()


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="the system has no groups of sessions")
async def test_grammars_have_a_low_priority_beside_other_sessions_too(folder: Path) -> None:
    own, own_session = os.getpriority(os.PRIO_PROCESS, 0), session_niceness(os.getpid())
    async with opened(folder) as engine:
        await engine.complete([1], params(JSON))
        [original] = own_originals()
        for pid in (original, *children_of(original)):
            assert os.getpriority(os.PRIO_PROCESS, pid) == min(own + 10, 19)
            assert session_niceness(pid) == "10"
    assert session_niceness(os.getpid()) == own_session


# ----------------------------------------------------------------------------------- clients that leave


@needs_proc
async def test_a_client_that_leaves_while_its_form_is_compiled_leaves_nothing(folder: Path) -> None:
    async with opened(folder, max_grammar_bytes=2**20, grammar_timeout=60.0) as engine:
        await engine.complete([1], params(JSON))
        [original] = own_originals()
        [copy] = children_of(original)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.complete, [1, 2], params(SLOW))
            await comes_true(lambda: len(children_of(original)) == 2)
            nursery.cancel_scope.cancel()
        assert engine.statistics().num_requests_live == 0
        await comes_true(lambda: children_of(original) == [copy])
        check_json((await engine.complete([1, 2], params(JSON))).text)


class LeavesAt(trio.abc.Instrument):
    """Cancels a scope when the task that has entered it stops for the n-th time."""

    def __init__(self, nth: int, scope: trio.CancelScope) -> None:
        self.num_left, self.scope, self.task = nth, scope, trio.lowlevel.current_task()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.num_left -= task is self.task
        if not self.num_left:
            self.scope.cancel()


async def leaves(engine: Engine, nth: int) -> bool:
    """Whether a client could leave when it stopped for the n-th time; the engine goes on."""
    with trio.CancelScope() as scope:
        leaving = LeavesAt(nth, scope)
        trio.lowlevel.add_instrument(leaving)
        try:
            await engine.complete([1, 2], params(StructuredOutputsParams(choice=[f"word {nth}"])))
        finally:
            trio.lowlevel.remove_instrument(leaving)
    gc.collect()  # a socket that is left open is an error in these tests
    check_json((await engine.complete([1, 2], params(JSON))).text)
    return scope.cancelled_caught


@pytest.mark.slow
async def test_a_client_may_leave_wherever_it_waits_for_its_form(folder: Path) -> None:
    async with opened(folder) as engine:
        await engine.complete([1], params(JSON))
        nth = 1
        while await leaves(engine, nth):
            nth += 1
    assert nth > 5


@pytest.mark.slow
@pytest.mark.parametrize("nth", range(1, 8))
async def test_a_client_may_leave_wherever_it_waits_for_the_process_of_grammars(
    folder: Path, nth: int
) -> None:
    async with opened(folder) as engine:
        assert await leaves(engine, nth)


def test_a_late_question_about_a_shorter_answer_has_nothing_told_twice() -> None:
    ours, _theirs = trio.testing.memory_stream_pair()
    process: Any = grammar_process.GrammarProcess(ours)  # type: ignore[arg-type]
    told = [grammar_process._step(process, 1, token_ids) for token_ids in ((5, 6), (5,), (5, 6, 7))]
    assert [(step.start, step.token_ids) for step in told] == [(0, (5, 6)), (2, ()), (2, (7,))]


# ----------------------------------------------------------------------------------- deaths of grammars


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize("victims", ["copies", "original"])
async def test_answers_survive_the_death_of_their_grammars(folder: Path, victims: str) -> None:
    async with opened(folder, runner="inline") as engine:
        undisturbed = first(await engine.complete([1, 2, 3], params(JSON, 5)))
    async with opened(folder) as engine:
        text, num_outputs = "", 0
        async with engine.generate([1, 2, 3], params(JSON, 5, output_kind=RequestOutputKind.DELTA)) as stream:
            async for output in stream:
                text += output.text
                num_outputs += 1
                if num_outputs == 4:
                    [original] = own_originals()
                    for victim in children_of(original) if victims == "copies" else [original]:
                        os.kill(victim, signal.SIGKILL)
        assert (text, output.finish_reason) == undisturbed
        check_json((await engine.complete([1], params(JSON, 6))).text)


@needs_proc
async def test_a_form_that_hangs_is_replaced_and_others_go_on_meanwhile(
    folder: Path, mock_clock: MockClock
) -> None:
    """The hung grammar's time is over when the test says so, after the other answer: no machine is too slow."""
    mock_clock.rate = 1.0
    deltas = params(JSON, 5, output_kind=RequestOutputKind.DELTA)
    async with opened(folder, grammar_timeout=600.0, step_timeout=None) as engine:
        undisturbed = first(await engine.complete([1, 2, 3], params(JSON, 5)))
        text, num_free = "", 0
        async with engine.generate([1, 2, 3], deltas) as bound:
            async for output in bound:
                text += output.text
                if len(text) == 4:
                    break
            [original] = own_originals()
            [copy] = children_of(original)
            os.kill(copy, signal.SIGSTOP)
            async with engine.generate([1], params(None, max_tokens=20, ignore_eos=True)) as free:
                async for _ in free:
                    num_free += 1
            mock_clock.jump(600.0)
            async for output in bound:
                text += output.text
        assert num_free > 3
        assert (text, output.finish_reason) == undisturbed


@needs_proc
async def test_a_new_form_is_compiled_when_all_grammars_have_died(folder: Path) -> None:
    async with opened(folder) as engine:
        for word in ("ab", "cd", "ef"):
            output = await engine.complete([1], params(StructuredOutputsParams(choice=[word])))
            assert output.text == word
            [original] = own_originals()
            os.kill(original, signal.SIGKILL)
        assert engine.statistics().num_restarts >= 1


@needs_proc
async def test_a_connection_closed_as_its_wait_ends_is_one_of_a_dead_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[trio.socket.SocketType] = []

    async def wait_and_close(connection: trio.socket.SocketType) -> None:
        await trio.lowlevel.wait_writable(connection)
        if not closed:
            connection.close()
            closed.append(connection)

    monkeypatch.setattr(grammar_process, "wait_for_room", wait_and_close)
    async with opened(folder) as engine:
        output = await engine.complete([1], params(StructuredOutputsParams(choice=["ab"])))
        assert output.text == "ab"
        assert engine.statistics().num_restarts == len(closed) == 1


@pytest.mark.slow
@needs_proc
async def test_processes_of_grammars_that_split_no_more_are_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(folder) as engine:
        await engine.complete([1], params(JSON))
        [original] = own_originals()
        # Short for what takes milliseconds, and still long for the start of an interpreter on a busy machine.
        monkeypatch.setattr(recovery_state, "MIN_LIMIT_S", 0.05)
        monkeypatch.setattr(recovery_state, "FACTOR", 60.0)
        os.kill(original, signal.SIGSTOP)
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                output = await engine.complete([1], params(StructuredOutputsParams(choice=["ab"])))
                assert output.text == "ab"

            nursery.start_soon(ask)
            await comes_true(lambda: own_originals() not in ([original], []))
            monkeypatch.undo()
        check_json((await engine.complete([1], params(JSON))).text)


@pytest.mark.slow
@needs_proc
async def test_a_late_question_shows_that_the_process_of_all_grammars_has_stopped_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question has all the time there is: only the check of the original can end this wait."""
    deltas = params(JSON, 5, output_kind=RequestOutputKind.DELTA)
    async with opened(folder, grammar_timeout=600.0) as engine:
        undisturbed, text = first(await engine.complete([1, 2, 3], params(JSON, 5))), ""
        monkeypatch.setattr(recovery_state, "MIN_LIMIT_S", 0.05)
        monkeypatch.setattr(recovery_state, "FACTOR", 60.0)
        with trio.fail_after(60.0):
            async with engine.generate([1, 2, 3], deltas) as bound:
                async for output in bound:
                    if not text:
                        [original] = own_originals()
                        for victim in (original, *children_of(original)):
                            os.kill(victim, signal.SIGSTOP)
                    text += output.text
        assert (text, output.finish_reason) == undisturbed


async def test_an_original_that_starts_too_late_for_what_was_learned_is_started_again_with_more_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit = RareHangLimit(60.0)
    limit.observe(1.0)
    learned_s = []

    async def ask(
        self: GrammarProcess, request: GrammarRequest | None, timeout_s: float | None
    ) -> GrammarReply:
        learned_s.append(timeout_s)
        if len(learned_s) < 3:
            raise GrammarLate
        return GrammarState(1, "none works")

    monkeypatch.setattr(GrammarProcess, "ask", ask)
    monkeypatch.setattr(grammar_process, "PROGRAM", ("sleep", "600"))
    original, popen, problem = await grammar_process._start_original(Vocabulary(b"", 1, ()), limit)
    grammar_process._end_original(original, popen)
    assert (learned_s, problem) == ([3.0, 6.0, 12.0], "none works")


@pytest.mark.slow
@needs_proc
async def test_a_form_is_not_blamed_for_the_death_of_what_compiles_it(folder: Path) -> None:
    endings: list[str] = []
    async with opened(folder, max_grammar_bytes=2**20, grammar_timeout=30.0, max_grammars=1) as engine:
        await engine.complete([1], params(JSON))

        async def ask(form: StructuredOutputsParams) -> None:
            endings.append(await ending(engine, form))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, SLOW)  # compiles for a second or so, and the others wait for its place
            nursery.start_soon(ask, StructuredOutputsParams(choice=["ab"]))
            await trio.sleep(0.3)
            os.kill(own_originals()[0], signal.SIGKILL)
        check_json((await engine.complete([1, 2], params(JSON))).text)
    assert "answer" in endings
    assert not any("crashes" in text for text in endings)


@needs_proc
async def test_no_process_of_a_grammar_outlives_its_engine(folder: Path) -> None:
    async with opened(folder) as engine:
        await engine.complete([1], params(JSON))
        [original] = own_originals()
        processes = {original, *children_of(original)}
        assert len(processes) == 2
    with trio.fail_after(60):
        while processes & set(grammar_processes()):  # noqa: ASYNC110 - the system does not report their ends
            await trio.sleep(0.01)
    assert own_originals() == []


KILLED = """
import sys
from pathlib import Path
import trio
from tests.actors.test_structured_outputs import JSON, opened, params

async def main():
    async with opened(Path(sys.argv[1])) as engine:
        await engine.complete([1], params(JSON))
        print("ready", flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize("is_stopped", [False, True])
def test_grammar_processes_die_with_an_engine_that_is_killed_whatever_they_do(
    folder: Path, is_stopped: bool
) -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(SRC)])}
    command = [sys.executable, "-c", KILLED, str(folder)]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        originals = [pid for pid in children_of(parent.pid) if pid in grammar_processes()]
        processes = {*originals, *(copy for original in originals for copy in children_of(original))}
        assert len(processes) == 2
        if is_stopped:  # as in the middle of a long compilation: nothing is read meanwhile
            for pid in processes:
                os.kill(pid, signal.SIGSTOP)
        parent.kill()
    deadline_s = time.monotonic() + 60  # on a busy machine; a stopped one would stay for ever
    while processes & set(grammar_processes()) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not processes & set(grammar_processes())


ORPHAN = """
import os, sys
from triolet.workers.grammar import main
print("started", flush=True)
main(None, int(sys.argv[1]))
"""


def test_a_grammar_process_with_a_parent_that_ended_before_it_could_ask_for_a_signal_ends_at_once() -> None:
    command = [sys.executable, "-c", ORPHAN, "1" if os.getpid() != 1 else "2"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(SRC)}, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"started\n", b"")


async def test_no_secret_reaches_the_processes_of_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, str]] = []

    def start(command: object, *, env: dict[str, str], **options: object) -> NoReturn:
        started.append(env)
        raise OSError(errno.EAGAIN, "no process")

    monkeypatch.setattr(subprocess, "Popen", start)
    for name in ("API_KEYS", "PRIORITY_KEYS", "WORKER_TOKEN", "API_KEY"):
        monkeypatch.setenv(f"TRIOLET_{name}", "a-key")
    limits = grammar_process.GrammarLimits()
    opening = grammar_process.open_processes(
        Vocabulary(b"{}", 1, ()), max_grammars=1, timeout_s=1.0, memory_bytes=0, limits=limits
    )
    with pytest.raises(ResourceShortage):
        async with opening:
            raise AssertionError
    [environ] = started
    assert "PYTHONPATH" in environ
    assert "a-key" not in environ.values()


async def test_an_engine_that_is_asked_for_no_form_starts_no_process(folder: Path) -> None:
    async with opened(folder) as engine:
        await engine.complete([1], params(None, max_tokens=3))
        assert own_originals() == []


# ----------------------------------------------------------------------------------------- shortages


FORK_FAILS_TWICE = """
import errno, os, socket, sys
from triolet.workers import grammar
fork, failures = os.fork, [1, 2]
def failing_fork():
    if failures:
        failures.pop()
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    return fork()
os.fork = failing_fork
grammar.main(socket.socket(fileno=int(sys.argv[1])))
"""


@needs_proc
async def test_a_fork_that_fails_is_told_to_the_request_that_needs_it_and_the_next_one_is_served(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RLIMIT_NPROC does not bind for root, so the fork fails by itself."""
    monkeypatch.setattr(grammar_process, "PROGRAM", (sys.executable, "-P", "-c", FORK_FAILS_TWICE))
    async with opened(folder) as engine:
        for _ in range(2):
            with pytest.raises(
                ResourceShortage, match="shortage of processes or threads for a grammar process"
            ):
                await engine.complete([1], params(JSON))
        check_json((await engine.complete([1], params(JSON))).text)
        assert engine.statistics().num_restarts == 0


LIMIT_BELOW_A_GRAMMARS = """
import resource
from triolet.workers.grammar import _limit_memory
operators = 2**36
resource.setrlimit(resource.RLIMIT_AS, (operators, operators))
assert not _limit_memory(2**40)
assert resource.getrlimit(resource.RLIMIT_AS) == (operators, operators)
assert _limit_memory(2**30)
assert 2**30 < resource.getrlimit(resource.RLIMIT_AS)[0] < 2**35
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits mapped memory")
def test_the_memory_of_a_grammar_is_limited_by_the_operators_limit_where_that_is_less() -> None:
    command = [sys.executable, "-P", "-c", LIMIT_BELOW_A_GRAMMARS]
    assert subprocess.run(command, check=False).returncode == 0


@pytest.mark.slow
@needs_proc
async def test_a_process_that_has_no_memory_to_start_in_fails_the_request_and_not_the_feature(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit on memory is in force before the interpreter has read its modules."""
    limited = (
        "import resource, runpy; resource.setrlimit(resource.RLIMIT_AS, (2**25, 2**25));"
        "runpy.run_module('triolet.workers.grammar', run_name='__main__')"
    )
    async with opened(folder) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(grammar_process, "PROGRAM", (sys.executable, "-P", "-c", limited))
            with pytest.raises(ResourceShortage, match="memory"):
                await engine.complete([1], params(JSON))
        check_json((await engine.complete([1], params(JSON))).text)
        assert engine.statistics().num_restarts == 0


LITTLE_MEMORY_AFTER_THE_VOCABULARY = """
import resource, runpy, sys
from triolet.structured_outputs import compiler

class Vocabulary(compiler.GrammarVocabulary):
    def __init__(self, *args):
        super().__init__(*args)
        mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + 2**24, mapped + 2**24))

compiler.GrammarVocabulary = Vocabulary
runpy.run_module("triolet.workers.grammar", run_name="__main__")
"""


@pytest.mark.slow
@needs_proc
async def test_a_form_is_not_blamed_where_the_machine_has_less_memory_than_a_form_may_take(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (sys.executable, "-P", "-c", LITTLE_MEMORY_AFTER_THE_VOCABULARY)
    monkeypatch.setattr(grammar_process, "PROGRAM", program)
    async with opened(folder, max_grammar_bytes=2**20, grammar_timeout=30.0) as engine:
        with pytest.raises(ResourceShortage, match="memory"):
            await engine.complete([1], params(LARGE))
        check_json((await engine.complete([1], params(JSON))).text)


@pytest.mark.slow
@needs_proc
async def test_an_answer_amid_its_grammar_waits_for_a_short_shortage(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, num_failed = socket.socketpair, 0

    def failing_pair() -> tuple[socket.socket, socket.socket]:
        nonlocal num_failed
        num_failed += 1
        if num_failed <= 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return pair()

    async with opened(folder) as engine:
        undisturbed = first(await engine.complete([1, 2, 3], params(JSON, 5)))
        [original] = own_originals()
        text = ""
        async with engine.generate([1, 2, 3], params(JSON, 5, output_kind=RequestOutputKind.DELTA)) as stream:
            async for output in stream:
                text += output.text
                if len(text) >= 4 and num_failed == 0:
                    monkeypatch.setattr(socket, "socketpair", failing_pair)
                    for copy in children_of(original):
                        os.kill(copy, signal.SIGKILL)
        assert num_failed > 3
        assert (text, output.finish_reason) == undisturbed


@pytest.mark.slow
@needs_proc
async def test_an_answer_amid_its_grammar_fails_with_the_shortage_that_lasts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_pair() -> tuple[socket.socket, socket.socket]:
        raise OSError(errno.EMFILE, "Too many open files")

    async with opened(folder) as engine:
        await engine.complete([1, 2, 3], params(JSON, 5))
        [original] = own_originals()

        async def lose_its_process() -> None:
            async with engine.generate([1, 2, 3], params(JSON, 5)) as stream:
                async for _ in stream:
                    monkeypatch.setattr(socket, "socketpair", no_pair)
                    for copy in children_of(original):
                        os.kill(copy, signal.SIGKILL)

        with pytest.raises(ResourceShortage, match="RLIMIT_NOFILE"):
            await lose_its_process()
        monkeypatch.undo()
        check_json((await engine.complete([1], params(JSON))).text)
        assert engine.statistics().num_requests_live == 0


# ------------------------------------------------------------------------- processes that nothing uses


class Ends:
    """Connections to processes that the test plays; closed with the scope."""

    def __init__(self) -> None:
        self.theirs: list[trio.socket.SocketType] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for end in self.theirs:
            end.close()

    def connected(self) -> GrammarProcess:
        ours, theirs = trio.socket.socketpair()
        self.theirs.append(theirs)
        return GrammarProcess(trio.SocketStream(ours))

    def grammars(self, max_grammars: int) -> GrammarProcesses:
        return GrammarProcesses(
            self.connected(), max_grammars=max_grammars, timeout_s=1.0, memory_bytes=1, limits=GrammarLimits()
        )


def form(name: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=name)


async def test_a_process_is_kept_without_use_for_a_time_that_grows_with_the_requests_that_wanted_its_grammar(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def compiled(self: GrammarProcesses, params: StructuredOutputsParams) -> GrammarProcess:
        await trio.lowlevel.checkpoint()
        return ends.connected()

    monkeypatch.setattr(GrammarProcesses, "_compiled", compiled)
    once, thrice, often, in_use, replaced = map(form, ("once", "thrice", "often", "in use", "replaced"))
    with Ends() as ends:
        grammars = ends.grammars(8)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(grammars.watch)
            for wanted in (once, *[thrice] * 3, *[often] * 1000):
                await grammars.open(wanted)
            async with grammars._in_use(replaced):
                pass
            async with grammars._in_use(in_use):
                began_s = trio.current_time()
                for kept_s, kept in (
                    (IDLE_S, {once, thrice, often, in_use, replaced}),
                    (3 * IDLE_S, {thrice, often, in_use}),
                    (MAX_IDLE_S, {often, in_use}),
                ):
                    await trio.sleep_until(began_s + kept_s - 1.0)
                    assert set(grammars._processes) == kept
                    await trio.sleep(1.0 + IDLE_CHECK_S)
                assert set(grammars._processes) == {in_use}
            await grammars.open(once)  # compiled once more
            assert once in grammars._processes
            nursery.cancel_scope.cancel()
        grammars.close()


# -------------------------------------------------------------------------------- places of processes


@pytest.mark.parametrize("num_others", [0, 1, 2])
async def test_the_place_of_a_dead_process_is_free_for_the_same_grammar_and_for_those_that_wait(
    num_others: int, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process never answers; those after it have the answer to a question about no answer at once."""

    async def compiled(self: GrammarProcesses, params: StructuredOutputsParams) -> GrammarProcess:
        await trio.lowlevel.checkpoint()
        process = ends.connected()
        if len(ends.theirs) > 2:
            await ends.theirs[-1].send(GRAMMAR_REPLIES.pack(MaskAnswers((), 1)))
        return process

    monkeypatch.setattr(GrammarProcesses, "_compiled", compiled)
    with Ends() as ends, trio.fail_after(60):
        grammars = ends.grammars(1)
        await grammars.open(form("late"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(grammars.guide, form("late"), {})
            await trio.testing.wait_all_tasks_blocked()
            for number in range(num_others):
                nursery.start_soon(grammars.open, form(f"other {number}"))
        assert len(ends.theirs) == 1 + 2 + num_others
        assert await grammars.guide(form("late"), {}) == ()
        grammars.close()


async def test_grammars_that_are_being_compiled_count_among_the_processes_there_may_be(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_compiled, most = 0, 0

    async def compiled(self: GrammarProcesses, params: StructuredOutputsParams) -> GrammarProcess:
        nonlocal num_compiled, most
        num_compiled += 1
        most = max(most, num_compiled + len(self._processes))
        await trio.sleep(0.5)
        num_compiled -= 1
        if params == form("wrong"):
            raise GrammarRefused("planted")
        return ends.connected()

    async def is_refused() -> None:
        with pytest.raises(InvalidParams, match="planted"):
            await grammars.open(form("wrong"))

    monkeypatch.setattr(GrammarProcesses, "_compiled", compiled)
    with Ends() as ends, trio.fail_after(60):
        grammars = ends.grammars(1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(is_refused)
            for name in "abc":
                nursery.start_soon(grammars.open, form(name))
        # None is left if the refused one came last: the one before it had to end for it.
        assert most == 1
        assert len(grammars._processes) <= 1
        grammars.close()


# ------------------------------------------------------------------------------------ ends of processes


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes by a pidfd")
@needs_proc
async def test_a_copy_that_ends_at_once_leaves_the_process_of_all_grammars_alive(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(folder) as engine:
        await engine.complete([1], params(JSON))
        [original] = own_originals()

        def gone(process_id: int) -> int:
            raise ProcessLookupError(errno.ESRCH, "No such process")

        with monkeypatch.context() as patch:
            patch.setattr(os, "pidfd_open", gone)
            with pytest.raises(ResourceShortage, match="a grammar process"):
                await engine.complete([1], params(StructuredOutputsParams(choice=["ab"])))
        check_json((await engine.complete([1], params(JSON))).text)
        assert own_originals() == [original]
        assert engine.statistics().num_restarts == 0


async def test_a_process_that_is_killed_twice_is_sent_one_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os, "kill", lambda *signals: killed.append(signals))
    with Ends() as ends:
        process = ends.connected()
        process.remember(123)
        process.kill()
        process.kill()
    assert killed == [(123, signal.SIGKILL)]


CRASHES = """
import runpy
from triolet.structured_outputs import compiler

def crash(self, question):
    raise LookupError("planted")

compiler.Grammar.next_mask = crash
runpy.run_module("triolet.workers.grammar", run_name="__main__")
"""


async def test_an_error_of_the_program_of_grammars_is_in_the_log(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(grammar_process, "PROGRAM", (sys.executable, "-P", "-c", CRASHES))
    async with opened(folder) as engine:
        with pytest.raises(RequestFailed, match="it crashes what compiles it"):
            await engine.complete([1], params(JSON))
    assert "LookupError: planted" in caplog.text and "has crashed" in caplog.text


# ------------------------------------------------------------------------------ turns of what is compiled

COMPILE_S = 2.0  # of a hostile grammar: its time limit


async def compile_one(
    turns: CompilerTurns, owner: str, outcomes: list[tuple[str, str, float]], max_wait_s: float = 60.0
) -> None:
    try:
        async with turns.turn(owner, max_wait_s):
            await trio.sleep(COMPILE_S)
        outcome = "compiled"
    except ResourceShortage:
        outcome = "refused"
    outcomes.append((owner, outcome, trio.current_time()))


async def test_a_hundred_hostile_grammars_delay_another_key_by_one_compilation_and_all_are_answered(
    autojump_clock: MockClock,
) -> None:
    turns, outcomes = CompilerTurns(2), list[tuple[str, str, float]]()
    began_s = trio.current_time()
    async with trio.open_nursery() as nursery:
        for _ in range(100):
            nursery.start_soon(compile_one, turns, "hostile", outcomes)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(compile_one, turns, "other", outcomes)
    [(_, outcome, ended_s)] = [one for one in outcomes if one[0] == "other"]
    assert outcome == "compiled" and ended_s - began_s <= 2 * COMPILE_S + 0.01
    assert len(outcomes) == 101 and max(ended_s for _, _, ended_s in outcomes) - began_s <= 60 + COMPILE_S
    assert {outcome for _, outcome, _ in outcomes} == {"compiled", "refused"}
    assert turns.num_free == 2


async def test_keys_that_wait_to_have_grammars_compiled_take_turns(autojump_clock: MockClock) -> None:
    turns, outcomes = CompilerTurns(1), list[tuple[str, str, float]]()
    async with trio.open_nursery() as nursery:
        for owner in "aaabbc":
            nursery.start_soon(compile_one, turns, owner, outcomes)
            await trio.testing.wait_all_tasks_blocked()
    assert "".join(owner for owner, _, _ in outcomes) == "aabcab"


async def test_places_of_grammars_are_all_free_again_whenever_their_clients_leave(
    autojump_clock: MockClock,
) -> None:
    dice = random.Random(1)
    turns, outcomes = CompilerTurns(2), list[tuple[str, str, float]]()

    async def leave_early(owner: str, at_s: float) -> None:
        with trio.move_on_after(at_s):  # also in the moment in which a place is given
            await compile_one(turns, owner, outcomes, max_wait_s=dice.choice([4.0, 6.0, 60.0]))

    for _ in range(20):
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(
                    leave_early, dice.choice("abc"), dice.choice([0.0, 1.0, 2.0, 3.0, 4.0, 99.0])
                )
        assert turns.num_free == 2 and not turns._waiting


@pytest.mark.parametrize(("starved_s", "is_late"), [(2.5, False), (1.5, True), (0.0, True)])
async def test_the_time_in_which_a_process_waits_for_a_processor_is_not_its_grammars(
    starved_s: float, is_late: bool, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    began_s = trio.current_time()
    monkeypatch.setattr(
        grammar_process, "starved_s", lambda process_id: min(trio.current_time() - began_s, starved_s)
    )
    ours, theirs = trio.socket.socketpair()
    process = GrammarProcess(trio.SocketStream(ours))

    async def answer_late() -> None:
        await trio.sleep(3.0)
        await theirs.send(GRAMMAR_REPLIES.pack(GrammarState(1, "")))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer_late)
        with pytest.raises(GrammarLate) if is_late else nullcontext():
            assert await process.ask(None, 1.0) == GrammarState(1, "")
        nursery.cancel_scope.cancel()
    process.kill()
    theirs.close()


async def test_a_process_that_waits_for_a_processor_for_ever_is_late_all_the_same(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_process, "starved_s", lambda process_id: trio.current_time())
    ours, theirs = trio.socket.socketpair()
    process = GrammarProcess(trio.SocketStream(ours))
    with theirs, pytest.raises(GrammarLate):
        await process.ask(None, 1.0)
    assert process.is_dead


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the scheduler of Linux counts it")
def test_a_process_that_shares_its_processor_has_waited_for_it() -> None:
    command = [sys.executable, "-c", "while True: pass"]
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        processes = [subprocess.Popen(command) for _ in range(2)]
    finally:
        os.sched_setaffinity(0, cores)
    try:
        while not all(grammar_process.starved_s(process.pid) for process in processes):
            time.sleep(0.01)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert grammar_process.starved_s(0) == 0.0
