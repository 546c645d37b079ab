"""Experts of a quantised folder, the shared one among them, keep their integers and scales."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.kernels.cpu_variants import compiled, each_on_some_variants
from tests.model.gguf.test_gguf_experts import WAYS, prompt_and_decodes
from tests.model.quantized.test_quantized_folders import FORMATS
from tests.model.quantized.writers import Tensors, write_folders
from tests.model.tiny import change_json, make_model
from triolet.kernels.cpu.gemm.packing import pack_linear
from triolet.model.backends.cpu import plan
from triolet.model.backends.cpu.decoder import CpuDecoder
from triolet.model.backends.quant_method import QUANT_METHODS, UNQUANTIZED
from triolet.model.loading.model import load_model
from triolet.model.loading.options import LoadOptions

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES: dict[str, Any] = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}


def load(path: Path, **options: Any) -> CpuDecoder:
    model = load_model(str(path), LoadOptions(**options)).model
    assert isinstance(model, CpuDecoder)
    return model


@pytest.mark.parametrize(("name", "variant"), each_on_some_variants(["gptq-4", "awq", "w8a8"]))
def test_experts_that_are_kept_and_converted_side_by_side_have_the_bits_of_converted_ones(
    name: str, variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cpp = compiled(variant)
    monkeypatch.setattr(plan, "library", lambda: cpp)
    plain, quantized = make_model("qwen2-moe", tmp_path / "plain", **SIZES), tmp_path / "quantized"
    write_folders(plain, quantized, *FORMATS[name])
    leave_plain(plain, quantized, "experts.1.down_proj", "experts.2.gate_proj", "experts.2.up_proj")
    converting = attrs.evolve(UNQUANTIZED, pack=pack_linear)
    monkeypatch.setitem(QUANT_METHODS, None, converting)
    with caplog.at_level("INFO", "triolet.model.loading"):
        kept = prompt_and_decodes(load(quantized, dtype="float32"))
    count = re.search(r"of the (\d+) quantised weights of quantized, (\d+) are kept", caplog.text)
    assert count is not None and count[1] == count[2]
    monkeypatch.setitem(QUANT_METHODS, None, attrs.evolve(converting, keeps_blocks=False))
    assert kept.equal(prompt_and_decodes(load(quantized, dtype="float32")))


def leave_plain(plain: Path, quantized: Path, *modules: str) -> None:
    """Store some modules of a quantised folder as they are in the plain one."""
    weights, stored = (load_file(folder / "model.safetensors") for folder in (plain, quantized))
    marks = tuple(f".{module}." for module in modules)
    whole = {name: weight for name, weight in weights.items() if any(mark in name for mark in marks)}
    others = {name: part for name, part in stored.items() if not any(mark in name for mark in marks)}
    assert whole and len(others) < len(stored)
    save_file(others | whole, quantized / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(("dtype", "quantization"), WAYS)
@pytest.mark.parametrize(("name", "variant"), each_on_some_variants(["gptq-4", "w8a8"]))
def test_a_shared_expert_beside_one_of_zeros_has_the_bits_of_a_dense_block(
    name: str,
    variant: str,
    dtype: str,
    quantization: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpp = compiled(variant)
    monkeypatch.setattr(plan, "library", lambda: cpp)
    plain, dense = make_model("hunyuan", tmp_path / "plain", tie_word_embeddings=False), tmp_path / "dense"
    write_folders(plain, dense, *FORMATS[name])
    mixed = make_model(
        "hunyuan-moe", tmp_path / "mixed", num_experts=1, moe_topk=1, tie_word_embeddings=False
    )
    weights = mixed / "model.safetensors"
    routers = {key: weight for key, weight in load_file(weights).items() if ".gate.wg." in key}
    save_file(
        with_shared_expert(load_file(dense / "model.safetensors")) | routers,
        weights,
        metadata={"format": "pt"},
    )
    change_json(mixed / "config.json", quantization_config=FORMATS[name][1])
    right, found = (
        prompt_and_decodes(load(path, dtype=dtype, quantization=quantization)) for path in (dense, mixed)
    )
    assert found.isfinite().all()
    assert found.equal(right)


def with_shared_expert(dense: Tensors) -> Tensors:
    """The tensors of a dense model, with its blocks as shared experts beside an expert that gives zeros."""
    mixed: Tensors = {}
    for name, tensor in dense.items():
        mixed[name.replace(".mlp.", ".mlp.shared_mlp.")] = tensor
        if ".mlp." in name:
            is_scale = name.endswith(("scale", "scales"))
            mixed[name.replace(".mlp.", ".mlp.experts.0.")] = (
                torch.zeros_like(tensor) if is_scale else tensor.clone()
            )
    return mixed
