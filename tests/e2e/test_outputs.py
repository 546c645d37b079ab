"""Whole answers of a real, tiny model: log-probabilities against transformers', several answers, beams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer

import triolet
from tests.model.tiny import make_model
from tests.scale import one_in
from triolet import FinishReason, RequestOutputKind, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
PROMPT = torch.randint(0, 256, (37,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen3", tmp_path_factory.mktemp("model"))


def reference(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """[len(token_ids), vocab_size] log-probabilities of what follows each token."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits.log_softmax(dim=1)


@pytest.mark.parametrize(
    ("budget", "runner"), one_in(2, [(4, "thread"), (16, "thread"), (512, "thread"), (16, "process")])
)
async def test_prompt_logprobs_are_those_of_transformers_however_the_prompt_is_cut(
    folder: Path, budget: int, runner: str
) -> None:
    expected = reference(folder, PROMPT)
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=3, logprobs=0)
    fields: dict[str, Any] = {"max_num_batched_tokens": budget, "block_size": 4, "num_kv_blocks": 64}
    async with triolet.open_engine(model=str(folder), runner=runner, dtype="float32", **fields) as engine:
        await engine.complete(PROMPT, SamplingParams(max_tokens=1))  # from now on the cache would have it
        output = await engine.complete(PROMPT, params)
        assert output.num_cached_tokens == 0
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(PROMPT)
        first, *others = output.prompt_logprobs
        assert first is None
        for place, position in enumerate(others, start=1):
            assert position is not None
            row = expected[place - 1]
            token_id, own = next(iter(position.items()))
            assert token_id == PROMPT[place]
            assert own.rank == int((row >= row[token_id]).sum())
            top = row.topk(3)
            assert [*position][-3:] == top.indices.tolist() or token_id in top.indices.tolist()
            for named, entry in position.items():
                assert entry.logprob == pytest.approx(float(row[named]), abs=1e-4)
        flat = await engine.complete(
            PROMPT, SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=3, flat_logprobs=True)
        )
        assert flat.prompt_logprobs == output.prompt_logprobs
        assert engine.statistics().kv_blocks_in_use == 0


async def test_logprobs_of_the_answer_are_those_of_transformers(folder: Path) -> None:
    async with triolet.open_engine(model=str(folder), dtype="float32", num_kv_blocks=64) as engine:
        params = SamplingParams(temperature=0.1, seed=1, max_tokens=8, logprobs=4, ignore_eos=True)
        [answer] = (await engine.complete(PROMPT, params)).outputs
    assert answer.logprobs is not None
    rows = reference(folder, [*PROMPT, *answer.token_ids])[len(PROMPT) - 1 :]
    total = 0.0
    for token_id, position, row in zip(answer.token_ids, answer.logprobs, rows, strict=False):
        assert next(iter(position)) == token_id
        assert len(position) in (4, 5)
        for named, entry in position.items():
            assert entry.logprob == pytest.approx(float(row[named]), abs=1e-4)
        total += float(row[token_id])
    assert answer.cumulative_logprob == pytest.approx(total, abs=1e-3)


async def test_prompt_logprobs_come_at_once_and_in_deltas_only_once(folder: Path) -> None:
    async with triolet.open_engine(model=str(folder), dtype="float32", num_kv_blocks=64) as engine:
        for kind, there in ((DELTA, [True, False, False]), (CUMULATIVE, [True, True, True])):
            params = SamplingParams(
                temperature=0, max_tokens=3, prompt_logprobs=0, output_kind=kind, ignore_eos=True
            )
            async with engine.generate(PROMPT, params) as stream:
                outputs = [output async for output in stream]
            assert [output.prompt_logprobs != [] for output in outputs] == there
            assert all(output.prompt_logprobs is not None for output in outputs)
        output = await engine.complete(
            PROMPT, SamplingParams(n=2, seed=1, max_tokens=3, prompt_logprobs=0, logprobs=1)
        )
        assert output.prompt_logprobs == outputs[0].prompt_logprobs
        assert len(output.outputs) == 2


async def test_prompt_logprobs_are_still_there_when_another_engine_finishes_the_other_answers(
    folder: Path,
) -> None:
    fields: dict[str, Any] = {
        "model": str(folder),
        "dtype": "float32",
        "num_kv_blocks": 64,
        "runner": "inline",
    }
    params = SamplingParams(
        n=2, seed=3, max_tokens=30, prompt_logprobs=0, stop_token_ids=list(range(0, 320, 20))
    )
    async with triolet.open_engine(**fields) as engine:
        whole = await engine.complete(PROMPT, params)
        lengths = [len(answer.token_ids) for answer in whole.outputs]
        assert lengths[0] < lengths[1]  # the first one, which has them, ends before the other
        async with engine.generate(PROMPT, params, request_id="r") as stream:
            async for output in stream:
                if output.outputs[0].index == 0 and output.outputs[0].finish_reason is not None:
                    break
            saved = triolet.Snapshot.from_bytes(engine.snapshot().to_bytes())
    assert [answer.finish_reason for answer in saved.requests[0].answers] == [FinishReason.STOP, None]
    async with triolet.open_engine(**fields) as engine, engine.resume(saved)["r"] as stream:
        outputs = [output async for output in stream]
    assert [output.prompt_logprobs for output in outputs] == [whole.prompt_logprobs] * len(outputs)
    told = {output.outputs[0].index: output.outputs[0].token_ids for output in outputs}
    assert [told[index] for index in range(2)] == [answer.token_ids for answer in whole.outputs]


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logprobs"])
async def test_the_mode_is_the_engines(folder: Path, mode: str) -> None:
    fields: dict[str, Any] = {
        "dtype": "float32",
        "num_kv_blocks": 64,
        "logprobs_mode": mode,
        "max_logprobs": -1,
    }
    async with triolet.open_engine(model=str(folder), **fields) as engine:
        params = SamplingParams(seed=2, top_k=2, temperature=0.5, max_tokens=2, logprobs=-1)
        [answer] = (await engine.complete(PROMPT, params)).outputs
    assert answer.logprobs is not None
    for position in answer.logprobs:
        finite = [entry.logprob for entry in position.values() if entry.logprob > float("-inf")]
        assert len(finite) == (2 if mode == "processed_logprobs" else 320)
        assert (max(finite) <= 0.0) == (mode == "processed_logprobs")


async def test_a_bad_word_of_several_tokens_is_never_written(tmp_path: Path) -> None:
    """With a byte for a token there is one way to write a word; the letters themselves are made likely."""
    folder = make_model("qwen3", tmp_path / "model", with_tokenizer=True)
    letters = dict.fromkeys(Tokenizer.from_file(str(folder / "tokenizer.json")).encode("abc ").ids, 20.0)
    async with triolet.open_engine(model=str(folder), dtype="float32", num_kv_blocks=64) as engine:
        fields: dict[str, Any] = {"logit_bias": letters, "seed": 4, "max_tokens": 120, "ignore_eos": True}
        free = await engine.complete(PROMPT, SamplingParams(**fields))
        bound = await engine.complete(PROMPT, SamplingParams(bad_words=["ab", " cab", "c c"], **fields))
    assert {"ab", " c"} <= {free.text[place : place + 2] for place in range(120)}
    assert not any(word in bound.text for word in ("ab", "c c"))
    assert {*bound.text} == {*"abc "}
