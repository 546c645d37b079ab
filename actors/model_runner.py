"""Model-runner actor: has the scheduler's plans computed, in their order, by an executor.

What `execute` raises ends this life of the actor, and the scheduler's with it: the KV cache is lost. To exchange the
weights the actor gives up the model and loads another one, within the same life, and it gives up the model while the
engine sleeps: that is neither a crash nor a restart, but the KV cache is lost as well.
"""

from __future__ import annotations

import logging
from contextlib import suppress

import attrs
import trio

from triolet.actors.actor_progress import ActorProgress
from triolet.actors.adapters import AdapterRegistry
from triolet.actors.channels import Channels
from triolet.actors.executors.contract import Executor, Following, LookAheadExecutor
from triolet.actors.supervisor import foreign_errors_kept
from triolet.actors.worker_calls import make_call
from triolet.core.engine_core import EngineCore
from triolet.core.load_progress import LoadProgress, OnProgress
from triolet.core.messages import RunnerMessage, Unload
from triolet.core.request.model_info import ModelInfo
from triolet.core.request.params import SamplingParams
from triolet.core.request.pooling_params import PoolingParams
from triolet.core.sleep import RunnerPhase
from triolet.core.step_plan import PlanRow, RowStart, StepPlan, StepResult
from triolet.errors import ResourceShortage, RunnerDied

logger = logging.getLogger("triolet.runner")

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


def _proof(info: ModelInfo) -> StepPlan:
    [start], [row] = PROOF.starts, PROOF.rows
    if (num_groups := len(info.cache_windows)) > 1:  # a block of each
        return attrs.evolve(PROOF, rows=(attrs.evolve(row, new_block_ids=tuple(range(num_groups))),))
    if info.pooling is None or not info.pooling.needs_whole_prompts:
        return PROOF
    # an encoder samples no token
    return attrs.evolve(
        PROOF, starts=(attrs.evolve(start, pooling=PoolingParams(task=info.pooling.tasks[0])),)
    )


