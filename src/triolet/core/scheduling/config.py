"""Limits and counters of the scheduler; both are kept when it restarts."""

from __future__ import annotations

from typing import Protocol

import attrs

from triolet.core.request.model_info import ModelInfo

DEFAULT_BATCHED_TOKENS = 2048
SURE_TOKENS = {"cpu": 512}  # by device; elsewhere all: tokens of a step before any was measured


class SchedulerLimits(Protocol):
    """Fields of an `EngineConfig` that limit the scheduler."""

    @property
    def max_num_seqs(self) -> int:
        """Rows."""
        ...

    @property
    def max_num_batched_tokens(self) -> int | None:
        """Token budget; None for the device's own."""
        ...

    @property
    def policy(self) -> str:
        """Scheduling policy: `fcfs`, `priority` or `fair`."""
        ...

    @property
    def priority_aging(self) -> float | None:
        """Seconds; None for never."""
        ...

    @property
    def fair_ttft_factor(self) -> float | None:
        """Times what a first token takes alone; None for no bound."""
        ...

    @property
    def max_prefill_delay(self) -> float | None:
        """Seconds; None for no bound."""
        ...

    @property
    def enable_prefix_caching(self) -> bool:
        """True to publish and look up full blocks."""
        ...

    @property
    def num_scheduler_steps(self) -> int:
        """Longest run of steps that one plan is for."""
        ...

    @property
    def speculative(self) -> str:
        """Method of speculative decoding, or `none`."""
        ...

    @property
    def num_speculative_tokens(self) -> int:
        """Longest draft."""
        ...

    @property
    def prompt_lookup_min(self) -> int:
        """Tokens that must agree."""
        ...


@attrs.frozen(kw_only=True)
class SchedulerConfig:
    """The limits of a step and of a sequence.

    Args:
        num_blocks: blocks of the KV cache.
        block_size: tokens in a block.
        max_num_seqs: rows of the runner's table.
        max_num_batched_tokens: token budget of a step.
        num_sure_tokens: of these, tokens that a step may have however long it takes. With more it must fit into
            `max_prefill_delay_s`.
        max_model_len: longest sequence, tokens; `num_blocks` hold at least one such sequence.
        policy: `fcfs`, `priority` or `fair`.
        priority_aging_s: under `priority`, seconds of waiting that weigh as much as one step of priority.
        fair_ttft_factor: under `fair`, times what a first token takes alone; infinity for no bound.
        max_prefill_delay_s: by which prompts lengthen a step of decodes, seconds; infinity for no bound.
        enable_prefix_caching: publish and look up full blocks.
        cache_key: secret of the prefix hashes.
        num_scheduler_steps: most steps that one plan is for.
        num_speculative_tokens: longest draft; 0 for none.
        prompt_lookup_min: last tokens that must have occurred before for a draft.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_sure_tokens: int = 2**31
    policy: str = "fcfs"
    priority_aging_s: float = float("inf")
    fair_ttft_factor: float = float("inf")
    max_prefill_delay_s: float = float("inf")
    enable_prefix_caching: bool = True
    cache_key: bytes = b""
    num_scheduler_steps: int = 1
    num_speculative_tokens: int = 0
    prompt_lookup_min: int = 3

    @classmethod
    def of(cls, limits: SchedulerLimits, info: ModelInfo, cache_key: bytes) -> SchedulerConfig:
        """Return the limits for a loaded model."""
        device = info.device.partition(":")[0]
        return cls(
            num_blocks=info.num_kv_blocks,
            block_size=info.block_size,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS,
            num_sure_tokens=limits.max_num_batched_tokens or SURE_TOKENS.get(device, DEFAULT_BATCHED_TOKENS),
            max_model_len=info.max_model_len,
            policy=limits.policy,
            priority_aging_s=_or_never(limits.priority_aging),
            fair_ttft_factor=_or_never(limits.fair_ttft_factor),
            max_prefill_delay_s=_or_never(limits.max_prefill_delay),
            enable_prefix_caching=limits.enable_prefix_caching,
            cache_key=cache_key,
            num_scheduler_steps=limits.num_scheduler_steps,
            num_speculative_tokens=0 if limits.speculative == "none" else limits.num_speculative_tokens,
            prompt_lookup_min=limits.prompt_lookup_min,
        )


def _or_never(limit: float | None) -> float:
    return float("inf") if limit is None else limit


@attrs.define
class SchedulerCounters:
    """Totals since the engine started; a scheduler that is built anew goes on with them.

    Args:
        steps: plans made; also numbers the plans.
        num_steps_done: steps with a result.
        num_drafts: rows of finished steps with a draft.
        num_draft_tokens: draft tokens of these rows.
        num_accepted_tokens_per_pos: accepted draft tokens, by their position in the draft.
    """

    steps: int = 0
    num_steps_done: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = attrs.field(factory=list)
