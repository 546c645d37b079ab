"""An engine that was left has left nothing: no task, no thread, no process."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import trio

import triolet
from triolet import SamplingParams


def child_processes() -> set[int]:
    """Of this process, those that have ended and were not waited for included."""
    children = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(after_name[1]) == os.getpid():
            children.add(int(path.parent.name))
    return children


def threads() -> set[threading.Thread]:
    """Without those that Trio keeps for later, which end by themselves."""
    return {thread for thread in threading.enumerate() if not thread.name.startswith("Trio thread")}


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads processes from /proc")
@pytest.mark.parametrize("runner", ["inline", "thread", "process"])
async def test_leaving_an_engine_leaves_no_task_no_thread_and_no_process(runner: str) -> None:
    processes_before, threads_before = child_processes(), threads()
    tasks_before = trio.lowlevel.current_statistics().tasks_living
    async with triolet.open_engine(runner=runner, num_kv_blocks=64) as engine:
        output = await engine.complete(
            "Hello!", SamplingParams(max_tokens=2)
        )  # ready when the scope is entered
        assert output.finished
        assert trio.lowlevel.current_statistics().tasks_living > tasks_before
        assert bool(child_processes() - processes_before) == (runner == "process")
    assert trio.lowlevel.current_statistics().tasks_living == tasks_before
    # Those of earlier tests may have ended meanwhile.
    assert threads() - threads_before == set()
    assert child_processes() - processes_before == set()
