"""Items of a response: those of its input become chat messages; those of its output grow from the deltas of the model.

At most one item is open, the last one. Text, reasoning and calls follow each other as the model produces them: content
of another kind closes the open item.
The history of a response keeps its deltas: enough to make the same events again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs

from triolet.core.json_text import giving_way
from triolet.core.output.outputs import CompletionOutput, Logprob, RequestOutput
from triolet.core.request.request import FinishReason
from triolet.core.tools import (
    AnswerEvent,
    AnswerParser,
    ReasoningPiece,
    TextPiece,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
    ToolPlan,
)
from triolet.protocol.errors import WireError, wrong
from triolet.protocol.json.structuring import CONVERTER, Wrong
from triolet.protocol.responses.output_items import (
    CallOutput,
    Event,
    Logprobs,
    MessageOutput,
    OutputItem,
    ReasoningOutput,
    messages_of,
)

Message = dict[str, Any]
"""One message of a chat, as `Engine.generate` and chat templates take it."""

# Each turn passes over all messages of its chat several times, in the event loop.
MAX_CHAT_MESSAGES: Final = 16_384
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal")
_ROLES = ("user", "assistant", "system", "developer")


@attrs.frozen(kw_only=True)
class ContentPart:
    """Content part of a message."""

    type: str  # `input_text`, `output_text`, `text` or `refusal`; other types are refused
    text: str = ""  # a refusal has it under `refusal`

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


@attrs.frozen(kw_only=True)
class ItemReference:
    """Reference to an item of a stored response; `store.with_items` puts that in its place."""

    id: str

    def messages(self) -> list[Message]:
        raise AssertionError("references are looked up before a chat is made of an input")


Item = MessageItem | FunctionCall | FunctionCallOutput | Reasoning | ItemReference

_ITEM_KINDS: Mapping[str, type[Item]] = {
    "message": MessageItem,
    "function_call": FunctionCall,
    "function_call_output": FunctionCallOutput,
    "reasoning": Reasoning,
    "item_reference": ItemReference,
}


def is_reference(item: Mapping[str, Any]) -> bool:
    """Return True for an input item that only refers to a stored one, before it is structured."""
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "id" in item and item.keys() <= {"type", "id"})


def item_of(value: Any, _: Any = None) -> Item:
    """Structure one item."""
    if not isinstance(value, dict):
        raise Wrong("an object", value)
    # OpenAI lets the type of both be left out.
    kind = value.get("type") or ("item_reference" if is_reference(value) else "message")
    if not isinstance(kind, str) or kind not in _ITEM_KINDS:
        raise Wrong("an item of type " + ", ".join(_ITEM_KINDS), kind, code="unsupported_parameter")
    item: Item = CONVERTER.structure(value, _ITEM_KINDS[kind])
    return item


@attrs.frozen
class Input:
    """Input of one turn."""

    items: tuple[Item, ...]
    _messages: tuple[Message, ...] | None = attrs.field(default=None, eq=False, repr=False)

    @classmethod
    def of(cls, value: Any, _: Any = None) -> Input:
        """Structure a text, which is one message of the user, or a list of items."""
        if isinstance(value, str):
            return cls((MessageItem(role="user", content=Content(value)),))
        if not isinstance(value, list):
            raise Wrong("a string or a list of items", value)
        items = CONVERTER.structure(value, tuple[Item, ...])
        # Here, since a long input is structured in a thread.
        has_references = any(isinstance(item, ItemReference) for item in items)
        return cls(items, None if has_references else _messages_of(items))

    def messages(self) -> tuple[Message, ...]:
        """Return the chat messages; calls made together are one message."""
        return _messages_of(self.items) if self._messages is None else self._messages

    @property
    def is_of_user(self) -> bool:
        """True if the input is user messages only, at least one."""
        return bool(self.items) and all(
            isinstance(item, MessageItem) and item.role == "user" for item in self.items
        )


def _messages_of(items: Sequence[Item]) -> tuple[Message, ...]:
    messages: list[Message] = []
    for message in (message for item in giving_way(items) for message in item.messages()):
        if "tool_calls" in message and messages and messages[-1]["role"] == "assistant":
            # Each message is still its item's alone, and so is its list of calls.
            messages[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            messages.append(message)
    return tuple(messages)


def check_chat(before: Sequence[Message], new: Sequence[Message]) -> None:
    """Refuse a chat that is too long, or with the output of a tool call that it does not have.

    Args:
        before: the chat that is continued.
        new: the messages of the input.
    Raises:
        WireError: names the limit, or the id of the call.
    """
    if (num_messages := len(before) + len(new)) > MAX_CHAT_MESSAGES:
        rule = f"such that the chat has at most {MAX_CHAT_MESSAGES} messages with those before it"
        raise wrong("input", rule, num_messages)
    if all(message["role"] != "tool" for message in new):
        return
    calls = {call["id"] for message in (*before, *new) for call in message.get("tool_calls") or ()}
    for message in new:
        if message["role"] == "tool" and message["tool_call_id"] not in calls:
            call_id = message["tool_call_id"][:80]
            raise WireError(
                f"No tool call found for function call output with call_id {call_id}.",
                code="invalid_value",
                param="input",
            )


CONVERTER.register_structure_hook(ContentPart, ContentPart.of)
CONVERTER.register_structure_hook(Content, Content.of)
CONVERTER.register_structure_hook(Input, Input.of)
CONVERTER.register_structure_hook_func(lambda kind: kind == Item, item_of)


@attrs.frozen(kw_only=True)
class ResponseDelta:
    """New content of one engine output."""

    text: str  # the next characters
    num_tokens: int  # number of new tokens; their text may come with a later delta
    logprobs: Logprobs = attrs.field(factory=Logprobs)  # of these tokens, if requested

    @classmethod
    def of(cls, completion: CompletionOutput, num_top: int | None) -> ResponseDelta:
        """Return the new content of an output of kind DELTA.

        Args:
            num_top: most likely tokens to report per position, -1 for all; None for no log-probabilities.
        """
        logprobs = Logprobs()
        if completion.logprobs is not None and num_top is not None:
            logprobs = Logprobs(
                _position(token_id, entries, num_top)
                for token_id, entries in zip(completion.token_ids, completion.logprobs, strict=True)
            )
        return cls(text=completion.text, num_tokens=len(completion.token_ids), logprobs=logprobs)


@attrs.frozen(kw_only=True)
class ResponseHistory:
    """Everything that determines the events of a response."""

    pieces: tuple[ResponseDelta, ...] = ()  # deltas so far
    item_ids: tuple[str, ...] = ()  # ids of its items, in the order in which they were made
    output: RequestOutput | None = None  # the last one; only what is not in the pieces counts
    finish_reason: FinishReason | None = None  # why it ended, if it has
    completed_at: int = 0  # when that was, seconds since the epoch

    @property
    def num_chars(self) -> int:
        return sum(len(piece.text) for piece in self.pieces)

    @property
    def num_tokens(self) -> int:
        """Total over all pieces, tokens."""
        return sum(piece.num_tokens for piece in self.pieces)


def _position(token_id: int, logprobs: dict[int, Logprob], num_top: int) -> dict[str, Any]:
    """Return the log-probability of a token and of the likeliest tokens at its position."""
    falling = sorted(logprobs.values(), key=lambda one: -one.logprob)
    top = falling if num_top == -1 else falling[:num_top]
    return {**_token(logprobs[token_id]), "top_logprobs": list(map(_token, top))}


def _token(one: Logprob) -> dict[str, Any]:
    text = one.decoded_token or ""
    return {
        "token": text,
        "bytes": list(text.encode(errors="replace")),
        "logprob": max(one.logprob, -9999.0),  # JSON has no infinity; OpenAI's word for "impossible"
    }


NewId = Callable[[str], str]
"""Makes an id with a prefix, such as `msg`."""


@attrs.define(eq=False)
class ResponseItems:
    """Output items of one response; see the module."""

    _new_id: NewId  # makes item ids
    _plan: ToolPlan  # how the answer is parsed
    # Tokens of the deltas that contain reasoning.
    num_reasoning_tokens: int = attrs.field(default=0, init=False)
    items: list[OutputItem] = attrs.field(factory=list, init=False)
    _statuses: list[str] = attrs.field(factory=list, init=False)  # of those that are closed
    _open: OutputItem | None = attrs.field(default=None, init=False)
    _parser: AnswerParser | None = attrs.field(default=None, init=False)
    _late_logprobs: Logprobs = attrs.field(factory=Logprobs, init=False)

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the items, in the order in which they were made."""
        return tuple(item_id for item in self.items for item_id in item.ids)

    def snapshot(self) -> list[dict[str, Any]]:
        """Return the items of the response object."""
        statuses = [*self._statuses, "in_progress"]
        return [item.item(status) for item, status in zip(self.items, statuses, strict=False)]

    def messages(self) -> list[Message]:
        """Return the items as chat messages."""
        return messages_of(self.items)

    def add(self, new: ResponseDelta, prompt: str | None, *, is_last: bool) -> list[Event]:
        """Add a delta; return its events.

        Args:
            prompt: the prompt; reasoning may begin there.
            is_last: whether nothing follows.
        """
        if self._parser is None:
            self._parser = self._plan.parser(prompt)
        self._late_logprobs.add(new.logprobs)
        events: list[Event] = []
        pieces = [*self._parser.feed(new.text), *(self._parser.finish() if is_last else ())]
        if any(isinstance(piece, ReasoningPiece) for piece in pieces):
            self.num_reasoning_tokens += new.num_tokens
        for piece in pieces:
            events += self._piece(piece)
        ends_in_call = bool(self.items) and isinstance(self.items[-1], CallOutput)
        if is_last and self._late_logprobs and not ends_in_call:
            events += self._text("")  # of tokens without a text of their own, such as the one that ended it
        return events

    def end(self, status: str, *, is_whole: bool) -> list[Event]:
        """Close the open item; return its events.

        Args:
            status: of the open item: `completed` or `incomplete`.
            is_whole: whether the model has finished: then an empty answer gets an empty message.
        """
        events = self._text("") if is_whole and not self.items else []
        return events + self._closed(status)

    def _piece(self, piece: AnswerEvent) -> list[Event]:
        match piece:
            case TextPiece(text=text):
                return self._text(text)
            case ReasoningPiece(text=text):
                events: list[Event] = []
                if not isinstance(self._open, ReasoningOutput):
                    events += self._opened(ReasoningOutput(self._new_id("rs"), len(self.items)))
                assert isinstance(self._open, ReasoningOutput)
                return events + self._open.add(text)
            case ToolCallBegin(name=name):
                call_id = self._new_id("call")
                return self._opened(CallOutput(self._new_id("fc"), len(self.items), call_id, name))
            case ToolCallArguments(text=text):
                assert isinstance(self._open, CallOutput), "arguments come between a call's begin and its end"
                return self._open.add(text)
            case ToolCallEnd(is_valid=is_valid):
                return self._closed("completed" if is_valid else "incomplete")

    def _text(self, text: str) -> list[Event]:
        events: list[Event] = []
        if not isinstance(self._open, MessageOutput):
            events += self._opened(MessageOutput(self._new_id("msg"), len(self.items)))
        assert isinstance(self._open, MessageOutput)
        logprobs, self._late_logprobs = self._late_logprobs, Logprobs()
        return events + self._open.add(text, logprobs)

    def _opened(self, item: OutputItem) -> list[Event]:
        events = self._closed("completed")
        self.items.append(item)
        self._open = item
        return events + item.begin()

    def _closed(self, status: str) -> list[Event]:
        if self._open is None:
            return []
        item, self._open = self._open, None
        self._statuses.append(status)
        return item.end(status)
