"""A pipe that ends when a process begins to die, and not when the system is done with it.

Linux takes back the memory of the dead before it closes what they had open: 15 ms for a process with torch in it, 50
and more where others want the processor, and only then can anybody read the end of its pipes. But it goes by thread:
the last one has the memory to give back, and the others go at once, with the descriptors that are theirs alone. So the
worker keeps a thread that sleeps, with a table of descriptors of its own, and in it the writing end of one more pipe
that is open nowhere else. Whichever thread is the last, either this pipe or those of all the others end at once. Where
the system has no such tables they end together.

How a process ends, Linux knows from the moment at which it was killed.
"""

from __future__ import annotations

from typing import Final

VARIABLE: Final = "TRIOLET_LIFELINE"  # of the environment: the number of its writing end
