"""Measure the cost of each executor: a step that computes nothing, through all of them in one run.

    python benchmarks/runner_hop.py [--steps N] [--rows N ...]

The executors take turns, a few hundred steps each, so that other load on the machine affects all alike. A step has one
token per row, as a decode does. One JSON line per executor and number of rows; `remote` is a worker on the loopback
interface, and `of_process` its median as a multiple of that of `process`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median, quantiles

import trio

from triolet.actors.executors.contract import Executor
from triolet.actors.executors.in_process import InlineExecutor, ThreadExecutor
from triolet.actors.executors.process import ProcessExecutor
from triolet.actors.executors.remote.agent import Agent
from triolet.actors.executors.remote.executor import RemoteExecutor
from triolet.actors.executors.remote.port import WorkerPort
from triolet.config.address import Address
from triolet.config.engine import EngineConfig
from triolet.core.load_progress import OnProgress
from triolet.core.request.model_info import ModelInfo
from triolet.core.step_plan import PlanRow, SampledToken, StepPlan, StepResult

TURNS = 10
TOKEN = "idle"
SERVE = "--serve"  # the word that makes this program the process of the runner


class Idle:
    """Runner that returns the same token for every row."""

    def execute(self, plan: StepPlan) -> StepResult:
        tokens = tuple(SampledToken(f"request-{row.row_id}", 1, row.start, 17) for row in plan.rows)
        return StepResult(plan.step_id, tokens)

    def reset(self) -> None:
        """Do nothing: no state is kept."""


def info() -> ModelInfo:
    return ModelInfo(
        folder="",
        architecture="Idle",
        backend="native",
        vocab_size=32,
        max_position=4096,
        max_model_len=4096,
        num_kv_blocks=1,
        block_size=16,
        dtype="float32",
        device="cpu",
    )


def load(on_progress: OnProgress) -> tuple[Idle, ModelInfo]:
    return Idle(), info()


def decode(step_id: int, num_rows: int) -> StepPlan:
    """Return a plan in which every sixteenth row needs another block."""
    rows = (
        PlanRow(row, 1000 + step_id, 1, (row,) if (row + step_id) % 16 == 0 else (), True)
        for row in range(num_rows)
    )
    return StepPlan(step_id, (), (), tuple(rows))


async def time_steps(executor: Executor, plans: list[StepPlan]) -> list[float]:
    """Return the microseconds per step."""
    took_us = []
    for plan in plans:
        began = time.perf_counter_ns()
        await executor.execute(plan, ignore)
        took_us.append((time.perf_counter_ns() - began) / 1000)
    return took_us


async def measure(num_rows: int, num_steps: int) -> Iterator[dict[str, object]]:
    config, command = (
        EngineConfig(model="idle", tokenizer="idle"),
        [sys.executable, str(Path(__file__)), SERVE],
    )
    port = WorkerPort(Address("127.0.0.1", 0), TOKEN)
    executors: dict[str, Executor] = {
        "inline": InlineExecutor(load),
        "thread": ThreadExecutor(load),
        "process": ProcessExecutor(config, command),
        "remote": RemoteExecutor(config, port),
    }
    took_us: dict[str, list[float]] = {name: [] for name in executors}
    async with trio.open_nursery() as nursery, AsyncExitStack() as stack:
        nursery.start_soon(Agent(port.address, TOKEN, command=command).run)
        for executor in executors.values():
            await stack.enter_async_context(executor.running())
            await executor.start(ignore)
        for turn in range(TURNS + 1):
            plans = [decode(step, num_rows) for step in range(1, num_steps // TURNS + 1)]
            for name, executor in executors.items():
                figures = await time_steps(executor, plans)
                took_us[name] += figures if turn else []  # the first turn warms up
        nursery.cancel_scope.cancel()
    port.close()
    pipe_us = median(took_us["process"])
    return (
        {
            "bench": "runner_hop",
            "executor": name,
            "rows": num_rows,
            **spread(took),
            "of_process": round(median(took) / pipe_us, 3),
        }
        for name, took in took_us.items()
    )


def ignore(_: object) -> None:
    """Ignore progress and early results: nothing is loaded, and every step is one."""


def spread(took_us: list[float]) -> dict[str, float]:
    cuts = quantiles(took_us, n=1000)
    return {
        "steps": len(took_us),
        "p50_us": round(cuts[499], 1),
        "p90_us": round(cuts[899], 1),
        "p99_us": round(cuts[989], 1),
    }


def serve_idle() -> None:
    from triolet.workers.runner import FdTransport, serve

    serve(lambda config, on_progress: load(on_progress), FdTransport.take_over_standard_streams())


def main() -> None:
    from common import machine

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    options = parser.parse_args()
    for num_rows in options.rows:
        for figures in trio.run(measure, num_rows, options.steps):
            print(json.dumps(figures | machine()), flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == [SERVE]:
        serve_idle()
    main()
