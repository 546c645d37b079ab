"""Multi-step scheduling: the number of steps that one plan is for.

Between the result of a step and the plan of the next one the runner waits. Where all requests decode and none waits,
all plans are alike: each row gets its next token, and if need be a block. So one plan is made for several such steps, a
run, and results are taken in, and streams fed, while the runner goes on.

A run decides nothing that would otherwise be decided differently. It ends where the first of its answers reaches its
length, and a request that arrives, leaves or ends makes it end after the step that is being computed: exactly when the
next plan would have been made. Tokens of that step for an answer that ended in the step before are dropped.
"""

from __future__ import annotations

from collections.abc import Collection

from triolet.core.kv_cache.block_pool import BlockPool
from triolet.core.recovery.poison_bisection import RecoveryState
from triolet.core.scheduling.config import SchedulerConfig
from triolet.core.scheduling.sequence import Sequence


def length_of_run(scheduled: Collection[Sequence], config: SchedulerConfig, recovery: RecoveryState) -> int:
    """Return how many steps these rows may run for, if no other request runs or waits, and blocks suffice.

    Args:
        scheduled: the rows of the step that is being planned, at least one.
        config: limits.
        recovery: names requests of crashed steps; these run step by step, so that the next crash names the token.
    """
    if config.num_scheduler_steps == 1 or config.num_speculative_tokens:
        return 1
    if not all(_can_go_on(sequence) for sequence in scheduled):
        return 1
    if any(recovery.poison_bisection.was_struck(sequence.entry.serial) for sequence in scheduled):
        return 1
    num_left = min(one.entry.request.max_tokens - len(one.entry.output_token_ids) for one in scheduled)
    return max(1, min(config.num_scheduler_steps, num_left))


def _can_go_on(sequence: Sequence) -> bool:
    """Return True if it decodes, and its next token needs nothing from the engine."""
    return sequence.num_pending_tokens == 1 and sequence.entry.request.constraint is None


def add_blocks_of_run(
    scheduled: Collection[Sequence], num_steps: int, pool: BlockPool, block_size: int
) -> int:
    """Give the rows the blocks of a run; of a shorter one, where there are not enough.

    Returns:
        How many steps the blocks are for: at least the one that they have blocks for already.
    """
    missing = _missing(scheduled, num_steps, block_size)
    while sum(missing) > pool.num_available:
        num_steps //= 2
        missing = _missing(scheduled, num_steps, block_size)
    for sequence, count in zip(scheduled, missing, strict=True):
        if count > 0:
            sequence.block_table += pool.allocate(count)
    return num_steps


def _missing(scheduled: Collection[Sequence], num_steps: int, block_size: int) -> list[int]:
    return [max(0, sequence.num_missing_blocks(num_steps, block_size)) for sequence in scheduled]
