"""Priority of a process whose work can wait."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Final

_AUTOGROUP = "/proc/self/autogroup"
_PAUSE_S: Final = 0.1  # Linux lets users other than root change the niceness of one session in this time
_NUM_TRIES: Final = 5  # in so many pauses other processes that are started now have had their turns


def lower_priority(niceness: int) -> None:
    """Lower the priority of this process, and that of its session if it leads one.

    Where Linux divides the processors among sessions first (autogroups, sched(7)), the niceness of a process counts
    within its session only: one that is alone in a session would have as much of a core as all of another session.

    Args:
        niceness: 0 to 19, as of `os.nice`; what is added to the niceness of the process, and becomes its session's.
    """
    os.nice(niceness)
    if os.getsid(0) == os.getpid():
        with suppress(OSError):  # there is no such file
            _write_session_niceness(niceness)


def _write_session_niceness(niceness: int) -> None:
    """Write the niceness of this process's session, in a later moment where others' are being changed.

    Raises:
        OSError: there is no such file, or others' are being changed all the time.
    """
    file = os.open(_AUTOGROUP, os.O_WRONLY)
    try:
        for _ in range(_NUM_TRIES - 1):
            with suppress(BlockingIOError):
                os.write(file, b"%d" % niceness)
                return
            time.sleep(_PAUSE_S)
        os.write(file, b"%d" % niceness)
    finally:
        os.close(file)
