"""Quantised model folders give the weights that their format stands for, and bad ones are refused by name.

The weights that a folder must give are computed by its writer, without the program; tokens are compared with
transformers' on a plain folder of the same weights.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import triolet
from tests.kernels.cpu_variants import compiled
from tests.model.paged import PagedDriver
from tests.model.quantized import writers
from tests.model.quantized.writers import Tensors, Writer, write_folders
from tests.model.tiny import change_json, make_model
from tests.source_tree import ROOT
from triolet.errors import ConfigError, ModelError, UnsupportedModel
from triolet.kernels.cpu.gemm.packing import pack_linear
from triolet.model.backends.quant_method import QUANT_METHODS, UNQUANTIZED
from triolet.model.folder.checkpoint import Checkpoint
from triolet.model.loading.model import load_model
from triolet.model.loading.options import LoadOptions
from triolet.model.quantized import methods
from triolet.model.quantized.checkpoint import open_quantized
from triolet.model.quantized.dequantize import unpack
from triolet.model.quantized.stacked_experts import MXFP4

GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
AUTO_ROUND: dict[str, Any] = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": 32,
    "data_type": "int",
    "sym": True,
}
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
FP8 = {"quant_method": "compressed-tensors", "format": "float-quantized"}
BNB4 = {"quant_method": "bitsandbytes", "load_in_4bit": True}


def with_index(writer: Writer) -> Writer:
    """The same layers with an index of groups that was never filled in."""

    def write(dice: np.random.Generator, num_out: int, num_in: int) -> writers.Written:
        tensors, weight = writer(dice, num_out, num_in)
        return {**tensors, "weight_g_idx": torch.full((num_in,), -1, dtype=torch.int32)}, weight

    return write


FORMATS: dict[str, tuple[Writer, dict[str, Any]]] = {
    "gptq-4": (writers.gptq(4, 32), GPTQ),
    "gptq-4-rows": (writers.gptq(4, -1), {**GPTQ, "group_size": -1}),
    "gptq-2": (writers.gptq(2, 16), {**GPTQ, "bits": 2, "group_size": 16}),
    "gptq-3": (writers.gptq(3, 32), {**GPTQ, "bits": 3}),
    "gptq-8": (writers.gptq(8, -1), {**GPTQ, "bits": 8, "group_size": -1}),
    "gptq-act-order": (writers.gptq(4, 32, act_order=True), {**GPTQ, "desc_act": True}),
    "gptq-v2": (writers.gptq(4, 32, version=2), {**GPTQ, "checkpoint_format": "gptq_v2"}),
    "gptq-v2-new-name": (writers.gptq(4, 32, version=2), {**GPTQ, "format": "gptq_v2"}),
    "awq": (writers.awq(32), {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
    "awq-rows": (writers.awq(-1), {"quant_method": "awq", "bits": 4, "group_size": -1, "version": "gemm"}),
    "w4a16": (writers.packed_quantized(4, 32), PACKED),
    "w4a16-asymmetric": (writers.packed_quantized(4, 16, symmetric=False), PACKED),
    "w4a16-order-unset": (with_index(writers.packed_quantized(4, 32)), PACKED),
    "w3a16": (
        writers.packed_quantized(3, 32, symmetric=False),
        {**PACKED, "config_groups": {"group_0": {"weights": {"num_bits": 3, "group_size": 32}}}},
    ),
    "w8a16": (writers.packed_quantized(8, None), PACKED),
    "w8a8": (writers.int_quantized, {**PACKED, "format": "int-quantized"}),
    "fp8-tensor": (writers.float_quantized("tensor"), FP8),
    "fp8-row": (writers.float_quantized("row"), FP8),
    "fp8-one-scale": (
        writers.fp8_tensor,
        {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"},
    ),
    "fp8-block": (
        writers.block_fp8(40),  # divides none of the widths
        {"quant_method": "fp8", "weight_block_size": [40, 40], "activation_scheme": "dynamic"},
    ),
    "auto-round-4": (writers.auto_round(4, 32), {**AUTO_ROUND, "packing_format": "auto_round"}),
    "auto-round-5": (
        writers.auto_round(5, 32),
        {**AUTO_ROUND, "bits": 5, "packing_format": "auto_round:gptqmodel"},
    ),
    "auto-round-gptq": (writers.gptq(4, 32), {**AUTO_ROUND, "packing_format": "auto_round:auto_gptq"}),
    "auto-round-awq": (
        writers.awq(32),
        {**AUTO_ROUND, "quant_method": "intel/auto-round", "packing_format": "auto_round:auto_awq"},
    ),
    "auto-round-fp8": (
        writers.with_input_scale(writers.float_quantized("row")),
        {**AUTO_ROUND, "bits": 8, "group_size": -1, "data_type": "fp", "act_bits": 8},
    ),
    "auto-round-fp8-block": (
        writers.block_fp8(40),
        {**AUTO_ROUND, "bits": 8, "group_size": [40, 40], "data_type": "fp", "act_bits": 8},
    ),
    "fbgemm-fp8": (
        writers.float_quantized("row"),
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
    ),
    "modelopt-fp8": (
        writers.with_input_scale(writers.float_quantized("tensor")),
        {"quant_method": "modelopt", "quant_algo": "FP8"},
    ),
    "modelopt-fp8-row": (
        writers.float_quantized("row"),
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    ),
    "modelopt-nvfp4": (writers.nvfp4(by_modelopt=True), {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "nvfp4": (writers.nvfp4(), {**PACKED, "format": "nvfp4-pack-quantized"}),
    "mxfp4-packed": (writers.mxfp4, {**PACKED, "format": "mxfp4-pack-quantized"}),
    "bnb-nf4": (writers.bnb_4bit("nf4", nested=False), BNB4),
    "bnb-nf4-nested": (writers.bnb_4bit("nf4", nested=True), BNB4),
    "bnb-fp4": (writers.bnb_4bit("fp4", nested=False), BNB4),
    "bnb-int8": (writers.bnb_8bit, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}


def of_modules(fields: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The section of a GPTQ folder with settings of single modules, as GPTQModel writes it."""
    return {**GPTQ, "dynamic": fields}


