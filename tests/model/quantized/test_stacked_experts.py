"""Folders of gpt-oss in MXFP4 give transformers' weights and tokens, and bad ones are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.utils.quantization_config import Mxfp4Config

from tests.model.paged import PagedDriver
from tests.model.quantized.writers import MXFP4, Tensors, write_mxfp4_folders
from tests.model.tiny import change_json, make_model
from triolet.errors import ModelError, ModelFileError, UnsupportedModel, WeightsMismatch
from triolet.model.folder.checkpoint import Checkpoint
from triolet.model.loading.model import load_model
from triolet.model.loading.options import LoadOptions
from triolet.model.quantize import write_quantized
from triolet.model.quantized.dequantize import mxfp4
from triolet.model.quantized.stacked_experts import open_stacked_experts

EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """The same model with plain experts and with experts in MXFP4."""
    plain, quantized = make_model("gpt-oss", tmp_path / "plain"), tmp_path / "quantized"
    write_mxfp4_folders(plain, quantized)
    return plain, quantized


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_byte_with_every_exponent_is_what_transformers_makes_of_it(dtype: torch.dtype) -> None:
    # [256 exponents, 16 groups, 16 bytes]: each of the 256 bytes under each exponent
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 16)
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(256, 1, 1)
    wanted = convert_moe_packed_tensors(blocks[None], scales[None], dtype=dtype)[0].T
    got = mxfp4(blocks, scales).to(dtype)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(got.view(bits), wanted.contiguous().view(bits))


def test_random_experts_are_bit_for_bit_those_of_transformers(folders: tuple[Path, Path]) -> None:
    _, quantized = folders
    config = json.loads((quantized / "config.json").read_text())
    found = open_stacked_experts(Checkpoint.open(quantized), config, quantized)
    stored = load_file(quantized / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate_up, down = (
            convert_moe_packed_tensors(
                stored[f"{prefix}.{stack}_blocks"], stored[f"{prefix}.{stack}_scales"], dtype=torch.float32
            )
            for stack in ("gate_up_proj", "down_proj")
        )  # each [num_experts, in, out]
        biases = stored[f"{prefix}.gate_up_proj_bias"]
        for expert in range(config["num_local_experts"]):
            name = f"{prefix}.{expert}"
            # Gate and up alternate, as the modelling code takes them apart.
            assert torch.equal(found.read(f"{name}.gate_proj.weight"), gate_up[expert, :, ::2].T)
            assert torch.equal(found.read(f"{name}.up_proj.weight"), gate_up[expert, :, 1::2].T)
            assert torch.equal(found.read(f"{name}.down_proj.weight"), down[expert].T)
            assert torch.equal(found.read(f"{name}.gate_proj.bias"), biases[expert, ::2])
            assert torch.equal(found.read(f"{name}.up_proj.bias"), biases[expert, 1::2])


def test_greedy_tokens_are_those_of_transformers_reading_the_same_folder(
    folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    _, quantized = folders
    with caplog.at_level("INFO", "triolet.model.loading"):
        ours = PagedDriver(load_model(str(quantized), LoadOptions(dtype="float32")).model)
    # 3 layers of 6 experts with gate, up and down
    assert "of the 54 quantised weights of quantized, 0 are kept; the others are converted" in caplog.text
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        quantized,
        dtype=torch.float32,
        quantization_config=Mxfp4Config(dequantize=True),
        attn_implementation="eager",
    )
    prompt = torch.randint(0, 320, (30,), generator=torch.manual_seed(1))
    wanted = model.generate(prompt[None], max_new_tokens=64, do_sample=False, pad_token_id=0)[0, 30:].tolist()
    assert len(set(wanted)) > 8, "the model repeats itself, and would hide a wrong position"
    assert ours.greedy(prompt.tolist(), 64, chunk=7) == wanted


# ---------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda t: t.pop(f"{EXPERTS}.gate_up_proj_scales"), UnsupportedModel, "gate_up_proj_scales.*missing"),
        (lambda t: t.pop(f"{EXPERTS}.down_proj_blocks"), UnsupportedModel, "down_proj_blocks.*missing"),
        (lambda t: t.pop(f"{EXPERTS}.down_proj_bias"), UnsupportedModel, "down_proj_bias.*missing"),
        (lambda t: cut(t, "gate_up_proj_scales", 2), UnsupportedModel, "gate_up_proj_scales.*of shape"),
        (lambda t: cut(t, "down_proj_scales", 0), UnsupportedModel, "down_proj_scales.*of shape"),
        (lambda t: cut(t, "down_proj_blocks", 3), UnsupportedModel, "down_proj_blocks.*of shape"),
        (lambda t: cut(t, "gate_up_proj_bias", 1), UnsupportedModel, "gate_up_proj_bias.*of shape"),
        (
            lambda t: t.update({f"{EXPERTS}.down_proj_scales": t[f"{EXPERTS}.down_proj_scales"].float()}),
            UnsupportedModel,
            "down_proj_scales.*dtype U8",
        ),
        (
            lambda t: t.update({f"{EXPERTS}.down_proj": torch.zeros(6, 96, 64)}),
            UnsupportedModel,
            "experts.down_proj' must be absent beside down_proj_blocks",
        ),
        (
            lambda t: t.update({f"{EXPERTS}.down_proj_blocks": torch.zeros(0, 2**40, 3, 16).byte()}),
            UnsupportedModel,
            "down_proj_blocks.*at least 1",
        ),
        (lambda t: t.pop("model.layers.1.self_attn.sinks"), WeightsMismatch, "layers.1.self_attn.sinks"),
    ],
)
def test_a_tensor_that_is_missing_or_does_not_fit_is_named(
    change: Callable[[Tensors], object], error: type[Exception], match: str, folders: tuple[Path, Path]
) -> None:
    _, quantized = folders
    tensors = load_file(quantized / "model.safetensors")
    change(tensors)
    save_file(tensors, quantized / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(error, match=match):
        load_model(str(quantized))


def cut(tensors: Tensors, part: str, dimension: int) -> None:
    """Take the last one along a dimension away."""
    name = f"{EXPERTS}.{part}"
    size = tensors[name].shape[dimension]
    tensors[name] = tensors[name].narrow(dimension, 0, size - 1).contiguous()


def test_a_truncated_file_is_refused(folders: tuple[Path, Path]) -> None:
    file = folders[1] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelFileError, match="truncated"):
        load_model(str(folders[1]))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "must be mxfp4 for stacked experts; got 'gptq'"),
        ({"num_local_experts": 7}, r"experts\.6\.down_proj"),
        ({"swiglu_limit": "none"}, "swiglu_limit"),
    ],
)
def test_a_setting_that_does_not_fit_is_named(
    changes: dict[str, Any], match: str, folders: tuple[Path, Path]
) -> None:
    change_json(folders[1] / "config.json", **changes)
    with pytest.raises(ModelError, match=match):
        load_model(str(folders[1]))


def test_an_architecture_without_stacks_is_refused_in_mxfp4(tmp_path: Path) -> None:
    folder = make_model("llama-plain", tmp_path / "model")
    change_json(folder / "config.json", quantization_config=MXFP4)
    with pytest.raises(UnsupportedModel, match="'mxfp4'"):
        load_model(str(folder))


def test_stacked_experts_are_not_written_in_a_form_that_cannot_express_them(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match="stacks its experts"):
        write_quantized(folders[0], tmp_path / "out", "w4a16", name="out")
