"""Measure the engine's own cost per step: scheduler, channels, detokenizer, streams and readers around an idle model.

    python benchmarks/overhead.py [--batch 1 32] [--runner inline] [--tokens 400] [--rounds 5] [--output results.jsonl]

The model returns tokens at once, so all time is the engine's. Every request is read by a task of its own, and its text
is made with triolet-nano's tokenizer. A round gives the microseconds per step, as wall clock and as processor time of
the whole process; a line has the best and the median of the rounds, and the bound beside them: 150 microseconds a step
for one request, 25 per sequence for 32.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import trio
from common import machine, median, report

from triolet import Engine, RequestOutputKind, SamplingParams
from triolet.actors.executors.contract import Executor
from triolet.actors.executors.in_process import InlineExecutor, ThreadExecutor
from triolet.config.engine import EngineConfig
from triolet.core.load_progress import OnProgress
from triolet.core.request.model_info import ModelInfo
from triolet.core.step_plan import RowStart, SampledToken, StepPlan, StepResult, StepRunner
from triolet.engine.gc_freeze import frozen_gc
from triolet.engine.open_engine import run_engine
from triolet.model.tokenizer.tokenizer import load_tokenizer
from triolet.nano import PATH

PROMPT_TOKENS = 128
BOUND_1_US, BOUND_32_US = 150.0, 25.0


class Idle:
    """Runner that computes nothing: its tokens are drawn beforehand."""

    def __init__(self, vocab_size: int) -> None:
        dice = random.Random(0)
        self._tokens = [dice.randrange(3, vocab_size) for _ in range(4096)]
        self._rows: dict[int, RowStart] = {}
        self._counts: dict[int, int] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        """Return a token for every row that is to be sampled."""
        for start in plan.starts:
            self._rows[start.row_id] = start
            self._counts[start.row_id] = len(start.output_token_ids)
        tokens = []
        for row in plan.rows:
            if row.sample:
                start, position = self._rows[row.row_id], self._counts[row.row_id]
                self._counts[row.row_id] += 1
                token_id = self._tokens[(17 * row.row_id + position) % len(self._tokens)]
                tokens.append(SampledToken(start.request_id, start.epoch, position, token_id))
        return StepResult(plan.step_id, tuple(tokens))

    def reset(self) -> None:
        self._rows.clear()


@attrs.frozen
class Round:
    """Microseconds per step."""

    wall_us: float
    cpu_us: float


def make_executor(runner: str, vocab_size: int) -> Executor:
    """Return an idle model in the loop or in a thread of its own."""
    info = ModelInfo(
        folder=str(PATH),
        architecture="Idle",
        backend="native",
        vocab_size=vocab_size,
        max_position=4096,
        max_model_len=4096,
        num_kv_blocks=4096,
        block_size=16,
        dtype="float32",
        device="cpu",
    )

    def load(on_progress: OnProgress) -> tuple[StepRunner, ModelInfo]:
        return Idle(vocab_size), info

    return InlineExecutor(load) if runner == "inline" else ThreadExecutor(load)


@asynccontextmanager
async def open_idle_engine(runner: str, max_num_seqs: int) -> AsyncGenerator[Engine]:
    """Open an engine around an idle model."""
    tokenizer = load_tokenizer(PATH)
    assert tokenizer is not None
    config = EngineConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=8192, enable_prefix_caching=True)
    executor = make_executor(runner, 2000)
    async with run_engine(config, executor, lambda: tokenizer) as engine:
        with frozen_gc():  # as in `open_engine`
            yield engine


async def run_round(engine: Engine, batch: int, num_tokens: int) -> Round:
    """Run all requests at once; the engine counts the steps."""
    params = SamplingParams(
        temperature=0, max_tokens=num_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    dice = random.Random(batch)

    async def read() -> None:
        prompt = [dice.randrange(3, 2000) for _ in range(PROMPT_TOKENS)]
        async with engine.generate(prompt, params) as stream:
            async for _ in stream:
                pass

    steps = engine.statistics().steps
    wall, cpu = time.perf_counter(), time.process_time()
    async with trio.open_nursery() as nursery:
        for _ in range(batch):
            nursery.start_soon(read)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    steps = engine.statistics().steps - steps
    return Round(1e6 * wall / steps, 1e6 * cpu / steps)


async def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one line per batch size; the sizes take turns."""
    rounds: dict[int, list[Round]] = {batch: [] for batch in arguments.batch}
    async with open_idle_engine(arguments.runner, max(arguments.batch)) as engine:
        for number in range(arguments.rounds + 1):
            for batch in arguments.batch:
                taken = await run_round(engine, batch, arguments.tokens)
                if number > 0:
                    rounds[batch].append(taken)
    return [line(batch, taken, arguments) for batch, taken in rounds.items()]


def line(batch: int, rounds: list[Round], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the results of one batch size."""
    return {
        "bench": "overhead",
        "runner": arguments.runner,
        "batch": batch,
        "wall_us": median([each.wall_us for each in rounds]),
        "wall_us_min": min(each.wall_us for each in rounds),
        "cpu_us": median([each.cpu_us for each in rounds]),
        "cpu_us_min": min(each.cpu_us for each in rounds),
        "bound_us": max(BOUND_1_US, BOUND_32_US * batch),
        "rounds": len(rounds),
        **machine(),
    }


def main() -> None:
    """Parse, measure, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--runner", choices=("inline", "thread"), default="inline")
    parser.add_argument("--tokens", type=int, default=400, help="answer tokens per request")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="append the JSON lines to this file")
    arguments = parser.parse_args()
    columns = ("runner", "batch", "wall_us", "wall_us_min", "cpu_us", "cpu_us_min", "bound_us")
    report(trio.run(measure, arguments), columns, arguments.output)


if __name__ == "__main__":
    main()
