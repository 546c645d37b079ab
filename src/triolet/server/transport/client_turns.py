"""Turns of the clients in the event loop: how much of what they ask for is done in one pass of it.

Theory of operation
-------------------
A pass of the event loop runs every task that is ready, and a short request such as `/health` needs a few passes. Its
latency is their number times what all others have in each. Steps that are short by themselves do not help: a hundred
connections that each have half a millisecond of work make a pass of 50 ms.

So whatever may be work of a client takes a turn: a new connection, a piece of input, a request, a message, the start of
a response. A pass has a number of turns in all. It is found as TCP finds its window (additive increase, multiplicative
decrease): a pass that was too long leaves fewer turns for the next one, and while there are connections that wait,
each pass that was not has one more. The clock counts, and not the work: a pass is also long where the process does not
get its core, or Python's lock.

    no turn of the client in this pass, and none of it waits  ->  at once
    turns are left, and the pass is not too long yet          ->  at once
    otherwise                                                 ->  waits for a later pass

Those that wait are woken by client, one each and round again, and those of one client in the order in which they asked.
One that is woken, and by then finds the pass too long, goes back to its place, unless it is the first of its client in
this pass. So a client that asks for little does not wait for one with a thousand connections, and each gets on.

Source: additive increase, multiplicative decrease, Chiu and Jain 1989; round robin by client, as in fair queueing.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Final, NoReturn

import attrs
import trio

MAX_PASS_S: Final = 0.002  # a short request needs four passes, and shall have time for ten of other work
MAX_TURNS: Final = 16  # of a pass; a turn is half a millisecond at most, and so one pass 8 ms


@attrs.define
class TurnLimit:
    """Number of turns that a pass may have, learned from how long the passes were."""

    num_turns: int = 4  # about 2 ms, if each is as long as it may be

    def note_pass(self, elapsed_s: float, *, are_waiting: bool) -> None:
        """Learn from a pass.

        Args:
            elapsed_s: how long it took, by the clock.
            are_waiting: whether some wait for the next one.
        """
        if elapsed_s > MAX_PASS_S:
            self.num_turns = max(1, int(self.num_turns * MAX_PASS_S / elapsed_s))
        elif are_waiting:
            self.num_turns = min(MAX_TURNS, self.num_turns + 1)


@attrs.define(eq=False)
class ClientTurns:
    """Turns in each pass of the event loop, shared by the connections of a server.

    A client is an API key once it is known, or else an address.

    Args:
        now: a clock, in seconds. Trio's stands still within a pass.
    """

    _now: Callable[[], float] = time.perf_counter
    limit: TurnLimit = attrs.field(factory=TurnLimit, init=False)
    _began_s: float = attrs.field(default=0.0, init=False)  # of this pass
    _num_taken: Counter[str] = attrs.field(factory=Counter, init=False)  # in this pass, by client
    _num_woken: Counter[str] = attrs.field(factory=Counter, init=False)  # and have not run since, by client
    # By client; the one that is first has waited longest for a turn. No queue is empty.
    _waiting: dict[str, OrderedDict[trio.lowlevel.Task, None]] = attrs.field(factory=dict, init=False)
    _first_taken: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)

    async def run(self) -> NoReturn:
        """Give out the turns of each pass; needed by every task that waits in `take`."""
        while True:
            if not (self._num_taken or self._num_woken or self._waiting):
                await self._first_taken.park()
            await trio.lowlevel.checkpoint()
            self.begin_pass()

    async def take(self, client: str) -> None:
        """Wait for the next turn of a client; no checkpoint if it has one now."""
        if self._first_taken:  # nothing was asked for since long: the pass begins here
            self._began_s = self._now()
            self._first_taken.unpark_all()
        if client in self._waiting or self._num_woken[client] or not self._may_take(client):
            await self._wait(client)
            while not self._may_take(client):
                await self._wait(client, is_first=True)
        self._num_taken[client] += 1

    def begin_pass(self) -> None:
        """Wake those that may have a turn in one more pass."""
        now_s = self._now()
        self.limit.note_pass(now_s - self._began_s, are_waiting=bool(self._waiting))
        self._began_s = now_s
        self._num_taken.clear()
        for _ in range(self.limit.num_turns):
            if not self._waiting:
                break
            client = next(iter(self._waiting))
            queue = self._waiting.pop(client)
            trio.lowlevel.reschedule(queue.popitem(last=False)[0])
            self._num_woken[client] += 1
            if queue:
                self._waiting[client] = queue  # behind all others

    def _may_take(self, client: str) -> bool:
        if client not in self._num_taken:
            return True
        is_left = self._num_taken.total() < self.limit.num_turns
        return is_left and self._now() - self._began_s < MAX_PASS_S

    async def _wait(self, client: str, *, is_first: bool = False) -> None:
        task = trio.lowlevel.current_task()
        queue = self._waiting.setdefault(client, OrderedDict())
        queue[task] = None
        if is_first:
            queue.move_to_end(task, last=False)

        def forget(raise_cancel: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
            del queue[task]
            if not queue:
                del self._waiting[client]
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(forget)
        self._num_woken[client] -= 1
        if not self._num_woken[client]:
            del self._num_woken[client]
