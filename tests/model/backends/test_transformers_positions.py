"""The load check of the transformers backend beyond the thresholds of a config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

from tests.model.backends.test_transformers_backend import PROMPT, Sequences, chunks_of, load, save_model
from triolet.errors import UnsupportedModel
from triolet.kernels.attention_metadata import AttentionMetadata
from triolet.kernels.paged_attention import paged_attention
from triolet.model.backends import transformers_attention, transformers_backend
from triolet.model.backends.position_thresholds import (
    MAX_PREFIX,
    SPAN_TOKENS,
    PositionSpan,
    Threshold,
    position_thresholds,
    spans_of,
    uncovered,
)

LONG = 16384
LLAMA4: dict[str, Any] = dict(
    head_dim=16, num_local_experts=2, layer_types=["full_attention"] * 2, no_rope_layers=[1, 0]
)
LONGROPE: dict[str, Any] = dict(
    rope_type="longrope",
    rope_theta=1e4,
    short_factor=[1.0] * 8,
    long_factor=[4.0] * 8,
    original_max_position_embeddings=4096,
)
BOTH_KINDS = ["sliding_attention", "full_attention"]


# ------------------------------------------------------------------------------------------- thresholds and spans


def test_every_whole_number_with_a_name_that_speaks_of_a_length_is_a_threshold() -> None:
    config = {
        "sliding_window": 512,
        "floor_scale": 8192.0,
        "rope_parameters": {"original_max_position_embeddings": 4096, "factor": 32},
        "layer_windows": [256, 512, None, 256],
        "hidden_size": 64,
        "attn_scale": 0.1,
        "use_sliding_window": True,
        "window_kind": "sliding",
        "max_position_embeddings": 16384,
        "attention_chunk_size": 16384,
        "seq_length": 1,
    }
    assert [str(threshold) for threshold in position_thresholds(config, 16384)] == [
        "layer_windows=256",
        "layer_windows=512",
        "sliding_window=512",
        "rope_parameters.original_max_position_embeddings=4096",
        "floor_scale=8192",
        "max_position_embeddings=16384",  # and no chunk as long as the longest sequence, which hides nothing
    ]


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -5, "8192", None, 0.5])
def test_what_is_no_whole_number_is_no_threshold(value: object) -> None:
    assert position_thresholds({"window": value, "nested": {"window": [value]}}, 100) == ()


def test_spans_stand_on_both_sides_of_thresholds_and_at_both_ends() -> None:
    window, also, floor = Threshold("window", 512), Threshold("chunk", 512), Threshold("floor", 100_000)
    assert spans_of([window, also, floor], 131_072) == (
        PositionSpan(0, 0),
        PositionSpan(510, 510, (window, also)),
        PositionSpan(99_998, 8, (floor,)),
        PositionSpan(131_064, 8),
    )


@pytest.mark.parametrize("max_position", [1, 7, 8, 9, 12])
def test_no_span_passes_the_longest_sequence(max_position: int) -> None:
    thresholds = position_thresholds({"window": 5, "floor": max_position}, max_position)
    spans = spans_of(thresholds, max_position)
    assert all(span.end <= max(max_position, SPAN_TOKENS) and span.start >= 0 for span in spans)
    assert sorted(each.field for span in spans for each in span.thresholds) == sorted(
        each.field for each in thresholds
    )


def test_a_window_beyond_the_longest_prefix_is_uncovered_unless_layers_honour_it() -> None:
    window, floor = Threshold("attention_chunk_size", MAX_PREFIX + 9), Threshold("floor", MAX_PREFIX + 9)
    spans = spans_of([Threshold("window", MAX_PREFIX), window, floor], 10**6)
    assert uncovered(spans, frozenset()) == (window,)
    assert uncovered(spans, frozenset({MAX_PREFIX + 9})) == ()


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_temperature_that_grows_with_the_position_is_refused_by_the_name_of_its_field(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    fields = {**LLAMA4, "attention_chunk_size": 4096, "floor_scale": 8192}
    save_model(tmp_path, "Llama4ForCausalLM", max_position_embeddings=LONG, **fields)
    with pytest.raises(UnsupportedModel, match=r"its query differs .* 8190 to 8197 \(floor_scale=8192\)"):
        load(tmp_path, dtype=dtype)


def test_llama4_without_that_temperature_gives_the_tokens_of_generate(tmp_path: Path) -> None:
    own = save_model(tmp_path, "Llama4ForCausalLM", attn_temperature_tuning=False, **LLAMA4)
    sequences, answer = Sequences(load(tmp_path)), list[int]()
    for part in chunks_of(PROMPT, 7):
        logits = sequences.step({"a": part})["a"]
    while len(answer) < 48:
        answer.append(int(logits[-1].argmax()))
        logits = sequences.step({"a": answer[-1:]})["a"]
    prompt = torch.tensor([PROMPT])
    wanted = own.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=48, do_sample=False, eos_token_id=None
    )
    assert answer == wanted[0, len(PROMPT) :].tolist()


def test_frequencies_that_change_with_the_longest_row_are_refused_by_the_name_of_their_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        transformers_backend,
        "longest_position",
        lambda config, _: config.get_text_config().max_position_embeddings,
    )
    save_model(tmp_path, "Olmo2ForCausalLM", max_position_embeddings=LONG, rope_parameters=LONGROPE)
    with pytest.raises(UnsupportedModel, match=r"computes other values over the paged cache .* at positions"):
        load(tmp_path)


def test_a_window_that_cannot_be_reached_and_that_no_layer_asks_for_is_refused_by_name(
    tmp_path: Path,
) -> None:
    fields = {"max_position_embeddings": 200_000, "attention_chunk_size": 100_000}
    save_model(tmp_path, "Olmo2ForCausalLM", **fields)
    with pytest.raises(UnsupportedModel, match="attention_chunk_size=100000, which cannot be checked"):
        load(tmp_path)


# -------------------------------------------------------------------------------- defects that are planted in ours


WINDOW = {"sliding_window": 4096, "max_position_embeddings": LONG}
WITH_WINDOWS: dict[str, tuple[str, dict[str, Any]]] = {
    "starcoder2": ("Starcoder2ForCausalLM", WINDOW),
    "cohere2": ("Cohere2ForCausalLM", {**WINDOW, "layer_types": BOTH_KINDS}),
    "gemma3": (
        "Gemma3ForCausalLM",
        {"sliding_window": 512, "max_position_embeddings": LONG, "head_dim": 16, "layer_types": BOTH_KINDS},
    ),
}


def plant(monkeypatch: pytest.MonkeyPatch, defect: Any) -> None:
    """Put `defect(arguments, metadata, sliding_window) -> (metadata, sliding_window)` before paged attention."""
    original = paged_attention

    def planted(
        query: Tensor, keys: Tensor, values: Tensor, metadata: AttentionMetadata, **options: Any
    ) -> Tensor:
        metadata, options["sliding_window"] = defect(metadata, options["sliding_window"])
        return original(query, keys, values, metadata, **options)

    monkeypatch.setattr(transformers_attention, "paged_attention", planted)


@pytest.mark.parametrize("family", WITH_WINDOWS)
@pytest.mark.parametrize("by", [None, 1, -1])
def test_an_attention_with_another_window_than_the_configs_is_seen(
    family: str, by: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(metadata: AttentionMetadata, window: int | None) -> tuple[AttentionMetadata, int | None]:
        return metadata, None if window is None or by is None else window + by

    architecture, fields = WITH_WINDOWS[family]
    save_model(tmp_path, architecture, **fields)
    plant(monkeypatch, change)
    with pytest.raises(UnsupportedModel, match=f"sliding_window={fields['sliding_window']}.*rounding"):
        load(tmp_path, dtype=torch.bfloat16)  # the dtype with the widest tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_attention_that_mixes_the_rows_of_a_larger_batch_is_seen(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mix(metadata: AttentionMetadata, window: int | None) -> tuple[AttentionMetadata, int | None]:
        if len(metadata.seq_lens) > 2:
            tables = metadata.block_tables.clone()
            tables[0, 0] = tables[-1, 0]
            metadata = attrs.evolve(metadata, block_tables=tables)
        return metadata, window

    save_model(tmp_path, "Starcoder2ForCausalLM", **WINDOW)
    plant(monkeypatch, mix)
    with pytest.raises(UnsupportedModel, match="computes other values over the paged cache"):
        load(tmp_path, dtype=dtype)


def test_an_attention_that_goes_wrong_in_decode_steps_only_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget(metadata: AttentionMetadata, window: int | None) -> tuple[AttentionMetadata, int | None]:
        return metadata, 8 if set(metadata.query_lens_host) == {1} else window

    save_model(tmp_path, "Starcoder2ForCausalLM", **WINDOW)
    plant(monkeypatch, forget)
    with pytest.raises(UnsupportedModel, match="sliding_window=4096"):
        load(tmp_path)


# -------------------------------------------------------------------------------------------- what goes on loading


LOADS: dict[str, tuple[str, dict[str, Any]]] = {
    **WITH_WINDOWS,
    "mistral": ("MistralForCausalLM", WINDOW),
    "phi3, longrope": ("Phi3ForCausalLM", {"max_position_embeddings": LONG, "rope_parameters": LONGROPE}),
    "olmo2, yarn": (
        "Olmo2ForCausalLM",
        {
            "max_position_embeddings": LONG,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
    "llama, dynamic": (
        "LlamaForCausalLM",
        {
            "max_position_embeddings": LONG,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        },
    ),
    "opt, learned positions": (
        "OPTForCausalLM",
        {"ffn_dim": 96, "word_embed_proj_dim": 64, "max_position_embeddings": 2048},
    ),
    "starcoder2, a window that is honoured beyond the longest prefix": (
        "Starcoder2ForCausalLM",
        {"sliding_window": 100_000, "max_position_embeddings": 200_000},
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", LOADS)
def test_a_family_that_is_right_at_every_position_loads_with_few_tokens_computed(
    family: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tokens = 0
    forward = nn.Embedding.forward

    def counted(self: nn.Embedding, ids: Tensor) -> Tensor:
        nonlocal num_tokens
        if self.num_embeddings == 128:  # the vocabulary's, not that of the positions
            num_tokens += ids.numel()
        return forward(self, ids)

    architecture, fields = LOADS[family]
    own = save_model(tmp_path, architecture, **fields)
    monkeypatch.setattr(nn.Embedding, "forward", counted)
    paged = load(tmp_path, dtype=dtype)
    config = own.config.get_text_config().to_dict()
    num_spans = len(spans_of(position_thresholds(config, paged.spec.max_position), paged.spec.max_position))
    assert 2 <= num_spans <= 6
    assert num_tokens == 19 + SPAN_TOKENS * (4 * num_spans + 1)
