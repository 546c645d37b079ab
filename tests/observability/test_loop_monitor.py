"""Blocking of the event loop is measured, and the engine itself does not block it."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
import trio

from tests.actors.harness import fake_engine
from tests.source_tree import ROOT, SRC
from triolet.observability import loop_monitor
from triolet.observability.loop_monitor import LONG_STEP_S, LoopMonitor


class FakeTime(trio.abc.Instrument):
    """A clock that no neighbour on the machine moves on: 0.5 s for every wait, and what a step says.

    An instrument because pytest-trio installs such a fixture when the test's run begins, and so before the monitor.
    """

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def after_io_wait(self, timeout: float) -> None:
        self.now_s += 0.5


@pytest.fixture
def fake_time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    made = FakeTime()
    monkeypatch.setattr(loop_monitor, "time", made)
    return made


async def test_the_longest_step_is_measured(fake_time: FakeTime) -> None:
    async def hog() -> None:
        fake_time.now_s += 3 * LONG_STEP_S
        await trio.lowlevel.checkpoint()

    watch = LoopMonitor()
    with watch.installed():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hog)
            nursery.start_soon(trio.lowlevel.checkpoint)
    assert watch.longest_s == pytest.approx(3 * LONG_STEP_S)
    assert watch.num_long == 1


async def test_a_task_that_waits_is_no_hog(fake_time: FakeTime) -> None:
    watch = LoopMonitor()
    with watch.installed():
        await trio.sleep(0.01)
        assert watch.longest_s == 0.0
    assert fake_time.now_s >= 0.5


async def test_an_engine_says_how_long_the_longest_was() -> None:
    async with fake_engine() as engine:
        time.sleep(3 * LONG_STEP_S)  # noqa: ASYNC251 - that is what a hog does
        await trio.lowlevel.checkpoint()
        statistics = engine.statistics()
    assert statistics.longest_task_step_s >= 3 * LONG_STEP_S
    assert statistics.num_long_task_steps >= 1


@pytest.mark.slow
def test_with_256_streams_and_a_megabyte_of_prompt_steps_are_short() -> None:
    """In work, not in time: processor time, in units of a loop that runs in the same process on the same machine.

    Garbage collection and cold caches make some steps long that do no more than others, so a share of the steps may
    be long. One hog per token of the answers is twice that share; a prompt tokenized by a task is one step of 0.5 s.
    """
    lines = subprocess.check_output(
        [sys.executable, "benchmarks/loop_hogs.py", "--rounds", "1", "--tokens", "60", "--settle"],
        cwd=ROOT,
        env={"PYTHONPATH": str(SRC), "PATH": ""},
        text=True,
    ).splitlines()
    for figures in map(json.loads, lines):
        assert figures["task_steps"] > 256 * 60
        assert figures["long_steps"] * 500 <= figures["task_steps"], figures
        assert figures["longest_work_ms"] <= 100 * figures["slowness"], figures
