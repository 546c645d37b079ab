"""Measure GGUF files whose blocks are kept in memory beside the same model's float32 and bfloat16 files.

    python benchmarks/quantized.py [--model llama-160m] [--rounds 3] [--output results.jsonl]

Each turn is a process of its own with one thread. The best turn of each kind is shown, because other work on the
machine only ever adds time: milliseconds to the first token of a prompt of 128 tokens, tokens per second after it, both
also in CPU time, seconds to load, and the resident memory after that, beside the size of the file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import trio
from common import MODELS, kept_model, machine, report

import triolet
from triolet import SamplingParams

KINDS = {"f32": "float32", "bf16": "bfloat16", "q8_0": "float32", "q4_0": "float32"}
"""Types of the matrices, and the dtype of activations and cache."""

PROMPT, ANSWER = 128, 64


async def turn(path: Path, dtype: str) -> dict[str, float]:
    """Load a file, answer, and return the figures."""
    torch.set_num_threads(1)
    before = resident_mib()
    started = time.perf_counter()
    async with triolet.open_engine(
        model=str(path), dtype=dtype, runner="inline", kv_cache_bytes=32 * 2**20, enable_prefix_caching=False
    ) as engine:
        found = {"load_s": time.perf_counter() - started, "rss_mib": resident_mib() - before}
        dice = random.Random(0)
        prompt = [dice.randrange(engine.model_info.vocab_size) for _ in range(PROMPT)]
        firsts, alls = [], []
        for _ in range(4):
            firsts.append(await timed(engine, prompt, 1))
            alls.append(await timed(engine, prompt, ANSWER + 1))
    (first, first_cpu), (whole, whole_cpu) = map(best, (firsts, alls))
    return {
        **found,
        "first_ms": 1e3 * first,
        "first_cpu_ms": 1e3 * first_cpu,
        "tokens_per_s": ANSWER / (whole - first),
        "tokens_per_cpu_s": ANSWER / (whole_cpu - first_cpu),
    }


def best(times: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the shortest wall time and the shortest CPU time."""
    return min(wall for wall, _ in times), min(cpu for _, cpu in times)


async def timed(engine: triolet.Engine, prompt: list[int], count: int) -> tuple[float, float]:
    """Return wall and CPU seconds of an answer of `count` tokens."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    wall, cpu = time.perf_counter(), time.process_time()
    await engine.complete(prompt, params)
    return time.perf_counter() - wall, time.process_time() - cpu


def resident_mib() -> float:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["llama-160m"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models-folder", type=Path, default=Path(tempfile.gettempdir()) / "triolet-models")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--turn", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.turn:
        print(json.dumps(trio.run(turn, Path(options.turn[0]), options.turn[1])))
        return
    from peers.gguf_model import convert

    lines: list[dict[str, Any]] = []
    for name in options.model:
        folder = kept_model(name, options.models_folder, dtype=torch.float32)
        paths = {kind: convert(folder, kind) for kind in KINDS}
        turns: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
        load = os.getloadavg()[0]
        for _ in range(options.rounds):
            for kind, dtype in KINDS.items():
                command = [sys.executable, __file__, "--turn", str(paths[kind]), dtype]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                turns[kind].append(json.loads(done.stdout.splitlines()[-1]))
        for kind, found in turns.items():
            best_of = {
                field: (max if field.startswith("tokens") else min)(each[field] for each in found)
                for field in found[0]
            }
            lines.append(
                {
                    "bench": "quantized", "model": name, "weights": kind, "dtype": KINDS[kind],
                    "file_mib": paths[kind].stat().st_size / 2**20, **best_of, "rounds": options.rounds,
                    "load": load, **machine(), "threads": 1,
                }
            )  # fmt: skip
    columns = (
        "model", "weights", "dtype", "first_ms", "first_cpu_ms", "tokens_per_s", "tokens_per_cpu_s", "load_s",
        "file_mib", "rss_mib",
    )  # fmt: skip
    report(lines, columns, options.output)


if __name__ == "__main__":
    main()
