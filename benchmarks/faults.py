"""Plant hangs and shortages in an engine with real processes, and look at what its streams get.

    python benchmarks/faults.py [--rounds 100] [--streams 16] [--heal 5] [--only NAME ...] [--output FILE]

Hangs: the model's process is stopped (SIGSTOP) in a step, while idle and while it loads again; the processes of
grammars are stopped; scheduler, detokenizer, tokenizer and the actor of grammar masks wait for something that never
comes. Each is planted once, when the engine has its standby process, in steps of a kind that it has learned.
Shortages: in every round a resource is taken from the engine's processes while streams run and requests ask for new
grammars; then it is given back, and a request that needs it must be served.

    descriptors  RLIMIT_NOFILE: all that the process may open are taken
    processes    RLIMIT_NPROC of 1 for all processes of the engine; root is exempt, so that this case runs as another
                 user with the right to read all files (`setpriv`)
    memory       RLIMIT_AS of all processes but the model's is what they have, so that nothing can be mapped; heaps keep
                 nothing of what was freed, a library counts the allocations that failed, and a round without any is no
                 round: up to as many again are run in place of these
    model memory RLIMIT_AS of the model's process is what it has, while it computes the log-probabilities of a long
                 prompt beside streams: every larger tensor fails, and steps become smaller, in each round anew; a
                 process that finds no memory for one token, or dies of an allocation, is replaced
    disk         a tmpfs of 4 MB with the snapshot, the recording, the prefix store and temporary files is full;
                 requests for new weights need it and get `ModelFileError`; the others are neither recorded nor stored,
                 and a run that lost no record or no prefix is no run; it takes the right to mount

The line of a hang says when streams went on (`healed_s`), and when the model's process was replaced, if it was
(`noticed_s`): on a busy machine steps take long, and so does what is learned from them.

Prints one JSON line per case and exits with 1 if a stream differs from an undisturbed one, a hang is healed later than
`--heal` seconds, a request fails that does not need the resource, or with another error than `ResourceShortage` where
none is named above, or nothing is served afterwards.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

import attrs
import safetensors
import trio
from common import machine
from process_tree import name_of, processes_of

import triolet
from triolet import Engine, EngineConfig, RequestOutputKind, SamplingParams
from triolet.actors import tokenizer
from triolet.actors.channels import Channels
from triolet.actors.executors.child_process import processor_s_of
from triolet.actors.executors.connection import RunnerConnection, RunnerProcess
from triolet.actors.executors.contract import Following, Tell
from triolet.actors.executors.process import ProcessExecutor
from triolet.actors.executors.standby import ForkSource
from triolet.actors.grammar_requests import GrammarRequests
from triolet.config.whole_file import write_file
from triolet.core.load_progress import OnProgress
from triolet.core.recovery.recovery_state import OomBackoff, step_kind
from triolet.core.request.model_info import ModelInfo
from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.core.step_plan import StepPlan, StepResult
from triolet.engine import open_engine
from triolet.errors import TrioletError

HANGS = ("step", "idle", "loading", "scheduler", "detokenizer", "tokenizer", "guidance", "grammar processes")
SHORTAGES = ("descriptors", "processes", "memory", "model memory", "disk")
NUM_TOKENS = 40
NUM_LEARNED = (
    40  # requests, one after the other: more than the steps of a kind that have all of `step_timeout`
)
NUM_DESCRIPTORS = 320
NUM_LONG_PROMPT = 900  # tokens
LARGE_BYTES = 2**16  # of a tensor that is mapped on its own
ROUND_TIMEOUT_S = 120.0
OTHER_USER = "54321"
DISK_MB = 4
STORE_BYTES = 10**6  # of prefixes: with the recording less than the disk
UPDATED = "model.norm.weight"  # tensor whose value is replaced by the same one


@attrs.define(eq=False)
class Plant:
    """Hang that is due at a point, and when it began."""

    due: str | None = None
    began_s: float | None = None

    def take(self, point: str) -> bool:
        """Return True, once, if the hang is due here."""
        if self.due != point:
            return False
        self.due, self.began_s = None, trio.current_time()
        return True

    async def reach(self, point: str) -> None:
        """Wait for ever if the hang is due here."""
        if self.take(point):
            await trio.sleep_forever()


class StoppedExecutor(ProcessExecutor):
    """Executor whose process is stopped where a hang is due."""

    def __init__(self, config: EngineConfig, plant: Plant) -> None:
        super().__init__(config)
        self._plant, self._num_loads = plant, 0
        self.replaced_s = 0.0  # when the last process was started

    async def _next_process(self) -> RunnerConnection:
        self.replaced_s = trio.current_time()
        return await super()._next_process()

    async def start(self, on_progress: OnProgress) -> ModelInfo:
        self._num_loads += 1
        if self._num_loads > 1 and self._plant.take("loading"):
            self._stop()
        return await super().start(on_progress)

    async def standby_ready(self) -> None:
        """Wait until the standby process has imported what a load needs: until it uses no processor."""
        before_s = -1.0
        while before_s <= 0 or before_s != self._standby_s():
            before_s = self._standby_s()
            await trio.sleep(2.0)

    def _standby_s(self) -> float:
        """Return the processor time of the standby, seconds; 0 while there is none."""
        match self._standby.source:
            case ForkSource(server=server):
                return processor_s_of(server.child.pid)
            case RunnerProcess() as process:
                return process.processor_s
            case _:
                return 0.0

    def _stop(self) -> None:
        process = self._here()
        assert isinstance(process, RunnerProcess)
        os.kill(process.child.pid, signal.SIGSTOP)

    async def execute_in_turn(self, plan: StepPlan, tell: Tell, following: Following) -> StepResult:
        is_learned = self._hang_limit.limit_s(step_kind(plan)) != self._config.step_timeout
        if is_learned and self._plant.take("step"):
            self._stop()
        return await super().execute_in_turn(plan, tell, following)


class HangingInbox:
    """Inbox whose reader waits for ever where a hang is due."""

    def __init__(self, inbox: Any, plant: Plant, point: str) -> None:
        self._inbox, self._plant, self._point = inbox, plant, point

    def clone(self) -> HangingInbox:
        return HangingInbox(self._inbox.clone(), self._plant, self._point)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._inbox.close()

    def __aiter__(self) -> HangingInbox:
        return self

    async def receive(self) -> Any:
        await self._plant.reach(self._point)
        return await self._inbox.receive()

    __anext__ = receive

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inbox, name)


@contextmanager
def planted(plant: Plant) -> Iterator[None]:
    """Let the actors of engines that are opened within this scope hang where that is due."""

    class HangingChannels(Channels):
        def __init__(self) -> None:
            super().__init__()
            for actor in ("scheduler", "detokenizer"):
                setattr(self, f"{actor}_inbox", HangingInbox(getattr(self, f"{actor}_inbox"), plant, actor))

    class HangingRequests(GrammarRequests):
        async def questions(self) -> tuple[int, ...]:
            questions = await super().questions()
            await plant.reach("guidance")
            return questions

    answer = tokenizer._answer

    async def hanging_answer(*arguments: Any) -> None:
        with arguments[1][1]:  # the channel of the reply is closed when the actor is ended
            await plant.reach("tokenizer")
            await answer(*arguments)

    module: Any = open_engine
    kept = module.Channels, module.GrammarRequests
    module.Channels, module.GrammarRequests = HangingChannels, HangingRequests
    tokenizer._answer = hanging_answer  # type: ignore[assignment]
    try:
        yield
    finally:
        module.Channels, module.GrammarRequests = kept
        tokenizer._answer = answer


# ------------------------------------------------------------------------------------------- requests


@attrs.define(eq=False)
class Crowd:
    """Streams that are read at the same time.

    Args:
        right: token ids of each, undisturbed.
        heard_s: gets the times of all outputs; None to keep none, where a list that grows could lack memory.
        failures: kinds of the errors that requests ended with.
        num_wrong: answers that were not right.
    """

    engine: Engine
    num_streams: int
    right: list[list[int]] = attrs.field(factory=list)
    heard_s: list[float] | None = None
    failures: Counter[str] = attrs.field(factory=Counter)
    num_wrong: int = 0

    async def read_all(self) -> None:
        """Read every stream, and compare the answers with the right ones."""
        answers: list[list[int]] = [[] for _ in range(self.num_streams)]
        async with trio.open_nursery() as nursery:
            for index in range(self.num_streams):
                nursery.start_soon(self.read, index, answers[index])
        if not self.right:
            self.right = answers
        self.num_wrong += sum(answer != right for answer, right in zip(answers, self.right, strict=True))

    async def read(self, index: int, answer: list[int]) -> None:
        """Read one stream; half of them are greedy."""
        params = SamplingParams(
            temperature=0.9 if index % 2 else 0.0,
            seed=index,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        try:
            async with self.engine.generate([index + 1] * 5, params) as stream:
                async for output in stream:
                    answer += output.outputs[0].token_ids
                    self._hear()
        except (TrioletError, MemoryError) as error:
            self.failures[f"stream: {type(error).__name__}"] += 1

    async def ask(
        self, prompt: str | list[int], word: str | None = None, *, prompt_logprobs: int | None = None
    ) -> None:
        """Ask for one answer, bound to a word, and compare it; count its error."""
        form = None if word is None else StructuredOutputsParams(choice=[word])
        params = SamplingParams(
            max_tokens=20, temperature=0.0, structured_outputs=form, prompt_logprobs=prompt_logprobs
        )
        try:
            output = await self.engine.complete(prompt, params)
        except (TrioletError, MemoryError) as error:
            self.failures[type(error).__name__] += 1
        else:
            self.num_wrong += word is not None and output.text != word
        self._hear()

    def _hear(self) -> None:
        if self.heard_s is not None:
            self.heard_s.append(trio.current_time())

    async def update(self) -> None:
        """Ask for weights that are those in use, and count the error."""
        with safetensors.safe_open(f"{self.engine.model_info.folder}/model.safetensors", "pt") as tensors:
            values = tensors.get_tensor(UPDATED)
        try:
            await self.engine.update_weights({UPDATED: values})
        except TrioletError as error:
            self.failures[type(error).__name__] += 1


# ---------------------------------------------------------------------------------------------- hangs


async def hang(name: str, config: EngineConfig, right: list[list[int]], heal_s: float) -> dict[str, Any]:
    """Plant one hang; return what came of it."""
    plant = Plant()
    executor = StoppedExecutor(config, plant)
    with planted(plant):
        async with open_engine.run_engine(config, executor) as engine:
            crowd = Crowd(engine, len(right), right)
            for _ in range(NUM_LEARNED):
                await crowd.ask([7, 7, 7])
            await crowd.read_all()
            await executor.standby_ready()
            heard_s = crowd.heard_s = []
            await _plant_hang(name, engine, crowd, plant)
            began_s = plant.began_s
            served = Crowd(engine, len(right), right)
            await served.read_all()
            num_restarts = engine.statistics().num_restarts
    times = [began_s, *(at_s for at_s in heard_s if at_s > began_s)] if began_s is not None else [0.0]
    gaps = [(after - before, after) for before, after in itertools.pairwise(times)]
    healed_s = max(gaps, default=(0.0, float("inf")))[1] - times[0]
    is_served = not served.num_wrong and not served.failures
    is_exact = not crowd.num_wrong and not crowd.failures
    return {
        "healed_s": round(healed_s, 2),
        "noticed_s": round(max(0.0, executor.replaced_s - times[0]), 2) if num_restarts else None,
        "streams_exact": is_exact,
        "failures": dict(crowd.failures),
        "served_afterwards": is_served,
        "restarts": num_restarts,
        "is_good": is_exact and is_served and healed_s <= heal_s,
    }


async def _plant_hang(name: str, engine: Engine, crowd: Crowd, plant: Plant) -> None:
    process_id = engine.model_info.process_id
    assert process_id is not None
    if name == "idle":
        await trio.sleep(1.0)
        os.kill(process_id, signal.SIGSTOP)
        plant.began_s = trio.current_time()
        await crowd.ask([7, 7, 7])
        return
    word = None
    if name in ("guidance", "grammar processes"):
        await crowd.ask([1, 2], "learned")  # the processes have started
        word = "learned"
    if name == "grammar processes":
        _stop_grammars()
        plant.began_s = trio.current_time()
    else:
        plant.due = name
    if name == "loading":
        os.kill(process_id, signal.SIGKILL)
    with trio.fail_after(ROUND_TIMEOUT_S):
        if word is not None or name == "tokenizer":  # others do not wait for these actors
            await crowd.ask("hello", word)
        else:
            while plant.began_s is None:  # until a step is of a kind that has been learned
                await crowd.read_all()


# ------------------------------------------------------------------------------------------ shortages


def _tree() -> list[int]:
    """Return the processes of the engine, with this one."""
    return list(processes_of(os.getpid()))


def _stop_grammars() -> None:
    for pid in _tree():
        if name_of(pid) == "triolet.workers.grammar":
            os.kill(pid, signal.SIGSTOP)


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Take every descriptor that this process may open."""
    taken = list[int]()
    try:
        while True:
            try:
                taken.append(os.dup(0))
            except OSError:
                break
        yield
    finally:
        for fd in taken:
            os.close(fd)


