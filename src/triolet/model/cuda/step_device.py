"""All that steps need of a GPU's driver: memory that copies need not wait for, marks to wait for, and graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


class Mark(Protocol):
    """Point in the device's work."""

    def wait(self) -> None:
        """Wait until the device is past it."""
        ...


class Graph(Protocol):
    """Work that was captured."""

    def replay(self) -> None:
        """Hand it to the device once more: the same kernels on the same memory, with the same numbers of the host."""
        ...


class StepDevice(Protocol):
    """A device that computes steps."""

    @property
    def device(self) -> torch.device:
        """Return where its tensors are."""
        ...

    def pinned(self, num_words: int) -> Tensor:
        """Allocate int32 words of the host that copies from and to the device need not be waited for."""
        ...

    def mark(self) -> Mark:
        """Mark the end of the work that the device has been given so far."""
        ...

    def capture(self, work: Callable[[], None]) -> Graph:
        """Do some work once, so that everything that it needs is compiled and allocated, then capture it."""
        ...


class CudaDevice:
    """CUDA, through torch.

    Args:
        device: with or without an index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: Any = None  # memory of all graphs, since no two of them run at the same time

    def pinned(self, num_words: int) -> Tensor:
        return torch.zeros(num_words, dtype=torch.int32).pin_memory()

    def mark(self) -> Mark:
        return _CudaMark()

    def capture(self, work: Callable[[], None]) -> Graph:
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on using CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            work()
        return graph


class _CudaMark:
    def __init__(self) -> None:
        # The thread sleeps while it waits: its processor has other work.
        self._event = torch.cuda.Event(blocking=True)
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()
