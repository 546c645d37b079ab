"""End of a process with its parent: a worker must never outlive what started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1  # from <linux/prctl.h>


def die_with_parent(parent_id: int | None = None) -> None:
    """Have Linux kill this process when the thread that started it ends, however that ends.

    Args:
        parent_id: number of the parent's process: one that has ended before this call sends no signal, and this process
            ends at once. None if the caller learns of that in another way.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent_id is not None and os.getppid() != parent_id:
        os._exit(0)
