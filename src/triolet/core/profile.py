"""Profile of the steps: the spans that engine and worker record, as events of a Chrome trace, and their sums.

    plan ->| compute ......................... | sample |  deliver
           | hand over | prepare | forward     |        |  worker's end to result applied

The four spans of a step follow each other without a gap, from the beginning of its plan until its tokens are in the
journal; so they add up to the step's time. A later step of a run has no plan of its own, and begins in the worker.
Text is made of the tokens beside the next step, which is why `detokenize` is not a part of any.

All times are of one monotonic clock that the processes of a machine share, seconds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

PHASES = ("plan", "compute", "sample", "deliver")
CATEGORY = "triolet"
# Rows of the trace. Steps overlap a little in a run, so they take turns on two rows.
ROWS = (
    "step (even)",
    "step (odd)",
    "plan",
    "compute",
    "sample",
    "deliver",
    "inside of compute",
    "detokenize",
)
FIRST_ROW = 1_000_000  # above the ids of threads, which the other rows are named after
MAX_STEPS = 20_000
"""Steps that one profile holds; later ones are not recorded."""

Span = tuple[float, float]


@attrs.define(eq=False)
class StepRecorder:
    """Spans that the engine records: when it planned steps, applied their results and made text."""

    plans: dict[int, Span] = attrs.field(factory=dict)  # by step id
    applied: list[tuple[int, float, float]] = attrs.field(
        factory=list
    )  # step id and span, one for each result
    detokenized: list[Span] = attrs.field(factory=list)

    def note_plan(self, step_id: int, began_s: float, ended_s: float) -> None:
        """Record that a step was planned."""
        if len(self.plans) < MAX_STEPS:
            self.plans[step_id] = (began_s, ended_s)

    def note_result(self, step_id: int, began_s: float, ended_s: float) -> None:
        """Record that the result of a step was applied."""
        if len(self.applied) < MAX_STEPS:
            self.applied.append((step_id, began_s, ended_s))

    def note_text(self, began_s: float, ended_s: float) -> None:
        """Record that the tokens of a step were turned into text."""
        if len(self.detokenized) < MAX_STEPS:
            self.detokenized.append((began_s, ended_s))

    def values(self) -> list[Any]:
        """Return the spans as plain values, for `of`."""
        return [list(self.plans.items()), self.applied, self.detokenized]

    @classmethod
    def of(cls, values: Sequence[Any]) -> StepRecorder:
        """Make a recorder from its values."""
        plans, applied, detokenized = values
        return cls({step_id: (began, ended) for step_id, (began, ended) in plans}, applied, detokenized)


@attrs.frozen
class WorkerStep:
    """Times of one step in the worker."""

    step_id: int
    num_rows: int
    num_tokens: int
    began_s: float
    prepared_s: float  # the input is there
    computed_s: float  # the forward pass has ended
    ended_s: float  # tokens are sampled


def chrome_events(
    recorder: StepRecorder, steps: Iterable[WorkerStep], process_id: int, zero_s: float, zero_us: float
) -> list[dict[str, Any]]:
    """Return the events of the steps that both sides have recorded whole.

    Args:
        recorder: the engine's side.
        steps: the worker's side, in order.
        process_id: shown for all events.
        zero_s: time that is shown as `zero_us`, microseconds.
    """

    def event(row: str, name: str, span: Span, **args: object) -> dict[str, Any]:
        began_s, ended_s = span
        return {
            "ph": "X",
            "cat": CATEGORY,
            "name": name,
            "pid": process_id,
            "tid": FIRST_ROW + ROWS.index(row),
            "ts": (began_s - zero_s) * 1e6 + zero_us,
            "dur": max(ended_s - began_s, 0.0) * 1e6,
            "args": args,
        }

    results: dict[int, list[Span]] = defaultdict(list)
    for step_id, began_s, ended_s in recorder.applied:
        results[step_id].append((began_s, ended_s))
    events = [
        {
            "ph": "M",
            "name": "thread_name",
            "pid": process_id,
            "tid": FIRST_ROW + number,
            "args": {"name": f"triolet: {row}"},
        }
        for number, row in enumerate(ROWS)
    ]
    num_seen: dict[int, int] = defaultdict(int)
    number = 0
    for step in steps:
        index = num_seen[step.step_id]
        num_seen[step.step_id] += 1
        plan = recorder.plans.get(step.step_id)
        # The first and the last step may have been recorded on one side only.
        if plan is None or index >= len(results[step.step_id]):
            continue
        applied = results[step.step_id][index]
        began_s = plan[1] if index == 0 else step.began_s
        facts = {"step_id": step.step_id, "index": index, "rows": step.num_rows, "tokens": step.num_tokens}
        whole = (plan[0] if index == 0 else began_s, applied[1])
        events.append(event(ROWS[number % 2], "step", whole, **facts))
        if index == 0:
            events.append(event("plan", "plan", plan, **facts))
            events.append(event("inside of compute", "hand over", (began_s, step.began_s), **facts))
        events += (
            event("compute", "compute", (began_s, step.computed_s), **facts),
            event("inside of compute", "prepare", (step.began_s, step.prepared_s), **facts),
            event("inside of compute", "forward", (step.prepared_s, step.computed_s), **facts),
            event("sample", "sample", (step.computed_s, step.ended_s), **facts),
            event("deliver", "deliver", (step.ended_s, applied[1]), **facts),
        )
        number += 1
    events += [event("detokenize", "detokenize", span) for span in recorder.detokenized]
    return events


@attrs.frozen
class PhaseSum:
    """Time that all steps of a profile spent in one phase."""

    name: str
    count: int
    total_us: float
    share: float  # of the time of all steps


def phase_sums(events: Iterable[Mapping[str, Any]]) -> list[PhaseSum]:
    """Return the sums of a trace's steps: `step`, the phases in their order, and what is inside or beside them."""
    counts: dict[str, int] = defaultdict(int)
    totals: dict[str, float] = defaultdict(float)
    for event in events:
        if event.get("cat") == CATEGORY and event.get("ph") == "X":
            counts[event["name"]] += 1
            totals[event["name"]] += event["dur"]
    names = ("step", *PHASES, "hand over", "prepare", "forward", "detokenize")
    whole_us = totals["step"] or math.inf  # a trace without a whole step
    return [PhaseSum(name, counts[name], totals[name], totals[name] / whole_us) for name in names]
