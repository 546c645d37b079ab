"""A model in a GGUF file computes what transformers computes with the weights that it reads from the same file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import attrs
import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tests.kernels.cpu_variants import compiled
from tests.model.gguf.tiny_gguf import write_gguf
from tests.model.paged import PagedDriver
from tests.model.tiny import VOCAB_SIZE, make_model
from triolet.errors import ConfigError, ModelFileError, UnsupportedModel, WeightsMismatch
from triolet.kernels.cpu.gemm.packing import pack_linear
from triolet.model.architectures.rope import Rope
from triolet.model.backends.cpu.decoder import CpuDecoder
from triolet.model.backends.quant_method import QUANT_METHODS, UNQUANTIZED
from triolet.model.gguf.config import read_decoder_config
from triolet.model.gguf.file import GgufFile
from triolet.model.loading.model import load_model
from triolet.model.loading.options import LoadOptions

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_GREEDY = 64
PROMPT = torch.randint(0, VOCAB_SIZE, (30,), generator=torch.Generator().manual_seed(1)).tolist()


# What the files of a family cannot say is left out of the models: a window of Qwen's, Gemma's score scale.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama-plain": {},
    "mistral": {},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {},
    "qwen3-moe": {"mlp_only_layers": []},
    "phi3": {"pad_token_id": 0},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {"query_pre_attn_scalar": 32},
    "gpt-oss": {"swiglu_limit": 7.0},
}
# k-quants take rows of 256 values;
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}


def model_of(family: str, path: Path, **overrides: Any) -> Path:
    return make_model(family, path, **{**FAMILIES.get(family, {}), **overrides})


def more_keys(family: str) -> Any:
    def add(writer: gguf.GGUFWriter) -> None:
        if family == "gemma3":
            writer.add_sliding_window_pattern(2)
        if family == "gpt-oss":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(4.0)
            writer.add_rope_scaling_orig_ctx_len(64)

    return add


def with_weights_of(path: Path, folder: Path) -> Any:
    """transformers' model with the folder's configuration and the weights that transformers reads from the file."""
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    named = model
    if config.model_type == "mistral":  # which GGUF files do not tell from Llama; the names are the same
        settings = {key: value for key, value in config.to_dict().items() if key != "model_type"}
        named = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    if config.model_type == "gpt_oss":  # transformers 5.23 knows other names than the converter's
        model.load_state_dict(gpt_oss_tensors(path), strict=True)
        return model
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=named)["tensors"]
    absent, unknown = model.load_state_dict(tensors, strict=False)
    assert not unknown and set(absent) <= ({"lm_head.weight"} if config.tie_word_embeddings else set())
    model.tie_weights()
    return model


def gpt_oss_tensors(path: Path) -> dict[str, Any]:
    """The tensors of a file, dequantised by gguf-py, under transformers' names: the converter's steps backwards."""
    read = {
        each.name: torch.from_numpy(gguf.dequantize(each.data, each.tensor_type).copy())
        for each in gguf.GGUFReader(path).tensors
    }
    around = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    inside = {
        "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "ffn_gate_inp": "mlp.router",
    }  # fmt: skip
    found: dict[str, Any] = {}
    for name, tensor in read.items():
        stem, _, kind = name.rpartition(".")
        if stem in around:
            found[f"{around[stem]}.{kind}"] = tensor
            continue
        _, layer, part = stem.split(".")
        prefix = f"model.layers.{layer}."
        ending = "_bias" if kind == "bias" else ""
        if part in inside:
            found[f"{prefix}{inside[part]}.{kind}"] = tensor
        elif part == "attn_sinks":
            found[f"{prefix}self_attn.sinks"] = tensor
        elif part == "ffn_down_exps":
            found[f"{prefix}mlp.experts.down_proj{ending}"] = tensor.mT if kind == "weight" else tensor
        elif part == "ffn_gate_exps":
            up = read[name.replace("gate", "up")]
            both = torch.stack([tensor, up], dim=2).flatten(1, 2)
            found[f"{prefix}mlp.experts.gate_up_proj{ending}"] = both.mT if kind == "weight" else both
    return found


@torch.inference_mode()
def generated(model: Any) -> list[int]:
    ids = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=NUM_GREEDY, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    tokens: list[int] = ids[0, len(PROMPT) :].tolist()
    assert len(set(tokens)) > NUM_GREEDY // 8, "the model repeats itself, and would hide a wrong position"
    return tokens


def ours(path: Path, **options: Any) -> list[int]:
    return PagedDriver(load_model(str(path), LoadOptions(dtype="float32", **options)).model).greedy(
        PROMPT, NUM_GREEDY, chunk=7
    )


def test_the_method_of_a_gguf_file_may_be_named_and_another_is_refused(tmp_path: Path) -> None:
    path = write_gguf(model_of("llama-plain", tmp_path), tmp_path / "model.gguf", "Q8_0")
    assert ours(path, quantization="gguf") == ours(path)
    with pytest.raises(
        ConfigError, match=r"^quantization must be gguf or left out for model.gguf, which is in g"
    ):
        load_model(str(path), LoadOptions(quantization="awq"))


# The types themselves are compared bit for bit; here one of them for each family, and all for one family.
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param(
            family, kind, marks=[] if kind == "Q8_0" or family == "llama-plain" else [pytest.mark.slow]
        )
        for family in FAMILIES
        for kind in ("F32", "Q8_0", "Q4_0", *(["MXFP4"] if family == "gpt-oss" else []))
    ],
)
def test_greedy_tokens_are_those_of_transformers_with_the_same_file(
    family: str, kind: str, tmp_path: Path
) -> None:
    folder = model_of(family, tmp_path, **({"moe_intermediate_size": 64} if "moe" in family else {}))
    path = write_gguf(folder, tmp_path / "model.gguf", kind, metadata=more_keys(family))
    assert ours(path) == generated(with_weights_of(path, folder))


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
@torch.inference_mode()
def test_logits_of_gemma_are_those_of_transformers_with_the_same_file(family: str, tmp_path: Path) -> None:
    folder = model_of(family, tmp_path)
    path = write_gguf(folder, tmp_path / "model.gguf", "Q8_0", metadata=more_keys(family))
    right = with_weights_of(path, folder)(torch.tensor([PROMPT])).logits[0, -1]
    found = PagedDriver(load_model(str(path), LoadOptions(dtype="float32")).model).once(PROMPT)[-1]
    assert (found.flatten() - right).abs().max() < 1e-5


@pytest.mark.parametrize(
    "family", ["llama-plain", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "qwen3"))]
)
def test_mixtures_of_k_quants_give_the_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    folder = model_of(family, tmp_path, **WIDE)
    path = write_gguf(folder, tmp_path / "model.gguf", "Q4_K", other_kind="Q6_K", metadata=more_keys(family))
    assert ours(path) == generated(with_weights_of(path, folder))


@pytest.mark.parametrize("family", [*FAMILIES, "smollm", "gemma", "mixtral"])
def test_a_file_with_float32_weights_gives_the_tokens_of_the_folder_that_it_was_made_from(
    family: str, tmp_path: Path
) -> None:
    folder = model_of(family, tmp_path)
    path = write_gguf(folder, tmp_path / "model.gguf", metadata=more_keys(family))
    assert ours(path) == ours(folder)


def test_the_cpp_decoder_runs_files_as_it_runs_folders(tmp_path: Path) -> None:
    compiled()
    folder = model_of("qwen3", tmp_path)
    path = write_gguf(folder, tmp_path / "model.gguf", "Q8_0")
    assert isinstance(load_model(str(path), LoadOptions(dtype="bfloat16")).model, CpuDecoder)


def test_a_model_in_several_parts_is_the_model_in_one(tmp_path: Path) -> None:
    folder = model_of("llama-plain", tmp_path)
    whole = write_gguf(folder, tmp_path / "whole.gguf", "Q8_0")
    write_gguf(folder, tmp_path / "split.gguf", "Q8_0", split_max_tensors=9)
    parts = sorted(tmp_path.glob("split-*.gguf"))
    assert len(parts) > 2
    assert ours(parts[0]) == ours(parts[-1]) == ours(whole)


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def llama3_divisors(head_dim: int) -> list[float]:
    """What llama.cpp's converter writes to `rope_freqs`."""
    divisors = []
    for dimension in range(0, head_dim, 2):
        wavelength = 2 * math.pi * 10_000.0 ** (dimension / head_dim)
        if wavelength < 32 / 4:
            divisors.append(1.0)
        elif wavelength > 32 / 1:
            divisors.append(8.0)
        else:
            smooth = (32 / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / 8 + smooth))
    return divisors


