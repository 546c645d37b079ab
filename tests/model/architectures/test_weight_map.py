"""Checkpoints: whole or sharded, merged or tied, and every way in which one can be wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.model.paged import PagedDriver
from tests.model.tiny import change_json, make_model
from tests.source_tree import SRC
from triolet.errors import ModelFileError, UnsupportedModel, WeightsMismatch
from triolet.model.folder.checkpoint import Checkpoint
from triolet.model.loading.model import load_model

TOKENS = list(range(12))

Tensors = dict[str, Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model("llama", tmp_path / "model", num_hidden_layers=2)


def logits(folder: Path) -> Tensor:
    return PagedDriver(load_model(str(folder)).model).once(TOKENS)


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def shard(folder: Path) -> dict[str, str]:
    """Spread the folder's tensors over two files with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    weight_map = {name: files[index % 2] for index, name in enumerate(sorted(tensors))}
    for file in files:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return weight_map


# ----------------------------------------------------------------------------------- what is the same


def test_shards_hold_the_same_model_as_one_file(folder: Path) -> None:
    whole = logits(folder)
    shard(folder)
    assert torch.equal(logits(folder), whole)


def test_names_may_lack_the_prefix(tmp_path: Path) -> None:
    folder = make_model("gpt2", tmp_path)
    before = logits(folder)
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    assert bare.keys() != tensors.keys()
    save_file(bare, folder / "model.safetensors")
    assert torch.equal(logits(folder), before)


