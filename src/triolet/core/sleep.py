"""Pause: whether the requests of an engine are computed.

A *hold* keeps requests from being computed. Each has a limit, the serial of the last request that is still computed, so
that a hold may let the live requests finish while later ones wait (mode `wait`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import attrs

from triolet.errors import InvalidRequest, shown

MODES: Final = ("abort", "wait", "keep")
NOTHING: Final = -1
"""Limit of a hold that lets no request be computed: serials begin at 1."""


def check_mode(mode: object) -> str:
    """Check what happens to live requests, and return it.

    Raises:
        InvalidRequest: it is not `abort`, `wait` or `keep`.
    """
    if not isinstance(mode, str) or mode not in MODES:
        raise InvalidRequest(f"mode must be abort, wait or keep; got {shown(mode)}", field="mode", got=mode)
    return mode


@attrs.define(eq=False)
class SleepState:
    """Holds of one engine.

    Args:
        on_change: called after every change.
    """

    on_change: Callable[[], None] = lambda: None
    limit: float = math.inf  # serial of the last request that may be computed
    # Plain attributes, since every step reads them: a property would run this module on the path of every token.
    is_held: bool = False
    _holds: dict[str, float] = attrs.field(factory=dict)  # limits, by what set them

    @property
    def is_paused(self) -> bool:
        """True from the call of `pause` to that of `resume`."""
        return "pause" in self._holds

    def pause(self, limit: int = NOTHING) -> None:
        """Ask for a pause.

        Args:
            limit: serial of the last request that is computed before.
        """
        self._hold("pause", limit)

    def resume(self) -> None:
        """Ask for the end of a pause."""
        self._holds.pop("pause", None)
        self._update()

    def _hold(self, name: str, limit: int) -> None:
        # A second call must not let requests go on that the first one has stopped.
        self._holds[name] = min(limit, self._holds.get(name, limit))
        self._update()

    def _update(self) -> None:
        self.limit = min(self._holds.values(), default=math.inf)
        self.is_held = bool(self._holds)
        self.on_change()
