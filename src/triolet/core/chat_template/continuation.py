"""A chat whose last message goes on: its text ends where that message has got to.

What a template writes behind a message depends on the template. So the message is rendered with a mark at its end, and
the text is cut before the mark. The result is that of transformers' `continue_final_message`, spaces included.
"""

from __future__ import annotations

from collections.abc import Sequence

from triolet.core.chat_template.messages import Message
from triolet.errors import ChatTemplateError, InvalidPrompt

_MARK = "<here the last message goes on> "  # whether its space is left shows whether a template keeps such


def marked(messages: Sequence[Message]) -> list[Message]:
    """The messages, with the mark at the end of the last one.

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
    """The text of the marked messages up to the mark.

    Args:
        text: what the template made of them.
        last: the last message, as it was.
    Raises:
        ChatTemplateError: the template does not show it, or not as it is.
    """
    mark = _MARK.strip()
    if last["content"].strip() not in text or mark not in text:
        raise ChatTemplateError(
            "the chat template changes the last message, so that it can not be continued",
            field="continue_final_message",
        )
    end = text.rindex(mark)
    return text[:end] if text.startswith(_MARK, end) else text[:end].rstrip()
