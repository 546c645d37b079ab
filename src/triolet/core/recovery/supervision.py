"""Decisions of a supervisor, free of I/O: which children to stop, which to start, and when to give up.

Source: Erlang/OTP `supervisor`: restart strategies, restart types, maximum restart intensity.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence

import attrs


class Strategy(enum.Enum):
    """Restart strategy: which siblings are restarted when one child dies."""

    ONE_FOR_ONE = "one_for_one"
    """Nothing: only the dead child is started again."""
    ONE_FOR_ALL = "one_for_all"
    """All others are stopped, then all are started."""
    REST_FOR_ONE = "rest_for_one"
    """Those started after it are stopped, then it and they are started: dependents stand later in the
    list.
    """


class Restart(enum.Enum):
    """Restart type: the endings of a child after which it is restarted."""

    PERMANENT = "permanent"
    """All of them."""
    TRANSIENT = "transient"
    """Crashes; a normal return is an end."""
    TEMPORARY = "temporary"
    """None, not even when a sibling's death stopped it."""


@attrs.define
class RestartIntensity:
    """Decide whether one more restart is allowed.

    Args:
        max_restarts: restarts allowed within `period_s`; one more and the supervisor gives up.
        period_s: length of the sliding window, seconds.

    Source: OTP supervisor, "Maximum Restart Intensity" (intensity, period).
    """

    max_restarts: int = attrs.field(validator=attrs.validators.ge(0))
    period_s: float = attrs.field(validator=attrs.validators.gt(0))
    _restarts: deque[tuple[float, int | None]] = attrs.field(factory=deque, init=False)

    def allow(self, now_s: float, num_achieved: int | None = None, num_uncounted: int = 0) -> bool:
        """Record a restart; False means give up.

        Args:
            now_s: when, seconds of any monotonic clock.
            num_achieved: a count of what the children have achieved so far, where there is one. A restart that leaves
                the window is then only forgotten if something was achieved since: what fails slowly, each time for a
                minute, must be given up, too.
            num_uncounted: restarts, this one and the latest before it, that are explained and do not count.
        """
        while self._restarts and self._is_forgotten(*self._restarts[0], now_s, num_achieved):
            self._restarts.popleft()
        self._restarts.append((now_s, num_achieved))
        for _ in range(min(num_uncounted, len(self._restarts))):
            self._restarts.pop()
        return len(self._restarts) <= self.max_restarts

    def _is_forgotten(
        self, then_s: float, had_achieved: int | None, now_s: float, num_achieved: int | None
    ) -> bool:
        return then_s < now_s - self.period_s and (num_achieved is None or num_achieved != had_achieved)


def must_restart(restart: Restart, *, crashed: bool) -> bool:
    """Return True if a child that ended by itself is started again."""
    return restart is Restart.PERMANENT or (restart is Restart.TRANSIENT and crashed)


def children_to_restart(strategy: Strategy, names: Sequence[str], dead: str) -> tuple[str, ...]:
    """Return the names of the children to restart when `dead` is, in start order; it is one of them.

    The others among them are stopped first, in reverse order; temporary ones are not started again.
    """
    match strategy:
        case Strategy.ONE_FOR_ONE:
            return (dead,)
        case Strategy.ONE_FOR_ALL:
            return tuple(names)
        case Strategy.REST_FOR_ONE:
            return tuple(names[names.index(dead) :])


@attrs.frozen(kw_only=True)
class CrashReport:
    """The four fields of an OTP supervisor report.

    Args:
        supervisor: name of the reporting supervisor.
        context: `start_error`, `child_terminated`, `shutdown_error` or `intensity_exceeded`.
        reason: the exception, or None for a return where none was expected.
        offender: name of the child.
    """

    supervisor: str
    context: str
    reason: BaseException | None
    offender: str
