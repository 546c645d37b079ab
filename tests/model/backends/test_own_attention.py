"""Families whose attention is not exchanged: their own over gathered blocks, held against transformers' cache."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

import triolet
from tests.model.backends.test_transformers_backend import (
    PROMPT,
    Pair,
    Sequences,
    load,
    save_model,
)
from triolet.errors import UnsupportedModel
from triolet.model.backends import own_attention
from triolet.model.backends.own_attention import OwnAttentionModel, groups
from triolet.model.interface import LayerCacheSpec

# name -> (architecture, what its config has beyond SMALL); each is here for something that the others lack.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon": (
        "Falcon",
        dict(multi_query=True, parallel_attn=True, alibi=False),
    ),  # one head of keys and values
    "falcon_alibi": ("Falcon", dict(multi_query=False, parallel_attn=False, alibi=True, bias=True)),
    "stablelm": ("StableLm", {"partial_rotary_factor": 0.5}),
    "bloom": (
        "Bloom",
        dict(n_layer=2, n_head=4, tie_word_embeddings=False, seq_length=128),
    ),  # positions from the attention mask
    "gptj": ("GPTJ", dict(n_embd=64, n_layer=2, n_head=4, n_positions=128, rotary_dim=8)),
    "codegen": ("CodeGen", dict(n_embd=64, n_layer=2, n_head=4, n_positions=128, n_ctx=128, rotary_dim=8)),
    "nemotron": ("Nemotron", {}),  # passes nothing on to the attention function
    "mpt": ("Mpt", dict(d_model=64, n_heads=4, n_layers=2, max_seq_len=128, expansion_ratio=2)),
    "gpt_neo": (  # a window of its own
        "GPTNeo",
        dict(num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=8),
    ),
    "gpt_oss": (  # sinks, and a window that the tests outgrow
        "GptOss",
        dict(head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
    ),
    "llama4": (  # chunks, and scales that grow with the position
        "Llama4",
        dict(
            head_dim=16,
            num_local_experts=2,
            num_experts_per_tok=1,
            attention_chunk_size=8,
            floor_scale=8,
            intermediate_size_mlp=96,
            no_rope_layers=[1, 0],
        ),
    ),
    "diffllama": ("DiffLlama", {}),  # attends twice in a layer
    "doge": ("Doge", {}),  # a mask that depends on the values
}
PLAIN = {"bloom", "falcon", "gpt_oss", "llama4"}
EVERY = [name if name in PLAIN else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """Each family's pair, made when it is first asked for."""
    made: dict[str, Pair] = {}

    def pair(family: str) -> Pair:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            architecture, fields = FAMILIES[family]
            made[family] = Pair(save_model(folder, f"{architecture}ForCausalLM", **fields), load(folder))
        return made[family]

    return pair


# Of the others the logits say as much, which are compared below, in a fraction of the time.
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == "bloom" else pytest.mark.slow) for name in FAMILIES]
)
def test_greedy_tokens_of_chunks_and_decodes_equal_those_of_generate(
    pairs: Callable[[str], Pair], family: str
) -> None:
    pair = pairs(family)
    assert pair.paged.spec.backend == "transformers, own attention"
    greedy, wanted = pair.greedy_and_generated(48)
    assert greedy == wanted
    assert len(set(greedy)) > 1


@pytest.mark.parametrize("family", EVERY)
def test_sequences_of_unlike_length_in_one_step_get_the_logits_of_transformers(
    pairs: Callable[[str], Pair], family: str
) -> None:
    pair = pairs(family)
    dice = random.Random(0)
    texts = {name: PROMPT[start:] for name, start in (("a", 0), ("b", 11), ("c", 22), ("d", 27))}
    sequences = Sequences(pair.paged)
    left = {name: list(text) for name, text in texts.items()}
    got: dict[str, list[torch.Tensor]] = {name: [] for name in texts}
    while left:
        chunks = {
            name: [left[name].pop(0) for _ in range(min(dice.choice((1, 1, 1, 5)), len(left[name])))]
            for name in left
        }
        for name, logits in sequences.step(chunks, num_padding=1).items():
            got[name].append(logits)
        left = {name: text for name, text in left.items() if text}
    for name, text in texts.items():
        with torch.no_grad():
            wanted = pair.own(torch.tensor([text])).logits[0]
        torch.testing.assert_close(torch.cat(got[name]), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("family", "fields", "given", "length"),
    [
        ("bloom", {}, None, 128),
        ("bloom", {"seq_length": None}, 96, 96),
        pytest.param("mpt", {}, None, 128, marks=pytest.mark.slow),
    ],
)
def test_a_model_without_positions_reaches_as_far_as_its_config_or_else_max_model_len_says(
    tmp_path: Path, family: str, fields: dict[str, Any], given: int | None, length: int
) -> None:
    architecture, own = FAMILIES[family]
    save_model(tmp_path, f"{architecture}ForCausalLM", **{**own, **fields})
    assert "max_position_embeddings" not in json.loads((tmp_path / "config.json").read_text())
    assert load(tmp_path, max_model_len=given).spec.max_position == length


