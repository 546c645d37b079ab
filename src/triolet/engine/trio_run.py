"""Guard of an engine against use from another Trio run or from another thread.

The tasks of one event loop change an engine's state without locks. A call from elsewhere would corrupt it, so every
public method checks first; the check is one comparison.
"""

from __future__ import annotations

import trio

from triolet.errors import WrongTrioRun


class TrioRunGuard:
    """Guard that knows the Trio run in which it was made."""

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()

    def check(self) -> None:
        """Check that the caller runs in this guard's Trio run.

        Raises:
            WrongTrioRun: it runs in another one, or in none.
        """
        try:
            token = trio.lowlevel.current_trio_token()
        except RuntimeError:  # no Trio in this thread
            raise WrongTrioRun from None
        if token is not self._token:
            raise WrongTrioRun
