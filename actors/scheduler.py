"""The scheduler actor keeps one step in flight. Every decision is `core.engine_core`'s.

It restarts alone, or together with the model runner, since its block tables describe the runner's KV. A new life has no
state of the old one: it takes the requests from the journal and computes them again. Results of the old life's steps
are recognised as late by their step id.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import trio

from triolet.actors.actor_progress import ActorProgress
from triolet.actors.channels import Channels
from triolet.actors.grammar_requests import GrammarRequests
from triolet.config.engine import EngineConfig
from triolet.core.engine_core import EngineCore
from triolet.core.messages import Progressed, SchedulerMessage, StepDone, Unload, Wake
from triolet.core.scheduling.budget import SchedulerConfig
from triolet.core.sleep import RunnerPhase


async def scheduler_actor(
    core: EngineCore,
    channels: Channels,
    progress: ActorProgress,
    grammars: GrammarRequests,
    config: EngineConfig,
    cache_key: bytes,
    *,
    halt: Callable[[], None],
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
        report: called with the time after every step, to report statistics.
    """

    def limits() -> SchedulerConfig:
        assert core.model.info is not None, "the runner starts before the scheduler"
        return SchedulerConfig.of(config, core.model.info, cache_key, core.weights.version)

    halt()  # results of the last life's plans are late from here on, so computing them is wasted
    channels.discard_scheduler_messages()
    core.new_scheduler(limits())
    if core.sleep.phase is RunnerPhase.LEAVING:
        # It was perhaps among the messages that are gone. A second one does no harm: loading empties the inbox.
        channels.to_runner.send_nowait(Unload())
    with core.scheduling(), channels.scheduler_inbox.clone() as inbox:
        task_status.started()
        while True:
            # Send the next plan before anything else is done about the last result: the runner must not wait.
            # None while weights are about to change, since it would be computed from KV of the old ones.
            is_held = channels.worker_calls.num_invalidating
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
                channels.to_runner.send_nowait(plan)
                await trio.lowlevel.checkpoint()  # the runner begins now, and the rest is done meanwhile
            elif core.must_halt:
                halt()
            if serials := core.take_progress():
                await channels.to_detokenizer.send(Progressed(serials))
            report(trio.current_time())
            progress.stepped.unpark_all()
            if not core.journal:
                progress.idle.unpark_all()
            with trio.move_on_at(core.next_look_s()):
                message = await inbox.receive()
                progress.num_read["scheduler"] += 1
                began_s = time.perf_counter()
                _handle(message, core, channels)
                if progress.profile is not None and isinstance(message, StepDone):
                    progress.profile.note_result(message.result.step_id, began_s, time.perf_counter())


def _handle(message: SchedulerMessage, core: EngineCore, channels: Channels) -> None:
    match message:
        case StepDone(result=result):
            core.apply(result, trio.current_time())
        case Wake():
            channels.scheduler_woke()
            core.add_arrivals()
