"""Deltas of a response, and its history: enough to make the same events again."""

from __future__ import annotations

from typing import Any

import attrs

from triolet.core.output.outputs import CompletionOutput, Logprob, RequestOutput
from triolet.core.request.request import FinishReason
from triolet.protocol.responses.output_items import Logprobs


@attrs.frozen(kw_only=True)
class ResponseDelta:
    """New content of one engine output.

    Args:
        text: the next characters.
        num_tokens: number of new tokens; their text may come with a later delta.
        logprobs: of these tokens, if requested.
    """

    text: str
    num_tokens: int
    logprobs: Logprobs = attrs.field(factory=Logprobs)

    @classmethod
    def of(cls, completion: CompletionOutput, num_top: int | None) -> ResponseDelta:
        """Return the new content of an output of kind DELTA.

        Args:
            completion: its answer.
            num_top: most likely tokens to report per position, -1 for all; None for no log-probabilities.
        """
        logprobs = Logprobs()
        if completion.logprobs is not None and num_top is not None:
            logprobs = Logprobs(
                _position(token_id, entries, num_top)
                for token_id, entries in zip(completion.token_ids, completion.logprobs, strict=True)
            )
        return cls(text=completion.text, num_tokens=len(completion.token_ids), logprobs=logprobs)


@attrs.frozen(kw_only=True)
class ResponseHistory:
    """Everything that determines the events of a response.

    Args:
        pieces: that it has taken.
        item_ids: of its items, in the order in which they were made.
        output: the last one, of which nothing counts but what is not in the pieces.
        finish_reason: why it ended, if it has.
        completed_at: when that was, seconds since the epoch.
    """

    pieces: tuple[ResponseDelta, ...] = ()
    item_ids: tuple[str, ...] = ()
    output: RequestOutput | None = None
    finish_reason: FinishReason | None = None
    completed_at: int = 0

    @property
    def num_chars(self) -> int:
        return sum(len(piece.text) for piece in self.pieces)

    @property
    def num_tokens(self) -> int:
        """Total over all pieces, tokens."""
        return sum(piece.num_tokens for piece in self.pieces)


def _position(token_id: int, logprobs: dict[int, Logprob], num_top: int) -> dict[str, Any]:
    """Return the log-probability of a token and of the likeliest tokens at its position."""
    falling = sorted(logprobs.values(), key=lambda one: -one.logprob)
    top = falling if num_top == -1 else falling[:num_top]
    return {**_token(logprobs[token_id]), "top_logprobs": list(map(_token, top))}


def _token(one: Logprob) -> dict[str, Any]:
    text = one.decoded_token or ""
    return {
        "token": text,
        "bytes": list(text.encode(errors="replace")),
        "logprob": max(one.logprob, -9999.0),  # JSON has no infinity; OpenAI's word for "impossible"
    }
