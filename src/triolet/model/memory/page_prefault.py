"""Touch the pages of a KV cache before they are needed.

The system allocates and clears pages at the first access. A page of two megabytes takes long to clear, and a step
that reaches new blocks reaches new pages in every layer at once. So a thread touches the pages of the next blocks: as
many as are used already, so that the cache of an idle model stays small. While steps are computed it touches few of
them, and rests after each large page: the steps may have no other core than this one. Blocks are first used in the
order of their ids, so the highest id so far tells what comes next.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from triolet.core.recovery.supervision import shortage_of

MIN_AHEAD_BYTES = 16 * 2**20  # of all layers together
MAX_AHEAD_BYTES = 2**30
MAX_BUSY_BYTES = 64 * 2**20  # of these while steps are computed, which would come upon them soon
BUSY_PART = 0.1  # of the time meanwhile that the thread takes
QUIET_S = 0.1  # since a step was computed
IDLE_S = 10.0  # since then, until pages are given back
AT_ONCE_BYTES = 4 * 2**20  # of all layers; then it looks whether it is still quiet
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
CHUNK_BYTES = 2**21  # a large page: the thread can be ended between two
GIVE_BACK_BYTES = 64 * 2**20  # of all layers; then steps may go on
MADV_DONTNEED = 4  # the pages are zeros when they are read again
MADV_POPULATE_WRITE = 23  # from <asm-generic/mman-common.h>; Linux 5.14


class PagePrefault:
    """Thread that touches some blocks beyond the highest used one; ends with the cache.

    Args:
        tensors: of the cache, each [num_blocks, ...], contiguous, on the CPU.
        min_bytes: how much it touches beyond what is used, at least.
        max_bytes: and at most.
        quiet_s: how long no step must have been computed before it touches more than a few, seconds.
        idle_s: and how long before it gives back all but `min_bytes` of what was never used.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        min_bytes: int = MIN_AHEAD_BYTES,
        max_bytes: int = MAX_AHEAD_BYTES,
        quiet_s: float = QUIET_S,
        idle_s: float = IDLE_S,
    ) -> None:
        self._pages = _Pages(tensors, min_bytes, max_bytes, quiet_s, idle_s)
        self._highest = -1
        # Normal priority: a thread of low priority would be preempted while it holds the GIL or the kernel's lock of
        # the process's memory map, and every other thread would wait for it.
        thread = threading.Thread(target=self._pages.work, name="triolet-kv-pages", daemon=True)
        thread.start()
        self._end = weakref.finalize(self, _end, self._pages, thread)

    def reach(self, block_id: int) -> None:
        """Note that steps begin, and the highest block that they use; to be called before a block is written."""
        self._pages.is_busy = True
        if block_id > self._highest:
            self._highest = block_id
            self._pages.want(block_id + 1)

    def rest(self) -> None:
        """Note that the steps are over."""
        self._pages.busy_until_s = time.monotonic()
        self._pages.is_busy = False

    def close(self) -> None:
        """End the thread."""
        self._end()


