"""Shared parts of the benchmarks: description of the machine, models of random weights, and percentiles."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import safetensors
import torch
import transformers

import triolet
from triolet.kernels.cpu.library import kernels

STEAL = 8  # field of the first line of /proc/stat

# The models of the project's CPU figures; weights are random, so nothing is downloaded and every answer has full
# length.
MODELS: dict[str, dict[str, Any]] = {
    "llama-15m": {
        "config": "LlamaConfig",
        "hidden_size": 288,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "vocab_size": 32_000,
        "tie_word_embeddings": True,
        "max_position_embeddings": 16_384,
    },
    "llama-160m": {
        "config": "LlamaConfig",
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "vocab_size": 32_000,
        "tie_word_embeddings": True,
        "max_position_embeddings": 16_384,
    },
    # Of llama-160m's width.
    "gemma2-160m": {
        "config": "Gemma2Config",
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 32_000,
        "max_position_embeddings": 16_384,
    },
    "qwen3-0.6b": {
        "config": "Qwen3Config",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 16_384,
    },
}


def stolen_s() -> float:
    """Return the time for which the host has given this machine's processors to others, since its start, seconds.

    Counted in hundredths of a second, and summed over the processors; 0 where the system does not say. A measured time
    in which it grows is that of the host's other guests as well.
    """
    with suppress(OSError, ValueError, IndexError), open("/proc/stat", encoding="ascii") as file:
        return int(file.readline().split()[STEAL]) / os.sysconf("SC_CLK_TCK")
    return 0.0


def make_model(name: str, folder: Path, *, dtype: torch.dtype) -> Path:
    """Write a model of random weights as a Hugging Face folder."""
    fields = dict(MODELS[name])
    config = getattr(transformers, fields.pop("config"))(
        **fields, bos_token_id=None, eos_token_id=None, pad_token_id=None
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    return folder


def kept_model(name: str, root: Path, *, dtype: torch.dtype) -> Path:
    """Return the folder of such a model inside `root`; make it if it is not there."""
    folder = root / f"{name}-{str(dtype).removeprefix('torch.')}"
    if not (folder / "config.json").exists():
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as scratch:  # a half-written one is never taken for whole
            make_model(name, Path(scratch) / "model", dtype=dtype).rename(folder)
    return folder


def num_parameters(folder: Path) -> int:
    """Return the number of parameters of a model folder, from the header of its safetensors file."""
    with safetensors.safe_open(folder / "model.safetensors", framework="numpy") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118  # not a mapping
    return sum(math.prod(shape) for shape in shapes)


def kv_bytes_per_token(model: str, dtype: str) -> int:
    """Return the size of keys and values of one token."""
    fields = MODELS[model]
    head_dim = fields.get("head_dim", fields["hidden_size"] // fields["num_attention_heads"])
    numbers = 2 * fields["num_hidden_layers"] * fields["num_key_value_heads"] * head_dim
    return int(numbers * getattr(torch, dtype).itemsize)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return the 50th, 90th and 99th percentile, by nearest rank."""
    ordered = sorted(values)
    return {f"p{rank}": ordered[min(len(ordered) - 1, len(ordered) * rank // 100)] for rank in (50, 90, 99)}


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def machine() -> dict[str, Any]:
    """Return processor, memory and versions, which stand in every line of results."""
    return {
        "cpu": _cpu_name(),
        "num_cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_target": _cpu_target(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "triolet": triolet.__version__,
        "commit": _commit(),
    }


def _cpu_target() -> str:
    """Return the kind of CPU whose kernels run: see `TRIOLET_CPU_TARGET`."""
    return "torch" if (loaded := kernels()) is None else loaded.target.name


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def report(lines: Sequence[dict[str, Any]], columns: Sequence[str], output: Path | None) -> None:
    """Print JSON lines, append them to `output`, then print a table of some of their fields."""
    for line in lines:
        put_line(line, output)
    put_table(lines, columns)


def put_line(line: dict[str, Any], output: Path | None) -> None:
    """Print a JSON line and append it to `output`."""
    text = json.dumps(line)
    print(text, flush=True)
    if output is not None:
        with output.open("a") as file:
            file.write(text + "\n")


def put_table(lines: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
    """Print a table of some fields of the lines."""
    widths = [max(len(name), *(len(_shown(line.get(name))) for line in lines)) + 2 for name in columns]
    print()
    print("".join(f"{name:>{width}}" for name, width in zip(columns, widths, strict=True)))
    for line in lines:
        cells = (_shown(line.get(name)) for name in columns)
        print("".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)))


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "-" if value is None else str(value)


class OthersAtWork:
    """Share of the processors taken by programs that are not part of a measurement.

    Args:
        pids: of the processes that are, beside this one.
    """

    def __init__(self, pids: Sequence[int] = ()) -> None:
        self._pids = (os.getpid(), *pids)
        self._began = self._now()

    def _now(self) -> tuple[float, float, float]:
        ticks = [int(word) for word in Path("/proc/stat").read_text().split()[1:9]]
        busy = sum(ticks) - ticks[3] - ticks[4]  # less idle, and waiting for a disk
        stats = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in self._pids)
        ours = sum(int(words[11]) + int(words[12]) for words in stats)  # of all threads, user and system
        return time.monotonic(), busy, ours

    def num_cpus(self) -> float:
        """Return how many processors others kept busy since this was made; on a quiet machine nearly 0."""
        (began_s, began_busy, began_ours), (now_s, busy, ours) = self._began, self._now()
        taken = (busy - began_busy) - (ours - began_ours)
        return round(max(0.0, taken) / os.sysconf("SC_CLK_TCK") / (now_s - began_s), 2)


@attrs.frozen
class Machine:
    """Best rates of this machine, measured with torch's own kernels on its threads.

    Args:
        bytes_per_s: reading a buffer of the size of the weights.
        flop_per_s: multiplying large matrices of the model's dtype.
    """

    bytes_per_s: float
    flop_per_s: float

    @classmethod
    def measured(cls, num_bytes: int, dtype: torch.dtype) -> Machine:
        """Measure now; keep the best of several runs."""
        buffer = torch.ones(num_bytes // 4)
        left, right = torch.ones(512, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
        read_s = _best_s(buffer.sum, 15)
        multiply_s = _best_s(lambda: left @ right, 30)
        return cls(num_bytes / read_s, 2 * 512 * 1024 * 1024 / multiply_s)

    def floor_s(self, num_parameters: int, num_bytes: int, prefill: int, decodes: int, steps: int) -> float:
        """Return the least time for so many tokens in so many steps: each weight is read once a step and multiplied."""
        multiply_s = 2 * num_parameters / self.flop_per_s
        return prefill * multiply_s + max(decodes * multiply_s, steps * num_bytes / self.bytes_per_s)


def _best_s(work: Callable[[], object], rounds: int) -> float:
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return min(taken)
