"""Captured decode steps, one for each of some batch sizes: a step of fewer rows is padded to the next of them."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from functools import partial

from triolet.model.cuda.step_device import Graph, StepDevice

_logger = logging.getLogger(__name__)

FIRST_SIZES = (1, 2, 4, 8)
SIZE_STEP, LARGE_SIZE_STEP = 8, 16
MANY = 256


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the batch sizes to capture, rising: a step of any size is padded by a few rows."""
    some = [size for size in FIRST_SIZES if size < max_num_seqs]
    some += range(2 * SIZE_STEP, min(MANY, max_num_seqs), SIZE_STEP)
    some += range(MANY, max_num_seqs, LARGE_SIZE_STEP)
    return (*some, max_num_seqs)


OnCaptured = Callable[[int, int], None]
"""Callback after each capture: how many are done, and of how many."""


def ignore_captured(num_done: int, num_all: int) -> None:
    """Do nothing; an `OnCaptured`."""


class DecodeGraphs:
    """Captured steps by batch size.

    Args:
        device: captures them.
        sizes: rising.
    """

    def __init__(self, device: StepDevice, sizes: tuple[int, ...]) -> None:
        self._device = device
        self._sizes = sizes
        self._graphs: dict[int, Graph] = {}

    def capture(self, step: Callable[[int], None], on_captured: OnCaptured, *, only_largest: bool) -> bool:
        """Capture all of them, the largest first, so that the others find room in its memory.

        If one cannot be captured, which is said, there are none.

        Args:
            step: hands the device a step of so many rows.
            on_captured: told after each.
            only_largest: capture one.
        Returns:
            Whether they are there.
        Raises:
            RuntimeError: the device is lost.
        """
        self._graphs.clear()
        sizes = self._sizes[-1:] if only_largest else self._sizes[::-1]
        for number, size in enumerate(sizes, start=1):
            try:
                self._graphs[size] = self._device.capture(partial(step, size))
            except RuntimeError as error:  # torch's, of the driver and of a lack of memory
                self._graphs.clear()
                self._device.mark().wait()  # raises if the device is lost, and with it more than the graphs
                _logger.warning(
                    "a graph of %d rows cannot be captured, kernels are launched: %s", size, error
                )
                return False
            on_captured(number, len(sizes))
        return True

    def __len__(self) -> int:
        return len(self._graphs)

    def of(self, num_rows: int) -> tuple[int, Graph] | None:
        """Return the least size that has room for so many rows, and its graph; None if there is none."""
        place = bisect_left(self._sizes, num_rows)
        if place == len(self._sizes) or (graph := self._graphs.get(self._sizes[place])) is None:
            return None
        return self._sizes[place], graph
