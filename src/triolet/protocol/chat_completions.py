"""`/v1/chat/completions`: its body, and the objects that answer it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from triolet.core.output.logprobs import Logprob
from triolet.core.output.outputs import CompletionOutput
from triolet.core.request.param_spec import ApiFamily
from triolet.core.request.params import SamplingParams
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
from triolet.protocol.errors import missing, wrong
from triolet.protocol.generation import GenerationRequest, finish_reason, finite, likeliest
from triolet.protocol.responses.input_items import Message
from triolet.protocol.structuring import CONVERTER, Wrong
from triolet.protocol.tools import OffersTools

MAX_MESSAGES = 65_536  # of four tokens each they fill the longest contexts there are
ROLES = ("system", "developer", "user", "assistant", "tool")

Piece = dict[str, Any]
"""An entry of `choices`, of a chunk or of a whole answer."""


@attrs.frozen
class ChatMessages:
    """The messages of a chat; their contents are the chat template's business, their roles are not."""

    messages: tuple[Message, ...]

    @classmethod
    def of(cls, value: Any, _: Any = None) -> ChatMessages:
        """Structure them."""
        if not isinstance(value, list) or not value:
            raise Wrong("a list of at least one message", value)
        if len(value) > MAX_MESSAGES:
            raise wrong("messages", f"at most {MAX_MESSAGES} messages", len(value))
        for place, message in enumerate(value):
            if not isinstance(message, dict):
                raise wrong(f"messages[{place}]", "an object", message)
            if message.get("role") not in ROLES:
                raise wrong(f"messages[{place}].role", "one of " + ", ".join(ROLES), message.get("role"))
            if message.get("content") is None and not message.get("tool_calls"):
                raise missing(f"messages[{place}].content")
        return cls(tuple(map(_known_to_templates, value)))


def _known_to_templates(message: Message) -> Message:
    """Templates know no developer."""
    return {**message, "role": "system"} if message["role"] == "developer" else message