NEVER_KEPT_ON_GPU = ("bnb", "gptq-2", "gptq-3", "w3a16", "auto-round-5", "modelopt-nvfp4", "nvfp4", "mxfp4")
KEPT_ON_GPU = {name for name in FORMATS if not name.startswith(NEVER_KEPT_ON_GPU)}


@functools.cache
def plain_model(family: str) -> Path:
    """A small model, made once."""
    return make_model(family, Path(tempfile.mkdtemp(), family))


def make_folders(tmp_path: Path, name: str, family: str = "llama-plain") -> tuple[Path, Path]:
    plain, quantized = tmp_path / "plain", tmp_path / "quantized"
    shutil.copytree(plain_model(family), plain)
    write_folders(plain, quantized, *FORMATS[name])
    return plain, quantized


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_bit_for_bit_those_that_the_integers_and_scales_stand_for(
    name: str, tmp_path: Path
) -> None:
    plain, quantized = make_folders(tmp_path, name)
    config = json.loads((quantized / "config.json").read_text())
    found = open_quantized(Checkpoint.open(quantized), config, quantized)
    wanted = load_file(plain / "model.safetensors")
    assert found.tensors.keys() == wanted.keys()
    for tensor, weight in wanted.items():
        assert found.tensors[tensor].shape == tuple(weight.shape)
        read = found.read(tensor)
        assert read.dtype is found.dtype_of(tensor)
        assert torch.equal(read.view(torch.int32), weight.view(torch.int32)), tensor
        assert found.is_packed(tensor) == (name in KEPT_ON_GPU and tensor.endswith("proj.weight"))
        if found.is_packed(tensor):
            assert torch.equal(found.read_packed(tensor).dequantize(), weight)


