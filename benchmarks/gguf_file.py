"""Measure triolet and llama.cpp on the same GGUF file, in one run, in turns.

    TRIOLET_CPU_TARGET=avx2 python benchmarks/gguf_file.py --llama-cpp PYTHON [--model llama-160m]
        [--weights q4_k_m q8_0] [--quantization none int8-activations]
        [--workload single batch prompt-128 prompt-512] [--rounds 5] [--no-warm-up]

Workloads: `single` is one stream, 128 tokens in and 128 out, and its figure is tokens per second after the first.
`batch` is 32 requests at once, 32 to 256 tokens in and out: output tokens per second; `short-batch` the same with 8 to
64. `prompt-N` is a prompt of N tokens: prompt tokens per second, and milliseconds to the first token. A line has the
median of the rounds, the same by CPU time, which other work on the machine changes less, and the ratio to llama.cpp's.
The lines of a workload are written when it is done. A round that does not count comes first, unless it is left out: a
batch of a large model takes minutes. A llama.cpp that is compiled for the machine uses AVX-512 where there is one,
whatever TRIOLET_CPU_TARGET says: a line has what it was compiled for.

llama.cpp rounds activations to int8 within every product with quantised weights; of triolet, `none` computes with the
weights that the file stands for, in float32, and `int8-activations` rounds as llama.cpp does. The file is made once:
random weights, rounded by llama.cpp itself.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
import trio
from common import MODELS, OthersAtWork, kept_model, kv_bytes_per_token, machine, median, put_line, put_table
from engines import run_peer, run_triolet
from peers.peer import Peer, add_peer_options
from sides import Side, in_turns, peer_pids
from workloads import MAX_TOKENS, NUM_KV_TOKENS, PROMPTS, Job, Round, make_jobs

import triolet
from triolet.config.choices import ROUNDINGS

PEER = "llama.cpp"
DEFAULT = ("single", "batch", "prompt-128", "prompt-512")
FITTING = (*DEFAULT, "short-batch")  # into the room that both engines are given


@attrs.frozen
class Turn(Round):
    """Results of one run, with the CPU time that the engine's process took."""

    cpu_s: float


async def with_cpu_time(side: Side, jobs: Sequence[Job]) -> Turn:
    """Run a side's jobs and note its CPU time."""
    pid = os.getpid() if side.peer is None else side.peer.pid
    before = cpu_seconds(pid)
    done = await side.run(jobs)
    return Turn(**attrs.asdict(done), cpu_s=cpu_seconds(pid) - before)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, all its threads."""
    if pid == os.getpid():
        return time.process_time()
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def rate_of(workload: str, jobs: Sequence[Job], done: Round) -> float:
    """Return tokens per second: of answers, or of the prompt."""
    if workload == "single":
        return 1.0 / median(done.itl_s)
    count = sum(len(job.prompt) if workload in PROMPTS else job.num_tokens for job in jobs)
    return count / done.elapsed_s


async def measure(
    model: str, folder: Path, weights: str, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Write a line for each engine and workload, and return them."""
    room = {"kv_cache_tokens": NUM_KV_TOKENS, "max_model_len": MAX_TOKENS, "threads": arguments.threads}
    options = {"model": str(folder), "weights": weights, **room}
    lines: list[dict[str, Any]] = []
    with ExitStack() as stack:
        peer = stack.enter_context(Peer(PEER, arguments.llama_cpp, options))
        path = folder / f"model-{weights}.gguf"
        shared = {"bench": "gguf_file", "model": model, "weights": weights, "dtype": arguments.dtype}
        facts = {
            **{f"peer_{name}": peer.facts[name] for name in ("version", "features")},
            **machine(),
            "threads": arguments.threads,
            "target": os.environ.get("TRIOLET_CPU_TARGET"),
        }
        for quantization in arguments.quantization:
            async with triolet.open_engine(
                model=str(path),
                dtype=arguments.dtype,
                quantization=quantization,
                max_num_seqs=32,
                max_model_len=MAX_TOKENS,
                kv_cache_bytes=NUM_KV_TOKENS * kv_bytes_per_token(model, arguments.dtype),
                runner="thread",
            ) as engine:
                found = [
                    Side("triolet", partial(run_triolet, engine), {"quantization": quantization}),
                    Side(PEER, partial(run_peer, peer), {"quantization": None}, peer),
                ]
                for workload in arguments.workload:
                    for line in await compare(found, workload, engine.model_info.vocab_size, arguments):
                        lines.append({**shared, **line, **facts})
                        put_line(lines[-1], arguments.output)
    return lines


async def compare(
    found: Sequence[Side], workload: str, vocab_size: int, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Run a workload on both engines, in turns."""
    others = OthersAtWork(peer_pids(found))
    timed = [Side(side.name, partial(with_cpu_time, side), side.facts, side.peer) for side in found]
    jobs_of_round = partial(make_jobs, workload, vocab_size)
    turns = await in_turns(timed, jobs_of_round, arguments.rounds, warms_up=arguments.warm_up)
    jobs = jobs_of_round(0)
    num_tokens = sum(len(job.prompt) if workload in PROMPTS else job.num_tokens for job in jobs)
    lines = []
    for side, taken in zip(found, turns, strict=True):
        cpu_s = median([turn.cpu_s for turn in taken if isinstance(turn, Turn)])
        lines.append(
            {
                "engine": side.name,
                **side.facts,
                "workload": workload,
                "tokens_per_s": median([rate_of(workload, jobs, turn) for turn in taken]),
                "tokens_per_cpu_s": num_tokens / cpu_s,
                "ttft_ms": 1e3 * median([first for turn in taken for first in turn.ttft_s]),
                "rounds": arguments.rounds,
                "others_at_work": others.num_cpus(),
            }
        )
    ours, theirs = lines
    for field in ("tokens_per_s", "tokens_per_cpu_s", "ttft_ms"):
        ours[f"{field}_ratio"] = ours[field] / theirs[field]
    return lines


def main() -> None:
    """Parse, measure, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["llama-160m"])
    parser.add_argument("--weights", nargs="+", default=["q4_k_m", "q8_0"])
    parser.add_argument("--quantization", nargs="+", choices=ROUNDINGS, default=["none"])
    parser.add_argument("--workload", nargs="+", choices=FITTING, default=DEFAULT)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--no-warm-up", dest="warm_up", action="store_false", help="count the first round, too"
    )
    parser.add_argument("--models-folder", type=Path, default=Path(tempfile.gettempdir()) / "triolet-models")
    parser.add_argument("--output", type=Path, help="append the JSON lines to this file")
    add_peer_options(parser)
    arguments = parser.parse_args()
    if arguments.llama_cpp is None:
        parser.error("--llama-cpp must be given: a Python that has llama-cpp-python and gguf installed")
    torch.set_num_threads(arguments.threads)
    lines = []
    for model in arguments.model:
        folder = kept_model(model, arguments.models_folder, dtype=torch.float32)
        for weights in arguments.weights:
            lines += trio.run(measure, model, folder, weights, arguments)
    columns = (
        "model", "weights", "engine", "quantization", "workload", "tokens_per_s", "tokens_per_s_ratio",
        "tokens_per_cpu_s", "tokens_per_cpu_s_ratio", "ttft_ms", "ttft_ms_ratio", "others_at_work",
    )  # fmt: skip
    put_table(lines, columns)


if __name__ == "__main__":
    main()
