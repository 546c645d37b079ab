"""Two plans on the pipe: the runner's process is sent a plan before it has answered the one before it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.actors.executors.fake_worker import NUM_BLOCKS
from tests.actors.executors.harness import (
    ask_six,
    executor_that,
    first_step,
    ignore,
    open_files,
    remote_that,
    step_ahead,
)
from tests.actors.executors.test_process import jump_when_it_hangs
from tests.actors.harness import answer_of
from triolet.actors.executors.contract import LookAheadExecutor
from triolet.core.step_plan import PlanRow, StepPlan, StepResult
from triolet.core.worker_call import WorkerCall
from triolet.errors import RunnerDied, RunnerFailed

SOON_S = 300.0  # on a machine that is busy with other things; nothing takes this long when all is well


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    before = open_files()
    yield
    assert open_files() == before


@pytest.fixture(params=["process", pytest.param("remote", marks=pytest.mark.slow)])
async def make(request: pytest.FixtureRequest, nursery: trio.Nursery) -> Callable[..., LookAheadExecutor]:
    if request.param == "process":
        return lambda *misdeed: executor_that("ahead", *misdeed)
    return lambda *misdeed: remote_that(nursery, "ahead", *misdeed)


async def compute(
    executor: LookAheadExecutor, plans: tuple[StepPlan, ...], *, is_ahead: bool = True
) -> list[StepResult]:
    """The results of plans of which each is sent while the one before it is computed."""
    told, waiting = list[StepResult](), deque(plans)

    def send_ahead() -> None:
        if waiting and is_ahead:
            executor.send_ahead(waiting[0])

    def tell(result: StepResult) -> None:
        told.append(result)
        send_ahead()

    first = waiting.popleft()
    send_ahead()
    last = await executor.execute_in_turn(first, tell, lambda: waiting.popleft() if waiting else None)
    return [*told, last]


def tokens(results: list[StepResult]) -> tuple[int, ...]:
    return tuple(token.token_id for result in results for token in result.tokens)


def plans(number: int) -> tuple[StepPlan, ...]:
    return first_step(), *map(step_ahead, range(2, number + 1))


# ------------------------------------------------------------------------------------------ on the pipe


async def test_a_step_is_handed_to_the_device_before_the_result_of_the_one_before_it_was_read(
    make: Callable[..., LookAheadExecutor],
) -> None:
    executor = make("wait_for_the_next", "all but 9")
    with trio.fail_after(SOON_S):
        async with executor.running():
            await executor.start(ignore)
            results = await compute(executor, plans(9))
    assert [result.step_id for result in results] == list(range(1, 10))
    assert tokens(results) == answer_of([1, 2, 3], 5, 9)


async def test_plans_that_are_not_sent_ahead_are_computed_one_after_the_other_with_the_same_results() -> None:
    executor = executor_that("ahead")
    async with executor.running():
        await executor.start(ignore)
        results = await compute(executor, plans(9), is_ahead=False)
    assert tokens(results) == answer_of([1, 2, 3], 5, 9)


async def test_a_plan_that_was_taken_back_is_computed_and_its_late_result_comes_before_anything_else() -> (
    None
):
    executor, told = executor_that("ahead"), list[StepResult]()
    async with executor.running():
        await executor.start(ignore)
        executor.send_ahead(step_ahead(2))
        told.append(await executor.execute_in_turn(first_step(), told.append, lambda: None))
        assert [result.step_id for result in told] == [1, 2]
        outcome = await executor.call(WorkerCall("echo", False, (1,), {}, False), None)
        assert outcome.value == ([1], {})
        again = await executor.execute(attrs.evolve(first_step(), step_id=5, ended=(0,)), told.append)
    assert tokens([again]) == answer_of([1, 2, 3], 5, 1)


async def test_a_plan_is_sent_ahead_only_behind_the_one_that_it_was_made_after() -> None:
    executor, told = executor_that("ahead"), list[StepResult]()
    async with executor.running():
        await executor.start(ignore)
        executor.send_ahead(step_ahead(3))
        told.append(await executor.execute_in_turn(first_step(), told.append, lambda: None))
        assert [result.step_id for result in told] == [1]
        told.append(await executor.execute_in_turn(step_ahead(2), told.append, lambda: None))
    assert [result.step_id for result in told] == [1, 2, 3]
    assert tokens(told) == answer_of([1, 2, 3], 5, 3)


async def test_a_plan_that_the_pipe_has_no_room_for_is_sent_ahead_as_well() -> None:
    long_prompt = tuple(range(50)) * 5000
    start = attrs.evolve(first_step(long_prompt).starts[0], row_id=1, request_id="long", epoch=2)
    second = step_ahead(2)
    large = attrs.evolve(
        second,
        starts=(start,),
        rows=(*second.rows, PlanRow(1, 0, 4, (NUM_BLOCKS - 1,), sample=False)),
    )
    executor = executor_that("ahead", "wait_for_the_next", 1)
    with trio.fail_after(SOON_S):
        async with executor.running():
            await executor.start(ignore)
            results = await compute(executor, (first_step(), large, step_ahead(3)))
    assert tokens(results) == answer_of([1, 2, 3], 5, 3)


# ---------------------------------------------------------------------------------------------- faults


async def test_what_the_device_refuses_to_take_is_told_after_the_results_before_it(tmp_path: Path) -> None:
    executor, told = executor_that("ahead", "raise", "submit 2", tmp_path / "mark"), list[StepResult]()

    async def live() -> None:
        async with executor.running():
            await executor.start(ignore)
            second = step_ahead(2)
            executor.send_ahead(second)
            await executor.execute_in_turn(first_step(), told.append, lambda: second)

    with pytest.raises(RunnerFailed, match=r"planted$"):
        await live()
    assert tokens(told) == answer_of([1, 2, 3], 5, 1)


async def test_a_step_has_its_time_from_the_result_of_the_one_before_it(
    mock_clock: MockClock, nursery: trio.Nursery
) -> None:
    executor = executor_that("ahead", "wait_for_the_next", "all", step_timeout=1.0)
    first, *others = plans(4)
    told, waiting = list[StepResult](), deque(others)

    async def advance(seconds: float) -> None:
        await wait_all_tasks_blocked(0.01)
        mock_clock.jump(seconds)
        await wait_all_tasks_blocked(0.01)

    async def send_the_others() -> None:
        for number, plan in enumerate(others):
            await advance(0.9)
            executor.send_ahead(plan)
            while len(told) == number:
                await wait_all_tasks_blocked(0.01)
        await advance(1.1)

    async def live() -> None:
        async with executor.running():
            await executor.start(ignore)
            nursery.start_soon(send_the_others)
            await executor.execute_in_turn(first, told.append, lambda: waiting.popleft() if waiting else None)

    with pytest.raises(RunnerDied, match=r"took more than 1.0 s for a step \(step_timeout\)") as caught:
        await live()
    assert caught.value.is_hang
    assert tokens(told) == answer_of([1, 2, 3], 5, 3)


POINTS = ("submit 7", "7", "tell 7")


@pytest.mark.parametrize("when", POINTS)
@pytest.mark.parametrize(
    "misdeed",
    ["kill", *(pytest.param(name, marks=pytest.mark.slow) for name in ("raise", "segfault", "exit", "rubbish"))],
)  # fmt: skip
async def test_a_process_that_ends_with_two_steps_open_costs_no_token(
    misdeed: str, when: str, tmp_path: Path
) -> None:
    assert await ask_six(executor_that("ahead", misdeed, when, tmp_path / "mark"), async_scheduling=True) == 1


@pytest.mark.slow
@pytest.mark.parametrize("when", POINTS)
async def test_a_process_that_hangs_with_two_steps_open_costs_no_token(
    when: str, tmp_path: Path, mock_clock: MockClock
) -> None:
    mark = tmp_path / "mark"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(jump_when_it_hangs, mock_clock, mark, 1.0)
        executor = executor_that("ahead", "hang", when, mark, step_timeout=1.0)
        assert await ask_six(executor, async_scheduling=True) == 1


@pytest.mark.parametrize("when", [1, pytest.param(7, marks=pytest.mark.slow)])
async def test_a_step_without_memory_voids_the_one_that_was_handed_over_behind_it(when: int) -> None:
    assert await ask_six(executor_that("ahead", "lack_memory", when), async_scheduling=True) == 0
