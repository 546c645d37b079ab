"""An engine whose model is computed by real workers over TCP: its answers are those of a thread, whatever dies."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

import triolet
from tests.actors.executors.harness import processes_here
from tests.e2e.test_tensor_parallel import assert_no_rank_is_left, processes_of, ranks_here
from tests.model.tiny import make_model
from tests.ports import free_port
from triolet import Engine, SamplingParams
from triolet.actors.executors.remote.agent import Agent
from triolet.config.address import Address
from triolet.core.replicas.autoscale import AutoscalePolicy
from triolet.engine import open_engine

workers_here = partial(processes_here, "triolet.workers.runner")
TOKEN, NUM_STREAMS, NUM_TOKENS = "sesame", 8, 60
SOON_S = 300.0  # on a machine under load
FIELDS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 160, "num_kv_blocks": 80}


def free_address() -> Address:
    """Return an address of this machine at which nothing listens."""
    return Address("127.0.0.1", free_port())


def killing(process: int) -> Callable[[], None]:
    return partial(os.kill, process, signal.SIGKILL)


async def answers_of(engine: Engine, end: Callable[[], None] | None = None) -> dict[int, list[int]]:
    """Read all streams at once; end something after some tokens."""
    answers: dict[int, list[int]] = {index: [] for index in range(NUM_STREAMS)}
    to_end = [] if end is None else [end]

    async def read(index: int) -> None:
        params = SamplingParams(
            temperature=0.9 * (index % 2), seed=index, max_tokens=NUM_TOKENS, ignore_eos=True
        )
        async with engine.generate([index + 3] * (5 * index + 1), params) as stream:
            async for output in stream:
                answers[index] = list(output.outputs[0].token_ids)
                if to_end and sum(map(len, answers.values())) > 100:
                    to_end.pop()()

    async with trio.open_nursery() as nursery:
        for index in range(NUM_STREAMS):
            nursery.start_soon(read, index)
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
async def test_workers_answer_as_a_thread_and_the_death_of_one_shows_in_no_answer(
    replicas: int, tmp_path: Path
) -> None:
    folder = str(make_model("llama", tmp_path / "llama", with_tokenizer=True))
    address = free_address()
    async with triolet.open_engine(folder, **FIELDS) as engine:
        expected = await answers_of(engine)
    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(Agent(address, TOKEN).run)
        async with triolet.open_engine(
            folder,
            runner="remote",
            worker_listen=str(address),
            worker_token=TOKEN,
            replicas=replicas,
            **FIELDS,
        ) as engine:
            assert await answers_of(engine) == expected
            for _ in range(2):
                while len(workers_here()) < 2:  # noqa: ASYNC110 - the agents start them
                    await trio.sleep(0.1)
                assert await answers_of(engine, killing(workers_here()[0])) == expected
                assert await answers_of(engine, killing(workers_here()[-1])) == expected
            # A worker that waits may be killed, and the one that computes when the answers are complete in the engine.
            with trio.fail_after(SOON_S):
                while engine.statistics().num_restarts < 1:  # noqa: ASYNC110 - it tells of no change
                    await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    assert workers_here() == []


@pytest.mark.slow
async def test_a_machine_that_leaves_for_good_takes_no_stream_along(tmp_path: Path) -> None:
    folder = str(make_model("llama", tmp_path / "llama", with_tokenizer=True))
    address = free_address()
    async with triolet.open_engine(folder, **FIELDS) as engine:
        expected = await answers_of(engine)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Agent(address, TOKEN).run)
        other = await nursery.start(
            partial(
                trio.run_process,
                [sys.executable, "-m", "triolet", "worker", "--connect", str(address)],
                env={**os.environ, "TRIOLET_WORKER_TOKEN": TOKEN},
                check=False,
            )
        )
        async with triolet.open_engine(
            folder, runner="remote", worker_listen=str(address), worker_token=TOKEN, replicas=2, **FIELDS
        ) as engine:
            assert await answers_of(engine) == expected
            with trio.fail_after(SOON_S):
                assert await answers_of(engine, other.kill) == expected
                assert await answers_of(engine) == expected
            statistics = engine.statistics()
            assert statistics.num_moved_requests > 0
            assert sum(each.is_living for each in statistics.replicas) == 1
        nursery.cancel_scope.cancel()
    assert workers_here() == []


async def living(engine: Engine, number: int) -> None:
    """Wait until so many replicas compute."""
    with trio.fail_after(SOON_S):
        while sum(each.is_living for each in engine.statistics().replicas) != number:  # noqa: ASYNC110
            await trio.sleep(0.1)


@pytest.mark.slow
async def test_a_worker_beyond_the_least_computes_while_requests_wait_and_waits_when_they_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_engine, "AutoscalePolicy", partial(AutoscalePolicy, grow_s=0.5, shrink_s=3.0))
    folder = str(make_model("llama", tmp_path / "llama", with_tokenizer=True))
    fields = {**FIELDS, "max_num_seqs": 2, "runner": "remote", "worker_token": TOKEN}
    address = free_address()
    async with triolet.open_engine(folder, **FIELDS) as engine:
        expected = await answers_of(engine)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Agent(address, TOKEN).run)
        async with triolet.open_engine(
            folder, worker_listen=str(address), autoscale=(1, 2), **fields
        ) as engine:
            await living(engine, 1)
            is_over = False

            async def load() -> None:
                while not is_over:
                    assert await answers_of(engine) == expected

            async with trio.open_nursery() as asking:
                asking.start_soon(load)
                await trio.sleep(1.0)
                nursery.start_soon(Agent(address, TOKEN).run)  # a machine joins
                await living(engine, 2)
                before = engine.statistics().replicas[1].steps
                with trio.fail_after(SOON_S):
                    while engine.statistics().replicas[1].steps == before:  # noqa: ASYNC110
                        await trio.sleep(0.1)
                is_over = True
            await living(engine, 1)
            assert engine.statistics().num_restarts == 0
            assert await answers_of(engine) == expected
        nursery.cancel_scope.cancel()
    assert workers_here() == []


@pytest.mark.slow
async def test_a_worker_of_two_ranks_answers_as_a_thread_and_the_death_of_either_shows_in_no_answer(
    tmp_path: Path,
) -> None:
    folder = str(make_model("llama", tmp_path / "llama", with_tokenizer=True))
    address = free_address()
    async with triolet.open_engine(folder, **FIELDS) as engine:
        expected = await answers_of(engine)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Agent(address, TOKEN).run)
        async with triolet.open_engine(
            folder,
            runner="remote",
            worker_listen=str(address),
            worker_token=TOKEN,
            tensor_parallel_size=2,
            **FIELDS,
        ) as engine:
            assert await answers_of(engine) == expected
            assert await engine.apply_model("tests.e2e.test_tensor_parallel:rank_of") == [0, 1]
            for rank in (0, 1):
                assert await answers_of(engine, killing((await processes_of(engine))[rank])) == expected
            assert engine.statistics().num_restarts == 2
            assert sorted(ranks_here()) == [0, 1]
        nursery.cancel_scope.cancel()
    assert_no_rank_is_left()
