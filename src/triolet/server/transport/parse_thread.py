"""One thread per server for parsing long bodies and messages.

A second one would not make anything faster, as both need the GIL, and the event loop would wait for the GIL behind two
threads instead of one.

Clients take turns: each has at most one input in the queue of the thread, so that another one waits for one input of
each client, however many connections each has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import trio

from triolet.core.recovery.supervision import typed_shortages

LONG_INPUT_BYTES: Final = 2**14  # a shorter input takes less than 2 ms to parse, however it is made

T = TypeVar("T")

_limiter = trio.lowlevel.RunVar[trio.CapacityLimiter]("parse thread")
_turns = trio.lowlevel.RunVar[dict[str, trio.CapacityLimiter]]("turns of the clients in the parse thread")


async def parse_in_thread(work: Callable[[], T], client: str) -> T:
    """Run `work` in the parse thread, after the client's own work that came before and one of each other client.

    Args:
        client: API key or address.
    Raises:
        ResourceShortage: no thread can be started now.
    """
    try:
        limiter, turns = _limiter.get(), _turns.get()
    except LookupError:
        limiter, turns = trio.CapacityLimiter(1), {}
        _limiter.set(limiter)
        _turns.set(turns)
    turn = turns.setdefault(client, trio.CapacityLimiter(1))
    try:
        async with turn:
            with typed_shortages("parsing a request"):
                return await trio.to_thread.run_sync(work, limiter=limiter)
    finally:
        if not turn.borrowed_tokens and turns.get(client) is turn:
            del turns[client]  # a client that left shall not be remembered for ever
