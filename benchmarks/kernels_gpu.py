"""Time every Triton kernel on this machine's GPU: `python benchmarks/kernels_gpu.py [--kernel NAME] [--output FILE]`.

One JSON line per kernel and shape: time at the 20th, 50th and 80th percentile, the bytes that the operation has to move
(each input read once, each output written once), and the resulting rate at the median. The L2 cache is flushed between
runs. The first line is a plain copy of 1 GiB, as the reference for the others.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import attrs
import torch
from torch import Tensor

from triolet.kernels.attention_metadata import AttentionMetadata
from triolet.kernels.flash_attention import FlashAttention
from triolet.kernels.kv_write import kv_write
from triolet.kernels.paged_attention import paged_attention
from triolet.kernels.rms_norm import rms_norm
from triolet.kernels.rotary import rotary
from triolet.kernels.silu_mul import gelu_tanh_mul, silu_mul

BLOCK_SIZE = 16
TOKENS = (1, 32, 256, 2048)
DTYPE = torch.bfloat16
DEVICE = "cuda"  # gpu_sections.py has a pretended one for its dry run


@attrs.frozen(eq=False)
class Trial:
    """One kernel on one shape.

    Args:
        kernel: the operation's name.
        shape: what tells this trial from its neighbours.
        run: one call.
        moved_bytes: bytes that one call has to read and write.
    """

    kernel: str
    shape: dict[str, int | str]
    run: Callable[[], object]
    moved_bytes: int


@attrs.frozen
class Heads:
    """Attention heads of a model, and their width."""

    model: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int


MODELS = (
    Heads("Qwen3-0.6B", 16, 8, 128, 1024, 3072),
    Heads("Llama-3.1-8B", 32, 8, 128, 4096, 14336),
)


def copy_trials() -> Iterator[Trial]:
    """Yield a plain copy, the best rate of the memory."""
    source = torch.empty(2**30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    yield Trial("copy", {"bytes": len(source)}, lambda: target.copy_(source), 2 * source.nbytes)


def elementwise_trials(model: Heads, num_tokens: int) -> Iterator[Trial]:
    """Yield all operations between the matrix products of one layer."""
    shape: dict[str, int | str] = {"model": model.model, "tokens": num_tokens}
    x, residual = randn(num_tokens, model.hidden), randn(num_tokens, model.hidden)
    weight = randn(model.hidden)
    yield Trial("rms_norm", shape, lambda: rms_norm(x, weight, 1e-6), 2 * x.nbytes)
    yield Trial(
        "rms_norm with residual", shape, lambda: rms_norm(x, weight, 1e-6, residual=residual), 4 * x.nbytes
    )
    gate_up = randn(num_tokens, 2 * model.intermediate)
    yield Trial("silu_mul", shape, lambda: silu_mul(gate_up), gate_up.nbytes * 3 // 2)
    yield Trial("gelu_tanh_mul", shape, lambda: gelu_tanh_mul(gate_up), gate_up.nbytes * 3 // 2)
    merged = randn(num_tokens, model.num_heads + 2 * model.num_kv_heads, model.head_dim)
    query, key, value = merged.split([model.num_heads, model.num_kv_heads, model.num_kv_heads], dim=1)
    # Angle zero: the queries are turned in place again and again, and must not grow.
    cos_sin = torch.cat(
        (torch.ones(4096, model.head_dim // 2), torch.zeros(4096, model.head_dim // 2)), dim=1
    ).to(DEVICE)
    positions = torch.randint(4096, (num_tokens,), device=DEVICE)
    turned_bytes = query.numel() * query.itemsize + key.numel() * key.itemsize
    yield Trial("rotary", shape, lambda: rotary(query, key, cos_sin, positions), 2 * turned_bytes)
    cache = torch.zeros(4096, BLOCK_SIZE, model.num_kv_heads, model.head_dim, dtype=DTYPE, device=DEVICE)
    slots = torch.randperm(4096 * BLOCK_SIZE, device=DEVICE)[:num_tokens]
    value_bytes = value.numel() * value.itemsize
    yield Trial("kv_write", shape, lambda: kv_write(value, cache, slots), 2 * value_bytes + slots.nbytes)


def attention_trials(model: Heads) -> Iterator[Trial]:
    """Yield decodes of small and large batches, whole prompts, and a step that mixes them."""
    for batch, context in ((1, 128), (1, 1024), (1, 16384), (8, 1024), (32, 1024), (128, 1024), (256, 1024)):
        yield attention_trial(model, "decode", [(1, context)] * batch)
    for length in (512, 2048, 8192):
        yield attention_trial(model, "prefill", [(length, length)])
    yield attention_trial(model, "mixed", [(1, 1024)] * 31 + [(512, 2048)])


def attention_trial(
    model: Heads,
    kind: str,
    lens: list[tuple[int, int]],
    *,
    prompts: FlashAttention | None = None,
    block_size: int = BLOCK_SIZE,
) -> Trial:
    """Make one step over sequences of (query length, sequence length), their blocks scattered over the cache.

    Args:
        model: of the shapes.
        kind: named in the result.
        lens: of each sequence.
        prompts: what attends to prompts; None for the Triton kernel.
        block_size: of the cache, tokens.
    """
    query_lens, seq_lens = zip(*lens, strict=True)
    blocks_each = [-(-seq_len // block_size) for seq_len in seq_lens]
    keys, values = (randn(sum(blocks_each), block_size, model.num_kv_heads, model.head_dim) for _ in range(2))
    tables = torch.zeros(len(lens), max(blocks_each), dtype=torch.int32)
    for row, blocks in zip(tables, torch.randperm(sum(blocks_each)).split(blocks_each), strict=True):
        row[: len(blocks)] = blocks
    metadata = AttentionMetadata(
        cu_query_lens=torch.tensor((0, *query_lens)).cumsum(0).int().to(DEVICE),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32).to(DEVICE),
        block_tables=tables.to(DEVICE),
        slot_mapping=torch.empty(0, dtype=torch.int64, device=DEVICE),
        query_lens_host=query_lens,
        seq_lens_host=seq_lens,
    )
    query = randn(sum(query_lens), model.num_heads, model.head_dim)
    scale = model.head_dim**-0.5
    kv_bytes = 2 * sum(seq_lens) * model.num_kv_heads * model.head_dim * DTYPE.itemsize
    # Two products of two operations per query head, query and visible key; a chunk sees half of itself.
    visible = sum(query_len * (2 * seq_len - query_len + 1) // 2 for query_len, seq_len in lens)
    return Trial(
        "paged_attention",
        {
            "model": model.model, "kind": kind, "sequences": len(lens), "queries": sum(query_lens),
            "longest": max(seq_lens), "flop": 4 * visible * model.num_heads * model.head_dim,
        },
        lambda: paged_attention(query, keys, values, metadata, scale=scale, prompts=prompts),
        2 * query.nbytes + kv_bytes,
    )  # fmt: skip


def randn(*shape: int) -> Tensor:
    """Return normal numbers in the benchmark's dtype, on the GPU."""
    return torch.randn(*shape, device=DEVICE).to(DTYPE)