async def model_runner_actor(
    core: EngineCore,
    channels: Channels,
    progress: ActorProgress,
    executor: Executor,
    on_progress: OnProgress,
    adapters: AdapterRegistry | None = None,
    step_timeout_s: float | None = None,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Compute plan after plan until cancelled.

    Args:
        adapters: LoRA adapters that a runner prepares when it has started; None for a model without them.
        step_timeout_s: after which a call into the worker counts as hung, seconds; None for never.
    """
    has_model = True  # perhaps, of an earlier life
    with channels.runner_inbox.clone() as inbox:
        while True:
            try:
                if core.must_unload:  # it was woken to sleep on, or its last life ended while it fell asleep
                    if has_model:
                        executor.forget_model()
                    await _sleep(core, progress, task_status)
                has_model = True
                async with executor.running():
                    info = await _load(core, executor, on_progress)
                    channels.discard_plans()
                    if adapters is not None:
                        await adapters.replay()
                    if core.recovery.has_runner_failed:
                        await executor.execute(_proof(info), channels.send_result)
                        core.recovery.has_runner_failed = False
                    core.note_loaded(info)
                    # The time without a model was no silence of the runner.
                    progress.is_runner_ready, progress.progressed_s = True, trio.current_time()
                    task_status.started()
                    try:
                        await _serve(inbox, core, channels, progress, executor, step_timeout_s)
                    finally:
                        progress.is_runner_ready = False
                        assert core.model.info is not None
                        # that process is gone, or about to be; the next life brings its own
                        core.model.info = attrs.evolve(core.model.info, process_id=None)
            except WeightsRefused:
                continue  # with the old ones
            executor.forget_model()
            has_model = False
            core.sleep.enter(RunnerPhase.UNLOADED)


async def _sleep(core: EngineCore, progress: ActorProgress, task_status: trio.TaskStatus[None]) -> None:
    """Hold no model until the engine is woken; that counts as serving."""
    if core.sleep.phase is not RunnerPhase.UNLOADED:
        core.sleep.enter(RunnerPhase.UNLOADED)
    task_status.started()
    while core.sleep.wants_unloading:
        await progress.runner_held.park()


class WeightsRefused(Exception):
    """Requested weights cannot be loaded; `__cause__` says why."""


async def _load(core: EngineCore, executor: Executor, on_progress: OnProgress) -> ModelInfo:
    if core.model.info is not None:
        # What the caller's function raises ends the opening of the engine, and nothing later.
        on_progress = _ignore
    executor.use_weights(core.begin_load())
    if core.sleep.phase is RunnerPhase.UNLOADED:
        core.sleep.enter(RunnerPhase.LOADING)
    try:
        return await executor.start(on_progress)
    except ResourceShortage:
        raise  # the machine's, and no fault of the weights: the supervisor tries again
    except Exception as error:
        if core.weights.refuse(error, is_death=isinstance(error, RunnerDied)):
            logger.warning("the new weights are refused, and the old ones loaded again: %s", error)
            raise WeightsRefused from error
        raise


async def _serve(
    inbox: trio.MemoryReceiveChannel[RunnerMessage | None],
    core: EngineCore,
    channels: Channels,
    progress: ActorProgress,
    executor: Executor,
    step_timeout_s: float | None,
) -> None:
    """Compute plan after plan, and make calls when none is in flight, until the model is to be given up."""
    must_unload = False

    def read(message: RunnerMessage | None) -> StepPlan | None:
        nonlocal must_unload
        match message:
            case StepPlan():
                channels.plan_read()
                return message
            case Unload():
                must_unload = True
            case None:
                channels.runner_woke()
                channels.wake_scheduler()  # a call that was taken back may have kept it from planning
        return None

    def following() -> StepPlan | None:
        with suppress(trio.WouldBlock):
            while not must_unload:
                if (plan := read(inbox.receive_nowait())) is not None:
                    return plan
        return None

    while not must_unload:
        if (plan := read(await inbox.receive())) is not None:
            await _compute(plan, following, core, channels, progress, executor)
        # Not before a plan that was made already, for the state that the runner is in now.
        if channels.worker_calls.waiting and not channels.num_unread_plans:
            await _make_calls(core, channels, progress, executor, step_timeout_s)


async def _compute(
    plan: StepPlan,
    following: Following,
    core: EngineCore,
    channels: Channels,
    progress: ActorProgress,
    executor: Executor,
) -> None:
    """Compute a plan, and those that are there when it is done, if the executor goes on with them."""
    errors: list[BaseException] = []
    is_handed_over = True

    def tell(result: StepResult) -> None:
        nonlocal is_handed_over
        is_handed_over = False
        progress.progressed_s = trio.current_time()
        channels.send_result(result)
        is_handed_over = True

    def follow() -> StepPlan | None:
        nonlocal plan
        if (follower := following()) is not None:
            plan = follower
        return follower

    with foreign_errors_kept(errors.append):
        if isinstance(executor, LookAheadExecutor):
            result = await executor.execute_in_turn(plan, tell, follow)
        else:
            result = await executor.execute(plan, tell)
    if errors:
        # An error raised while a result was handed over is not the step's. A flag says so, and not the identity of the
        # error: an exception group is built anew on its way here.
        if is_handed_over:
            _fail_step(plan, errors[0], core, channels)
        raise errors[0]
    progress.progressed_s = trio.current_time()
    channels.send_result(result)


async def _make_calls(
    core: EngineCore,
    channels: Channels,
    progress: ActorProgress,
    executor: Executor,
    step_timeout_s: float | None,
) -> None:
    """Make the calls that wait, before the next plan is computed."""
    while (pending := channels.worker_calls.next()) is not None:
        progress.progressed_s = trio.current_time()
        if pending.timeout_s is not None and step_timeout_s is not None:
            # a call that may take longer than a step does not make the engine unhealthy until its own time is over
            progress.progressed_s += max(0.0, pending.timeout_s - step_timeout_s)
        try:
            await make_call(pending, executor.call, step_timeout_s)
        except Exception:
            # explained: the call is not made again
            core.recovery.num_uncounted += 1
            raise
        finally:
            progress.progressed_s = trio.current_time()
            if pending.invalidates:
                channels.worker_calls.num_invalidating -= 1
                if core.scheduler is not None:
                    core.scheduler.reset_prefix_cache(reset_running_requests=True)
                channels.wake_scheduler()


def _ignore(told: LoadProgress) -> None:
    pass


def _fail_step(plan: StepPlan, error: BaseException, core: EngineCore, channels: Channels) -> None:
    if core.is_in_flight(plan):
        # Earlier steps of the plan may have given tokens that the scheduler has not read: they count.
        for result in channels.take_results():
            core.apply(result, trio.current_time())
    core.fail_step(plan, error)
