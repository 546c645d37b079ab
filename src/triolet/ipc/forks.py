"""What an engine and its fork server say to each other, over a Unix socket that keeps messages apart.

    server --> engine   IMPORTING              now and then, until all is imported
    server --> engine   READY                  then, once
    engine --> server   FORK, 5 descriptors    the process's ends of its pipes (requests, replies, errors, lifeline),
                                               and of one more for its exit code
    server --> engine   its number             0: none can be forked
    server --> pipe     its exit code          when it has ended

The end of the socket tells either side that the other one has ended, or wants no more.
"""

from __future__ import annotations

import struct
from typing import Final

IMPORTING: Final = b"importing"
READY: Final = b"ready"
FORK: Final = b"fork"
NUM_DESCRIPTORS: Final = 5
PROCESS_ID: Final = struct.Struct("I")
EXIT_CODE: Final = struct.Struct("i")
"""As in `Popen.returncode`."""
MAX_MESSAGE_BYTES: Final = 64
