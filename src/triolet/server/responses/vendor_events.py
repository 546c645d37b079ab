"""Vendor events of a response: its place in the queue, the progress of its prompt, and restarts of the engine.

    triolet:queue    it waits; `position` requests go before it
    triolet:prefill  its prompt is computed: `num_computed_tokens` of `num_prompt_tokens`
    triolet:restart  actors of the engine are being restarted, `restarting`, and the response waits for them; an empty
                     list when they serve again

Only clients that asked for them (`triolet_events`) get them: strict clients refuse events that they do not know. They
have no sequence number: a numbered event must be stored for the next connection of a resumable response, and of these
only the latest one of each type is worth knowing.

The engine wakes the tasks here when something has changed, and each task tells one change after the other has been
taken: what changes meanwhile is told as one change.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import attrs
import trio

from triolet.core.output.output_processor import RequestProgress
from triolet.core.request.request import RequestStatus
from triolet.engine.engine import Engine, RestartStream
from triolet.engine.token_stream import ProgressStream, TokenStream

PROGRESS_TYPES: Final = ("triolet:queue", "triolet:prefill")
INTERVAL_S: Final = 0.25  # a display for people needs no more
# At least this for each place in the queue: a queue that moves is news for all of it. A thousand waiting clients are
# told at most 800 events a second together, and not 4,000.
INTERVAL_PER_PLACE_S: Final = 0.005

Tell = Callable[[dict[str, Any]], Awaitable[None]]
"""Sends one vendor event, and waits until there is room for the next one."""


def progress_event(progress: RequestProgress) -> dict[str, Any]:
    """Return the event for the progress of a request before its first token."""
    if progress.status is RequestStatus.WAITING and not progress.num_computed_tokens:
        return {"type": "triolet:queue", "position": progress.queue_position}
    return {
        "type": "triolet:prefill",
        "num_computed_tokens": progress.num_computed_tokens,
        "num_prompt_tokens": progress.num_prompt_tokens,
    }


def restart_event(restarting: tuple[str, ...]) -> dict[str, Any]:
    """Return the event for the actors that are being restarted."""
    return {"type": "triolet:restart", "restarting": list(restarting)}


@attrs.frozen(eq=False)
class VendorEventSender:
    """Tasks that tell the changes of one request; made inside of the stream's scope, and run in or after it."""

    _progresses: ProgressStream
    _restarts: RestartStream
    _tell: Tell

    @classmethod
    def of(cls, engine: Engine, stream: TokenStream, tell: Tell) -> VendorEventSender:
        """Return the teller of a request."""
        return cls(stream.follow(INTERVAL_S), engine.follow_restarts(), tell)

    async def run(self) -> None:
        """Tell every change, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tell_progress)
            nursery.start_soon(self._tell_restarts)

    async def _tell_progress(self) -> None:
        async for progress in self._progresses:
            if self._progresses.is_over:  # the first output says more, and may have been told already
                return
            await self._tell(progress_event(progress))
            if progress.queue_position:
                await trio.sleep(progress.queue_position * INTERVAL_PER_PLACE_S)

    async def _tell_restarts(self) -> None:
        was_told = False
        async for restarting in self._restarts:
            if restarting or was_told:
                await self._tell(restart_event(restarting))
                was_told = True


@asynccontextmanager
async def vendor_events(engine: Engine, stream: TokenStream, tell: Tell) -> AsyncGenerator[None]:
    """Tell the changes of a request while the scope is open; `tell` may be cancelled at its end."""
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(VendorEventSender.of(engine, stream, tell).run)
        try:
            yield
        except Exception as error:  # raised again below, without the nursery's group around it
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
