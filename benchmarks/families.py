"""Measure each family of the native decoder beside transformers, and beside triolet's own Llama of the same width.

    python benchmarks/families.py [--family mixtral gpt-oss ...] [--rounds 5] [--output results.jsonl]

Random weights, float32, one thread, all three in one process and in turns; the least CPU time of each is shown, because
other work on the machine only ever adds time: of a token of one answer, of a step of eight, of a prompt of 512 tokens.
A token of a mixture of experts uses as many weights of feed-forward blocks as one of the Llama.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import attrs
import torch
import transformers
import trio
from common import OthersAtWork, machine, report

import triolet
from triolet import SamplingParams

_SHAPE: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32_000,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024}
_HALF = _SHAPE["intermediate_size"] // 2

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "phi3": ("Phi3", {}),
    "gemma3": ("Gemma3Text", {"query_pre_attn_scalar": 64}),
    "granite": ("Granite", {"attention_multiplier": 0.125, "logits_scaling": 8.0}),
    "smollm3": ("SmolLM3", {}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {}),
    "exaone4": ("Exaone4", {}),
    "cohere2": ("Cohere2", {}),
    "glm4": ("Glm4", {}),
    "starcoder2": ("Starcoder2", {"intermediate_size": 3072}),
    "ministral3": ("Ministral3", {"rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.1}}),
    "mixtral": ("Mixtral", {"intermediate_size": _HALF, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "granite-moe": (
        "GraniteMoe",
        {"intermediate_size": _HALF, "num_local_experts": 8, "attention_multiplier": 0.125},
    ),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            "moe_intermediate_size": 256,
            "shared_expert_intermediate_size": _HALF,
            "num_experts": 16,
            "num_experts_per_tok": 4,
        },
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {"moe_intermediate_size": 256, "num_experts": 32, "num_experts_per_tok": 8, "norm_topk_prob": True},
    ),
    "gpt-oss": ("GptOss", {"intermediate_size": _HALF, "num_local_experts": 8, "num_experts_per_tok": 2}),
}
"""Name in transformers, and fields of its config beside the shape that all have."""

_SHORT, _LONG, _ANSWER = 32, 512, 16
_SEED = 0


def make_model(family: str, root: Path) -> Path:
    """Write a model of random weights as a Hugging Face folder, unless it is there."""
    name, fields = FAMILIES[family]
    folder = root / f"families-{family}"
    if not (folder / "config.json").exists():
        config = getattr(transformers, f"{name}Config")(
            **{**_SHAPE, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, **fields}
        )
        torch.manual_seed(_SEED)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as scratch:  # a half-written one is never taken for whole
            model.save_pretrained(Path(scratch) / "model")
            (Path(scratch) / "model").rename(folder)
    return folder


Complete = Callable[[list[list[int]], int], Awaitable[None]]
"""Answers all prompts, with so many tokens each."""


def of_triolet(engine: triolet.Engine) -> Complete:
    """Answer with an engine."""

    async def complete(prompts: list[list[int]], count: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        async with trio.open_nursery() as nursery:
            for prompt in prompts:
                nursery.start_soon(engine.complete, prompt, params)

    return complete


def of_transformers(folder: Path) -> Complete:
    """Answer with transformers' `generate`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    async def complete(prompts: list[list[int]], count: int) -> None:
        ids = torch.tensor(prompts)
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=count,
            max_new_tokens=count,
        )

    return complete


@attrs.define
class Least:
    """Least CPU times of one side, milliseconds."""

    # By the number of answers and of their tokens.
    answers: dict[tuple[int, int], float] = attrs.field(factory=dict)
    prompt: float = float("inf")

    def step(self, num_answers: int) -> float:
        """Return the time of one token of each answer."""
        return (self.answers[num_answers, _ANSWER + 1] - self.answers[num_answers, 1]) / _ANSWER

    async def turn(self, complete: Complete, vocab_size: int) -> None:
        """Measure once."""
        dice = random.Random(_SEED)
        short = [[dice.randrange(vocab_size) for _ in range(_SHORT)] for _ in range(8)]
        long = [[dice.randrange(vocab_size) for _ in range(_LONG)]]
        for key in ((1, 1), (1, _ANSWER + 1), (8, 1), (8, _ANSWER + 1)):
            spent = await cpu_ms(complete, short[: key[0]], key[1])
            self.answers[key] = min(spent, self.answers.get(key, spent))
        self.prompt = min(self.prompt, await cpu_ms(complete, long, 1))


async def cpu_ms(complete: Complete, prompts: list[list[int]], count: int) -> float:
    """Return the CPU time of some answers, milliseconds."""
    began = time.process_time()
    await complete(prompts, count)
    return 1e3 * (time.process_time() - began)


async def measure(family: str, root: Path, rounds: int) -> list[dict[str, Any]]:
    """Measure a family beside the Llama, in turns."""
    folder, llama = make_model(family, root), make_model("llama", root)
    settings: dict[str, Any] = {
        "dtype": "float32",
        "runner": "inline",
        "kv_cache_bytes": 64 * 2**20,
        "enable_prefix_caching": False,
        "max_model_len": 1024,
    }
    others = OthersAtWork()
    async with (
        triolet.open_engine(model=str(llama), **settings) as ours,
        triolet.open_engine(model=str(folder), **settings) as engine,
    ):
        sides = {
            "llama": of_triolet(ours),
            "triolet": of_triolet(engine),
            "transformers": of_transformers(folder),
        }
        found = {name: Least() for name in sides}
        for _ in range(rounds):
            for name, complete in sides.items():
                await found[name].turn(complete, _SHAPE["vocab_size"])
    works: tuple[tuple[str, Callable[[Least], float]], ...] = (
        ("a token", lambda least: least.step(1)),
        ("a step of 8", lambda least: least.step(8)),
        ("a prompt of 512", lambda least: least.prompt),
    )
    facts = {"rounds": rounds, "others": others.num_cpus(), **machine()}
    lines: list[dict[str, Any]] = []
    for work, of in works:
        spent = {name: of(least) for name, least in found.items()}
        lines.append(
            {
                "bench": "families", "family": family, "dtype": "float32", "work": work,
                **{f"{name}_cpu_ms": value for name, value in spent.items()},
                "times_llama": spent["triolet"] / spent["llama"],
                "times_transformers": spent["transformers"] / spent["triolet"],
                **facts,
            }
        )  # fmt: skip
    return lines


def main() -> None:
    """Measure, print and write down."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=list(FAMILIES)[1:])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models-folder", type=Path, default=Path(tempfile.gettempdir()) / "triolet-models")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    columns = (
        "family", "work", "triolet_cpu_ms", "llama_cpu_ms", "transformers_cpu_ms", "times_llama", "times_transformers",
    )  # fmt: skip
    for family in options.family:  # written down one by one: a long run may be broken off
        report(trio.run(measure, family, options.models_folder, options.rounds), columns, options.output)


if __name__ == "__main__":
    main()
