"""Measure the time from the start of a process to its first token, and its peak memory.

    python benchmarks/startup.py [--model triolet-nano llama-15m] [--rounds 5] [--vllm PYTHON] [--llama-cpp PYTHON]
                                 [--output results.jsonl]

Each program is started anew in every round, in turns: `triolet generate` with one token; transformers' own `generate`
in a small script; vLLM and llama.cpp if a Python is given that has them installed (also by the environment: BENCH_VLLM,
BENCH_LLAMA_CPP), with room for few tokens, so that their memory is that of the model; and, as the floor, a Python that
imports torch and does nothing. The first round does not count, so files are in the page cache and code is compiled. A
line has the median and the best of the rounds, in seconds, and the peak resident memory.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from common import MODELS, kept_model, kv_bytes_per_token, machine, median, report
from peers.peer import GGUF, Peer, add_peer_options

from triolet.nano import PATH

NANO = "triolet-nano"
NUM_KV_TOKENS = 2048  # what peers are given room for
TRANSFORMERS = """
import sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = torch.arange(1, 9)[None]
mask = torch.ones_like(ids)
answer = model.generate(ids, attention_mask=mask, max_new_tokens=1, do_sample=False, pad_token_id=0)
print(answer[0, -1], flush=True)
"""


@attrs.frozen
class Start:
    """One start: seconds to the first output, and the peak of resident memory, MiB."""

    first_output_s: float
    peak_mib: float


def start(command: list[str]) -> Start:
    """Run a program to its end."""
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        peak = PeakMemory(process.pid)
        first = process.stdout.read(1)
        elapsed = time.perf_counter() - began
        process.stdout.read()
        peak_mib = peak.ended()
    if process.returncode or not first:
        raise RuntimeError(f"{' '.join(command[:4])} ended with {process.returncode} and {first!r}")
    return Start(elapsed, peak_mib)


class PeakMemory:
    """Peak memory of a process, sampled every few milliseconds, since it may end at any time.

    The peak that `wait4` gives for an ended process includes the memory of its parent.
    """

    def __init__(self, pid: int) -> None:
        self._path = Path(f"/proc/{pid}/status")
        self._mib = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._is_over.wait(0.02):
            lines = self._path.read_text().splitlines() if self._path.exists() else []
            found = [int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")]
            self._mib = max([self._mib, *found])

    def ended(self) -> float:
        """Return the peak in MiB after the process has ended."""
        self._is_over.set()
        self._thread.join()
        return self._mib


def start_peer(engine: str, python: str, options: dict[str, Any]) -> Start:
    """Start a peer; return the time from its process's start to its first token."""
    began = time.perf_counter()
    with Peer(engine, python, options) as peer:
        answer = peer.run([(list(range(1, 9)), 1, 0.0)])
        return Start(time.perf_counter() - began, answer["peak_mib"])


def programs(name: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Callable[[], Start]]:
    """Return the command that starts each engine."""
    # As JSON: the text of a token that random weights choose may be empty.
    ids = [
        "-m",
        "triolet",
        "generate",
        "--json",
        "--model",
        str(folder),
        "--max-tokens",
        "1",
        "--temperature",
        "0",
    ]
    found: dict[str, Callable[[], Start]] = {
        "triolet": partial(start, [sys.executable, *ids, "--prompt", "Hello"]),
        "transformers": partial(start, [sys.executable, "-c", TRANSFORMERS, str(folder)]),
    }
    if name != NANO:
        options = {
            "model": str(folder),
            "dtype": arguments.dtype,
            "weights": GGUF[arguments.dtype],
            "max_model_len": NUM_KV_TOKENS // 2,  # blocks are rounded up
            "max_num_seqs": 32,
            "kv_cache_tokens": NUM_KV_TOKENS,
            "kv_cache_bytes": NUM_KV_TOKENS * kv_bytes_per_token(name, arguments.dtype),
        }
        for engine, python in (("vllm", arguments.vllm), ("llama.cpp", arguments.llama_cpp)):
            if python:
                found[engine] = partial(start_peer, engine, python, options)
    floor = [sys.executable, "-c", "import torch, time; print(1, flush=True); time.sleep(0.1)"]
    return {**found, "import torch": partial(start, floor)}


def measure(name: str, folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a line for each program."""
    found = programs(name, folder, arguments)
    starts: dict[str, list[Start]] = {engine: [] for engine in found}
    for number in range(arguments.rounds + 1):
        for engine, run in found.items():
            taken = run()
            if number > 0:
                starts[engine].append(taken)
    floor = median([each.first_output_s for each in starts["import torch"]])
    return [
        {
            "bench": "startup",
            "model": name,
            "dtype": arguments.dtype if name != NANO else None,
            "engine": engine,
            "first_output_s": median([each.first_output_s for each in taken]),
            "first_output_s_min": min(each.first_output_s for each in taken),
            "floor_s": floor,
            "peak_mib": median([each.peak_mib for each in taken]),
            "rounds": arguments.rounds,
            **machine(),
        }
        for engine, taken in starts.items()
    ]


def add_tokenizer(folder: Path) -> None:
    """Give a model of random weights a tokenizer for text prompts: triolet-nano's ids are valid in all."""
    for file in ("tokenizer.json", "tokenizer_config.json"):
        if (PATH / file).exists():
            (folder / file).write_bytes((PATH / file).read_bytes())


def main() -> None:
    """Parse, measure, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", choices=[NANO, *MODELS], default=[NANO, "llama-15m"])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--models", type=Path, help="folder to keep made models in; by default a passing one")
    add_peer_options(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="append the JSON lines to this file")
    arguments = parser.parse_args()
    columns = ("model", "engine", "first_output_s", "first_output_s_min", "floor_s", "peak_mib")
    with tempfile.TemporaryDirectory() as scratch:
        for name in arguments.model:
            folder = PATH
            if name != NANO:
                root = arguments.models or Path(scratch)
                folder = kept_model(name, root, dtype=getattr(torch, arguments.dtype))
                add_tokenizer(folder)
            report(measure(name, folder, arguments), columns, arguments.output)


if __name__ == "__main__":
    main()
