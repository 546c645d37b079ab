"""Input of a response: a text or items, and the chat messages that they become."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from triolet.protocol.structuring import CONVERTER, Wrong

Message = dict[str, Any]
"""One message of a chat, as `Engine.generate` and chat templates take it."""

_TEXT_PARTS = ("input_text", "output_text", "text", "refusal")
_ROLES = ("user", "assistant", "system", "developer")


@attrs.frozen(kw_only=True)
class ContentPart:
    """Content part of a message.

    Args:
        type: `input_text`, `output_text`, `text` or `refusal`; other types are refused.
        text: of those; a refusal has it under `refusal`.
    """

    type: str
    text: str = ""

    @classmethod
    def of(cls, value: Any, _: Any = None) -> ContentPart:
        """Structure one part."""
        if not isinstance(value, dict):
            raise Wrong("an object", value)
        kind = value.get("type")
        if kind not in _TEXT_PARTS:
            raise Wrong("a part of type input_text, output_text or text", kind)
        text = value.get("refusal" if kind == "refusal" else "text")
        if type(text) is not str:
            raise Wrong("a part with a text", text)
        return cls(type=kind, text=text)


@attrs.frozen
class Content:
    """Content of a message, its parts joined."""

    text: str

    @classmethod
    def of(cls, value: Any, _: Any = None) -> Content:
        """Structure a text or a list of parts."""
        if isinstance(value, str):
            return cls(value)
        if not isinstance(value, list):
            raise Wrong("a string or a list of parts", value)
        parts = CONVERTER.structure(value, tuple[ContentPart, ...])
        return cls("\n".join(part.text for part in parts))


@attrs.frozen(kw_only=True)
class MessageItem:
    """A message."""

    role: str = attrs.field()
    content: Content

    @role.validator
    def _check_role(self, _: object, value: str) -> None:
        if value not in _ROLES:
            raise Wrong("one of " + ", ".join(_ROLES), value, at="role")

    def messages(self) -> list[Message]:
        """Return the chat messages; templates know no developer role."""
        return [{"role": "system" if self.role == "developer" else self.role, "content": self.content.text}]


@attrs.frozen(kw_only=True)
class FunctionCall:
    """Tool call of an earlier response."""

    call_id: str
    name: str
    arguments: str

    def messages(self) -> list[Message]:
        function = {"name": self.name, "arguments": self.arguments}
        call = {"id": self.call_id, "type": "function", "function": function}
        return [{"role": "assistant", "content": None, "tool_calls": [call]}]


@attrs.frozen(kw_only=True)
class FunctionCallOutput:
    """Output of a tool call."""

    call_id: str
    output: Content

    def messages(self) -> list[Message]:
        """As a message of a chat."""
        return [{"role": "tool", "tool_call_id": self.call_id, "content": self.output.text}]


@attrs.frozen(kw_only=True)
class Reasoning:
    """Reasoning of an earlier response; like templates, it is left out of the next turn."""

    def messages(self) -> list[Message]:
        return []


Item = MessageItem | FunctionCall | FunctionCallOutput | Reasoning

_ITEM_KINDS: Mapping[str, type[Item]] = {
    "message": MessageItem,
    "function_call": FunctionCall,
    "function_call_output": FunctionCallOutput,
    "reasoning": Reasoning,
}


def _item(value: Any, _: Any) -> Item:
    if not isinstance(value, dict):
        raise Wrong("an object", value)
    kind = value.get("type") or "message"
    if not isinstance(kind, str) or kind not in _ITEM_KINDS:
        raise Wrong("an item of type " + ", ".join(_ITEM_KINDS), kind, code="unsupported_parameter")
    item: Item = CONVERTER.structure(value, _ITEM_KINDS[kind])
    return item


@attrs.frozen
class Input:
    """Input of one turn."""

    items: tuple[Item, ...]

    @classmethod
    def of(cls, value: Any, _: Any = None) -> Input:
        """Structure a text, which is one message of the user, or a list of items."""
        if isinstance(value, str):
            return cls((MessageItem(role="user", content=Content(value)),))
        if not isinstance(value, list):
            raise Wrong("a string or a list of items", value)
        return cls(CONVERTER.structure(value, tuple[Item, ...]))

    def messages(self) -> tuple[Message, ...]:
        """Return the chat messages; calls made together are one message."""
        messages: list[Message] = []
        for message in (message for item in self.items for message in item.messages()):
            if "tool_calls" in message and messages and messages[-1]["role"] == "assistant":
                last = messages[-1]
                messages[-1] = {**last, "tool_calls": [*last.get("tool_calls", []), *message["tool_calls"]]}
            else:
                messages.append(message)
        return tuple(messages)

    @property
    def is_of_user(self) -> bool:
        """True if the input is user messages only, at least one."""
        return bool(self.items) and all(
            isinstance(item, MessageItem) and item.role == "user" for item in self.items
        )


CONVERTER.register_structure_hook(ContentPart, ContentPart.of)
CONVERTER.register_structure_hook(Content, Content.of)
CONVERTER.register_structure_hook(Input, Input.of)
CONVERTER.register_structure_hook_func(lambda kind: kind == Item, _item)
