"""The model-runner actor, and what it asks of whoever runs the model.

Three executors (`executors`, `process_runner`) fulfil one contract: `start` brings up a model with no memory of
requests, `execute` computes one plan, and leaving `running()` leaves no thread or process behind. The actor around them
is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

import trio

from triolet.actors.channels import Wiring
from triolet.actors.supervisor import foreign_errors_kept
from triolet.core.load_progress import OnProgress
from triolet.core.request.model_info import ModelInfo
from triolet.core.request.params import SamplingParams
from triolet.core.step_plan import PlanRow, RowStart, StepPlan, StepResult

Tell = Callable[[StepResult], None]


class Runner(Protocol):
    """What an executor drives: `model.runner.ModelRunner`, or a fake. Never called from two threads at once."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute one step."""
        ...

    def reset(self) -> None:
        """Forget all requests."""
        ...


@runtime_checkable
class BackgroundRunner(Runner, Protocol):
    """One that knows plans which need no thread of its caller's."""

    def begin(self, plan: StepPlan, done_fd: int) -> BackgroundRun | None:
        """Begin such a plan; None if it is none of these, and nothing has happened.

        Args:
            plan: a step, or a run.
            done_fd: an eventfd; it counts the steps that are over.
        """
        ...


class BackgroundRun(Protocol):
    """A plan that is being computed."""

    def results(self, count: int) -> list[StepResult]:
        """Of the next steps, as many as are said to be over."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether no others follow those that were told of."""
        ...

    def halt(self) -> None:
        """Have it end after the step that is being computed."""
        ...


Load = Callable[[OnProgress], tuple[Runner, ModelInfo]]

# A runner whose last life ended in a step computes one token for nobody before it is given another: a request is only
# blamed for what happens to a runner that is otherwise well. No scheduler has made a plan for this life yet, and the
# first thing that one says is that all rows have ended.
PROOF = StepPlan(
    step_id=0,
    ended=(),
    starts=(
        RowStart(
            row_id=0,
            request_id="",
            epoch=0,
            prompt_token_ids=(0,),
            output_token_ids=(),
            params=SamplingParams(temperature=0.0),
            seed=0,
            ending_token_ids=frozenset(),
        ),
    ),
    rows=(PlanRow(row_id=0, start=0, num_tokens=1, new_block_ids=(0,), sample=True),),
)


class Executor(Protocol):
    """Where a runner lives."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """The scope of one life; nothing of it is left running outside."""
        ...

    async def start(self, on_progress: OnProgress) -> ModelInfo:
        """Load the model in the first life, and forget all requests in later ones."""
        ...

    async def execute(self, plan: StepPlan, tell: Tell) -> StepResult:
        """Compute a plan.

        Args:
            plan: a step, or a run.
            tell: is told the results of a run before the last.
        Returns:
            The last result.
        """
        ...

    def halt(self) -> None:
        """If a run is being computed, let it end after the step that it is at."""
        ...


async def model_runner_actor(
    wiring: Wiring,
    executor: Executor,
    on_progress: OnProgress,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Compute plan after plan. What `execute` raises ends this life, and the scheduler's with it: the KV is gone."""
    with wiring.runner_inbox.clone() as inbox:
        async with executor.running():
            wiring.model_info = await executor.start(on_progress)
            wiring.void_plans()
            if wiring.has_runner_failed:
                await executor.execute(PROOF, wiring.step_done)
                wiring.has_runner_failed = False
            wiring.pulse.is_runner_ready = True
            wiring.halt = executor.halt
            task_status.started()
            try:
                async for plan in inbox:
                    await _compute(plan, wiring, executor)
            finally:
                wiring.pulse.is_runner_ready = False


async def _compute(plan: StepPlan, wiring: Wiring, executor: Executor) -> None:
    errors: list[BaseException] = []
    has_told = True

    def tell(result: StepResult) -> None:
        nonlocal has_told
        has_told = False
        wiring.step_done(result)
        has_told = True

    with foreign_errors_kept(errors.append):
        result = await executor.execute(plan, tell)
    if errors:
        # An error of the telling is no fault of the step. (Not told by its identity: a group is made anew on its way.)
        if has_told:
            wiring.step_failed(plan, errors[0])
        raise errors[0]
    wiring.step_done(result)
