"""The detokenizer actor turns tokens in the journal into text in the outputs of the requests.

It never waits for a reader: an output joins what its reader has not taken. It has no state that the journal and the
outputs do not have, so after a crash its next life goes through all of them. A request that it dies of for the second
time fails alone.
"""

from __future__ import annotations

import time
from functools import partial

import trio

from triolet.actors.actor_progress import ActorProgress
from triolet.actors.channels import Channels
from triolet.actors.supervisor import foreign_errors_kept
from triolet.core.engine_core import EngineCore
from triolet.core.recovery.recovery_state import MAX_CRASHES
from triolet.errors import RequestFailed


async def detokenizer_actor(
    core: EngineCore,
    channels: Channels,
    progress: ActorProgress,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Deliver new tokens, step by step, until cancelled."""
    for serial, output in tuple(core.outputs.items()):
        # The last life may have ended amid it; what was delivered is known to the collector.
        output.processor.forget_text()
        _deliver_counted(core, progress, serial, trio.current_time())
    # A clone, so that the inbox stays open for the next life.
    with channels.detokenizer_inbox.clone() as inbox:
        task_status.started()
        async for progressed in inbox:
            progress.num_read["detokenizer"] += 1
            began_s, now_s = time.perf_counter(), trio.current_time()
            for serial in (*progressed.serials, *channels.take_postponed()):
                _deliver_counted(core, progress, serial, now_s)
            if progress.profile is not None:
                progress.profile.note_text(began_s, time.perf_counter())


def _deliver_counted(core: EngineCore, progress: ActorProgress, serial: int, now_s: float) -> None:
    try:
        deliver(core, progress, serial, now_s)
    except BaseException:
        with foreign_errors_kept(partial(_count_crash, core, progress, serial)):
            raise
    else:
        if (output := core.outputs.get(serial)) is not None:
            # Only crashes in a row count.
            output.num_crashes = 0


def deliver(core: EngineCore, progress: ActorProgress, serial: int, now_s: float) -> None:
    """Deliver what is new of one request, at time `now_s`, monotonic seconds.

    If its tokens cannot be decoded, which may be a panic in foreign code, the request fails alone.
    """
    try:
        if core.advance(serial, now_s):
            progress.stepped.unpark_all()
    except BaseException:
        with foreign_errors_kept(partial(_fail, core, progress, serial, "its tokens could not be decoded")):
            raise


def _count_crash(core: EngineCore, progress: ActorProgress, serial: int, error: BaseException) -> None:
    if (output := core.outputs.get(serial)) is None:
        raise error
    output.num_crashes += 1
    if output.num_crashes < MAX_CRASHES:
        raise error
    _fail(core, progress, serial, "it crashes the detokenizer each time", error)


def _fail(core: EngineCore, progress: ActorProgress, serial: int, reason: str, cause: BaseException) -> None:
    if (output := core.outputs.get(serial)) is not None:
        failure = RequestFailed(output.entry.request.request_id, reason)
        failure.__cause__ = cause
        core.fail(serial, failure, trio.current_time())
    progress.stepped.unpark_all()
