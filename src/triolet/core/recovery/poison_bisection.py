"""Search for the request that makes the runner crash: a bisection, with one restart per wrong guess.

Theory of operation
-------------------
A crash does not say which row caused it. So every request in the step gets a crash count and a *mark*: the number of
its tokens that would have been computed, had the step succeeded. A request that reaches its mark is cleared. The first
crash may be chance: everything is computed again as it was, and no request is held back.

When a request is in a second crash without having been cleared, the requests of that step with two crashes are
bisected. The older half of them is computed and all other requests wait. If the runner crashes, the culprit is in this
half; if the half is cleared, it is in the other one. A request is identified as the culprit only when it crashes the
runner *alone* in a step, during the bisection or for the second time: it fails, and the others complete. Between the
first crash and that point lie, of n requests, at most 1 + log2(n) more crashes. The older half is computed first: its
success costs nothing, and the newest request is the likelier culprit.

Crashes during a bisection are explained, and so, once the culprit is found, are those before it: they do not count
against the supervisor's restart limit. Every one of them halves the set, so their number is bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from triolet.core.recovery.oom_backoff import OomBackoff

MAX_STRIKES = 2


@attrs.frozen
class CrashOutcome:
    """What follows from a crash.

    Args:
        culprit: serial of the request that must fail; None if it is not known (yet).
        num_uncounted: crashes, this one and those before it, that do not count against the restart limit.
    """

    culprit: int | None
    num_uncounted: int


@attrs.define
class _Suspect:
    """A request that was in a step which crashed the runner.

    Args:
        mark: computed tokens at which it is cleared.
        num_strikes: crashes that it was in.
        num_alone: crashes in which it was the only row.
        num_counted: crashes that it was in and that count against the restart limit.
    """

    mark: int = 0
    num_strikes: int = 0
    num_alone: int = 0
    num_counted: int = 0


class PoisonBisection:
    """Bisection over serials of requests; the smaller serial is the older request."""

    def __init__(self) -> None:
        self._poison_bisection: dict[int, _Suspect] = {}
        self._struck: set[int] = set()
        self._on_trial: set[int] = set()
        self._next_half: set[int] = set()

    @property
    def is_trial(self) -> bool:
        """Return True while only one half of the suspects may be computed."""
        return bool(self._on_trial)

    def may_run(self, serial: int) -> bool:
        """Return True if a request may be computed now."""
        return not self._on_trial or serial in self._on_trial

    def was_struck(self, serial: int) -> bool:
        """Return True if the request was ever in a step that crashed, cleared since then or not."""
        return serial in self._struck

    def step_failed(self, marks: Mapping[int, int], *, num_rows: int) -> CrashOutcome:
        """Record a crash of the runner in a step, and return what follows from it.

        Args:
            marks: by serial of the live requests of the step, how many of their tokens it would have computed.
            num_rows: rows of the step, with those of requests that have ended since.
        """
        is_trial = self.is_trial
        self._struck |= marks.keys()
        for serial, mark in marks.items():
            suspect = self._poison_bisection.setdefault(serial, _Suspect())
            suspect.mark = max(suspect.mark, mark)
            suspect.num_strikes += 1
            suspect.num_alone += num_rows == 1
            suspect.num_counted += not is_trial
        struck = [serial for serial in marks if self._poison_bisection[serial].num_strikes >= MAX_STRIKES]
        if (
            num_rows == 1
            and struck
            and (is_trial or self._poison_bisection[struck[0]].num_alone >= MAX_STRIKES)
        ):
            return CrashOutcome(struck[0], int(is_trial) + self._convict(struck[0]))
        if struck:
            self._try(struck)
        return CrashOutcome(None, int(is_trial))

    def _convict(self, serial: int) -> int:
        """End the bisection with its culprit, and return how many counted crashes it explains."""
        num_explained = self._poison_bisection.pop(serial).num_counted
        # The others were mostly in the same crashes, which must be taken off the restart limit only once.
        for suspect in self._poison_bisection.values():
            suspect.num_counted = 0
        self._on_trial, self._next_half = set(), set()
        return num_explained

    def _try(self, serials: Iterable[int]) -> None:
        """Compute only the older half from now on; a single request alone."""
        ordered = sorted(serials)
        middle = max(1, len(ordered) // 2)
        self._on_trial, self._next_half = set(ordered[:middle]), set(ordered[middle:])

    def step_done(self, num_computed: Mapping[int, int]) -> None:
        """Clear the requests that a successful step brought to their marks.

        Args:
            num_computed: by serial of the step's requests, how many of their tokens are computed now.
        """
        if self._poison_bisection:
            self._clear(
                serial
                for serial, number in num_computed.items()
                if serial in self._poison_bisection and number >= self._poison_bisection[serial].mark
            )

    def ended(self, serial: int) -> None:
        """Forget a request that has ended."""
        self._struck.discard(serial)
        if serial in self._poison_bisection:
            self._clear([serial])

    def _clear(self, serials: Iterable[int]) -> None:
        for serial in list(serials):
            del self._poison_bisection[serial]
            self._next_half.discard(serial)
            self._on_trial.discard(serial)
        if not self._on_trial and self._next_half:
            self._try(self._next_half)


@attrs.define
class RecoveryState:
    """State learned from failed steps; kept when the scheduler restarts.

    Args:
        poison_bisection: finds the request that crashes the runner.
        memory: limits the size of steps after an out-of-memory error.
        num_uncounted: crashes that have been explained, and that the supervisor has not taken into account yet.
        has_runner_failed: the runner has crashed in a step and has not shown since that it can compute one.
    """

    poison_bisection: PoisonBisection = attrs.field(factory=PoisonBisection)
    memory: OomBackoff = attrs.field(factory=OomBackoff)
    num_uncounted: int = 0
    has_runner_failed: bool = False
