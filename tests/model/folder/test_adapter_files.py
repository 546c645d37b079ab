"""Adapter folders: each field of peft is honoured or refused by its name, and each tensor must fit the model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from triolet.core.request.lora import AdapterModule, AdapterSupport
from triolet.errors import AdapterError
from triolet.model.folder.adapter_files import digest_of_folder, read_adapter

SUPPORT = AdapterSupport(
    modules=(
        AdapterModule("layers.0.self_attn.q_proj", "layers.0.qkv", 0, 12, 8),
        AdapterModule("layers.0.self_attn.k_proj", "layers.0.qkv", 12, 4, 8),
        AdapterModule("embed_tokens", "embedding", 0, 8, 20, is_embedding=True),
        AdapterModule("lm_head", "head", 0, 20, 8),
    ),
    prefix="model.",
    max_rank=16,
)
Q, K = "base_model.model.model.layers.0.self_attn.q_proj", "base_model.model.model.layers.0.self_attn.k_proj"
PAIR = {f"{Q}.lora_A.weight": (4, 8), f"{Q}.lora_B.weight": (12, 4)}


def write(folder: Path, tensors: Mapping[str, tuple[int, ...]] | None = None, **fields: Any) -> Path:
    made: dict[str, Tensor] = {name: torch.ones(shape) for name, shape in (tensors or PAIR).items()}
    save_file(made, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8} | fields
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_a_rank_and_an_alpha_of_their_own_scale_a_module(tmp_path: Path) -> None:
    keys = {f"{K}.lora_A.weight": (2, 8), f"{K}.lora_B.weight": (4, 2)}
    folder = write(tmp_path, PAIR | keys, rank_pattern={"k_proj": 2}, alpha_pattern={r".*\.q_proj": 32})
    assert [module.scaling for module in read_adapter(folder, SUPPORT).modules] == [2.0 * 2, 8.0]
    folder = write(tmp_path, PAIR, use_rslora=True)
    assert [module.scaling for module in read_adapter(folder, SUPPORT).modules] == [4.0]


@pytest.mark.parametrize(
    "prefix",
    ["base_model.model.model.", "model.", "base_model.model.", "base_model.model.model.language_model.", ""],
)
def test_a_module_is_found_under_the_names_of_all_wrappers(prefix: str, tmp_path: Path) -> None:
    tensors = {
        f"{prefix}layers.0.self_attn.q_proj.lora_{part}.weight": size
        for part, size in zip("AB", PAIR.values(), strict=True)
    }
    [adapted] = read_adapter(write(tmp_path, tensors), SUPPORT).modules
    assert adapted.module == SUPPORT.modules[0]


def test_copies_of_the_embedding_and_the_head_are_left_out(tmp_path: Path) -> None:
    copies = {
        f"base_model.model.{name}.base_layer.weight": (20, 8) for name in ("model.embed_tokens", "lm_head")
    }
    embedding = "base_model.model.model.embed_tokens.lora_embedding_"
    tensors = PAIR | copies | {f"{embedding}A": (4, 20), f"{embedding}B": (8, 4)}
    names = {adapted.module.name for adapted in read_adapter(write(tmp_path, tensors), SUPPORT).modules}
    assert names == {"layers.0.self_attn.q_proj", "embed_tokens"}


@pytest.mark.parametrize(
    "tower", ["model.vision_tower.vision_model.encoder", "visual.blocks", "multi_modal_projector"]
)
def test_modules_of_a_vision_part_are_skipped_with_one_warning(
    tower: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"base_model.model.{tower}.layers.0.self_attn.q_proj"
    vision = {f"{name}.lora_A.weight": (4, 6), f"{name}.lora_B.weight": (6, 4)}
    folder = write(tmp_path, PAIR | vision)
    files = read_adapter(folder, SUPPORT)
    assert [adapted.module for adapted in files.modules] == [SUPPORT.modules[0]]
    assert set(files.skipped) == set(vision)
    assert not caplog.records  # the runner reads it, too
    assert digest_of_folder(folder, SUPPORT) == files.digest
    [warning] = caplog.messages
    assert "2 tensors of the vision part are skipped" in warning and name in warning
    with pytest.raises(AdapterError, match="must hold tensors of adapted modules; got none"):
        read_adapter(write(tmp_path, vision), SUPPORT)


def test_the_digest_is_of_the_contents(tmp_path: Path) -> None:
    first = read_adapter(write(tmp_path), SUPPORT).digest
    assert read_adapter(write(tmp_path), SUPPORT).digest == first
    assert read_adapter(write(tmp_path, lora_alpha=9), SUPPORT).digest != first


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"peft_type": "IA3"}, "peft_type must be LORA; got 'IA3'"),
        ({"peft_type": None}, "peft_type must be LORA"),
        ({"r": 0}, "r must be an integer of at least 1"),
        ({"r": "4"}, "r must be an integer"),
        ({"r": 64}, r"LoRA rank 64 is greater than max_lora_rank 16\."),
        ({"r": 8}, r"q_proj.lora_A.weight' must be of shape \(8, 8\); got \(4, 8\)"),
        ({"bias": "all"}, "bias must be none"),
        ({"lora_bias": True}, "lora_bias must be false without"),
        ({"use_dora": True}, "use_dora must be false without"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is not supported"),
        ({"layer_replication": [[0, 4]]}, "layer_replication is not supported"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is not supported"),
        ({"ensure_weight_tying": True}, "ensure_weight_tying is not supported"),
        ({"a_field_of_tomorrow": 1}, "a_field_of_tomorrow is not supported; got 1"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights must be one that leaves"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights must be one.* got 'lora_ga'"),
        ({"rank_pattern": {"(": 4}}, "rank_pattern must hold regular expressions"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern.q_proj must be an integer of at least 1"),
    ],
)
def test_a_field_that_is_not_honoured_is_refused_by_its_name(
    fields: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(AdapterError, match=problem) as caught:
        read_adapter(write(tmp_path, **fields), SUPPORT)
    assert Path(caught.value.path).parent == tmp_path


@pytest.mark.parametrize(
    "fields",
    [
        {"a_field_of_tomorrow": None},
        {"trainable_token_indices": None, "layer_replication": None},
        {"init_lora_weights": "gaussian", "target_modules": "all-linear", "lora_dropout": 0.1},
    ],
)
def test_a_field_that_changes_nothing_is_taken(fields: dict[str, Any], tmp_path: Path) -> None:
    assert read_adapter(write(tmp_path, **fields), SUPPORT).modules


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({f"{Q}.lora_A.weight": (4, 8)}, "lacks lora_B of module"),
        (PAIR | {f"{Q.replace('q_proj', 'x_proj')}.lora_A.weight": (4, 8)}, "x_proj.* does not have"),
        (PAIR | {"base_model.model.lm_head.weight": (20, 8)}, "lm_head.weight' is no part of a LoRA pair"),
        (
            {f"{Q}.lora_A.weight": (4, 9), f"{Q}.lora_B.weight": (12, 4)},
            r"must be of shape \(4, 8\); got \(4, 9\)",
        ),
        ({f"{Q}.lora_A.weight": (4, 8), f"{Q}.lora_B.weight": (13, 4)}, r"must be of shape \(12, 4\)"),
        (
            PAIR | {name.removeprefix("base_model.model."): size for name, size in PAIR.items()},
            "must be there once",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    tensors: dict[str, tuple[int, ...]], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(AdapterError, match=problem):
        read_adapter(write(tmp_path, tensors), SUPPORT)


def cut(count: int) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        weights = folder / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:count])

    return spoil


def pickle_only(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config.json: is missing"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "is not JSON"),
        (
            lambda folder: (folder / "adapter_config.json").write_text("[]"),
            "must hold a JSON object; got list",
        ),
        (pickle_only, "adapter_model.bin is not read: pickled weights can run code"),
        (cut(0), "is truncated"),
        (cut(20), "ends within its header"),
        (cut(-1), "ends within tensor"),
    ],
)
def test_a_file_that_is_missing_or_broken_is_named(
    spoil: Callable[[Path], object], problem: str, tmp_path: Path
) -> None:
    folder = write(tmp_path)
    spoil(folder)
    with pytest.raises(AdapterError, match=problem):
        read_adapter(folder, SUPPORT)
