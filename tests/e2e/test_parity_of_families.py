"""Every other variant of the native families answers as transformers does, however it is scheduled and restarted."""

from __future__ import annotations

import os
import signal

import attrs
import pytest
import trio

import triolet
from tests.e2e.test_parity import GREEDY, Case, answer, answer_all, made_case
from tests.model.tiny import FAMILIES, NATIVE_FAMILIES
from tests.scale import num_cases
from triolet import RequestOutputKind

pytestmark = pytest.mark.slow

# Of these a sequence keeps two blocks, however long it is.
STATES_ALONE = ("mamba", "mamba-biased", "falcon-mamba", "mamba2", "mamba2-biased")
OTHERS = [family for family in FAMILIES if family not in NATIVE_FAMILIES]
KILLED = tuple(FAMILIES)[:: len(FAMILIES) // num_cases(len(FAMILIES))]


@pytest.fixture(scope="module", params=OTHERS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return made_case(request.param, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module", params=KILLED)
def killed_case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return made_case(request.param, tmp_path_factory.mktemp("models"))


async def test_alone_and_again_from_the_prefix_cache(case: Case) -> None:
    async with triolet.open_engine(
        model=str(case.folder), runner="inline", num_kv_blocks=64, block_size=16
    ) as engine:
        assert engine.model_info.backend == "native"
        for index in (2, 8, 12, 12):
            assert await answer(engine, case.prompts[index], GREEDY) == case.answers[index]
        assert engine.statistics().prefix_cache_hits >= 48


async def test_in_a_batch_of_mixed_lengths(case: Case) -> None:
    async with triolet.open_engine(model=str(case.folder), num_kv_blocks=256) as engine:
        assert await answer_all(engine, case.prompts, GREEDY) == case.answers


async def test_with_prefill_chunks_of_seven_tokens(case: Case) -> None:
    async with triolet.open_engine(
        model=str(case.folder), runner="inline", num_kv_blocks=256, max_num_batched_tokens=7
    ) as engine:
        assert await answer_all(engine, case.prompts[5:12], GREEDY) == case.answers[5:12]


async def test_with_so_few_blocks_that_requests_are_preempted(case: Case) -> None:
    # The folder's name ends with the seed.
    num_kv_blocks = 14 if case.folder.name.rpartition("-")[0] in STATES_ALONE else 40
    async with triolet.open_engine(
        model=str(case.folder), runner="inline", num_kv_blocks=num_kv_blocks, block_size=4
    ) as engine:
        assert await answer_all(engine, case.prompts, GREEDY) == case.answers
        assert engine.statistics().num_preemptions > 0


async def test_in_a_process_that_is_killed_in_the_middle(killed_case: Case) -> None:
    case = killed_case
    async with triolet.open_engine(model=str(case.folder), runner="process", num_kv_blocks=256) as engine:
        first = engine.model_info.process_id
        assert first is not None
        found: dict[int, list[int]] = {index: [] for index in range(len(case.prompts))}
        was_killed = False

        async def read(index: int) -> None:
            nonlocal was_killed
            params = attrs.evolve(GREEDY, output_kind=RequestOutputKind.DELTA)
            async with engine.generate(case.prompts[index], params) as stream:
                async for output in stream:
                    found[index] += output.outputs[0].token_ids
                    if not was_killed and sum(map(len, found.values())) >= 100:
                        was_killed = True
                        os.kill(first, signal.SIGKILL)

        async with trio.open_nursery() as nursery:
            for index in found:
                nursery.start_soon(read, index)
        assert [tuple(found[index]) for index in found] == case.answers
        assert engine.model_info.process_id != first
