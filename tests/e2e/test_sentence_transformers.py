"""Embeddings compared with sentence-transformers, which also writes the folders: pooling, dense layers, norms.

sentence-transformers needs scipy and scikit-learn, and is not part of the dev extra: without it these tests are
skipped. `pip install sentence-transformers` beside the dev extra runs them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

import triolet
from tests.model.tiny import make_model
from tests.model.tiny_encoders import make_encoder, write_word_tokenizer
from triolet import Engine, SamplingParams
from triolet.core.request.request import FinishReason

sentence_transformers = pytest.importorskip("sentence_transformers", exc_type=ImportError)
pytestmark = pytest.mark.slow

LENGTHS = (1, 2, 5, 20, 20, 20, 38, 9, 3, 31, 4, 4, 17, 58, 6, 25)
TEXTS = [
    " ".join(f"w{(7 * place + 3 * index) % 60}" for place in range(n)) for index, n in enumerate(LENGTHS)
]
LONG = TEXTS[13]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def write_folder(family: str, mode: str, path: Path) -> Any:
    """Write a random model as sentence-transformers saves it, and return what it loads from there."""
    modules = sentence_transformers.sentence_transformer.modules
    plain = path / "plain"
    if family == "qwen3":
        make_model("qwen3", plain)
        write_word_tokenizer(plain)
    else:
        make_encoder(family, plain)
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 64, **special}
    (plain / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    transformer = modules.Transformer(str(plain))
    width = transformer.get_embedding_dimension()
    parts = [transformer, modules.Pooling(width, mode)]
    torch.manual_seed(3)
    if family == "gemma":  # the shape of EmbeddingGemma: up, down, norm
        identity = torch.nn.Identity()
        parts += [modules.Dense(width, 96, bias=False, activation_function=identity)]
        parts += [modules.Dense(96, width, bias=False, activation_function=identity)]
    model = sentence_transformers.SentenceTransformer(modules=[*parts, modules.Normalize()], device="cpu")
    model.save(str(path / "saved"), create_model_card=False)  # a card asks the hub
    if family == "qwen3":  # published folders of Qwen3-Embedding keep the head, and so also generate
        for name in ("config.json", "model.safetensors"):
            shutil.copy(plain / name, path / "saved" / name)
    return sentence_transformers.SentenceTransformer(str(path / "saved"), device="cpu")


def check(found: Sequence[Sequence[float]], expected: torch.Tensor) -> None:
    vectors = torch.tensor([list(each) for each in found])
    assert (vectors - expected).abs().max() <= 1e-5
    assert (vectors.norm(dim=1) - 1).abs().max() <= 1e-6


async def check_all(engine: Engine, expected: torch.Tensor) -> None:
    outputs = await engine.embed(TEXTS)
    check([output.outputs.embedding for output in outputs], expected)


async def kill_after(engine: Engine, num_steps: int) -> None:
    steps = engine.statistics().steps
    while engine.statistics().steps < steps + num_steps:  # noqa: ASYNC110
        await trio.sleep(0.001)
    process_id = engine.model_info.process_id
    assert process_id is not None
    os.kill(process_id, signal.SIGKILL)


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("bert", "cls"),
        ("bert", "mean"),
        ("xlm-roberta", "mean"),
        ("xlm-roberta", "cls"),
        ("modernbert", "mean"),
        ("gemma", "mean"),
    ],
)
async def test_an_encoder_equals_sentence_transformers_alone_and_batched(
    family: str, mode: str, tmp_path: Path
) -> None:
    oracle = write_folder(family, mode, tmp_path)
    expected = torch.from_numpy(oracle.encode(TEXTS))
    async with triolet.open_engine(model=str(tmp_path / "saved"), dtype="float32", runner="thread") as engine:
        for row in (0, 3, 13):
            check([(await engine.embed(TEXTS[row])).outputs.embedding], expected[row : row + 1])
        await check_all(engine, expected)


async def test_an_encoder_equals_sentence_transformers_after_a_crash(tmp_path: Path) -> None:
    oracle = write_folder("bert", "cls", tmp_path)
    expected = torch.from_numpy(oracle.encode(TEXTS))
    async with triolet.open_engine(
        model=str(tmp_path / "saved"),
        dtype="float32",
        runner="process",
        max_num_seqs=4,
        max_num_batched_tokens=64,
    ) as engine:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill_after, engine, 3)
            await check_all(engine, expected)
        assert engine.statistics().num_restarts == 1


async def test_a_decoder_equals_sentence_transformers_beside_text_in_chunks_cached_and_after_a_crash(
    tmp_path: Path,
) -> None:
    oracle = write_folder("qwen3", "lasttoken", tmp_path)
    expected = torch.from_numpy(oracle.encode(TEXTS))
    async with triolet.open_engine(
        model=str(tmp_path / "saved"),
        dtype="float32",
        runner="process",
        max_num_seqs=8,
        max_num_batched_tokens=16,
        num_kv_blocks=200,
        convert="embed",
    ) as engine:
        check([(await engine.embed(LONG)).outputs.embedding], expected[13:14])  # in chunks of 16 tokens
        again = await engine.embed(LONG)
        assert again.num_cached_tokens > 0
        check([again.outputs.embedding], expected[13:14])
        alone = [(await engine.complete(text, GREEDY)).outputs[0].token_ids for text in TEXTS[:4]]
        beside: dict[int, Sequence[int]] = {}

        async def generate(row: int) -> None:
            beside[row] = (await engine.complete(TEXTS[row], GREEDY)).outputs[0].token_ids

        async with trio.open_nursery() as nursery:
            for row in range(4):
                nursery.start_soon(generate, row)
            await check_all(engine, expected)
        assert [beside[row] for row in range(4)] == alone
        engine.reset_prefix_cache()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill_after, engine, 3)
            await check_all(engine, expected)
        statistics = engine.statistics()
        assert statistics.num_restarts == 1
        assert statistics.num_requests_ended == {
            FinishReason.STOP: 2 + 2 * len(TEXTS),
            FinishReason.LENGTH: 8,
        }
