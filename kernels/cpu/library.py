"""The compiled kernels, loaded into this process; or, where they can not be, one warning and torch instead."""

from __future__ import annotations

import ctypes
import functools
import logging
import os

from triolet.kernels.cpu.build import BuildError, build

_logger = logging.getLogger(__name__)

SWITCH = "TRIOLET_CPU_KERNELS"
"""Environment variable; 0 leaves everything to torch."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernels, built at the first call; None where torch has to do their work.

    Calls into it release the GIL.
    """
    if os.environ.get(SWITCH, "") == "0":
        return None
    try:
        return ctypes.CDLL(str(build()))
    except (BuildError, OSError) as error:
        _logger.warning("the CPU kernels could not be built, torch's slower ones do their work: %s", error)
        return None
