"""Forms of contents and arguments that a chat template takes, found by rendering short chats.

A template does not say them. Most write a content as it is; some loop over its parts, of which a few know nothing else.
Most turn the arguments of a call into JSON; some add them to a text, and so must get JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from triolet.core import json_text
from triolet.core.chat_template.messages import Message, plain_data
from triolet.errors import ChatTemplateError, InvalidPrompt

Render = Callable[[Sequence[Message]], str]
"""Renders a short chat; raises `ChatTemplateError`."""

# Longest arguments of a call that are parsed, characters.
MAX_PARSED_CHARS: Final = 2**18

_ENCODER: Final = json.JSONEncoder(ensure_ascii=False)

_FIRST, _SECOND, _UNREAD = "first-mark", "second-mark", "unread-mark"
_PARTS: Final = [
    {"type": "text", "text": _FIRST, "unread": _UNREAD},
    {"type": "text", "text": _SECOND, "unread": _UNREAD},
]
_HELLO: Final = {"role": "user", "content": "Hello!"}


def _call(arguments: object) -> Message:
    # Templates of Mistral's models want ids of this length.
    call = {"id": "abcdef123", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


class TemplateForms:
    """Forms that one template takes; each is tried when a chat first needs it, and kept.

    Args:
        render: renders a chat with the template.
        may_read_parts: False if the template cannot take parts: its source does not name their `text`.
    """

    def __init__(self, render: Render, *, may_read_parts: bool) -> None:
        self._render = render
        self._may_read_parts = may_read_parts
        self._known: dict[object, bool] = {}

    def applied(self, messages: Sequence[Message]) -> list[Message]:
        """Return checked messages in these forms."""
        return [self._applied(message) for message in messages]

    def _applied(self, message: Message) -> Message:
        known = {**message, "content": self._content(message["role"], message["content"])}
        if "tool_calls" in message:
            known["tool_calls"] = [_with_arguments(call, self._arguments) for call in message["tool_calls"]]
            if known["content"] and "thinking" in known and not self._takes_both():
                return _as_reasoning(known)
        return known

    def _content(self, role: str, content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        if isinstance(content, str):
            if self._may_read_parts and not self._takes_text(role) and self._takes_parts(role):
                return [{"type": "text", "text": content}]
            return content
        if self._may_read_parts and self._takes_parts(role):
            return content
        return "\n".join(part["text"] for part in content)

    def _arguments(self, arguments: object) -> object:
        arguments = parsed_arguments(arguments)
        if isinstance(arguments, str) or self._takes_mappings():
            return arguments
        return json_text.encode(_ENCODER, arguments)

    def _takes_text(self, role: str) -> bool:
        return self._is_known((role, "text"), lambda: self._writes(_chat_of(role, _FIRST), [_FIRST]))

    def _takes_parts(self, role: str) -> bool:
        # Both, since some templates read the first part of a system message alone. A template that writes the
        # parts as data shows the member that none reads.
        return self._is_known(
            (role, "parts"), lambda: self._writes(_chat_of(role, _PARTS), [_FIRST, _SECOND], _UNREAD)
        )

    def _takes_both(self) -> bool:
        return self._is_known("text and reasoning", self._try_both)

    def _try_both(self) -> bool:
        text = {**_call({}), "content": _FIRST}
        both = {**text, "thinking": _SECOND, "reasoning_content": _SECOND}
        return self._writes([_HELLO, both], []) or not self._writes([_HELLO, text], [])

    def _takes_mappings(self) -> bool:
        return self._is_known("mappings", self._try_mappings)

    def _try_mappings(self) -> bool:
        arguments = {"city": _FIRST}
        takes_mapping = self._writes([_HELLO, _call(arguments)], [_FIRST], str(arguments))
        return takes_mapping or not self._writes([_HELLO, _call(json.dumps(arguments))], [_FIRST])

    def _is_known(self, form: object, find: Callable[[], bool]) -> bool:
        # Threads that render at once may find it twice, and find the same.
        if form not in self._known:
            self._known[form] = find()
        return self._known[form]

    def _writes(self, chat: Sequence[Message] | None, wanted: Sequence[str], unwanted: str = "\0") -> bool:
        """Return True if the text of a chat holds all these words, and not that one."""
        if chat is None:
            return False
        try:
            text = self._render(chat)
        except ChatTemplateError:
            return False
        return all(word in text for word in wanted) and unwanted not in text


def _chat_of(role: str, content: object) -> list[Message] | None:
    """Return a short chat with a message of this role and content; None for a role that is not known."""
    before: dict[str, list[Message]] = {
        "user": [],
        "system": [],
        "assistant": [_HELLO],
        "tool": [_HELLO, _call({})],
    }
    if role not in before:
        return None
    message = {"role": role, "content": content}
    if role == "tool":
        message |= {"tool_call_id": "abcdef123", "name": "weather"}
    return [*before[role], message, *([_HELLO] if role == "system" else [])]


def _as_reasoning(message: Message) -> Message:
    """Return a message whose text is the end of its reasoning: the template of gpt-oss refuses both beside calls."""
    content = message["content"]
    said = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
    reasoning = f"{message['thinking']}\n{said}"
    return {**message, "content": "", "thinking": reasoning, "reasoning_content": reasoning}


def with_parsed_arguments(messages: Sequence[Any]) -> list[Any]:
    """Return messages in which the arguments of calls are mappings, where they were the JSON of one.

    Messages that are not what they must be are left for `plain_messages` to refuse.
    """
    return [
        {**message, "tool_calls": [_with_arguments(call, parsed_arguments) for call in message["tool_calls"]]}
        if isinstance(message, Mapping) and isinstance(message.get("tool_calls"), list | tuple)
        else message
        for message in messages
    ]


def parsed_arguments(arguments: object) -> object:
    """Return the mapping that the JSON of arguments stands for; other values unchanged, nothing as an empty one.

    JSON of more than `MAX_PARSED_CHARS` is a value like any other.
    """
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str) or len(arguments) > MAX_PARSED_CHARS:
        return arguments
    try:
        parsed = plain_data(json_text.loads(arguments), "arguments")
    # A model may have written it, so that a chat must be able to go on.
    except (ValueError, RecursionError, InvalidPrompt):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _with_arguments(call: Any, convert: Callable[[object], object]) -> Any:
    """Return a call with its arguments converted; its function may stand beside the type."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    known = {**function, "arguments": convert(function.get("arguments"))}
    return known if function is call else {**call, "function": known}