def test_rotary_factors_of_llama_3_in_a_tensor_are_those_of_its_config(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path, rope_parameters=LLAMA3)

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.array(llama3_divisors(16), dtype=np.float32))

    path = write_gguf(folder, tmp_path / "model.gguf", metadata=add)
    assert ours(path) == ours(folder)
    assert ours(path) != ours(write_gguf(folder, tmp_path / "without.gguf"))


@pytest.mark.parametrize(("family", "kind"), [("llama-linear", "linear"), ("qwen2-yarn", "yarn")])
def test_rotary_scaling_in_the_metadata_is_that_of_the_config(family: str, kind: str, tmp_path: Path) -> None:
    folder = make_model(family, tmp_path)
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
        if "original_max_position_embeddings" in rope:
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])

    path = write_gguf(folder, tmp_path / "model.gguf", metadata=add)
    assert ours(path) == ours(folder)
    assert ours(path) != ours(write_gguf(folder, tmp_path / "without.gguf"))


@pytest.mark.parametrize("names_the_type", [True, False])
def test_two_tensors_of_factors_are_longrope_whether_or_not_a_key_names_it(
    names_the_type: bool, tmp_path: Path
) -> None:
    folder = make_model("phi3-longrope", tmp_path)
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]

    def add(writer: gguf.GGUFWriter) -> None:
        if names_the_type:
            writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        writer.add_rope_scaling_orig_ctx_len(128)
        for length in ("short", "long"):
            factors = np.array(rope[f"{length}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)

    path = write_gguf(folder, tmp_path / "model.gguf", metadata=add)
    for longest in (None, 200):
        assert ours(path, max_model_len=longest) == ours(folder, max_model_len=longest)


def rope_of(tmp_path: Path, tensors: tuple[str, ...] = (), **keys: str | float) -> Rope:
    """Rotary positions of a file with these keys of rope.scaling, and tensors of ones."""

    def add(writer: gguf.GGUFWriter) -> None:
        for key, value in keys.items():
            name = f"llama.rope.scaling.{key}"
            if isinstance(value, str):
                writer.add_string(name, value)
            elif isinstance(value, int):
                writer.add_uint32(name, value)
            else:
                writer.add_float32(name, value)
        for name in tensors:
            writer.add_tensor(name, np.ones(8, np.float32))

    path = write_gguf(make_model("llama-plain", tmp_path), tmp_path / "model.gguf", metadata=add)
    rope = read_decoder_config(GgufFile.open(path)).layers[0].rope
    assert rope is not None
    return rope


PLAIN = [10_000.0 ** (-pair / 8) for pair in range(8)]
"""Frequencies of a head of 16 without any scaling."""


def test_divisors_in_a_tensor_are_multiplied_by_the_linear_factor(tmp_path: Path) -> None:
    rope = rope_of(tmp_path, ("rope_freqs.weight",), type="linear", factor=4.0)
    assert rope.frequencies == pytest.approx([frequency / 4 for frequency in PLAIN])
    assert rope.magnitude == 1.0


@pytest.mark.parametrize(("keys", "stretch"), [({}, 1), ({"type": "none"}, 1), ({"factor": 4.0}, 4)])
@pytest.mark.parametrize("tensors", [(), ("rope_freqs.weight",)])
def test_an_attention_factor_counts_whatever_the_scaling(
    keys: dict[str, Any], stretch: int, tensors: tuple[str, ...], tmp_path: Path
) -> None:
    rope = rope_of(tmp_path, tensors, attn_factor=0.5, **keys)
    assert rope.frequencies == pytest.approx([frequency / stretch for frequency in PLAIN])
    assert rope.magnitude == 0.5


@pytest.mark.parametrize(
    ("keys", "magnitude"),
    [
        # YaRN's own: 0.1 ln 4 + 1.
        ({}, 1.138629436),
        ({"yarn_ext_factor": 1.0}, 1.138629436),
        ({"attn_factor": 0.5}, 0.569314718),
        # llama.cpp's converter writes the attention_factor of config.json, which is in place of YaRN's own.
        ({"yarn_attn_factor": 1.2}, 1.2),
        ({"yarn_attn_factor": 1.0}, 1.0),
        ({"yarn_attn_factor": 1.2, "attn_factor": 0.5}, 0.6),
    ],
)
def test_the_attention_factor_of_yarn_is_the_whole_one(
    keys: dict[str, Any], magnitude: float, tmp_path: Path
) -> None:
    rope = rope_of(tmp_path, type="yarn", factor=4.0, original_context_length=128, **keys)
    assert rope.magnitude == pytest.approx(magnitude)


def test_an_extrapolation_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"llama\.rope\.scaling\.yarn_ext_factor must be 1; got 0\.5"):
        rope_of(tmp_path, type="yarn", factor=4.0, yarn_ext_factor=0.5)


@pytest.mark.parametrize(
    ("tensors", "kind"),
    [
        (("rope_freqs.weight",), "yarn"),
        (("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"), "longrope"),
        (("rope_factors_short.weight",), "none"),
        (("rope_factors_short.weight", "rope_factors_long.weight"), "linear"),
    ],
)
def test_a_tensor_of_factors_that_no_rule_uses_is_refused(
    tensors: tuple[str, ...], kind: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=rf"{tensors[0]}' must be absent where .* is '{kind}'; got"):
        rope_of(tmp_path, tensors, type=kind, factor=4.0)


@pytest.mark.parametrize(("family", "architecture"), [("phi3-longrope", "phi3"), ("llama-plain", "llama")])
def test_a_window_of_0_is_no_window(family: str, architecture: str, tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_uint32(f"{architecture}.attention.sliding_window", 0)

    path = write_gguf(make_model(family, tmp_path), tmp_path / "model.gguf", metadata=add)
    config = read_decoder_config(GgufFile.open(path))
    assert [layer.sliding_window for layer in config.layers] == [None] * len(config.layers)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantization_applies_to_the_weights_of_a_file(quantization: str, tmp_path: Path) -> None:
    compiled()
    folder = model_of("llama-plain", tmp_path, hidden_size=64, intermediate_size=128)
    path = write_gguf(folder, tmp_path / "model.gguf")
    assert ours(path, quantization=quantization) == ours(folder, quantization=quantization)


def test_auto_is_the_dtype_of_the_matrices_and_bfloat16_for_quantised_ones(tmp_path: Path) -> None:
    folder = model_of("llama-plain", tmp_path)
    dtypes = {
        kind: load_model(str(write_gguf(folder, tmp_path / f"{kind}.gguf", kind))).model.spec.dtype
        for kind in ("F32", "F16", "BF16", "Q8_0")
    }
    assert dtypes == {
        "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "Q8_0": torch.bfloat16
    }  # fmt: skip


def test_the_log_says_what_becomes_of_the_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    compiled()
    mixed = write_gguf(model_of("llama-plain", tmp_path), tmp_path / "mixed.gguf", "Q8_0", other_kind="Q5_1")
    path = write_gguf(model_of("llama-plain", tmp_path), tmp_path / "model.gguf", "Q8_0")
    with caplog.at_level("INFO", "triolet.model.loading"):
        load_model(str(path))
        assert "its weights, Q8_0, are kept" in caplog.text
        load_model(str(mixed))
        assert "its weights, Q8_0, are kept; Q5_1, Q8_0, are converted to torch.bfloat16" in caplog.text
        load_model(str(path), LoadOptions(quantization="int8"))
        assert "its weights, Q8_0, are converted to torch.bfloat16 and then int8" in caplog.text


@pytest.mark.parametrize("family", ["llama-plain", "qwen3"])
def test_a_model_with_kept_weights_has_the_bits_of_the_converted_one(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled()
    folder = model_of(family, tmp_path, **WIDE)
    other = "Q6_K" if family == "qwen3" else "Q8_0"
    path = write_gguf(folder, tmp_path / "model.gguf", "Q4_K", other_kind=other, metadata=more_keys(family))
    # Plain float32 products, with tiles too: those of blocks and of what is not in blocks have the same bits.
    plain = attrs.evolve(UNQUANTIZED, pack=pack_linear)
    monkeypatch.setitem(QUANT_METHODS, None, plain)
    kept = load_model(str(path), LoadOptions(dtype="float32")).model
    monkeypatch.setitem(QUANT_METHODS, None, attrs.evolve(plain, keeps_blocks=False))
    whole = load_model(str(path), LoadOptions(dtype="float32")).model
    assert isinstance(kept, CpuDecoder) and isinstance(whole, CpuDecoder)
    assert kept.num_bytes < whole.num_bytes / 2
    assert PagedDriver(kept).once(PROMPT).equal(PagedDriver(whole).once(PROMPT))
    assert PagedDriver(kept).greedy(PROMPT, 8) == PagedDriver(whole).greedy(PROMPT, 8)


def test_in_bfloat16_kept_weights_are_nearer_to_float32_than_converted_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled()
    folder = model_of("qwen3", tmp_path, **WIDE)
    path = write_gguf(folder, tmp_path / "model.gguf", "Q4_K", other_kind="Q6_K")

    def logits(dtype: str) -> torch.Tensor:
        return PagedDriver(load_model(str(path), LoadOptions(dtype=dtype)).model).once(PROMPT).float()

    right, kept = logits("float32"), logits("bfloat16")
    monkeypatch.setitem(QUANT_METHODS, None, attrs.evolve(UNQUANTIZED, keeps_blocks=False))
    converted = logits("bfloat16")
    assert (kept - right).norm() < min(0.02 * right.norm(), (converted - right).norm())


def test_progress_ends_with_the_bytes_of_the_files_tensors(tmp_path: Path) -> None:
    path = write_gguf(model_of("llama-plain", tmp_path), tmp_path / "model.gguf", "Q4_0")
    reports: list[Any] = []
    load_model(str(path), on_progress=reports.append)
    assert reports[-1].done_bytes == reports[-1].total_bytes < path.stat().st_size


@pytest.mark.parametrize(("number", "method"), [(None, "LAST"), (1, "MEAN"), (2, "CLS"), (3, "LAST")])
def test_embeddings_are_made_of_the_tokens_that_the_file_names(
    number: int | None, method: str, tmp_path: Path
) -> None:
    def metadata(writer: gguf.GGUFWriter) -> None:
        if number is not None:
            writer.add_pooling_type(gguf.PoolingType(number))

    path = write_gguf(model_of("llama-plain", tmp_path), tmp_path / "model.gguf", metadata=metadata)
    pooler = load_model(str(path), LoadOptions(convert="embed")).pooler
    assert pooler is not None
    assert pooler.info.method == method


def test_a_way_to_make_embeddings_that_is_not_known_is_refused(tmp_path: Path) -> None:
    folder = model_of("llama-plain", tmp_path)
    path = write_gguf(
        folder,
        tmp_path / "model.gguf",
        metadata=lambda writer: writer.add_pooling_type(gguf.PoolingType.RANK),
    )
    with pytest.raises(ModelFileError, match=r"llama\.pooling_type must be 1 \(mean\)"):
        load_model(str(path), LoadOptions(convert="embed"))


# ------------------------------------------------------------------------------------------- refused


def refused(tmp_path: Path, family: str = "llama-plain", **add: Any) -> str:
    folder = model_of(family, tmp_path)

    def metadata(writer: gguf.GGUFWriter) -> None:
        for key, value in add.items():
            name = f"llama.{key.replace('__', '.')}"
            writer.kv_data[0].pop(name, None)
            match value:
                case bool():
                    writer.add_bool(name, value)
                case float():
                    writer.add_float32(name, value)
                case str():
                    writer.add_string(name, value)
                case _:
                    writer.add_uint32(name, value)

    path = write_gguf(folder, tmp_path / "model.gguf", metadata=metadata)
    with pytest.raises((ModelFileError, UnsupportedModel, WeightsMismatch)) as raised:
        load_model(str(path))
    return str(raised.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("logit_scale", 2.0, "llama.logit_scale must be absent or zero; got 2.0"),
        ("attention__causal", False, "llama.attention.causal must be true"),
        ("attention__value_length", 8, "llama.attention.value_length must be that of the keys"),
        ("rope__dimension_count", 8, "llama.rope.dimension_count must be the size of a head"),
        ("rope__scaling__type", "spiral", "rope.scaling.type must be one of none, linear, yarn, longrope"),
        (
            "block_count",
            2**31,
            "llama.block_count must be at most the number of tensors (30); got 2147483648",
        ),
        ("context_length", 2**31, "llama.context_length must be at most 16777216; got 2147483648"),
        ("rope__freq_base", 0.0, "llama.rope.freq_base must be a number greater than 1; got 0.0"),
        ("block_count", 0, "llama.block_count must be an integer of at least 1; got 0"),
        ("block_count", 4, "blk.3.attn_norm.weight"),
        ("attention__head_count", "four", "llama.attention.head_count must be an integer"),
        ("attention__head_count_kv", 3, "must be a divisor"),
        ("embedding_length", 32, "token_embd.weight must be"),
        ("feed_forward_length", 95, "blk.0.ffn_gate.weight must be (95, 64); got (96, 64)"),
        (
            "expert_count",
            2,
            "llama.expert_count must be at most the number of experts in a tensor (0); got 2",
        ),
    ],
)
def test_metadata_that_does_not_fit_is_refused_by_key(
    key: str, value: Any, message: str, tmp_path: Path
) -> None:
    assert message in refused(tmp_path, **{key: value})


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        UnsupportedModel, match=r"general\.architecture must be one of llama, .*; got 'mamba'"
    ):
        load_model(str(path))


def test_a_length_beyond_the_context_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    path = write_gguf(model_of("llama-plain", tmp_path), tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match="max_model_len must be at most 256 tokens for this model"):
        load_model(str(path), LoadOptions(max_model_len=257))
