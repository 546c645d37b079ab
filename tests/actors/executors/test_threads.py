"""Work in threads of this process: a clean-up is done once, whatever becomes of its task or of the machine."""

from __future__ import annotations

import threading

import pytest
import trio

from triolet.actors.executors.threads import clean_up_in_thread
from triolet.errors import ResourceShortage

HERE = threading.get_ident()


async def test_a_clean_up_of_a_cancelled_task_runs_to_its_end_in_a_thread() -> None:
    threads: list[int] = []
    with trio.CancelScope() as scope:
        scope.cancel()
        await clean_up_in_thread(lambda: threads.append(threading.get_ident()), "a test")
        assert len(threads) == 1 and threads != [HERE]
        await trio.lowlevel.checkpoint()
    assert scope.cancelled_caught


async def test_a_clean_up_without_a_thread_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    threads: list[int] = []
    monkeypatch.setattr(trio.to_thread, "run_sync", refuse)
    await clean_up_in_thread(lambda: threads.append(threading.get_ident()), "a test")
    assert threads == [HERE]


async def test_a_clean_up_that_lacks_a_resource_itself_is_not_done_twice() -> None:
    num_calls = 0

    def fail() -> None:
        nonlocal num_calls
        num_calls += 1
        raise MemoryError

    with pytest.raises(ResourceShortage, match="memory for a test"):
        await clean_up_in_thread(fail, "a test")
    assert num_calls == 1
