"""Model-runner actor: computes the scheduler's plans, one after the other, with an executor.

What `execute` raises ends this life of the actor, and the scheduler's with it: the KV cache is lost.
"""

from __future__ import annotations

import trio

from triolet.actors.channels import Wiring
from triolet.actors.executors.contract import Executor
from triolet.actors.supervisor import foreign_errors_kept
from triolet.core.load_progress import OnProgress
from triolet.core.request.params import SamplingParams
from triolet.core.step_plan import PlanRow, RowStart, StepPlan, StepResult

# A runner that crashed in a step computes one token of no request before its next plan: a request is only blamed for a
# crash of a runner that is otherwise well. No scheduler has made a plan for this life yet, and the first thing that one
# says is that all rows have ended.
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


async def model_runner_actor(
    wiring: Wiring,
    executor: Executor,
    on_progress: OnProgress,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Compute plan after plan until cancelled."""
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
