"""Answer one prompt with a model and with its LoRA adapters, all in one batch.

    python examples/lora.py [PROMPT] [--model FOLDER_OR_HUB_ID --adapter NAME=FOLDER --adapter ...]

Without adapters it writes two for triolet-nano. They are not trained: what they change is random.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
import trio
from safetensors import safe_open
from safetensors.torch import save_file

import triolet
from triolet import nano

RANK = 4


def write_adapter(folder: Path, seed: int) -> Path:
    """Write a folder as peft does, of an adapter for the attention of triolet-nano."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    with safe_open(nano.PATH / "model.safetensors", "pt") as weights:
        for name in filter(lambda name: "q_proj" in name or "v_proj" in name, weights.keys()):
            num_out, num_in = weights.get_slice(name).get_shape()
            module = "base_model.model." + name.removesuffix(".weight")
            tensors[f"{module}.lora_A.weight"] = 0.1 * torch.randn(RANK, num_in, generator=generator)
            tensors[f"{module}.lora_B.weight"] = 0.1 * torch.randn(num_out, RANK, generator=generator)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8 * RANK, "target_modules": ["q_proj", "v_proj"]}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


async def main(prompt: str, model: str | None, folders: dict[str, str]) -> None:
    adapters = [
        triolet.LoRARequest(name, place, path) for place, (name, path) in enumerate(folders.items(), 1)
    ]
    params = triolet.SamplingParams(temperature=0, max_tokens=16)
    answers: dict[str, str] = {}

    async def ask(engine: triolet.Engine, lora: triolet.LoRARequest | None) -> None:
        answer = await engine.complete(prompt, params, lora=lora)
        answers[lora.lora_name if lora else "no adapter"] = " ".join(answer.text.split())

    async with (
        triolet.open_engine(model=model, enable_lora=True, max_loras=max(1, len(adapters))) as engine,
        trio.open_nursery() as nursery,
    ):
        for lora in (None, *adapters):
            nursery.start_soon(ask, engine, lora)
    for name, text in sorted(answers.items()):
        print(f"{name}: {text}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Answer one prompt with a model and with its LoRA adapters.")
    parser.add_argument("prompt", nargs="?", default="Once upon a time")
    parser.add_argument("--model")
    parser.add_argument("--adapter", action="append", default=[], metavar="NAME=FOLDER")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        made = (
            {f"random-{seed}": str(Path(scratch) / str(seed)) for seed in (1, 2)} if not asked.adapter else {}
        )
        for seed, path in enumerate(made.values(), start=1):
            write_adapter(Path(path), seed)
        given = dict(entry.split("=", 1) for entry in asked.adapter)
        trio.run(main, asked.prompt, asked.model, made or given)
