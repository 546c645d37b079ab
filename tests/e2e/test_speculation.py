"""Real models with drafts and without: the same tokens, texts and log-probabilities, in fewer steps."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import trio

import triolet
from tests.model.tiny import make_model
from triolet import EngineStatistics, RequestOutput, SamplingParams

DRAFTS: dict[str, Any] = {"speculative": "ngram", "prompt_lookup_min": 2}


def make_requests(count: int) -> list[tuple[list[int], SamplingParams]]:
    """A tiny model of random weights goes round in circles when it is greedy, and nearly so at a low temperature."""
    draw = random.Random(1)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 0, "structured_outputs": {"regex": "[ab]{3,40}"}},
        {"temperature": 0, "frequency_penalty": 0.01, "n": 1},
        {"temperature": 0.05, "seed": 4, "n": 2},
        {"temperature": 0.05, "seed": 5, "top_p": 0.9, "repetition_penalty": 1.001},
        {"temperature": 0, "stop": ["e", "th"], "min_tokens": 9, "bad_words": ["x"]},
    ]
    requests = []
    for place in range(count):
        stem = [draw.randrange(256) for _ in range(draw.randint(1, 12))]
        fields = {"max_tokens": draw.randint(12, 60), "ignore_eos": True} | kinds[place % len(kinds)]
        requests.append((stem * draw.randint(1, 4), SamplingParams(**fields)))
    return requests


async def answers(
    model: str | None, requests: list[tuple[Any, SamplingParams]], **fields: Any
) -> tuple[list[RequestOutput], EngineStatistics]:
    """All at once."""
    outputs: dict[int, RequestOutput] = {}
    async with triolet.open_engine(model=model, **fields) as engine:

        async def one(place: int) -> None:
            outputs[place] = await engine.complete(*requests[place])

        async with trio.open_nursery() as nursery:
            for place in range(len(requests)):
                nursery.start_soon(one, place)
        statistics = engine.statistics()
    assert (statistics.kv_blocks_in_use, statistics.num_requests_live) == (0, 0)
    return [outputs[place] for place in range(len(requests))], statistics


def told(output: RequestOutput) -> list[Any]:
    """What is compared of an answer, in which log-probabilities may be rounded otherwise."""
    return [
        (answer.index, answer.token_ids, answer.text, answer.finish_reason, answer.stop_reason)
        for answer in sorted(output.outputs, key=lambda answer: answer.index)
    ]


def logprobs(output: RequestOutput) -> list[float]:
    positions = [*(output.outputs[0].logprobs or ()), *(output.prompt_logprobs or ())]
    return [entry.logprob for position in positions for entry in (position or {}).values()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen3", tmp_path_factory.mktemp("model"), with_tokenizer=True)


@pytest.mark.parametrize(
    "runner", ["thread", *(pytest.param(one, marks=pytest.mark.slow) for one in ("inline", "process"))]
)
async def test_answers_are_the_same_with_and_without_drafts(folder: Path, runner: str) -> None:
    requests = make_requests(21)
    fields: dict[str, Any] = {"dtype": "float32", "block_size": 4, "max_model_len": 128, "num_kv_blocks": 400}
    plain, before = await answers(str(folder), requests, **fields)
    fields |= {"num_kv_blocks": 60, "max_num_seqs": 8, "max_num_batched_tokens": 48, "runner": runner}
    tried, now = await answers(str(folder), requests, **fields, **DRAFTS)
    for place, (a, b) in enumerate(zip(plain, tried, strict=True)):
        assert told(a) == told(b), place
        assert logprobs(a) == pytest.approx(logprobs(b), abs=1e-4), place
    assert before.spec_decode_num_drafts == 0
    assert now.num_preemptions > 0
    assert now.spec_decode_num_accepted_tokens > 30


async def test_nano_repeats_what_it_is_told_in_fewer_steps() -> None:
    text = "Repeat: the quick brown fox jumps over the lazy dog. the quick brown fox jumps over the lazy dog."
    prompt = [{"role": "user", "content": text}]
    results = []
    for fields in ({}, DRAFTS):
        outputs, statistics = await answers(None, [(prompt, SamplingParams(temperature=0))], **fields)
        results.append((told(outputs[0]), statistics.steps))
    [(plain, num_steps), (tried, fewer)] = results
    assert tried == plain
    assert fewer < 0.8 * num_steps
