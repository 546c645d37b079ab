"""The scheduler actor keeps a step in flight, or two (look-ahead). Every decision is `core.engine_core`'s.

It restarts alone, or together with the model runner, since its block tables describe the runner's KV. A new life has no
state of the old one: it takes the requests from the journal and computes them again. Results of the old life's steps
are recognised as late by their step id.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import trio

from triolet.actors.actor_progress import ActorProgress
from triolet.actors.channels import Channels
from triolet.actors.grammar_requests import GrammarRequests
from triolet.config.engine import EngineConfig
from triolet.core.engine_core import EngineCore
from triolet.core.messages import Progressed, SchedulerMessage, StepDone, Unload, Wake
from triolet.core.scheduling.budget import SchedulerConfig
from triolet.core.sleep import RunnerPhase
from triolet.core.step_plan import StepPlan


async def scheduler_actor(
    core: EngineCore,
    channels: Channels,
    progress: ActorProgress,
    grammars: GrammarRequests,
    config: EngineConfig,
    cache_key: bytes,
    *,
    halt: Callable[[], None],
    send_ahead: Callable[[StepPlan], None] | None,
    report: Callable[[float], None],
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Plan, apply and report until cancelled.

    Args:
        core: makes the decisions.
        channels: to the other actors.
        grammars: woken when masks are needed.
        config: of the engine; limits the schedule.
        cache_key: secret of the hashes of the prefix cache.
        halt: ends a multi-step plan after its present step.
        send_ahead: called with each plan, so that the runner has it before it has answered the one before; None if
            the executor takes one plan at a time.
        report: called with the time after every step, to report statistics.
    """

    def limits() -> SchedulerConfig:
        assert core.model.info is not None, "the runner starts before the scheduler"
        return SchedulerConfig.of(config, core.model.info, cache_key, core.weights.version)

    channels.discard_scheduler_messages()
    core.new_scheduler(limits())
    if core.sleep.phase is RunnerPhase.LEAVING:
        # It was perhaps among the messages that are gone. A second one does no harm: loading empties the inbox.
        channels.to_runner.send_nowait(Unload())
    with _taking_plans_back(halt, channels), core.scheduling(), channels.scheduler_inbox.clone() as inbox:
        task_status.started()
        while True:
            # Send the next plan before anything else is done about the last result: the runner must not wait.
            # None while weights are about to change, since it would be computed from KV of the old ones.
            calls = channels.worker_calls
            # Nor are steps planned ahead while a call waits: it is made when nothing is in flight.
            is_held = calls.num_invalidating or (calls.waiting and core.is_step_in_flight)
            began_s = time.perf_counter()
            plan = None if is_held else core.plan_step(trio.current_time())
            if progress.profile is not None and plan is not None:
                progress.profile.note_plan(plan.step_id, began_s, time.perf_counter())
            # After `plan_step`, in which the last request that a hold lets finish may have ended by its deadline.
            if plan is None and core.sleep.is_held and core.follow_runner(limits):
                channels.to_runner.send_nowait(Unload())
            if core.masks.has_questions:
                grammars.wake()
            if plan is not None:
                channels.send_plan(plan)
                if send_ahead is not None:
                    send_ahead(plan)
                await trio.lowlevel.checkpoint()  # the runner begins now, and the rest is done meanwhile
            elif core.must_halt:
                halt()
            if serials := core.take_progress():
                await channels.to_detokenizer.send(Progressed(serials))
            report(trio.current_time())
            progress.stepped.unpark_all()
            if not core.journal:
                progress.idle.unpark_all()
            if plan is not None and core.may_plan:
                continue  # with the step after it
            with trio.move_on_at(core.next_look_s()):
                message = await inbox.receive()
                progress.num_read["scheduler"] += 1
                began_s = time.perf_counter()
                _handle(message, core, channels)
                if progress.profile is not None and isinstance(message, StepDone):
                    progress.profile.note_result(message.result.step_id, began_s, time.perf_counter())


@contextmanager
def _taking_plans_back(halt: Callable[[], None], channels: Channels) -> Iterator[None]:
    """Scope of a life: with its end the plans that wait are dropped, and the one that is computed ends early."""
    try:
        yield
    finally:
        # Their results are late from here on. The next life may be a pause away, and the runner must not compute
        # meanwhile for rows that it replaces.
        halt()
        channels.discard_plans()


def _handle(message: SchedulerMessage, core: EngineCore, channels: Channels) -> None:
    match message:
        case StepDone(result=result):
            core.apply(result, trio.current_time())
        case Wake():
            channels.scheduler_woke()
            core.add_arrivals()