def check_settings_of_modules(tmp_path: Path, writer: Callable[..., Any], section: dict[str, Any]) -> None:
    """Check a folder of 4 bits in groups of 32, with down projections of 8 in one group and plain value projections.

    Args:
        writer: of a format, by bits and the size of a group.
        section: says so of these modules.
    """
    plain, wide, quantized = tmp_path / "plain", tmp_path / "wide", tmp_path / "quantized"
    shutil.copytree(plain_model("llama-plain"), plain)
    shutil.copytree(plain, wide)
    write_folders(plain, quantized, writer(4, 32), section)
    write_folders(wide, tmp_path / "wide-quantized", writer(8, -1), section, seed=1)
    wanted, other = load_file(plain / "model.safetensors"), load_file(wide / "model.safetensors")
    stored, in_eight = (
        load_file(folder / "model.safetensors") for folder in (quantized, tmp_path / "wide-quantized")
    )
    for name in [name for name in stored if ".down_proj." in name]:
        stored[name] = in_eight[name]
    for name in [name for name in wanted if ".v_proj." in name]:
        module = name.removesuffix(".weight")
        stored = {key: tensor for key, tensor in stored.items() if not key.startswith(module)}
        stored[name] = wanted[name]
    save_file(stored, quantized / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((quantized / "config.json").read_text())
    found = open_quantized(Checkpoint.open(quantized), config, quantized)
    for name in wanted:
        assert torch.equal(found.read(name), (other if ".down_proj." in name else wanted)[name]), name


def test_modules_of_gptq_may_have_settings_of_their_own(tmp_path: Path) -> None:
    # Down projections have 8 bits and one group; values stay what they are.
    section = of_modules(
        {
            "lm_head": {},
            r"-:.*\.v_proj": {},
            r".*\.v_proj": {"bits": 3},  # the first pattern that fits counts
            r"+:.*\.mlp\.down": {"bits": 8, "group_size": -1},
        }
    )
    check_settings_of_modules(tmp_path, writers.gptq, section)


def test_modules_of_auto_round_may_have_settings_of_their_own(tmp_path: Path) -> None:
    section = {
        **AUTO_ROUND,
        "packing_format": "auto_round",
        "extra_config": {
            "lm_head": {},
            "model.layers.0.mlp.down_proj": {"bits": 8, "group_size": -1},
            r".*layers\.0\.mlp\.down.*": {"bits": 3},  # a module's own name counts before patterns
            r".*\.mlp\.down.*": {"bits": 8, "group_size": -1},
            r".*\.v_proj.*": {"bits": 16, "data_type": "fp"},
        },
    }
    check_settings_of_modules(tmp_path, writers.auto_round, section)


async def tokens_of(folder: Path, runner: str = "inline", **fields: Any) -> list[tuple[int, ...]]:
    prompts = [list(range(40)), [9] * 3]
    params = triolet.SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    async with triolet.open_engine(str(folder), runner=runner, dtype="float32", **fields) as engine:
        outputs = [await engine.complete(prompt, params) for prompt in prompts]
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def transformers_tokens(folder: Path) -> list[tuple[int, ...]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for prompt in (list(range(40)), [9] * 3):
        ids = torch.tensor([prompt])
        answer = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=64, max_new_tokens=64
        )
        answers.append(tuple(answer[0, len(prompt) :].tolist()))
    return answers


KEPT = (
    *("gptq-4", "gptq-4-rows", "gptq-v2", "gptq-v2-new-name", "awq", "awq-rows"),
    *("w4a16", "w4a16-order-unset", "w8a16", "w8a8", "auto-round-4", "auto-round-gptq", "auto-round-awq"),
)


SOME = ("gptq-4", "gptq-4-rows", "awq", "w4a16", "w8a8", "gptq-act-order")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in SOME else [pytest.mark.slow]) for name in FORMATS],
)
def test_integers_that_are_kept_give_the_bits_of_the_converted_weights(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled()
    _, quantized = make_folders(tmp_path, name)
    ids = torch.randint(0, 200, (20,), generator=torch.manual_seed(1)).tolist()
    with caplog.at_level("INFO", "triolet.model.loading"):
        kept = PagedDriver(load_model(str(quantized), LoadOptions(dtype="float32")).model)
    count = re.search(r"of the (\d+) quantised weights of quantized, (\d+) are kept", caplog.text)
    assert count is not None
    assert (count[2] == count[1]) if name in KEPT else (count[2] == "0" != count[1])
    converting = attrs.evolve(UNQUANTIZED, keeps_blocks=False, pack=pack_linear)
    monkeypatch.setitem(QUANT_METHODS, None, converting)
    whole = PagedDriver(load_model(str(quantized), LoadOptions(dtype="float32")).model)
    assert name not in KEPT or kept.once(ids).equal(whole.once(ids))
    assert name not in KEPT or kept.greedy(ids, 4) == whole.greedy(ids, 4)


@pytest.mark.parametrize(
    "name",
    [
        "gptq-act-order",
        "awq",
        "fp8-block",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("gptq-4", "gptq-v2", "w4a16", "w8a16", "w8a8", "fp8-tensor", "fp8-row")
        ),
    ],
)
def test_the_decoder_of_a_gpu_keeps_the_words_and_computes_what_the_converted_weights_give(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triolet.model.loading.decoder.can_plan", lambda *_: False)  # as on a GPU
    plain, quantized = make_folders(tmp_path, name)
    ids = torch.randint(0, 200, (20,), generator=torch.manual_seed(1)).tolist()
    expected = PagedDriver(load_model(str(plain), LoadOptions(dtype="float32")).model)
    monkeypatch.setattr("triolet.model.backends.quant_method.INTEGER_DEVICES", ("cpu",))
    with caplog.at_level("INFO", "triolet.model.loading"):
        kept = PagedDriver(load_model(str(quantized), LoadOptions(dtype="float32")).model)
    count = re.search(r"of the (\d+) quantised weights of quantized, (\d+) are kept", caplog.text)
    assert count is not None
    assert count[1] == count[2]
    torch.testing.assert_close(kept.once(ids), expected.once(ids))


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("gptq-act-order", "llama-plain"),
        pytest.param("awq", "qwen2", marks=pytest.mark.slow),
        pytest.param("w4a16", "mistral", marks=pytest.mark.slow),
        pytest.param("fp8-block", "qwen3", marks=pytest.mark.slow),
        pytest.param("auto-round-4", "qwen3", marks=pytest.mark.slow),
        pytest.param("fbgemm-fp8", "llama-plain", marks=pytest.mark.slow),
        pytest.param("modelopt-nvfp4", "llama-plain", marks=pytest.mark.slow),
    ],
)
async def test_greedy_tokens_equal_those_of_transformers_on_the_dequantised_weights(
    name: str, family: str, tmp_path: Path
) -> None:
    plain, quantized = make_folders(tmp_path, name, family)
    assert await tokens_of(quantized) == transformers_tokens(plain)


