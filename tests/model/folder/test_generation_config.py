"""What a folder says about ending and sampling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from triolet.core.request.model_info import GenerationDefaults
from triolet.errors import ModelFileError
from triolet.model.folder.generation_config import read_generation_defaults


def read(
    folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None
) -> GenerationDefaults:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_generation_defaults(folder)


def test_all_that_is_said_is_read(tmp_path: Path) -> None:
    said: dict[str, Any] = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.01}
    said |= {"repetition_penalty": 1.1, "max_new_tokens": 300}
    defaults = read(tmp_path, {"eos_token_id": 1}, {**said, "eos_token_id": [5, 6, 5], "do_sample": True})
    assert defaults == GenerationDefaults(eos_token_ids=(5, 6), **said)


TOKENS = {"4": {"content": "</s>"}, "7": {"content": "<|im_end|>"}, "x": {"content": "</s>"}}


@pytest.mark.parametrize(
    ("settings", "tokenizer", "expected"),
    [
        ({"eos_token": "<|im_end|>", "added_tokens_decoder": TOKENS}, {}, (7, 5, 6)),
        ({"eos_token": {"content": "</s>"}, "added_tokens_decoder": TOKENS}, {}, (4, 5, 6)),
        ({"eos_token": "</s>"}, {"added_tokens": [{"id": 6, "content": "</s>"}]}, (6, 5)),
        ({"eos_token": "</s>"}, {"added_tokens": [{"id": 3, "content": "<s>"}]}, (5, 6)),
        ({"eos_token": None, "added_tokens_decoder": TOKENS}, {}, (5, 6)),
        ({}, {}, (5, 6)),
    ],
)
def test_the_tokenizers_own_end_of_sequence_comes_first_as_in_vllm(
    tmp_path: Path, settings: dict[str, Any], tokenizer: dict[str, Any], expected: tuple[int, ...]
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert read(tmp_path, {}, {"eos_token_id": [5, 6]}).eos_token_ids == expected


def test_the_end_of_sequence_may_be_named_in_the_map_of_special_tokens(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}}')
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [{"id": 6, "content": "</s>"}]}')
    assert read(tmp_path, {}, {"eos_token_id": 5}).eos_token_ids == (6, 5)


def test_a_tokenizer_that_is_not_readable_names_no_end(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{")
    assert read(tmp_path, {}, {"eos_token_id": 5}).eos_token_ids == (5,)


def test_what_is_not_said_is_none(tmp_path: Path) -> None:
    assert read(tmp_path, {}) == GenerationDefaults()
    assert read(tmp_path, {}, {"temperature": None, "eos_token_id": None}) == GenerationDefaults()


def test_eos_ids_that_generation_config_lacks_come_from_config(tmp_path: Path) -> None:
    assert read(tmp_path, {"eos_token_id": 3}, {"temperature": 0.5}).eos_token_ids == (3,)
    assert read(tmp_path, {"text_config": {"eos_token_id": [8, 9]}}).eos_token_ids == (8, 9)


def test_an_eos_id_that_no_file_names_is_that_of_the_config_class(tmp_path: Path) -> None:
    assert read(tmp_path, {"model_type": "llama"}).eos_token_ids == (2,)
    assert read(tmp_path, {"model_type": "llama", "eos_token_id": None}).eos_token_ids == ()
    assert read(tmp_path, {"model_type": "qwen3"}).eos_token_ids == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("eos_token_id", "</s>"),
        ("eos_token_id", [1, None]),
        ("eos_token_id", -1),
        ("temperature", "hot"),
        ("top_k", 1.5),
        ("max_new_tokens", 0),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(field: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=rf"generation_config.json: {field} must be .*; got"):
        read(tmp_path, {}, {field: value})


@pytest.mark.parametrize("wish", [{"temperature": 5.0}, {"top_p": 2.0}, {"repetition_penalty": 0.0}])
def test_a_wish_out_of_its_range_is_an_error_of_the_folder(tmp_path: Path, wish: dict[str, float]) -> None:
    with pytest.raises(ModelFileError, match=rf"generation_config.json: {next(iter(wish))} must be .*, got"):
        read(tmp_path, {}, wish)
