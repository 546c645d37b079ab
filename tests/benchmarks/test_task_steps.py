"""The instrument that measures how long task steps hold an event loop."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator

import pytest
import trio

from benchmarks.task_steps import CpuWait, TaskSteps


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    """The garbage of earlier tests takes more than 10 ms to collect, in whatever step that is."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def compute() -> None:
    """Hold the loop for more than 10 ms of processor time."""
    until_s = time.thread_time() + 0.02
    while time.thread_time() < until_s:
        pass
    await trio.lowlevel.checkpoint()


async def block() -> None:
    """Hold the loop for more than 10 ms that take no processor time."""
    time.sleep(0.02)  # noqa: ASYNC251 - this is what the instrument is for
    await trio.lowlevel.checkpoint()


async def test_a_step_that_computes_is_told_by_both_clocks_and_one_that_waits_by_that_on_the_wall() -> None:
    steps = TaskSteps()
    with steps.installed():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(block)
        waited = steps.take()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(compute)
        computed = steps.take()
    assert waited["longest_ms"] >= 20.0
    assert (waited["longest_task"], waited["longest_work_task"] != "") == ("block", True)
    assert waited["over_10_ms"] >= 1
    assert waited["over_10_ms_of_work"] == 0
    assert computed["longest_work_ms"] >= 19.9
    assert (computed["longest_work_task"], computed["over_10_ms_of_work"]) == ("compute", 1)
    assert computed["long_work_tasks"] == {"compute": 1}


async def test_what_a_step_waits_for_a_processor_counts_by_the_wall_clock_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits_s = itertools.count(step=1000.0)
    monkeypatch.setattr(CpuWait, "seconds", lambda _: next(waits_s))
    steps = TaskSteps()
    with steps.installed():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(block)
        waited = steps.take()
    assert waited["over_10_ms"] >= 1
    assert (waited["over_10_ms_quiet"], waited["longest_quiet_ms"]) == (0, 0.0)


async def test_a_step_that_has_its_processor_takes_as_long_on_a_quiet_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CpuWait, "seconds", lambda _: 5.0)  # and no more
    steps = TaskSteps()
    with steps.installed():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(block)
        waited = steps.take()
    assert waited["longest_quiet_ms"] == waited["longest_ms"] >= 20.0
    assert waited["longest_quiet_task"] == "block"
    assert waited["over_10_ms_quiet"] == waited["over_10_ms"]


async def test_what_was_told_once_is_not_told_again() -> None:
    steps = TaskSteps()
    with steps.installed():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(compute)
        steps.take()
        again = steps.take()
    assert (again["over_10_ms"], again["over_10_ms_quiet"], again["over_10_ms_of_work"]) == (0, 0, 0)
    assert (again["longest_ms"], again["longest_quiet_ms"], again["longest_work_ms"]) == (0.0, 0.0, 0.0)
    assert again["longest_task"] == again["longest_quiet_task"] == again["longest_work_task"] == ""
