"""Messages between the actors: frozen values.

The state that must survive a crash is in the journal, so most messages only tell an actor to look there. Requests are
named by their serial, which is never reused; ids chosen by callers are known to the engine only.
"""

from __future__ import annotations

import attrs

from triolet.core.step_plan import StepPlan, StepResult


@attrs.frozen
class Wake:
    """Message to the scheduler: requests were added or have ended; look into the journal."""


@attrs.frozen
class StepDone:
    """Message to the scheduler: the runner has finished a step."""

    result: StepResult


SchedulerMessage = Wake | StepDone


@attrs.frozen
class Unload:
    """Message to the runner: give up the model and the KV cache."""


RunnerMessage = StepPlan | Unload


@attrs.frozen
class Progressed:
    """Message to the detokenizer, one per step: these requests have new tokens in the journal, or have ended."""

    serials: tuple[int, ...]
