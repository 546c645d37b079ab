"""The thread that parses long inputs: clients take turns, and it pauses after each piece."""

from __future__ import annotations

import contextvars
import threading

import pytest
import trio
import trio.testing

from triolet.core.json_text import between_windows
from triolet.protocol.json.parsing import WINDOW, JsonLimits, parse_object
from triolet.server.transport import parse_thread
from triolet.server.transport.parse_thread import parse_in_thread


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
