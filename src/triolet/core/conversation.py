"""A chat as a prompt, with the tools that its model may call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from triolet.errors import InvalidPrompt, shown

FLAGS = ("add_generation_prompt", "continue_final_message")
FIELDS = ("messages", "tools", "chat_template", "chat_template_kwargs", *FLAGS)


@attrs.frozen(kw_only=True)
class Conversation:
    """What a chat template is given; it checks and copies all of it.

    Args:
        messages: of the chat.
        tools: descriptions of tools, as the template expects them; None for none.
        chat_template: another template than the model's own, in Jinja.
        chat_template_kwargs: further values for the template, by name; only such as it reads.
        add_generation_prompt: end with what an answer begins with.
        continue_final_message: end with the last message, as if it were not over; not beside the one before.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = attrs.field(factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @classmethod
    def parse(cls, prompt: Mapping[str, Any]) -> Conversation:
        """From `{"messages": [...], "tools": [...], "chat_template_kwargs": {...}}` and what else there may be.

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
        if taken := {"tools", *FLAGS} & set(values):
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
        given = {name: value for name, value in prompt.items() if value is not None}
        found = cls(**{**given, "chat_template_kwargs": values})
        found._check_ending()
        if not isinstance(found.chat_template, str | None):
            raise InvalidPrompt(
                f"chat_template must be a text; got {shown(found.chat_template)}",
                field="chat_template",
                got=found.chat_template,
            )
        return found

    def _check_ending(self) -> None:
        for name in FLAGS:
            if not isinstance(value := getattr(self, name), bool):
                raise InvalidPrompt(
                    f"{name} must be true or false; got {shown(value)}", field=name, got=value
                )
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidPrompt(
                "continue_final_message must be false where add_generation_prompt is true",
                field="continue_final_message",
                got=True,
            )
