"""Pipe that closes as soon as a process starts to die, not when the system has finished its exit.

Linux frees the memory of a dying process before it closes its descriptors: 15 ms for a process with torch in it, 50
and more on a busy machine, and only then do readers see the end of its pipes. But a process exits thread by thread:
the last one frees the memory, and the others exit at once and close the descriptors that only they hold. So the
worker keeps a thread that sleeps, with a table of descriptors of its own, and in it the writing end of one more pipe
that is open nowhere else. Whichever thread is the last, either this pipe or those of all the others end at once. Where
the system has no such tables they end together.

How a process ends, Linux knows from the moment at which it was killed.
"""

from __future__ import annotations

from typing import Final

VARIABLE: Final = "TRIOLET_LIFELINE"  # of the environment: the number of its writing end
