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
    # System messages and the last one stay.
    places = [place for place, one in enumerate(messages[:-1]) if one["role"] != "system"]
    if not places:
        raise error
    excess = 1 - (error.max_model_len - 1) / error.num_prompt_tokens
    to_drop = excess * sum(map(_num_chars, messages))
    dropped, left_out = 0, set[int]()
    for place in places:
        # The result of a tool does not stay without the call before it.
        if left_out and dropped >= to_drop and messages[place]["role"] != "tool":
            break
        left_out.add(place)
        dropped += _num_chars(messages[place])
    return [one for place, one in enumerate(messages) if place not in left_out]


def _num_chars(message: Message) -> int:
    return len(message["content"] or "") + 1
