"""Threads that compute beside the event loop give way to it."""

from __future__ import annotations

import contextvars
import threading

import attrs
import pytest
import trio
import trio.testing

from triolet.core.json_text import between_windows
from triolet.observability import loop_monitor
from triolet.observability.loop_monitor import (
    MAX_WAIT_S,
    PIECE_S,
    SHARE,
    LoopWatch,
    ThreadShare,
    run_in_thread,
)


@attrs.define
class PretendedTime:
    """Clock and event of a loop whose thread works and waits at once."""

    now_s: float = 0.0
    worked_s: float = 0.0
    loop_waits: bool = False
    longest_wait_s: float = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def work(self, seconds: float) -> None:
        self.now_s += seconds
        self.worked_s += seconds

    def set(self) -> None:
        self.loop_waits = True

    def clear(self) -> None:
        self.loop_waits = False

    def wait(self, timeout: float) -> None:
        if not self.loop_waits:
            self.now_s += timeout
            self.longest_wait_s = max(self.longest_wait_s, timeout)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> PretendedTime:
    pretended = PretendedTime()
    monkeypatch.setattr(loop_monitor, "time", pretended)
    return pretended


def share_of(pretended: PretendedTime, free_s: float = 0.0) -> ThreadShare:
    return ThreadShare(pretended, free_s)  # type: ignore[arg-type]


def test_while_the_event_loop_has_work_a_thread_takes_its_share_of_the_time(
    pretended: PretendedTime,
) -> None:
    share = share_of(pretended)

    def work() -> None:
        for number in range(1000):
            pretended.work(PIECE_S / 7 * (number % 15))
            between_windows.get()()

    contextvars.copy_context().run(share.run, work)
    assert pretended.worked_s / pretended.now_s == pytest.approx(SHARE, rel=0.05)
    assert pretended.longest_wait_s <= MAX_WAIT_S


def test_a_piece_that_was_long_is_followed_by_the_longest_pause(pretended: PretendedTime) -> None:
    def work() -> None:
        pretended.work(1.0)
        between_windows.get()()

    contextvars.copy_context().run(share_of(pretended).run, work)
    assert pretended.now_s == pytest.approx(1.0 + MAX_WAIT_S)


def test_while_the_event_loop_waits_a_thread_takes_all_of_the_time(pretended: PretendedTime) -> None:
    watch = LoopWatch()
    watch.loop_waits = pretended  # type: ignore[assignment]
    share = share_of(pretended)
    for timeout, has_waited in ((0.0, True), (0.5, False)):
        pretended.longest_wait_s = 0.0
        watch.before_io_wait(timeout)  # no time: other tasks are to run at once
        pretended.work(2 * PIECE_S)
        share.give_way()
        assert (pretended.longest_wait_s > 0.0) is has_waited
        watch.after_io_wait(timeout)


def test_work_that_is_over_within_its_free_time_makes_no_pause(pretended: PretendedTime) -> None:
    share = share_of(pretended, free_s=1.0)

    def work() -> None:
        while pretended.now_s < 1.0:
            pretended.work(0.3)
            between_windows.get()()
            assert pretended.longest_wait_s == 0.0 or pretended.now_s > 1.0

    contextvars.copy_context().run(share.run, work)
    assert pretended.longest_wait_s > 0.0


async def test_only_threads_give_way_and_the_loop_is_watched_only_while_they_work() -> None:
    found = list[object]()
    may_go_on = threading.Event()

    def work() -> None:
        may_go_on.wait(60)
        found.append(between_windows.get())

    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(run_in_thread, work)
        await trio.testing.wait_all_tasks_blocked()
        watch = loop_monitor._of_this_loop.get()
        trio.lowlevel.remove_instrument(watch)  # one for both, or this would be an error
        trio.lowlevel.add_instrument(watch)
        may_go_on.set()
    [first, second] = found
    assert isinstance(first.__self__, ThreadShare)  # type: ignore[attr-defined]
    assert first != second
    assert between_windows.get() not in found
    with pytest.raises(KeyError):
        trio.lowlevel.remove_instrument(watch)


async def test_an_error_of_the_work_is_raised_and_the_loop_is_no_longer_watched() -> None:
    def fail() -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        await run_in_thread(fail)
    with pytest.raises(KeyError):
        trio.lowlevel.remove_instrument(loop_monitor._of_this_loop.get())
