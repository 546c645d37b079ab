"""How a process has ended, in numbers and in words."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress

STAT_EXIT_CODE = 49  # of the fields behind the name in /proc/PID/stat


def ending_of(returncode: int) -> str:
    """In words, for the reader of a log."""
    if returncode >= 0:
        return f"ended with exit status {returncode}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-returncode).name}"
    return f"was killed by signal {-returncode}"


def exit_code_of(process_id: int) -> int | None:
    """How a process ends that was killed, is dying, or has not been waited for yet; as in `Popen.returncode`.

    Returns:
        None if this can not be known before it has been waited for. Of one that lives, or is about to end, it is 0.
    """
    if sys.platform != "linux":
        return None
    try:
        with open(f"/proc/{process_id}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return os.waitstatus_to_exitcode(int(fields[STAT_EXIT_CODE]))
    except (OSError, ValueError, IndexError):
        return None
