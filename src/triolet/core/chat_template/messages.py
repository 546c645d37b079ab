"""Checks and plain-JSON copies of messages and other values that a caller passes to a chat template.

Templates get copies for two reasons: they can call methods of every object that they see, and those of plain data are
harmless; and the caller's objects are never changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from triolet.core.json_text import giving_way
from triolet.errors import ChatTemplateError, InvalidPrompt

Message = dict[str, Any]
"""One message as a template sees it: `role`, `content`, and all other fields of the caller's message."""

MAX_NESTING = 64
"""Deepest nesting of lists and mappings; the schema of a tool reaches perhaps 20."""

_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


def plain_messages(messages: object) -> list[Message]:
    """Check the messages of a chat and copy them.

    Args:
        messages: a non-empty list of mappings with `role` (a string) and `content`: a string, a list of
            `{"type": "text", "text": ...}` parts, or, beside `tool_calls`, None or nothing.

    Returns:
        The messages, without fields that are None and without empty `tool_calls`, reasoning under all its names. A
        content that is not there is an empty string.

    Raises:
        InvalidPrompt: names the message by its place, the field and the rule.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise _wrong("messages", "a list of messages", messages)
    if not messages:
        raise InvalidPrompt("messages cannot be empty", field="messages", got=messages)
    return [
        _plain_message(message, f"messages[{place}]") for place, message in enumerate(giving_way(messages))
    ]


def plain_tools(tools: object) -> list[Any] | None:
    """Check and copy the descriptions of tools, a list of mappings, or None."""
    if tools is None:
        return None
    copied = plain_data(tools, "tools")
    if not isinstance(copied, list) or not all(isinstance(tool, dict) for tool in copied):
        raise _wrong("tools", "a list of mappings", tools)
    return copied


def plain_data(value: object, field: str, *, nesting: int = 0) -> Any:
    """Copy data that JSON could hold; str, int and float lose their subclasses.

    Raises:
        InvalidPrompt: the data hold something else, or are nested more than `MAX_NESTING` deep.
    """
    if value is None or isinstance(value, bool):
        return value
    # A subclass could run code of the caller's amid the template.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if nesting > MAX_NESTING:
        raise InvalidPrompt(f"{field} must be nested no deeper than {MAX_NESTING} levels", field=field)
    if isinstance(value, Mapping):
        return {
            _plain_key(key, field): plain_data(value[key], f"{field}.{key}", nesting=nesting + 1)
            for key in giving_way(value)
        }
    if isinstance(value, list | tuple):
        return [
            plain_data(item, f"{field}[{i}]", nesting=nesting + 1) for i, item in enumerate(giving_way(value))
        ]
    raise _wrong(field, "plain data (text, numbers, lists, mappings)", value)


def _plain_message(message: object, field: str) -> Message:
    if not isinstance(message, Mapping):
        raise _wrong(field, "a mapping", message)
    copied: Message = plain_data(message, field)
    # As transformers does: templates ask whether a field is there, and would write "None".
    copied = {name: value for name, value in copied.items() if value is not None}
    if not isinstance(copied.get("role"), str) or not copied["role"]:
        raise _wrong(f"{field}.role", "a non-empty string", copied.get("role"))
    calls = copied.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise _wrong(f"{field}.tool_calls", "a list of mappings", calls)
    if not calls:
        copied.pop("tool_calls", None)
    else:
        # Beside calls as in vLLM: some templates add it to a text without asking.
        copied.setdefault("content", "")
    _check_content(copied.get("content"), f"{field}.content")
    return _with_all_reasoning_names(copied)


def _check_content(content: object, field: str) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise _wrong(field, "a string or a list of text parts", content)
    for place, part in enumerate(content):
        _check_part(part, f"{field}[{place}]")


def _check_part(part: object, field: str) -> None:
    if not isinstance(part, dict):
        raise _wrong(field, "a mapping", part)
    if part.get("type") != "text":
        got = part.get("type")
        raise InvalidPrompt(f"{field}.type must be 'text'; got {got!r}", field=f"{field}.type", got=got)
    text = part.get("text")
    if not isinstance(text, str):
        raise _wrong(f"{field}.text", "a string", text)


def _with_all_reasoning_names(message: Message) -> Message:
    """Put an earlier answer's reasoning under every name that templates read it by, as transformers does."""
    reasoning = next((message[name] for name in _REASONING_NAMES if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain_key(key: object, field: str) -> str:
    if not isinstance(key, str):
        raise InvalidPrompt(f"{field} must have strings as keys; got {type(key).__name__}", field=field)
    return str.__str__(key)


def _wrong(field: str, rule: str, got: object) -> InvalidPrompt:
    return InvalidPrompt(f"{field} must be {rule}; got {type(got).__name__}", field=field, got=got)


# A prompt may continue the last message of a chat: the text ends where that message ends. A template writes
# text of its own after a message. So the last message is rendered with a mark at its end, and the text is cut
# at the mark. The result equals that of transformers' `continue_final_message`, spaces included.
_MARK = "<here the last message goes on> "  # whether its space is left shows whether a template keeps such


def marked(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the mark appended to the last one.

    Raises:
        InvalidPrompt: that one has no text.
    """
    *before, last = messages
    content = last["content"]
    if content == [] or (not content and "tool_calls" in last):
        raise InvalidPrompt(
            "the last message must have a text, which continue_final_message goes on with", field="messages"
        )
    if isinstance(content, str):
        return [*before, {**last, "content": content + _MARK}]
    *first, end = content
    return [*before, {**last, "content": [*first, {**end, "text": end["text"] + _MARK}]}]


def cut(text: str, last: Message) -> str:
    """Return the rendered text of marked messages up to the mark.

    Args:
        text: what the template made of them.
        last: the last message, as it was.
    Raises:
        ChatTemplateError: the template does not show it, or not as it is.
    """
    mark, content = _MARK.strip(), last["content"]
    said = content if isinstance(content, str) else content[-1]["text"]
    if said.strip() not in text or mark not in text:
        raise ChatTemplateError(
            "the chat template changes the last message, so that it cannot be continued",
            field="continue_final_message",
        )
    end = text.rindex(mark)
    return text[:end] if text.startswith(_MARK, end) else text[:end].rstrip()
