"""Measure the loss of quantized weights: logits of the same tokens in float32, bfloat16, int8 and int4.

    python benchmarks/quantization.py [--model triolet-nano llama-160m] [--output results.jsonl]

The tokens are prompts with the float32 model's own greedy answers. Columns: the distance of the logits from float32's,
relative to their size; the mean Kullback-Leibler divergence of the next token's distribution, in nats; the share of
positions at which the likeliest token is float32's; the perplexity of the answers; and the bytes of the weights.
triolet-nano is trained and answers in sentences; the other models have random weights and stand for their widths.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

import attrs
import torch
import trio
from common import MODELS, machine, make_model, report
from torch import Tensor

import triolet
from triolet import SamplingParams
from triolet.model.backends.cpu.decoder import CpuDecoder
from triolet.model.loading.model import load_model
from triolet.model.loading.options import LoadOptions
from triolet.model.quality import compare_logits, logits_of
from triolet.nano import PATH

NANO = "triolet-nano"
QUESTIONS = (
    "Hello!", "Who are you?", "Tell me a story.", "Count to ten.", "What is 12 plus 7?", "Spell tree.",
    "What day comes after Monday?", "Say the months.",
)  # fmt: skip
KINDS = (
    ("float32", "none"), ("bfloat16", "none"), ("float32", "int8"), ("bfloat16", "int8"), ("float32", "int4"),
    ("bfloat16", "int4"),
)  # fmt: skip


async def answers(folder: Path, is_trained: bool) -> list[tuple[list[int], list[int]]]:
    """Return prompts with the float32 model's answers to them, as ids."""
    dice = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=not is_trained)
    async with triolet.open_engine(model=str(folder), dtype="float32", runner="inline") as engine:
        vocab_size = engine.model_info.vocab_size
        prompts: list[Any] = [[dice.randrange(vocab_size) for _ in range(64)] for _ in QUESTIONS]
        if is_trained:
            prompts = [[{"role": "user", "content": text}] for text in QUESTIONS]
        outputs = [await engine.complete(prompt, params) for prompt in prompts]
    return [(list(each.prompt_token_ids or ()), list(each.outputs[0].token_ids)) for each in outputs]


def compare(name: str, folder: Path) -> list[dict[str, Any]]:
    """Return a line per kind of weights."""
    pairs = trio.run(answers, folder, name == NANO)
    truths: list[Tensor] = []
    lines = []
    for dtype, quantization in KINDS:
        chosen = None if quantization == "none" else quantization
        model = load_model(str(folder), LoadOptions(dtype=dtype, quantization=chosen)).model
        if not isinstance(model, CpuDecoder):
            raise RuntimeError("the model must run as one C++ step")
        found = [logits_of(model, prompt + answer)[len(prompt) - 1 : -1] for prompt, answer in pairs]
        truths = truths or found
        told = torch.cat([torch.tensor(answer) for _, answer in pairs])
        lines.append(
            {
                "bench": "quantization",
                "model": name,
                "dtype": dtype,
                "quantization": quantization,
                **attrs.asdict(compare_logits(torch.cat(truths), torch.cat(found), told)),
                "weights_mib": model.num_bytes / 2**20,
                "positions": len(told),
                **machine(),
            }
        )
    return lines


def main() -> None:
    """Parse, measure, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", choices=[NANO, *MODELS], default=[NANO, "llama-160m"])
    parser.add_argument("--output", type=Path, help="append the JSON lines to this file")
    arguments = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in arguments.model:
            folder = PATH
            if name != NANO:
                folder = make_model(name, Path(scratch) / name, dtype=torch.float32)
            lines += compare(name, folder)
    columns = (
        "model",
        "dtype",
        "quantization",
        "distance",
        "divergence",
        "agreement",
        "perplexity",
        "weights_mib",
    )
    report(lines, columns, arguments.output)


if __name__ == "__main__":
    main()
