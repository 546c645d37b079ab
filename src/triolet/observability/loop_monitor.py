"""The event loop: the longest time that one task step has held it, and threads that give way to it.

A task that computes between two checkpoints delays all others, and averages do not show it. So every step is measured,
from the end of the step before (or of the wait for I/O) to its own end.

A thread that computes in Python delays them, too. Each task of the loop lets go of the GIL when it reads or writes, and
waits for it behind the thread each time: a hundred times in a pass. Where more threads and processes want to run than
there are cores, each of these waits may last as long as the system lets another one have the core. So while the loop
has work a thread takes `SHARE` of the time, a piece after the other; while the loop waits, it takes all. What runs in
such a thread calls `between_windows` after each short piece of its work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

import attrs
import trio

from triolet.core.json_text import between_windows

LONG_STEP_S = 0.01

SHARE: Final = 0.1  # of the time, while the event loop has work
PIECE_S: Final = 0.0002  # of work at least, before a thread gives way
MAX_WAIT_S: Final = 0.01  # after a piece that was long

T = TypeVar("T")


@attrs.define(eq=False)
class LoopMonitor(trio.abc.Instrument):
    """Trio instrument that measures task steps while installed."""

    longest_s: float = 0.0  # the longest step so far, seconds
    num_long: int = 0  # steps longer than LONG_STEP_S
    _last_s: float = attrs.field(factory=time.perf_counter, init=False)

    def after_io_wait(self, timeout: float) -> None:
        """Start timing: the wait for I/O is over."""
        self._last_s = time.perf_counter()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """Measure the step that has ended."""
        now_s = time.perf_counter()
        elapsed_s, self._last_s = now_s - self._last_s, now_s
        if elapsed_s > LONG_STEP_S:
            self.num_long += 1
        if elapsed_s > self.longest_s:
            self.longest_s = elapsed_s

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Install the instrument for a scope; call it in the Trio thread."""
        self._last_s = time.perf_counter()
        trio.lowlevel.add_instrument(self)
        try:
            yield
        finally:
            trio.lowlevel.remove_instrument(self)


@attrs.define(eq=False)
class LoopWatch(trio.abc.Instrument):
    """Tells threads whether the event loop waits for input."""

    loop_waits: threading.Event = attrs.field(factory=threading.Event, init=False)
    _num_threads: int = attrs.field(default=0, init=False)  # that work

    def before_io_wait(self, timeout: float) -> None:
        if timeout > 0:
            self.loop_waits.set()

    def after_io_wait(self, timeout: float) -> None:
        self.loop_waits.clear()

    def add_thread(self) -> None:
        """Watch the loop: a thread begins to work."""
        if not self._num_threads:
            trio.lowlevel.add_instrument(self)
        self._num_threads += 1

    def remove_thread(self) -> None:
        """Watch no more once no thread works: it costs every pass of the loop two microseconds."""
        self._num_threads -= 1
        if not self._num_threads:
            trio.lowlevel.remove_instrument(self)


@attrs.define(eq=False)
class ThreadShare:
    """Time that one thread takes for one piece of work.

    Args:
        loop_waits: set while the event loop waits for input.
        free_s: of work, before the thread gives way at all.
    """

    _loop_waits: threading.Event
    _free_s: float = 0.0
    _since_s: float = attrs.field(default=0.0, init=False)  # beginning of the piece

    def run(self, work: Callable[[], T]) -> T:
        """Run `work` in the thread; it gives way between its windows."""
        between_windows.set(self.give_way)  # of the thread only, which has a copy of the task's context
        self._since_s = time.perf_counter() + self._free_s
        return work()

    def give_way(self) -> None:
        """Wait, in the thread, until the event loop has had its share."""
        elapsed_s = time.perf_counter() - self._since_s
        if elapsed_s < PIECE_S:
            return
        self._loop_waits.wait(min(elapsed_s * (1 / SHARE - 1), MAX_WAIT_S))
        self._since_s = time.perf_counter()


_of_this_loop = trio.lowlevel.RunVar[LoopWatch]("loop watch")


async def run_in_thread(
    work: Callable[[], T], *, limiter: trio.CapacityLimiter | None = None, free_s: float = 0.0
) -> T:
    """Run `work` in a thread that gives way to the event loop; what it raises is raised here.

    Args:
        work: runs to its end, even if the caller is cancelled.
        limiter: on the number of threads; default: Trio's.
        free_s: of work, before the thread gives way: a short one is then as fast as in a thread of Trio's.
    """
    try:
        watch = _of_this_loop.get()
    except LookupError:
        watch = LoopWatch()
        _of_this_loop.set(watch)
    watch.add_thread()
    try:
        share = ThreadShare(watch.loop_waits, free_s)
        return await trio.to_thread.run_sync(share.run, work, limiter=limiter)
    finally:
        watch.remove_thread()