@pytest.mark.slow
async def test_a_quantised_folder_runs_in_a_process_and_can_be_rounded_again_on_request(
    tmp_path: Path,
) -> None:
    plain, quantized = make_folders(tmp_path, "gptq-4")
    assert await tokens_of(quantized, "process") == await tokens_of(plain)
    assert await tokens_of(quantized, quantization="int8") == await tokens_of(plain, quantization="int8")


METHODS = [
    ("gptq-4", "gptq"),
    ("awq", "awq"),
    ("w4a16", "compressed-tensors"),
    ("auto-round-awq", "auto-round"),
    ("fbgemm-fp8", "fbgemm_fp8"),
    ("modelopt-fp8", "modelopt"),
    ("fp8-block", "fp8"),
    ("bnb-int8", "bitsandbytes"),
]


@pytest.mark.parametrize(("name", "method"), METHODS)
async def test_the_method_of_a_folder_may_be_named_and_changes_nothing(
    name: str, method: str, tmp_path: Path
) -> None:
    _, quantized = make_folders(tmp_path, name)
    assert await tokens_of(quantized, quantization=method) == await tokens_of(quantized)


@pytest.mark.parametrize(("name", "method"), METHODS)
def test_another_method_than_the_folders_is_refused_with_the_one_that_it_has(
    name: str, method: str, tmp_path: Path
) -> None:
    plain, quantized = make_folders(tmp_path, name)
    for wrong in {one for _, one in METHODS} - {method} | {"mxfp4", "gguf"}:
        rule = f"quantization must be {method} or left out for quantized, which is in {method}; got '{wrong}'"
        with pytest.raises(ConfigError, match=f"^{rule}$"):
            load_model(str(quantized), LoadOptions(quantization=wrong))
    with pytest.raises(
        ConfigError, match=r"^quantization must be none or left out for plain, which is not quan"
    ):
        load_model(str(plain), LoadOptions(quantization=method))


def test_a_cpu_keeps_the_integers_of_a_folder_of_float16_unless_float16_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiled()
    plain, quantized = make_folders(tmp_path, "awq")
    for folder in (plain, quantized):
        change_json(folder / "config.json", dtype="float16")
    dtypes = []
    with caplog.at_level("INFO", "triolet.model.loading"):
        for folder, dtype in ((quantized, "auto"), (quantized, "float16"), (plain, "auto")):
            dtypes.append(load_model(str(folder), LoadOptions(dtype=dtype)).model.spec.dtype)
    assert dtypes == [torch.bfloat16, torch.float16, torch.float16]
    kept = re.findall(r"of the (\d+) quantised weights of quantized, (\d+) are kept", caplog.text)
    assert [int(number) for _, number in kept] == [int(kept[0][0]), 0]


def test_bits_that_lie_across_words_are_found() -> None:
    dice = np.random.default_rng(5)
    for bits in range(1, 9):
        values = dice.integers(0, 2**bits, (3, 64))
        words = writers.packed(values, bits)
        assert unpack(words, bits, 64).tolist() == values.tolist()


def test_the_documentation_says_of_which_formats_some_are_kept() -> None:
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \|[^|]*\| ([^|]*) \|[^|]*\|$", text, re.MULTILINE)
    told = {method: what for method, what in rows if method != "quant_method"}  # but for the headings
    kept = {method for method, what in told.items() if what != "nothing"}
    assert told.keys() == {*methods.FORMATS, MXFP4}
    assert kept == {FORMATS[name][1]["quant_method"].removeprefix("intel/") for name in KEPT}


def test_the_documentation_lists_the_formats_that_are_read() -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    section = page.partition("## Quantised folders")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `([a-z0-9_-]+)` \|", section, re.MULTILINE) == [
        "quant_method",
        *methods.FORMATS,
        MXFP4,
    ]


def cut_off_blocks(folder: Path, section: dict[str, Any]) -> Path:
    """A folder with a matrix of 192 x 192 ones, of which 128 x 128 share a scale in memory: 1, 2, 3 and 4."""
    folder.mkdir()
    tensors = {"a.weight": torch.ones(192, 192).to(torch.float8_e4m3fn)}
    tensors["a.weight_scale"] = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"quantization_config": section}))
    return folder


