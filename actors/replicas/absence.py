"""Schedulers that are away: deadlines hold meanwhile, and what waits for one that does not come back goes on elsewhere.

A scheduler is away while its model runner is started again or waits for a worker, which may take for ever: a machine
that is gone, a shortage that does not pass.
"""

from __future__ import annotations

from typing import Final

import trio

from triolet.core.engine_core import EngineCore
from triolet.core.replicas.replicated_core import ReplicatedCore

LOOK_S: Final = 1.0  # between two looks, at most


async def absence_actor(
    core: EngineCore, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """End what is overdue while its scheduler is away, and give up replicas that are away for long, until cancelled."""
    task_status.started()
    while True:
        now_s = trio.current_time()
        next_s = core.expire_unscheduled(now_s)
        if isinstance(core, ReplicatedCore):
            core.give_up_absent(now_s)
        await trio.sleep_until(min(next_s, now_s + LOOK_S))