@attrs.frozen(kw_only=True)
class ChatRequest(OffersTools, GenerationRequest):
    """A body of `/v1/chat/completions`.

    Args:
        messages: the chat so far.
        max_completion_tokens: what `max_tokens` is called now.
        logprobs: log-probabilities of the tokens.
        tools: functions that the model may call.
        tool_choice: whether and which it has to.
        reasoning_effort: a hint; models here know at most whether.
        chat_template_kwargs: further values for the chat template.
        add_generation_prompt: whether the answer is a new message of the assistant.
        continue_final_message: whether it goes on with the last message; not beside `add_generation_prompt`.
        add_special_tokens: add the special tokens of the tokenizer to those of the chat template.
        include_reasoning: send the reasoning of the model with the answer.
    """

    FAMILY = ApiFamily.CHAT

    messages: ChatMessages
    max_completion_tokens: int | None = None
    logprobs: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    chat_template_kwargs: Mapping[str, Any] = attrs.field(factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    include_reasoning: bool = True

    def check(self) -> None:
        """See `GenerationRequest`."""
        super().check()
        if not self.logprobs and (num_top := self.sampling.get("logprobs")):
            raise wrong("top_logprobs", "left out where logprobs is false", num_top)

    def num_logprobs(self) -> int | None:
        """See `GenerationRequest`."""
        return self.sampling.get("logprobs", 0) if self.logprobs else None

    def prompt(self, plan: ToolPlan, reasoning_parser: str | None = None) -> Any:
        """What `Engine.generate` is asked with.

        Args:
            plan: see `plan`.
            reasoning_parser: as there; the templates of some models can be told not to think.
        """
        messages = list(self.messages.messages)
        values = dict(self.chat_template_kwargs)
        if reasoning_parser == "qwen3" and self.reasoning_effort == "none":
            values.setdefault("enable_thinking", False)
        return {
            "messages": messages,
            "tools": plan.template_tools,
            "chat_template_kwargs": values,
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            "add_special_tokens": self.add_special_tokens,
        }

    def params(self, defaults: SamplingParams, plan: ToolPlan) -> SamplingParams:
        """See `GenerationRequest.sampling_params`."""
        chosen: dict[str, Any] = {}
        if self.max_completion_tokens is not None:
            max_tokens = self.sampling.get("max_tokens", self.max_completion_tokens)
            if max_tokens != self.max_completion_tokens:
                raise wrong("max_tokens", "left out beside max_completion_tokens", max_tokens)
            chosen["max_tokens"] = self.max_completion_tokens
        chosen["structured_outputs"] = plan.structured_outputs
        if not plan.skip_special_tokens:
            chosen["skip_special_tokens"] = self.sampling.get("skip_special_tokens", False)
        return self.sampling_params(defaults, **chosen)

    def names(self) -> Mapping[str, str]:
        """Return the names as `GenerationRequest.names` does, with the one that the client gave `max_tokens`."""
        names = super().names()
        if self.max_completion_tokens is not None:
            names = {**names, "max_tokens": "max_completion_tokens"}
        return names


@attrs.define(eq=False, kw_only=True)
class ChatChoice:
    """One of the answers on its way: outputs of the engine in, pieces out; all pieces together are the message.

    Args:
        index: among the answers.
        parser: tells text, reasoning and calls of tools apart.
        num_top: likeliest tokens at each place; None for no log-probabilities.
        new_id: names calls.
        includes_reasoning: False leaves the reasoning out.
        num_reasoning_tokens: of the outputs that brought reasoning, so far.
    """

    index: int
    parser: AnswerParser
    num_top: int | None
    new_id: Callable[[str], str]
    includes_reasoning: bool = True
    num_reasoning_tokens: int = attrs.field(default=0, init=False)
    _text: list[str] = attrs.field(factory=list, init=False)
    _reasoning: list[str] = attrs.field(factory=list, init=False)
    _calls: list[dict[str, Any]] = attrs.field(factory=list, init=False)
    _logprobs: list[dict[str, Any]] = attrs.field(factory=list, init=False)
    _sent_logprobs: int = attrs.field(default=0, init=False)
    _ending: tuple[str, str | int | None] | None = attrs.field(default=None, init=False)

    def begin(self) -> Piece:
        """Its first piece."""
        return self._piece({"role": "assistant", "content": ""})

    def add(self, completion: CompletionOutput) -> list[Piece]:
        """The engine has something new: of kind DELTA, or all at once.

        Raises:
            WireError: it could not be finished.
        """
        is_last = completion.finish_reason is not None
        if self.num_top is not None and completion.logprobs is not None:
            pairs = zip(completion.token_ids, completion.logprobs, strict=True)
            self._logprobs += [position(token_id, at, self.num_top) for token_id, at in pairs]
        events = self.parser.feed(completion.text)
        if any(isinstance(event, ReasoningPiece) for event in events):
            self.num_reasoning_tokens += len(completion.token_ids)
        deltas = [self._delta(event) for event in (*events, *(self.parser.finish() if is_last else ()))]
        pieces = [self._piece(delta) for delta in deltas if delta]
        if is_last:
            reason, detail = finish_reason(completion)
            self._ending = ("tool_calls" if self._calls and reason == "stop" else reason, detail)
            pieces.append(self._piece({}))
        if pieces and self.num_top is not None:
            pieces[0]["logprobs"] = {"content": self._logprobs[self._sent_logprobs :]}
            self._sent_logprobs = len(self._logprobs)
        return pieces

    def whole(self) -> Piece:
        """All of it, once it is over."""
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if self._calls and not self._text else "".join(self._text),
            "refusal": None,
        }
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = self._calls
        reason, detail = self._ending or (None, None)
        return {
            "index": self.index,
            "message": message,
            "logprobs": None if self.num_top is None else {"content": self._logprobs},
            "finish_reason": reason,
            "stop_reason": detail,
        }

    def _delta(self, event: AnswerEvent) -> dict[str, Any] | None:
        match event:
            case TextPiece(text=text):
                self._text.append(text)
                return {"content": text}
            case ReasoningPiece() if not self.includes_reasoning:
                return None
            case ReasoningPiece(text=text):
                self._reasoning.append(text)
                return {"reasoning_content": text}
            case ToolCallBegin(index=index, name=name):
                call = {"id": self.new_id("call"), "type": "function"}
                self._calls.append({**call, "function": {"name": name, "arguments": ""}})
                return {"tool_calls": [{"index": index, **call, "function": {"name": name, "arguments": ""}}]}
            case ToolCallArguments(index=index, text=text):
                self._calls[-1]["function"]["arguments"] += text
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
            case ToolCallEnd():
                return None

    def _piece(self, delta: dict[str, Any]) -> Piece:
        reason, detail = self._ending or (None, None)
        piece: Piece = {
            "index": self.index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": None if delta else reason,
        }
        if not delta:
            piece["stop_reason"] = detail
        return piece


def position(token_id: int, logprobs: Mapping[int, Logprob], num_top: int) -> dict[str, Any]:
    """One token's log-probability, and those of the likeliest at its place."""
    return {**_token(logprobs[token_id]), "top_logprobs": list(map(_token, likeliest(logprobs, num_top)))}


def _token(one: Logprob) -> dict[str, Any]:
    text = one.decoded_token or ""
    return {"token": text, "bytes": list(text.encode(errors="replace")), "logprob": finite(one.logprob)}


def chat_completion(
    *, answer_id: str, created: int, model: str, choices: list[Piece], usage: Mapping[str, Any]
) -> dict[str, Any]:
    """The whole answer."""
    return {
        "id": answer_id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": dict(usage),
        "service_tier": None,
        "system_fingerprint": None,
    }


def chat_chunk(
    *,
    answer_id: str,
    created: int,
    model: str,
    choices: list[Piece],
    usage: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """One chunk of a stream; `usage` is that of the last one, if it was asked for."""
    chunk = {
        "id": answer_id,
        "object": "chat.completion.chunk",
        "created": created,
        "model": model,
        "choices": choices,
    }
    return chunk if usage is None else {**chunk, "usage": dict(usage)}


CONVERTER.register_structure_hook(ChatMessages, ChatMessages.of)
CONVERTER.register_structure_hook_func(
    lambda kind: kind == str | Mapping[str, Any] | None,
    lambda value, _: _tool_choice(value),
)


def _tool_choice(value: Any) -> str | Mapping[str, Any] | None:
    if value is not None and not isinstance(value, str | dict):
        raise Wrong("a string or an object", value)
    return value
