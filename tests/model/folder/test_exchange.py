"""The check of new weights against those in use names what does not fit, before anything is changed."""

from __future__ import annotations

import errno
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from triolet.errors import (
    InvalidRequest,
    ModelError,
    ModelFileError,
    ModelNotFound,
    UnsupportedModel,
    WeightsMismatch,
)
from triolet.model.folder import exchange
from triolet.model.folder.checkpoint import Checkpoint
from triolet.model.folder.exchange import UPDATED, check_exchange, new_updates_folder, write_update
from triolet.model.folder.pooling_config import read_pooling_config

CONFIG: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 4}
TENSORS = {"a": torch.zeros(4, 2), "b": torch.ones(3, dtype=torch.bfloat16)}


def folder_of(path: Path, tensors: dict[str, Tensor] = TENSORS, **changed: Any) -> Path:
    """A folder with these tensors, and a config.json with these changes."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG | changed))
    save_file(tensors, path / "model.safetensors")
    return path


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"a": TENSORS["a"]}, ["missing tensors: b"]),
        ({**TENSORS, "c": torch.zeros(1)}, ["unused tensors: c"]),
        ({**TENSORS, "a": torch.zeros(2, 4)}, ["a must be F32 (4, 2); got F32 (2, 4)"]),
        ({**TENSORS, "b": torch.ones(3)}, ["b must be BF16 (3,); got F32 (3,)"]),
        ({"A": TENSORS["a"], "b": TENSORS["b"].bool()}, ["missing tensors: a", "unused tensors: A", "BOOL"]),
    ],
)
def test_tensors_that_differ_are_named(tensors: dict[str, Tensor], named: list[str], tmp_path: Path) -> None:
    current, new = folder_of(tmp_path / "current"), folder_of(tmp_path / "new", tensors)
    check_exchange(current, current)
    with pytest.raises(WeightsMismatch) as caught:
        check_exchange(current, new)
    assert all(text in str(caught.value) for text in named)


def test_other_folders_are_refused(tmp_path: Path) -> None:
    current = folder_of(tmp_path / "current")
    other = folder_of(tmp_path / "other", architectures=["GPT2LMHeadModel"])
    truncated, without = folder_of(tmp_path / "truncated"), folder_of(tmp_path / "without")
    truncate(truncated)
    (without / "model.safetensors").unlink()
    gguf = tmp_path / "model.gguf"
    gguf.touch()
    cases: list[tuple[Path, Path, type[ModelError], str]] = [
        (current, tmp_path / "nothing", ModelNotFound, "nothing"),
        (current, gguf, ModelNotFound, "model.gguf"),
        (gguf, current, UnsupportedModel, "GGUF"),
        (current, other, UnsupportedModel, "architectures"),
        (current, truncated, ModelFileError, "truncated"),
        (current, without, ModelFileError, "missing"),
    ]
    for mine, theirs, error, named in cases:
        with pytest.raises(error, match=named):
            check_exchange(mine, theirs)


def test_an_update_holds_the_latest_value_of_every_tensor(tmp_path: Path) -> None:
    current, first, second = folder_of(tmp_path / "current"), tmp_path / "first", tmp_path / "second"
    write_update(current, first, {"a": torch.full((4, 2), 7.0)})
    check_exchange(current, first)
    write_update(first, second, {"b": torch.full((3,), 5.0, dtype=torch.bfloat16)})
    (first / UPDATED).unlink()  # the folder before may go
    checkpoint = Checkpoint.open(second)
    assert torch.equal(checkpoint.read("a"), torch.full((4, 2), 7.0))
    assert torch.equal(checkpoint.read("b"), torch.full((3,), 5.0, dtype=torch.bfloat16))
    for updates, named in (
        ({"c": torch.zeros(1)}, "unused tensors: c"),
        ({"a": torch.zeros(4, 3)}, "a must be"),
        ({"b": torch.zeros(3)}, "b must be torch.bfloat16"),
    ):
        with pytest.raises(WeightsMismatch, match=named):
            write_update(current, tmp_path / "third", updates)
    wrong: list[dict[Any, Any]] = [
        {"a": 5},
        {"a": None},
        {5: torch.zeros(1)},
        {"a": torch.zeros(4, 2).to_sparse()},
        {"a": torch.zeros(4, 2, device="meta")},
    ]
    for values in wrong:
        with pytest.raises(InvalidRequest, match="tensors must have names and dense torch tensors"):
            write_update(current, tmp_path / "third", values)
    assert not (tmp_path / "third").exists()


def test_an_update_keeps_the_modules_of_a_sentence_transformers_folder(tmp_path: Path) -> None:
    current, first, second = folder_of(tmp_path / "current"), tmp_path / "first", tmp_path / "second"
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Dense": "further/2_Dense"}
    modules = [{"idx": idx, "type": kind, "path": path} for idx, (kind, path) in enumerate(paths.items())]
    (current / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    for path, fields in (
        (paths["Pooling"], {"pooling_mode": "mean"}),
        (paths["Dense"], {"in_features": 2, "out_features": 1}),
    ):
        (current / path).mkdir(parents=True)
        (current / path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    save_file({"linear.weight": torch.ones(1, 2)}, current / paths["Dense"] / "model.safetensors")
    (current / "further" / "again").symlink_to(current / "further")  # without an end
    write_update(current, first, {"a": torch.full((4, 2), 7.0)})
    write_update(first, second, {"a": torch.full((4, 2), 8.0)})
    shutil.rmtree(first)
    found = read_pooling_config(second, CONFIG, "LlamaForCausalLM", "auto")
    assert found is not None
    assert found.method == "MEAN"
    assert [layer.folder for layer in found.dense] == [second / paths["Dense"]]
    assert (second / paths["Dense"] / "model.safetensors").samefile(
        current / paths["Dense"] / "model.safetensors"
    )


@pytest.mark.parametrize(
    ("stored", "absent"),
    [
        ("model.embed_tokens.weight", "lm_head.weight"),
        ("model.language_model.embed_tokens.weight", "lm_head.weight"),
        ("transformer.wte.weight", "lm_head.weight"),
        ("lm_head.weight", "model.embed_tokens.weight"),
    ],
)
def test_a_tied_head_is_taken_where_it_equals_the_embedding_and_refused_by_name_where_not(
    stored: str, absent: str, tmp_path: Path
) -> None:
    old, new = torch.zeros(4, 2), torch.ones(4, 2)
    current = folder_of(tmp_path / "current", {stored: old, "b": TENSORS["b"]})
    for number, updates in enumerate(({stored: new, absent: new.clone()}, {absent: old})):
        folder = tmp_path / str(number)
        write_update(current, folder, updates)
        checkpoint = Checkpoint.open(folder)
        assert checkpoint.tensors.keys() == {stored, "b"}
        assert torch.equal(checkpoint.read(stored), updates.get(stored, old))
    for wrong in ({stored: new, absent: old}, {absent: new}, {absent: old.bfloat16()}, {absent: old[:2]}):
        with pytest.raises(WeightsMismatch, match=f"{absent} is tied to {stored} and must be equal"):
            write_update(current, tmp_path / "wrong", wrong)


def test_a_head_is_no_tied_one_where_there_is_no_embedding_or_a_head_is_stored(tmp_path: Path) -> None:
    draft, vision = "model.layers.9.embed_tokens.weight", "model.vision_tower.embeddings.weight"
    values = torch.zeros(4, 2)
    both = folder_of(tmp_path / "both", {"model.embed_tokens.weight": values, "lm_head.weight": values + 1})
    write_update(both, tmp_path / "new", {"lm_head.weight": values + 2})
    assert torch.equal(Checkpoint.open(tmp_path / "new").read("lm_head.weight"), values + 2)
    with pytest.raises(WeightsMismatch, match=f"unused tensors: {draft}"):
        write_update(both, tmp_path / "wrong", {draft: values})
    with pytest.raises(WeightsMismatch, match="unused tensors: lm_head"):
        write_update(
            folder_of(tmp_path / "none", {vision: values}), tmp_path / "wrong", {"lm_head.weight": values}
        )


def test_a_full_disk_under_an_update_is_an_error_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = folder_of(tmp_path / "current")
    for number, error in enumerate((SafetensorError("No space left"), OSError(errno.ENOSPC, "full"))):

        def fail(tensors: object, path: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(exchange, "save_file", fail)
        with pytest.raises(ModelFileError, match="cannot be written: No space left"):
            write_update(current, tmp_path / str(number), {"a": torch.zeros(4, 2)})


@pytest.mark.parametrize("filename", ["/tmp/triolet-weights-x", None])
def test_a_folder_for_updates_that_cannot_be_made_is_an_error_of_the_file(
    filename: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", filename)

    assert new_updates_folder(tmp_path).parent == tmp_path
    monkeypatch.setattr(tempfile, "mkdtemp", fail)
    where = filename or "the folder of temporary files"
    with pytest.raises(ModelFileError, match=f"^{where}: cannot be written: No space left on device"):
        new_updates_folder()
