"""Gemma 4 from GGUF files, with the keys and tensors that llama.cpp reads, and with tensors that are not used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.model.gguf.test_gguf_models import generated, ours
from tests.model.gguf.tiny_gguf import add_tensor
from tests.model.tiny import make_model
from triolet.errors import ModelFileError
from triolet.model.loading.model import load_model

pytestmark = pytest.mark.usefixtures("one_thread")

SCALES = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
"""Names of tensors that gguf-py's map of names lacks."""


def stored_name(name: str, num_layers: int) -> str:
    """Return the name that a tensor of transformers has in the file."""
    parts = name.split(".", 3)
    if (scale := SCALES.get(parts[-1])) is not None:
        return f"blk.{parts[2]}.{scale}"
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, num_layers)
    stem = str(known.get_name(name, (".weight",)))
    return stem if stem.endswith(".weight") else f"{stem}.weight"


def write_gemma4(folder: Path, path: Path, kind: str = "F32", **changes: Any) -> Path:
    """Write the model of a folder as a file.

    Args:
        kind: type of the matrices.
        changes: of keys of the architecture, by their last part; None leaves a key out.
    """
    config = json.loads((folder / "config.json").read_text())
    num_layers, kinds = config["num_hidden_layers"], config["layer_types"]
    layers = {int(key): value for key, value in config["per_layer_config"].items()}
    whole, rope = next(iter(layers.values())), config["rope_parameters"]
    wide = config["num_kv_shared_layers"] if config["use_double_wide_mlp"] else 0
    width = config["intermediate_size"]
    heads = [
        layers.get(i, {}).get("num_key_value_heads", config["num_key_value_heads"]) for i in range(num_layers)
    ]
    keys: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": num_layers,
        "feed_forward_length": [width] * (num_layers - wide) + [2 * width] * wide,
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": heads,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.key_length": whole["head_dim"],
        "attention.value_length": whole["head_dim"],
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [each == "sliding_attention" for each in kinds],
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "rope.freq_base": rope["full_attention"]["rope_theta"],
        "rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
        "rope.dimension_count": whole["head_dim"],
        "rope.dimension_count_swa": config["head_dim"],
        "final_logit_softcapping": config["final_logit_softcapping"],
        "expert_count": config["num_experts"],
        "expert_used_count": config["top_k_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
    }
    writer = gguf.GGUFWriter(None, "gemma4")
    for name, value in (keys | changes).items():
        if isinstance(value, list):
            writer.add_array(f"gemma4.{name}", value)
        elif isinstance(value, float):
            writer.add_float32(f"gemma4.{name}", value)
        elif value is not None:
            writer.add_uint32(f"gemma4.{name}", value)
    half = whole["head_dim"] // 2
    turning = int(rope["full_attention"]["partial_rotary_factor"] * half)
    divisors = np.array([1.0] * turning + [1e30] * (half - turning), dtype=np.float32)
    writer.add_tensor("rope_freqs.weight", divisors)
    generator = np.random.default_rng(0)
    for name, weight in sorted(load_file(folder / "model.safetensors").items()):
        if name != "lm_head.weight":
            is_matrix = weight.ndim > 1 and not name.endswith("router.proj.weight")
            stored = stored_name(name, num_layers)
            add_tensor(writer, stored, weight.float().numpy(), kind if is_matrix else "F32", generator)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def with_weights_of(path: Path, folder: Path) -> Any:
    """transformers' model with the weights of a file, as gguf-py dequantises them."""
    read = {
        each.name: torch.from_numpy(gguf.dequantize(each.data, each.tensor_type).copy())
        for each in gguf.GGUFReader(path).tensors
    }
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    state = model.state_dict()
    for name, tensor in state.items():
        if name != "lm_head.weight":
            tensor.copy_(read[stored_name(name, model.config.num_hidden_layers)])
    return model


@pytest.mark.parametrize("kind", ["F32", pytest.param("Q8_0", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["gemma4", "gemma4-small", "gemma4-moe"])
def test_greedy_tokens_are_those_of_transformers_with_the_weights_of_the_file(
    family: str, kind: str, tmp_path: Path
) -> None:
    # Q8_0 takes rows of 32 values.
    more: dict[str, Any] = {
        "gemma4-moe": {"moe_intermediate_size": 64},
        "gemma4-small": {"hidden_size_per_layer_input": 32},
    }.get(family, {})
    folder = make_model(family, tmp_path / "folder", **more)
    path = write_gemma4(folder, tmp_path / "model.gguf", kind)
    assert ours(path) == generated(with_weights_of(path, folder))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attention.sliding_window_pattern": None}, "sliding_window_pattern"),
        ({"attention.sliding_window_pattern": [True] * 6}, "sliding_window_pattern"),
        ({"attention.value_length_swa": 8}, "value_length_swa"),
        ({"attention.head_count_kv": [2, 2, 1]}, "head_count_kv"),
        ({"feed_forward_length": [96, 192, 96, 96, 96, 96]}, "feed_forward_length"),
    ],
)
def test_a_key_of_layers_that_does_not_fit_is_refused_by_name(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    folder = make_model("gemma4", tmp_path / "folder")
    path = write_gemma4(folder, tmp_path / "model.gguf", **changes)
    with pytest.raises(ModelFileError, match=named):
        load_model(str(path))


def test_keys_of_layers_that_share_a_cache_may_stand_in_a_checkpoint(tmp_path: Path) -> None:
    folder = make_model("gemma4-small", tmp_path / "folder")
    expected = ours(folder)
    path = folder / "model.safetensors"
    weights = load_file(path)
    for name in ("k_proj", "v_proj", "k_norm"):
        weights[f"model.layers.4.self_attn.{name}.weight"] = (
            weights[f"model.layers.1.self_attn.{name}.weight"] * 2
        )
    save_file(weights, path, {"format": "pt"})
    assert ours(folder) == expected
