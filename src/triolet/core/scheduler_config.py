"""What a scheduler is given, and what it counts: the two outlive it."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class SchedulerConfig:
    """The limits of a step and of a sequence.

    Args:
        num_blocks: blocks of the KV cache.
        block_size: tokens in a block.
        max_num_seqs: rows of the runner's table.
        max_num_batched_tokens: token budget of a step.
        max_model_len: longest sequence, tokens; `num_blocks` hold at least one such sequence.
        policy: `fcfs`, `priority` or `fair`.
        priority_aging_s: under `priority`, seconds of waiting that weigh as much as one step of priority.
        enable_prefix_caching: publish and look up full blocks.
        cache_key: secret of the prefix hashes.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: str = "fcfs"
    priority_aging_s: float = float("inf")
    enable_prefix_caching: bool = True
    cache_key: bytes = b""


@attrs.define
class SchedulerCounters:
    """Totals since the engine started; a scheduler that is built anew goes on with them.

    Args:
        steps: planned; numbers them, too.
        num_steps_done: whose result came; the others were lost to a crash.
    """

    steps: int = 0
    num_steps_done: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
