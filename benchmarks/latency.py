"""How long others wait: the event loop while steps run, and answers while long prompts are read.

    python benchmarks/latency.py [--model llama-15m] [--dtype bfloat16] [--runner thread process] [--seconds 5]

`loop`: a task in the program's own event loop sleeps for a millisecond again and again while eight answers are being
given; what counts is how late it wakes, in milliseconds. The floor is the same without an engine at work.
`chunks`: one answer is read while prompts of 1,000 tokens come in, one after the other, with prompt chunks of at most
64, 256 and 512 tokens a step (`max_num_batched_tokens`); what counts are the gaps between the answer's tokens, in
milliseconds, and the time to the first token of the long prompts. The floor is the answer alone.
One JSON line per measurement, then a table.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
import trio
from common import MODELS, machine, make_model, percentiles, report

import triolet
from triolet import Engine, RequestOutputKind, SamplingParams

CHUNKS = (64, 256, 512)
LONG_PROMPT = 1000


def endless(max_tokens: int) -> SamplingParams:
    """A greedy answer of that many tokens."""
    return SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )


def prompt(engine: Engine, length: int, seed: int) -> list[int]:
    """Token ids that nothing else begins with."""
    dice = random.Random(seed)
    return [dice.randrange(engine.model_info.vocab_size) for _ in range(length)]


@asynccontextmanager
async def answering(engine: Engine, count: int) -> AsyncIterator[None]:
    """While `count` answers are being given."""

    async def read(number: int) -> None:
        while True:
            async with engine.generate(prompt(engine, 32, number), endless(2000)) as stream:
                async for _ in stream:
                    pass

    async with trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(read, number)
        yield
        nursery.cancel_scope.cancel()


async def lateness_ms(seconds: float) -> dict[str, float]:
    """How late a task wakes that sleeps for a millisecond."""
    late = []
    end = trio.current_time() + seconds
    while (now := time.perf_counter()) and trio.current_time() < end:
        await trio.sleep(0.001)
        late.append(1e3 * (time.perf_counter() - now) - 1.0)
    return percentiles(late)


async def loop_lines(folder: Path, runner: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The event loop's lateness, idle and at work."""
    async with triolet.open_engine(model=str(folder), runner=runner, max_num_seqs=8) as engine:
        idle = await lateness_ms(min(1.0, arguments.seconds))
        async with answering(engine, 8):
            await trio.sleep(0.2)
            busy = await lateness_ms(arguments.seconds)
    return [{"what": "loop", "runner": runner, **busy, "floor_p50": idle["p50"], "floor_p99": idle["p99"]}]


async def gaps_ms(engine: Engine, seconds: float, seed: int) -> list[float]:
    """Between the tokens of one answer."""
    gaps: list[float] = []
    async with engine.generate(prompt(engine, 32, seed), endless(3000)) as stream:
        last = None
        async for _ in stream:
            now = time.perf_counter()
            gaps += [] if last is None else [1e3 * (now - last)]
            last = now
            if sum(gaps) > 1e3 * seconds:
                break
    return gaps


async def chunk_lines(folder: Path, runner: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The gaps of an answer beside long prompts, for chunks of several sizes."""
    lines = []
    for chunk in CHUNKS:
        config: dict[str, Any] = {"max_num_batched_tokens": chunk, "enable_prefix_caching": False}
        async with triolet.open_engine(model=str(folder), runner=runner, max_num_seqs=4, **config) as engine:
            alone = percentiles(await gaps_ms(engine, arguments.seconds / 5, 1))
            first_s: list[float] = []

            async def disturb(engine: Engine = engine, first_s: list[float] = first_s) -> None:
                for seed in range(10**6):
                    began = time.perf_counter()
                    await engine.complete(prompt(engine, LONG_PROMPT, 100 + seed), endless(1))
                    first_s.append(time.perf_counter() - began)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(disturb)
                beside = percentiles(await gaps_ms(engine, arguments.seconds, 2))
                nursery.cancel_scope.cancel()
        ttft_ms = 1e3 * percentiles(first_s)["p50"] if first_s else None
        floors = {"floor_p50": alone["p50"], "floor_p99": alone["p99"]}
        lines.append(
            {"what": f"chunks of {chunk}", "runner": runner, **beside, **floors, "long_ttft_ms": ttft_ms}
        )
    return lines


async def measure(folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All lines."""
    lines = []
    for runner in arguments.runner:
        lines += await loop_lines(folder, runner, arguments)
    lines += await chunk_lines(folder, arguments.runner[0], arguments)
    facts = {"bench": "latency", "model": arguments.model, "dtype": arguments.dtype}
    return [{**facts, **line, **machine()} for line in lines]


def main() -> None:
    """Parse, measure, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="llama-15m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--runner", nargs="+", choices=("thread", "process"), default=["thread", "process"])
    parser.add_argument("--seconds", type=float, default=5.0, help="per measurement")
    parser.add_argument("--output", type=Path, help="append the JSON lines to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        dtype = getattr(torch, arguments.dtype)
        folder = make_model(arguments.model, Path(scratch) / "model", dtype=dtype)
        lines = trio.run(measure, folder, arguments)
    columns = ("what", "runner", "p50", "p90", "p99", "floor_p50", "floor_p99", "long_ttft_ms")
    report(lines, columns, arguments.output)


if __name__ == "__main__":
    main()
