"""Folders with rounded integers are written as compressed-tensors lays them out.

The right integers are computed by numpy, and placed in words by `writers`, without the program.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.model.quantized.test_quantized_folders import tokens_of
from tests.model.quantized.writers import packed
from tests.model.tiny import change_json, make_model
from triolet.errors import ModelError, UnsupportedModel
from triolet.model.folder.checkpoint import Checkpoint
from triolet.model.folder.pooling_config import read_pooling_config
from triolet.model.quantize import write_quantized
from triolet.model.quantized import writer
from triolet.model.quantized.checkpoint import open_quantized

WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
FORMS = {"w4a16": (4, 128), "w8a8": (8, None), "int8": (8, None), "int4": (4, 32)}


def by_hand(weight: np.ndarray[Any, np.dtype[np.float32]], bits: int, size: int | None) -> Any:
    """Integers and scales by compressed-tensors' formula for symmetric integers, in float32."""
    groups = weight.reshape(len(weight), -1, size or weight.shape[1])
    scales = np.abs(groups).max(axis=2) / np.float32((2**bits - 1) / 2)
    integers = np.clip(np.round(groups / scales[:, :, None]), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return integers.astype(np.int64).reshape(weight.shape), scales


@pytest.mark.parametrize(
    "form", ["w4a16", "w8a8", *(pytest.param(form, marks=pytest.mark.slow) for form in ("int8", "int4"))]
)
def test_integers_and_scales_are_those_of_the_formula(form: str, tmp_path: Path) -> None:
    folder = make_model("qwen3", tmp_path / "plain", **WIDE, tie_word_embeddings=False, with_tokenizer=True)
    out = tmp_path / "written"
    made = write_quantized(folder, out, form, name="tiny")
    plain, stored, (bits, size) = (
        load_file(folder / "model.safetensors"),
        load_file(out / "model.safetensors"),
        FORMS[form],
    )
    linear = [name for name in plain if name.endswith("proj.weight")]
    assert made == {f"int{bits}": len(linear), "as they were": len(plain) - len(linear)}
    for name, weight in plain.items():
        if name not in linear:
            assert stored.pop(name).equal(weight)
            continue
        integers, scales = by_hand(weight.numpy(), bits, size)
        module = name.removesuffix(".weight")
        assert np.array_equal(stored.pop(f"{module}.weight_scale").numpy(), scales)
        if form == "w8a8":
            assert np.array_equal(stored.pop(name).numpy(), integers)
        else:
            assert stored.pop(f"{module}.weight_packed").equal(packed(integers + 2 ** (bits - 1), bits))
            assert stored.pop(f"{module}.weight_shape").tolist() == list(weight.shape)
    assert not stored
    config = json.loads((out / "config.json").read_text())
    section = config.pop("quantization_config")
    assert config == json.loads((folder / "config.json").read_text())
    (group,) = section["config_groups"].values()
    assert (section["quant_method"], section["ignore"]) == ("compressed-tensors", ["lm_head"])
    assert (group["weights"]["num_bits"], group["weights"]["group_size"]) == (bits, size)
    assert (group["input_activations"] is not None) == (form == "w8a8")
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


@pytest.mark.slow
async def test_a_written_folder_gives_the_tokens_of_its_rounded_weights(tmp_path: Path) -> None:
    folder = make_model("llama-plain", tmp_path / "plain", **WIDE)
    write_quantized(folder, tmp_path / "written", "int4", name="tiny")
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("proj.weight"):
            integers, scales = by_hand(weight.numpy(), 4, 32)
            spread = np.repeat(scales, 32, axis=1)
            weights[name] = torch.from_numpy(integers.astype(np.float32) * spread)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert await tokens_of(tmp_path / "written") == await tokens_of(folder)


@pytest.mark.parametrize("form", ["w4a16", pytest.param("int8", marks=pytest.mark.slow)])
def test_scales_are_rounded_before_the_integers(form: str, tmp_path: Path) -> None:
    folder = make_model("mistral", tmp_path / "plain", **WIDE, dtype=torch.bfloat16)
    change_json(folder / "config.json", dtype="bfloat16")
    write_quantized(folder, tmp_path / "written", form, name="tiny")
    with safe_open(tmp_path / "written" / "model.safetensors", framework="pt") as stored:
        scale = stored.get_tensor("model.layers.0.mlp.down_proj.weight_scale")
    assert scale.dtype is torch.bfloat16
    config = json.loads((tmp_path / "written" / "config.json").read_text())
    found = open_quantized(Checkpoint.open(tmp_path / "written"), config, tmp_path)
    name = "model.layers.0.mlp.down_proj.weight"
    plain = load_file(folder / "model.safetensors")[name].float()
    steps = scale.float().repeat_interleave(plain.shape[1] // scale.shape[1], dim=1)
    # Half a step is the loss of rounding; the largest value lies half a step beyond the last integer, and the scale's
    # own rounding adds 2**-9 of at most half the number of steps.
    room = 0.5 + 2 ** (FORMS[form][0] - 1) * 2.0**-8
    assert ((found.read(name) - plain).abs() <= room * steps).all()


def test_a_large_model_is_written_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model("llama-plain", tmp_path / "plain", **WIDE)
    monkeypatch.setattr(writer, "_FILE_BYTES", 100_000)
    write_quantized(folder, tmp_path / "several", "int8", name="tiny")
    monkeypatch.undo()
    write_quantized(folder, tmp_path / "one", "int8", name="tiny")
    assert len(list((tmp_path / "several").glob("model-*-of-*.safetensors"))) > 2
    several, one = (Checkpoint.open(tmp_path / name) for name in ("several", "one"))
    assert several.tensors.keys() == one.tensors.keys()
    assert all(several.read_raw(name).equal(one.read_raw(name)) for name in one.tensors)


def test_the_chat_template_for_tools_is_copied(tmp_path: Path) -> None:
    folder = make_model("llama-plain", tmp_path / "plain", **WIDE)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    write_quantized(folder, tmp_path / "written", "int8", name="tiny")
    copied = tmp_path / "written" / "additional_chat_templates" / "tool_use.jinja"
    assert copied.read_text() == "{{ tools }}"


def test_the_folders_that_modules_json_names_are_copied(tmp_path: Path) -> None:
    folder = make_model("llama-plain", tmp_path / "plain", **WIDE)
    modules = [
        {"idx": idx, "type": kind, "path": path}
        for idx, (kind, path) in enumerate(
            [
                ("Transformer", ""),
                ("Pooling", "1_Pooling"),
                ("Dense", "further/2_Dense"),
                ("Normalize", "3_None"),
            ]
        )
    ]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    files = {
        "1_Pooling/config.json": json.dumps({"pooling_mode": "mean"}),
        "further/2_Dense/config.json": json.dumps({"in_features": 128, "out_features": 2}),
        "further/2_Dense/model.safetensors": "weights",
        "onnx/model.onnx": "the same weights in another layout",
    }
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    out = tmp_path / "written"
    write_quantized(folder, out, "int8", name="tiny")
    copied = {str(path.relative_to(out)) for path in out.glob("*/**/*") if path.is_file()}
    assert copied == files.keys() - {"onnx/model.onnx"}
    assert all((out / path).read_text(encoding="utf-8") == files[path] for path in copied)
    found = read_pooling_config(out, {"vocab_size": 1}, "LlamaForCausalLM", "auto")
    assert found is not None
    assert found.method == "MEAN"


@pytest.mark.parametrize("form", ["int8", "w8a8"])
def test_the_gate_of_a_shared_expert_stays_what_it_is(form: str, tmp_path: Path) -> None:
    folder = make_model("qwen2-moe", tmp_path / "plain", moe_intermediate_size=64, mlp_only_layers=[])
    write_quantized(folder, tmp_path / "written", form, name="tiny")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "written"))
    config = json.loads((tmp_path / "written" / "config.json").read_text())
    ignored = config["quantization_config"]["ignore"]
    for layer in range(3):
        for name in ("gate", "shared_expert_gate"):
            module = f"model.layers.{layer}.mlp.{name}"
            assert after[f"{module}.weight"].equal(before[f"{module}.weight"])
            assert module in ignored
    assert len(ignored) == 7  # the head is the seventh


def test_what_cannot_be_written_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    narrow = make_model("llama-plain", tmp_path / "narrow")
    transposed = make_model("gpt2", tmp_path / "gpt2")
    broken = make_model("llama-plain", tmp_path / "broken", **WIDE)
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][3, 5] = float("inf")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    cases: list[tuple[Path, type[ModelError], str]] = [
        (narrow, UnsupportedModel, "must have a multiple of 128 inputs for this format; got 96"),
        (transposed, UnsupportedModel, "stores its layers transposed"),
        (broken, UnsupportedModel, "'model.layers.0.mlp.up_proj.weight' must be finite"),
    ]
    for folder, error, said in cases:
        with pytest.raises(error, match=said):
            write_quantized(folder, tmp_path / "out", "w4a16", name="tiny")
    assert {path.name for path in tmp_path.iterdir()} == {"narrow", "gpt2", "broken"}
