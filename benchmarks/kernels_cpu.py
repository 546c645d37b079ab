"""Time the compiled CPU kernels against torch's: `python benchmarks/kernels_cpu.py [--kernel NAME] [--seconds S]`.

Both sides run in turns, a few milliseconds each, so that other load on the machine affects both alike; the result is
the ratio of their medians. One JSON line per kernel and shape. Layers change at every call, as in a model, so that keys
and values come from memory where a model's would.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import attrs
import torch

from triolet.kernels.attention_metadata import AttentionMetadata
from triolet.kernels.cpu.attention.paged_attention import paged_attention_cpp
from triolet.kernels.cpu.gemm.blocks import BlockRows
from triolet.kernels.cpu.library import library
from triolet.kernels.gathered_attention import gathered_attention
from triolet.model.architectures.decoder_config import DecoderConfig
from triolet.model.architectures.families import parse_decoder_config
from triolet.model.architectures.weight_map import WeightReader, plan_tensors
from triolet.model.backends.cpu.plan import build_cpu_decoder
from triolet.model.backends.torch_loading import build_decoder
from triolet.model.interface import ForwardBatch, ModelSpec
from triolet.model.memory.kv_cache import allocate_kv_cache

BLOCK_SIZE = 16
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 8, 128  # Qwen3-0.6B
KV_BYTES = 100e6  # of all layers together: more than most caches hold
TURN_S = 0.02


@attrs.frozen(eq=False)
class Trial:
    """One kernel on one shape, with both implementations.

    Args:
        kernel: the operation's name.
        shape: what tells this trial from its neighbours.
        ours: one call of the compiled kernel.
        torchs: one call of torch's way.
    """

    kernel: str
    shape: dict[str, int | str]
    ours: Callable[[], object]
    torchs: Callable[[], object]


def attention_trials() -> Iterator[Trial]:
    """Yield decodes of one and of many sequences, and whole prompts."""
    for dtype in (torch.bfloat16, torch.float32):
        for batch, context in ((1, 512), (32, 128), (32, 512), (32, 2048)):
            yield attention_trial(dtype, [(1, context)] * batch)
        for length, context in ((128, 128), (512, 512), (128, 2048), (2048, 2048)):
            yield attention_trial(dtype, [(length, context)])


def attention_trial(dtype: torch.dtype, lens: list[tuple[int, int]]) -> Trial:
    """Make one layer over sequences of (query length, sequence length), their blocks scattered over the cache."""
    query_lens, seq_lens = zip(*lens, strict=True)
    blocks_each = [-(-seq_len // BLOCK_SIZE) for seq_len in seq_lens]
    shape = sum(blocks_each), BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM
    layer_bytes = 2 * torch.Size(shape).numel() * dtype.itemsize
    num_layers = max(1, min(12, int(KV_BYTES / layer_bytes)))
    layers = [(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)) for _ in range(num_layers)]
    tables = torch.randperm(sum(blocks_each)).int().view(len(lens), -1)
    metadata = AttentionMetadata(
        cu_query_lens=torch.tensor((0, *query_lens)).cumsum(0).int(),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.empty(0, dtype=torch.int64),
        query_lens_host=query_lens,
        seq_lens_host=seq_lens,
    )
    query = torch.randn(sum(query_lens), NUM_HEADS, HEAD_DIM).to(dtype)
    plan = metadata.gather_plan(BLOCK_SIZE, None)  # once per step, so that no layer pays for it
    cpp = library()
    if cpp is None:
        raise SystemExit("the CPU kernels are not built here: there is nothing to compare")
    mine, theirs = itertools.cycle(layers), itertools.cycle(layers)
    attend = functools.partial(paged_attention_cpp, cpp, scale=HEAD_DIM**-0.5)
    gather = functools.partial(gathered_attention, scale=HEAD_DIM**-0.5, soft_cap=None)
    return Trial(
        "paged_attention",
        {"dtype": str(dtype), "sequences": len(lens), "queries": query_lens[0], "context": max(seq_lens)},
        lambda: attend(query, *next(mine), metadata),
        lambda: gather(query, *next(theirs), plan),
    )


@attrs.frozen
class RandomTensor:
    """Tensor of a checkpoint that is made when it is read."""

    shape: tuple[int, ...]
    num_bytes: int


class RandomTensors:
    """Checkpoint of random tensors, of the shapes of a decoder; a `WeightSource`."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.tensors = {
            name: RandomTensor(shape, torch.Size(shape).numel() * dtype.itemsize)
            for plan in plan_tensors(config, ()).values()
            for name, shape in plan.sources
        }

    def dtype_of(self, name: str) -> torch.dtype:
        return self._dtype

    def read(self, name: str, out: torch.Tensor | None = None) -> torch.Tensor:
        made = (torch.randn(self.tensors[name].shape) * 0.05).to(self._dtype)
        return made if out is None else out.copy_(made)

    def block_format(self, name: str) -> None:
        """Return None: no tensor has blocks."""

    def read_blocks(self, name: str) -> BlockRows:
        raise ValueError(f"{name} must have blocks; it is a plain tensor")

    def map_blocks(self, name: str) -> None:
        """Return None: nothing lies in a file."""


