"""Shutdown of a program that serves: its signals, and how its grace period is divided."""

from __future__ import annotations

import logging
import os
import signal
from typing import Final

import attrs
import trio

from triolet.config.server import GatewayConfig

SIGNALLED: Final = 128  # a shell adds the number of the signal that ended a program

logger = logging.getLogger("triolet.serve")


@attrs.define(eq=False)
class StopSignals:
    """Receiver of SIGINT and SIGTERM: the first one lets the program end, the second one ends it at once."""

    first: int | None = None  # number of the first signal; None before
    came: trio.Event = attrs.field(factory=trio.Event)

    async def watch(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Receive signals until cancelled."""
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for number in signals:
                if self.first is not None:
                    logger.warning("a second signal: ending at once")
                    logging.shutdown()
                    os._exit(SIGNALLED + number)
                self.first = number
                self.came.set()

    def raise_for_interrupt(self) -> None:
        """End the program as one that Ctrl-C ended, if that was the first signal.

        Raises:
            SystemExit: with 130; after SIGTERM, nothing is raised.
        """
        if self.first == signal.SIGINT:
            raise SystemExit(SIGNALLED + signal.SIGINT)


def drain_deadlines(config: GatewayConfig) -> tuple[float, float]:
    """Return until when answers may go on, and until when connections must be closed, in time of Trio.

    Everything must end within the grace period, since the sender of the signal may kill the process at its end. The
    first half of the rest is for sending the ends of answers and for closing WebSockets, the second half for what the
    program has to do at last.
    """
    now, grace_s = trio.current_time(), config.grace_period
    rest_s = min(2 * config.close_timeout, grace_s / 2)
    return now + grace_s - rest_s, now + grace_s - rest_s / 2
