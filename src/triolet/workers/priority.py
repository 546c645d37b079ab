"""Priority of a process whose work can wait."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_AUTOGROUP = Path("/proc/self/autogroup")


def lower_priority(niceness: int) -> None:
    """Lower the priority of this process, and that of its session if it leads one.

    Where Linux divides the processors among sessions first (autogroups, sched(7)), the niceness of a process counts
    within its session only: one that is alone in a session would have as much of a core as all of another session.

    Args:
        niceness: 0 to 19, as of `os.nice`; what is added to the niceness of the process, and becomes its session's.
    """
    os.nice(niceness)
    if os.getsid(0) == os.getpid():
        with suppress(OSError):  # there is no such file, or the group has been changed within the last 100 ms
            _AUTOGROUP.write_text(str(niceness))
