"""Turns of the clients: a pass of the event loop has a few, and none of them is for one with many connections only."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import attrs
import pytest
import trio
import trio.testing

from triolet.server.transport.client_stream import ClientStream
from triolet.server.transport.client_turns import MAX_PASS_S, MAX_TURNS, ClientTurns, TurnLimit
from triolet.server.transport.websocket import ServerSocket, SocketLimits

LIMITS = SocketLimits(
    max_message_bytes=1,
    max_message_fragments=1,
    max_frames_per_second=1,
    max_pings_per_second=1,
    close_timeout=1.0,
)
TURN_S = MAX_PASS_S / 4


@attrs.define
class Work:
    """Clients whose turns take time by a clock of their own."""

    turn_s: float = TURN_S
    now_s: float = 0.0
    done: list[tuple[str, int]] = attrs.field(factory=list)
    turns: ClientTurns = attrs.field(init=False)
    nursery: trio.Nursery = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.turns = ClientTurns(lambda: self.now_s)

    def ask(self, client: str, number: int = 0) -> None:
        """Have a turn of a client taken and used in a task."""
        self.nursery.start_soon(self._use, client, number)

    async def begin_pass(self) -> list[tuple[str, int]]:
        """Run one pass, as the loop does; return the turns that were used in it."""
        num_done = len(self.done)
        self.turns.begin_pass()
        await trio.testing.wait_all_tasks_blocked()
        return self.done[num_done:]

    async def _use(self, client: str, number: int) -> None:
        await self.turns.take(client)
        self.now_s += self.turn_s
        self.done.append((client, number))


@asynccontextmanager
async def working(turn_s: float = TURN_S) -> AsyncGenerator[Work]:
    """Give clients and a nursery for them, whose tasks are cancelled at the end."""
    work = Work(turn_s)
    async with trio.open_nursery() as work.nursery:
        yield work
        work.nursery.cancel_scope.cancel()


async def test_connections_of_one_client_get_their_turns_in_the_order_in_which_they_asked() -> None:
    async with working() as work:
        for number in range(100):
            work.ask("a", number)
            await trio.testing.wait_all_tasks_blocked()
        while len(work.done) < 100:
            num_done = len(work.done)
            served = await work.begin_pass()
            # Trio shuffles the tasks of one pass, and those for which it was too short go back.
            assert max(number for _, number in served) < num_done + MAX_TURNS


@pytest.mark.parametrize("turn_s", [TURN_S / 10, TURN_S, 3 * MAX_PASS_S])
async def test_a_pass_ends_with_the_turn_in_which_its_time_is_over(turn_s: float) -> None:
    async with working(turn_s) as work:
        for number in range(300):
            work.ask("a", number)
        await trio.testing.wait_all_tasks_blocked()
        while len(work.done) < 300:
            began_s = work.now_s
            assert len(await work.begin_pass()) >= 1
            assert work.now_s - began_s <= MAX_PASS_S + turn_s + 1e-9


async def test_one_that_asks_for_little_does_not_wait_for_one_with_a_thousand_connections() -> None:
    async with working() as work:
        for number in range(1000):
            work.ask("a", number)
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(5):
            await work.begin_pass()
            work.ask("b")
            await trio.testing.wait_all_tasks_blocked()
            assert work.done[-1] == ("b", 0)


async def test_those_that_wait_take_turns_by_client_and_not_by_connection() -> None:
    async with working(turn_s=3 * MAX_PASS_S) as work:  # one turn a pass is left
        for client in "abc":
            work.ask(client)  # at once
            for number in range(1, 30 if client == "a" else 4):
                work.ask(client, number)
        await trio.testing.wait_all_tasks_blocked()
        while work.turns.limit.num_turns > 1:
            await work.begin_pass()
        served = [turn for _ in range(6) for turn in await work.begin_pass()]
        assert sorted(client for client, _ in served) == ["a", "a", "b", "b", "c", "c"]


async def test_a_hundred_clients_make_a_pass_no_longer_than_one_does() -> None:
    async with working() as work:
        for client in range(100):
            for number in range(3):
                work.ask(str(client), number)
        await trio.testing.wait_all_tasks_blocked()  # the first one of each has its turn at once
        for _ in range(10):
            await work.begin_pass()
        began_s = work.now_s
        await work.begin_pass()
        assert work.now_s - began_s <= 2 * MAX_PASS_S


async def test_one_that_asks_later_does_not_overtake_those_that_wait() -> None:
    async with working() as work:
        for number in range(20):
            work.ask("a", number)
            await trio.testing.wait_all_tasks_blocked()
        work.turns.begin_pass()
        work.ask("a", 99)  # in the pass in which the others were woken, and possibly before they run
        await trio.testing.wait_all_tasks_blocked()
        passes = [await work.begin_pass() for _ in range(20)]
        assert ("a", 99) in next(served for served in reversed(passes) if served)


async def test_one_that_is_cancelled_while_it_waits_takes_no_turn_and_leaves_nothing() -> None:
    turns = ClientTurns(lambda: 0.0)
    for _ in range(turns.limit.num_turns):
        await turns.take("a")
    for _ in range(3):
        with trio.move_on_after(0):
            await turns.take("a")
    turns.begin_pass()
    assert not turns._waiting and not turns._num_taken and not turns._num_woken


async def test_the_turns_of_all_passes_are_given_out_while_there_is_a_loop() -> None:
    turns = ClientTurns()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(turns.run)
        async with trio.open_nursery() as clients:
            for number in range(200):
                clients.start_soon(turns.take, str(number % 2))
        await trio.testing.wait_all_tasks_blocked()  # it waits for the next one, and does not turn the loop
        assert not turns._num_taken and not turns._waiting and not turns._num_woken
        nursery.cancel_scope.cancel()


def test_passes_that_are_too_long_leave_fewer_turns_and_short_ones_more_up_to_a_limit() -> None:
    limit = TurnLimit(num_turns=8)
    limit.note_pass(2 * MAX_PASS_S, are_waiting=True)
    assert limit.num_turns == 4
    limit.note_pass(100 * MAX_PASS_S, are_waiting=True)
    assert limit.num_turns == 1  # never none: what waits gets on
    for _ in range(100):
        limit.note_pass(MAX_PASS_S / 2, are_waiting=True)
    assert limit.num_turns == MAX_TURNS


def test_passes_without_work_teach_nothing() -> None:
    limit = TurnLimit(num_turns=2)
    limit.note_pass(0.0, are_waiting=False)
    assert limit.num_turns == 2


async def test_what_was_received_is_kept_when_the_wait_for_the_turn_is_cancelled() -> None:
    turns = ClientTurns(lambda: 0.0)
    ours, theirs = trio.testing.memory_stream_pair()
    stream = ClientStream(theirs, 1.0, turns, "a")  # type: ignore[arg-type]
    for _ in range(turns.limit.num_turns):
        await turns.take("a")
    await ours.send_all(b"hello")
    with trio.move_on_after(0.01) as wait:
        await stream.receive_some()
    assert wait.cancelled_caught
    assert await stream.receive_some(2) == b"he"
    assert await stream.receive_some() == b"llo"


async def test_websockets_take_the_turns_of_their_key() -> None:
    turns = ClientTurns(lambda: 0.0)
    sockets = []
    for address in ("127.0.0.1", "127.0.0.2"):
        stream = ClientStream(trio.testing.memory_stream_pair()[0], 1.0, turns, address)  # type: ignore[arg-type]
        sockets.append(ServerSocket(stream, LIMITS))
        sockets[-1].use_budget(None, "key")
    for number in range(turns.limit.num_turns):
        await sockets[number % 2].take_turn()
    with trio.move_on_after(0.01) as wait:
        await sockets[0].take_turn()
    assert wait.cancelled_caught
