"""Windows give blocks back, in all layers or in some, and every token stays transformers' own."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import triolet
from tests.e2e.test_parity import GREEDY, NUM_TOKENS, Case, answer, answer_all, made_case
from triolet import Engine, SamplingParams
from triolet.core.kv_cache.block_pool import BlockPool
from triolet.core.step_plan import StepPlan
from triolet.model.runner import ModelRunner, PendingStep

SIZE = 4  # tokens of a block
NUM_TOKENS_OF_LONGEST = 60 + NUM_TOKENS
WINDOWS = {"mistral": 11, "phi3": 13}  # families whose layers all have one
# Families of which some layers have one: of three layers, one has full attention.
MIXED = ("gemma3", "gpt-oss", "gemma2", "cohere2", "olmo3", "exaone4")
QUICK = ("mistral", "gemma3", "gpt-oss")


def params_of(*families: str) -> list[Any]:
    return [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in families]


@pytest.fixture(scope="module", params=params_of(*WINDOWS))
def windowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, int]:
    return made_case(request.param, tmp_path_factory.mktemp("models")), WINDOWS[request.param]


@pytest.fixture(scope="module", params=params_of(*MIXED))
def mixed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return made_case(request.param, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module", params=params_of("mistral", *MIXED))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return made_case(request.param, tmp_path_factory.mktemp("models"))


@asynccontextmanager
async def open_engine(case: Case, **fields: Any) -> AsyncIterator[Engine]:
    limits: dict[str, Any] = {
        "runner": "inline",
        "block_size": SIZE,
        "max_model_len": 64 + NUM_TOKENS,
    } | fields
    async with triolet.open_engine(model=str(case.folder), **limits) as engine:
        yield engine
        statistics = engine.statistics()
    assert statistics.kv_blocks_free + statistics.kv_blocks_cached == statistics.kv_blocks_total


@pytest.fixture(params=["", pytest.param("torch", marks=pytest.mark.slow)], ids=["C++", "torch"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        from triolet.model.loading import decoder

        monkeypatch.setattr(decoder, "can_plan", lambda *_: False)


@pytest.mark.usefixtures("backend")
async def test_an_answer_longer_than_the_cache_in_chunks_and_again_from_the_prefix_cache(
    windowed: tuple[Case, int],
) -> None:
    case, window = windowed
    num_blocks = 1 + -(-window // SIZE)  # of 124 tokens those that a window touches
    async with open_engine(case, num_kv_blocks=num_blocks + 1) as engine:
        for index in (8, 12, 12):
            assert await answer(engine, case.prompts[index], GREEDY) == case.answers[index]
    async with open_engine(case, num_kv_blocks=24) as engine:
        assert await answer(engine, case.prompts[8], GREEDY) == case.answers[8]
        hits = engine.statistics().prefix_cache_hits
        whole = [*case.prompts[8], *case.answers[8]]
        await answer(engine, whole[:-1], GREEDY)
        assert engine.statistics().prefix_cache_hits - hits >= len(whole) - 2 * SIZE


@pytest.mark.slow
@pytest.mark.usefixtures("backend")
async def test_in_batches_with_preemption(case: Case) -> None:
    async with open_engine(case, num_kv_blocks=34) as engine:
        assert await answer_all(engine, case.prompts, GREEDY) == case.answers
        assert engine.statistics().num_preemptions > 0


@pytest.mark.slow
async def test_with_chunks_drafts_and_steps_planned_ahead(case: Case) -> None:
    for fields in (
        {"max_num_batched_tokens": 7},
        {"speculative": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
        {"async_scheduling": True},
        {"num_scheduler_steps": 8},
    ):
        async with open_engine(case, num_kv_blocks=34, **fields) as engine:
            assert await answer_all(engine, case.prompts[5:12], GREEDY) == case.answers[5:12]


@pytest.mark.usefixtures("backend")
async def test_layers_with_windows_leave_their_blocks_to_full_attention(mixed: Case) -> None:
    """The longest answer does not fit into so many blocks of all layers; alone, from the prefix cache and in chunks."""
    num_blocks = NUM_TOKENS_OF_LONGEST // SIZE // 2
    async with open_engine(mixed, num_kv_blocks=num_blocks) as engine:
        assert engine.model_info.max_model_len == 64 + NUM_TOKENS
        assert engine.model_info.num_kv_blocks == 3 * num_blocks
        assert engine.model_info.cache_windows[0] is None
        assert len(set(engine.model_info.cache_windows[1:])) == 1
        for index in (8, 12):
            assert await answer(engine, mixed.prompts[index], GREEDY) == mixed.answers[index]
    async with open_engine(mixed, num_kv_blocks=60) as engine:
        for index in (8, 12, 12):
            hits = engine.statistics().prefix_cache_hits
            assert await answer(engine, mixed.prompts[index], GREEDY) == mixed.answers[index]
        assert engine.statistics().prefix_cache_hits - hits >= 48
        hits = engine.statistics().prefix_cache_hits
        whole = [*mixed.prompts[12], *mixed.answers[12]]
        await answer(engine, whole[:-1], GREEDY)
        assert engine.statistics().prefix_cache_hits - hits >= len(whole) - 2 * SIZE
    async with open_engine(mixed, num_kv_blocks=num_blocks, max_num_batched_tokens=7) as engine:
        assert await answer(engine, mixed.prompts[8], GREEDY) == mixed.answers[8]


@pytest.mark.slow
async def test_in_cache_groups_of_several_layers_the_last_of_them_smaller(tmp_path: Path) -> None:
    types = ["full_attention" if index in (2, 5) else "sliding_attention" for index in range(11)]
    case = made_case("gemma3", tmp_path, num_hidden_layers=11, layer_types=types)
    async with open_engine(case, num_kv_blocks=34) as engine:
        assert len(engine.model_info.cache_windows) == 6  # of two layers each, but for the last one
        assert await answer_all(engine, case.prompts, GREEDY) == case.answers


@pytest.mark.slow
@pytest.mark.usefixtures("backend")
async def test_several_answers_to_one_prompt(mixed: Case) -> None:
    several = SamplingParams(temperature=1, top_k=1, n=3, max_tokens=NUM_TOKENS)
    for fields in ({}, {"enable_prefix_caching": False}):
        async with open_engine(mixed, num_kv_blocks=60, **fields) as engine:
            output = await engine.complete(mixed.prompts[8], several)
            assert [tuple(one.token_ids) for one in output.outputs] == [mixed.answers[8]] * 3


@pytest.mark.slow
async def test_after_the_process_of_the_model_was_killed_and_after_a_sleep(mixed: Case) -> None:
    async with open_engine(mixed, num_kv_blocks=60, runner="process") as engine:
        num_blocks = engine.model_info.num_kv_blocks
        got, was_killed = tuple[int, ...](), False
        async with engine.generate(mixed.prompts[8], GREEDY) as stream:
            async for output in stream:
                got = tuple(output.outputs[0].token_ids)
                if len(got) >= 30 and not was_killed:
                    assert engine.model_info.process_id is not None
                    os.kill(engine.model_info.process_id, signal.SIGKILL)
                    was_killed = True
        assert got == mixed.answers[8]
        assert engine.statistics().num_restarts > 0
        await engine.sleep(1)
        await engine.wake_up()
        assert engine.statistics().kv_blocks_total == engine.model_info.num_kv_blocks == num_blocks
        assert await answer_all(engine, mixed.prompts[4:12], GREEDY) == mixed.answers[4:12]


async def test_the_next_engine_loads_the_blocks_of_every_group(mixed: Case, tmp_path: Path) -> None:
    stored: dict[str, Any] = {"num_kv_blocks": 30, "kv_store": str(tmp_path)}
    whole = [*mixed.prompts[8], *mixed.answers[8]]
    for is_first in (True, False):
        async with open_engine(mixed, **stored) as engine:
            assert await answer(engine, mixed.prompts[8], GREEDY) == mixed.answers[8]
            loaded = engine.statistics().external_prefix_cache_hits
            assert loaded == 0 if is_first else loaded >= len(mixed.prompts[8]) - SIZE
            assert (
                await answer(engine, whole[:-9], SamplingParams(temperature=0, max_tokens=9))
                == (mixed.answers[8][-9:])
            )


@pytest.mark.usefixtures("backend")
async def test_what_a_window_has_passed_is_never_read(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are not in use are filled with NaN, which any read would spread."""
    released = list[int]()
    release = BlockPool.release

    def noting(self: BlockPool, block_ids: list[int], *, step_id: int | None = None) -> None:
        release(self, block_ids, step_id=step_id)
        released.extend(block_ids)

    submit, num_poisoned = ModelRunner.submit, 0

    def poisoned(self: ModelRunner, plan: StepPlan) -> PendingStep:
        nonlocal num_poisoned
        given = {block_id for row in plan.rows for block_id in row.new_block_ids}
        for block_id in {*released} - given:
            num_poisoned += 1
            for layer in self._cache:
                layer.keys[block_id] = torch.nan
                layer.values[block_id] = torch.nan
        released.clear()
        return submit(self, plan)

    monkeypatch.setattr(BlockPool, "release", noting)
    monkeypatch.setattr(ModelRunner, "submit", poisoned)
    monkeypatch.setattr(ModelRunner, "begin", lambda *_: None)
    async with open_engine(
        case, num_kv_blocks=40, enable_prefix_caching=False, num_scheduler_steps=1
    ) as engine:
        for index in (8, 5, 11):
            assert await answer(engine, case.prompts[index], GREEDY) == case.answers[index]
    assert num_poisoned > 20
