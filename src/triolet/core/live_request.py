"""A line of the table of live requests."""

from __future__ import annotations

import attrs

from triolet.core.outputs import RequestStatus


@attrs.frozen(kw_only=True)
class LiveRequest:
    """A request that waits or runs, at the moment it was asked about. All n answers to a prompt are one.

    Args:
        request_id: the caller's, or the engine's.
        client: whom it is counted for.
        priority: lower goes first under the `priority` policy.
        status: `waiting` or `running`; `waiting` also before it is let in.
        queue_position: how many requests go before it; 0 once it has been let in.
        n: answers that were asked for.
        num_prompt_tokens: length of the prompt; 0 while it is not known.
        num_cached_tokens: of these, the tokens whose KV was found in the prefix cache.
        num_computed_tokens: tokens of the prompt that have been computed, or were found.
        num_output_tokens: of all its answers so far.
        num_kv_blocks: blocks that it holds; several answers may hold the same one.
        num_preemptions: times that blocks were taken back.
        age_s: since it arrived, seconds.
        time_left_s: until its deadline, seconds; None if it has none.
    """

    request_id: str
    client: str | None
    priority: int
    status: RequestStatus
    queue_position: int = 0
    n: int = 1
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_kv_blocks: int = 0
    num_preemptions: int = 0
    age_s: float = 0.0
    time_left_s: float | None = None
