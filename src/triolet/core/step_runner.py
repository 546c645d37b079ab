"""Contract of the object that computes steps, and the loop over the steps of one plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

import attrs

from triolet.core.step_plan import StepPlan, StepResult


class StepRunner(Protocol):
    """A model that computes plans: `model.runner.ModelRunner`, or a fake. Never called from two threads at once."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the first step of a plan."""
        ...

    def reset(self) -> None:
        """Forget all requests."""
        ...


@runtime_checkable
class BackgroundRunner(StepRunner, Protocol):
    """A runner that computes some plans without a thread of the caller."""

    def begin(self, plan: StepPlan, done_fd: int) -> StepsInBackground | None:
        """Begin a plan; None, with nothing changed, if this one must be given to `execute`.

        Args:
            plan: one step or several.
            done_fd: an eventfd that counts the steps that are done.
        """
        ...


class StepsInBackground(Protocol):
    """A plan that is being computed in the background."""

    def results(self, count: int) -> list[StepResult]:
        """Return the results of the next `count` steps, which `done_fd` has counted as done."""
        ...

    @property
    def is_over(self) -> bool:
        """Return whether no result follows those that were returned."""
        ...

    def halt(self) -> None:
        """End the plan after the step that is being computed."""
        ...


def steps_of(
    plan: StepPlan, execute: Callable[[StepPlan], StepResult], must_halt: Callable[[], bool] = lambda: False
) -> Iterator[StepResult]:
    """Compute a plan step by step: each `next` computes one and gives its result, the last one marked `is_last`.

    Args:
        plan: one step or several.
        execute: computes the first step of a plan.
        must_halt: asked after each step whether the plan ends there.
    """
    rest: StepPlan | None = plan
    while rest is not None:
        result, rest = after_step(rest, execute(rest), must_halt=must_halt())
        yield result


def after_step(plan: StepPlan, result: StepResult, *, must_halt: bool) -> tuple[StepResult, StepPlan | None]:
    """Mark the result of a plan's first step as its last or not; return it with what is left of the plan."""
    rest = None if must_halt else plan.after(result)
    is_last = rest is None
    return result if result.is_last is is_last else attrs.evolve(result, is_last=is_last), rest
