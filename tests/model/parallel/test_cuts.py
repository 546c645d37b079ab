"""Each rank reads its part of a model, and the parts are those that torch's own slices of the whole are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.model.tiny import make_model
from triolet.model.architectures.decoder_config import read_config
from triolet.model.architectures.families import parse_decoder_config
from triolet.model.architectures.weight_map import WeightReader, check_fit, plan_tensors
from triolet.model.folder.checkpoint import Checkpoint
from triolet.model.parallel.cuts import Part, PartCheckpoint, cut_plans


def reader_of(folder: Path, part: Part) -> tuple[WeightReader, PartCheckpoint, list[str]]:
    config = parse_decoder_config(read_config(folder), folder)
    part.check(config)
    stored = Checkpoint.open(folder)
    plans = plan_tensors(config, stored.tensors)
    check_fit(config, plans, stored)
    cuts = part.cuts(config, plans)
    source = PartCheckpoint(stored, cuts)
    return (
        WeightReader(source, cut_plans(plans, cuts), torch.float32, torch.device("cpu")),
        source,
        list(plans),
    )


def part_of(whole: dict[str, torch.Tensor], name: str, rank: int) -> torch.Tensor:
    """Return what a rank of two holds of a tensor of Llama's layout, cut as a whole one by torch."""
    module = name.rpartition(".")[0].rpartition(".")[2]
    if module in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head"):
        return whole[name].chunk(2)[rank]
    if module in ("o_proj", "down_proj") and name.endswith("weight"):
        return whole[name].chunk(2, dim=1)[rank]
    return whole[name]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_the_bytes_of_its_part_and_no_others(tmp_path: Path, family: str, rank: int) -> None:
    folder = make_model(family, tmp_path / family)
    whole = load_file(folder / "model.safetensors")
    reader, source, names = reader_of(folder, Part(rank=rank, size=2))
    for name in names:
        assert isinstance(reader[name], torch.Tensor)
    assert source.read_bytes == sum(part_of(whole, name, rank).nbytes for name in whole)
    assert source.read_bytes < sum(tensor.nbytes for tensor in whole.values())


@pytest.mark.parametrize("rank", [0, 1])
def test_the_parts_are_slices_of_the_whole(tmp_path: Path, rank: int) -> None:
    folder = make_model("llama", tmp_path / "llama")
    whole = load_file(folder / "model.safetensors")
    _reader, source, _names = reader_of(folder, Part(rank=rank, size=2))
    for name in whole:
        assert torch.equal(source.read(name), part_of(whole, name, rank)), name


def test_ranks_that_outnumber_the_kv_heads_share_them(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path / "llama", num_attention_heads=4, num_key_value_heads=2)
    keys = load_file(folder / "model.safetensors")["model.layers.0.self_attn.k_proj.weight"]
    for rank in range(4):
        _reader, source, _names = reader_of(folder, Part(rank=rank, size=4))
        read = source.read("model.layers.0.self_attn.k_proj.weight")
        assert torch.equal(read, keys.chunk(2)[rank // 2]), rank
