"""Threads of this process, in which work that would hold up the event loop is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import trio

from triolet.core.recovery.supervision import typed_shortages

T = TypeVar("T")


async def run_in_thread(
    function: Callable[[], T],
    purpose: str,
    *,
    is_inline: bool = False,
    limiter: trio.CapacityLimiter | None = None,
) -> T:
    """Return the result of a function that runs in a thread. A checkpoint.

    Args:
        function: runs to its end, even if the caller is cancelled.
        purpose: what the thread is for, as in `typed_shortages`.
        is_inline: call it here, as with `runner="inline"`: one thread, one order of events.
        limiter: bounds the number of such threads; Trio's own by default.
    Raises:
        ResourceShortage: no thread can be started now, or the function lacks a resource.
        Exception: what the function raises.
    """
    if is_inline:
        await trio.lowlevel.checkpoint()
        return function()
    with typed_shortages(purpose):
        return await trio.to_thread.run_sync(function, limiter=limiter)
