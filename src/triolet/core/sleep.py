"""Pause and unloading: whether the requests of an engine are computed, and whether the runner holds the model.

    SERVING --> LEAVING --> UNLOADED --> LOADED --> SERVING
      the scheduler tells the runner
                  the runner has given up the model
                               it has loaded one
                                           the scheduler starts over

A *hold* keeps requests from being computed: a pause is one, an exchange of weights another. Each has a limit, the
serial of the last request that is still computed, so that a hold may let the live requests finish while later ones wait
(mode `wait`). What the requests need is in the journal: when the runner has loaded a model again, a new scheduler
computes it, as after a crash.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import Final

import attrs

from triolet.errors import InvalidRequest, shown

MODES: Final = ("abort", "wait", "keep")
NOTHING: Final = -1
"""Limit of a hold that lets no request be computed: serials begin at 1."""


PAUSE: Final = "pause"
WEIGHTS: Final = "weights"


class RunnerPhase(enum.Enum):
    """State of the model in the runner."""

    SERVING = enum.auto()  # the scheduler's block tables describe its KV cache
    LEAVING = enum.auto()  # the runner has been told to give it up
    UNLOADED = enum.auto()  # the runner holds none
    LOADED = enum.auto()  # loaded again: no scheduler knows its KV cache yet


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
    """Holds of one engine, and how far its runner has followed them.

    Args:
        on_change: called after every change.
    """

    on_change: Callable[[], None] = lambda: None
    phase: RunnerPhase = RunnerPhase.SERVING
    limit: float = math.inf  # serial of the last request that may be computed
    # Plain attributes, since every step reads them: a property would run this module on the path of every token.
    is_held: bool = False
    _holds: dict[str, float] = attrs.field(factory=dict)  # limits, by what set them

    @property
    def is_paused(self) -> bool:
        """True from the call of `pause_generation` to that of `resume_generation`."""
        return PAUSE in self._holds

    def enter(self, phase: RunnerPhase) -> None:
        """Note the state of the model in the runner."""
        self.phase = phase
        self._update()

    def release(self, name: str) -> None:
        """End a hold; harmless if it is not there."""
        self._holds.pop(name, None)
        self._update()

    def hold(self, name: str, limit: int = NOTHING) -> None:
        """Compute no request beyond a limit.

        Args:
            name: of the hold.
            limit: serial of the last request that is computed.
        """
        # A second call must not let requests go on that the first one has stopped.
        self._holds[name] = min(limit, self._holds.get(name, limit))
        self._update()

    def _update(self) -> None:
        self.limit = min(self._holds.values(), default=math.inf)
        self.is_held = bool(self._holds) or self.phase is not RunnerPhase.SERVING
        self.on_change()