def with_weights(**scheme: Any) -> dict[str, Any]:
    return {**FP8, "config_groups": {"group_0": {"weights": scheme}}}


@pytest.mark.parametrize(
    "section",
    [
        with_weights(strategy="block", block_structure=[128, 128]),
        with_weights(strategy="block", block_structure="128x128"),
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
    ],
)
def test_the_last_blocks_are_cut_off_where_the_configuration_names_a_block_that_divides_no_side(
    section: dict[str, Any], tmp_path: Path
) -> None:
    folder = cut_off_blocks(tmp_path / "model", section)
    found = open_quantized(Checkpoint.open(folder), {"quantization_config": section}, folder)
    expected = torch.ones(192, 192)
    expected[:128, 128:], expected[128:, :128], expected[128:, 128:] = 2.0, 3.0, 4.0
    assert torch.equal(found.read("a.weight").float(), expected)


def test_scales_that_fit_blocks_of_several_sizes_are_refused_where_none_is_named(tmp_path: Path) -> None:
    folder = cut_off_blocks(tmp_path / "model", FP8)
    with pytest.raises(UnsupportedModel, match=r"'a.weight_scale' must be of a shape that fits one size"):
        open_quantized(Checkpoint.open(folder), {"quantization_config": FP8}, folder)


def test_a_packed_weight_with_a_shorter_last_group_is_refused(tmp_path: Path) -> None:
    section = {**PACKED, "config_groups": {"group_0": {"weights": {"group_size": 128}}}}
    folder = cut_off_blocks(tmp_path / "model", section)
    parts, _ = writers.packed_quantized(4, 96)(np.random.default_rng(0), 64, 192)
    save_file({f"a.{part}": each.contiguous() for part, each in parts.items()}, folder / "model.safetensors")
    with pytest.raises(
        UnsupportedModel, match=r"'a.weight_scale' must be of one column for each whole group"
    ):
        open_quantized(Checkpoint.open(folder), {"quantization_config": section}, folder)


# ---------------------------------------------------------------------------------------------- bad input


def edited(quantized: Path, change: Callable[[Tensors], object]) -> Path:
    tensors = load_file(quantized / "model.safetensors")
    change(tensors)
    save_file(tensors, quantized / "model.safetensors", metadata={"format": "pt"})
    return quantized


LAYER = "model.layers.0.mlp.down_proj"


def state_of(state: Any, text: str = "") -> Tensors:
    """What bitsandbytes has beside a tensor: the JSON of `state`, or a text."""
    data = (text or json.dumps(state)).encode()
    name = f"{LAYER}.weight.quant_state.bitsandbytes__nf4"
    return {name: torch.tensor(list(data), dtype=torch.uint8)}


