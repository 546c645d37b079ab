"""Pause and sleep: whether the requests of an engine are computed, and whether the runner holds the model.

    SERVING --> LEAVING --> UNLOADED --> LOADING --> LOADED --> SERVING
      the scheduler tells the runner
                  the runner has given up the model
                               it begins to load one
                                            it has loaded it
                                                       the scheduler starts over

A *hold* keeps requests from being computed: sleep is one, a pause another, an exchange of weights a third. Each has a
limit, the serial of the last request that is still computed, so that a hold may let the live requests finish while
later ones wait (mode `wait`). Another hold may keep these from finishing: then what the first one is for waits, too.
A call that waits so may take its own part of a hold back, and leaves those of other calls.
What the requests need is in the journal: when the runner has loaded a model again, a new scheduler computes it, as
after a crash.

Level 0 of sleep is nothing but a hold; from level 1 on the runner gives up the model. With `sleep_after` an idle engine
goes to sleep by itself, and the next request wakes it; `sleep_when_idle` asks for that once. After a call of `sleep`
only `wake_up` does, or a drain.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable
from typing import Final

import attrs

from triolet.errors import InvalidRequest, shown

MODES: Final = ("abort", "wait", "keep")
NOTHING: Final = -1
"""Limit of a hold that lets no request be computed: serials begin at 1."""


PAUSE: Final = "pause"
SLEEP: Final = "sleep"
WEIGHTS: Final = "weights"  # also the tag of the weights in `wake_up`
KV_CACHE: Final = "kv_cache"
SCHEDULING: Final = "scheduling"
LEVELS: Final = (0, 1, 2)
TAGS: Final = (WEIGHTS, KV_CACHE, SCHEDULING)
AUTOMATIC_LEVEL: Final = 1


class RunnerPhase(enum.Enum):
    """State of the model in the runner."""

    SERVING = enum.auto()  # the scheduler's block tables describe its KV cache
    LEAVING = enum.auto()  # the runner has been told to give it up
    UNLOADED = enum.auto()  # the runner holds none
    LOADING = enum.auto()  # it will hold one, or does, and is to be told before it gives it up
    LOADED = enum.auto()  # loaded again: no scheduler knows its KV cache yet


def check_mode(mode: object) -> str:
    """Check what happens to live requests, and return it.

    Raises:
        InvalidRequest: it is not `abort`, `wait` or `keep`.
    """
    if not isinstance(mode, str) or mode not in MODES:
        raise InvalidRequest(f"mode must be abort, wait or keep; got {shown(mode)}", field="mode", got=mode)
    return mode


def check_level(level: object) -> int:
    """Check a level of sleep, and return it.

    Raises:
        InvalidRequest: it is not 0, 1 or 2.
    """
    if not isinstance(level, int) or isinstance(level, bool) or level not in LEVELS:
        raise InvalidRequest(f"level must be 0, 1 or 2; got {shown(level)}", field="level", got=level)
    return level


def check_tags(tags: Iterable[str] | None) -> frozenset[str]:
    """Check what is to be woken, and return it; None stands for everything.

    Raises:
        InvalidRequest: there is another tag than `weights`, `kv_cache` and `scheduling`, or none.
    """
    named = TAGS if tags is None else (tags,) if isinstance(tags, str) else tuple(tags)
    if not named or not set(named) <= set(TAGS):
        raise InvalidRequest(
            f"tags must be among weights, kv_cache and scheduling; got {shown(named)}", field="tags", got=tags
        )
    return frozenset(named)


@attrs.define(eq=False)
class SleepState:
    """Holds of one engine, and how far its runner has followed them.

    Args:
        sleep_after: seconds without a request after which the engine goes to sleep by itself; None for never.
        on_change: called after every change.
        level: of the sleep that was asked for; None while awake.
        is_automatic: whether the next request ends it.
    """

    sleep_after: float | None = None
    on_change: Callable[[], None] = lambda: None
    level: int | None = None
    is_automatic: bool = False
    sleeps_when_idle: bool = False  # go to sleep as soon as no request is live
    follows_load: bool = False  # whether the number of live requests can put it to sleep or wake it
    phase: RunnerPhase = RunnerPhase.SERVING
    limit: float = math.inf  # serial of the last request that may be computed
    # Plain attributes, since every step, report or restart reads them: properties would run this module on those paths.
    is_held: bool = False
    is_paused: bool = False  # from the call of `pause_generation` to that of `resume_generation`
    # Whether the runner should hold no model, once there is nothing to compute.
    wants_unloading: bool = False
    # Limits, by the name of the hold and by the call that may take its part back; None for all that stays.
    _holds: dict[str, dict[object, float]] = attrs.field(factory=dict)
    _levels: dict[object, int] = attrs.field(factory=dict)  # of the sleep that was asked for, likewise
    _absent: frozenset[str] = frozenset()  # of weights and KV cache: what the runner should not hold
    _is_waking: bool = False  # the runner has not loaded the model yet
    _idle_since_s: float | None = None

    @property
    def is_sleeping(self) -> bool:
        """True from the call of `sleep` until everything is back."""
        return self.level is not None or self._is_waking

    def sleep(
        self, level: int, limit: int = NOTHING, *, is_automatic: bool = False, by: object = None
    ) -> None:
        """Ask for sleep; an engine that sleeps more deeply keeps its level.

        Args:
            level: 0, 1 or 2.
            limit: serial of the last request that is computed before.
            is_automatic: whether the next request ends it.
            by: see `hold`.
        """
        self._levels[by] = max(level, self._levels.get(by, 0))
        self.level = max(self._levels.values())
        self.is_automatic = is_automatic
        if self.level > 0:
            self._absent = frozenset((WEIGHTS, KV_CACHE))
        self.hold(SLEEP, limit, by)

    def wake(self, tags: frozenset[str] = frozenset(TAGS)) -> None:
        """Ask for the end of sleep, or of a part of it.

        Args:
            tags: what should be back. `scheduling` ends a sleep of level 0; from level 1 on requests are computed as
                soon as weights and KV cache are both back.
        """
        if self.level is None or (self.level == 0 and SCHEDULING not in tags):
            return
        self._absent -= tags
        if not self._absent:
            self.level, self.is_automatic, self._idle_since_s = None, False, None
            self._levels.clear()
            self._is_waking = self.phase is not RunnerPhase.SERVING
            self.release(SLEEP)

    def set_sleep_after(self, sleep_after: float | None) -> None:
        """Go to sleep after so many seconds without a request; None for never."""
        self.sleep_after = sleep_after
        self._update()

    def sleep_when_idle(self) -> None:
        """Go to sleep as soon as no request is live, until the next one; harmless while asleep."""
        if not self.is_sleeping:
            self.sleeps_when_idle = True
            self._update()

    def note_load(self, num_live: int, now_s: float) -> None:
        """Begin to sleep after enough time without a request, and wake for the next one.

        Args:
            num_live: requests that wait or run.
            now_s: monotonic seconds.
        """
        if num_live:
            self._idle_since_s = None
            self.wake_from_idleness()
        elif self._idle_since_s is None:
            self._idle_since_s = now_s
        elif now_s >= self.due_s:
            self.sleeps_when_idle = False
            self.sleep(AUTOMATIC_LEVEL, is_automatic=True)

    def wake_from_idleness(self) -> None:
        """End a sleep that the engine has begun by itself; harmless otherwise."""
        if self.is_automatic:
            self.wake()

    @property
    def due_s(self) -> float:
        """Time at which an idle engine goes to sleep; infinity while it has work, sleeps or is held."""
        if self._idle_since_s is None or self.is_held:
            return math.inf
        sleep_after = 0.0 if self.sleeps_when_idle else self.sleep_after
        return math.inf if sleep_after is None else self._idle_since_s + sleep_after

    def enter(self, phase: RunnerPhase) -> None:
        """Note the state of the model in the runner."""
        self.phase = phase
        self._is_waking &= phase is not RunnerPhase.SERVING
        self._update()

    def release(self, name: str) -> None:
        """End a hold; harmless if it is not there."""
        self._holds.pop(name, None)
        self._update()

    def hold(self, name: str, limit: float = NOTHING, by: object = None) -> None:
        """Compute no request beyond a limit.

        Args:
            name: of the hold.
            limit: serial of the last request that is computed.
            by: the call that may take it back; None if none may.
        """
        limits = self._holds.setdefault(name, {})
        # A second call must not let requests go on that the first one has stopped.
        limits[by] = min(limit, limits.get(by, limit))
        self._update()

    def keep(self, name: str, by: object) -> None:
        """Keep what one call holds until it is released; harmless if that has happened."""
        limits = self._holds.get(name, {})
        if by in limits:
            if name == SLEEP:
                self._levels[None] = max(self._levels.pop(by), self._levels.get(None, 0))
            self.hold(name, limits.pop(by))

    def take_back(self, name: str, by: object) -> None:
        """End what one call holds, and nothing that others do; harmless if that has been released."""
        limits = self._holds.get(name, {})
        if by not in limits:
            return
        if len(limits) == 1:
            self.wake() if name == SLEEP else self.release(name)
            return
        del limits[by]
        if name == SLEEP:
            del self._levels[by]
            self.level = max(self._levels.values())
            if not self.level:
                self._absent = frozenset()
        self._update()

    def limit_of(self, name: str) -> float:
        """Return the serial of the last request that one hold lets be computed; infinity without it."""
        return min(self._holds.get(name, {}).values(), default=math.inf)

    def _update(self) -> None:
        self.limit = min(
            (limit for limits in self._holds.values() for limit in limits.values()), default=math.inf
        )
        self.is_paused = PAUSE in self._holds
        # It brings the KV cache with the weights, so that one of them alone is not loaded.
        self.wants_unloading = bool(self._absent)
        self.follows_load = self.sleep_after is not None or self.sleeps_when_idle or self.is_automatic
        self.is_held = bool(self._holds) or self.phase is not RunnerPhase.SERVING
        self.on_change()
