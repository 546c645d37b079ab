"""Which request makes the runner crash: a bisection, with a restart for every wrong guess.

Theory of operation
-------------------
A runner that crashes in a step says nothing of which row it was. So every request in the step gets a strike and a
*mark*: how many of its tokens would have been computed, had the step succeeded. A request that gets as far as its mark
is cleared. Chance does not strike twice: after a single crash everything is computed again as it was, and nobody is
held back.

When a request is struck for the second time without having been cleared, those of the step with two strikes are put on
trial. Half of them are computed and all others wait. If the runner crashes, the culprit is in this half; if the half is
cleared, it is in the other one. Only a request that crashes the runner when it is *alone* in a step, on trial or for
the second time, is convicted: it fails, and the others complete. Between the first crash and the conviction lie, of n
requests, at most 1 + log2(n) more crashes. The older half goes first: to succeed costs nothing, and the newcomer is the
likelier culprit.

Crashes in a trial are explained, and so, after a conviction, are those that led to it: they are pardoned, and use up
nobody's patience. Every one of them makes the trial shorter, so that there is an end to them.
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
        num_pardoned: crashes, this one and those before it, that need not be counted.
    """

    culprit: int | None
    num_uncounted: int


@attrs.define
class _Suspect:
    """A request that was in a step which crashed the runner.

    Args:
        mark: computed tokens at which it is cleared.
        num_strikes: crashes it was in.
        num_alone: those in which nobody else was.
        num_counted: crashes it was in that were not pardoned.
    """

    mark: int = 0
    num_strikes: int = 0
    num_alone: int = 0
    num_counted: int = 0


class PoisonBisection:
    """See the module's text. Requests are named by their serials: the smaller is the older."""

    def __init__(self) -> None:
        self._poison_bisection: dict[int, _Suspect] = {}
        self._struck: set[int] = set()
        self._on_trial: set[int] = set()
        self._next_half: set[int] = set()

    @property
    def is_trial(self) -> bool:
        """Whether only some requests may be computed."""
        return bool(self._on_trial)

    def may_run(self, serial: int) -> bool:
        """Whether a request may be computed now."""
        return not self._on_trial or serial in self._on_trial

    def was_struck(self, serial: int) -> bool:
        """Whether the request was ever in a step that crashed, cleared since then or not."""
        return serial in self._struck

    def step_failed(self, marks: Mapping[int, int], *, num_rows: int) -> CrashOutcome:
        """The runner has crashed in a step.

        Args:
            marks: of the step's requests that still live, how many of their tokens it would have brought them to.
            num_rows: of the step, with those whose request has ended since.
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
        """Returns how many counted crashes are explained by it."""
        num_explained = self._poison_bisection.pop(serial).num_counted
        for (
            suspect
        ) in self._poison_bisection.values():  # most of theirs were this one's, and are pardoned once
            suspect.num_counted = 0
        self._on_trial, self._next_half = set(), set()
        return num_explained

    def _try(self, serials: Iterable[int]) -> None:
        """Put the older half on trial; a single one, alone."""
        ordered = sorted(serials)
        middle = max(1, len(ordered) // 2)
        self._on_trial, self._next_half = set(ordered[:middle]), set(ordered[middle:])

    def step_done(self, num_computed: Mapping[int, int]) -> None:
        """A step has succeeded.

        Args:
            num_computed: of its requests, how many of their tokens are computed now.
        """
        if self._poison_bisection:
            self._clear(
                serial
                for serial, number in num_computed.items()
                if serial in self._poison_bisection and number >= self._poison_bisection[serial].mark
            )

    def ended(self, serial: int) -> None:
        """A request has ended: nothing of it will be computed any more."""
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
        num_uncounted: crashes that have been explained, and that the supervisor has not asked about yet.
        has_runner_failed: the runner has crashed in a step and has not shown since that it can compute one.
    """

    poison_bisection: PoisonBisection = attrs.field(factory=PoisonBisection)
    memory: OomBackoff = attrs.field(factory=OomBackoff)
    num_uncounted: int = 0
    has_runner_failed: bool = False