@pytest.mark.parametrize(
    ("name", "change", "names"),
    [
        ("gptq-4", lambda t: t.pop(f"{LAYER}.scales"), "scales"),
        ("gptq-4", lambda t: t.pop(f"{LAYER}.qzeros"), "qzeros"),
        ("gptq-act-order", lambda t: t.pop(f"{LAYER}.g_idx"), "g_idx"),
        ("gptq-act-order", lambda t: t[f"{LAYER}.g_idx"].fill_(99), "g_idx"),
        ("gptq-4", lambda t: t.update({f"{LAYER}.scales": t[f"{LAYER}.scales"][:2].clone()}), "scales"),
        ("gptq-4", lambda t: t.update({f"{LAYER}.qweight": t[f"{LAYER}.qweight"].float()}), "qweight"),
        ("awq", lambda t: t.update({f"{LAYER}.qzeros": t[f"{LAYER}.qzeros"][:, 1:].clone()}), "qzeros"),
        ("w4a16", lambda t: t[f"{LAYER}.weight_shape"].fill_(7), "weight_shape"),
        ("w4a16", lambda t: t.pop(f"{LAYER}.weight_scale"), "weight_scale"),
        ("w8a8", lambda t: t.update({f"{LAYER}.weight_scale": torch.ones(3, 1)}), "weight_scale"),
        (
            "fp8-block",
            lambda t: t.update({f"{LAYER}.weight_scale_inv": torch.ones(9, 9)}),
            "weight_scale_inv",
        ),
        ("bnb-nf4", lambda t: t.pop(f"{LAYER}.weight.quant_map"), "quant_map"),
        (
            "bnb-nf4",
            lambda t: t[f"{LAYER}.weight.quant_state.bitsandbytes__nf4"].fill_(65),
            "quant_state",
        ),
        ("bnb-nf4", lambda t: t.update({f"{LAYER}.weight.absmax": torch.ones(2)}), "absmax"),
        ("bnb-nf4", lambda t: t.update(state_of(5)), "quant_state"),
        ("bnb-nf4", lambda t: t.update(state_of(None, text="[" * 60_000)), "quant_state"),
        ("bnb-nf4", lambda t: t.update(state_of({"blocksize": 64, "shape": [10**300, 10**300]})), "weight"),
        (
            "bnb-nf4-nested",
            lambda t: t.update(state_of({"blocksize": 64, "shape": [64, 96], "nested_offset": 10**400})),
            "quant_state",
        ),
        ("bnb-int8", lambda t: t.update({f"{LAYER}.SCB": torch.ones(2)}), "SCB"),
        ("fbgemm-fp8", lambda t: t.update({f"{LAYER}.weight_scale": torch.ones(1)}), "weight_scale"),
        ("modelopt-fp8", lambda t: t.update({f"{LAYER}.pre_quant_scale": torch.ones(96)}), "pre_quant_scale"),
        ("modelopt-nvfp4", lambda t: t.pop(f"{LAYER}.weight_scale_2"), "weight_scale_2"),
        ("modelopt-nvfp4", lambda t: t.update({f"{LAYER}.weight_scale": torch.ones(64, 6)}), "weight_scale"),
        ("nvfp4", lambda t: t.update({f"{LAYER}.weight_global_scale": torch.ones(2)}), "weight_global_scale"),
        (
            "nvfp4",
            lambda t: t.update({f"{LAYER}.weight_global_scale": torch.ones(1).half()}),
            "weight_global_scale",
        ),
        (
            "mxfp4-packed",
            lambda t: t.update({f"{LAYER}.weight_scale": t[f"{LAYER}.weight_scale"][:, 1:].clone()}),
            "weight_scale",
        ),
        ("auto-round-5", lambda t: t.pop(f"{LAYER}.qzeros"), "qzeros"),
        ("fp8-tensor", lambda t: t.update({f"{LAYER}.weight": t[f"{LAYER}.weight"][:0].clone()}), "weight"),
    ],
)
def test_a_tensor_that_is_missing_or_does_not_fit_is_named(
    name: str, change: Callable[[Tensors], object], names: str, tmp_path: Path
) -> None:
    _, quantized = make_folders(tmp_path, name)
    with pytest.raises(ModelError, match=rf"{LAYER}\.[a-z_.]*{names}"):
        load_model(str(edited(quantized, change)))


def test_a_block_that_is_longer_than_the_weight_takes_no_memory(tmp_path: Path) -> None:
    folder = cut_off_blocks(tmp_path / "model", BNB4)
    parts, _ = writers.bnb_4bit("nf4", nested=True)(np.random.default_rng(0), 2, 4)
    state = {"blocksize": 2**50, "nested_blocksize": 2**50, "shape": [2, 4], "nested_offset": 0.0037}
    parts["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(
        list(json.dumps(state).encode()), dtype=torch.uint8
    )
    save_file({f"a.{part}": each.contiguous() for part, each in parts.items()}, folder / "model.safetensors")
    found = open_quantized(Checkpoint.open(folder), {"quantization_config": BNB4}, folder)
    nested = parts["weight.nested_quant_map"][parts["weight.absmax"].long()] * parts["weight.nested_absmax"]
    codes = parts["weight.quant_map"]
    high, low = parts["weight"].flatten() >> 4, parts["weight"].flatten() & 15
    expected = codes[torch.stack((high, low), dim=1).flatten().long()] * (nested + 0.0037)
    assert torch.equal(found.read("a.weight"), expected.view(2, 4))


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32, torch.int8])
def test_the_dtype_in_which_bitsandbytes_stores_bytes_changes_nothing(
    storage: torch.dtype, tmp_path: Path
) -> None:
    plain, quantized = make_folders(tmp_path, "bnb-nf4-nested")

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("proj.weight")]:
            tensors[name] = tensors[name].view(-1).view(storage).view(-1, 1)

    edited(quantized, change)
    config = json.loads((quantized / "config.json").read_text())
    found = open_quantized(Checkpoint.open(quantized), config, quantized)
    wanted = load_file(plain / "model.safetensors")
    assert all(torch.equal(found.read(name), weight) for name, weight in wanted.items())


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("gptq-4", "quantize_config.json"),
        ("awq", "quant_config.json"),
        ("modelopt-fp8", "hf_quant_config.json"),
    ],
)
def test_an_early_folder_says_how_it_is_quantised_in_a_file_of_its_own(
    name: str, file: str, tmp_path: Path
) -> None:
    plain, quantized = make_folders(tmp_path, name)
    section = json.loads((quantized / "config.json").read_text())["quantization_config"]
    change_json(quantized / "config.json", quantization_config=None)
    del section["quant_method"]
    if name == "awq":  # as AutoAWQ wrote them
        section = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    (quantized / file).write_text(json.dumps(section))
    # AutoGPTQ's own name of the file.
    (quantized / "model.safetensors").rename(quantized / "gptq_model-4bit-32g.safetensors")
    logits = [
        PagedDriver(load_model(str(folder), LoadOptions(dtype="float32")).model).once(list(range(40)))
        for folder in (plain, quantized)
    ]
    torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("part", ["k_zero_point", "v_zero_point", "q_scale"])
