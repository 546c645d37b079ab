"""Health by progress: an engine is well while steps finish, or while nobody waits for one.

A task that runs says little: a scheduler may wait for ever for a runner that hangs, and both look busy. So it is the
waiting that is measured, and its end at the actor that keeps all others waiting that gives the name.
"""

from __future__ import annotations

import trio

from triolet.actors.wiring import Wiring
from triolet.errors import EngineUnhealthy


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
