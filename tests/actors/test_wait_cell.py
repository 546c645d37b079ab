from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from triolet.actors.channels import WaitCell


async def wait(bell: WaitCell, woken: list[str]) -> None:
    await bell.wait()
    woken.append("woken")


async def test_a_ring_wakes_the_waiting_task_once(autojump_clock: MockClock) -> None:
    bell, woken = WaitCell(), list[str]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, bell, woken)
        await wait_all_tasks_blocked()
        assert woken == []
        bell.ring()
        bell.ring()
    assert woken == ["woken"]


async def test_a_ring_that_no_task_waits_for_is_forgotten(autojump_clock: MockClock) -> None:
    bell = WaitCell()
    bell.ring()
    with trio.move_on_after(1) as scope:
        await bell.wait()
    assert scope.cancelled_caught


async def test_a_cancelled_task_is_not_woken_and_the_next_may_wait(autojump_clock: MockClock) -> None:
    bell, woken = WaitCell(), list[str]()
    with trio.move_on_after(1):
        await bell.wait()
    bell.ring()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, bell, woken)
        await wait_all_tasks_blocked()
        bell.ring()
    assert woken == ["woken"]


async def test_two_may_not_wait(autojump_clock: MockClock) -> None:
    bell = WaitCell()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, bell, [])
        await wait_all_tasks_blocked()
        with pytest.raises(AssertionError, match="a task waits here already"):
            await bell.wait()
        bell.ring()
