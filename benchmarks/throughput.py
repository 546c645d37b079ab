"""Tokens per second of triolet and of other engines, on the same model and the same requests, in one run.

    python benchmarks/throughput.py [--model llama-15m] [--workload single batch prefix] [--rounds 3]
                                    [--vllm PYTHON] [--llama-cpp PYTHON] [--output results.jsonl]

Workloads: `single` is one request, 128 tokens in, 128 out. `batch` is 32 requests at once, 32 to 256 tokens in and 32
to 256 out. `prefix` is 32 requests that share their first 512 tokens, 32 tokens of their own, 32 out. All greedy; the
prompts of every round are new.

transformers' `generate` is always there; vLLM and llama.cpp are if a Python is named that has them installed (also by
the environment: BENCH_VLLM, BENCH_LLAMA_CPP). Each of these is a process of its own, and is stopped while others run.

The floor is what the machine needs at least, by torch's own speed at reading memory and multiplying matrices: every
weight read once a step and multiplied with every token's row; no attention, no sampling, no engine.

All take turns, round by round, so that a machine that gets slower gets slower for all; a line gives the median of the
rounds, and the fastest and the slowest. transformers gets its requests as one left-padded batch, the fastest way it
has: it ends when the longest answer does, and only the tokens that were asked for count. Its time to first token and
between tokens are those of the batch. One JSON line per engine, then a table.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
import trio
from common import MODELS, OthersAtWork, kept_model, kv_bytes_per_token, machine, num_parameters, report
from engines import run_peer, run_transformers, run_triolet
from peers.peer import GGUF, Peer
from workloads import MAX_TOKENS, NUM_KV_TOKENS, SHARED, Job, Round, floor_tokens_per_s, make_jobs, summary

import triolet
from triolet.config import QUANTIZATIONS

Tell = Callable[[Sequence[dict[str, Any]]], None]


@attrs.frozen
class Side:
    """One engine of a comparison.

    Args:
        run: through the jobs of a round.
        facts: its version, and what it was told to do differently.
    """

    name: str
    run: Callable[[Sequence[Job]], Awaitable[Round]]
    facts: dict[str, Any]
    peer: Peer | None = None


@asynccontextmanager
async def sides(folder: Path, arguments: argparse.Namespace) -> AsyncIterator[list[Side]]:
    """All engines that are asked for, loaded."""
    async with AsyncExitStack() as stack:
        found = []
        for quantization in arguments.quantization:
            engine = await stack.enter_async_context(
                triolet.open_engine(
                    model=str(folder),
                    max_num_seqs=32,
                    runner=arguments.runner,
                    quantization=quantization,
                )
            )
            facts = {"quantization": quantization, "runner": arguments.runner}
            found.append(Side("triolet", partial(run_triolet, engine), facts))
        if "transformers" not in arguments.without:
            found.append(_transformers(folder))
        for peer, facts in _peers(folder, arguments):
            stack.enter_context(peer)
            facts |= {f"peer_{name}": value for name, value in peer.facts.items() if name != "peak_mib"}
            found.append(Side(peer.engine, partial(run_peer, peer), facts, peer))
        yield found


def _transformers(folder: Path) -> Side:
    import transformers  # not where it isn't asked for

    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    return Side("transformers", partial(run_transformers, model), {})


def _peers(folder: Path, arguments: argparse.Namespace) -> list[tuple[Peer, dict[str, Any]]]:
    kv_cache_bytes = NUM_KV_TOKENS * kv_bytes_per_token(arguments.model, arguments.dtype)
    common = {"model": str(folder), "dtype": arguments.dtype, "max_num_seqs": 32}
    room = {"kv_cache_tokens": NUM_KV_TOKENS, "kv_cache_bytes": kv_cache_bytes, "max_model_len": MAX_TOKENS}
    peers: list[tuple[Peer, dict[str, Any]]] = []
    if arguments.vllm:
        peers.append((Peer("vllm", arguments.vllm, {**common, **room}), {}))
    if arguments.llama_cpp:
        kinds = [arguments.dtype if kind == "none" else kind for kind in arguments.quantization]
        for weights in (GGUF[kind] for kind in kinds if kind in GGUF):
            peer = Peer("llama.cpp", arguments.llama_cpp, {**common, **room, "weights": weights})
            peers.append((peer, {"quantization": weights}))
    return peers


async def measure(folder: Path, arguments: argparse.Namespace, tell: Tell) -> None:
    """Tell lines for each engine, workload by workload."""
    async with sides(folder, arguments) as found:
        for workload in arguments.workload:
            tell(await compare(found, folder, workload, arguments))


async def compare(
    found: Sequence[Side], folder: Path, workload: str, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """A line for each engine."""
    vocab_size = MODELS[arguments.model]["vocab_size"]
    jobs = make_jobs(workload, vocab_size, 0)
    floor = partial(
        floor_tokens_per_s,
        jobs,
        num_parameters(folder),
        getattr(torch, arguments.dtype),
        shared=SHARED if workload == "prefix" else 0,
    )
    before = floor()
    rounds: dict[int, list[Round]] = defaultdict(list)
    others = OthersAtWork([side.peer.pid for side in found if side.peer is not None])
    for number in range(arguments.rounds + 1):  # the first one does not count
        for index, side in enumerate(found):
            taken = await side.run(make_jobs(workload, vocab_size, number))
            rounds[index] += [taken] * (number > 0)
    facts = {"bench": "throughput", "model": arguments.model, "workload": workload, "dtype": arguments.dtype}
    facts["others_cpus"] = others.num_cpus()
    best = max(before, floor())  # of the machine in its better moment
    return [
        {
            **facts,
            "engine": side.name,
            **side.facts,
            **summary(jobs, rounds[index]),
            "floor": best,
            **machine(),
        }
        for index, side in enumerate(found)
    ]


def main() -> None:
    """Parse, measure, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    workloads = ("single", "batch", "prefix")
    parser.add_argument("--model", choices=MODELS, default="llama-15m")
    parser.add_argument("--models", type=Path, help="folder to keep made models in; by default a passing one")
    parser.add_argument("--workload", nargs="+", choices=workloads, default=["batch"])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--runner", default="thread", help="triolet's runner")
    parser.add_argument(
        "--quantization",
        nargs="+",
        choices=QUANTIZATIONS,
        default=["none"],
        help="of triolet's weights, and of llama.cpp's (int8 is q8_0, and int4 is left out)",
    )
    parser.add_argument("--without", nargs="+", choices=("transformers",), default=[])
    parser.add_argument("--vllm", default=os.environ.get("BENCH_VLLM"), help="a Python that has vLLM")
    parser.add_argument(
        "--llama-cpp", default=os.environ.get("BENCH_LLAMA_CPP"), help="a Python that has llama-cpp-python"
    )
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
