"""State learned from failed steps; it is kept when the scheduler restarts.

`PoisonBisection` searches for the request that crashes the runner, `OomBackoff` limits the size of steps after an
out-of-memory error, and `HangLimit` and `RareHangLimit` learn after which time a step, or another operation of a
process, counts as hung.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import ceil, log2

import attrs

from triolet.core.request.request import Request
from triolet.core.step_plan import StepPlan
from triolet.errors import RequestFailed, ResourceShortage, RunnerDied

# Out-of-memory backoff: steps are smaller at once after an out-of-memory error, then doubled step by step.
#
# A forward pass needs memory beside the weights and the KV cache, and how much is known only when it was
# tried. A step that finds none changes nothing, so it can be tried again: its largest rows leave, one the
# first time, then two, four and so on, until what is left fits. A row that is alone is cut in halves. One
# token, alone, is as small as a step can be: what does not fit then never will.
#
# After a number of steps that fit, the limits are doubled, until they limit nothing. Each new out-of-memory
# error doubles that number; the tries of one search for what fits count as one, or else a single search would keep
# steps small for thousands of them.
CALM_STEPS, MAX_CALM_STEPS = 32, 4096


@attrs.define
class OomBackoff:
    """Limits of a step; none, as long as memory was always found."""

    _max_rows: int | None = None
    _max_tokens: int | None = None
    _patience: int = CALM_STEPS
    _num_calm: int = 0
    _num_misfits: int = 0

    def max_rows(self, wanted: int) -> int:
        """Return how many of the wanted rows a step may have."""
        return wanted if self._max_rows is None else min(wanted, self._max_rows)

    def max_tokens(self, wanted: int) -> int:
        """Return how many of the wanted tokens a step may have."""
        return wanted if self._max_tokens is None else min(wanted, self._max_tokens)

    def step_did_not_fit(self, row_tokens: Sequence[int]) -> int | None:
        """Make the next step smaller.

        Args:
            row_tokens: tokens of each row, the largest first.
        Returns:
            How many rows, the largest, must leave the batch; None if it cannot be any smaller.
        """
        if not self._num_misfits:
            self._patience = min(2 * self._patience, MAX_CALM_STEPS)
        self._num_misfits += 1
        self._num_calm = 0
        if sum(row_tokens) <= 1:
            self._lift()
            return None
        if len(row_tokens) == 1:
            self._max_rows, self._max_tokens = 1, row_tokens[0] // 2
            return 0
        num_leaving = min(1 << (self._num_misfits - 1), len(row_tokens) - 1)
        rest = row_tokens[num_leaving:]
        self._max_rows, self._max_tokens = len(rest), sum(rest)
        return num_leaving

    def step_done(self, most_rows: int, most_tokens: int) -> None:
        """Count a step that fitted, and raise the limits after enough of them.

        Args:
            most_rows: rows that the configuration allows a step.
            most_tokens: tokens that it allows a step.
        """
        self._num_misfits = 0
        if self._max_rows is None or self._max_tokens is None:
            return
        self._num_calm += 1
        if self._num_calm >= self._patience:
            self._num_calm = 0
            self._max_rows, self._max_tokens = 2 * self._max_rows, 2 * self._max_tokens
            if self._max_rows >= most_rows and self._max_tokens >= most_tokens:
                self._lift()

    def _lift(self) -> None:
        self._max_rows = self._max_tokens = None
        self._patience = CALM_STEPS


# Poison bisection: the search for the request that makes the runner crash, with one restart per wrong guess.
#
# A crash does not say which row caused it. So every request in the step gets a crash count and a *mark*: the
# number of its tokens that would have been computed, had the step succeeded. A request that reaches its mark
# is cleared. The first crash may be chance: everything is computed again as it was, and no request is held
# back.
#
# When a request is in a second crash without having been cleared, the requests of that step with two crashes
# are bisected. The older half of them is computed and all other requests wait. If the runner crashes, the
# culprit is in this half; if the half is cleared, it is in the other one. A request is identified as the
# culprit only when it crashes the runner *alone* in a step, during the bisection or for the second time: it
# fails, and the others complete. Between the first crash and that point lie, of n requests, at most 1 +
# log2(n) more crashes. The older half is computed first: its success costs nothing, and the newest request is
# the likelier culprit.
#
# A crash that something outside has caused, such as a kill, makes none of them a suspect at once; a request that is in
# two of them is one. With several replicas suspects stay where they are, and others go on elsewhere
# (`core.replicas.replica_table`).
#
# Crashes during a bisection are explained, and so, once the culprit is found, are those before it: they do
# not count against the supervisor's restart limit. Every one of them halves the set, so their number is
# bounded.
MAX_CRASHES = 2

SIGKILL, SIGTERM = 9, 15  # of POSIX


@attrs.frozen
class CrashOutcome:
    """What follows from a crash."""

    culprit: int | None  # serial of the request that must fail; None if it is not known (yet)
    num_uncounted: int  # crashes, this one and those before it, that do not count against the restart limit


@attrs.define
class Candidate:
    """A request that was in a step which crashed the runner."""

    mark: int = 0  # computed tokens at which it is cleared
    num_crashes: int = 0  # crashes that it was in
    num_alone: int = 0  # crashes that may be its doing in which it was the only row
    num_counted: int = 0  # crashes that it was in and that count against the restart limit
    num_internal: int = 0  # crashes that it was in and that may be its doing

    @property
    def is_suspect(self) -> bool:
        return self.num_internal > 0 or self.num_crashes >= MAX_CRASHES


class PoisonBisection:
    """Bisection over serials of requests; the smaller serial is the older request.

    Attributes:
        crashed: the live requests that were in a step which crashed, cleared since then or not.
    """

    def __init__(self) -> None:
        self.crashed: set[int] = set()
        self._candidates: dict[int, Candidate] = {}
        self._attempt: set[int] = set()
        self._next_half: set[int] = set()

    @property
    def has_candidates(self) -> bool:
        """Return True if a request was in a step that crashed, and is not cleared."""
        return bool(self._candidates)

    @property
    def is_bisecting(self) -> bool:
        """Return True while only one half of the candidates may be computed."""
        return bool(self._attempt)

    def may_run(self, serial: int) -> bool:
        """Return True if a request may be computed now."""
        return not self._attempt or serial in self._attempt

    @property
    def suspects(self) -> frozenset[int]:
        """Requests that may crash the runner again: not cleared since a crash that nothing outside explains."""
        return frozenset(serial for serial, candidate in self._candidates.items() if candidate.is_suspect)

    def release(self, serial: int) -> Candidate | None:
        """Forget a request that goes on elsewhere, and return what is known of it."""
        self.crashed.discard(serial)
        candidate = self._candidates.get(serial)
        if candidate is not None:
            self._clear([serial])
        return candidate

    def adopt(self, serial: int, candidate: Candidate) -> None:
        """Take a request over with what another search has learned of it."""
        self.crashed.add(serial)
        self._candidates[serial] = candidate

    def step_failed(
        self,
        marks: Mapping[int, int],
        *,
        num_rows: int,
        is_external: bool = False,
        is_counted: bool = True,
    ) -> CrashOutcome:
        """Record a crash of the runner in a step, and return what follows from it.

        Args:
            marks: by serial of the live requests of the step, how many of their tokens it would have computed.
            num_rows: rows of the step, with those of requests that have ended since.
            is_external: whether something outside of the runner has ended it.
            is_counted: whether the crash counts against the restart limit, unless it is explained.
        """
        is_bisecting = self.is_bisecting
        is_explained = is_bisecting and is_counted
        self.crashed |= marks.keys()
        for serial, mark in marks.items():
            candidate = self._candidates.setdefault(serial, Candidate())
            candidate.mark = max(candidate.mark, mark)
            candidate.num_crashes += 1
            candidate.num_alone += num_rows == 1 and not is_external
            candidate.num_counted += is_counted and not is_bisecting
            candidate.num_internal += not is_external
        repeated = [serial for serial in marks if self._candidates[serial].num_crashes >= MAX_CRASHES]
        if (
            num_rows == 1
            and repeated
            and (is_bisecting or self._candidates[repeated[0]].num_alone >= MAX_CRASHES)
        ):
            return CrashOutcome(repeated[0], int(is_explained) + self._identify(repeated[0]))
        if repeated:
            self._attempt_half(repeated)
        return CrashOutcome(None, int(is_explained))

    def _identify(self, serial: int) -> int:
        """End the bisection with its culprit, and return how many counted crashes it explains."""
        num_explained = self._candidates.pop(serial).num_counted
        # The others were mostly in the same crashes, which must be taken off the restart limit only once.
        for candidate in self._candidates.values():
            candidate.num_counted = 0
        self._attempt, self._next_half = set(), set()
        return num_explained

    def _attempt_half(self, serials: Iterable[int]) -> None:
        """Compute only the older half from now on; a single request alone."""
        ordered = sorted(serials)
        middle = max(1, len(ordered) // 2)
        self._attempt, self._next_half = set(ordered[:middle]), set(ordered[middle:])

    def step_done(self, num_computed: Mapping[int, int]) -> None:
        """Clear the requests that a successful step brought to their marks.

        Args:
            num_computed: by serial of the step's requests, how many of their tokens are computed now.
        """
        if self._candidates:
            self._clear(
                serial
                for serial, number in num_computed.items()
                if serial in self._candidates and number >= self._candidates[serial].mark
            )

    def ended(self, serial: int) -> None:
        """Forget a request that has ended."""
        self.crashed.discard(serial)
        if serial in self._candidates:
            self._clear([serial])

    def _clear(self, serials: Iterable[int]) -> None:
        for serial in list(serials):
            del self._candidates[serial]
            self._next_half.discard(serial)
            self._attempt.discard(serial)
        if not self._attempt:
            self._attempt_half(self._next_half)


@attrs.define
class RecoveryState:
    """State learned from failed steps; kept when the scheduler restarts."""

    # Finds the request that crashes the runner.
    poison_bisection: PoisonBisection = attrs.field(factory=PoisonBisection)
    # Limits the size of steps after an out-of-memory error.
    memory: OomBackoff = attrs.field(factory=OomBackoff)
    # Crashes that have been explained, and that the supervisor has not taken into account yet.
    num_uncounted: int = 0
    # The runner has crashed in a step and has not shown since that it can compute one.
    has_runner_failed: bool = False

    def step_failed(self, marks: Mapping[int, int], *, num_rows: int, error: BaseException) -> CrashOutcome:
        """Record a crash of the runner in a step; see `PoisonBisection.step_failed`."""
        is_shortage = isinstance(error, ResourceShortage)
        if is_shortage:
            self.memory = OomBackoff()  # the next runner begins with what there is by then
        outcome = self.poison_bisection.step_failed(
            marks, num_rows=num_rows, is_external=is_external(error), is_counted=not is_shortage
        )
        self.num_uncounted += outcome.num_uncounted
        return outcome


# Hang limit: the time after which a step counts as hung is learned from the steps before it.
#
# `step_timeout` must be longer than the longest step that any model needs on any machine: a minute. Most
# steps take a thousandth of that, and a runner that hangs in one is known to hang much sooner. So the limit
# of a step is `FACTOR` times the 99.9th percentile of the steps like it, at least `MIN_LIMIT_S` and at most
# `step_timeout`.
#
# Steps are alike if they agree, to a power of two, in rows, in tokens and in the tokens that these attend to.
# A long prompt after thousands of decodes is a step of a kind that was never seen, and has all of
# `step_timeout`; so have the first steps of each kind. The percentile comes from a histogram of logarithmic
# times (`BINS_PER_OCTAVE`, an error of 9 %), in which old steps weigh less and less. What was learned ends
# with the life of the runner: a new process compiles and warms up once more.
FACTOR = 3.0
PERCENTILE = 0.999
MIN_LIMIT_S = 2.0  # longer than a pause of a busy machine or of garbage collection
MIN_STEPS = 32  # of a kind, before its times say anything
MEMORY_STEPS = 4096  # of a kind; then every count is halved
BINS_PER_OCTAVE = 8
MIN_ELAPSED_S = 1e-6

StepKind = tuple[int, int, int]


def step_kind(plan: StepPlan) -> StepKind:
    """Return the kind of a plan's steps: bit lengths of its rows, tokens, and tokens attended to."""
    num_tokens = num_earlier = 0
    for row in plan.rows:
        num_tokens += row.num_tokens
        num_earlier += row.start
    return len(plan.rows).bit_length(), num_tokens.bit_length(), (num_earlier + num_tokens).bit_length()


