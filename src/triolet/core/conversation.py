"""A chat as a prompt, with the tools that its model may call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from triolet.errors import InvalidPrompt, shown

FIELDS = ("messages", "tools", "chat_template_kwargs")


@attrs.frozen(kw_only=True)
class Conversation:
    """What a chat template is given; it checks and copies all of it.

    Args:
        messages: of the chat.
        tools: descriptions of tools, as the template expects them; None for none.
        chat_template_kwargs: further values for the template, by name; only such as it reads.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] = attrs.field(factory=dict)

    @classmethod
    def parse(cls, prompt: Mapping[str, Any]) -> Conversation:
        """From `{"messages": [...], "tools": [...], "chat_template_kwargs": {...}}`.

        Raises:
            InvalidPrompt: another key, or a value that no template could be given.
        """
        if unknown := [key for key in prompt if key not in FIELDS]:
            raise InvalidPrompt(
                f"prompt must have no fields but {', '.join(FIELDS)}; got {shown(unknown[0])}",
                field="prompt",
                got=unknown[0],
            )
        values = prompt.get("chat_template_kwargs") or {}
        if taken := {"tools", "add_generation_prompt"} & set(values):
            raise InvalidPrompt(
                f"chat_template_kwargs must not hold {taken.pop()!r}, which has a place of its own",
                field="chat_template_kwargs",
            )
        if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
            raise InvalidPrompt(
                f"chat_template_kwargs must be a mapping with texts as keys; got {shown(values)}",
                field="chat_template_kwargs",
                got=values,
            )
        return cls(messages=prompt["messages"], tools=prompt.get("tools"), chat_template_kwargs=values)
