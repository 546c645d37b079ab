"""Measure tokens per second of triolet and of other engines, on the same model and the same requests, in one run.

    python benchmarks/throughput.py [--model llama-15m] [--workload single batch prefix prompt-8192] [--rounds 3]
                                    [--vllm PYTHON] [--llama-cpp PYTHON] [--output results.jsonl]

Workloads: `single` is one request, 128 tokens in, 128 out. `batch` is 32 requests at once, 32 to 256 tokens in and 32
to 256 out; `batch-128` and `batch-256` are so many. `prefix` is 32 requests that share their first 512 tokens, with 32
tokens of their own and 32 out. `prompt-N` is one prompt of N tokens and an answer of one: its total tokens per second
are the prompt's. All greedy; the prompts of every round are new.

transformers' `generate` always takes part; vLLM and llama.cpp do if a Python is given that has them installed (also by
the environment: BENCH_VLLM, BENCH_LLAMA_CPP). Each of these is a process of its own, and is stopped while others run.

The floor is the least time on this machine, by torch's own speed at reading memory and multiplying matrices: every
weight read once a step and multiplied with every token's row; no attention, no sampling, no engine. A greedy token that
is found without reading the whole head can be faster.

All take turns, round by round, so that a machine that slows down does so for all; a line gives the median of the
rounds, and the fastest and the slowest. transformers gets its requests as one left-padded batch, its fastest way: it
ends with the longest answer, and only the requested tokens count. Its time to first token and between tokens are those
of the batch. One JSON line per engine, then a table.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trio
from common import MODELS, OthersAtWork, kept_model, machine, num_parameters, report
from peers.peer import add_peer_options
from sides import Side, Wanted, in_turns, open_sides, peer_pids
from workloads import PROMPTS, SHARED, WORKLOADS, Room, floor_tokens_per_s, make_jobs, summary

from triolet.config.choices import ROUNDINGS

Tell = Callable[[Sequence[dict[str, Any]]], None]


async def measure(folder: Path, arguments: argparse.Namespace, tell: Tell) -> None:
    """Yield lines for each engine, workload by workload."""
    wanted = Wanted(
        folder=folder,
        model=arguments.model,
        dtype=arguments.dtype,
        runner=arguments.runner,
        quantization=arguments.quantization,
        transformers="transformers" not in arguments.without,
        vllm=arguments.vllm,
        llama_cpp=arguments.llama_cpp,
        room=Room.needed_by(arguments.workload),
    )
    async with open_sides(wanted) as found:
        for workload in arguments.workload:
            tell(await compare(found, folder, workload, arguments))


async def compare(
    found: Sequence[Side], folder: Path, workload: str, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return a line for each engine."""
    vocab_size = MODELS[arguments.model]["vocab_size"]
    jobs_of_round = partial(make_jobs, workload, vocab_size)
    jobs = jobs_of_round(0)
    floor = partial(
        floor_tokens_per_s,
        jobs,
        num_parameters(folder),
        getattr(torch, arguments.dtype),
        shared=SHARED if workload == "prefix" else 0,
    )
    before = floor()
    others = OthersAtWork(peer_pids(found))
    rounds = await in_turns(found, jobs_of_round, arguments.rounds)
    facts = {"bench": "throughput", "model": arguments.model, "workload": workload, "dtype": arguments.dtype}
    facts["others_cpus"] = others.num_cpus()
    best = max(before, floor())  # of the machine in its better moment
    if workload in PROMPTS:  # counted in tokens of the prompt, as the rate is
        best *= sum(len(job.prompt) + job.num_tokens for job in jobs) / sum(job.num_tokens for job in jobs)
    return [
        {
            **facts,
            "engine": side.name,
            **side.facts,
            **summary(jobs, taken),
            "floor": best,
            **machine(),
        }
        for side, taken in zip(found, rounds, strict=True)
    ]


def main() -> None:
    """Parse, measure, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="llama-15m")
    parser.add_argument("--models", type=Path, help="folder to keep made models in; by default a passing one")
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=["batch"])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--runner", default="thread", help="triolet's runner")
    parser.add_argument(
        "--quantization",
        nargs="+",
        choices=ROUNDINGS,
        default=["none"],
        help="of triolet's weights, and of llama.cpp's (int8 is q8_0, and int4 is left out)",
    )
    parser.add_argument("--without", nargs="+", choices=("transformers",), default=[])
    add_peer_options(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="append the JSON lines to this file")
    arguments = parser.parse_args()
    columns = (
        "model",
        "workload",
        "dtype",
        "engine",
        "quantization",
        "output_tokens_per_s",
        "total_tokens_per_s",
        "floor",
        "others_cpus",
    )
    with tempfile.TemporaryDirectory() as scratch:
        root = arguments.models or Path(scratch)
        folder = kept_model(arguments.model, root, dtype=getattr(torch, arguments.dtype))
        tell = partial(report, columns=(*columns, "ttft_ms", "itl_ms"), output=arguments.output)
        trio.run(measure, folder, arguments, tell)


if __name__ == "__main__":
    main()
