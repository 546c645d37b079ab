"""What an answer grows by, and all that it has grown by: enough to make the same events of it once more."""

from __future__ import annotations

from typing import Any

import attrs

from triolet.core.output.outputs import CompletionOutput, Logprob, RequestOutput
from triolet.core.request.status import FinishReason
from triolet.protocol.responses.output_items import Logprobs


@attrs.frozen(kw_only=True)
class ResponseDelta:
    """What is new with one output of the engine.

    Args:
        text: the next characters.
        num_tokens: the next tokens, whether their text is in this piece or in a later one.
        logprobs: theirs, if they were asked for.
    """

    text: str
    num_tokens: int
    logprobs: Logprobs = attrs.field(factory=Logprobs)

    @classmethod
    def of(cls, completion: CompletionOutput, num_top: int | None) -> ResponseDelta:
        """What is new in an output of kind DELTA.

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
    """How an answer came to be what it is.

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
        """Of all pieces."""
        return sum(len(piece.text) for piece in self.pieces)

    @property
    def num_tokens(self) -> int:
        """Of all pieces."""
        return sum(piece.num_tokens for piece in self.pieces)


def _position(token_id: int, logprobs: dict[int, Logprob], num_top: int) -> dict[str, Any]:
    """One token's log-probability, and those of the likeliest at its place."""
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