class _Pages:
    """State of the prefault thread."""

    # Apart from the object that ends the thread: a reference from the thread would keep that object alive.

    def __init__(
        self, tensors: Sequence[Tensor], min_bytes: int, max_bytes: int, quiet_s: float, idle_s: float
    ) -> None:
        self._tensors = tensors
        self._num_blocks = len(tensors[0])
        block_bytes = sum(tensor[0].nbytes for tensor in tensors)
        self._min_ahead, self._max_ahead, self._max_busy, self._at_once, self._given_at_once = (
            max(1, size // block_bytes)
            for size in (min_bytes, max_bytes, MAX_BUSY_BYTES, AT_ONCE_BYTES, GIVE_BACK_BYTES)
        )
        self._quiet_s, self._idle_s = quiet_s, idle_s
        self._gave_back_after_s = -1.0  # `busy_until_s` of the last step before pages were given back
        self.is_busy = False
        self.busy_until_s = time.monotonic()
        self._num_used = 0
        self._num_touched = 0
        self._is_over = False
        self._news = threading.Condition()

    def want(self, num_used: int) -> None:
        with self._news:
            self._num_used = num_used
            self._news.notify()

    def end(self) -> None:
        with self._news:
            self._is_over = True
            self._news.notify()

    def work(self) -> None:
        while count := self._next():
            if count < self._num_touched:
                self._give_back(count)
            elif all(self._touch(tensor, count) for tensor in self._tensors):
                self._num_touched = count
            else:
                break
        self._tensors = ()

    def _next(self) -> int:
        """Return how many blocks shall be touched, once they are other than those that are; 0 if it is over."""
        with self._news:
            while not self._is_over:
                few = min(self._num_blocks, self._num_used + self._min_ahead)
                ahead = (
                    few if self._has_given_back() else self._num_used + min(self._num_used, self._max_ahead)
                )
                wanted = min(self._num_blocks, max(few, ahead))
                soon = min(wanted, self._num_used + min(self._num_used, self._max_busy))
                if self._num_touched < wanted:
                    if self._num_touched < soon or (noisy_s := self._time_after(self._quiet_s)) <= 0:
                        return min(wanted, self._num_touched + self._at_once)
                    self._news.wait(noisy_s)
                elif self._num_touched == few:
                    self._news.wait()
                elif (active_s := self._time_after(self._idle_s)) > 0:
                    self._news.wait(active_s)
                else:
                    self._gave_back_after_s = self.busy_until_s
                    return max(few, self._num_touched - self._given_at_once)
        return 0

    def _has_given_back(self) -> bool:
        """Return whether no step has come since pages were given back."""
        return not self.is_busy and self._gave_back_after_s == self.busy_until_s

    def _time_after(self, pause_s: float) -> float:
        """Return the time until no step will have been computed for `pause_s`, seconds."""
        # The end of a step wakes no thread, as that would cost time in every step: so the thread waits and looks.
        return pause_s if self.is_busy else self.busy_until_s + pause_s - time.monotonic()

    def _give_back(self, count: int) -> None:
        """Give the system the pages of the touched blocks from `count` on, unless a step wants some of them."""
        with self._news:  # a step that wants new blocks waits until these are zeros again
            if self._num_used > count:
                return
            for tensor in self._tensors:
                first, block = tensor.data_ptr(), tensor[0].nbytes
                # The page of a block that is kept stays; a large page may reach beyond what was asked for.
                begin = _round_up(first + count * block, PAGE_BYTES)
                end = min(_round_up(first + self._num_touched * block, CHUNK_BYTES), first + tensor.nbytes)
                _advise(begin, end // PAGE_BYTES * PAGE_BYTES - begin, MADV_DONTNEED)
            self._num_touched = count

    def _touch(self, tensor: Tensor, count: int) -> bool:
        """Touch a tensor's first `count` blocks; return False if stopped, or if the system cannot do it."""
        block = tensor[0].nbytes
        begin = (tensor.data_ptr() + self._num_touched * block) // PAGE_BYTES * PAGE_BYTES
        end = tensor.data_ptr() + count * block
        for address in range(begin, end, CHUNK_BYTES):
            size, began_s = min(CHUNK_BYTES, end - address), time.monotonic()
            if self._is_over or _advise(address, size, MADV_POPULATE_WRITE):
                return False
            if self._time_after(self._quiet_s) > 0:
                self._rest((time.monotonic() - began_s) * (1 / BUSY_PART - 1))
        return True

    def _rest(self, pause_s: float) -> None:
        """Leave the core to the steps, unless it is over."""
        with self._news:
            self._news.wait_for(lambda: self._is_over, pause_s)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _advise(address: int, size: int, advice: int) -> int:
    """Call madvise; return 0 if the system did what was asked for."""
    madvise = ctypes.CDLL(None).madvise
    result: int = madvise(ctypes.c_void_p(address), ctypes.c_size_t(max(size, 0)), ctypes.c_int(advice))
    return result


def _end(pages: _Pages, thread: threading.Thread) -> None:
    pages.end()
    # The garbage collector may run in the thread itself, which cannot wait for its own end.
    if thread is not threading.current_thread():
        thread.join()


def prefault_pages(tensors: Sequence[Tensor], device: torch.device) -> PagePrefault | None:
    """For a cache in main memory, where the system hands out its pages like that."""
    if device.type != "cpu" or sys.platform != "linux" or not tensors:  # an encoder keeps no cache
        return None
    try:
        return PagePrefault(tensors)
    except RuntimeError as error:
        if shortage_of(error, "a thread that touches pages") is None:
            raise
        return None  # steps touch their pages themselves, only slower
