"""What the tests of all executors share: a process that misbehaves when told to, plans, and lives of an executor."""

from __future__ import annotations

import gc
import os
import sys
import threading
from pathlib import Path

import attrs
import trio

from tests.actors.harness import LetterTokenizer, answer_of, assert_all_blocks_back, unexpected
from triolet import SamplingParams
from triolet.actors.executors.contract import Executor
from triolet.actors.executors.process import ProcessExecutor
from triolet.actors.executors.remote.agent import Agent
from triolet.actors.executors.remote.executor import RemoteExecutor
from triolet.actors.executors.remote.port import WorkerPort
from triolet.config.address import Address
from triolet.config.engine import EngineConfig
from triolet.core.load_progress import LoadProgress
from triolet.core.step_plan import PlanRow, RowStart, StepPlan, StepResult
from triolet.engine.open_engine import run_engine

TOKEN = "sesame"


def executor_that(
    *misdeed: object, step_timeout: float | None = 30.0, device: str = "auto", keep_standby: bool = False
) -> ProcessExecutor:
    command = [sys.executable, "-P", "-m", "tests.actors.executors.fake_worker", *map(str, misdeed)]
    config = EngineConfig(
        model="nowhere",
        runner="process",
        step_timeout=step_timeout,
        device=device,
        keep_standby=keep_standby,
    )
    return ProcessExecutor(config, command)


def remote_that(nursery: trio.Nursery, *misdeed: object, step_timeout: float | None = 30.0) -> RemoteExecutor:
    """An executor with a worker on this machine, both of which end with the nursery."""
    port = WorkerPort(Address("127.0.0.1", 0), TOKEN)
    command = [sys.executable, "-P", "-m", "tests.actors.executors.fake_worker", *map(str, misdeed)]
    nursery.start_soon(work_until_cancelled, Agent(port.address, TOKEN, command=command), port)
    config = EngineConfig(model="nowhere", tokenizer="nowhere", runner="remote", step_timeout=step_timeout)
    return RemoteExecutor(config, port)


async def work_until_cancelled(agent: Agent, port: WorkerPort) -> None:
    try:
        await agent.run()
    finally:
        port.close()
        with trio.CancelScope(shield=True):
            await port.closed.wait()


def processes_here(module: str) -> list[int]:
    """Return the numbers of the processes of this module that this process has started, without zombies."""
    found = []
    for entry in filter(lambda entry: entry.name.isdigit(), Path("/proc").iterdir()):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == os.getpid() and module.encode() in words:
            found.append(int(entry.name))
    return found


def first_step(prompt: tuple[int, ...] = (1, 2, 3)) -> StepPlan:
    start = RowStart(
        row_id=0,
        request_id="r",
        epoch=1,
        prompt_token_ids=prompt,
        output_token_ids=(),
        params=SamplingParams(),
        seed=5,
        ending_token_ids=frozenset(),
    )
    return StepPlan(1, (), (start,), (PlanRow(0, 0, len(prompt), (0, 1), sample=True),))


def second_step() -> StepPlan:
    return StepPlan(2, (), (), (PlanRow(0, 3, 1, (), sample=True),))


def step_ahead(number: int) -> StepPlan:
    """The step of that number, made before the result of the one before it."""
    return attrs.evolve(
        second_step(),
        step_id=number,
        rows=(PlanRow(0, 1 + number, 1, (number,) if number % 4 == 3 else (), sample=True),),
        is_ahead=True,
    )


def run_of(num_steps: int, first: int) -> StepPlan:
    """What follows a first step: token after token, from one position on."""
    return StepPlan(2, (), (), (PlanRow(0, first, 1, tuple(range(2, 20)), sample=True),), num_steps)


def ignore(progress: LoadProgress) -> None:
    pass


def open_files() -> set[str]:
    """Return the numbers of the open files, once the garbage of earlier tests has closed its own."""
    gc.collect()
    return set(os.listdir("/dev/fd"))


def num_runner_threads() -> int:
    """Threads that Trio has lent; a thread that is given back loses its name first."""
    return sum(thread.name == "triolet-runner" for thread in threading.enumerate())


async def life(executor: Executor, *plans: StepPlan) -> list[StepResult]:
    async with executor.running():
        await executor.start(ignore)
        return [await executor.execute(plan, unexpected) for plan in plans]


async def ask_six(executor: Executor, *, async_scheduling: bool = False) -> int:
    """Six streams at once, each of which must give the fake model's answer; the number of restarts."""
    config = EngineConfig(
        runner="process", max_num_seqs=4, max_num_batched_tokens=16, async_scheduling=async_scheduling
    )
    answers: dict[int, tuple[int, ...]] = {}
    async with run_engine(config, executor, LetterTokenizer) as engine:

        async def ask(seed: int) -> None:
            params = SamplingParams(max_tokens=30, seed=seed)
            answers[seed] = tuple((await engine.complete([seed] * 5, params)).outputs[0].token_ids)

        with trio.fail_after(300):
            async with trio.open_nursery() as nursery:
                for seed in range(6):
                    nursery.start_soon(ask, seed)
        assert_all_blocks_back(engine)
        restarts = engine.statistics().num_restarts
    assert answers == {seed: answer_of([seed] * 5, seed, 30) for seed in range(6)}
    return restarts
