"""Embeddings and classifications through vLLM's faces."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.e2e.test_embeddings import LONG, PROMPTS, check
from tests.model.tiny import make_model
from triolet.compat import LLM, AsyncLLM, EngineArgs, LLMEngine, PoolingParams, RequestOutput, SamplingParams
from triolet.errors import UnsupportedFeature

IDS = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen3", tmp_path_factory.mktemp("models") / "tiny", with_tokenizer=True)


@pytest.fixture(scope="module")
def engine(folder: Path) -> LLMEngine:
    arguments = EngineArgs(str(folder), convert="embed", num_kv_blocks=64, dtype="float32", max_num_seqs=4)
    return LLMEngine.from_engine_args(arguments)


def test_llm_embeds_a_list_in_order_and_encodes_to_tensors(folder: Path, engine: LLMEngine) -> None:
    llm = LLM(engine=engine)
    for prompt, output in zip(PROMPTS, llm.embed(IDS, use_tqdm=False), strict=True):
        check(folder, prompt, output.outputs.embedding)
        assert output.outputs.hidden_size == 64
    [tokens] = llm.encode(IDS[-1], pooling_task="token_embed", use_tqdm=False)
    assert isinstance(tokens.outputs.data, torch.Tensor)
    assert tokens.outputs.data.shape == (len(LONG), 64)
    check(folder, LONG, tokens.outputs.data[-1].tolist())
    assert llm.llm_engine.get_supported_tasks() == ("generate", "embed", "token_embed")


def test_requests_of_both_kinds_take_their_steps_together(folder: Path, engine: LLMEngine) -> None:
    engine.add_request("text", IDS[3], SamplingParams(max_tokens=5, temperature=0, ignore_eos=True))
    engine.add_request("vector", IDS[4], PoolingParams())
    found: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: output for output in engine.step() if output.finished}
    assert isinstance(found["text"], RequestOutput)
    assert len(found["text"].outputs[0].token_ids) == 5
    check(folder, PROMPTS[4], found["vector"].outputs.data.tolist())


def test_an_aborted_request_says_so_and_has_no_numbers(engine: LLMEngine) -> None:
    engine.add_request("vector", IDS[4], PoolingParams())
    engine.abort_request("vector")
    [output] = engine.step()
    assert (output.finished, output.outputs.data) == (True, None)
    assert "ended before its result" in output.error
    assert not engine.has_unfinished_requests()


def test_a_task_that_the_model_does_not_do_is_a_value_error_that_says_how_to_start_one(
    folder: Path, engine: LLMEngine
) -> None:
    with pytest.raises(ValueError, match=r"got 'classify', which needs .*--convert classify"):
        LLM(engine=engine).classify("a", use_tqdm=False)
    generating = LLM(str(folder), num_kv_blocks=64, dtype="float32")
    with pytest.raises(UnsupportedFeature, match=r"got 'embed', which needs convert='embed'"):
        generating.embed("a", use_tqdm=False)


def test_llm_classifies(folder: Path, tmp_path: Path) -> None:
    reference = transformers.Qwen3ForSequenceClassification.from_pretrained(folder, num_labels=3).eval()
    reference.config.pad_token_id = 0
    reference.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    llm = LLM(str(tmp_path), num_kv_blocks=64, dtype="float32")
    [output] = llm.classify([IDS[-1]], use_tqdm=False)
    with torch.no_grad():
        expected = reference(torch.tensor([LONG])).logits[0].softmax(dim=0)
    assert (torch.tensor(output.outputs.probs) - expected).abs().max() <= 1e-5


async def test_pooled_requests_are_logged_when_they_are_done(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="triolet.requests")
    config = EngineArgs(
        str(folder), convert="embed", num_kv_blocks=64, dtype="float32", max_num_seqs=4
    ).create_engine_config()
    async with AsyncLLM(config) as llm:
        async for output in llm.encode(IDS[0], PoolingParams(), "r"):
            check(folder, PROMPTS[0], output.outputs.data.tolist())
    lines = [record.getMessage() for record in caplog.records if record.name == "triolet.requests"]
    assert lines[0].startswith("Received request r: params: PoolingParams(")
    assert lines[1:] == ["Added request r.", "Finished request r."]
