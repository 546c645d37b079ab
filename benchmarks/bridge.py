"""Measure what a token costs on its way from the engine's thread to an asyncio program or to a plain thread.

    python benchmarks/bridge.py [--batch 1 32] [--tokens 400] [--rounds 5] [--output results.jsonl]

The model returns tokens at once, as in `overhead.py`. Three engines of it take turns, round by round: read by Trio
tasks in the engine's own loop (`native`), by asyncio tasks through `triolet.aio`, and by one thread per request through
`triolet.blocking`. A line gives microseconds per token, as wall clock and as processor time
of all threads, and the differences to the native engine's.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from common import machine, median, report
from overhead import PROMPT_TOKENS, open_idle_engine, run_round

from triolet import Engine, RequestOutputKind, SamplingParams
from triolet.aio import AsyncioEngine
from triolet.blocking import BlockingEngine
from triolet.bridge.engine_thread import EngineThread, RemoteCall

BOUND_US = 60.0  # that a token may cost more than in the engine's own loop

Measure = Callable[[int, int], float]
"""Function that runs so many requests of so many tokens, and returns microseconds per token."""


def params_of(num_tokens: int) -> SamplingParams:
    """Return parameters for an answer of so many tokens."""
    return SamplingParams(
        temperature=0, max_tokens=num_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )


def prompts_of(batch: int) -> list[list[int]]:
    """Return prompts that share nothing."""
    dice = random.Random(batch)
    return [[dice.randrange(3, 2000) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]


def native_side(thread: EngineThread, engine: Engine) -> Measure:
    """Read in the engine's own event loop."""

    def run(batch: int, num_tokens: int) -> float:
        call: RemoteCall[Any] = thread.submit(lambda: run_round(engine, batch, num_tokens))
        took_us: float = call.future.result().wall_us
        return took_us / batch  # a step has one token of every request

    return run


def asyncio_side(thread: EngineThread, engine: Engine, runner: asyncio.Runner) -> Measure:
    """Read in an asyncio event loop."""

    async def make() -> AsyncioEngine:
        return AsyncioEngine(thread, engine)

    bridged = runner.run(make())

    async def read_all(batch: int, num_tokens: int) -> float:
        async def read(prompt: list[int]) -> None:
            async with bridged.generate(prompt, params_of(num_tokens)) as stream:
                async for _ in stream:
                    pass

        begun_s = time.perf_counter()
        async with asyncio.TaskGroup() as readers:
            for prompt in prompts_of(batch):
                readers.create_task(read(prompt))
        return 1e6 * (time.perf_counter() - begun_s) / (batch * num_tokens)

    return lambda batch, num_tokens: runner.run(read_all(batch, num_tokens))


def blocking_side(thread: EngineThread, engine: Engine) -> Measure:
    """Read in one thread per request."""
    bridged = BlockingEngine(thread, engine)

    def read(prompt: list[int], num_tokens: int) -> None:
        with bridged.generate(prompt, params_of(num_tokens)) as stream:
            for _ in stream:
                pass

    def run(batch: int, num_tokens: int) -> float:
        begun_s = time.perf_counter()
        readers = [threading.Thread(target=read, args=(prompt, num_tokens)) for prompt in prompts_of(batch)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        return 1e6 * (time.perf_counter() - begun_s) / (batch * num_tokens)

    return run


@contextmanager
def open_sides(max_num_seqs: int) -> Iterator[dict[str, Measure]]:
    """Open one engine for each way of reading."""
    with ExitStack() as stack:

        def opened() -> tuple[EngineThread, Engine]:
            thread = EngineThread(lambda: open_idle_engine("inline", max_num_seqs))
            stack.callback(thread.finish)
            stack.callback(thread.stop)
            return thread, thread.opened.result()

        yield {
            "native": native_side(*opened()),
            "asyncio": asyncio_side(*opened(), stack.enter_context(asyncio.Runner())),
            "blocking": blocking_side(*opened()),
        }


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one line per batch size and side; all take turns."""
    taken: dict[tuple[int, str], list[tuple[float, float]]] = {}  # wall clock and processor time
    with open_sides(max(arguments.batch)) as sides:
        for number in range(arguments.rounds + 1):
            for batch in arguments.batch:
                for name, run in sides.items():
                    begun_s = time.process_time()
                    wall_us = run(batch, arguments.tokens)
                    cpu_us = 1e6 * (time.process_time() - begun_s) / (batch * arguments.tokens)
                    if number > 0:  # the first round warms up
                        taken.setdefault((batch, name), []).append((wall_us, cpu_us))
    return [
        {
            "bench": "bridge",
            "side": name,
            "batch": batch,
            "wall_us": median([wall for wall, _ in spent]),
            "wall_us_min": min(spent)[0],
            "wall_us_max": max(spent)[0],
            "more_us": more_than_native(spent, taken[batch, "native"], 0),
            "cpu_us": median([cpu for _, cpu in spent]),
            "more_cpu_us": more_than_native(spent, taken[batch, "native"], 1),
            "bound_us": BOUND_US,
            "rounds": len(spent),
            **machine(),
        }
        for (batch, name), spent in taken.items()
    ]


def more_than_native(
    spent: list[tuple[float, float]], native: list[tuple[float, float]], which: int
) -> float:
    """Return the median over the rounds of what a token took beyond the native engine's."""
    return median([own[which] - other[which] for own, other in zip(spent, native, strict=True)])


def main() -> None:
    """Parse, measure, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--tokens", type=int, default=400, help="answer tokens per request")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="append the JSON lines to this file")
    arguments = parser.parse_args()
    columns = (
        "side",
        "batch",
        "wall_us",
        "wall_us_min",
        "wall_us_max",
        "more_us",
        "cpu_us",
        "more_cpu_us",
        "bound_us",
    )
    report(measure(arguments), columns, arguments.output)


if __name__ == "__main__":
    main()
