"""Measure what LoRA adapters cost a step: without any, and with adapters of all projections, in turns.

    python benchmarks/lora.py [--model llama-160m] [--weights float32 bfloat16 int8 int4] [--batch 1 32]
                              [--adapters 4] [--rank 16] [--rounds 40] [--threads 1] [--output results.jsonl]

A step is one token for each row of a batch after 128 others, or (`prompt`) 128 tokens of each of 4 rows; the rows take
the adapters in turn. Both sides are steps of one loaded model, on the same input and in turns, so that other work on
the machine falls on both alike. Times are CPU milliseconds; the ratios are those of the medians and of the minima.
int8 and int4 are of the float32 model.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import MODELS, OthersAtWork, kept_model, machine, median, report
from safetensors.torch import load_file, save_file

from triolet.core.step_plan import AdapterStart
from triolet.kernels.attention_metadata import AttentionMetadata
from triolet.model.folder.adapter_files import read_adapter
from triolet.model.interface import ForwardBatch, GreedyModel, LayerCache, ModelSpec
from triolet.model.loading.model import load_model
from triolet.model.loading.options import AdapterLimits, LoadOptions
from triolet.model.memory.kv_cache import allocate_kv_cache

WEIGHTS = ("float32", "bfloat16", "int8", "int4")
CONTEXT, BLOCK_SIZE = 128, 16
PROMPT_ROWS = 4
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(model: Path, folder: Path, *, rank: int, seed: int) -> Path:
    """Write an adapter of all projections, with random weights, as peft would."""
    dice = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith(MODULES):
            num_out, num_in = weight.shape
            for part, shape in (("lora_A", (rank, num_in)), ("lora_B", (num_out, rank))):
                tensors[f"base_model.model.{module}.{part}.weight"] = 0.02 * torch.randn(
                    shape, generator=dice
                )
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(MODULES)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def forward_batch(
    spec: ModelSpec, cache: tuple[LayerCache, ...], rows: int, length: int, slots: Sequence[int] | None
) -> ForwardBatch:
    """Return a step of the last `length` of CONTEXT tokens of each row, with the adapters of these slots."""
    dice = torch.Generator().manual_seed(0)
    blocks = torch.arange(rows * CONTEXT // BLOCK_SIZE, dtype=torch.int32).view(rows, -1)
    positions = torch.arange(CONTEXT - length, CONTEXT).repeat(rows)
    places = torch.arange(rows).repeat_interleave(length) * CONTEXT + positions
    metadata = AttentionMetadata(
        cu_query_lens=torch.arange(0, rows * length + 1, length, dtype=torch.int32),
        seq_lens=torch.full((rows,), CONTEXT, dtype=torch.int32),
        block_tables=blocks,
        slot_mapping=places,
        query_lens_host=(length,) * rows,
        seq_lens_host=(CONTEXT,) * rows,
    )
    return ForwardBatch(
        token_ids=torch.randint(spec.vocab_size, (rows * length,), generator=dice),
        positions=positions,
        cache=cache,
        attention=metadata,
        logits_indices=torch.arange(length - 1, rows * length, length),
        adapter_slots=None if slots is None else torch.tensor(slots).repeat_interleave(length),
    )


def measure(
    folder: Path, weights: str, adapters: Sequence[Path], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return a line for each batch size, and one for prompts."""
    limits = AdapterLimits(
        max_loras=len(adapters),
        max_lora_rank=options.rank,
        max_cpu_loras=len(adapters),
        lora_dtype="auto",
    )
    quantization = weights if weights.startswith("int") else None
    loaded = load_model(str(folder), LoadOptions(quantization=quantization, adapter_limits=limits))
    model, bank = loaded.model, loaded.adapters
    assert isinstance(model, GreedyModel) and bank is not None  # the C++ decoder
    for slot, path in enumerate(adapters):
        digest = read_adapter(path, bank.support).digest
        bank.place(AdapterStart(slot=slot, name=path.name, path=str(path), digest=digest))
        assert bank.failure(slot) is None
    num_blocks = max(PROMPT_ROWS, *options.batch) * CONTEXT // BLOCK_SIZE
    cache = allocate_kv_cache(
        model.spec, num_blocks=num_blocks, block_size=BLOCK_SIZE, device=torch.device("cpu")
    )
    lines = []
    for what, rows, length in (
        ("prompt", PROMPT_ROWS, CONTEXT),
        *(("token", size, 1) for size in options.batch),
    ):
        slots = [row % len(adapters) for row in range(rows)]
        sides = {
            "plain": forward_batch(model.spec, cache, rows, length, None),
            "adapted": forward_batch(model.spec, cache, rows, length, slots),
        }
        times: dict[str, list[float]] = {side: [] for side in sides}
        load, others = os.getloadavg()[0], OthersAtWork()
        for _ in range(options.rounds + 1):
            for side, batch in sides.items():
                began = time.process_time()
                model.forward_greedy(batch)
                times[side].append(1e3 * (time.process_time() - began))
        plain, adapted = (of_side[1:] for of_side in times.values())  # the first ones warm up
        lines.append(
            {
                "bench": "lora", "model": options.model, "weights": weights, "what": what, "rows": rows,
                "adapters": min(rows, len(adapters)), "rank": options.rank, "rounds": options.rounds,
                "plain_cpu_ms": median(plain), "adapted_cpu_ms": median(adapted),
                "ratio": median(adapted) / median(plain), "best_ratio": min(adapted) / min(plain),
                "load": load, "others_cpus": others.num_cpus(), **machine(),
            }
        )  # fmt: skip
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="llama-160m")
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--models-folder", type=Path, default=Path(tempfile.gettempdir()) / "triolet-models")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lines = []
    with tempfile.TemporaryDirectory() as scratch:
        for weights in options.weights:
            dtype = torch.bfloat16 if weights == "bfloat16" else torch.float32
            folder = kept_model(options.model, options.models_folder, dtype=dtype)
            adapters = []
            for number in range(1, options.adapters + 1):
                path = Path(scratch) / f"{weights}-{number}"
                make_adapter(folder, path, rank=options.rank, seed=number)
                adapters.append(path)
            lines += measure(folder, weights, adapters, options)
    columns = (
        "weights",
        "what",
        "rows",
        "adapters",
        "plain_cpu_ms",
        "adapted_cpu_ms",
        "ratio",
        "best_ratio",
        "load",
    )
    report(lines, columns, options.output)


if __name__ == "__main__":
    main()