def test_what_rounds_keys_and_values_is_no_part_of_the_model(part: str, tmp_path: Path) -> None:
    _, quantized = make_folders(tmp_path, "w4a16")
    expected = PagedDriver(load_model(str(quantized)).model).once(list(range(40)))
    extra = {f"model.layers.0.self_attn.{part}": torch.zeros(1), f"{LAYER}.output_scale": torch.ones(1)}
    edited(quantized, lambda tensors: tensors.update(extra))
    assert torch.equal(PagedDriver(load_model(str(quantized)).model).once(list(range(40))), expected)


def test_int8_values_of_bitsandbytes_that_lie_in_tiles_are_refused(tmp_path: Path) -> None:
    _, quantized = make_folders(tmp_path, "bnb-int8")
    edited(quantized, lambda tensors: tensors[f"{LAYER}.weight_format"].fill_(2))
    with pytest.raises(UnsupportedModel, match=rf"{LAYER}.weight_format' must be 0, for rows; got 2"):
        load_model(str(quantized))


def test_a_bias_of_zeros_that_the_architecture_does_not_have_changes_nothing(tmp_path: Path) -> None:
    """AutoGPTQ stored one for every module."""
    _, quantized = make_folders(tmp_path, "gptq-4")
    expected = PagedDriver(load_model(str(quantized)).model).once(list(range(40)))
    bias = torch.zeros(64)
    edited(quantized, lambda tensors: tensors.update({f"{LAYER}.bias": bias}))
    assert torch.equal(PagedDriver(load_model(str(quantized)).model).once(list(range(40))), expected)
    bias[3] = 0.5
    edited(quantized, lambda tensors: tensors.update({f"{LAYER}.bias": bias}))
    with pytest.raises(ModelError, match=rf"unused tensors: {LAYER}.bias"):
        load_model(str(quantized))


def test_the_section_may_have_the_name_that_it_had_at_first(tmp_path: Path) -> None:
    _, quantized = make_folders(tmp_path, "w4a16")
    expected = PagedDriver(load_model(str(quantized)).model).once(list(range(40)))
    path = quantized / "config.json"
    config = json.loads(path.read_text())
    section = config.pop("quantization_config")
    del section["quant_method"]
    path.write_text(json.dumps({**config, "compression_config": section}))
    assert torch.equal(PagedDriver(load_model(str(quantized)).model).once(list(range(40))), expected)


def test_layers_that_are_kept_beside_layers_that_are_not_give_what_the_dequantised_ones_give(
    tmp_path: Path,
) -> None:
    """The memory for split inputs was measured by the first layer: products of a long prompt wrote behind its end."""
    plain, quantized, whole = tmp_path / "plain", tmp_path / "quantized", tmp_path / "whole"
    make_model("llama-plain", plain, intermediate_size=2048, max_position_embeddings=1024)
    write_folders(plain, quantized, *FORMATS["w4a16"])
    found = open_quantized(
        Checkpoint.open(quantized), json.loads((quantized / "config.json").read_text()), quantized
    )
    weights = {name: found.read(name).clone() for name in found.tensors}

    def without_mlp(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".mlp." in name]:
            del tensors[name]
        tensors.update({name: weight for name, weight in weights.items() if ".mlp." in name})

    edited(quantized, without_mlp)
    shutil.copytree(quantized, whole)
    save_file(weights, whole / "model.safetensors", {"format": "pt"})
    change_json(whole / "config.json", quantization_config=None)
    tokens = [number % 200 for number in range(800)]
    logits = [
        PagedDriver(load_model(str(folder), LoadOptions(dtype="float32")).model, num_blocks=256).once(tokens)
        for folder in (quantized, whole)
    ]
    torch.testing.assert_close(logits[0], logits[1], atol=1e-3, rtol=1e-3)


def with_rotations(*locations: str) -> dict[str, Any]:
    places = [{"targets": ["Linear"], "location": location} for location in locations]
    return {**PACKED, "transform_config": {"config_groups": {"R1": {"type": "hadamard", "apply": places}}}}


