"""The detokenizer actor: tokens in the journal become text in the streams.

It waits for nobody: a feed joins what its reader has not taken. It keeps nothing that the journal and the feeds do
not have, so after a crash its next life goes through all of them and goes on.
"""

from __future__ import annotations

import trio

from triolet.actors.supervisor import foreign_errors_kept
from triolet.actors.wiring import Wiring
from triolet.core.outputs import FinishReason
from triolet.errors import RequestFailed


async def detokenizer_actor(
    wiring: Wiring, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Deliver what is new, step by step."""
    for serial, stream in tuple(wiring.streams.items()):
        stream.feed.forget_text()
        deliver(wiring, serial)
    with wiring.detokenizer_inbox.clone() as inbox:
        task_status.started()
        async for progressed in inbox:
            for serial in progressed.serials:
                deliver(wiring, serial)


def deliver(wiring: Wiring, serial: int) -> None:
    """One request's news. If its tokens can not be decoded, which may be a panic in foreign code, it fails alone."""
    errors: list[BaseException] = []
    with foreign_errors_kept(errors.append):
        wiring.advance(serial)
    if errors and (stream := wiring.close_stream(serial, FinishReason.ERROR)) is not None:
        failure = RequestFailed(stream.feed.entry.request.request_id, "its tokens could not be decoded")
        failure.__cause__ = errors[0]
        stream.fail(failure)
        wiring.finish(serial, FinishReason.ERROR)
