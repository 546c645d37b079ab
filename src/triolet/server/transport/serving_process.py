"""Settings of a process that serves many clients, an engine's or a router's."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Final

# Every read and write of a socket lets go of the interpreter lock, and gets it back from a thread that parses a long
# body only after this time. With Python's 5 ms, a pass of the loop over 40 sockets takes 200 ms; with 0.1 ms, a pass
# with a hundred handovers takes twice as long as its work.
SWITCH_INTERVAL_S: Final = 0.00002

# Linux doubles the table of descriptors when it is full, and then waits until no other thread reads the old one: the
# event loop stood still for 10 to 17 ms at the 257th, the 513th, the 1025th connection.
NUM_DESCRIPTORS: Final = 2**15


def prepare_to_serve() -> None:
    """Take as many descriptors as the system allows, and keep the threads that parse from holding up the event loop."""
    # Each connection takes a descriptor, of a router two, and the usual soft limit of 1024 is too low for a server.
    if sys.platform != "win32":
        import resource

        with suppress(ValueError, OSError):
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        with suppress(OSError):
            make_room_for_descriptors(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def make_room_for_descriptors(most: int) -> None:
    """Have the table of this process's descriptors made large, while there is one thread.

    Args:
        most: descriptors that it may have; negative for no limit.
    """
    import fcntl

    last = NUM_DESCRIPTORS - 1 if most < 0 else min(most, NUM_DESCRIPTORS) - 1
    first = os.open(os.devnull, os.O_RDONLY)
    try:
        os.close(fcntl.fcntl(first, fcntl.F_DUPFD_CLOEXEC, last))  # the table never shrinks
    finally:
        os.close(first)
