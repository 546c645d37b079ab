"""LoRA adapters with random weights for the models of `tests.model.tiny`, and what transformers makes of them, merged.

The merge is the formula of the paper on the tensors of the checkpoint, W + alpha / r * B A, in float32: it shares no
code with what it is compared with.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkvo")
LINEAR = (*ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
NUM_LAYERS = 3


def every_layer(names: Sequence[str]) -> list[str]:
    """Module names in all layers of a model like Llama."""
    return [f"model.layers.{layer}.{name}" for layer in range(NUM_LAYERS) for name in names]


def make_adapter(
    base: Path,
    folder: Path,
    modules: Sequence[str],
    *,
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 0,
    ends: bool = False,
    **fields: Any,
) -> Path:
    """Write an adapter of some modules, named as in the checkpoint, in the format of peft.

    With `ends`, of the embedding and the head, too; `use_dora` and `lora_bias` bring the tensors that they need.
    """
    stored, generator = load_file(base / "model.safetensors"), torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name in modules:
        num_out, num_in = stored[f"{name}.weight"].shape
        pair = (("lora_A", (rank, num_in)), ("lora_B", (num_out, rank)))
        for part, shape in pair:
            noise = 0.12 * torch.randn(shape, generator=generator)
            tensors[f"base_model.model.{name}.{part}.weight"] = noise
        if fields.get("use_dora"):
            magnitude = 1 + torch.rand(num_out, generator=generator)
            tensors[f"base_model.model.{name}.lora_magnitude_vector"] = magnitude
        if fields.get("lora_bias"):
            tensors[f"base_model.model.{name}.lora_B.bias"] = torch.randn(num_out, generator=generator)
    if ends:
        vocab_size, hidden = stored["model.embed_tokens.weight"].shape
        for name, shape in (
            ("model.embed_tokens.lora_embedding_A", (rank, vocab_size)),
            ("model.embed_tokens.lora_embedding_B", (hidden, rank)),
            ("lm_head.lora_A.weight", (rank, hidden)),
            ("lm_head.lora_B.weight", (vocab_size, rank)),
        ):
            tensors[f"base_model.model.{name}"] = 0.12 * torch.randn(shape, generator=generator)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": ["any"]} | fields
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def merged(base: Path, adapter: Path | None, folder: Path) -> transformers.PreTrainedModel:
    """The model with an adapter added to its weights, as transformers runs it."""
    shutil.copytree(base, folder)
    if adapter is not None:
        stored, pairs = (
            load_file(base / "model.safetensors"),
            load_file(adapter / "adapter_model.safetensors"),
        )
        config: Mapping[str, Any] = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
        for name, a in pairs.items():
            if name.endswith(".lora_A.weight"):
                delta = pairs[name.replace("lora_A", "lora_B")] @ a * (config["lora_alpha"] / config["r"])
                stored[name.removeprefix("base_model.model.").replace(".lora_A", "")] += delta
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
    model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32
    )
    model.eval()
    return model


def is_greedy_answer(
    model: transformers.PreTrainedModel, prompt: Sequence[int], answer: Sequence[int]
) -> bool:
    """Tell whether each token of an answer is the likeliest one after those before it."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0]
    likeliest: list[int] = logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist()
    return likeliest == list(answer)
