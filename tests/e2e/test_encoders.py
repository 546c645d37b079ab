"""Encoders: embeddings, classification and scores by attention in both directions, compared with transformers."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import trio
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

import triolet
from tests.e2e.server import serve
from tests.model.tiny_encoders import WORDS, add_modules, change_json, make_encoder
from triolet import ClassificationRequestOutput, Engine, PoolingParams
from triolet.compat import LLM, EngineArgs, LLMEngine
from triolet.core.request.request import FinishReason
from triolet.errors import (
    ConfigError,
    InvalidParams,
    PromptTooLong,
    UnsupportedFeature,
    UnsupportedModel,
)

LENGTHS = (1, 2, 5, 20, 20, 20, 38, 9, 3, 31, 4, 4, 17, 62, 6, 25)
TEXTS = [
    " ".join(f"w{(7 * place + 3 * index) % 60}" for place in range(n)) for index, n in enumerate(LENGTHS)
]


def open_encoder(folder: Path, runner: str = "thread", **fields: Any) -> AbstractAsyncContextManager[Engine]:
    settings: dict[str, Any] = {"dtype": "float32", "log_stats": False}
    return triolet.open_engine(model=str(folder), runner=runner, **(settings | fields))


def ids_of(text: str) -> list[int]:
    return [0, *map(WORDS.index, text.split()), 2]


def hidden_states(model: Any, token_ids: Sequence[int]) -> Tensor:
    with torch.no_grad():
        hidden: Tensor = model(input_ids=torch.tensor([list(token_ids)])).last_hidden_state[0]
    return hidden


def difference(found: Any, expected: Tensor) -> float:
    return float((torch.tensor(found) - expected).abs().max())


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("bert", "mean_tokens"),
        ("modernbert", "mean_tokens"),
        pytest.param("xlm-roberta", "cls_token", marks=pytest.mark.slow),
        pytest.param("bert", "cls_token", marks=pytest.mark.slow),
        pytest.param("xlm-roberta", "mean_tokens", marks=pytest.mark.slow),
        pytest.param("modernbert", "cls_token", marks=pytest.mark.slow),
        pytest.param("gemma", "mean_tokens", marks=pytest.mark.slow),
    ],
)
async def test_an_embedding_equals_transformers_alone_and_in_a_batch(
    family: str, mode: str, tmp_path: Path
) -> None:
    model = make_encoder(family, tmp_path)
    dense = ((32, 48), (48, 24)) if family == "gemma" else ()
    add_modules(tmp_path, mode, dense, max_seq_length=64)
    weights = [
        load_file(tmp_path / f"{index}_Dense/model.safetensors")["linear.weight"]
        for index in range(2, 2 + len(dense))
    ]
    async with open_encoder(tmp_path) as engine:
        assert engine.model_info.tasks == ("embed", "token_embed")
        one = await engine.embed(TEXTS[3])
        outputs = await engine.embed(TEXTS)
        assert engine.statistics().steps < 16  # prompts of different lengths, side by side
        [tokens] = await engine.encode_all(
            [TEXTS[2]], PoolingParams(task="token_embed", use_activation=False)
        )
        assert difference(one.outputs.embedding, torch.tensor(outputs[3].outputs.embedding)) <= 1e-6
    for text, output in zip(TEXTS, outputs, strict=True):
        assert list(output.prompt_token_ids) == ids_of(text)
        hidden = hidden_states(model, ids_of(text))
        vector = hidden.mean(dim=0) if mode == "mean_tokens" else hidden[0]
        for weight in weights:
            vector = weight @ vector
        assert difference(output.outputs.embedding, functional.normalize(vector, dim=0)) <= 1e-5
    if not dense:
        assert difference(tokens.outputs.data.tolist(), hidden_states(model, ids_of(TEXTS[2]))) <= 1e-4


@pytest.mark.slow
async def test_a_crash_of_the_runner_costs_no_embedding_and_doubles_none(tmp_path: Path) -> None:
    model = make_encoder("bert", tmp_path)
    async with open_encoder(tmp_path, "process", max_num_seqs=2, max_num_batched_tokens=64) as engine:

        async def kill() -> None:
            steps = engine.statistics().steps
            while engine.statistics().steps < steps + 3:  # noqa: ASYNC110
                await trio.sleep(0.001)
            process_id = engine.model_info.process_id
            assert process_id is not None
            os.kill(process_id, signal.SIGKILL)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill)
            outputs = await engine.embed(TEXTS * 4)
        statistics = engine.statistics()
        assert statistics.num_restarts > 0
        assert statistics.num_requests_ended == {FinishReason.STOP: 4 * len(TEXTS)}
    for text, output in zip(TEXTS * 4, outputs, strict=True):
        vector = functional.normalize(hidden_states(model, ids_of(text))[0], dim=0)
        assert difference(output.outputs.embedding, vector) <= 1e-5


# --------------------------------------------------------------------------------------- heads


async def test_a_cross_encoder_reads_pairs_with_their_token_types(tmp_path: Path) -> None:
    model = make_encoder("bert", tmp_path, "ForSequenceClassification", num_labels=1)
    query, documents = "w1 w2", ["w3", "w4 w5 w6", "w7 w8"]
    expected = []
    for text in documents:
        ids, other = ids_of(query), ids_of(text)[1:]
        types = torch.tensor([[0] * len(ids) + [1] * len(other)])
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids + other]), token_type_ids=types).logits
        expected.append(float(logits[0, 0].sigmoid()))
    async with open_encoder(tmp_path) as engine:
        assert engine.model_info.tasks == ("classify",)
        found = [one.outputs.score for one in await engine.score(query, documents)]
        assert found == pytest.approx(expected, abs=1e-5)
        params = PoolingParams(token_type_start=len(ids_of(query)))
        [output] = await engine.encode_all([ids_of(query) + ids_of("w3")[1:]], params)
        assert output.outputs.data.tolist() == pytest.approx(expected[:1], abs=1e-5)
        with pytest.raises(
            UnsupportedFeature, match="got 'generate', which needs a model that generates text"
        ):
            await engine.complete("w1")
    llm = LLM(str(tmp_path), dtype="float32")
    scores = llm.score(query, documents, use_tqdm=False)
    assert [one.outputs.score for one in scores] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        pytest.param("modernbert", {"classifier_pooling": "mean"}, marks=pytest.mark.slow),
        pytest.param("xlm-roberta", {}, marks=pytest.mark.slow),
        pytest.param("bert", {"problem_type": "multi_label_classification"}, marks=pytest.mark.slow),
        pytest.param("gemma", {}, marks=pytest.mark.slow),
        pytest.param("gemma", {"pad_token_id": 0}, marks=pytest.mark.slow),
    ],
)
async def test_a_classification_equals_transformers(
    family: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    model = make_encoder(family, tmp_path, "ForSequenceClassification", num_labels=3, **overrides)
    async with open_encoder(tmp_path) as engine:
        outputs = await engine.encode_all(TEXTS)
    for text, output in zip(TEXTS, outputs, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids_of(text)])).logits[0]
        probs = logits.sigmoid() if "problem_type" in overrides else logits.softmax(dim=0)
        assert difference(ClassificationRequestOutput.from_base(output).outputs.probs, probs) <= 1e-5


async def test_a_token_classification_gives_the_scores_of_each_token(tmp_path: Path) -> None:
    model = make_encoder("bert", tmp_path, "ForTokenClassification", num_labels=3)
    ids = ids_of(TEXTS[3])
    with torch.no_grad():
        probs = model(input_ids=torch.tensor([ids])).logits[0].softmax(dim=-1)
    engine = LLMEngine.from_engine_args(EngineArgs(str(tmp_path), dtype="float32"))
    assert engine.get_supported_tasks() == ("token_classify",)
    llm = LLM(engine=engine)
    [output] = llm.encode(TEXTS[3], use_tqdm=False)
    assert difference(output.outputs.data.tolist(), probs) <= 1e-5
    params = PoolingParams(step_tag_id=ids[4], returned_token_ids=[1])
    [step] = llm.reward(TEXTS[3], pooling_params=params, use_tqdm=False)
    expected = probs[[place for place, token_id in enumerate(ids) if token_id == ids[4]]]
    assert step.outputs.data.shape == (len(expected), 1)


@pytest.mark.slow
def test_an_encoder_is_served_over_http(tmp_path: Path) -> None:
    openai = pytest.importorskip("openai")
    model = make_encoder("bert", tmp_path)
    with serve("--model", str(tmp_path), "--dtype", "float32", "--served-model-name", "tiny") as server:
        assert server.model()["tasks"] == ["embed", "token_embed"]
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            answer = client.embeddings.create(model="tiny", input=TEXTS)
            with pytest.raises(openai.BadRequestError, match="a model that generates text"):
                client.completions.create(model="tiny", prompt="w1")
    for text, one in zip(TEXTS, answer.data, strict=True):
        vector = functional.normalize(hidden_states(model, ids_of(text))[0], dim=0)
        assert difference(one.embedding, vector) <= 1e-5


# ------------------------------------------------------------------------------------- refusals


async def test_what_an_encoder_cannot_do_is_refused_in_a_sentence(tmp_path: Path) -> None:
    make_encoder("bert", tmp_path)
    for fields, text in (
        (
            {"max_model_len": 64, "max_num_batched_tokens": 32},
            "max_model_len must be at most max_num_batched_tokens, 32: an encoder computes a whole prompt in one step",
        ),
        ({"max_model_len": 65}, "max_model_len must be at most 64"),
        ({"num_kv_blocks": 4}, "num_kv_blocks must be left out for an encoder"),
        ({"quantization": "int8"}, "quantization must be none for this model"),
    ):
        with pytest.raises(ConfigError, match=text):
            LLM(str(tmp_path), dtype="float32", **fields)
    async with open_encoder(tmp_path, max_num_batched_tokens=32) as engine:
        assert engine.max_model_len == 32
        with pytest.raises(PromptTooLong, match=r"32 tokens.* 33 tokens"):
            await engine.embed([5] * 33)
        assert len((await engine.embed([5] * 33, truncate_prompt_tokens=-1)).prompt_token_ids) == 32
        with pytest.raises(UnsupportedFeature, match="got 'classify', which needs a model of sequence"):
            await engine.encode_all(["w1"], PoolingParams(task="classify"))


def test_a_folder_that_wants_what_is_not_done_is_refused(tmp_path: Path) -> None:
    make_encoder("xlm-roberta", tmp_path)
    add_modules(tmp_path, "cls_token", max_seq_length=40, do_lower_case=True)
    with pytest.raises(UnsupportedModel, match="do_lower_case must be false"):
        LLM(str(tmp_path), dtype="float32")
    change_json(tmp_path / "sentence_bert_config.json", do_lower_case=False)
    llm = LLM(str(tmp_path), dtype="float32")
    assert llm.llm_engine.max_model_len == 40
    with pytest.raises(InvalidParams, match="token_type_start must be None for this model"):
        llm.embed("w1", pooling_params=PoolingParams(token_type_start=1), use_tqdm=False)


@pytest.mark.parametrize(
    "name", ["OlmoModel", pytest.param("PersimmonForSequenceClassification", marks=pytest.mark.slow)]
)
async def test_a_decoder_of_transformers_is_not_taken_for_an_encoder(name: str, tmp_path: Path) -> None:
    model_class = getattr(transformers, name)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    model_class(model_class.config_class(vocab_size=64, **sizes)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="only those of the native decoder are pooled"):
        LLM(str(tmp_path), dtype="float32")
