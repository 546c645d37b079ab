"""One thread per server for parsing long bodies and messages.

A second one would not make anything faster, as both need the GIL, and the event loop would wait for the GIL behind two
threads instead of one (up to 5 ms each, Python's switch interval).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import trio

from triolet.core.recovery.supervision import typed_shortages

LONG_INPUT_BYTES: Final = 2**14  # a shorter input takes less than 2 ms to parse, however it is made

T = TypeVar("T")

_limiter = trio.lowlevel.RunVar[trio.CapacityLimiter]("parse thread")


async def parse_in_thread(work: Callable[[], T]) -> T:
    """Run `work` in the parse thread, after the work that came before.

    Raises:
        ResourceShortage: no thread can be started now.
    """
    try:
        limiter = _limiter.get()
    except LookupError:
        limiter = trio.CapacityLimiter(1)
        _limiter.set(limiter)
    with typed_shortages("parsing a request"):
        return await trio.to_thread.run_sync(work, limiter=limiter)
