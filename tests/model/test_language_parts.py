"""Checkpoints with images: their language part runs on the native decoder, and nothing else of them is read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.model.paged import PagedDriver
from tests.model.tiny import FAMILIES, VOCAB_SIZE, change_json, randomise
from tests.source_tree import ROOT
from triolet.errors import UnsupportedModel, WeightsMismatch
from triolet.model.architectures.language_part import LANGUAGE_PARTS
from triolet.model.loading.model import load_model

NO_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
IDS = {"image_token_id": 302, "video_token_id": 303, "vision_start_token_id": 304, "vision_end_token_id": 305}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
GEMMA4_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}

# Name: transformers' class, the family of its language part, changes of that, and the config around it.
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "Gemma3",
        "gemma3",
        {},
        {"vision_config": VISION, "mm_tokens_per_image": 4, "image_token_index": 302},
    ),
    "gemma4": (
        "Gemma4",
        "gemma4",
        {"pad_token_id": 0},
        {"vision_config": GEMMA4_VISION, "audio_config": None},
    ),
    "gemma4-small": (
        "Gemma4",
        "gemma4-small",
        {"pad_token_id": 0},
        {"vision_config": GEMMA4_VISION, "audio_config": None},
    ),
    "mistral3": (
        "Mistral3",
        "mistral",
        {"model_type": "mistral"},
        {"vision_config": {**VISION, "model_type": "pixtral"}, "image_token_index": 302},
    ),
    "mistral3-ministral": (
        "Mistral3",
        "ministral3",
        {"model_type": "ministral3"},
        {"vision_config": {**VISION, "model_type": "pixtral"}, "image_token_index": 302},
    ),
    "lfm2-vl": (
        "Lfm2Vl",
        "lfm2",
        {"model_type": "lfm2"},
        {"vision_config": {**VISION, "model_type": "siglip2_vision_model", "num_patches": 4}},
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VL",
        "qwen2",
        {"rope_parameters": MROPE, "use_sliding_window": False},
        {"vision_config": QWEN_VISION, **IDS},
    ),
    "qwen3-vl": (
        "Qwen3VL",
        "qwen3",
        {"rope_parameters": MROPE},
        {"vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0]}, **IDS},
    ),
    "qwen3.5": ("Qwen3_5", "qwen3.5", {}, {"vision_config": QWEN_VISION, **IDS}),
    "qwen3.5-moe": ("Qwen3_5Moe", "qwen3.5-moe", {}, {"vision_config": QWEN_VISION, **IDS}),
}


def make(name: str, folder: Path) -> Path:
    kind, family, changes, around = MODELS[name]
    text = json.loads(json.dumps({**FAMILIES[family][2], "vocab_size": VOCAB_SIZE, **NO_IDS, **changes}))
    tied = text.get("tie_word_embeddings", False)
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, tie_word_embeddings=tied, **json.loads(json.dumps(around))
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    randomise(model, seed=1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = make(name, tmp_path_factory.mktemp(name))
        return made[name]

    return folder


def tokens() -> list[int]:
    generator = torch.Generator().manual_seed(3)
    ids: list[int] = torch.randint(0, 300, (40,), generator=generator).tolist()
    return ids


@torch.inference_mode()
def expected_logits(folder: Path, name: str) -> Tensor:
    """Return transformers' logits in float64: its own float32 is as far from them as ours may be."""
    kind = getattr(transformers, f"{MODELS[name][0]}ForConditionalGeneration")
    # Its fast multiplications of experts take no float64.
    model = kind.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    logits: Tensor = model(torch.tensor([tokens()])).logits[0]
    return logits


def logits_of(folder: Path) -> Tensor:
    driver = PagedDriver(load_model(str(folder)).model)
    return driver.feed(driver.sequence(len(tokens())), tokens(), chunk=7)


def copied(folder: Path, to: Path, rename: Callable[[str], str]) -> Path:
    """A folder with the same weights under other names."""
    to.mkdir()
    (to / "config.json").write_bytes((folder / "config.json").read_bytes())
    weights = load_file(folder / "model.safetensors")
    save_file(
        {rename(name): weight for name, weight in weights.items()},
        to / "model.safetensors",
        metadata={"format": "pt"},
    )
    return to


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_a_text_are_those_of_the_model_with_images(
    name: str, folder_of: Callable[[str], Path]
) -> None:
    folder = folder_of(name)
    assert load_model(str(folder)).model.spec.backend == "native"
    torch.testing.assert_close(logits_of(folder).double(), expected_logits(folder, name), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["gemma3", "qwen3.5"])
