"""The scheduler actor: keeps one step in flight. Every decision is `core.scheduling.scheduler`'s.

It restarts alone, or together with the model runner, whose KV its block tables describe. A new life knows nothing of
the old one: it takes the requests from the journal and computes them again; results of the old one's steps are
recognised as late.
"""

from __future__ import annotations

import math

import trio

from triolet.actors.channels import Wiring
from triolet.core.messages import Progressed, SchedulerMessage, StepDone, Wake
from triolet.core.scheduling.scheduler import Scheduler, SchedulerConfig


async def scheduler_actor(
    wiring: Wiring, config: SchedulerConfig, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Plan, apply, tell; until cancelled."""
    core = wiring.new_scheduler(config)
    with wiring.scheduling(), wiring.scheduler_inbox.clone() as inbox:
        task_status.started()
        if wiring.streams:  # the last life may have known something that it had not told
            await wiring.to_detokenizer.send(Progressed(tuple(wiring.streams)))
        while True:
            # The next plan is on its way before anybody is told of the last result: the runner is what must not wait.
            core.expire(trio.current_time())
            guided_s = _guide(core, wiring)
            if core.must_halt:
                wiring.halt()
            is_time = not core.is_step_in_flight and guided_s == math.inf
            if is_time and (plan := core.plan_step(trio.current_time())) is not None:
                wiring.to_runner.send_nowait(plan)
                await trio.lowlevel.checkpoint()  # it begins now, and what is told below is read meanwhile
            if serials := core.take_progress():
                await wiring.to_detokenizer.send(Progressed(serials))
            wiring.report(trio.current_time())
            wiring.stepped.unpark_all()
            if not wiring.journal:
                wiring.idle.unpark_all()
            with trio.move_on_at(min(core.next_deadline(), guided_s)):
                message = await inbox.receive()
                wiring.pulse.num_read["scheduler"] += 1
                _take_in(message, core, wiring)


def _guide(core: Scheduler, wiring: Wiring) -> float:
    """Take in what was found out of answers that are bound to a form, and ask about those that have grown.

    Returns:
        Until when the next step waits for what was asked, monotonic seconds; infinity if it does not.
    """
    desk, now_s = wiring.guidance, trio.current_time()
    for serial, guidance in desk.take_given().items():
        core.guide(serial, guidance)
    desk.ask(wiring.journal.take_unmasked(), now_s)
    return desk.step_waits_until(now_s)


def _take_in(message: SchedulerMessage, core: Scheduler, wiring: Wiring) -> None:
    match message:
        case StepDone(result=result):
            core.apply(result, trio.current_time())
        case Wake():
            wiring.scheduler_woke()
            core.add_arrivals()