def test_masks_and_frequencies_that_old_versions_stored_are_passed_over(tmp_path: Path) -> None:
    gpt2, llama = make_model("gpt2", tmp_path / "gpt2"), make_model("llama", tmp_path / "llama")
    before = logits(gpt2), logits(llama)
    rewrite(gpt2, lambda tensors: tensors.update({"transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8)}))
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(llama, lambda tensors: tensors.update({name: torch.ones(8)}))
    assert torch.equal(logits(gpt2), before[0])
    assert torch.equal(logits(llama), before[1])


def test_a_tied_tensor_may_be_stored_under_either_name(tmp_path: Path) -> None:
    folder = make_model("smollm", tmp_path)
    before = logits(folder)
    rewrite(
        folder, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")})
    )
    assert torch.equal(logits(folder), before)


def test_a_head_of_its_own_is_used_even_if_the_config_says_tied(tmp_path: Path) -> None:
    folder = make_model("smollm", tmp_path)
    before = logits(folder)
    rewrite(
        folder, lambda tensors: tensors.update({"lm_head.weight": 2 * tensors["model.embed_tokens.weight"]})
    )
    torch.testing.assert_close(logits(folder), 2 * before)


def test_the_decoder_does_not_depend_on_the_files_once_loaded(folder: Path) -> None:
    driver = PagedDriver(load_model(str(folder)).model)
    before = driver.once(TOKENS)
    file = folder / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as opened:  # in place: a mapping of the file would see it
        opened.write(b"\0" * size)
    assert torch.equal(driver.once(TOKENS), before)


# ---------------------------------------------------------------------------------------- what is wrong


def test_every_tensor_that_does_not_fit_is_named_in_one_error(folder: Path) -> None:
    def spoil(tensors: Tensors) -> None:
        del tensors["model.layers.1.self_attn.k_proj.weight"], tensors["model.norm.weight"]
        tensors["model.layers.9.extra.weight"] = torch.ones(2)
        tensors["model.layers.0.mlp.down_proj.weight"] = torch.ones(3, 5)

    rewrite(folder, spoil)
    with pytest.raises(WeightsMismatch) as caught:
        load_model(str(folder))
    assert caught.value.missing == ("model.layers.1.self_attn.k_proj.weight", "model.norm.weight")
    assert caught.value.unused == ("model.layers.9.extra.weight",)
    assert caught.value.misshapen == ("model.layers.0.mlp.down_proj.weight must be (64, 96); got (3, 5)",)
    for name in (*caught.value.missing, *caught.value.unused, *caught.value.misshapen):
        assert name in str(caught.value)


def test_a_bias_that_the_config_does_not_announce_is_unused(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}))
    with pytest.raises(WeightsMismatch, match=r"unused tensors: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load_model(str(folder))


def test_an_untied_model_without_a_head_is_incomplete(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(WeightsMismatch, match=r"missing tensors: lm_head\.weight"):
        load_model(str(folder))


def test_experts_are_counted(tmp_path: Path) -> None:
    folder = make_model("mixtral", tmp_path)
    change_json(folder / "config.json", num_local_experts=3)
    with pytest.raises(WeightsMismatch, match=r"experts\.3\.w1") as caught:
        load_model(str(folder))
    assert not caught.value.missing
    assert "block_sparse_moe.gate.weight must be (3, 64); got (4, 64)" in caught.value.misshapen[0]


@pytest.mark.parametrize("kept", [0, 5, 100, 5000, -1])
def test_a_truncated_file_is_named(kept: int, folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ModelFileError, match="truncated or not a safetensors file") as caught:
        load_model(str(folder))
    assert caught.value.path == str(file)


def test_a_truncated_shard_is_named(folder: Path) -> None:
    file = folder / sorted(set(shard(folder).values()))[1]
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ModelFileError) as caught:
        load_model(str(folder))
    assert caught.value.path == str(file)


def test_a_folder_without_weights_says_so(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelFileError, match=r"is missing.*pytorch_model.bin will not be read"):
        load_model(str(folder))


def test_a_shard_that_the_index_names_must_be_there(folder: Path) -> None:
    missing = min(set(shard(folder).values()))
    (folder / missing).unlink()
    with pytest.raises(ModelFileError, match=missing):
        load_model(str(folder))


def test_a_tensor_must_be_in_the_shard_that_the_index_names(folder: Path) -> None:
    shard(folder)
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    first = min(weight_map)
    weight_map[first] = next(file for file in weight_map.values() if file != weight_map[first])
    change_json(folder / "model.safetensors.index.json", weight_map=weight_map)
    with pytest.raises(ModelFileError, match=f"lacks tensors.*{first}"):
        load_model(str(folder))


@pytest.mark.parametrize(
    "file", ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "model.bin", "", 3]
)
def test_an_index_names_only_safetensors_files_of_its_folder(file: object, folder: Path) -> None:
    weight_map = shard(folder)
    change_json(folder / "model.safetensors.index.json", weight_map={**weight_map, "lm_head.weight": file})
    with pytest.raises(ModelFileError, match=r"weight_map.lm_head.weight must be"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("weight_map", [None, {}, []])
def test_an_index_must_have_a_map(weight_map: object, folder: Path) -> None:
    shard(folder)
    change_json(folder / "model.safetensors.index.json", weight_map=weight_map)
    with pytest.raises(ModelFileError, match="weight_map must"):
        Checkpoint.open(folder)


def test_a_file_that_becomes_shorter_while_it_is_read_is_named(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    last = max(checkpoint.tensors, key=lambda name: checkpoint.tensors[name].begin)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelFileError, match=rf"model.safetensors.*ends within tensor '{last}'"):
        checkpoint.read(last)


def test_a_file_that_goes_while_it_is_read_is_named(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"model.safetensors.*cannot be read"):
        checkpoint.read(next(iter(checkpoint.tensors)))


def test_tensors_that_were_read_and_let_go_leave_no_memory_taken(tmp_path: Path) -> None:
    mib = 2**20
    tensors = {
        f"part{number}": torch.ones(16 * mib, dtype=torch.uint8).view(torch.float32) for number in range(8)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    del tensors
    # In a process of its own: other tests leave memory that comes and goes.
    command = [sys.executable, "-c", READS_ALL, str(tmp_path)]
    ran = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(SRC)}, check=True, capture_output=True)
    assert int(ran.stdout) < 16 * mib  # of 128


READS_ALL = """
import resource, sys
from pathlib import Path
import torch
from triolet.model.folder.checkpoint import Checkpoint
from triolet.model.memory.out_of_memory import trim_heap

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

checkpoint = Checkpoint.open(Path(sys.argv[1]))
before = resident_bytes()
for name in checkpoint.tensors:
    assert checkpoint.read(name).view(torch.uint8)[-1] == 1
trim_heap()  # as a load does; how much of what is free glibc keeps is up to the order of its pieces
print(resident_bytes() - before)
"""


def test_quantised_tensors_are_refused(folder: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    with pytest.raises(UnsupportedModel, match=rf"{name}.*I8"):
        load_model(str(folder))
