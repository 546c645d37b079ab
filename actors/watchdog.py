"""The watchdog: an actor that leaves undone what lies before it is ended, and its supervisor starts it again.

A crash tells of itself; a task that waits for something that never comes does not. Scheduler and detokenizer are
stuck when something lies unread in their inbox for `step_timeout` and they read nothing else meanwhile, the tokenizer
when a question is that old and no thread is at work on any. Whoever waits for another one who is stuck is not.

The model runner has a watchdog of its own, where it can be ended at all (`process_runner`). Nor can a task be ended
that computes and never waits: it keeps the watchdog, too, and `loop_watch` tells of it.
"""

from __future__ import annotations

import trio

from triolet.actors.supervisor import ChildStart
from triolet.actors.wiring import Wiring

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
        wiring.pulse.strike(next(iter(wiring.pulse.asked_s)))
    wiring.lives[name].cancel()
