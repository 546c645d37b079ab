"""One thread per server for parsing long bodies and messages.

A second one would not make anything faster, as both need the GIL, and the event loop would wait for the GIL behind two
threads instead of one.

The thread gives way to the event loop (`triolet.observability.loop_monitor`).

Clients take turns: each has at most one input in the queue of the thread, so that another one waits for one input of
each client, however many connections each has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import attrs
import trio

from triolet.core.recovery.supervision import typed_shortages
from triolet.observability.loop_monitor import run_in_thread

LONG_INPUT_BYTES: Final = 2**12  # 14 KB of two thousand short items took the event loop 9 ms
FREE_S: Final = 0.001  # of the reading of one, before it gives way: most inputs are short and read by then

T = TypeVar("T")


@attrs.frozen(eq=False)
class ParseThread:
    """The thread of an event loop."""

    is_free: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(1))
    turns: dict[str, trio.CapacityLimiter] = attrs.field(factory=dict)  # by client


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
            with typed_shortages("parsing a request"):
                # Not one of Trio's places for threads, which others may have taken: `is_free` is the limit.
                return await run_in_thread(work, limiter=trio.CapacityLimiter(1), free_s=FREE_S)
    finally:
        if not turn.borrowed_tokens and thread.turns.get(client) is turn:
            del thread.turns[client]  # a client that left shall not be remembered for ever
