"""The thread that parses long inputs: clients take turns, and it gives way to the event loop."""

from __future__ import annotations

import contextvars
import threading

import attrs
import pytest
import trio
import trio.testing

from triolet.protocol.json.parsing import WINDOW, JsonLimits, between_windows, parse_object
from triolet.server.transport import parse_thread
from triolet.server.transport.parse_thread import MAX_WAIT_S, PIECE_S, SHARE, LoopWatch, parse_in_thread


async def test_a_client_waits_for_one_input_of_each_other_client_and_not_for_all_of_them() -> None:
    order, may_go_on = list[str](), threading.Event()

    def parse(client: str) -> None:
        may_go_on.wait(60)
        order.append(client)

    async with trio.open_nursery() as nursery:
        for client in ("a",) * 20 + ("b",) * 3 + ("c",):
            nursery.start_soon(parse_in_thread, lambda client=client: parse(client), client)
            await trio.testing.wait_all_tasks_blocked()
        may_go_on.set()
    assert order[:5] == ["a", "b", "c", "a", "b"]
    assert sorted(order) == ["a"] * 20 + ["b"] * 3 + ["c"]
    assert not parse_thread._of_this_loop.get().turns


async def test_inputs_that_are_not_wanted_any_more_leave_no_turn() -> None:
    may_go_on = threading.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(parse_in_thread, lambda: may_go_on.wait(60), "a")
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(3):
            with trio.move_on_after(0.001):
                await parse_in_thread(lambda: None, "a")
        may_go_on.set()
    assert not parse_thread._of_this_loop.get().turns


@attrs.define
class PretendedTime:
    """Clock and event of a watch whose thread works and waits at once."""

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
    monkeypatch.setattr(parse_thread, "time", pretended)
    return pretended


def watch_with(pretended: PretendedTime) -> LoopWatch:
    watch = LoopWatch()
    watch._loop_waits = pretended  # type: ignore[assignment]
    return watch


def test_while_the_event_loop_has_work_the_thread_takes_its_share_of_the_time(
    pretended: PretendedTime,
) -> None:
    watch = watch_with(pretended)
    watch.after_io_wait(0.0)

    def work() -> None:
        for number in range(1000):
            pretended.work(PIECE_S / 7 * (number % 15))
            between_windows.get()()

    contextvars.copy_context().run(watch.run, work)
    assert pretended.worked_s / pretended.now_s == pytest.approx(SHARE, rel=0.05)
    before_s, watch._since_s = pretended.now_s, pretended.now_s - 1.0
    watch.give_way()
    assert pretended.now_s - before_s == pytest.approx(MAX_WAIT_S)


def test_while_the_event_loop_waits_the_thread_takes_all_of_the_time(pretended: PretendedTime) -> None:
    watch = watch_with(pretended)
    for timeout, has_waited in ((0.0, True), (0.5, False)):
        pretended.longest_wait_s = 0.0
        watch.before_io_wait(timeout)  # no time: other tasks are to run at once
        pretended.work(2 * PIECE_S)
        watch.give_way()
        assert (pretended.longest_wait_s > 0.0) is has_waited
        watch.after_io_wait(timeout)


async def test_only_the_thread_gives_way_and_the_loop_is_watched_only_while_it_works() -> None:
    found = await parse_in_thread(between_windows.get, "a")
    watch = parse_thread._of_this_loop.get().watch
    assert found == watch.give_way
    assert between_windows.get() != watch.give_way
    with pytest.raises(KeyError):
        trio.lowlevel.remove_instrument(watch)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": [' + "1, " * 30_000 + "1]}",
        '{"a": "' + "x" * 100_000 + '"}',
        '{"a": "' + "\\n" * 50_000 + '"}',
        '{"a": [' + '{"b": null}, ' * 2_000 + "{}]}" + " " * 50_000,
    ],
    ids=["numbers", "text", "escapes", "objects"],
)
def test_a_long_text_is_parsed_with_pauses_at_most_a_window_apart(text: str) -> None:
    pauses = 0

    def pause() -> None:
        nonlocal pauses
        pauses += 1

    def parse() -> None:
        between_windows.set(pause)
        parse_object(text.encode(), JsonLimits())

    contextvars.copy_context().run(parse)
    # Three passes over the text: decoding, counting, parsing.
    assert pauses >= 3 * (len(text) // WINDOW) - 3
