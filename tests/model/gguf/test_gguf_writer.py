"""A GGUF file that the program writes is the one that llama.cpp's converter would write.

The right file is made by `tiny_gguf`, which takes names, permutations and sums from gguf-py and the converter, and
nothing from the program.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from click.testing import CliRunner

from tests.model.gguf import tiny_gguf
from tests.model.gguf.test_gguf_models import FAMILIES, model_of, more_keys
from tests.model.gguf.test_gguf_tokenizer import (
    add_byte_level,
    add_sentencepiece,
    loaded,
    sentencepiece,
    texts,
    written,
)
from tests.model.tiny import change_json, make_model
from triolet import nano
from triolet.cli import main
from triolet.cli.models.commands import WRITTEN_FORMATS as OFFERED
from triolet.errors import UnsupportedModel
from triolet.model.architectures.families import parse_decoder_config
from triolet.model.gguf.config import read_decoder_config, read_gguf_defaults
from triolet.model.gguf.file import GgufFile
from triolet.model.gguf.tokenizer import SPLITS
from triolet.model.gguf.write_tokenizer import written_tokenizer
from triolet.model.loading.model import load_model
from triolet.model.quantize import WRITTEN_FORMATS, write_quantized

SETTINGS = {"general.name", "general.file_type", "general.quantization_version"}


def contents(path: Path) -> tuple[dict[str, Any], dict[str, tuple[str, bytes]]]:
    reader = gguf.GGUFReader(path)
    keys = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    return keys, {each.name: (each.tensor_type.name, each.data.tobytes()) for each in reader.tensors}


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family in ("llama-plain", "qwen3-moe") else [pytest.mark.slow])
        for family in (*FAMILIES, "smollm", "gemma", "mixtral")
    ],
)
def test_tensors_and_keys_are_those_of_the_converter(family: str, tmp_path: Path) -> None:
    # Widths that divide into blocks, which random experts' and heads' of three need not.
    widths = {"qwen3-moe": {"moe_intermediate_size": 64}, "smollm": {"hidden_size": 96}}.get(family, {})
    folder = model_of(family, tmp_path / "folder", **widths)
    kind = "Q4_1" if family == "qwen3" else "Q8_0"
    made = write_quantized(folder, tmp_path / "ours.gguf", f"gguf:{kind}", name="tiny")
    right = tiny_gguf.write_gguf(folder, tmp_path / "right.gguf", "Q8_0", metadata=more_keys(family))
    keys, tensors = contents(tmp_path / "ours.gguf")
    right_keys, right_tensors = contents(right)
    assert tensors.keys() == right_tensors.keys()
    for name, tensor in tensors.items():
        # The head, here the embedding, keeps more bits than the others.
        if kind == "Q8_0" or name == "token_embd.weight" or tensor[0] == "F32":
            assert tensor == right_tensors[name], name
        else:
            assert tensor[0] == kind, name
    assert sum(made.values()) == len(tensors)
    config = json.loads((folder / "config.json").read_text())
    for key in right_keys.keys() - SETTINGS:
        assert keys[key] == pytest.approx(right_keys[key]), key
    assert keys["general.architecture"] == tiny_gguf.ARCHITECTURES[config["model_type"]]


def test_values_are_within_half_a_step_of_the_originals(tmp_path: Path) -> None:
    folder = model_of("llama-plain", tmp_path / "folder")
    write_quantized(folder, tmp_path / "ours.gguf", "gguf:Q4_0", name="tiny")
    right = tiny_gguf.write_gguf(folder, tmp_path / "right.gguf", "F32")
    whole = {each.name: each for each in gguf.GGUFReader(right).tensors}
    for each in gguf.GGUFReader(tmp_path / "ours.gguf").tensors:
        if each.tensor_type.name == "Q4_0":
            wanted = whole[each.name].data.reshape(-1, 32)
            found = gguf.dequantize(each.data, each.tensor_type).reshape(-1, 32)
            # The largest value of 32 is 8 steps; one of the other sign may be rounded down by a whole step.
            assert (np.abs(found - wanted) <= np.abs(wanted).max(axis=1, keepdims=True) / 8 * 1.01).all()


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "attention_factor": 0.75,
}


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("phi3-longrope", {"pad_token_id": 0}),
        ("qwen2-yarn", {"use_sliding_window": False}),
        ("qwen2-yarn", {"use_sliding_window": False, "rope_parameters": YARN}),
    ],
)
def test_rotary_scaling_is_written(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    folder = make_model(family, tmp_path / "folder", **overrides)
    write_quantized(folder, tmp_path / "ours.gguf", "gguf:Q8_0", name="tiny")
    right = parse_decoder_config(json.loads((folder / "config.json").read_text()), folder)
    found = read_decoder_config(GgufFile.open(tmp_path / "ours.gguf"))
    for ours, theirs in zip(found.layers, right.layers, strict=True):
        assert ours.rope is not None and theirs.rope is not None
        assert ours.rope.frequencies == pytest.approx(theirs.rope.frequencies)
        assert ours.rope.magnitude == pytest.approx(theirs.rope.magnitude)


def test_a_model_that_a_file_cannot_express_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    windows = make_model("qwen2", tmp_path / "qwen2")
    learned = make_model("gpt2", tmp_path / "gpt2")
    for folder, said in (
        (windows, "its layers would be another"),
        (learned, "GPT2LMHeadModel cannot be written"),
    ):
        with pytest.raises(UnsupportedModel, match=said):
            write_quantized(folder, tmp_path / "out.gguf", "gguf:Q8_0", name="tiny")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpt2", "qwen2"]


# --------------------------------------------------------------------------------------- tokenizers


def many_texts() -> list[str]:
    """Five thousand strings: lines, mixtures of scripts, and pieces of both side by side."""
    generator, lines = random.Random(3), texts()
    cut = [
        "".join(line[generator.randrange(len(line) + 1) :] for line in generator.sample(lines, 2))
        for _ in range(5000 - len(lines))
    ]
    return [*lines, *cut]


@pytest.mark.parametrize(
    ("pre", "strings"),
    [
        ("llama3", texts),
        ("llama", texts),
        *(pytest.param(pre, many_texts, marks=pytest.mark.slow) for pre in (*SPLITS, "nano", "llama")),
    ],
)
def test_a_written_tokenizer_gives_the_tokens_of_the_original(
    pre: str, strings: Callable[[], list[str]], tmp_path: Path
) -> None:
    folder = model_of("llama-plain", tmp_path / "folder", vocab_size=2560)
    if pre == "nano":
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(nano.PATH / name, folder)
    else:

        def fill(writer: gguf.GGUFWriter) -> None:
            if pre == "llama":
                add_sentencepiece(writer)
            else:
                add_byte_level(writer, pre)

        original = loaded(written(tmp_path / "original.gguf", fill))
        original.backend.save(str(folder / "tokenizer.json"))
        settings = {**original.template_tokens, "tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    write_quantized(folder, tmp_path / "ours.gguf", "gguf:Q8_0", name="tiny")
    keys, _ = contents(tmp_path / "ours.gguf")
    # Files carry a whole tokenizer.json only where no name says how texts are cut.
    assert ("tokenizer.huggingface.json" in keys) == (pre == "nano")
    assert keys["tokenizer.ggml.model"] == {"nano": "huggingface", "llama": "llama"}.get(pre, "gpt2")
    right, found = loaded(folder).backend, loaded(tmp_path / "ours.gguf").backend
    some = strings()
    for adds in (False, True):
        ids = [each.ids for each in right.encode_batch_fast(some, add_special_tokens=adds)]
        assert [each.ids for each in found.encode_batch_fast(some, add_special_tokens=adds)] == ids
    assert found.decode_batch(ids) == right.decode_batch(ids)


def test_a_score_is_the_rank_of_the_merge_that_makes_the_token(tmp_path: Path) -> None:
    tokens, scores, _ = sentencepiece()
    original = loaded(written(tmp_path / "original.gguf", add_sentencepiece))
    form = written_tokenizer(original, vocab_size=len(tokens), eos_token_ids=(2,), architecture="llama")
    ours = form.scores or ()
    learnt = [index for index, token in enumerate(tokens) if scores[index] and len(token) > 1]
    assert sorted(learnt, key=lambda index: -ours[index]) == sorted(learnt, key=lambda index: -scores[index])


def test_ends_of_answers_and_sampling_defaults_are_written(tmp_path: Path) -> None:
    folder = model_of("llama-plain", tmp_path / "folder", with_tokenizer=True)
    defaults = {"eos_token_id": [257, 3, 5], "temperature": 0.5, "top_k": 7}
    change_json(folder / "generation_config.json", **defaults)
    write_quantized(folder, tmp_path / "ours.gguf", "gguf:Q8_0", name="tiny")
    found = read_gguf_defaults(GgufFile.open(tmp_path / "ours.gguf"))
    assert (set(found.eos_token_ids), found.temperature, found.top_k) == ({257, 3, 5}, 0.5, 7)
    assert load_model(str(tmp_path / "ours.gguf")).generates


def test_the_chat_template_for_tools_is_written(tmp_path: Path) -> None:
    folder = model_of("llama-plain", tmp_path / "folder", with_tokenizer=True)
    templates = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools[0].name }}"}
    named = [{"name": name, "template": text} for name, text in templates.items()]
    change_json(folder / "tokenizer_config.json", chat_template=named)
    write_quantized(folder, tmp_path / "ours.gguf", "gguf:Q8_0", name="tiny")
    found = loaded(tmp_path / "ours.gguf")
    assert (found.template_source, found.tool_template_source) == tuple(templates.values())


# -------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    "is_told", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["text", "own-answers"]
)
def test_the_command_writes_a_model_and_reports_its_loss(is_told: bool, tmp_path: Path) -> None:
    out, text = tmp_path / "nano.gguf", tmp_path / "text.txt"
    text.write_text("One day a cat saw a bird. The bird was red, and the cat was happy. " * 4)
    command = ["quantize", "triolet-nano", str(out), "--format", "gguf:q8_0", "--json"]
    command += ["--text", str(text)] if is_told else []
    result = CliRunner().invoke(main, command, catch_exceptions=False)
    facts = json.loads(result.stdout)
    assert facts["tensors"] == {"Q8_0": 71, "F32": 21}
    assert facts["bytes_after"] == out.stat().st_size < 0.6 * facts["bytes_before"]
    assert facts["perplexity_after"] == pytest.approx(facts["perplexity_before"], rel=0.02)
    assert 0 < facts["divergence_nats"] < 0.002 and facts["same_likeliest_token"] > 0.95
    again = CliRunner().invoke(main, command)
    assert (again.exit_code, "OUT must not exist" in again.stderr) == (2, True)


def test_the_name_of_a_gguf_file_must_say_so_before_it_is_written(tmp_path: Path) -> None:
    out = tmp_path / "nano"
    result = CliRunner().invoke(main, ["quantize", "triolet-nano", str(out), "--format", "gguf:q8_0"])
    assert result.exit_code == 2
    assert f"OUT must end in .gguf for the format gguf:Q8_0; got {out}" in result.stderr
    assert not out.exists()


def test_the_formats_that_the_command_offers_are_those_that_can_be_written() -> None:
    assert OFFERED == WRITTEN_FORMATS
