"""Texts of single tokens, as log-probabilities show them.

Theory of operation. The texts of an answer's tokens, concatenated, shall be the text of the answer. So a token keeps
its leading space, although decoders drop the space at the start of a text; and a token that is part of a character has
no text, unless it completes the character: then it has all of it. The tokens before it decide, and these are the
answer's (or prompt's) own, also for a token that was not chosen.

Source: vLLM's `LogprobsProcessor` and `convert_ids_list_to_tokens`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from triolet.core.output.detokenizer import BROKEN, Decode

MAX_BEFORE = 4
"""Tokens that can have begun a character: it has at most 4 bytes."""

MAX_KEPT = 4_096

DecodeToken = Callable[[int, Sequence[int]], str | None]
"""Text of a token, from its id and those before it. None where texts are not wanted."""


def no_text(token_id: int, before: Sequence[int]) -> None:
    """Return None for every token: the request wants no texts."""


def token_decoder(decode: Decode) -> DecodeToken:
    """Return a function that gives tokens their texts.

    Args:
        decode: of the tokenizer; shows special tokens.
    """

    @lru_cache(MAX_KEPT)
    def text_alone(token_id: int) -> str:
        text = decode([token_id])
        if text.endswith(BROKEN):
            return text
        return decode([token_id, token_id])[len(text) :]  # where it does not come first, it keeps its space

    def text_after(token_id: int, before: Sequence[int]) -> str:
        text = text_alone(token_id)
        return _completed(decode, token_id, before[-MAX_BEFORE:]) if text.endswith(BROKEN) else text

    return text_after


def _completed(decode: Decode, token_id: int, before: Sequence[int]) -> str:
    """Return the text of a token that is part of a character: the character that it completes, or nothing."""
    for first in range(len(before) - 1, -1, -1):
        whole = decode([*before[first:], token_id])
        if not whole.endswith(BROKEN):
            return whole[_num_shown(decode, before[first:], whole) :]
    return ""


def _num_shown(decode: Decode, before: Sequence[int], whole: str) -> int:
    """Return how much of the whole the tokens before have shown, without parts of characters at their end."""
    num_before = len(before)
    while num_before and decode([before[num_before - 1]]).endswith(BROKEN):
        num_before -= 1
    shown = decode(before[:num_before]) if num_before else ""
    pairs = enumerate(zip(shown, whole, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(shown), len(whole)))
