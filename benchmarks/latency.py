"""Measure latencies: of tokens, beside other engines; of the event loop; and of answers beside long prompts.

    python benchmarks/latency.py [--part answers loop chunks] [--model llama-15m] [--dtype bfloat16]
                                 [--vllm PYTHON] [--llama-cpp PYTHON] [--rate 4] [--rounds 2]
                                 [--runner thread process] [--seconds 5]

`answers`: from a request to its first token and from one token to the next, in milliseconds, of triolet and of each
engine whose Python is given, in turns and in one run as in throughput.py. First for requests one at a time; then for
requests that arrive as a Poisson process of so many a second (`--rate`), whether those before them are done or not: an
open loop, in which a time counts from when the request was due. 128 tokens in, 128 out for one, 64 for many. vLLM's
engine runs in its worker process without the further process of its asynchronous interface, and admits what has arrived
before each step: on two cores that is the faster way.
`loop`: a task in the program's own event loop sleeps for a millisecond repeatedly while eight answers are generated;
the result is how late it wakes, in milliseconds. The floor is the same without an engine at work.
`chunks`: one answer is read while prompts of 1,000 tokens arrive, one after the other, with prompt chunks of at most
64, 256 and 512 tokens a step (`max_num_batched_tokens`); the results are the gaps between the answer's tokens, in
milliseconds, and the time to first token of the long prompts. The floor is the answer alone.
One JSON line per measurement, then tables.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trio
from common import MODELS, OthersAtWork, kept_model, machine, percentiles, report
from peers.peer import add_peer_options
from sides import Side, Wanted, in_turns, open_sides, peer_pids
from workloads import Job, Round, arriving_jobs, make_jobs

import triolet
from triolet import Engine, RequestOutputKind, SamplingParams

CHUNKS = (64, 256, 512)
LONG_PROMPT = 1000
NUM_SINGLE = 20  # requests of a round that come one at a time
NUM_ARRIVING = 32  # requests of a round that come when they like: what all engines have room for
_WAITS = ("p50", "p90", "p99")
_OTHERS = ("what", "runner", *_WAITS, "floor_p50", "floor_p99")
COLUMNS = {
    "answers": (
        "what",
        "engine",
        *(f"{what}_{rank}" for what in ("ttft", "itl") for rank in _WAITS),
        "others_cpus",
    ),
    "loop": _OTHERS,
    "chunks": (*_OTHERS, "long_ttft_ms"),
}


def endless(max_tokens: int) -> SamplingParams:
    """Return parameters of a greedy answer of that many tokens."""
    return SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )


def prompt(engine: Engine, length: int, seed: int) -> list[int]:
    """Return token ids that no other prompt begins with."""
    dice = random.Random(seed)
    return [dice.randrange(engine.model_info.vocab_size) for _ in range(length)]


@asynccontextmanager
async def answering(engine: Engine, count: int) -> AsyncIterator[None]:
    """Keep `count` answers running in this scope."""

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
    """Measure how late a task wakes that sleeps for a millisecond."""
    late = []
    end = trio.current_time() + seconds
    while (now := time.perf_counter()) and trio.current_time() < end:
        await trio.sleep(0.001)
        late.append(1e3 * (time.perf_counter() - now) - 1.0)
    return percentiles(late)


async def loop_lines(folder: Path, runner: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the event loop's lateness, idle and at work."""
    async with triolet.open_engine(model=str(folder), runner=runner, max_num_seqs=8) as engine:
        idle = await lateness_ms(min(1.0, arguments.seconds))
        async with answering(engine, 8):
            await trio.sleep(0.2)
            busy = await lateness_ms(arguments.seconds)
    return [
        {
            "what": "loop",
            "rounds": 1,
            "runner": runner,
            **busy,
            "floor_p50": idle["p50"],
            "floor_p99": idle["p99"],
        }
    ]