def test_tensors_are_found_under_old_and_new_names(
    name: str, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = folder_of(name)
    spellings: dict[str, Callable[[str], str]] = {
        "old": lambda each: (
            each.replace("model.language_model.", "language_model.model.")
            .replace("model.vision_tower.", "vision_tower.")
            .replace("model.visual.", "visual.")
        ),
        "new": lambda each: each.replace("language_model.model.", "model.language_model."),
    }
    expected = logits_of(folder)
    for spelling, rename in spellings.items():
        other = copied(folder, tmp_path / spelling, rename)
        assert torch.equal(logits_of(other), expected)


def test_experts_that_are_stored_together_are_read_one_by_one(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = folder_of("qwen3.5-moe")
    stacked = copied(folder, tmp_path / "stacked", lambda name: name)
    weights = load_file(stacked / "model.safetensors")
    alone = {name: weights.pop(name) for name in sorted(weights) if ".mlp.experts." in name}
    assert alone, "transformers stores them one by one"
    for layer in {name.partition(".mlp.experts.")[0] for name in alone}:
        names = [f"{layer}.mlp.experts.{expert}" for expert in range(6)]
        both = [
            torch.cat((alone[f"{name}.gate_proj.weight"], alone[f"{name}.up_proj.weight"])) for name in names
        ]
        weights[f"{layer}.mlp.experts.gate_up_proj"] = torch.stack(both)
        weights[f"{layer}.mlp.experts.down_proj"] = torch.stack(
            [alone[f"{name}.down_proj.weight"] for name in names]
        )
    save_file(weights, stacked / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits_of(stacked), logits_of(folder))


def test_no_byte_of_the_vision_part_is_read(folder_of: Callable[[str], Path]) -> None:
    folder, totals = folder_of("gemma3"), set[int]()
    load_model(str(folder), on_progress=lambda progress: totals.add(progress.total_bytes or 0))
    weights = load_file(folder / "model.safetensors")
    text = sum(weight.nbytes for name, weight in weights.items() if "language_model" in name)
    assert totals == {text}
    assert text < sum(weight.nbytes for weight in weights.values())


def test_a_config_of_transformers_4_has_the_language_part_at_its_top(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = folder_of("qwen2.5-vl")
    other = copied(folder, tmp_path / "flat", lambda name: name)
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "rope_theta": 1e6}
    kept = {name: value for name, value in text.items() if name not in ("model_type", "rope_parameters")}
    (other / "config.json").write_text(json.dumps({**config, **kept, **rope}))
    assert torch.equal(logits_of(other), logits_of(folder))


def test_a_tensor_that_belongs_to_no_part_is_named(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    def rename(name: str) -> str:
        return name.replace("vision_tower.", "hearing_tower.")

    strange = copied(folder_of("gemma3"), tmp_path / "strange", rename)
    with pytest.raises(WeightsMismatch, match="hearing_tower"):
        load_model(str(strange))


def test_a_language_part_of_an_unknown_kind_is_refused(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    other = copied(folder_of("mistral3"), tmp_path / "other", lambda name: name)
    text = json.loads((other / "config.json").read_text())["text_config"]
    change_json(other / "config.json", text_config={**text, "model_type": "cohere2"})
    with pytest.raises(UnsupportedModel, match="Mistral3ForConditionalGeneration"):
        load_model(str(other))


def test_each_architecture_with_images_stands_in_the_table_of_the_docs() -> None:
    section = (
        (ROOT / "docs" / "models.md")
        .read_text()
        .partition("### Models with images")[2]
        .partition("\n### ")[0]
    )
    listed = {
        architecture: set(re.findall(r"`(\w+)`", line.split("|")[2]))
        for line in section.splitlines()
        if line.startswith("| `")
        for architecture in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    assert listed.keys() == LANGUAGE_PARTS.keys()
    for architecture, parts in LANGUAGE_PARTS.items():
        assert set(parts.values()) <= listed[architecture]
