"""One thread per server for parsing long bodies and messages.

A second one would not make anything faster, as both need the GIL, and the event loop would wait for the GIL behind two
threads instead of one.

The thread gives way to the event loop. Each task of the loop lets go of the GIL when it reads or writes, and would
wait for it behind the thread each time: a hundred times in a pass. So while the loop has work the thread takes `SHARE`
of the time, a piece after the other; while the loop waits, it takes all.

Clients take turns: each has at most one input in the queue of the thread, so that another one waits for one input of
each client, however many connections each has.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

import attrs
import trio

from triolet.core.recovery.supervision import typed_shortages
from triolet.protocol.json.parsing import between_windows

LONG_INPUT_BYTES: Final = 2**14  # a shorter input takes less than 2 ms to parse, however it is made
SHARE: Final = 0.1  # of the time, while the event loop has work
PIECE_S: Final = 0.0002  # of work at least, before it gives way
MAX_WAIT_S: Final = 0.01  # after a piece that was long

T = TypeVar("T")


@attrs.define(eq=False)
class LoopWatch(trio.abc.Instrument):
    """Tells the parse thread whether the event loop waits for input, and lets the thread give way to it."""

    _loop_waits: threading.Event = attrs.field(factory=threading.Event, init=False)
    _since_s: float = attrs.field(default=0.0, init=False)  # of the thread's piece of work

    def before_io_wait(self, timeout: float) -> None:
        if timeout > 0:
            self._loop_waits.set()

    def after_io_wait(self, timeout: float) -> None:
        self._loop_waits.clear()

    def run(self, work: Callable[[], T]) -> T:
        """Run `work` in the parse thread; it gives way between its windows."""
        between_windows.set(self.give_way)  # of the thread only, which has a copy of the task's context
        self._since_s = time.perf_counter()
        return work()

    def give_way(self) -> None:
        """Wait, in the parse thread, until the event loop has had its share."""
        elapsed_s = time.perf_counter() - self._since_s
        if elapsed_s < PIECE_S:
            return
        self._loop_waits.wait(min(elapsed_s * (1 / SHARE - 1), MAX_WAIT_S))
        self._since_s = time.perf_counter()


@attrs.frozen(eq=False)
class ParseThread:
    """The thread of an event loop."""

    is_free: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(1))
    turns: dict[str, trio.CapacityLimiter] = attrs.field(factory=dict)  # by client
    watch: LoopWatch = attrs.field(factory=LoopWatch)


_of_this_loop = trio.lowlevel.RunVar[ParseThread]("parse thread")


async def parse_in_thread(work: Callable[[], T], client: str) -> T:
    """Run `work` in the parse thread, after the client's own work that came before and one of each other client.

    Args:
        client: API key or address.
    Raises:
        ResourceShortage: no thread can be started now.
    """
    try:
        thread = _of_this_loop.get()
    except LookupError:
        thread = ParseThread()
        _of_this_loop.set(thread)
    turn = thread.turns.setdefault(client, trio.CapacityLimiter(1))
    try:
        async with turn, thread.is_free:
            # For that long only: it costs every pass of the loop two microseconds.
            trio.lowlevel.add_instrument(thread.watch)
            try:
                with typed_shortages("parsing a request"):
                    # Not one of Trio's places for threads, which others may have taken: `is_free` is the limit.
                    own_place = trio.CapacityLimiter(1)
                    return await trio.to_thread.run_sync(thread.watch.run, work, limiter=own_place)
            finally:
                trio.lowlevel.remove_instrument(thread.watch)
    finally:
        if not turn.borrowed_tokens and thread.turns.get(client) is turn:
            del thread.turns[client]  # a client that left shall not be remembered for ever
