"""Checkpoints in the form in which they are published give what they give in the form that transformers writes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.model.backends.test_decoder_parity import reference, reference_logits, tokens
from tests.model.paged import PagedDriver
from tests.model.tiny import make_model
from triolet.model.loading.model import load_model


def logits_of(folder: Path, ids: list[int]) -> Tensor:
    driver = PagedDriver(load_model(str(folder)).model)
    return driver.feed(driver.sequence(len(ids)), ids, chunk=7)


def as_published(weights: Mapping[str, Tensor], key_size: int) -> dict[str, Tensor]:
    """An OLMo Hybrid with norms of other names in recurrent layers, and three convolutions."""
    found = {}
    for name, weight in weights.items():
        stem = re.sub(r"(layers\.\d+\.).*", r"\1", name)
        if f"{stem}linear_attn.A_log" in weights:
            name = name.replace("input_layernorm", "attention_layer_norm")
            name = name.replace("post_attention_layernorm", "feedforward_layer_norm")
        if ".conv1d." in name:
            sizes = [key_size, key_size, len(weight) - 2 * key_size]
            for part, rows in zip("qkv", weight.split(sizes), strict=True):
                found[name.replace("conv1d", f"{part}_conv1d")] = rows.contiguous()
        else:
            found[name] = weight
    return found


def test_an_olmo_hybrid_may_have_its_convolutions_one_by_one_and_norms_under_two_names(
    tmp_path: Path,
) -> None:
    # Four heads of 10 numbers in queries and keys, and of 24 in values.
    folder, ids = make_model("olmo-hybrid-rope", tmp_path), tokens(20)
    expected, file = logits_of(folder, ids), folder / "model.safetensors"
    weights = load_file(file)
    published = as_published(weights, 40)
    assert len(published) == len(weights) + 2
    assert len(published.keys() - weights.keys()) == 3 + 2
    save_file(published, file)
    torch.testing.assert_close(logits_of(folder, ids), expected, atol=0, rtol=0)


def test_lightning_attention_of_a_file_without_slopes_decays_as_the_published_rule_says(
    tmp_path: Path,
) -> None:
    folder, ids = make_model("minimax", tmp_path, seed=2), tokens(20)
    expected, file = reference_logits(reference(folder), ids), folder / "model.safetensors"
    weights = load_file(file)
    kept = {name: weight for name, weight in weights.items() if not name.endswith(("slope_rate", "_decay"))}
    assert len(kept) == len(weights) - 4
    save_file(kept, file)
    torch.testing.assert_close(logits_of(folder, ids), expected, atol=1e-4, rtol=0)
