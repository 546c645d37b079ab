"""Decisions of a supervisor, free of I/O: which children to stop and start, when to give up, and what to report.

Source: Erlang/OTP `supervisor`: restart strategies, restart types, maximum restart intensity.
"""

from __future__ import annotations

import enum
import errno
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import attrs

from triolet.errors import ResourceShortage


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

    Source: OTP supervisor, "Maximum Restart Intensity" (intensity, period).
    """

    # Restarts allowed within `period_s`; one more and the supervisor gives up.
    max_restarts: int = attrs.field(validator=attrs.validators.ge(0))
    period_s: float = attrs.field(validator=attrs.validators.gt(0))  # length of the sliding window, seconds
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
    """The four fields of an OTP supervisor report."""

    supervisor: str  # name of the reporting supervisor
    context: str  # `start_error`, `child_terminated`, `shutdown_error` or `intensity_exceeded`
    reason: BaseException | None  # the exception, or None for a return where none was expected
    offender: str  # name of the child


RESTART_CAUSES: Final = ("crash", "exit", "hang", "shortage")
"""Causes of restarts: an exception, the end of a process, a hang, a resource of the machine that is used up."""


@attrs.define(eq=False)
class RestartLog:
    """Restarts of an engine's actors.

    Args:
        on_change: called when `restarting` has changed.
        counts: by actor and cause; an attempt to start again that failed counts as well.
        restarting: actors that have ended and do not serve again yet.
    """

    on_change: Callable[[], object] = lambda: None
    counts: Counter[tuple[str, str]] = attrs.field(factory=Counter)
    restarting: set[str] = attrs.field(factory=set)

    def note_end(self, actors: Iterable[str]) -> None:
        """Record that actors have ended and will be started again."""
        num_before = len(self.restarting)
        self.restarting.update(actors)
        if len(self.restarting) != num_before:
            self.on_change()

    def note_start(self, actor: str) -> None:
        """Record that an actor serves, for the first time or again."""
        self.forget((actor,))

    def forget(self, actors: Iterable[str]) -> None:
        """Record that actors are not being restarted any more."""
        num_before = len(self.restarting)
        self.restarting.difference_update(actors)
        if len(self.restarting) != num_before:
            self.on_change()


# Last lines of stderr: what a process wrote is reduced to the few lines that say why it died. Usually those
# are the last ones. A process that a signal ends under Python's `faulthandler` writes much more: the error,
# the frames of all threads, one by one, and a list of extension modules. Of that are kept the first line, the
# innermost frames of the thread that failed, and the lines written just before.
#
#     terminate called after throwing an instance of 'std::length_error'
#     Fatal Python error: Aborted
#
#     Thread 0x00007f5d2cbff6c0 (most recent call first):
#       File "threading.py", line 331 in wait
#     Current thread 0x00007f5d8a3b4740 (most recent call first):
#       File "attention.py", line 12 in attend
#       ...
#     Extension modules: numpy.core._multiarray_umath, ... (total: 40)
NUM_LINES = 5
NUM_LINES_BEFORE, NUM_FRAMES = 2, 3  # around the line that says what happened
MAX_LINE_CHARS = 200

Line = tuple[float, str]


@attrs.define(eq=False)
class StderrTail:
    """Bounded store of stderr lines: few of them, and of each only the first `MAX_LINE_CHARS`."""

    _recent: deque[Line] = attrs.field(factory=lambda: deque(maxlen=NUM_LINES), init=False)
    _fatal: list[Line] = attrs.field(factory=list, init=False)
    _num_frames: int = attrs.field(default=0, init=False)
    _is_among_frames: bool = attrs.field(default=False, init=False)

    def add_line(self, line: str, now: float) -> None:
        """Take a line.

        Args:
            line: not empty.
            now: seconds, any monotonic clock.
        """
        said = (now, line.strip()[:MAX_LINE_CHARS])
        if line.startswith("Fatal Python error:"):
            self._fatal = [*list(self._recent)[-NUM_LINES_BEFORE:], said]
            self._num_frames, self._is_among_frames = 0, False
        elif self._fatal:
            self._hear_frames(line, said)
        self._recent.append(said)

    def _hear_frames(self, line: str, said: Line) -> None:
        if self._is_among_frames and line.startswith("  File ") and self._num_frames < NUM_FRAMES:
            self._fatal.append(said)
            self._num_frames += 1
        else:
            is_own = line.startswith("Current thread ") and "(most recent call first)" in line
            self._is_among_frames = is_own and self._num_frames == 0

    def since(self, then: float) -> list[str]:
        """Return the lines that say why, among those no older than `then`."""
        fatal = [text for said_s, text in self._fatal if said_s >= then]
        return fatal or [text for said_s, text in self._recent if said_s >= then]


# Shortages of a machine's resources: no part of the program is at fault, and they pass. So a shortage becomes
# one typed error, `ResourceShortage`: the request that needed the resource fails with it, and a restart that
# needed it is tried again after a growing pause, for as long as it takes.
MIN_PAUSE_S: Final = 0.1
MAX_PAUSE_S: Final = 5.0

RESOURCES: Final = {
    errno.EMFILE: "file descriptors for this process (RLIMIT_NOFILE)",
    errno.ENFILE: "file descriptors on this machine",
    errno.EAGAIN: "processes or threads",
    errno.ENOMEM: "memory",
    errno.ENOBUFS: "network buffers",
    errno.ENOSPC: "disk space",
    errno.EDQUOT: "disk quota",
}
# Texts of exceptions that have no errno: of `threading.Thread.start`, and of the dynamic loader in an ImportError.
_TEXTS: Final = {
    "can't start new thread": "processes or threads",
    "annot allocate memory": "memory",
    "failed to map segment": "memory",
}
MAX_CAUSES: Final = 8  # of an exception; a chain of them may be a circle


def shortage_of(error: BaseException, purpose: str) -> ResourceShortage | None:
    """Return the shortage that an exception, or one of its causes, reports; None if it reports none.

    Args:
        purpose: what the resource was needed for, completing "there is a shortage of ... for ...".
    """
    cause: BaseException | None = error
    for _ in range(MAX_CAUSES):
        if cause is None:
            break
        if isinstance(cause, ResourceShortage):
            return cause
        if (resource := _resource(cause)) is not None:
            shortage = ResourceShortage(resource, purpose)
            shortage.__cause__ = error
            return shortage
        cause = cause.__cause__
    return None


def _resource(error: BaseException) -> str | None:
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, OSError) and error.errno in RESOURCES:
        return RESOURCES[error.errno]
    if isinstance(error, RuntimeError | ImportError):
        return next((resource for text, resource in _TEXTS.items() if text in str(error)), None)
    return None


@contextmanager
def typed_shortages(purpose: str) -> Iterator[None]:
    """Scope in which every shortage becomes a `ResourceShortage`; other exceptions pass unchanged.

    Args:
        purpose: what resources are needed for, as in `shortage_of`.
    """
    try:
        yield
    except Exception as error:
        if (shortage := shortage_of(error, purpose)) is None or shortage is error:
            raise
        raise shortage from error


@attrs.define
class Backoff:
    """Pauses between attempts: each is twice as long as the last one, up to a limit."""

    min_s: float = MIN_PAUSE_S  # the first pause, seconds
    max_s: float = MAX_PAUSE_S  # the longest pause, seconds
    _next_s: float = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._next_s = self.min_s

    def next_s(self) -> float:
        """Return the pause before the next attempt, seconds."""
        pause_s, self._next_s = self._next_s, min(self._next_s * 2, self.max_s)
        return pause_s

    def reset(self) -> None:
        """Begin with the first pause again: an attempt has succeeded."""
        self._next_s = self.min_s
