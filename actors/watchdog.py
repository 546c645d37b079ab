"""The watchdog ends actors that hang, and their supervisor starts them again; health checks go by the same facts.

A crash is reported by itself; a task that waits for something that never comes is not. Scheduler and detokenizer hang
when a message lies unread in their inbox for `MAX_SILENCE_S`, or `step_timeout` if that is shorter, and they read no
other one meanwhile; the tokenizer, when a question is that old and no thread works on any; the structured-output actor,
when a request has waited that long for a mask or a task for its grammar, and no wait with a time limit of its own
explains it. An actor that waits for another one that hangs does not hang itself.

The model runner has a watchdog of its own where it can be ended at all (`executors.process`). A task that computes
without a checkpoint cannot be ended, and keeps the watchdog from running, too: `observability.loop_monitor` reports it.
"""

from __future__ import annotations

import trio

from triolet.actors.actor_progress import ActorProgress
from triolet.actors.channels import Channels
from triolet.actors.grammar_requests import GrammarRequests
from triolet.actors.supervisor import Lives
from triolet.core.engine_core import EngineCore
from triolet.core.recovery.recovery_state import MIN_LIMIT_S
from triolet.errors import EngineUnhealthy

# These actors read a message within milliseconds: 3 times the 99.9th percentile is always below the least time that
# counts as a hang (`core.recovery.recovery_state.MIN_LIMIT_S`), so there is nothing to learn.
MAX_SILENCE_S = MIN_LIMIT_S
CHECKS_PER_TIMEOUT = 4  # so a hang is found after at most one and a half times the limit

STRUCTURED_OUTPUT = "structured_output"


async def watchdog_actor(
    channels: Channels,
    progress: ActorProgress,
    grammars: GrammarRequests,
    lives: Lives,
    limit_s: float,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Look for actors that hang until cancelled.

    Args:
        channels: between the actors.
        grammars: where requests wait for masks, and tasks for grammars.
        lives: of the actors that can be ended.
        limit_s: how long an actor may do nothing, seconds; `MAX_SILENCE_S` if that is shorter.
    """
    task_status.started()
    num_seen: dict[tuple[str, object], int] = {}
    while True:
        await trio.sleep(min(limit_s, MAX_SILENCE_S) / CHECKS_PER_TIMEOUT)
        # Checks are counted, not seconds: where a task blocks the loop, no actor can read, and none of them hangs.
        pending = _pending(channels, progress, grammars, lives)
        # Work that went on since the last look has another key, and starts anew.
        num_seen = {work: num_seen.get(work, 0) + 1 for work in pending.items()}
        for (name, _), num_checks in num_seen.items():
            if num_checks > CHECKS_PER_TIMEOUT:
                _end(progress, grammars, lives, name)


def _pending(
    channels: Channels, progress: ActorProgress, grammars: GrammarRequests, lives: Lives
) -> dict[str, object]:
    """Return the actors with work to do, each with a value that changes whenever it does some."""
    pending = dict[str, object]()
    if channels.detokenizer_inbox.statistics().current_buffer_used:
        pending["detokenizer"] = progress.num_read["detokenizer"]
    else:  # not both: a scheduler may only be waiting for room in the detokenizer's inbox
        for suffix, its_channels, its_progress in _replicas(channels, progress):
            if its_channels.scheduler_inbox.statistics().current_buffer_used:
                pending[f"scheduler{suffix}"] = its_progress.num_read["scheduler"]
    # A thread that works on a question may be slow, and could not be ended anyway.
    if progress.asked_s and not progress.num_tokenizing:
        pending["tokenizer"] = next(iter(progress.asked_s))
    # Most of the time no grammar is in use, and there is nothing to look into.
    is_asked = grammars.opening_s or grammars.masks.unanswered()
    if is_asked and (oldest := grammars.oldest()) is not None:
        pending[STRUCTURED_OUTPUT] = oldest
    # The scope itself, not its id: that of the next life may be the same.
    return {name: (lives[name], work) for name, work in pending.items() if name in lives}


def _replicas(channels: Channels, progress: ActorProgress) -> list[tuple[str, Channels, ActorProgress]]:
    """Return what belongs to each replica, with the end of its actors' names."""
    if not channels.replicas:
        return [("", channels, progress)]
    pairs = zip(channels.replicas, progress.replicas, strict=True)
    return [(f".{replica}", *pair) for replica, pair in enumerate(pairs)]


def _end(progress: ActorProgress, grammars: GrammarRequests, lives: Lives, name: str) -> None:
    if name == "tokenizer":
        # Counted against the oldest question, so that one that always hangs ends as an error.
        progress.count_crash(next(iter(progress.asked_s)))
    if name == STRUCTURED_OUTPUT:
        grammars.count_hang()
    lives[name].cancel()


def check_health(
    core: EngineCore,
    channels: Channels,
    progress: ActorProgress,
    grammars: GrammarRequests,
    limit_s: float | None,
) -> None:
    """Check that requests have not waited for an actor for too long.

    Args:
        channels: between the actors.
        grammars: where requests wait for masks, and tasks for grammars.
        limit_s: how long is too long, seconds; None for no limit.
    Raises:
        EngineUnhealthy: they have.
    """
    # An engine is healthy while steps finish, or while no request waits for one. The waiting is measured and
    # not the actors, since a scheduler that waits for a runner that hangs looks as busy as the runner. The
    # actor that is named is the last one in the chain of those that wait for each other.
    if limit_s is None:
        return
    now_s = trio.current_time()
    since_s = {}
    if core.outputs and not core.is_frozen:  # a pause is no hang
        # with several replicas it is enough that one of them makes steps
        progressed_s = max(progress.progressed_s, *(each.progressed_s for each in progress.replicas), 0.0)
        since_s[_bottleneck(core, channels, progress)] = progressed_s
    if progress.asked_s:
        since_s["tokenizer"] = next(iter(progress.asked_s.values()))
    if (oldest := grammars.oldest()) is not None:
        since_s[STRUCTURED_OUTPUT] = oldest[1]
    for actor, began_s in since_s.items():
        if now_s - began_s > limit_s:
            raise EngineUnhealthy(actor, now_s - began_s)


def _bottleneck(core: EngineCore, channels: Channels, progress: ActorProgress) -> str:
    """Return the actor that all outputs wait for, if they wait."""
    if channels.detokenizer_inbox.statistics().current_buffer_used:
        return "detokenizer"
    replicas = _replicas(channels, progress)
    if not any(its_progress.is_runner_ready for _, _, its_progress in replicas):
        return "model_runner"
    if all(its_channels.scheduler_inbox.statistics().current_buffer_used for _, its_channels, _ in replicas):
        return "scheduler"
    if core.is_step_in_flight:
        return "model_runner"
    return STRUCTURED_OUTPUT if core.masks.unanswered() else "scheduler"
