"""Replicas that do not come back: what waits for one of them goes on elsewhere.

The process of a replica is started again when it dies, and its suspects wait for that. It may take for ever: a machine
that is gone, a shortage that does not pass.
"""

from __future__ import annotations

from typing import Final

import trio

from triolet.core.replicas.replicated_core import ReplicatedCore

LOOK_S: Final = 1.0  # between two looks


async def absence_actor(
    core: ReplicatedCore, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Give up replicas that are away for long, until cancelled."""
    task_status.started()
    while True:
        core.give_up_absent(trio.current_time())
        await trio.sleep(LOOK_S)
