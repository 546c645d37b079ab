"""Embeddings over HTTP, with the official openai client, which asks for base64 by default."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.e2e.server import Server, serve
from tests.e2e.test_embeddings import PROMPTS, check
from tests.model.tiny import change_json, make_model

openai = pytest.importorskip("openai")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model("qwen3", tmp_path_factory.mktemp("models") / "tiny", with_tokenizer=True)
    change_json(folder / "config.json", matryoshka_dimensions=[16, 32, 64])
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    arguments = ("--model", str(folder), "--convert", "embed", "--num-kv-blocks", "64", "--dtype", "float32")
    with serve(*arguments, "--max-num-batched-tokens", "32", "--max-num-seqs", "8") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_sdk_gets_the_embeddings_of_all_inputs_in_order(folder: Path, client: Any) -> None:
    prompts = [list(prompt) for prompt in PROMPTS]
    for options in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        answer = client.embeddings.create(model="tiny", input=prompts, **options)
        assert [one.index for one in answer.data] == list(range(len(prompts)))
        for prompt, one in zip(PROMPTS, answer.data, strict=True):
            numbers = one.embedding
            if isinstance(numbers, str):  # asked for by name, it is left to the caller
                numbers = torch.frombuffer(bytearray(base64.b64decode(numbers)), dtype=torch.float32).tolist()
            check(folder, prompt, numbers)
        count = sum(map(len, prompts))
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (count, count)


def test_texts_ids_and_a_chat_are_inputs(client: Any) -> None:
    def embed(wish: Any, **options: Any) -> list[list[float]]:
        return [one.embedding for one in client.embeddings.create(model="tiny", input=wish, **options).data]

    [alone] = embed("hello")
    [first, second] = embed(["hello", "there"])
    assert first == pytest.approx(alone, abs=1e-5)
    assert second != pytest.approx(alone, abs=1e-3)
    assert len(embed([1, 2, 3])) == 1
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    answer = client.post("/embeddings", body={"model": "tiny", **chat}, cast_to=object)
    assert len(answer["data"][0]["embedding"]) == 64


def test_dimensions_are_cut_and_the_rest_normalised(client: Any) -> None:
    whole = torch.tensor(client.embeddings.create(model="tiny", input="hello").data[0].embedding)
    cut = torch.tensor(client.embeddings.create(model="tiny", input="hello", dimensions=16).data[0].embedding)
    assert abs(float(cut.norm()) - 1) <= 1e-6
    assert (cut - torch.nn.functional.normalize(whole[:16], dim=0)).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("wish", "code", "param", "text"),
    [
        ({"input": []}, "invalid_value", "input", "1 to 2048"),
        ({"input": ["a"] * 2049}, "json_too_large", None, "2048"),
        ({"input": ["a", ""]}, "invalid_value", "input", "empty"),
        ({"input": [[999]]}, "invalid_value", "input", "vocabulary"),
        ({"input": [1] * 300}, "context_length_exceeded", "input", "256 tokens.* 300 tokens"),
        ({"input": "a", "dimensions": 8}, "invalid_value", "dimensions", "one of 16, 32, 64"),
        ({"input": "a", "encoding_format": "int8"}, "invalid_value", "encoding_format", "float or base64"),
        ({"input": "a", "embed_dtype": "float16"}, "unsupported_parameter", "embed_dtype", "not supported"),
        ({}, "missing_required_parameter", "input or messages", "given"),
    ],
)
def test_wrong_input_is_refused_by_name(
    client: Any, wish: Any, code: str, param: str | None, text: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=f"(?s){text}") as caught:
        client.post("/embeddings", body={"model": "tiny", **wish}, cast_to=object)
    assert (caught.value.code, caught.value.param) == (code, param)


def test_long_inputs_are_cut_where_that_is_asked_for(client: Any) -> None:
    body = {"model": "tiny", "input": [1] * 300, "truncate_prompt_tokens": -1}
    assert client.post("/embeddings", body=body, cast_to=object)["usage"]["prompt_tokens"] == 256


def test_the_side_of_a_long_input_that_is_cut_off_is_the_clients_choice(client: Any) -> None:
    def embedded(**wish: Any) -> list[float]:
        body = {"model": "tiny", **wish}
        found: list[float] = client.post("/embeddings", body=body, cast_to=object)["data"][0]["embedding"]
        return found

    long = {"input": [5, 6, 7, 8, 9, 10], "truncate_prompt_tokens": 3}
    assert embedded(**long, truncation_side="left") == embedded(input=[8, 9, 10])
    assert embedded(**long, truncation_side="right") == embedded(**long) == embedded(input=[5, 6, 7])
    with pytest.raises(openai.BadRequestError, match="truncation_side must be left or right") as caught:
        embedded(**long, truncation_side="middle")
    assert caught.value.param == "truncation_side"


def test_a_client_that_leaves_aborts_all_its_inputs(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=0.2) as hasty:
        with pytest.raises(openai.APITimeoutError):
            hasty.embeddings.create(model="tiny", input=["x" * 150] * 2000)
    until_s = time.monotonic() + 300
    while json.loads(server.get("/v1/requests"))["data"] and time.monotonic() < until_s:
        time.sleep(0.05)
    assert json.loads(server.get("/v1/requests"))["data"] == []


def test_the_model_says_what_it_can_do(server: Server) -> None:
    assert server.model()["tasks"] == ["generate", "embed", "token_embed"]


def test_score_and_rerank_answer_cosines_and_pooling_the_vectors(folder: Path, server: Server) -> None:
    texts = ["hello", "there", "hell"]
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:

        def post(path: str, **body: Any) -> Any:
            return client.post(path, body={"model": "tiny", **body}, cast_to=object)

        pooled = post("/pooling", input=texts, task="embed")
        vectors = torch.tensor([one["data"] for one in pooled["data"]])
        assert [one["object"] for one in pooled["data"]] == ["pooling"] * 3
        expected = (vectors @ vectors[0]).tolist()
        for path, names in (("/score", ("text_1", "text_2")), ("/v1/score", ("queries", "documents"))):
            answer = post(path, **dict(zip(names, (texts[0], texts), strict=True)))
            assert [one["score"] for one in answer["data"]] == pytest.approx(expected, abs=1e-5)
            assert answer["usage"]["prompt_tokens"] == pooled["usage"]["prompt_tokens"]
        best = sorted(range(3), key=lambda index: -expected[index])
        documents = ["hello", {"text": "there"}, "hell"]
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            results = post(path, query="hello", documents=documents, top_n=2)["results"]
            assert [one["index"] for one in results] == best[:2]
            assert [one["document"]["text"] for one in results] == [texts[index] for index in best[:2]]
            assert results[1]["relevance_score"] == pytest.approx(expected[best[1]], abs=1e-5)
        for path, body, param in (
            ("/rerank", {"query": "a", "documents": []}, "documents"),
            ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
            ("/rerank", {"query": "a", "documents": ["x" * 300]}, "documents"),
            ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
            ("/score", {"text_1": "a"}, "text_2"),
            ("/score", {"text_1": "a", "text_2": "b", "queries": "c"}, "queries"),
            ("/score", {"text_1": "a", "text_2": "b", "instruction": "c"}, "instruction"),
            ("/pooling", {"input": "a", "task": "sing"}, "task"),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                post(path, **body)
            assert caught.value.param == param


@pytest.mark.slow
def test_classify_answers_label_and_probabilities(folder: Path, tmp_path: Path) -> None:
    reference = transformers.Qwen3ForSequenceClassification.from_pretrained(folder, num_labels=3).eval()
    reference.config.pad_token_id = 0
    reference.config.id2label = {0: "good", 1: "bad", 2: "ugly"}
    reference.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    prompts = [list(prompt) for prompt in PROMPTS[:3]]
    arguments = ("--model", str(tmp_path), "--num-kv-blocks", "64", "--served-model-name", "judge")
    with serve(*arguments, "--dtype", "float32") as server:
        with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
            answer = client.post("/classify", body={"model": "judge", "input": prompts}, cast_to=object)
            with pytest.raises(openai.BadRequestError, match="convert='embed'") as caught:
                client.post("/v1/embeddings", body={"model": "judge", "input": "a"}, cast_to=object)
    assert caught.value.code == "unsupported_model"
    for prompt, one in zip(prompts, answer["data"], strict=True):
        with torch.no_grad():
            expected = reference(torch.tensor([prompt])).logits[0].softmax(dim=0)
        assert one["probs"] == pytest.approx(expected.tolist(), abs=1e-5)
        assert one["label"] == ("good", "bad", "ugly")[int(expected.argmax())]
        assert one["num_classes"] == 3
