"""Stream of an engine in another thread: a task there reads it, and hands its items to the reader here.

The task reads at most `MAX_AHEAD` items that the reader has not taken; then it waits, and the engine's own collector
merges what comes, as it does for any slow reader. So a reader that stops costs no memory, and no token is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Generic, TypeVar

import trio

from triolet.bridge.engine_thread import SCOPE_ENDED, EngineThread
from triolet.errors import EngineClosed

T = TypeVar("T")
S = TypeVar("S", bound=AsyncIterator[object])

MAX_AHEAD = 8  # so that one busy moment of the reader's loop does not stop the task; any small number does


class RemoteStream(Generic[S, T]):
    """Items of one stream, on their way from the engine's thread to a reader in another.

    Each attribute is written by one of the two threads only; the reader looks at them after each `notify`.

    Args:
        thread: the engine's.
        open_stream: returns the scope of the stream; called in the engine's thread.
        notify: called in the engine's thread after every change that a reader may wait for.
    """

    def __init__(
        self,
        thread: EngineThread,
        open_stream: Callable[[], AbstractAsyncContextManager[S]],
        notify: Callable[[], None],
    ) -> None:
        self._thread, self._open_stream, self._notify = thread, open_stream, notify
        self._scope, self._room = trio.CancelScope(), trio.Event()
        self._waits_for_room = False
        self._was_left = False  # by its reader
        self._items: deque[T] = deque()
        self.source: S | None = None  # the stream itself, while it is open
        self.error: BaseException | None = None  # error of entering or reading it
        self.is_over = False  # whether all items have been read, with or without an error at the end
        self.is_closed = False  # whether its scope has been left: all that it held is free

    def start(self) -> None:
        """Begin to open and read the stream."""
        self._thread.start(self._run, self._refuse)

    def leave(self) -> None:
        """Leave the stream's scope; `is_closed` tells when that is done. Harmless when repeated."""
        self._was_left = True
        if not self._thread.soon(self._scope.cancel):
            self.is_closed = True

    def check_process(self) -> None:
        """Check that items can come; see `EngineThread.check_process`."""
        self._thread.check_process()

    @property
    def has_item(self) -> bool:
        """True if `take` returns an item now."""
        return bool(self._items)

    def take(self) -> T:
        """Return the next item, and let the task read another one."""
        item = self._items.popleft()
        if self._waits_for_room:
            self._thread.soon(self._make_room)
        return item

    def _make_room(self) -> None:
        self._room.set()

    async def _run(self) -> None:
        try:
            with self._scope:
                async with self._open_stream() as source:
                    self.source = source
                    self._notify()
                    async for item in source:
                        self._items.append(item)  # type: ignore[arg-type]
                        self._notify()
                        await self._wait_for_room()
                    self.is_over = True
                    self._notify()
                    # The scope stays open until the reader leaves it, as it does without a thread in between.
                    await trio.sleep_forever()
        except Exception as error:
            self._end(error)
        finally:
            self._refuse()

    async def _wait_for_room(self) -> None:
        while len(self._items) >= MAX_AHEAD:
            self._room = trio.Event()
            self._waits_for_room = True
            # The reader may have taken items before it could see that the task waits.
            if len(self._items) >= MAX_AHEAD:
                await self._room.wait()
            self._waits_for_room = False

    def _refuse(self) -> None:
        self._end(None if self._was_left else EngineClosed(SCOPE_ENDED))

    def _end(self, error: Exception | None) -> None:
        # The end of the stream's items is told first, whatever happens to its scope afterwards.
        if not self.is_over:
            self.error, self.is_over = error, True
        self.is_closed = True
        self._notify()
