"""Shared parts of the sections of `gpu.py`: the device, what stands in every result, and how answers are read."""

from __future__ import annotations

import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
import trio
from torch import Tensor

from triolet import SamplingParams
from triolet.kernels.flash_attention import FA2_BLOCK_SIZE, IMPLEMENTATIONS, FlashAttention

ROOT = Path(__file__).resolve().parents[1]

Figures = dict[str, Any]
Case = tuple[str, Callable[[], Figures]]

# Relative error in the Euclidean norm: one rounding of the dtype on the way in, one of the result, and some room.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.9},
    "top_p and top_k": {"temperature": 0.7, "top_p": 0.9, "top_k": 20},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.1, "frequency_penalty": 0.3},
    "min_tokens": {"temperature": 0.8, "min_tokens": 10},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "logit_bias": {"temperature": 0.9, "logit_bias": {5: 3.0}},
}


@attrs.frozen
class Place:
    """Device that the cases run on: the GPU, or in a dry run the CPU in its place.

    Args:
        dry_run: the device is pretended.
        ceilings: rates that the section `ceilings` measured: `copy_bytes_per_s`, `matmul_flop_per_s`.
    """

    dry_run: bool
    ceilings: dict[str, float]

    @property
    def device(self) -> str:
        return "cpu" if self.dry_run else "cuda"

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes of the kernels' checks; Triton's interpreter computes wrongly in bfloat16."""
        return (torch.float32, torch.float16) if self.dry_run else tuple(TOLERANCE)

    def wait(self) -> None:
        """Wait until the device has nothing left to do."""
        if not self.dry_run:
            torch.cuda.synchronize()

    def time_s(self, work: Callable[[], object], rounds: int) -> float:
        """Return the median duration of `work` by the device's own clock, after a warm-up."""
        rounds = 2 if self.dry_run else rounds
        for _ in range(1 if self.dry_run else 3):
            work()
        times = []
        for _ in range(rounds):
            if self.dry_run:
                began_s = time.perf_counter()
                work()
                times.append(time.perf_counter() - began_s)
                continue
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1000)
        return statistics.median(times)


def circumstances(place: Place) -> Figures:
    """Return what stands in every line: card, driver and versions."""
    import triton

    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return {
        "gpu": None if place.dry_run else torch.cuda.get_device_name(),
        "driver": None if place.dry_run else _first_line(command),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": _first_line(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "dry_run": place.dry_run,
    }


def _first_line(command: list[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.partition("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        return None


def flash_attentions(place: Place) -> list[str]:
    """Return the implementations of flash attention that are installed."""
    found = []
    for name in () if place.dry_run else IMPLEMENTATIONS:
        try:
            FlashAttention(name).activate()
        except (ImportError, RuntimeError, ValueError):  # no package, or an old torch
            continue
        found.append(name)
    return found


def by_flash_attention(name: str, case: Callable[..., Figures]) -> Callable[[], Figures]:
    """Return a case whose prompts an implementation attends to; what it refuses is said, and is no failure.

    Args:
        name: of the implementation.
        case: takes `prompts` and `block_size`.
    """

    def run() -> Figures:
        flash = FlashAttention(name)
        flash.activate()
        try:
            return case(prompts=flash, block_size=FA2_BLOCK_SIZE)
        except RuntimeError as error:
            if "CUDA error" in str(error):
                raise
            return {"passed": True, "left_out": str(error)}

    return run


def randn(place: Place, dtype: torch.dtype, *shape: int) -> Tensor:
    """Return normal numbers on the device."""
    return torch.randn(*shape).to(dtype).to(place.device)


async def read_all(
    engine: Any, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
) -> list[tuple[list[int], list[float]]]:
    """Read all answers at the same time."""
    answers: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]

    async def read(index: int) -> None:
        async with engine.generate(prompts[index], params[index]) as stream:
            async for output in stream:
                last = output.outputs[0]
        logprobs = last.logprobs or []
        chosen = [at[token].logprob for token, at in zip(last.token_ids, logprobs, strict=False)]
        answers[index] = (list(last.token_ids), chosen)

    async with trio.open_nursery() as nursery:
        for index in range(len(prompts)):
            nursery.start_soon(read, index)
    return answers
