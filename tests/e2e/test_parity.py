"""Greedy answers of the whole engine are transformers' own, token for token, however they are scheduled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import transformers
import trio

import triolet
from tests.model.tiny import NATIVE_FAMILIES, is_cached_rightly, make_model, randomise
from triolet import Engine, SamplingParams

NUM_TOKENS = 64
VOCAB = 320
NUM_REQUESTS = 16

FALLBACK_FAMILIES: dict[str, dict[str, Any]] = {
    "Olmo": {"num_key_value_heads": 2},
    "Persimmon": {},
}


def make_fallback_model(family: str, path: Path, seed: int) -> Path:
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **FALLBACK_FAMILIES[family],
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    randomise(model, seed=seed)
    model.save_pretrained(path)
    return path


def make_prompts() -> list[list[int]]:
    """Mixed lengths from 1 to 60; the last four begin like the one before them."""
    generator = torch.Generator().manual_seed(2)
    lengths = [1, 2, 5, 16, 17, 31, 33, 8, 60, 12, 24, 40]
    prompts = [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]
    return [*prompts, *(prompts[8][:48] + prompts[index] for index in range(4))]


def generate(folder: Path, prompts: Sequence[Sequence[int]]) -> tuple[list[tuple[int, ...]], float]:
    """What transformers answers to each prompt alone, and the smallest lead of a token over the next best one.

    A thousand forward passes of one token each would be most of this file's time. So one padded batch proposes the
    answers, and one pass without padding over each says whether they are the greedy ones, which they are if and only
    if every token is the likeliest one after those before it. Where padding has changed a token, the prompt is
    answered alone.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers, leads = complete(model, prompts), []
    for index, prompt in enumerate(prompts):
        lead = smallest_lead(model, prompt, answers[index])
        if lead <= 0:
            answers[index] = complete(model, [prompt])[0]
            lead = abs(smallest_lead(model, prompt, answers[index]))
        leads.append(lead)
    return answers, min(leads)


