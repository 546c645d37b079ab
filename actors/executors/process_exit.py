"""Exit status of a process, in numbers and in words."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress

STAT_EXIT_CODE = 49  # of the fields behind the name in /proc/PID/stat


def describe_exit(returncode: int) -> str:
    """Describe an exit in words, for a log."""
    if returncode >= 0:
        return f"ended with exit status {returncode}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-returncode).name}"
    return f"was killed by signal {-returncode}"


def exit_code_of(process_id: int) -> int | None:
    """Return the exit code of a process that is dying or not yet waited for, as in `Popen.returncode`.

    Returns:
        None if it cannot be known before the process is waited for; 0 if it lives or is about to end.
    """
    if sys.platform != "linux":
        return None
    try:
        with open(f"/proc/{process_id}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return os.waitstatus_to_exitcode(int(fields[STAT_EXIT_CODE]))
    except (OSError, ValueError, IndexError):
        return None
