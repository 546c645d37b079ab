"""Turns of the clients: with however many connections, one gets a few in each pass of the event loop."""

from __future__ import annotations

import trio
import trio.testing

from triolet.server.transport.client_stream import TURNS_PER_PASS, ClientStream, ClientTurns
from triolet.server.transport.websocket import ServerSocket, SocketLimits

LIMITS = SocketLimits(
    max_message_bytes=1,
    max_message_fragments=1,
    max_frames_per_second=1,
    max_pings_per_second=1,
    close_timeout=1.0,
)


async def test_a_hundred_connections_of_one_client_get_the_turns_of_one_pass_in_their_order() -> None:
    turns, order = ClientTurns(), []

    async def ask(client: str, number: int) -> None:
        await turns.take(client)
        order.append((client, number))

    async with trio.open_nursery() as nursery:
        for number in range(100):
            nursery.start_soon(ask, "a", number)
            await trio.testing.wait_all_tasks_blocked()
        assert order == [("a", number) for number in range(TURNS_PER_PASS)]
        await ask("b", 0)  # another client does not wait for any of them
        for num_passes in range(2, 100 // TURNS_PER_PASS + 1):
            turns.begin_pass()
            await trio.testing.wait_all_tasks_blocked()
            # Trio shuffles the tasks of one pass.
            served = {number for client, number in order if client == "a"}
            assert served == set(range(TURNS_PER_PASS * num_passes))


async def test_one_that_asks_later_does_not_overtake_those_that_wait() -> None:
    turns, order = ClientTurns(), []

    async def ask(name: str) -> None:
        await turns.take("a")
        order.append(name)

    async with trio.open_nursery() as nursery:
        for number in range(2 * TURNS_PER_PASS + 1):
            nursery.start_soon(ask, str(number))
            await trio.testing.wait_all_tasks_blocked()
        turns.begin_pass()
        nursery.start_soon(ask, "late")
        await trio.testing.wait_all_tasks_blocked()
        turns.begin_pass()
        await trio.testing.wait_all_tasks_blocked()
        assert set(order[-2:]) == {str(2 * TURNS_PER_PASS), "late"}


async def test_one_that_is_cancelled_while_it_waits_takes_no_turn_and_leaves_nothing() -> None:
    turns = ClientTurns()
    for _ in range(TURNS_PER_PASS):
        await turns.take("a")
    for _ in range(3):
        with trio.move_on_after(0):
            await turns.take("a")
    turns.begin_pass()
    assert not turns._waiting and not turns._num_taken


async def test_the_turns_of_all_passes_are_given_out_while_there_is_a_loop() -> None:
    turns = ClientTurns()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(turns.run)
        async with trio.open_nursery() as clients:
            for number in range(200):
                clients.start_soon(turns.take, str(number % 2))
        await trio.testing.wait_all_tasks_blocked()  # it waits for the next one, and does not turn the loop
        assert not turns._num_taken
        nursery.cancel_scope.cancel()


async def test_what_was_received_is_kept_when_the_wait_for_the_turn_is_cancelled() -> None:
    turns = ClientTurns()
    ours, theirs = trio.testing.memory_stream_pair()
    stream = ClientStream(theirs, 1.0, turns, "a")  # type: ignore[arg-type]
    for _ in range(TURNS_PER_PASS):
        await turns.take("a")
    await ours.send_all(b"hello")
    with trio.move_on_after(0.01) as wait:
        await stream.receive_some()
    assert wait.cancelled_caught
    assert await stream.receive_some(2) == b"he"
    assert await stream.receive_some() == b"llo"


async def test_websockets_take_the_turns_of_their_key() -> None:
    turns = ClientTurns()
    sockets = []
    for address in ("127.0.0.1", "127.0.0.2"):
        stream = ClientStream(trio.testing.memory_stream_pair()[0], 1.0, turns, address)  # type: ignore[arg-type]
        sockets.append(ServerSocket(stream, LIMITS))
        sockets[-1].use_budget(None, "key")
    for number in range(TURNS_PER_PASS):
        await sockets[number % 2].take_turn()
    with trio.move_on_after(0.01) as wait:
        await sockets[0].take_turn()
    assert wait.cancelled_caught
