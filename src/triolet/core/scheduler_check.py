"""What must be true of a scheduler's lists between any two of its transitions."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as List

from triolet.core.scheduler_config import SchedulerConfig
from triolet.core.sequence import Sequence
from triolet.core.waiting import check_order
from triolet.errors import InvariantViolated


def check_lanes(
    config: SchedulerConfig,
    live: Mapping[int, Sequence],
    by_epoch: Mapping[int, Sequence],
    running: List[Sequence],
    waiting: List[Sequence],
) -> None:
    """Every live request runs or waits, in order; who waits holds nothing.

    Raises:
        InvariantViolated: with what differs.
    """
    everybody = {sequence.entry.serial for sequence in (*running, *waiting)}
    if everybody != live.keys() or len(everybody) != len(running) + len(waiting):
        raise InvariantViolated(f"running {len(running)} + waiting {len(waiting)} != {len(live)}")
    if {sequence.entry.epoch: sequence for sequence in live.values()} != by_epoch:
        raise InvariantViolated("epochs do not name the live sequences")
    if len(running) > config.max_num_batched_tokens:
        raise InvariantViolated(
            f"{len(running)} running requests share {config.max_num_batched_tokens} tokens"
        )
    for sequence in waiting:
        if sequence.block_table or sequence.row_id is not None or sequence.num_scheduled_tokens:
            raise InvariantViolated(f"waiting request {sequence.entry.serial} holds blocks or a row")
    check_order(running)


def check_rows(config: SchedulerConfig, free_rows: List[int], running: List[Sequence]) -> None:
    """Every row of the runner's table is free, or one request's.

    Raises:
        InvariantViolated: with the rows.
    """
    rows = sorted([*free_rows, *(sequence.row_id for sequence in running if sequence.row_id is not None)])
    if rows != list(range(config.max_num_seqs)):
        raise InvariantViolated(f"free rows and running requests must be each row once; got {rows}")
