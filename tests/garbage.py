"""What work leaves to the garbage collector, which a server lets visit new objects only."""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable


async def garbage_of(work: Callable[[], Awaitable[None]]) -> list[object]:
    """Do something once, and once more; return what the second time leaves to the garbage collector."""
    await work()
    gc.collect()
    gc.disable()
    try:
        await work()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return list(gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def kinds_of(garbage: list[object], *prefixes: str) -> set[str]:
    """Return the full names of the types among `garbage` that begin with one of `prefixes`."""
    names = {f"{type(one).__module__}.{type(one).__qualname__}" for one in garbage}
    return {name for name in names if name.startswith(prefixes)}