def test_rotations_that_are_in_the_weights_already_change_nothing(tmp_path: Path) -> None:
    writer, _ = FORMATS["w4a16"]
    plain, quantized = tmp_path / "plain", tmp_path / "quantized"
    shutil.copytree(plain_model("llama-plain"), plain)
    write_folders(plain, quantized, writer, with_rotations("weight_input", "weight_output"))
    config = json.loads((quantized / "config.json").read_text())
    found = open_quantized(Checkpoint.open(quantized), config, quantized)
    wanted = load_file(plain / "model.safetensors")
    assert all(found.read(name).equal(weight) for name, weight in wanted.items())


@pytest.mark.parametrize(
    ("section", "match"),
    [
        ({"quant_method": "marlin24"}, r"quant_method must be one of gptq, awq.*'marlin24'"),
        ({**GPTQ, "bits": 5}, "bits must be 2, 3, 4 or 8"),
        ({**GPTQ, "bits": "four"}, "bits must be"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format must be gptq or gptq_v2"),
        ({**GPTQ, "format": "gptq_v3"}, "format must be gptq or gptq_v2"),
        ({**GPTQ, "is_marlin_format": True}, "is_marlin_format must be false"),
        ({**GPTQ, "dynamic": {"(": {}}}, "dynamic must be of regular expressions, which '\\(' is not"),
        ({**GPTQ, "dynamic": {"-:a{9999999999}": {}}}, "dynamic must be of regular expressions"),
        ({**GPTQ, "dynamic": {"+:.*": None}}, "dynamic must be of settings"),
        (
            {**GPTQ, "dynamic": {"lm": {"bits": 5}}},
            r"quantization_config\.dynamic\.lm\.bits must be 2, 3, 4 or 8",
        ),
        ({"quant_method": "awq", "version": "gemv"}, "version must be gemm"),
        ({"quant_method": "awq", "format": "gemv_fast"}, "format must be gemm"),
        ({"quant_method": "awq", "backend": "llm-awq"}, "backend must be another than llm-awq"),
        ({"quant_method": "awq", "bits": 8}, "bits must be 4"),
        ({**PACKED, "format": "marlin-24"}, "format must be one of pack-quantized"),
        (
            {**AUTO_ROUND, "packing_format": "auto_round:llm_compressor"},
            "packing_format must be one of auto, ",
        ),
        ({**AUTO_ROUND, "packing_format": 3}, "packing_format must be a string"),
        ({**AUTO_ROUND, "bits": 9}, "bits must be from 2 to 8; got 9"),
        ({**AUTO_ROUND, "bits": 16}, "bits must be less than 16; got 16"),
        ({**AUTO_ROUND, "bits": 8, "packing_format": "auto_round:auto_awq"}, "bits must be 4; got 8"),
        ({**AUTO_ROUND, "act_bits": 8}, "act_bits must be 16 for packing_format auto; got 8"),
        ({**AUTO_ROUND, "data_type": "mx_fp"}, "data_type must be int for packing_format auto; got 'mx_fp'"),
        ({**AUTO_ROUND, "data_type": "fp"}, "bits must be 8 for packing_format auto_round:fp8; got 4"),
        ({**AUTO_ROUND, "group_size": 0}, "group_size must be an integer of at least 1"),
        ({**AUTO_ROUND, "rotation_config": {"a": 1}}, "rotation_config must be absent"),
        ({**AUTO_ROUND, "extra_config": {"lm_head": 3}}, "extra_config.lm_head must be an object"),
        (
            {**AUTO_ROUND, "extra_config": {"lm_head": None}},
            "extra_config must be of settings, which 'lm_head' has none",
        ),
        (
            {**AUTO_ROUND, "extra_config": {"lm_head": {"bits": 9}}},
            r"quantization_config\.extra_config\.lm_head\.bits must be from 2 to 8; got 9",
        ),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two positive"),
        (
            with_rotations("weight_output", "input"),
            "transform_config must be without rotations of activations",
        ),
        (
            {**PACKED, "transform_config": {"config_groups": {"R3": {"type": "hadamard"}}}},
            "transform_config must be without rotations of activations",
        ),
    ],
)
def test_a_setting_that_is_not_supported_is_named(
    section: dict[str, Any], match: str, tmp_path: Path
) -> None:
    make_model("llama-plain", tmp_path / "model")
    change_json(tmp_path / "model" / "config.json", quantization_config=section)
    with pytest.raises(ModelError, match=match):
        load_model(str(tmp_path / "model"))


def test_a_quantised_folder_of_another_family_is_refused(tmp_path: Path) -> None:
    _, quantized = make_folders(tmp_path, "gptq-4")
    change_json(quantized / "config.json", architectures=["OlmoForCausalLM"], model_type="olmo")
    with pytest.raises(UnsupportedModel, match="quantised"):
        load_model(str(quantized))
