"""A group of processes ends as one, and refuses what it does not honour and results in which its ranks disagree."""

from __future__ import annotations

import errno
import math
import os
import signal
import sys
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.actors.executors.harness import executor_that, first_step, ignore
from tests.actors.harness import FakeExecutor, answer_of, fake_engine, unexpected
from triolet import SamplingParams
from triolet.actors.executors.connection import RunnerProcess
from triolet.actors.executors.group import GRACE_S, GroupExecutor, LocalGroup, _agreed
from triolet.config.engine import EngineConfig
from triolet.core.step_plan import SampledToken, StepResult
from triolet.errors import ConfigError, ResourceShortage, RunnerDied, RunnerFailed


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("runner", "inline"),
        ("runner", "thread"),
        ("quantization", "int8"),
        ("enable_lora", True),
        ("convert", "embed"),
        ("classifier_from_token", ("no", "yes")),
        ("weights_cache", "folder"),
        ("kv_store", "folder"),
        ("kv_pool_bytes", 2**20),
        ("profile_dir", "folder"),
        ("device", "cuda:1"),
    ],
)
def test_what_a_group_does_not_honour_is_refused_by_name(field: str, value: Any) -> None:
    fields: dict[str, Any] = {"model": "folder", "tensor_parallel_size": 2, field: value}
    with pytest.raises(ConfigError, match=f"tensor_parallel_size must be 1 with {field} ") as caught:
        LocalGroup(EngineConfig(**fields))
    assert caught.value.field == "tensor_parallel_size"


def result_of(token_id: int, elapsed_s: float = 0.0) -> StepResult:
    return StepResult(3, (SampledToken("a", 0, 5, token_id),), elapsed_s)


def test_a_step_has_the_result_of_rank_0_if_the_ranks_agree_on_its_tokens() -> None:
    assert _agreed([result_of(7, 0.1), result_of(7, 0.2)]) == result_of(7, 0.1)


def test_ranks_that_choose_different_tokens_end_the_step() -> None:
    with pytest.raises(RunnerFailed, match="rank 2 chose"):
        _agreed([result_of(7), result_of(7), result_of(8)])


async def test_ranks_that_do_not_reply_have_the_grace_from_the_first_failure_and_not_from_later_ones(
    autojump_clock: MockClock,
) -> None:
    ranks: Any = [SimpleNamespace() for _ in range(4)]
    group = GroupExecutor(ranks, trio.lowlevel.checkpoint)

    async def fail(rank: int) -> None:
        await trio.sleep(math.inf if rank == 3 else 0.75 * GRACE_S * rank)
        raise RunnerFailed(f"rank {rank}")

    began_s = trio.current_time()
    with pytest.raises(RunnerFailed, match="rank 0"):
        await group._on_all(fail, GRACE_S)
    assert trio.current_time() - began_s == pytest.approx(GRACE_S)


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, ""), OSError(errno.ENOSPC, ""), MemoryError()])
async def test_a_shortage_while_the_ranks_of_a_group_meet_is_no_crash(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, text: str) -> int:
        raise error

    group = LocalGroup(EngineConfig(model="folder", tensor_parallel_size=2, keep_standby=False))
    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(ResourceShortage, match="a process for the model runner"):
        async with group.running():
            pass
    group.close()


class Rank:
    """A rank of a group whose own tasks fail after a time."""

    peers: Sequence[Rank] = ()

    def __init__(self, fails_after_s: float = math.inf) -> None:
        self.fails_after_s = fails_after_s

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.fail)
            yield
            nursery.cancel_scope.cancel()

    async def fail(self) -> None:
        await trio.sleep(self.fails_after_s)
        raise MemoryError("reading its log")


async def test_a_rank_that_fails_ends_its_group_with_its_own_error(autojump_clock: MockClock) -> None:
    ranks: Any = [Rank(), Rank(1.0)]
    with pytest.RaisesGroup(MemoryError, flatten_subgroups=True):
        async with GroupExecutor(ranks, trio.lowlevel.checkpoint).running():
            await trio.sleep_forever()


async def test_a_group_with_a_rank_that_fails_is_restarted(autojump_clock: MockClock) -> None:
    class Grouped(FakeExecutor):
        @asynccontextmanager
        async def running(self) -> AsyncGenerator[None]:
            ranks: Any = [Rank(), Rank(math.inf if self.num_lives else 1.0)]
            async with GroupExecutor(ranks, trio.lowlevel.checkpoint).running():
                yield

    executor = Grouped(num_blocks=64, block_size=4)
    async with fake_engine(executor) as engine:
        await trio.sleep(5)
        output = await engine.complete([1], SamplingParams(max_tokens=2, seed=1))
    assert output.outputs[0].token_ids == answer_of([1], 1, 2)
    assert executor.num_lives == 2


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process is known to end when it has ended")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("when", ["idle", "step"])
async def test_the_death_of_a_rank_is_told_before_the_memory_of_any_is_freed(
    monkeypatch: pytest.MonkeyPatch, when: str, rank: int
) -> None:
    wait_for_exit = RunnerProcess._wait_for_exit
    is_freed, num_exited = trio.Event(), 0

    async def wait_longer(process: RunnerProcess) -> None:
        nonlocal num_exited
        await wait_for_exit(process)
        await is_freed.wait()
        num_exited += 1

    monkeypatch.setattr(RunnerProcess, "_wait_for_exit", wait_longer)
    ranks = [executor_that("hang", 1), executor_that("hang", 1)]
    group = GroupExecutor(ranks, trio.lowlevel.checkpoint)

    async def live() -> None:
        async with group.running():
            await group.start(ignore)
            process = ranks[rank]._here()
            assert isinstance(process, RunnerProcess)
            if when == "step":
                threading.Timer(0.1, os.kill, [process.child.pid, signal.SIGKILL]).start()
                await group.execute(first_step(), unexpected)
            os.kill(process.child.pid, signal.SIGKILL)
            await trio.sleep_forever()

    with trio.fail_after(300):
        with pytest.raises(RunnerDied, match="was killed by SIGKILL"):
            await live()
        assert num_exited == 0
        is_freed.set()
        for each in ranks:
            assert each._former is not None
            await each._former.gone()
    assert num_exited == 2