def random_weights(config: DecoderConfig, dtype: torch.dtype) -> WeightReader:
    """Return the reader of random weights."""
    plans = plan_tensors(config, ())
    return WeightReader(RandomTensors(config, dtype), plans, dtype, torch.device("cpu"))


MODELS: dict[str, dict[str, Any]] = {
    "llama-15m": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 288, "num_hidden_layers": 6,
        "num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 768, "vocab_size": 32000,
        "tie_word_embeddings": True, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    },
    "llama-160m": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 768, "num_hidden_layers": 12,
        "num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 2048, "vocab_size": 32000,
        "tie_word_embeddings": False, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    },
    "qwen3-0.6b": {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
        "vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
    },
}  # fmt: skip


def step_trials(models: Sequence[str]) -> Iterator[Trial]:
    """Yield a decoder's whole step: decodes at a context of 256 tokens, and prompts."""
    for name, dtype in itertools.product(models, (torch.bfloat16, torch.float32)):
        config = parse_decoder_config(MODELS[name], Path(name))
        cpp = build_cpu_decoder(config, random_weights(config, dtype))
        in_torch = build_decoder(config, random_weights(config, dtype))
        for sequences, query_len, context in (
            (1, 1, 256),
            (8, 1, 256),
            (32, 1, 256),
            (1, 128, 128),
            (1, 512, 512),
        ):
            batch = step_batch(cpp.spec, sequences, query_len, context)
            shape: dict[str, int | str] = {"model": name, "dtype": str(dtype)}
            shape |= {"sequences": sequences, "queries": query_len, "context": context}
            ours, torchs = (functools.partial(model.forward, batch) for model in (cpp, in_torch))
            yield Trial("step", shape, ours, torchs)


def step_batch(spec: ModelSpec, sequences: int, query_len: int, context: int) -> ForwardBatch:
    """Return the last `query_len` tokens of as many sequences of `context` tokens."""
    blocks_each = -(-context // BLOCK_SIZE)
    tables = torch.randperm(sequences * blocks_each).int().view(sequences, -1)
    positions = torch.arange(context - query_len, context)
    slots = (tables[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE).long().flatten()
    cache = allocate_kv_cache(
        spec, num_blocks=sequences * blocks_each, block_size=BLOCK_SIZE, device=torch.device("cpu")
    )
    metadata = AttentionMetadata(
        cu_query_lens=torch.arange(sequences + 1, dtype=torch.int32) * query_len,
        seq_lens=torch.full((sequences,), context, dtype=torch.int32),
        block_tables=tables,
        slot_mapping=slots,
        query_lens_host=(query_len,) * sequences,
        seq_lens_host=(context,) * sequences,
    )
    token_ids = torch.randint(spec.vocab_size, (sequences * query_len,))
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions.repeat(sequences),
        cache=cache,
        attention=metadata,
        logits_indices=torch.arange(1, sequences + 1) * query_len - 1,
    )


def measure(trial: Trial, seconds: float) -> dict[str, object]:
    """Run both in turns for `seconds`; return the microseconds of one call."""
    samples: tuple[list[float], list[float]] = ([], [])
    sides = list(zip((trial.ours, trial.torchs), samples, strict=True))
    for run, _ in sides:
        run()
    began = time.perf_counter()
    while time.perf_counter() - began < seconds or len(samples[0]) < 3:
        for run, times in sides:
            turn = time.perf_counter()
            run()  # what the other side left in the cache is not this side's to count
            while (start := time.perf_counter()) - turn < TURN_S or not times:
                run()
                times.append((time.perf_counter() - start) * 1e6)
    ours, torchs = map(median, samples)
    low, *_, high = quantiles(samples[0], n=5)
    return {
        "bench": trial.kernel, **trial.shape,
        "us": round(ours, 1), "p20_us": round(low, 1), "p80_us": round(high, 1),
        "torch_us": round(torchs, 1), "speedup": round(torchs / ours, 2),
    }  # fmt: skip


def machine() -> dict[str, object]:
    """Return a description of the machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.processor()
    return {"cpu": cpu, "threads": torch.get_num_threads(), "torch": torch.__version__}


TRIALS: dict[str, Callable[[Sequence[str]], Iterator[Trial]]] = {
    "paged_attention": lambda _: attention_trials(),
    "step": step_trials,
}


def main() -> None:
    """Measure the requested kernels, and print a line for each shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernel", choices=[*TRIALS], action="append", help="only this one; may be repeated")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each shape")
    parser.add_argument(
        "--model", choices=[*MODELS], action="append", help="for the whole step; may be repeated"
    )
    options = parser.parse_args()
    with torch.inference_mode():
        for kernel in options.kernel or TRIALS:
            for trial in TRIALS[kernel](options.model or ["llama-15m"]):
                print(json.dumps({**measure(trial, options.seconds), **machine()}), flush=True)


if __name__ == "__main__":
    main()
