"""Threads of this process, in which work that would hold up the event loop is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import trio

from triolet.core.recovery.supervision import shortage_of
from triolet.errors import ResourceShortage, TrioletError

T = TypeVar("T")


async def run_in_thread(function: Callable[[], T], purpose: str, *, is_inline: bool = False) -> T:
    """Return the result of a function that runs in a thread. A checkpoint.

    Args:
        function: runs to its end, even if the caller is cancelled.
        purpose: what the thread is for, as in `shortage_of`.
        is_inline: call it here, as with `runner="inline"`: one thread, one order of events.
    Raises:
        ResourceShortage: no thread can be started now, or the function lacks a resource.
        Exception: what the function raises.
    """
    try:
        if is_inline:
            await trio.lowlevel.checkpoint()
            return function()
        return await trio.to_thread.run_sync(function)
    except TrioletError:  # its own words say more, as those of weights for which the disk has no room
        raise
    except Exception as error:
        if (shortage := shortage_of(error, purpose)) is None:
            raise
        raise shortage from error


async def clean_up_in_thread(
    function: Callable[[], object], purpose: str, *, is_inline: bool = False
) -> None:
    """Run a clean-up in a thread, to its end, also in a cancelled task; see `run_in_thread`.

    If no thread can be started, it runs here, and the event loop waits.
    """
    has_begun = False

    def run() -> None:
        nonlocal has_begun
        has_begun = True
        function()

    with trio.CancelScope(shield=True):
        try:
            await run_in_thread(run, purpose, is_inline=is_inline)
        except ResourceShortage:
            if has_begun:
                raise
            function()
