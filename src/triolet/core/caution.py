"""What steps that went wrong have taught. It outlives the schedulers that act upon it."""

from __future__ import annotations

import attrs

from triolet.core.memory_limit import MemoryLimit
from triolet.core.suspects import Suspects


@attrs.frozen
class Caution:
    """See the two.

    Args:
        suspects: requests that may have crashed the runner; all others may have to wait.
        memory: how large a step may be.
    """

    suspects: Suspects = attrs.field(factory=Suspects)
    memory: MemoryLimit = attrs.field(factory=MemoryLimit)
