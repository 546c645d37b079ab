"""Models with states in place of keys and values: what their engines are told, and what they refuse by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.model.tiny import make_model
from triolet.config.engine import EngineConfig
from triolet.errors import ConfigError
from triolet.model.architectures.decoder_config import read_config
from triolet.model.architectures.families import parse_decoder_config
from triolet.model.loading.runner import load_runner
from triolet.model.parallel.cuts import Part


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("granite-hybrid-dense", tmp_path_factory.mktemp("hybrid"))


def load(folder: Path, **fields: Any) -> Any:
    _, info = load_runner(EngineConfig(model=str(folder), device="cpu", **fields), lambda _: None)
    return info


def test_blocks_are_as_long_as_their_states_are_large_unless_their_size_is_given(folder: Path) -> None:
    info = load(folder)
    assert (info.backend, info.soft_prompts) == ("native", None)
    # 256 bytes of keys and values per token; three layers with two states of 2 * 160 and 8 * 16 * 16 numbers each
    assert info.block_size == 256
    assert load(folder, max_model_len=50).block_size == 64
    assert load(folder, block_size=8).block_size == 8


def test_a_state_may_be_the_inputs_of_a_convolution_alone(tmp_path: Path) -> None:
    # Two layers with two states of 2 * 64 numbers each take as much as 8 tokens; 16 is the smallest choice.
    assert load(make_model("lfm2", tmp_path)).block_size == 16


def test_a_model_of_states_alone_has_room_for_any_length_in_a_few_blocks(tmp_path: Path) -> None:
    folder = make_model("mamba2", tmp_path)
    info = load(folder, num_kv_blocks=4)
    assert (info.block_size, info.cache_windows) == (2048, (2,))
    assert info.max_model_len == info.max_position == 2**20
    # A row keeps two blocks, and a step's chunk takes as many as it has tokens for.
    assert load(folder, max_num_seqs=3, max_num_batched_tokens=4096).num_kv_blocks == 2 * 3 + 2


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"speculative": "ngram"}, "speculative must be none for GraniteMoeHybridForCausalLM"),
        ({"kv_pool_bytes": 10**6}, "kv_pool_bytes must be left out for GraniteMoeHybridForCausalLM"),
        ({"kv_store": "store"}, "kv_store must be left out for GraniteMoeHybridForCausalLM"),
        ({"enable_lora": True}, "enable_lora must be false for GraniteMoeHybridForCausalLM"),
        ({"quantization": "int8"}, "quantization must be none for this model"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_a_state_does_not_allow_yet_is_refused_by_name(
    fields: dict[str, Any], named: str, folder: Path
) -> None:
    with pytest.raises(ConfigError, match=named):
        load(folder, **fields)


def test_a_recurrent_model_is_not_cut_into_ranks(folder: Path) -> None:
    config = parse_decoder_config(read_config(folder), folder)
    with pytest.raises(ConfigError, match="tensor_parallel_size must be 1 for GraniteMoeHybridForCausalLM"):
        Part(rank=0, size=2).check(config)