@attrs.define
class HangLimit:
    """Limits of the steps in one life of a runner."""

    max_s: float | None  # longest limit, seconds; None for no limit at all
    _times: dict[StepKind, Counter[int]] = attrs.field(factory=dict, init=False)

    def limit_s(self, kind: StepKind) -> float | None:
        """Return how long a step of this kind may take, seconds; None for ever."""
        if self.max_s is None:
            return None
        times = self._times.get(kind)
        if times is None or times.total() < MIN_STEPS:
            return self.max_s
        return min(self.max_s, max(MIN_LIMIT_S, FACTOR * _percentile(times)))

    def observe(self, kind: StepKind, elapsed_s: float) -> None:
        """Learn from a step that is done.

        Args:
            elapsed_s: from the request to the result, seconds.
        """
        times = self._times.setdefault(kind, Counter())
        times[ceil(BINS_PER_OCTAVE * log2(max(elapsed_s, MIN_ELAPSED_S)))] += 1
        if times.total() >= MEMORY_STEPS:
            self._times[kind] = Counter({index: count // 2 for index, count in times.items() if count > 1})


MAX_DOUBLINGS = 10  # of a limit, one after each hang


@attrs.define
class RareHangLimit:
    """Limit of an operation that is too rare for a percentile, such as a load: it is learned from the longest."""

    first_s: float | None  # limit until the operation has succeeded once, seconds; None for no limit
    _longest_s: float | None = attrs.field(default=None, init=False)
    _num_hangs: int = attrs.field(default=0, init=False)  # since the last success

    @property
    def is_learned(self) -> bool:
        """True if the operation has succeeded."""
        return self._longest_s is not None

    def limit_s(self) -> float | None:
        """Return how long the operation may take, seconds; None for ever."""
        if self._longest_s is None:
            return self.first_s
        # A machine that has become slow since must not have each attempt killed: the next one gets twice the time.
        return max(MIN_LIMIT_S, FACTOR * self._longest_s) * 2.0 ** min(self._num_hangs, MAX_DOUBLINGS)

    def observe(self, elapsed_s: float) -> None:
        """Learn from an operation that is done.

        Args:
            elapsed_s: from its beginning to its end, seconds.
        """
        self._longest_s, self._num_hangs = max(elapsed_s, self._longest_s or 0.0), 0

    def count_hang(self) -> None:
        """Double the limit, until the operation succeeds."""
        self._num_hangs += 1


def _percentile(times: Counter[int]) -> float:
    """Return the upper edge of the bin that the percentile lies in, seconds."""
    num_above = (1 - PERCENTILE) * times.total()
    for index in sorted(times, reverse=True):
        num_above -= times[index]
        if num_above < 0:
            break
    return float(2 ** (index / BINS_PER_OCTAVE))


def is_external(error: BaseException) -> bool:
    """Return True if something outside has ended the process of the runner.

    No step sends itself such a signal, or keeps a machine from telling how a process has ended.
    """
    # A shortage is the machine's, and an out-of-memory killer is outside as well; a request that calls for it again is
    # found at the second time.
    if isinstance(error, ResourceShortage):
        return True
    if not isinstance(error, RunnerDied) or error.is_hang:
        return False
    return error.is_lost or error.signal in (SIGKILL, SIGTERM)


def crashes_the_runner(request: Request, cause: BaseException) -> RequestFailed | ResourceShortage:
    """Return the error of a request over which the runner crashes, or lacks a resource, each time."""
    name = request.parent_id or request.request_id
    failure: RequestFailed | ResourceShortage
    if isinstance(cause, ResourceShortage):
        failure = ResourceShortage(cause.resource, f"request {name}, also when computed alone")
    else:
        failure = RequestFailed(name, f"it crashes the model runner, also when computed alone: {cause}")
    failure.__cause__ = cause
    return failure
