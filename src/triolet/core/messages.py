"""What the actors say to each other: frozen facts and wishes, in tuples.

The state that must survive is the journal's, so most messages are no more than "look there". Requests are named by
their journal serial, which is never reused; ids that callers chose stay at the engine's edge.
"""

from __future__ import annotations

import attrs

from triolet.core.step_plan import StepResult


@attrs.frozen
class Wake:
    """To the scheduler: requests came or went; look into the journal."""


@attrs.frozen
class StepDone:
    """To the scheduler: the runner has finished a step."""

    result: StepResult


SchedulerMessage = Wake | StepDone


@attrs.frozen
class Progressed:
    """To the detokenizer: these requests have new tokens in the journal, or have ended. One message per step."""

    serials: tuple[int, ...]