async def gaps_ms(engine: Engine, seconds: float, seed: int) -> list[float]:
    """Return the gaps between the tokens of one answer."""
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
    """Return the gaps of an answer beside long prompts, for chunks of several sizes."""
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
            {
                "what": f"chunks of {chunk}",
                "rounds": 1,
                "runner": runner,
                **beside,
                **floors,
                "long_ttft_ms": ttft_ms,
            }
        )
    return lines


async def answer_lines(folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the latencies of requests for each engine: alone, and beside others."""
    vocab_size = MODELS[arguments.model]["vocab_size"]
    wanted = Wanted(
        folder=folder,
        model=arguments.model,
        dtype=arguments.dtype,
        runner=arguments.runner[0],
        vllm=arguments.vllm,
        llama_cpp=arguments.llama_cpp,
    )
    arriving = partial(arriving_jobs, arguments.rate, NUM_ARRIVING, vocab_size)
    async with open_sides(wanted) as found:
        alone = await waits(found, partial(make_jobs, "single", vocab_size), NUM_SINGLE * arguments.rounds)
        beside = await waits(found, arriving, arguments.rounds)
    what = f"{arguments.rate:g} a second"
    answers = [("one at a time", line) for line in alone] + [(what, line) for line in beside]
    return [{"what": name, **line, "rounds": arguments.rounds} for name, line in answers]


async def waits(
    found: Sequence[Side], jobs_of_round: Callable[[int], Sequence[Job]], num_rounds: int
) -> list[dict[str, Any]]:
    """Return a line for each engine."""
    others = OthersAtWork(peer_pids(found))
    rounds = await in_turns(found, jobs_of_round, num_rounds)
    num_cpus = others.num_cpus()
    return [
        {"engine": side.name, **side.facts, **waited_ms(taken), "others_cpus": num_cpus}
        for side, taken in zip(found, rounds, strict=True)
    ]


def waited_ms(rounds: Sequence[Round]) -> dict[str, Any]:
    """Return percentiles over all requests and over all gaps, and their numbers."""
    ttft_ms = [1e3 * first for each in rounds for first in each.ttft_s]
    itl_ms = [1e3 * gap for each in rounds for gap in each.itl_s]
    named = {"ttft": percentiles(ttft_ms), "itl": percentiles(itl_ms)}
    figures = {f"{name}_{rank}": ms for name, ranks in named.items() for rank, ms in ranks.items()}
    return {**figures, "num_ttft": len(ttft_ms), "num_itl": len(itl_ms)}


async def measure(folder: Path, part: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return all lines of a part."""
    lines = []
    match part:
        case "answers":
            lines = await answer_lines(folder, arguments)
        case "loop":
            for runner in arguments.runner:
                lines += await loop_lines(folder, runner, arguments)
        case _:
            lines = await chunk_lines(folder, arguments.runner[0], arguments)
    facts = {"bench": "latency", "model": arguments.model, "dtype": arguments.dtype}
    return [{**facts, **line, **machine()} for line in lines]


def main() -> None:
    """Parse, measure, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", choices=list(COLUMNS), default=list(COLUMNS))
    parser.add_argument("--model", choices=MODELS, default="llama-15m")
    parser.add_argument("--models", type=Path, help="folder to keep made models in; by default a passing one")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--runner", nargs="+", choices=("thread", "process"), default=["thread", "process"])
    add_peer_options(parser)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second, of answers")
    parser.add_argument("--rounds", type=int, default=2, help="of answers")
    parser.add_argument("--seconds", type=float, default=5.0, help="per measurement of loop and chunks")
    parser.add_argument("--output", type=Path, help="append the JSON lines to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = arguments.models or Path(scratch)
        folder = kept_model(arguments.model, root, dtype=getattr(torch, arguments.dtype))
        for part in arguments.part:
            report(trio.run(measure, folder, part, arguments), COLUMNS[part], arguments.output)


if __name__ == "__main__":
    main()
