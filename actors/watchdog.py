"""The watchdog: an actor that leaves undone what lies before it is ended, and its supervisor starts it again.

A crash tells of itself; a task that waits for something that never comes does not. Scheduler and detokenizer are
stuck when something lies unread in their inbox for `step_timeout` and they read nothing else meanwhile, the tokenizer
when a question is that old and no thread is at work on any. Whoever waits for another one who is stuck is not.

The model runner has a watchdog of its own, where it can be ended at all (`process_runner`). Nor can a task be ended
that computes and never waits: it keeps the watchdog, too, and `loop_watch` tells of it.
"""

from __future__ import annotations

import trio

from triolet.actors.channels import Wiring
from triolet.actors.supervisor import ChildStart
from triolet.errors import EngineUnhealthy

CHECKS_PER_TIMEOUT = 4  # so a hang is found after at most one and a half times `step_timeout`


class ActorStuck(Exception):
    """What an actor dies of that was ended by the watchdog."""


def watched(wiring: Wiring, name: str, start: ChildStart) -> ChildStart:
    """An actor that can be ended by the watchdog."""

    async def live(*, task_status: trio.TaskStatus[None]) -> None:
        with trio.CancelScope() as scope:
            wiring.lives[name] = scope
            try:
                await start(task_status=task_status)
            finally:
                del wiring.lives[name]
        if scope.cancelled_caught:
            raise ActorStuck(f"{name} did nothing for too long")

    return live


async def watchdog_actor(
    wiring: Wiring, limit_s: float, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Look, and look again; until cancelled.

    Args:
        wiring: of the actors.
        limit_s: how long is too long, seconds.
    """
    task_status.started()
    since_s: dict[tuple[str, object], float] = {}
    while True:
        await trio.sleep(limit_s / CHECKS_PER_TIMEOUT)
        now_s = trio.current_time()
        since_s = {owed: since_s.get(owed, now_s) for owed in _owed(wiring).items()}
        for (name, _), began_s in since_s.items():
            if now_s - began_s >= limit_s:
                _end(wiring, name)


def _owed(wiring: Wiring) -> dict[str, object]:
    """Who has something to do, with what stays the same only as long as it does nothing."""
    pulse, lives, owed = wiring.pulse, wiring.lives, dict[str, object]()
    if wiring.detokenizer_inbox.statistics().current_buffer_used:
        owed["detokenizer"] = pulse.num_read["detokenizer"]
    elif wiring.scheduler_inbox.statistics().current_buffer_used:
        owed["scheduler"] = pulse.num_read["scheduler"]
    if pulse.asked_s and not pulse.num_tokenizing:
        owed["tokenizer"] = next(iter(pulse.asked_s))
    return {name: (id(lives[name]), what) for name, what in owed.items() if name in lives}


def _end(wiring: Wiring, name: str) -> None:
    if name == "tokenizer":
        wiring.pulse.count_crash(next(iter(wiring.pulse.asked_s)))
    wiring.lives[name].cancel()


# --------------------
# Health by progress: an engine is well while steps finish, or while nobody waits for one.
#
# A task that runs says little: a scheduler may wait for ever for a runner that hangs, and both look busy. So it is the
# waiting that is measured, and its end at the actor that keeps all others waiting that gives the name.


def check_health(wiring: Wiring, limit_s: float | None) -> None:
    """Say who has kept requests waiting for too long.

    Args:
        limit_s: how long is too long, seconds; None never is.
    Raises:
        EngineUnhealthy: somebody has.
    """
    if limit_s is None:
        return
    now_s, pulse = trio.current_time(), wiring.pulse
    since_s = {}
    if wiring.streams:
        since_s[_stuck(wiring)] = pulse.progressed_s
    if pulse.asked_s:
        since_s["tokenizer"] = next(iter(pulse.asked_s.values()))
    for actor, began_s in since_s.items():
        if now_s - began_s > limit_s:
            raise EngineUnhealthy(actor, now_s - began_s)


def _stuck(wiring: Wiring) -> str:
    """Whom the streams wait for, if they wait: the last one in the chain of those who wait for each other."""
    if wiring.detokenizer_inbox.statistics().current_buffer_used:
        return "detokenizer"
    if not wiring.pulse.is_runner_ready:
        return "model_runner"
    if wiring.scheduler_inbox.statistics().current_buffer_used:
        return "scheduler"
    is_computing = wiring.scheduler is not None and wiring.scheduler.is_step_in_flight
    return "model_runner" if is_computing else "scheduler"
