"""Prompts that continue the last message of a chat: the text ends where that message ends.

A template writes text of its own after a message. So the last message is rendered with a mark at its end, and the text
is cut at the mark. The result equals that of transformers' `continue_final_message`, spaces included.
"""

from __future__ import annotations

from collections.abc import Sequence

from triolet.core.chat_template.messages import Message
from triolet.errors import ChatTemplateError, InvalidPrompt

_MARK = "<here the last message goes on> "  # whether its space is left shows whether a template keeps such


def marked(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the mark appended to the last one.

    Raises:
        InvalidPrompt: that one has no text.
    """
    *before, last = messages
    if not isinstance(last.get("content"), str):
        raise InvalidPrompt(
            "the last message must have a text, which continue_final_message goes on with", field="messages"
        )
    return [*before, {**last, "content": last["content"] + _MARK}]


def cut(text: str, last: Message) -> str:
    """Return the rendered text of marked messages up to the mark.

    Args:
        text: what the template made of them.
        last: the last message, as it was.
    Raises:
        ChatTemplateError: the template does not show it, or not as it is.
    """
    mark = _MARK.strip()
    if last["content"].strip() not in text or mark not in text:
        raise ChatTemplateError(
            "the chat template changes the last message, so that it cannot be continued",
            field="continue_final_message",
        )
    end = text.rindex(mark)
    return text[:end] if text.startswith(_MARK, end) else text[:end].rstrip()