@contextmanager
def limited(kind: int, limit_of: Callable[[int], int], pids: list[int]) -> Iterator[None]:
    """Lower the soft limit of a resource for some processes."""
    kept = {pid: resource.prlimit(pid, kind) for pid in pids}
    try:
        for pid, (_, hard) in kept.items():
            resource.prlimit(pid, kind, (limit_of(pid), hard))
        yield
    finally:
        for pid, limits in kept.items():
            try:
                resource.prlimit(pid, kind, limits)
            except ProcessLookupError:
                continue


def _mapped_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()


COUNTER_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
static void *(*real_malloc)(size_t), *(*real_realloc)(void *, size_t);
static int (*real_memalign)(void **, size_t, size_t);
static void *(*real_mmap)(void *, size_t, int, int, int, off_t);
static void count(void) {
    int kept = errno;
    const char *path = getenv("FAILED_ALLOCATIONS");
    int fd = path ? open(path, O_WRONLY | O_APPEND) : -1;
    if (fd >= 0) { if (write(fd, ".", 1) < 0) {} close(fd); }
    errno = kept;
}
__attribute__((constructor)) static void find(void) {
    real_malloc = dlsym(RTLD_NEXT, "malloc");
    real_realloc = dlsym(RTLD_NEXT, "realloc");
    real_memalign = dlsym(RTLD_NEXT, "posix_memalign");
    real_mmap = dlsym(RTLD_NEXT, "mmap");
}
void *malloc(size_t size) {
    if (!real_malloc) find();
    void *block = real_malloc(size);
    if (!block && size) count();
    return block;
}
void *realloc(void *old, size_t size) {
    if (!real_realloc) find();
    void *block = real_realloc(old, size);
    if (!block && size) count();
    return block;
}
int posix_memalign(void **block, size_t alignment, size_t size) {
    if (!real_memalign) find();
    int error = real_memalign(block, alignment, size);
    if (error == ENOMEM) count();
    return error;
}
void *mmap(void *at, size_t size, int protection, int flags, int fd, off_t offset) {
    if (!real_mmap) find();
    void *block = real_mmap(at, size, protection, flags, fd, offset);
    if (block == MAP_FAILED && errno == ENOMEM) count();
    return block;
}
"""


def count_failed_allocations(folder: Path) -> dict[str, str]:
    """Return the environment in which every allocation that fails adds a byte to the file `failed` of a folder."""
    source, library, failed = folder / "counter.c", folder / "counter.so", folder / "failed"
    source.write_text(COUNTER_SOURCE)
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"], check=True)
    failed.write_bytes(b"")
    failed.chmod(0o666)
    return {"LD_PRELOAD": str(library), "FAILED_ALLOCATIONS": str(failed)}


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """Fill the disk of a folder, on which a snapshot can then not be written, and the old one stays."""
    write_file(folder / "snapshot", b"old")
    filler = folder / "filler"
    try:
        with filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
        try:
            write_file(folder / "snapshot", bytes(100_000))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        else:
            raise AssertionError("a snapshot was written to a full disk")
        assert (folder / "snapshot").read_bytes() == b"old"
        yield
    finally:
        filler.unlink()
        write_file(folder / "snapshot", bytes(100_000))


async def shortage(
    name: str, config: EngineConfig, right: list[list[int]], num_rounds: int, folder: Path
) -> dict[str, Any]:
    """Take a resource and give it back, again and again; return what came of it."""
    served: Crowd
    num_served, num_stuck, num_tried = 0, 0, 0
    tempfile.gettempdir()  # chosen here: one whose disk is full would be passed over
    async with open_engine.open_engine(config) as engine:
        crowd, served = Crowd(engine, len(right), right), Crowd(engine, len(right), right)
        await served.ask([1, 2], "warm")
        if name == "descriptors":
            resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_DESCRIPTORS, NUM_DESCRIPTORS))

        def num_felt() -> int:
            return (folder / "failed").stat().st_size + engine.statistics().num_restarts

        for number in range(2 * num_rounds):
            # On a busy machine a round may end before memory was short.
            if number >= num_rounds and ("memory" not in name or num_felt() >= num_rounds):
                break
            with ExitStack() as taken, trio.move_on_after(ROUND_TIMEOUT_S) as scope:
                match name:
                    case "descriptors":
                        taken.enter_context(no_descriptors())
                    case "processes":
                        taken.enter_context(limited(resource.RLIMIT_NPROC, lambda pid: 1, _tree()))
                    case "memory":
                        pids = [pid for pid in _tree() if pid != engine.model_info.process_id]
                        taken.enter_context(limited(resource.RLIMIT_AS, _mapped_bytes, pids))
                    case "model memory":
                        while (process_id := engine.model_info.process_id) is None:  # noqa: ASYNC110  it is being replaced
                            await trio.sleep(0.01)
                        # What earlier rounds have taught would keep steps small, and nothing short.
                        engine._core.recovery.memory = OomBackoff()
                        taken.enter_context(limited(resource.RLIMIT_AS, _mapped_bytes, [process_id]))
                    case _:
                        taken.enter_context(full_disk(folder))
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(crowd.read_all)
                    if name in ("model memory", "disk"):
                        # A step keeps its memory for the next one, but not the logits of all tokens of a prompt.
                        logprobs = 1 if name == "model memory" else None
                        nursery.start_soon(
                            partial(crowd.ask, [number + 1] * NUM_LONG_PROMPT, prompt_logprobs=logprobs)
                        )
                    if name == "disk":
                        nursery.start_soon(crowd.update)
                    for letter in "ab":
                        nursery.start_soon(crowd.ask, [1, 2], f"{letter}{number}")
            num_stuck += scope.cancelled_caught
            with trio.move_on_after(ROUND_TIMEOUT_S):
                await served.ask([1, 2], f"c{number}")
                engine.check_health()
                num_served += 1
            num_tried = number + 1
        if name == "disk":
            await served.update()
            await served.read_all()
        statistics = engine.statistics()
    is_exact = not crowd.num_wrong and not any(kind.startswith("stream") for kind in crowd.failures)
    is_served = num_served == num_tried and not served.num_wrong and not served.failures
    # What shows that the shortages were felt, and how often at least.
    found: dict[str, Any] = {}
    is_felt, expected = True, "ResourceShortage"
    if "memory" in name:
        found["failed_allocations"] = (folder / "failed").stat().st_size
        is_felt = found["failed_allocations"] + statistics.num_restarts >= num_rounds
    elif name == "disk":
        found["lost_records"] = statistics.num_lost_records
        found["failed_kv_saves"] = statistics.num_failed_kv_saves
        expected = "ModelFileError"
        is_felt = min(found.values()) > 0 and crowd.failures[expected] == num_rounds
    return found | {
        "rounds": num_tried,
        "streams_exact": is_exact,
        "failures": dict(crowd.failures),
        "served_afterwards": is_served,
        "failures_afterwards": dict(served.failures),
        "restarts": statistics.num_restarts,
        "is_good": is_exact
        and is_served
        and not num_stuck
        and is_felt
        and crowd.failures.keys() <= {expected},
    }


# ----------------------------------------------------------------------------------------------- main


async def undisturbed(config: EngineConfig, num_streams: int) -> list[list[int]]:
    """Return the right answers."""
    async with open_engine.open_engine(config, runner="inline") as engine:
        crowd = Crowd(engine, num_streams)
        await crowd.read_all()
        return crowd.right


async def run_case(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run a case in this process."""
    config = EngineConfig(
        model=options.model,
        dtype="float32",
        runner="process",
        num_kv_blocks=512,
        max_grammars=8,
        log_stats=False,
    )
    right = await undisturbed(config, options.streams)
    if name == "disk":
        config = attrs.evolve(
            config,
            record=str(folder / "recording.jsonl"),
            kv_store=str(folder / "prefixes"),
            kv_store_bytes=STORE_BYTES,
        )
    if name in HANGS:
        return await hang(name, config, right, options.heal)
    return await shortage(name, config, right, options.rounds, folder)


