"""Truncation of chats that are longer than the context: leave out the oldest messages."""

from __future__ import annotations

from triolet.errors import PromptTooLong
from triolet.protocol.responses.response_items import Message


def without_oldest(messages: list[Message], error: PromptTooLong) -> list[Message]:
    """Return the chat without its oldest messages: at least one, and as many as it is too long by.

    Args:
        error: with the length of the chat and its limit, tokens.
    Raises:
        PromptTooLong: `error` itself, if no message can be left out.
    """
    # System messages at the beginning and the last message stay.
    num_kept = next((place for place, one in enumerate(messages) if one["role"] != "system"), len(messages))
    first, rest = messages[:num_kept], messages[num_kept:]
    if len(rest) < 2:
        raise error
    excess = 1 - (error.max_model_len - 1) / error.num_prompt_tokens
    to_drop = excess * sum(map(_num_chars, messages))
    dropped, place = 0, 0
    # The result of a tool does not stay without the call before it.
    while place < len(rest) - 1 and (place == 0 or dropped < to_drop or rest[place]["role"] == "tool"):
        dropped += _num_chars(rest[place])
        place += 1
    return [*first, *rest[place:]]


def _num_chars(message: Message) -> int:
    return len(message["content"] or "") + 1
