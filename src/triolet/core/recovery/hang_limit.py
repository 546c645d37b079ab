"""Time after which a step counts as hung, learned from the steps before it.

`step_timeout` must be longer than the longest step that any model needs on any machine: a minute. Most steps take a
thousandth of that, and a runner that hangs in one is known to hang much sooner. So the limit of a step is `FACTOR`
times the 99.9th percentile of the steps like it, at least `MIN_LIMIT_S` and at most `step_timeout`.

Steps are alike if they agree, to a power of two, in rows, in tokens and in the tokens that these attend to. A long
prompt after thousands of decodes is a step of a kind that was never seen, and has all of `step_timeout`; so have the
first steps of each kind. The percentile comes from a histogram of logarithmic times (`BINS_PER_OCTAVE`, an error of
9 %), in which old steps weigh less and less. What was learned ends with the life of the runner: a new process compiles
and warms up once more.
"""

from __future__ import annotations

from collections import Counter
from math import ceil, log2

import attrs

from triolet.core.step_plan import StepPlan

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
    num_attended = sum(row.start + row.num_tokens for row in plan.rows)
    return len(plan.rows).bit_length(), plan.num_tokens.bit_length(), num_attended.bit_length()


@attrs.define
class HangLimit:
    """Limits of the steps in one life of a runner.

    Args:
        max_s: longest limit, seconds; None for no limit at all.
    """

    max_s: float | None
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
            kind: of the step.
            elapsed_s: from the request to the result, seconds.
        """
        times = self._times.setdefault(kind, Counter())
        times[ceil(BINS_PER_OCTAVE * log2(max(elapsed_s, MIN_ELAPSED_S)))] += 1
        if times.total() >= MEMORY_STEPS:
            self._times[kind] = Counter({index: count // 2 for index, count in times.items() if count > 1})


def _percentile(times: Counter[int]) -> float:
    """Return the upper edge of the bin that the percentile lies in, seconds."""
    num_above = (1 - PERCENTILE) * times.total()
    for index in sorted(times, reverse=True):
        num_above -= times[index]
        if num_above < 0:
            break
    return float(2 ** (index / BINS_PER_OCTAVE))
