"""Captured steps, one for each of some sizes: a smaller step is padded to the next of them.

The size of a decode step is its number of rows, and that of a step with prompts its number of tokens.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from functools import partial

from triolet.model.cuda.step_device import Graph, StepDevice

logger = logging.getLogger(__name__)

FIRST_SIZES = (1, 2, 4, 8)
SIZE_STEP, LARGE_SIZE_STEP = 8, 16
MANY = 256


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the batch sizes to capture, rising: a step of any size is padded by a few rows."""
    some = [size for size in FIRST_SIZES if size < max_num_seqs]
    some += range(2 * SIZE_STEP, min(MANY, max_num_seqs), SIZE_STEP)
    some += range(MANY, max_num_seqs, LARGE_SIZE_STEP)
    return (*some, max_num_seqs)


PROMPT_SIZES = (256, 384, 512, 768, 1024, 1536, 2048)


def prompt_graph_sizes(max_num_tokens: int) -> tuple[int, ...]:
    """Return the numbers of tokens of steps with prompts to capture, rising.

    More tokens than the largest of them keep a GPU busy for longer than their kernels take to launch.
    """
    some = [size for size in PROMPT_SIZES if size < max_num_tokens]
    return (*some, max_num_tokens) if max_num_tokens <= PROMPT_SIZES[-1] else tuple(some)


OnCaptured = Callable[[int, int], None]
"""Callback after each capture: how many are done, and of how many."""


def ignore_captured(num_done: int, num_all: int) -> None:
    """Do nothing; an `OnCaptured`."""


class StepGraphs:
    """Captured steps by size.

    Args:
        device: captures them.
        sizes: rising.
        unit: what sizes count.
    """

    def __init__(self, device: StepDevice, sizes: tuple[int, ...], unit: str) -> None:
        self._device = device
        self._unit = unit
        self.sizes = sizes
        self._graphs: dict[int, Graph] = {}

    def capture(
        self, step: Callable[[int], None], on_captured: Callable[[], None], num_largest: int | None
    ) -> bool:
        """Capture them, the largest first, so that the others find room in its memory.

        If one cannot be captured, which is said, there are none.

        Args:
            step: hands the device a step of that size.
            on_captured: called after each.
            num_largest: how many of them; None for all.
        Returns:
            Whether they are there.
        Raises:
            RuntimeError: the device is lost.
        """
        self._graphs.clear()
        for size in self.sizes[::-1][:num_largest]:
            try:
                self._graphs[size] = self._device.capture(partial(step, size))
            except RuntimeError as error:  # torch's, of the driver and of a lack of memory
                self._graphs.clear()
                self._device.mark().wait()  # raises if the device is lost, and with it more than the graphs
                logger.warning(
                    "a graph of %d %s cannot be captured, kernels are launched: %s", size, self._unit, error
                )
                return False
            on_captured()
        return True

    def __len__(self) -> int:
        return len(self._graphs)

    def of(self, size: int) -> tuple[int, Graph] | None:
        """Return the least size that has room for this one, and its graph; None if there is none."""
        place = bisect_left(self.sizes, size)
        if place == len(self.sizes) or (graph := self._graphs.get(self.sizes[place])) is None:
            return None
        return self.sizes[place], graph
