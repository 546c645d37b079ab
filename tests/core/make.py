"""Requests and tokens with nothing in them but what a test is about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from triolet.core.journal import JournalEntry
from triolet.core.request.params import SamplingParams
from triolet.core.request.request import Request
from triolet.core.step_plan import SampledToken, TokenLogprobs


def make_request(
    token_ids: Sequence[int] = (1, 2, 3),
    *,
    params: SamplingParams | None = None,
    max_tokens: int = 16,
    **fields: Any,
) -> Request:
    defaults: dict[str, Any] = {"request_id": "r", "seed": 0}
    return Request(
        prompt_token_ids=tuple(token_ids),
        params=params or SamplingParams(max_tokens=max_tokens),
        max_tokens=max_tokens,
        **(defaults | fields),
    )


def next_token(entry: JournalEntry, token_id: int, logprobs: TokenLogprobs | None = None) -> SampledToken:
    """The token that the journal is waiting for."""
    return SampledToken(
        entry.request.request_id, entry.epoch, len(entry.output_token_ids), token_id, logprobs
    )
