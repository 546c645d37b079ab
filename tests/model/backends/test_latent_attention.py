"""Multi-head latent attention: what its cache holds, what its checkpoints may hold, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model.tiny import change_json, make_model
from triolet.errors import ModelFileError, UnsupportedModel, WeightsMismatch
from triolet.model.loading.model import load_model
from triolet.model.loading.options import LoadOptions
from triolet.model.memory.kv_cache import allocate_kv_cache


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("deepseek-v3", tmp_path_factory.mktemp("deepseek"))


def test_the_cache_holds_one_latent_and_one_rotated_key_per_token_and_layer(folder: Path) -> None:
    spec = load_model(str(folder), LoadOptions(device="cpu")).model.spec
    assert spec.backend == "native"
    assert spec.kv_bytes_per_token() == 3 * (16 + 8) * 4  # layers, kv_lora_rank + qk_rope_head_dim, float32
    for layer in allocate_kv_cache(spec, num_blocks=4, block_size=16, device=torch.device("cpu")):
        [tensor] = layer.tensors
        assert tensor.shape == (4, 16, 1, 24) and layer.values is layer.keys


def test_layers_that_draft_tokens_are_left_out(folder: Path, tmp_path: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    extra = {
        name.replace(".layers.2.", ".layers.3."): value.clone()
        for name, value in weights.items()
        if ".layers.2." in name
    }
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    save_file({**weights, **extra}, tmp_path / "model.safetensors")
    assert load_model(str(tmp_path), LoadOptions(device="cpu")).model.spec.backend == "native"
    change_json(tmp_path / "config.json", num_nextn_predict_layers=0, num_mtp_layers=0)
    with pytest.raises(WeightsMismatch, match=r"model\.layers\.3\."):
        load_model(str(tmp_path), LoadOptions(device="cpu"))


@pytest.mark.parametrize(
    ("family", "changes", "error", "text"),
    [
        (
            "deepseek-v3",
            {"n_group": 4},
            ModelFileError,
            r"n_group must be a divisor of the number of experts \(6\)",
        ),
        ("deepseek-v3", {"n_group": 6}, ModelFileError, "n_group must be .* leaves 2 in a group"),
        ("deepseek-v3", {"topk_group": 4}, ModelFileError, "topk_group must be at most n_group, 3; got 4"),
        ("deepseek-v3", {"scoring_func": "softmax"}, UnsupportedModel, "scoring_func must be sigmoid"),
        (
            "deepseek-v3",
            {"num_key_value_heads": 2},
            UnsupportedModel,
            "num_key_value_heads must be .* 4; got 2",
        ),
        ("deepseek-v3", {"moe_layer_freq": 2}, UnsupportedModel, "moe_layer_freq must be 1"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, UnsupportedModel, "topk_method must be greedy or"),
        ("deepseek-v2", {"norm_topk_prob": True}, UnsupportedModel, "norm_topk_prob must be false"),
        (
            "deepseek-v2",
            {"num_experts_per_tok": None},
            ModelFileError,
            "num_experts_per_tok must be an integer",
        ),
    ],
)
def test_what_this_attention_or_its_experts_do_not_compute_is_refused_by_name(
    family: str, changes: dict[str, Any], error: type[Exception], text: str, tmp_path: Path
) -> None:
    make_model(family, tmp_path)
    change_json(tmp_path / "config.json", **changes)
    with pytest.raises(error, match=text):
        load_model(str(tmp_path), LoadOptions(device="cpu"))
