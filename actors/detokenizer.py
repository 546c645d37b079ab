"""The detokenizer actor: tokens in the journal become text in the streams.

It waits for nobody: a feed joins what its reader has not taken. It keeps nothing that the journal and the feeds do
not have, so after a crash its next life goes through all of them and goes on. A stream that it dies of for the second
time fails alone.
"""

from __future__ import annotations

from functools import partial

import trio

from triolet.actors.channels import Wiring
from triolet.actors.supervisor import foreign_errors_kept
from triolet.core.recovery.poison_bisection import MAX_STRIKES
from triolet.core.request.status import FinishReason
from triolet.errors import RequestFailed


async def detokenizer_actor(
    wiring: Wiring, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Deliver what is new, step by step."""
    for serial, stream in tuple(wiring.streams.items()):
        stream.processor.forget_text()
        _deliver(wiring, serial)
    with wiring.detokenizer_inbox.clone() as inbox:
        task_status.started()
        async for progressed in inbox:
            wiring.pulse.num_read["detokenizer"] += 1
            for serial in progressed.serials:
                _deliver(wiring, serial)


def _deliver(wiring: Wiring, serial: int) -> None:
    try:
        deliver(wiring, serial)
    except BaseException:
        with foreign_errors_kept(partial(_strike, wiring, serial)):
            raise
    else:
        wiring.num_crashes.pop(serial, None)


def deliver(wiring: Wiring, serial: int) -> None:
    """One request's news. If its tokens can not be decoded, which may be a panic in foreign code, it fails alone."""
    try:
        wiring.advance(serial)
    except BaseException:
        with foreign_errors_kept(partial(_fail, wiring, serial, "its tokens could not be decoded")):
            raise


def _strike(wiring: Wiring, serial: int, error: BaseException) -> None:
    if serial in wiring.streams:
        wiring.num_crashes[serial] += 1
    if wiring.num_crashes[serial] < MAX_STRIKES:
        raise error
    _fail(wiring, serial, "it crashes the detokenizer each time", error)


def _fail(wiring: Wiring, serial: int, reason: str, cause: BaseException) -> None:
    if (stream := wiring.close_stream(serial, FinishReason.ERROR)) is not None:
        failure = RequestFailed(stream.processor.entry.request.request_id, reason)
        failure.__cause__ = cause
        stream.fail(failure)
        wiring.finish(serial, FinishReason.ERROR)
