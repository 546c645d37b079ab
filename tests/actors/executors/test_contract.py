"""The contract of an executor, held by every registered one: where a model runs makes no difference to its answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import attrs
import pytest
import trio

from tests.actors.executors.fake_worker import NUM_BLOCKS, Misbehaving
from tests.actors.executors.harness import (
    ask_six,
    executor_that,
    first_step,
    ignore,
    life,
    num_runner_threads,
    open_files,
    remote_that,
    run_of,
    second_step,
)
from tests.actors.harness import answer_of, unexpected
from triolet.actors.executors.contract import Executor
from triolet.actors.executors.in_process import InlineExecutor, ThreadExecutor
from triolet.actors.executors.registry import EXECUTORS
from triolet.actors.executors.remote.executor import RemoteExecutor
from triolet.config.engine import EngineConfig
from triolet.core.load_progress import LoadProgress
from triolet.core.step_plan import StepResult
from triolet.errors import ConfigError, InvariantViolated, ModelError, RunnerFailed


@attrs.frozen
class Kind:
    """An executor over the worker that misbehaves, and what errors of foreign code become there."""

    make: Callable[..., Executor]
    step_error: type[Exception] = ValueError
    load_error: type[Exception] = ValueError
    unknown_row: type[Exception] = KeyError


def in_process(kind: type[InlineExecutor | ThreadExecutor], *misdeed: object) -> Executor:
    runner = Misbehaving(*map(str, misdeed))
    return kind(partial(runner.load, EngineConfig(model="nowhere")))


KINDS = {
    "inline": Kind(partial(in_process, InlineExecutor)),
    "thread": Kind(partial(in_process, ThreadExecutor)),
    "process": Kind(executor_that, RunnerFailed, ModelError, RunnerFailed),
}


# Each test with a remote worker starts several processes; `test_remote` has what is tested every time.
SLOW = ("remote",)


@pytest.fixture(
    # Ray starts workers of the remote executor, and has no executor of its own.
    params=[
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name in EXECUTORS
        if name != "ray"
    ]
)
async def kind(request: pytest.FixtureRequest, nursery: trio.Nursery) -> Kind:
    if request.param == "remote":

        def make(*misdeed: object) -> Executor:
            return remote_that(nursery, *misdeed)

        return attrs.evolve(KINDS["process"], make=make)
    return KINDS[request.param]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = open_files()
    yield
    assert (open_files(), num_runner_threads()) == (before, 0)


async def test_an_executor_loads_and_computes(kind: Kind) -> None:
    executor = kind.make()
    async with executor.running():
        info = await executor.start(ignore)
        result = await executor.execute(first_step(), unexpected)
    assert (info.folder, info.num_kv_blocks) == ("nowhere", NUM_BLOCKS)
    assert [token.token_id for token in result.tokens] == list(answer_of([1, 2, 3], 5, 1))


async def test_progress_is_told_in_order_in_the_trio_thread_of_the_first_load_only(kind: Kind) -> None:
    told: list[tuple[int, threading.Thread]] = []
    executor = kind.make()
    for _ in range(2):
        async with executor.running():
            await executor.start(
                lambda progress: told.append((progress.done_bytes, threading.current_thread()))
            )
            assert told == [(part, threading.current_thread()) for part in (0, 2)]


async def test_a_later_life_knows_no_requests(kind: Kind) -> None:
    executor = kind.make()
    for _ in range(2):
        assert (await life(executor, first_step()))[0].tokens
    with pytest.raises(kind.unknown_row, match="0"):
        await life(executor, second_step())


@pytest.mark.parametrize("misdeed", ["raise", "break_an_invariant"])
async def test_what_a_step_raises_is_raised_bare_and_the_next_life_works(
    misdeed: str, kind: Kind, tmp_path: Path
) -> None:
    error = kind.step_error if misdeed == "raise" else InvariantViolated
    executor = kind.make(misdeed, 2, tmp_path / "mark")
    with pytest.raises(error, match=r"planted$"):
        await life(executor, first_step(), second_step())
    assert len(await life(executor, first_step(), second_step())) == 2


@pytest.mark.parametrize("misdeed", ["raise", "refuse"])
async def test_what_a_load_raises_is_raised_bare_and_can_be_tried_again(
    misdeed: str, kind: Kind, tmp_path: Path
) -> None:
    expected: dict[str, tuple[type[Exception], str]] = {
        "raise": (kind.load_error, "planted$"),
        "refuse": (ConfigError, "^max_model_len must be at most 256; got 512$"),
    }
    error, message = expected[misdeed]
    executor = kind.make(misdeed, "load", tmp_path / "mark")
    with pytest.raises(error, match=message):
        await life(executor)
    assert await life(executor, first_step())


async def test_an_on_progress_that_raises_ends_the_load_with_its_error(kind: Kind) -> None:
    def broken(progress: LoadProgress) -> None:
        raise BrokenPipeError("no terminal reads")

    executor = kind.make()
    with pytest.raises(BrokenPipeError, match="no terminal reads"):
        async with executor.running():
            await executor.start(broken)


async def test_every_wait_for_an_executor_is_a_checkpoint(kind: Kind) -> None:
    executor = kind.make()
    async with executor.running():
        with trio.testing.assert_checkpoints():
            await executor.start(ignore)
        with trio.testing.assert_checkpoints():
            await executor.execute(first_step(), unexpected)


async def test_a_run_gives_a_result_for_each_step_as_it_comes(kind: Kind) -> None:
    executor, told = kind.make(), list[StepResult]()
    async with executor.running():
        await executor.start(ignore)
        await executor.execute(first_step(), unexpected)
        told.append(await executor.execute(run_of(5, 3), told.append))
    assert [result.is_last for result in told] == [False] * 4 + [True]
    tokens = [token for result in told for token in result.tokens]
    assert tuple(token.token_id for token in tokens) == answer_of([1, 2, 3], 5, 6)[1:]
    assert [token.position for token in tokens] == [1, 2, 3, 4, 5]


async def test_a_run_that_is_halted_ends_and_the_next_plan_is_computed(kind: Kind) -> None:
    executor, told = kind.make("dawdle", "always"), list[StepResult]()

    def halt(result: StepResult) -> None:
        told.append(result)
        executor.halt()

    async with executor.running():
        await executor.start(ignore)
        await executor.execute(first_step(), unexpected)
        told.append(await executor.execute(run_of(64, 3), halt))
        num_steps = len(told)
        again = attrs.evolve(second_step(), step_id=3)
        row = attrs.evolve(again.rows[0], start=3 + num_steps)
        told.append(await executor.execute(attrs.evolve(again, rows=(row,)), unexpected))
    assert num_steps < 64
    expected = answer_of([1, 2, 3], 5, 2 + num_steps)[1:]
    assert tuple(token.token_id for result in told for token in result.tokens) == expected


@pytest.mark.parametrize("num_crashes", [0, 1])
async def test_an_engine_answers_the_same_and_survives_a_crash(
    num_crashes: int, kind: Kind, tmp_path: Path
) -> None:
    misdeed = ("raise", 7, tmp_path / "mark") if num_crashes else ()
    executor = kind.make(*misdeed)
    num_tasks = trio.lowlevel.current_statistics().tasks_living
    assert await ask_six(executor) == num_crashes
    if not isinstance(executor, RemoteExecutor):  # its worker stays, and connects again
        assert trio.lowlevel.current_statistics().tasks_living == num_tasks