def in_own_process(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run a case in a process of its own, whose limits may be lowered; return its line."""
    kind = "hang" if name in HANGS else "shortage"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--case", name, "--folder", folder, "--model", options.model]
        command += [
            "--rounds",
            str(options.rounds),
            "--streams",
            str(options.streams),
            "--heal",
            str(options.heal),
        ]
        if name == "processes" and os.geteuid() == 0:
            rights = "-all,+dac_override,+dac_read_search"
            user = [f"--reuid={OTHER_USER}", f"--regid={OTHER_USER}", "--clear-groups"]
            command = ["setpriv", *user, f"--inh-caps={rights}", f"--ambient-caps={rights}", *command]
        is_mounted = name == "disk" and _mount(folder)
        if name == "disk" and not is_mounted:
            return {
                "bench": "faults",
                "kind": kind,
                "case": name,
                "is_good": False,
                "error": "cannot mount a tmpfs",
            }
        environ = os.environ | ({"TMPDIR": folder} if is_mounted else {})
        if "memory" in name:
            environ |= count_failed_allocations(Path(folder))
            environ |= {"MALLOC_MMAP_THRESHOLD_": str(LARGE_BYTES), "MALLOC_TRIM_THRESHOLD_": "0"}
        try:
            ran = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=False)
        finally:
            if is_mounted:
                subprocess.run(["umount", folder], check=True)
    if ran.returncode:
        found: dict[str, Any] = {"is_good": False, "error": f"ended with exit status {ran.returncode}"}
    else:
        found = json.loads(ran.stdout.splitlines()[-1])
    return {"bench": "faults", "kind": kind, "case": name, "streams": options.streams, **found}


def _mount(folder: str) -> bool:
    mount = shutil.which("mount")
    if mount is None:
        return False
    command = [mount, "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", folder]
    return subprocess.run(command, check=False).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=100, help="of every shortage")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--heal", type=float, default=5.0, help="seconds after which a hang must be healed")
    parser.add_argument("--only", nargs="+", choices=(*HANGS, *SHORTAGES), default=(*HANGS, *SHORTAGES))
    parser.add_argument("--model", default=str(Path(triolet.__file__).parent / "nano"), help="folder")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument(
        "--output", type=argparse.FileType("a"), default=sys.stdout, help="where the lines go"
    )
    options = parser.parse_args()
    logging.disable()  # each restart is reported, with its traceback
    if options.case is not None:
        print(json.dumps(trio.run(run_case, options.case, options, options.folder)))
        return
    is_good = True
    for name in options.only:
        line = in_own_process(name, options)
        is_good &= line["is_good"]
        print(json.dumps(line | machine()), file=options.output, flush=True)
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
