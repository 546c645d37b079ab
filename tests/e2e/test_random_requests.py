"""Requests with every field drawn at random answer the same alone as among all others, however these are preempted.

Tokens, texts, log-probabilities and reasons are compared. The model is a tiny one in float32: other batch shapes round
differently, by less than what is compared.
"""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

import triolet
from tests.model.tiny import VOCAB_SIZE, make_model
from triolet import CompletionOutput, Engine, RequestOutput, RequestOutputKind, SamplingParams

NEARLY = 1e-4
WORDS = ["a", "b", "ab", "th", " t", "e ", "!", "x", "qu"]


@attrs.frozen
class Asked:
    """One request, and what it is compared by."""

    prompt: list[int]
    params: SamplingParams


def random_request(seed: int) -> Asked:
    """Every field with a say in the answer is drawn; a third of them are at their defaults."""
    draw = random.Random(seed)

    def maybe(value: Any, default: Any = None) -> Any:
        return value if draw.random() < 0.3 else default

    temperature = maybe(0.0, draw.choice([0.3, 0.7, 1.0, 1.5]))
    max_tokens = draw.randint(1, 40)
    token_ids = [draw.randrange(256) for _ in range(draw.randint(1, 60))]
    fields: dict[str, Any] = {
        "n": 1 if temperature == 0.0 else maybe(draw.randint(2, 3), 1),
        "presence_penalty": maybe(draw.uniform(-2, 2), 0.0),
        "frequency_penalty": maybe(draw.uniform(-2, 2), 0.0),
        "repetition_penalty": maybe(draw.uniform(0.7, 1.5), 1.0),
        "temperature": temperature,
        "top_p": maybe(draw.uniform(0.1, 1.0), 1.0),
        "top_k": maybe(draw.randint(1, 50), 0),
        "min_p": maybe(draw.uniform(0.0, 0.3), 0.0),
        "seed": draw.getrandbits(40),
        "stop": maybe(draw.sample(WORDS, draw.randint(1, 3)), []),
        "stop_token_ids": maybe([draw.randrange(VOCAB_SIZE) for _ in range(5)], []),
        "ignore_eos": draw.random() < 0.5,
        "max_tokens": max_tokens,
        "min_tokens": maybe(draw.randint(0, max_tokens), 0),
        "logprobs": maybe(draw.randint(0, 5)),
        "prompt_logprobs": maybe(draw.randint(0, 3)),
        "flat_logprobs": draw.random() < 0.2,
        "logprob_token_ids": maybe(draw.sample(range(VOCAB_SIZE), 3), []),
        "skip_special_tokens": draw.random() < 0.5,
        "spaces_between_special_tokens": draw.random() < 0.5,
        "include_stop_str_in_output": draw.random() < 0.5,
        "output_kind": draw.choice(list(RequestOutputKind)),
        "stream_interval": maybe(draw.randint(1, 5)),
        "logit_bias": maybe({draw.randrange(VOCAB_SIZE): draw.uniform(-5, 5) for _ in range(4)}),
        "allowed_token_ids": maybe(draw.sample(range(VOCAB_SIZE), 200)),
        "bad_words": maybe(draw.sample(WORDS, 2), []),
        "repetition_detection": maybe({"max_pattern_size": 4, "min_count": 3}),
        "skip_reading_prefix_cache": maybe(True),
    }
    if fields["logprobs"] is not None and fields["logprob_token_ids"]:
        fields["logprobs"] = len(fields["logprob_token_ids"])  # another number is refused
    return Asked(token_ids, SamplingParams(**fields))


async def ask(engine: Engine, asked: Asked) -> RequestOutput:
    """The whole of what a reader of that kind of stream gets."""
    whole: RequestOutput | None = None
    async with engine.generate(asked.prompt, asked.params) as stream:
        async for output in stream:
            is_delta = asked.params.output_kind is RequestOutputKind.DELTA
            whole = output if whole is None else whole.add(output, aggregate=is_delta)
    assert whole is not None
    return whole


async def ask_all(engine: Engine, requests: list[Asked]) -> list[RequestOutput]:
    outputs: dict[int, RequestOutput] = {}

    async def one(place: int) -> None:
        outputs[place] = await ask(engine, requests[place])

    async with trio.open_nursery() as nursery:
        for place in range(len(requests)):
            nursery.start_soon(one, place)
    return [outputs[place] for place in range(len(requests))]


def numbers(positions: Any) -> list[dict[int, float]]:
    listed = [] if positions is None else list(positions)
    return [{token_id: entry.logprob for token_id, entry in (position or {}).items()} for position in listed]


def are_near(alone: Any, together: Any) -> bool:
    """Whether every number is within the tolerance; of tokens that only one names, a tie is the reason."""
    a, b = numbers(alone), numbers(together)
    return len(a) == len(b) and all(
        abs(x[token_id] - y[token_id]) <= NEARLY
        for x, y in zip(a, b, strict=True)
        for token_id in x.keys() & y
    )


def is_same(alone: CompletionOutput, together: CompletionOutput) -> bool:
    return (
        alone.token_ids == together.token_ids
        and alone.text == together.text
        and (alone.finish_reason, alone.stop_reason) == (together.finish_reason, together.stop_reason)
        and are_near(alone.logprobs, together.logprobs)
    )


async def check(folder: Path, count: int) -> tuple[int, list[int]]:
    """Returns how many preemptions there were, and which requests were answered differently."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        requests = [random_request(seed) for seed in range(count)]
    fields: dict[str, Any] = {
        "dtype": "float32",
        "block_size": 4,
        "max_model_len": 104,
        "max_num_batched_tokens": 64,
        "max_queued_requests": 4096,
    }
    async with triolet.open_engine(model=str(folder), num_kv_blocks=512, **fields) as engine:
        alone = [await ask(engine, request) for request in requests]
    async with triolet.open_engine(
        model=str(folder), num_kv_blocks=60, max_num_seqs=24, hold_back="blind", **fields
    ) as engine:
        together = await ask_all(engine, requests)
        statistics = engine.statistics()
        assert (statistics.kv_blocks_in_use, statistics.num_requests_live) == (0, 0)
    differing = []
    for place, (a, b) in enumerate(zip(alone, together, strict=True)):
        assert are_near(a.prompt_logprobs, b.prompt_logprobs), place
        assert len(a.outputs) == len(b.outputs) == requests[place].params.n
        if not all(is_same(x, y) for x, y in zip(a.outputs, b.outputs, strict=True)):
            differing.append(place)
    return statistics.num_preemptions, differing


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama-plain", tmp_path_factory.mktemp("model"), with_tokenizer=True)


@pytest.mark.slow
async def test_sixty_requests_answer_alone_as_they_do_together(folder: Path) -> None:
    num_preemptions, differing = await check(folder, 60)
    assert num_preemptions > 0
    assert differing == []


@pytest.mark.slow
async def test_a_thousand_requests_answer_alone_as_they_do_together(folder: Path) -> None:
    num_preemptions, differing = await check(folder, 1000)
    assert num_preemptions > 100
    assert differing == []
