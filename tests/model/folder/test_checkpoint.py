"""Tensors are read in parts, by several threads, as they stand in the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from triolet.errors import ModelFileError
from triolet.model.folder import checkpoint
from triolet.model.folder.checkpoint import Checkpoint


@pytest.mark.parametrize("part_bytes", [1, 7, 64, 10**6])
def test_a_tensor_that_is_read_in_parts_is_the_one_that_was_saved(
    part_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "PART_BYTES", part_bytes)
    tensors = {"a": torch.randn(5, 9), "b": torch.randn(3).bfloat16(), "none": torch.zeros(0, 4)}
    save_file(tensors, tmp_path / "model.safetensors")
    opened = Checkpoint.open(tmp_path)
    for name, tensor in tensors.items():
        assert opened.read(name).equal(tensor)


def test_a_file_that_became_shorter_is_refused_whichever_thread_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.randn(100)}, path)
    opened = Checkpoint.open(tmp_path)
    path.write_bytes(path.read_bytes()[:-10])
    monkeypatch.setattr(checkpoint, "PART_BYTES", 64)
    with pytest.raises(ModelFileError, match="is truncated: it ends within tensor 'a'"):
        opened.read("a")


def test_in_a_folder_with_a_single_file_and_an_index_the_single_file_counts(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    save_file({"a": torch.zeros(3)}, tmp_path / "model-00001-of-00001.safetensors")
    weight_map = {"a": "model-00001-of-00001.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert Checkpoint.open(tmp_path).read("a").tolist() == [1.0, 1.0, 1.0]


def test_a_folder_with_several_files_and_no_index_is_refused_and_one_file_may_have_any_name(
    tmp_path: Path,
) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "gptq_model-4bit-128g.safetensors")
    assert Checkpoint.open(tmp_path).read("a").tolist() == [1.0, 1.0, 1.0]
    save_file({"a": torch.zeros(3)}, tmp_path / "gptq_model-4bit-32g.safetensors")
    with pytest.raises(ModelFileError, match=r"model\.safetensors: is missing, and so is"):
        Checkpoint.open(tmp_path)