def test_a_model_without_a_length_in_its_config_is_refused_without_max_model_len(tmp_path: Path) -> None:
    architecture, own = FAMILIES["bloom"]
    save_model(tmp_path, f"{architecture}ForCausalLM", **{**own, "seq_length": None})
    with pytest.raises(
        UnsupportedModel, match=r"seq_length must be a whole number, or .* max_model_len be given"
    ):
        load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("family", "limit"), [("falcon", 2.0), ("gpt_oss", 2.0), ("bloom", 0.0), ("llama4", 0.0)]
)
def test_models_that_count_positions_in_their_cache_or_mask_decode_one_sequence_at_a_time(
    tmp_path: Path, family: str, limit: float, dtype: torch.dtype
) -> None:
    architecture, fields = FAMILIES[family]
    save_model(tmp_path, f"{architecture}ForCausalLM", **fields)
    paged = load(tmp_path, dtype=dtype)
    assert isinstance(paged, OwnAttentionModel) and paged.max_padding == limit


async def test_an_engine_serves_such_a_model_with_the_tokens_of_generate(
    pairs: Callable[[str], Pair], tmp_path: Path
) -> None:
    own = pairs("falcon").own
    own.save_pretrained(tmp_path)
    answers: dict[int, list[int]] = {}
    # so few blocks that a request is preempted and computed again
    async with triolet.open_engine(
        model=str(tmp_path),
        runner="inline",
        dtype="float32",
        num_kv_blocks=12,
        block_size=4,
        max_model_len=40,
    ) as engine:

        async def ask(length: int) -> None:
            params = triolet.SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
            answers[length] = list((await engine.complete(PROMPT[:length], params)).outputs[0].token_ids)

        async with trio.open_nursery() as nursery:
            for length in (3, 9, 20):
                nursery.start_soon(ask, length)
        assert engine.model_info.backend == "transformers, own attention"
    for length, answer in answers.items():
        prompt = torch.tensor([PROMPT[:length]])
        wanted = own.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
        )
        assert answer == wanted[0, length:].tolist()


def test_a_layer_keeps_what_the_model_gives_to_its_cache(pairs: Callable[[str], Pair]) -> None:
    assert pairs("falcon").paged.spec.cache_layers == (LayerCacheSpec(num_kv_heads=1, head_dim=16),) * 2


def test_blocks_that_were_never_written_do_not_reach_a_padded_row(pairs: Callable[[str], Pair]) -> None:
    pair = pairs("falcon")
    sequences = Sequences(pair.paged)
    for layer in sequences.cache:
        layer.keys.fill_(torch.nan)
        layer.values.fill_(torch.nan)
    sequences.step({"long": PROMPT[:9], "short": PROMPT[:2]})
    logits = sequences.step({"long": PROMPT[9:10], "short": PROMPT[2:3]})
    assert torch.isfinite(logits["short"]).all()


def test_a_model_that_does_not_take_padding_right_decodes_one_sequence_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = save_model(tmp_path, "StableLmForCausalLM")

    class Unmasked(OwnAttentionModel):
        def _arguments(self, *args: Any) -> dict[str, Any]:
            arguments = super()._arguments(*args)
            arguments.pop("attention_mask", None)
            return arguments

    monkeypatch.setattr("triolet.model.backends.transformers_backend.OwnAttentionModel", Unmasked)
    paged = load(tmp_path)
    assert isinstance(paged, OwnAttentionModel) and paged.max_padding == 0
    sequences = Sequences(paged)
    sequences.step({"long": PROMPT[:9], "short": PROMPT[:2]})
    logits = sequences.step({"long": PROMPT[9:10], "short": PROMPT[2:3]})
    with torch.no_grad():
        wanted = own(torch.tensor([PROMPT[:3]])).logits[0, -1:]
    torch.testing.assert_close(logits["short"], wanted, atol=1e-4, rtol=0)


def test_decode_steps_share_a_call_where_none_is_more_than_twice_as_long_as_another() -> None:
    assert groups((1, 5, 1, 1, 1), (300, 9, 150, 301, 8), 2.0) == [[1], [4], [2, 0], [3]]
    assert groups((1, 5, 1), (300, 9, 301), 0.0) == [[1], [0], [2]]
    assert groups((1, 1, 1), (1, own_attention._SHORT, own_attention._SHORT + 1), 1.0) == [[0, 1], [2]]
