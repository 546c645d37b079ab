"""Who keeps the event loop from the others is measured, and the engine itself does not."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
import trio

from tests.actors.harness import fake_engine
from tests.source_tree import ROOT, SRC
from triolet.observability.loop_monitor import LONG_STEP_S, LoopMonitor


async def hog() -> None:
    await trio.lowlevel.checkpoint()
    time.sleep(3 * LONG_STEP_S)  # noqa: ASYNC251 - that is what a hog does
    await trio.lowlevel.checkpoint()


async def test_the_longest_step_is_measured_and_named() -> None:
    watch = LoopMonitor()
    with watch.installed():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hog, name="the hog")
            nursery.start_soon(trio.sleep, 0.01)
    assert watch.longest_name == "the hog"
    assert 3 * LONG_STEP_S <= watch.longest_s < 1
    assert watch.num_long >= 1


async def test_who_waits_is_no_hog() -> None:
    watch = LoopMonitor()
    with watch.installed():
        await trio.sleep(0.5)
        assert watch.longest_s < 0.45
    num_steps = watch.num_steps
    await trio.lowlevel.checkpoint()
    assert watch.num_steps == num_steps


async def test_an_engine_says_how_long_the_longest_was() -> None:
    async with fake_engine() as engine:
        await hog()
        statistics = engine.statistics()
    assert statistics.longest_task_step_s >= 3 * LONG_STEP_S
    assert statistics.num_long_task_steps >= 1


@pytest.mark.slow
def test_with_256_streams_and_a_megabyte_of_prompt_steps_are_short() -> None:
    """In processor time: on a busy machine some steps last long because others were given the processor meanwhile."""
    lines = subprocess.check_output(
        [sys.executable, "benchmarks/loop_hogs.py", "--rounds", "1", "--tokens", "60", "--settle"],
        cwd=ROOT,
        env={"PYTHONPATH": str(SRC), "PATH": ""},
        text=True,
    ).splitlines()
    for figures in map(json.loads, lines):
        assert figures["task_steps"] > 256 * 60
        assert figures["over_10_ms_of_work"] <= 2