def complete(model: Any, prompts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Greedy answers to a batch that is padded on the left."""
    width = max(map(len, prompts))
    ids, mask = torch.zeros(len(prompts), width, dtype=torch.long), torch.zeros(len(prompts), width).long()
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = torch.tensor(prompt), 1
    whole = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        pad_token_id=0,
        use_cache=is_cached_rightly(model.config),
    )
    return [tuple(row) for row in whole[:, width:].tolist()]


@torch.no_grad()
def smallest_lead(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """By how much each token's logit is above the best other one, at the least; negative where one is below."""
    logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    chosen = torch.tensor(answer)[:, None]
    others = logits.scatter(1, chosen, float("-inf")).amax(1)
    return float((logits.gather(1, chosen)[:, 0] - others).min())


@attrs.frozen
class Case:
    folder: Path
    prompts: list[list[int]]
    answers: list[tuple[int, ...]]


# What the scheduler does differs by what a family caches, so that these stand for the others in quick runs, which
# compare the logits of all of them as well (tests/model/backends/test_decoder_parity.py).
QUICK = ("qwen3", "gemma3", "mixtral")
OTHER_CACHES = ("deepseek-v3", "qwen3-next")


def cases_of(*quick: str) -> list[Any]:
    """Return all families as parameters, of which these run in quick runs."""
    return [
        pytest.param(family, marks=() if family in quick else pytest.mark.slow)
        for family in (*NATIVE_FAMILIES, *FALLBACK_FAMILIES)
    ]


@pytest.fixture(scope="module", params=cases_of(*QUICK, *OTHER_CACHES, "Olmo"))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return made_case(request.param, tmp_path_factory.mktemp("models"))


def made_case(family: str, folder: Path, **overrides: Any) -> Case:
    """The first model by which no answer hangs on a lead that is within the errors of float32."""
    prompts = make_prompts()
    for seed in range(8):
        path = folder / f"{family}-{seed}"
        if family in FALLBACK_FAMILIES:
            make_fallback_model(family, path, seed)
        else:
            make_model(family, path, vocab_size=VOCAB, seed=seed, **overrides)
        answers, lead = generate(path, prompts)
        if lead > 3e-5:
            return Case(path, prompts, answers)
    raise AssertionError(f"every seed of {family} has answers that hang on a rounding")


async def answer(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> tuple[int, ...]:
    output = await engine.complete(list(prompt), params)
    return tuple(output.outputs[0].token_ids)


async def answer_all(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> list[tuple[int, ...]]:
    """All at once, in the order of the prompts."""
    answers: dict[int, tuple[int, ...]] = {}

    async def one(index: int) -> None:
        answers[index] = await answer(engine, prompts[index], params)

    async with trio.open_nursery() as nursery:
        for index in range(len(prompts)):
            nursery.start_soon(one, index)
    return [answers[index] for index in range(len(prompts))]


GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)


@pytest.mark.parametrize("case", cases_of(*QUICK, *OTHER_CACHES), indirect=True)
async def test_alone_and_again_from_the_prefix_cache(case: Case) -> None:
    async with triolet.open_engine(
        model=str(case.folder), runner="inline", num_kv_blocks=64, block_size=16
    ) as engine:
        for index in (2, 8, 12):
            assert await answer(engine, case.prompts[index], GREEDY) == case.answers[index]
        hits = engine.statistics().prefix_cache_hits
        assert await answer(engine, case.prompts[12], GREEDY) == case.answers[12]
        assert engine.statistics().prefix_cache_hits - hits >= 48


async def test_in_a_batch_of_mixed_lengths(case: Case) -> None:
    async with triolet.open_engine(model=str(case.folder), num_kv_blocks=256) as engine:
        assert await answer_all(engine, case.prompts, GREEDY) == case.answers
        assert engine.statistics().num_preemptions == 0


@pytest.mark.parametrize("case", cases_of(*QUICK), indirect=True)
async def test_with_prefill_chunks_of_seven_tokens(case: Case) -> None:
    async with triolet.open_engine(
        model=str(case.folder), runner="inline", num_kv_blocks=256, max_num_batched_tokens=7
    ) as engine:
        prompts, answers = case.prompts[5:12], case.answers[5:12]
        assert await answer_all(engine, prompts, GREEDY) == answers


@pytest.mark.parametrize("case", cases_of(*QUICK), indirect=True)
async def test_with_so_few_blocks_that_requests_are_preempted(case: Case) -> None:
    async with triolet.open_engine(
        model=str(case.folder), runner="inline", num_kv_blocks=40, block_size=4
    ) as engine:
        assert await answer_all(engine, case.prompts, GREEDY) == case.answers
        statistics = engine.statistics()
    assert statistics.num_preemptions > 0
    assert statistics.kv_blocks_free + statistics.kv_blocks_cached == statistics.kv_blocks_total


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5), (5, 3, 1, 4, 2, 0)])
@pytest.mark.parametrize("num_kv_blocks", [200, 40])
async def test_a_seed_gives_the_same_tokens_alone_in_any_batch_and_after_preemption(
    order: tuple[int, ...], num_kv_blocks: int, tmp_path: Path
) -> None:
    folder = make_model("qwen3", tmp_path / "model", vocab_size=VOCAB)
    prompts = make_prompts()[3:9]
    all_params = [
        SamplingParams(
            temperature=0.9, top_p=0.9, top_k=50, seed=index, max_tokens=40, repetition_penalty=1.1
        )
        for index in range(6)
    ]
    async with triolet.open_engine(
        model=str(folder), runner="inline", num_kv_blocks=200, block_size=4
    ) as engine:
        alone = [await answer(engine, *pair) for pair in zip(prompts, all_params, strict=True)]
    together: dict[int, tuple[int, ...]] = {}
    async with triolet.open_engine(
        model=str(folder), runner="inline", num_kv_blocks=num_kv_blocks, block_size=4
    ) as engine:

        async def one(index: int) -> None:
            together[index] = await answer(engine, prompts[index], all_params[index])

        async with trio.open_nursery() as nursery:
            for index in order:
                nursery.start_soon(one, index)
        assert (engine.statistics().num_preemptions > 0) == (num_kv_blocks == 40)
    assert [together[index] for index in range(6)] == alone