def all_trials() -> Iterator[Trial]:
    """Yield every trial; its tensors are made when it is reached, and freed after it."""
    yield from copy_trials()
    for model in MODELS:
        for num_tokens in TOKENS:
            yield from elementwise_trials(model, num_tokens)
        yield from attention_trials(model)


def machine() -> dict[str, str]:
    """Return a description of the machine and the versions."""
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "dtype": str(DTYPE).removeprefix("torch."),
        "commit": first_line("git", "rev-parse", "--short", "HEAD"),
    }


def first_line(*command: str) -> str:
    """Return the first line of a program's output; "unknown" if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return "unknown"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip().partition("\n")[0] or "unknown"


def measure(trial: Trial) -> dict[str, Any]:
    """Run a trial until the spread is known; return milliseconds and rates."""
    import triton

    p20, p50, p80 = triton.testing.do_bench(trial.run, warmup=50, rep=200, quantiles=[0.2, 0.5, 0.8])
    figures: dict[str, Any] = {
        "bench": trial.kernel, **trial.shape, "p20_ms": round(p20, 5), "p50_ms": round(p50, 5), "p80_ms": round(p80, 5),
        "moved_bytes": trial.moved_bytes, "gb_per_s": round(trial.moved_bytes / p50 / 1e6, 1),
    }  # fmt: skip
    if "flop" in trial.shape:
        figures["tflop_per_s"] = round(int(trial.shape["flop"]) / p50 / 1e9, 1)
    return figures


def report(output: TextIO, only: str | None) -> None:
    """Write one line per trial, as soon as it is measured."""
    circumstances = machine()
    for trial in all_trials():
        if only is None or trial.kernel.startswith(only):
            print(json.dumps({**measure(trial), **circumstances}), file=output, flush=True)


def main() -> int:
    """Refuse without a GPU; otherwise measure."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kernel", help="only the kernels whose name begins like this")
    parser.add_argument("--output", type=Path, help="write the lines to this file instead of the terminal")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            "kernels_gpu: this benchmark needs a CUDA GPU, and torch sees none here; nothing was measured",
            file=sys.stderr,
        )
        return 1
    torch.manual_seed(0)
    if arguments.output is None:
        report(sys.stdout, arguments.kernel)
        return 0
    with arguments.output.open("w") as output:
        report(output, arguments.kernel)
    return 0


if __name__ == "__main__":
    sys.exit(main())
