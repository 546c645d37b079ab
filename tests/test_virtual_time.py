"""The clock of tests: what takes long in a thread takes no virtual time."""

from __future__ import annotations

import threading
import time

import trio
from trio.testing import MockClock


async def test_virtual_time_stands_still_while_any_thread_works(autojump_clock: MockClock) -> None:
    first_is_over = threading.Event()

    def second() -> None:
        first_is_over.wait()
        time.sleep(0.05)  # long enough for a clock that jumps to be far beyond every deadline here

    began_s = trio.current_time()
    with trio.fail_after(1):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, second)
            await trio.to_thread.run_sync(time.sleep, 0.05)
            first_is_over.set()
    assert trio.current_time() == began_s


async def test_virtual_time_jumps_again_after_a_thread_that_failed(autojump_clock: MockClock) -> None:
    try:
        await trio.to_thread.run_sync(lambda: 1 // 0)
    except ZeroDivisionError:
        await trio.sleep(3600)
    assert trio.current_time() >= 3600
