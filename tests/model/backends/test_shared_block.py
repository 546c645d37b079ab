"""A block that several layers share is held once, and copies of it in the checkpoint do not matter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model.backends.test_decoder_parity import tokens
from tests.model.paged import PagedDriver
from tests.model.tiny import make_model
from triolet.errors import WeightsMismatch
from triolet.model.backends.layers.shared_block import SharedBlockBeforeRecurrence
from triolet.model.backends.torch_decoder import Decoder
from triolet.model.loading.model import load_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Layers 2, 5 have the block of layer 2."""
    return make_model("zamba", tmp_path)


def logits_of(folder: Path) -> torch.Tensor:
    driver, ids = PagedDriver(load_model(str(folder)).model), tokens(20)
    return driver.feed(driver.sequence(len(ids)), ids)


def test_layers_that_share_a_block_have_its_weights_once(tmp_path: Path) -> None:
    decoder = load_model(str(make_model("zamba2", tmp_path))).model
    assert isinstance(decoder, Decoder)
    mixers = [layer.attention for layer in decoder.layers]
    first, second, third = (mixer for mixer in mixers if isinstance(mixer, SharedBlockBeforeRecurrence))
    assert first.attention_norm is third.attention_norm is not second.attention_norm  # two blocks in turn
    assert first.attention is third.attention is not second.attention
    assert first.out is not third.out


def test_copies_of_a_shared_block_are_left_out_and_nothing_else_is(folder: Path) -> None:
    expected, file = logits_of(folder), folder / "model.safetensors"
    weights = load_file(file)
    copies = {
        name.replace("layers.2.", "layers.5."): torch.zeros_like(weight)
        for name, weight in weights.items()
        if ".shared_transf." in name
    }
    assert len(copies) == 9 and not copies.keys() & weights.keys()
    save_file({**weights, **copies}, file)
    torch.testing.assert_close(logits_of(folder), expected, atol=0, rtol=0)
    stray = {name.replace("layers.5.", "layers.4."): weight for name, weight in copies.items()}
    save_file({**weights, **stray}, file)
    with pytest.raises(WeightsMismatch, match=r"layers\.4\.shared_transf"):
        load_model(str(folder))
