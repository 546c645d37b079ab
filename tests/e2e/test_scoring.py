"""Scores of pairs of texts: rerankers, classifiers of one label and embeddings, compared with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, processors
from torch.nn import functional

from tests.e2e.test_embeddings import hidden_states, open_tiny
from tests.model.tiny import make_model
from triolet import PoolingParams
from triolet.compat import LLM, AsyncEngineArgs, AsyncLLM, EngineArgs
from triolet.errors import ConfigError, InvalidPrompt, UnsupportedFeature

QUERY, DOCUMENTS = "what?", ["this", "that one", "it"]
# The part of Qwen3's template that is used here.
QWEN = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}"
    "{%- endif %}{%- endif %}"
)
# From the model card of Qwen/Qwen3-Reranker-0.6B.
PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
SETTINGS: dict[str, Any] = {"num_kv_blocks": 256, "dtype": "float32"}


def close(found: list[Any], expected: list[float]) -> None:
    assert [one.outputs.score for one in found] == pytest.approx(expected, abs=1e-5)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model(
        "qwen3",
        tmp_path_factory.mktemp("models") / "tiny",
        with_tokenizer=True,
        max_position_embeddings=1024,
    )
    (folder / "chat_template.jinja").write_text(QWEN, encoding="utf-8")
    return folder


def yes_scores(folder: Path, prompts: list[str]) -> list[float]:
    """Probability of `y` against `n` after each prompt, by transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    pair = [tokenizer.token_to_id("n"), tokenizer.token_to_id("y")]
    with torch.no_grad():
        logits = [model(torch.tensor([tokenizer.encode(text).ids])).logits[0, -1, pair] for text in prompts]
    return [float(one.softmax(dim=0)[1]) for one in logits]


@pytest.mark.slow
async def test_a_reranker_of_two_tokens_gets_the_prompt_of_its_model_card(reranker: Path) -> None:
    expected = yes_scores(
        reranker, [PROMPT.format(instruction=INSTRUCTION, query=QUERY, document=text) for text in DOCUMENTS]
    )
    async with open_tiny(reranker, convert="auto", classifier_from_token=("n", "y")) as engine:
        close(await engine.score(QUERY, DOCUMENTS), expected)
        [other] = await engine.score(QUERY, "it", instruction="Find it")
        close(
            [other], yes_scores(reranker, [PROMPT.format(instruction="Find it", query=QUERY, document="it")])
        )
        with pytest.raises(InvalidPrompt, match=r"data_1 must hold one text.*holds 3; got 2"):
            await engine.score(["a", "b"], DOCUMENTS)
        with pytest.raises(InvalidPrompt, match="data_2 must be a text or a list of at least one text"):
            await engine.score("a", [])
    (reranker / "chat_template.jinja").write_text(
        "{% for one in messages if one.role == 'query' %}{{ one.content }}{% endfor %}"
        "{% for one in messages if one.role == 'document' %} | {{ one.content }}{% endfor %}",
        encoding="utf-8",
    )
    try:
        overrides = {"classifier_from_token": ["n", "y"], "is_original_qwen3_reranker": True}
        llm = LLM(str(reranker), hf_overrides=overrides, **SETTINGS)
        found = llm.score([QUERY] * 3, DOCUMENTS, use_tqdm=False)
        close(found, yes_scores(reranker, [f"{QUERY} | {text}" for text in DOCUMENTS]))
    finally:
        (reranker / "chat_template.jinja").write_text(QWEN, encoding="utf-8")


async def test_a_model_of_embeddings_scores_by_the_cosine_and_computes_each_text_once(reranker: Path) -> None:
    async with open_tiny(reranker) as engine:
        found = await engine.score(QUERY, [*DOCUMENTS, QUERY])
        assert sum(engine.statistics().num_requests_ended.values()) == 4
        with pytest.raises(UnsupportedFeature, match="instruction must be None"):
            await engine.score("a", "b", instruction="c")
    tokenizer = Tokenizer.from_file(str(reranker / "tokenizer.json"))
    vectors = [hidden_states(reranker, tokenizer.encode(text).ids)[-1] for text in (QUERY, *DOCUMENTS, QUERY)]
    close(found, [float(functional.cosine_similarity(vectors[0], one, dim=0)) for one in vectors[1:]])


@pytest.mark.slow
async def test_a_classifier_of_one_label_reads_both_texts_as_its_tokenizer_joins_them(tmp_path: Path) -> None:
    folder = make_model("llama-plain", tmp_path / "tiny", with_tokenizer=True)
    reference = transformers.LlamaForSequenceClassification.from_pretrained(folder, num_labels=1).eval()
    reference.config.pad_token_id = 0
    reference.save_pretrained(folder)
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    bos, eos = (tokenizer.id_to_token(index) for index in (256, 257))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A {eos}",
        pair=f"{bos} $A {eos} $B:1 {eos}:1",
        special_tokens=[(bos, 256), (eos, 257)],
    )
    tokenizer.save(str(path))
    pairs = [[256, *tokenizer.encode(QUERY, add_special_tokens=False).ids, 257] for _ in DOCUMENTS]
    for ids, text in zip(pairs, DOCUMENTS, strict=True):
        ids += [*tokenizer.encode(text, add_special_tokens=False).ids, 257]
    with torch.no_grad():
        logits = [reference(torch.tensor([ids])).logits[0, 0] for ids in pairs]
    expected = [float(one.sigmoid()) for one in logits]
    llm = LLM(str(folder), **SETTINGS)
    close(llm.score(QUERY, DOCUMENTS, use_tqdm=False), expected)
    raw = llm.score(QUERY, "this", pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
    assert raw[0].outputs.score == pytest.approx(float(logits[0]), abs=1e-4)
    [tokens] = llm.reward({"prompt_token_ids": pairs[0]}, use_tqdm=False)
    assert tokens.outputs.data[-1].tolist() == pytest.approx(expected[:1], abs=1e-5)
    arguments = AsyncEngineArgs(str(folder), runner="inline", **SETTINGS)
    async with AsyncLLM.from_engine_args(arguments) as engine:
        outputs = [one async for one in engine.encode({"prompt_token_ids": pairs[0]}, request_id="pair")]
        with pytest.raises(UnsupportedFeature, match=r"got 'embed', which needs convert='embed'"):
            await anext(engine.encode("a", PoolingParams(task="embed")))
    assert [(one.request_id, one.finished) for one in outputs] == [("pair", True)]
    assert outputs[0].outputs.data.tolist() == pytest.approx(expected[:1], abs=1e-5)


def test_what_cannot_be_scored_is_refused_by_name(reranker: Path) -> None:
    with pytest.raises(UnsupportedFeature, match=r"'score', which needs a model of sequence classification"):
        LLM(str(reranker), **SETTINGS).score("a", "b", use_tqdm=False)
    with pytest.raises(UnsupportedFeature, match=r"hf_overrides is not offered: of config.json only"):
        EngineArgs(str(reranker), hf_overrides={"rope_theta": 1})
    with pytest.raises(ConfigError, match="classifier_from_token must be two tokens"):
        LLM(str(reranker), classifier_from_token=("n",), **SETTINGS)
