"""Measure the time to the first token of a long prompt with a prefix store: computed, and read by the next process.

    python benchmarks/prefix_store.py [--model llama-15m llama-160m] [--tokens 4095] [--rounds 3]
                                      [--output results.jsonl]

In every round three engines are opened one after the other, each in a process of its own: one without a store, one that
fills an empty store, and one that finds it. A small request comes first, so that the time is that of the prompt alone.
Weights are random. The answers must be equal.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import trio
from common import kept_model, machine, median, report

import triolet
from triolet import SamplingParams

BOUND = 0.2  # of the time of the process that fills the store


async def once(model: str, dtype: str, store: str | None, num_tokens: int) -> dict[str, Any]:
    """Return the time to the first token of the prompt, seconds, and what was found of it."""
    dice = random.Random(0)
    prompt = [dice.randrange(1, 30_000) for _ in range(num_tokens)]
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    kept: dict[str, Any] = {} if store is None else {"kv_store": store}
    async with triolet.open_engine(
        model=model,
        dtype=dtype,
        log_stats=False,
        max_model_len=num_tokens + 1,
        num_kv_blocks=2 * num_tokens // 16,
        **kept,
    ) as engine:
        await engine.complete([5, 6, 7], params)
        began = time.perf_counter()
        output = await engine.complete(prompt, params)
        seconds = time.perf_counter() - began
        hits = engine.statistics().external_prefix_cache_hits
        return {"ttft_s": seconds, "loaded": hits, "token": output.outputs[0].token_ids[0]}


def in_a_process(model: Path, dtype: str, store: Path | None, num_tokens: int) -> dict[str, Any]:
    """Run `once` in a new process."""
    arguments = [str(model), dtype, "" if store is None else str(store), str(num_tokens)]
    done = subprocess.run(
        [sys.executable, __file__, "--once", *arguments], check=True, capture_output=True, text=True
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def measure(name: str, dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the line of a model."""
    model = kept_model(name, options.models_folder, dtype=getattr(torch, dtype))
    times: dict[str, list[float]] = {"without": [], "first": [], "second": []}
    loaded, num_bytes = 0, 0
    for _ in range(options.rounds):
        store = Path(tempfile.mkdtemp())
        try:
            answers = [in_a_process(model, dtype, place, options.tokens) for place in (None, store, store)]
            num_bytes = sum(path.stat().st_size for path in store.glob("*/*.kv"))
        finally:
            shutil.rmtree(store)
        if len({answer["token"] for answer in answers}) > 1:
            raise SystemExit(f"{name}: the answers differ: {answers}")
        for side, answer in zip(times, answers, strict=True):
            times[side].append(answer["ttft_s"])
        loaded = answers[-1]["loaded"]
    seconds = {f"{side}_ttft_ms": 1e3 * median(values) for side, values in times.items()}
    return {
        "bench": "prefix_store", "model": name, "dtype": dtype, "tokens": options.tokens, "rounds": options.rounds,
        **seconds, "loaded_tokens": loaded, "store_bytes": num_bytes,
        "ratio": seconds["second_ttft_ms"] / seconds["first_ttft_ms"], "ratio_bound": BOUND, **machine(),
    }  # fmt: skip


def main() -> None:
    """Parse, measure, report."""
    if sys.argv[1:2] == ["--once"]:
        model, dtype, store, num_tokens = sys.argv[2:]
        print(json.dumps(trio.run(once, model, dtype, store or None, int(num_tokens))))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", default=["llama-15m", "llama-160m"])
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--tokens", type=int, default=4095)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models-folder", type=Path, default=Path(tempfile.gettempdir()) / "triolet-models")
    parser.add_argument("--output", type=Path, help="append the JSON lines to this file")
    options = parser.parse_args()
    lines = [measure(name, options.dtype, options) for name in options.model]
    columns = (
        "model",
        "tokens",
        "without_ttft_ms",
        "first_ttft_ms",
        "second_ttft_ms",
        "ratio",
        "loaded_tokens",
    )
    report(lines, columns, options.output)


if __name__ == "__main__":
    main()
